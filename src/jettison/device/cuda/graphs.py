"""A graph for each layer and padded number of tokens, so that a layer is one launch whatever rows a step has.

Addresses never change, so a graph holds through drops and restores: a layer that is not resident is not run. Its memory
is the card's own, outside of the page pool. A graph reads a step's rows where ``staging`` puts them, so all graphs go
when the staging moves. All of them run on one stream, one after the other, as they share cuBLAS's workspace. Their
number is bounded: one that was not used for long gives way, and what has none meanwhile is launched.

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

GRAPH_BYTES = 160 << 10
"""Of a card, that a graph takes at most (``test_runner.py`` weighs it)."""

MOST_BYTES = 480 << 20
"""Of all graphs of a process: less than half of the GiB that it has beside its budget (``config.devices``), as its
context takes about the other half."""

UNUSED_TURNS = 2
"""A graph gives way once as many others as there may be, so many times over, have run since. At once it must not: steps
that go round a few more sizes than there is room for would capture all the time."""


class GraphKey(NamedTuple):
    """What makes one graph differ from another."""

    layer: int
    is_first: bool
    """Of the stage: it adds nothing to the residual."""
    bucket: int
    """Tokens, with padding."""
    tile_rows: int
    """Of attention's tile."""


def most_graphs(num_layers: int) -> int:
    """At a time, of a runner of a model with so many layers."""
    return min(MOST_A_LAYER * num_layers, MOST_BYTES // GRAPH_BYTES)


class LayerGraphs:
    """The graphs of one runner."""

    def __init__(self, card: Card, most: int) -> None:
        """``most``: graphs at a time."""
        self._card = card
        self._most = most
        self._graphs: dict[GraphKey, Graph] = {}
        """The one that was used last is last."""
        self._used: dict[GraphKey, int] = {}
        """The run in which each was used last."""
        self._num_runs = 0
        self._generation = 0
        self._can_capture = True
        self.num_captures = 0
        """So far, failures included: the step of each took longer than others like it."""

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: GraphKey, generation: int, launch: Callable[[], None]) -> None:
        """Launch what ``launch`` launches, by a graph from the second time on. ``generation``: of the memory that it
        reads rows from."""
        if generation != self._generation:
            if self._graphs:
                self._card.synchronize()  # a replay may be under way
                self._graphs.clear()
                self._used.clear()
                self._card.forget_graphs()
            self._generation = generation
        self._num_runs += 1
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self._graphs[key] = graph
            self._used[key] = self._num_runs
            graph.replay()
        elif self._can_capture and self._has_room():
            self._run_and_capture(key, launch)
        else:
            launch()

    def _has_room(self) -> bool:
        """Whether there may be one more, for which the one that is longest unused is given up if it is that for
        long."""
        if len(self._graphs) < self._most:
            return True
        oldest = next(iter(self._graphs), None)
        if oldest is None or self._num_runs - self._used[oldest] <= UNUSED_TURNS * self._most:
            return False
        self._card.synchronize()  # its last replay may be under way
        del self._graphs[oldest], self._used[oldest]
        if not self._graphs:
            self._card.forget_graphs()
        return True

    def _run_and_capture(self, key: GraphKey, launch: Callable[[], None]) -> None:
        """Launch for this step, and capture for the next ones: a failure of the second is no failure of the step."""
        num_launched = 0
        self.num_captures += 1

        def counted() -> None:
            nonlocal num_launched
            launch()
            num_launched += 1

        try:
            self._graphs[key] = self._card.capture(counted)
            self._used[key] = self._num_runs
        except RuntimeError as error:
            if not num_launched:
                raise
            logger.warning("%s cannot be captured, so steps run without graphs: %s", key, error)
            self._can_capture = False
