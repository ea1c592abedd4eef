"""Streams, events, pinned memory and graphs of one card: the only file that asks ``torch.cuda``.

Nothing is opened before a call needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point of a stream."""

    def done(self) -> bool:
        """Whether all before it is over. Never waits."""
        ...

    def synchronize(self) -> None:
        """Wait on the host."""
        ...


class Graph(Protocol):
    """Launches that were captured."""

    def replay(self) -> None:
        """Launch them on the current stream."""
        ...


class _Event:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def done(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()


class Card:
    """One card, in PyTorch's streams."""

    def __init__(self, ordinal: int = 0) -> None:
        self.device = torch.device("cuda", ordinal)
        self._pool: object = None
        self._side: torch.cuda.Stream | None = None

    def record(self) -> Event:
        """An event at the current end of the current stream."""
        return _Event()

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 on the host, from and to which copies run beside it."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, launch: Callable[[], None]) -> Graph:
        """What ``launch`` launches, without running it. Raises RuntimeError for what no graph can hold."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._side):
            # Other threads copy meanwhile: only this one's calls are held to the rules of a capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph
