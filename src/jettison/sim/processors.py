"""Processor cores that several processes share: workers, controller and clients on one machine.

Work is time of one thread that is alone on the machine. What a thread gets of that, while others run as well:

- A core is slower while others are busy (shared caches and memory, or two hardware threads of one core):
  ``speeds[n - 1]`` where n are busy.
- The machine as a whole may be faster or slower for a while than it was when work was measured (``drift``).
- With more threads than cores those of workers get less than a core each, all of them equally. Threads that sleep most
  of the time (the controller's, the clients') go first, as the operating system's scheduler has it: what wakes up has
  used less than its share.

Rates change only when a job begins or ends, or the machine's speed does; in between work runs off linearly.
``Thread`` does jobs in order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from jettison.sim.loop import EventLoop, Scheduled
from jettison.types import NANOSECONDS


class Job:
    """Work under way."""

    __slots__ = ("_processors", "goes_first", "left_ns", "num_threads", "number", "on_done", "rate")

    def __init__(
        self, processors: Processors, number: int, work_ns: int, num_threads: int, goes_first: bool,
        on_done: Callable[[], None],
    ) -> None:
        self._processors = processors
        self.number = number
        self.left_ns = float(work_ns)
        self.num_threads = num_threads
        self.goes_first = goes_first
        self.on_done = on_done
        self.rate = 0.0
        """Work done in a nanosecond."""

    def cancel(self) -> None:
        """Break off: ``on_done`` is not called. Idempotent."""
        self._processors.stop(self)


class Processors:
    """All cores of one machine."""

    def __init__(
        self, loop: EventLoop, num_cores: int, speeds: Sequence[float], drift: Sequence[tuple[float, float]] = ()
    ) -> None:
        """``speeds``: of each of 1, 2, ... ``num_cores`` busy cores, over that of one alone. ``drift``: from which
        second on all of them are how many times as fast, sorted; before its first entry, and without any, once."""
        if num_cores < 1 or len(speeds) != num_cores:
            raise ValueError("needs a speed for each number of busy cores")
        self._loop = loop
        self._num_cores = num_cores
        self._speeds = tuple(speeds)
        self._drift = deque((round(from_s * NANOSECONDS), speed) for from_s, speed in drift)
        self._drifted = 1.0
        self._jobs: dict[int, Job] = {}
        self._next_number = 0
        self._updated_ns = 0
        self._wake: Scheduled | None = None

    def start(
        self, work_ns: int, on_done: Callable[[], None], *, num_threads: int = 1, goes_first: bool = False
    ) -> Job:
        """Begin; ``on_done`` is called when the work is done. All its threads are busy until then."""
        job = Job(self, self._next_number, work_ns, num_threads, goes_first, on_done)
        self._next_number += 1
        self._advance()
        self._jobs[job.number] = job
        self._share()
        return job

    def stop(self, job: Job) -> None:
        """See ``Job.cancel``."""
        if job.number in self._jobs:
            self._advance()
            del self._jobs[job.number]
            self._share()

    def _advance(self) -> None:
        now_ns = self._loop.now_ns
        for job in self._jobs.values():
            job.left_ns = max(0.0, job.left_ns - job.rate * (now_ns - self._updated_ns))
        self._updated_ns = now_ns

    def _share(self) -> None:
        """New rates, and the next end."""
        jobs = self._jobs.values()
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if not jobs:
            return
        while self._drift and self._drift[0][0] <= self._loop.now_ns:
            self._drifted = self._drift.popleft()[1]
        first = sum(job.num_threads for job in jobs if job.goes_first)
        rest = sum(job.num_threads for job in jobs) - first
        cores = float(self._num_cores)
        speed = self._drifted * self._speeds[min(first + rest, self._num_cores) - 1]
        first_rate = speed * min(1.0, cores / first) if first else 0.0
        # Nobody starves: where those who go first could take all cores, the others keep a tenth of one.
        rest_rate = speed * min(1.0, max(cores - first, 0.1) / rest) if rest else 0.0
        for job in jobs:
            job.rate = first_rate if job.goes_first else rest_rate
        left_ns = min(math.ceil(job.left_ns / job.rate) for job in jobs)
        if self._drift:
            left_ns = min(left_ns, self._drift[0][0] - self._loop.now_ns)
        self._wake = self._loop.after(left_ns, self._on_wake)

    def _on_wake(self) -> None:
        self._wake = None
        self._advance()
        # What is left is less than rounding makes of it.
        ended = [job for job in self._jobs.values() if job.left_ns < max(job.rate, 1e-3)]
        for job in ended:
            del self._jobs[job.number]
        self._share()
        for job in ended:
            job.on_done()


class Thread:
    """One thread that does jobs one after the other: an event loop's."""

    def __init__(self, processors: Processors) -> None:
        self.busy_ns = 0
        """Work done or under way."""
        self._processors = processors
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._is_busy = False

    def do(self, work_ns: int, act: Callable[[], None]) -> None:
        """Work so long, when all that was asked before is done; then ``act``."""
        self._queue.append((work_ns, act))
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        self._is_busy = bool(self._queue)
        if self._queue:
            work_ns, act = self._queue.popleft()
            self.busy_ns += work_ns
            self._processors.start(work_ns, lambda: self._done(act), goes_first=True)

    def _done(self, act: Callable[[], None]) -> None:
        act()
        self._next()
