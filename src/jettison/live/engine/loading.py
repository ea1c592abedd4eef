"""How long the start of workers still takes, told from outside of them: what they have read, and since when.

A worker that loads is busy in one thread and answers nothing. But its memory is one file that it fills with parameters
(``device.pages_host``), and the kernel tells how much of such a process has mapped. Nothing else is mapped that early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from jettison.live.machine.memory import shared_bytes
from jettison.policy.refusal import predicted_loading_s

LOOK_AGAIN_S = 0.25
"""A flood of requests that come too early looks no more often than this."""


class LoadingWatch:
    """Begins with the start. ``pids`` of its methods: the workers' processes that live."""

    def __init__(
        self, parameter_bytes: int, clock: Callable[[], float] = time.monotonic,
        bytes_of: Callable[[int], int] = shared_bytes,
    ) -> None:
        """``parameter_bytes``: what all workers together read."""
        self._parameter_bytes = parameter_bytes
        self._clock, self._bytes_of = clock, bytes_of
        self._begun_s = clock()
        self._looked_s: float | None = None
        self._read_s: float | None = None
        """When everything was seen to be read."""
        self._left_s = 0.0

    def all_read(self) -> None:
        """Every worker has told that it has its parameters."""
        self._read_s = self._clock()

    def left_s(self, pids: Iterable[int], part_warm: float = 0.0) -> float:
        """A prediction, in seconds from now on. ``part_warm``: of the first steps, what has been run."""
        now_s = self._clock()
        if self._looked_s is None or now_s - self._looked_s >= LOOK_AGAIN_S:
            self._looked_s, self._left_s = now_s, self._predicted_s(now_s, pids, part_warm)
        return self._left_s

    def _predicted_s(self, now_s: float, pids: Iterable[int], part_warm: float) -> float:
        num_read = 0 if self._read_s is not None else sum(map(self._bytes_of, pids))
        if self._read_s is None and num_read >= self._parameter_bytes:
            self._read_s = now_s
        since_read_s = None if self._read_s is None else now_s - self._read_s
        return predicted_loading_s(now_s - self._begun_s, num_read, self._parameter_bytes, since_read_s, part_warm)
