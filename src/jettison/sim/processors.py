"""Processor cores that several processes share: workers, controller and clients on one machine.

Work is time of one thread that is alone on the machine. What a thread gets of that, while others run as well, is close
to what Linux gives it (after EEVDF; the figures are those of its sources since 6.12, for 250 ticks a second; checked
against its trace of a server under load, docs/validation.md):

- A thread that wakes up looks to the core it was on. One that always the same thread wakes looks to that one's, where
  fewer others are.
- If another core is idle and that one is not, it goes there, except on kernels that *pack*: those of some virtual
  machines leave cores idle as long as they can.
- Threads that run for short bursts go first (``rank``), until they have had a slice: they stop the running one at once,
  which goes on after them, unless it has had its slice. Among equals, who waits does so until the running thread
  sleeps, or has had its slice and the core looks, at a tick or when another wakes.
- A core that becomes idle takes from the longest queue a thread that has cold caches anyway; at its next tick any.
  Now and then queues of different lengths are evened out.

And beside the scheduler:

- A core is slower while others are busy (shared caches and memory, or two hardware threads of one core):
  ``speeds[n - 1]`` where n are busy; for work that others cost more than that, by its ``crowded_factor`` where all are.
- The machine as a whole may be faster or slower for a while than it was when work was measured (``drift``).

All cores are equally fast at a time; rates change when a core becomes busy or idle, or the machine's speed does, and in
between work runs off linearly. A switch takes no time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from jettison.sim.loop import EventLoop, Scheduled
from jettison.types import NANOSECONDS

TICK_NS = 4_000_000
"""Between looks of a core at its queue, while somebody waits there."""
BASE_SLICE_NS = 700_000
"""On one core; times 1 + log2 of the number of cores, of which eight count."""
LAST_RANK = 1 << 30
HOT_NS = 500_000
"""Who ran this recently is not taken to another core that has become idle."""
BALANCE_NS = 16_000_000
"""Between evenings out of queues, times the number of cores."""


class Runner:
    """One thread, as the operating system sees it."""

    __slots__ = ("burst_ns", "core", "has_run_ns", "last_ran_ns", "rank")

    def __init__(self, core: int, rank: int) -> None:
        self.core = core
        """Where it runs, waits, or ran last."""
        self.rank = rank
        """Low: runs for short bursts. Linux knows by the time that a thread is owed."""
        self.burst_ns = 0.0
        """What it has run since it woke up."""
        self.has_run_ns = 0.0
        """Among those of its core: what the scheduler calls virtual run time."""
        self.last_ran_ns = -HOT_NS


class Job:
    """Work of one thread under way."""

    __slots__ = (
        "_processors", "began_ns", "crowded_factor", "is_cancelled", "is_stopped", "left_ns", "on_done", "rate",
        "runner",
    )  # fmt: skip

    def __init__(
        self, processors: Processors, runner: Runner, work_ns: int, on_done: Callable[[], None],
        crowded_factor: float = 1.0,
    ) -> None:
        self._processors = processors
        self.runner = runner
        self.left_ns = float(work_ns)
        self.on_done = on_done
        self.crowded_factor = crowded_factor
        """How many times as long it takes where all cores are busy, beyond what that costs everybody."""
        self.rate = 0.0
        """Of work, in a nanosecond, while it runs."""
        self.began_ns: int | None = None
        """When it first had a core."""
        self.is_stopped = False
        """By a shorter burst: it goes on before its equals."""
        self.is_cancelled = False

    def cancel(self) -> None:
        """Break off: ``on_done`` is not called. Idempotent."""
        self.is_cancelled = True
        self._processors.stop(self)


class _Cpu:
    """What runs on it, since when, and who waits."""

    __slots__ = ("ending", "phase_ns", "running", "since_ns", "waiting")

    def __init__(self, phase_ns: int) -> None:
        self.phase_ns = phase_ns
        """Of its ticks, which cores do not have at the same time."""
        self.running: Job | None = None
        self.ending: Runner | None = None
        """Whose work has just ended: it has not gone to sleep yet."""
        self.since_ns = 0
        self.waiting: list[Job] = []

    @property
    def is_taken(self) -> bool:
        """A thread is on it, maybe one that is just about to sleep."""
        return self.running is not None or self.ending is not None

    @property
    def is_idle(self) -> bool:
        return not self.is_taken and not self.waiting

    @property
    def length(self) -> int:
        return len(self.waiting) + (self.running is not None)

    def length_without(self, runner: Runner) -> int:
        """``length``, but for one that is about to sleep."""
        return self.length - (self.running is not None and self.running.runner is runner)

    def average_ns(self) -> float:
        """Of what those here have run."""
        jobs = self.waiting if self.running is None else [*self.waiting, self.running]
        return sum(job.runner.has_run_ns for job in jobs) / len(jobs) if jobs else 0.0

    def next_tick_ns(self, from_ns: int) -> int:
        """The first one at ``from_ns`` or later."""
        return -(-(from_ns - self.phase_ns) // TICK_NS) * TICK_NS + self.phase_ns

    def has_tick(self, now_ns: int) -> bool:
        return (now_ns - self.phase_ns) % TICK_NS == 0


class Processors:
    """All cores of one machine."""

    def __init__(
        self, loop: EventLoop, num_cores: int, speeds: Sequence[float], drift: Sequence[tuple[float, float]] = (),
        *, packs: bool = False,
    ) -> None:
        """``speeds``: of each of 1, 2, ... ``num_cores`` busy cores, over that of one alone. ``drift``: from which
        second on all of them are how many times as fast, sorted; before its first entry, and without any, once."""
        if num_cores < 1 or len(speeds) != num_cores:
            raise ValueError("needs a speed for each number of busy cores")
        self._loop = loop
        self._cores = [_Cpu(index * TICK_NS // num_cores) for index in range(num_cores)]
        self._slice_ns = BASE_SLICE_NS * (1 + int(math.log2(min(8, num_cores))))
        self._balance_ns = BALANCE_NS * num_cores
        self._speeds = tuple(speeds)
        self._packs = packs
        self._drift = deque((round(from_s * NANOSECONDS), speed) for from_s, speed in drift)
        self._drifted = 1.0
        self._num_runners = 0
        self._updated_ns = 0
        self._balanced_ns = 0
        self._wake: Scheduled | None = None

    @property
    def now_ns(self) -> int:
        """Of the loop."""
        return self._loop.now_ns

    def runner(self, rank: int = 0) -> Runner:
        """A new thread. They begin on the cores in turn."""
        self._num_runners += 1
        return Runner((self._num_runners - 1) % len(self._cores), rank)

    def start(
        self, runner: Runner, work_ns: int, on_done: Callable[[], None], waker: Runner | None = None,
        *, crowded_factor: float = 1.0,
    ) -> Job:
        """A thread that does nothing wakes up, or goes on with this if its work has just ended; ``on_done`` is called
        when its work is done. ``waker``: the thread that wakes it, where that is always the same; ``crowded_factor``:
        see ``Job``."""
        job = Job(self, runner, work_ns, on_done, crowded_factor)
        self._advance()
        cpu = self._cores[runner.core]
        if cpu.ending is runner and cpu.running is None:
            cpu.running, job.began_ns = job, self._loop.now_ns
            self._plan()
            return job
        if waker is not None:
            near = self._cores[waker.core]
            num_others = near.length_without(waker)
            if num_others == 0 or (not cpu.is_idle and num_others < cpu.length):
                cpu = near
        if cpu.is_taken and not self._packs:
            cpu = next((other for other in self._cores if other.is_idle), cpu)
        runner.burst_ns = 0.0
        self._put(job, cpu)
        if not cpu.is_taken:
            self._choose(cpu)
        else:
            self._heed(cpu, [job])
        self._plan()
        return job

    def stop(self, job: Job) -> None:
        """See ``Job.cancel``."""
        self._advance()
        cpu = self._cores[job.runner.core]
        if cpu.running is job:
            cpu.running = None
            self._choose(cpu)
        elif job in cpu.waiting:
            cpu.waiting.remove(job)
        self._plan()

    # --- who runs where

    def _heed(self, cpu: _Cpu, woken: Sequence[Job]) -> None:
        """Threads have woken up on a core where another runs: it may have to stop."""
        running = cpu.running
        if running is None:  # it is just about to sleep
            return
        if self._has_had_slice(cpu) or any(self._rank(job) < self._rank(running) for job in woken):
            self._give_way(cpu)

    def _put(self, job: Job, cpu: _Cpu) -> None:
        """To the queue of a core, as one of average claims."""
        job.runner.has_run_ns = cpu.average_ns()
        job.runner.core = self._cores.index(cpu)
        job.is_stopped = False
        cpu.waiting.append(job)

    def _run(self, cpu: _Cpu, job: Job) -> None:
        cpu.running, cpu.since_ns = job, self._loop.now_ns
        if job.began_ns is None:
            job.began_ns = cpu.since_ns
        job.is_stopped = False

    def _choose(self, cpu: _Cpu) -> Job | None:
        """A core without a running thread takes the first of its queue, or a cold one of the longest other."""
        if not cpu.waiting:
            now_ns = self._loop.now_ns
            self._pull(cpu, lambda job: now_ns - job.runner.last_ran_ns >= HOT_NS)
        if cpu.waiting:
            first = min(cpu.waiting, key=lambda job: (self._rank(job), not job.is_stopped, job.runner.has_run_ns))
            cpu.waiting.remove(first)
            self._run(cpu, first)
        return cpu.running

    def _pull(self, cpu: _Cpu, may: Callable[[Job], bool]) -> None:
        longest = max(self._cores, key=lambda other: len(other.waiting))
        found = [job for job in longest.waiting if may(job)]
        if found:
            job = min(found, key=lambda job: job.runner.has_run_ns)
            longest.waiting.remove(job)
            self._put(job, cpu)

    def _give_way(self, cpu: _Cpu) -> None:
        """The running thread, if it has not just ended, waits with the others, and the first of them runs."""
        if cpu.running is None:
            return
        had_slice = self._has_had_slice(cpu)
        stopped, cpu.running = cpu.running, None
        cpu.waiting.append(stopped)
        first = self._choose(cpu)
        stopped.is_stopped = not had_slice and first is not None and self._rank(first) < self._rank(stopped)

    def _rank(self, job: Job) -> int:
        """Who has run for a slice since it woke up goes last."""
        runner = job.runner
        return runner.rank if runner.burst_ns < self._slice_ns else LAST_RANK

    def _has_had_slice(self, cpu: _Cpu) -> bool:
        return self._loop.now_ns - cpu.since_ns >= self._slice_ns

    def _tick(self) -> None:
        """Cores whose tick it is look: who has had a slice gives way, who is idle takes from others."""
        now_ns = self._loop.now_ns
        for cpu in self._cores:
            if not cpu.has_tick(now_ns):
                continue
            if cpu.is_idle:
                self._pull(cpu, lambda job: True)
                if cpu.waiting:
                    self._choose(cpu)
            elif cpu.waiting and self._has_had_slice(cpu):
                self._give_way(cpu)

    def _balance(self) -> None:
        now_ns = self._loop.now_ns
        if now_ns < self._balanced_ns + self._balance_ns:
            return
        self._balanced_ns = now_ns
        short, long = (end(self._cores, key=lambda cpu: cpu.length) for end in (min, max))
        if long.length - short.length >= 2:
            self._put(long.waiting.pop(), short)
            if short.running is None:
                self._choose(short)

    # --- time

    def _advance(self) -> None:
        now_ns = self._loop.now_ns
        passed_ns = now_ns - self._updated_ns
        self._updated_ns = now_ns
        for cpu in self._cores:
            if passed_ns and cpu.running is not None:
                cpu.running.left_ns = max(0.0, cpu.running.left_ns - cpu.running.rate * passed_ns)
                cpu.running.runner.has_run_ns += passed_ns
                cpu.running.runner.burst_ns += passed_ns
                cpu.running.runner.last_ran_ns = now_ns

    def _plan(self) -> None:
        """The rates from now on, and the next time at which something changes."""
        now_ns = self._loop.now_ns
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        running = [cpu.running for cpu in self._cores if cpu.running is not None]
        if not running:
            return
        while self._drift and self._drift[0][0] <= now_ns:
            self._drifted = self._drift.popleft()[1]
        rate = self._drifted * self._speeds[len(running) - 1]
        crowd = (len(running) - 1) / max(1, len(self._cores) - 1)
        for job in running:
            job.rate = rate / job.crowded_factor**crowd
        times_ns = [now_ns + math.ceil(job.left_ns / job.rate) for job in running]
        if any(cpu.waiting for cpu in self._cores):
            times_ns += [
                cpu.next_tick_ns(max(now_ns + 1, cpu.since_ns + self._slice_ns if cpu.waiting else 0))
                for cpu in self._cores if cpu.waiting or cpu.is_idle
            ]
            times_ns.append(max(now_ns + 1, self._balanced_ns + self._balance_ns))
        if self._drift:
            times_ns.append(self._drift[0][0])
        self._wake = self._loop.at(min(times_ns), self._on_wake)

    def _on_wake(self) -> None:
        self._wake = None
        self._advance()
        ended = []
        for cpu in self._cores:
            # What is left is less than rounding makes of it.
            if cpu.running is not None and cpu.running.left_ns < max(cpu.running.rate, 1e-3):
                ended.append((cpu, cpu.running))
                cpu.running = None
        for cpu, job in ended:
            cpu.ending = job.runner
            num_before = len(cpu.waiting)
            if not job.is_cancelled:  # by one that ended at the same time
                job.on_done()
            cpu.ending = None
            self._heed(cpu, cpu.waiting[num_before:])  # whom it woke up, if it goes on
        for cpu in self._cores:
            if cpu.running is None:
                self._choose(cpu)
        self._tick()
        self._balance()
        self._plan()


class TeamJob:
    """The same work for each of several threads: it ends when the last of them has done it."""

    def __init__(
        self, processors: Processors, runners: Sequence[Runner], work_ns: int, on_done: Callable[[], None],
        crowded_factor: float = 1.0,
    ) -> None:
        self._num_left = len(runners)
        self._on_done = on_done
        self._jobs = [
            processors.start(runner, work_ns, self._one_done, crowded_factor=crowded_factor) for runner in runners
        ]

    @property
    def began_ns(self) -> int | None:
        """When the first of them had a core."""
        return min((job.began_ns for job in self._jobs if job.began_ns is not None), default=None)

    def _one_done(self) -> None:
        self._num_left -= 1
        if not self._num_left:
            self._on_done()

    def cancel(self) -> None:
        """Break off: ``on_done`` is not called. Idempotent."""
        for job in self._jobs:
            job.cancel()


class Thread:
    """One thread that does jobs one after the other: an event loop's."""

    def __init__(self, processors: Processors, rank: int = 0) -> None:
        self.busy_ns = 0
        """Work done or under way."""
        self._processors = processors
        self.runner = processors.runner(rank)
        self._queue: deque[tuple[int, Callable[[], None], Runner | None]] = deque()
        self.is_busy = False
        """Doing a job, or about to do the next."""
        self.ended_ns: int | None = None
        """When it last did one."""

    def do(self, work_ns: int, act: Callable[[], None], waker: Runner | None = None) -> None:
        """Work so long, when all that was asked before is done; then ``act``. ``waker``: as ``start`` has it."""
        self._queue.append((work_ns, act, waker))
        if not self.is_busy:
            self._next()

    def _next(self) -> None:
        self.is_busy = bool(self._queue)
        if self._queue:
            work_ns, act, waker = self._queue.popleft()
            self.busy_ns += work_ns
            self._processors.start(self.runner, work_ns, lambda: self._done(act), waker)

    def _done(self, act: Callable[[], None]) -> None:
        self.ended_ns = self._processors.now_ns
        act()
        self._next()
