"""A graph for each layer and padded number of tokens, so that a layer is one launch whatever rows a step has.

Addresses never change, so a graph holds through drops and restores: a layer that is not resident is not run. Its memory
is the card's own, outside of the page pool. A graph reads a step's rows where ``staging`` puts them, so all graphs go
when the staging moves. All of them run on one stream, one after the other, as they share cuBLAS's workspace. Their
number is bounded; what has none is launched.

Not here: which steps may be run so (``rows.bucket_of``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from jettison.device.cuda.card import Card, Graph

logger = logging.getLogger(__name__)

MOST_A_LAYER = 64
"""Graphs, of any layer. ``rows.BUCKETS`` are fewer: a size has a second graph where its stage begins at another layer
after a drop and, with kernels that choose tiles by the longest chunk, for each tile."""


class GraphKey(NamedTuple):
    """What makes one graph differ from another."""

    layer: int
    is_first: bool
    """Of the stage: it adds nothing to the residual."""
    bucket: int
    """Tokens, with padding."""
    tile_rows: int
    """Of attention's tile."""


class LayerGraphs:
    """The graphs of one runner."""

    def __init__(self, card: Card, most: int) -> None:
        """``most``: graphs at a time."""
        self._card = card
        self._most = most
        self._graphs: dict[GraphKey, Graph] = {}
        self._generation = 0
        self._can_capture = True

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: GraphKey, generation: int, launch: Callable[[], None]) -> None:
        """Launch what ``launch`` launches, by a graph from the second time on. ``generation``: of the memory that it
        reads rows from."""
        if generation != self._generation:
            if self._graphs:
                self._card.synchronize()  # a replay may be under way
                self._graphs.clear()
                self._card.forget_graphs()
            self._generation = generation
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        elif self._can_capture and len(self._graphs) < self._most:
            self._run_and_capture(key, launch)
        else:
            launch()

    def _run_and_capture(self, key: GraphKey, launch: Callable[[], None]) -> None:
        """Launch for this step, and capture for the next ones: a failure of the second is no failure of the step."""
        num_launched = 0

        def counted() -> None:
            nonlocal num_launched
            launch()
            num_launched += 1

        try:
            self._graphs[key] = self._card.capture(counted)
        except RuntimeError as error:
            if not num_launched:
                raise
            logger.warning("%s cannot be captured, so steps run without graphs: %s", key, error)
            self._can_capture = False
