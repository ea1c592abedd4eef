"""The event loop: a heap of (time, priority, sequence), and a clock that moves before the handler runs.

It knows nothing of clusters. There is no global state: two loops in one process do not see each other, and a loop's run
depends only on the events put into it.

Rule 1. Time is a whole number of nanoseconds and never runs backwards.
Rule 2. ``now_ns`` is the event's time while its handler runs, not that of the event before.
Rule 3. Of events at one time the lower priority number goes first, then the one that was put in first.
Rule 4. A cancelled event never runs, also if it was cancelled by an event of the same time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Handler = Callable[[], None]

FAULT, ARRIVAL, NORMAL, LATE = 0, 1, 2, 3
"""Priorities: faults, clients' events, internal events, and observers of the result (ticks, samples)."""


class Scheduled:
    """One event in the heap; ``cancel`` takes it out."""

    __slots__ = ("handler", "time_ns")

    def __init__(self, time_ns: int, handler: Handler) -> None:
        self.time_ns = time_ns
        self.handler: Handler | None = handler

    @property
    def is_pending(self) -> bool:
        """Neither run nor cancelled."""
        return self.handler is not None

    def cancel(self) -> None:
        """Make sure that the event does not run. Idempotent; without effect on an event that has run."""
        self.handler = None


class EventLoop:
    """Virtual time."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.num_run = 0
        """Events that have run."""
        self._heap: list[tuple[int, int, int, Scheduled]] = []
        self._sequence = 0

    def at(self, time_ns: int, handler: Handler, priority: int = NORMAL) -> Scheduled:
        """Run ``handler`` at a time. Raises ValueError for a time that has passed."""
        if time_ns < self.now_ns:
            raise ValueError(f"an event at {time_ns} ns, it is {self.now_ns} ns")
        scheduled = Scheduled(time_ns, handler)
        heapq.heappush(self._heap, (time_ns, priority, self._sequence, scheduled))
        self._sequence += 1
        return scheduled

    def after(self, delay_ns: int, handler: Handler, priority: int = NORMAL) -> Scheduled:
        """Run ``handler`` after ``delay_ns``. Raises ValueError for a negative delay."""
        return self.at(self.now_ns + delay_ns, handler, priority)

    @property
    def next_ns(self) -> int | None:
        """When the next event is due; None when there is none."""
        heap = self._heap
        while heap and heap[0][3].handler is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if self.next_ns is None:
            return False
        time_ns, _, _, scheduled = heapq.heappop(self._heap)
        handler = scheduled.handler
        assert handler is not None
        scheduled.handler = None
        self.now_ns = time_ns
        self.num_run += 1
        handler()
        return True

    def run(self, until_ns: int | None = None, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run events until none is left, the next one is later than ``until_ns`` (the clock then stands there), or
        ``is_over`` is true between two."""
        while not is_over():
            next_ns = self.next_ns
            if next_ns is None:
                return
            if until_ns is not None and next_ns > until_ns:
                self.now_ns = max(self.now_ns, until_ns)
                return
            self.step()
