"""A graph for each layer and number of rows of a decode step, so that a layer is one launch.

Addresses never change, so a graph holds through drops and restores: a layer that is not resident is not run. Its memory
is the card's own, outside of the page pool. A graph reads a step's rows where ``staging`` puts them, so all graphs go
when the staging moves. All of them run on one stream, one after the other, as they share cuBLAS's workspace.

A layer runs without a graph the first time: kernels are compiled, and products choose their algorithm.

Not here: which steps may be run so (``rows.bucket_of``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from jettison.device.cuda.card import Card, Graph

logger = logging.getLogger(__name__)


class GraphKey(NamedTuple):
    """What makes one graph differ from another."""

    layer: int
    is_first: bool
    """Of the stage: it adds nothing to the residual."""
    bucket: int


class LayerGraphs:
    """The graphs of one runner."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._graphs: dict[GraphKey, Graph | None] = {}
        """None: it has run once."""
        self._generation = 0
        self._can_capture = True

    @property
    def num_graphs(self) -> int:
        """Graphs that have been captured and are kept."""
        return sum(graph is not None for graph in self._graphs.values())

    def run(self, key: GraphKey, generation: int, launch: Callable[[], None]) -> None:
        """Launch what ``launch`` launches, by a graph from the second time on. ``generation``: of the memory that it
        reads rows from."""
        if generation != self._generation:
            self._graphs.clear()
            self._generation = generation
        graph = self._graphs.get(key)
        if graph is None and key in self._graphs and self._can_capture:
            graph = self._graphs[key] = self._captured(key, launch)
        if graph is not None:
            graph.replay()
            return
        launch()
        self._graphs.setdefault(key, None)

    def _captured(self, key: GraphKey, launch: Callable[[], None]) -> Graph | None:
        try:
            return self._card.capture(launch)
        except RuntimeError as error:
            logger.warning("%s cannot be captured, so steps run without graphs: %s", key, error)
            self._can_capture = False
            return None
