"""Copies to and from a worker's host pool that run beside its steps: rule 9 of ``core.controlstream``, carried out.

``Copies`` belongs to the worker's loop: it begins copies, tells of their ends, and stops them before a layout. Bytes
are copied by a ``Copier``: ``CopyThread`` beside the steps, or ``CopyTurns`` a piece at a time between them, on the
loop's own thread, for workers that share a process and have to repeat exactly.

The thread never looks at what is mapped: a job has addresses, which the loop's thread has checked, and it is taken out
of the thread's hands, between two pieces, before anything is mapped anew.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from jettison.core import ports
from jettison.core.controlstream import BesideCopy, CopiesBeside, Kind
from jettison.device.hostcopy import HostCopy
from jettison.live.worker.device_port import Device
from jettison.live.worker.failpoints import Failpoint, nowhere
from jettison.types import LayerRange, TransferId

log = logging.getLogger(__name__)

NICENESS = 15
"""Of the copying thread, where steps want every core: it gets a thirtieth of one, and all of one that is idle."""


@dataclass(slots=True, eq=False)
class Job:
    """One copy, as a copier has it."""

    copy: BesideCopy
    work: HostCopy
    started_ns: int | None = None
    """When its first piece began."""
    ended_ns: int = 0
    has_failed: bool = False


class Copier(Protocol):
    """Runs jobs in order, one at a time."""

    def put(self, job: Job) -> None:
        """Run a job behind those that are there."""
        ...

    def halt(self) -> None:
        """Take all jobs back: returns when the piece under way is copied; nothing is copied after it."""
        ...

    def go_on(self, jobs: Iterable[Job]) -> None:
        """Run these, after ``halt``."""
        ...

    def turn(self) -> bool:
        """Copy a piece, if that is the loop's own thread's work; whether it did."""
        ...

    def take_over(self) -> list[Job]:
        """Jobs that are complete or have failed since this was last asked, in order; one may have ended in ``halt``."""
        ...

    def fileno(self) -> int | None:
        """Readable while ``take_over`` has something; None where ``turn`` finds everything."""
        ...

    def close(self) -> None:
        """As ``halt``, for good. Idempotent."""
        ...


class CopyTurns:
    """A piece in each turn."""

    def __init__(self, piece_bytes: int, clock_ns: Callable[[], int]) -> None:
        self._piece_bytes = piece_bytes
        self._clock_ns = clock_ns
        self._ahead: deque[Job] = deque()
        self._over: list[Job] = []

    def put(self, job: Job) -> None:
        """See ``Copier``."""
        self._ahead.append(job)

    def halt(self) -> None:
        """See ``Copier``."""
        self._ahead.clear()

    def go_on(self, jobs: Iterable[Job]) -> None:
        """See ``Copier``."""
        self._ahead.extend(jobs)

    def turn(self) -> bool:
        """See ``Copier``."""
        if not self._ahead:
            return False
        job = self._ahead[0]
        if _run(job, self._piece_bytes, self._clock_ns):
            self._over.append(self._ahead.popleft())
        return True

    def take_over(self) -> list[Job]:
        """See ``Copier``."""
        over, self._over = self._over, []
        return over

    def fileno(self) -> int | None:
        """See ``Copier``."""
        return None

    def close(self) -> None:
        """See ``Copier``."""
        self.halt()


class CopyThread:
    """A thread beside the loop's, from the first job on."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._ahead: deque[Job] = deque()
        self._over: list[Job] = []
        self._running: Job | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._wake_fd: int | None = None

    def put(self, job: Job) -> None:
        """See ``Copier``."""
        if self._thread is None:
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._work, name="copies beside steps", daemon=True)
            self._thread.start()
        with self._changed:
            self._ahead.append(job)
            self._changed.notify_all()

    def halt(self) -> None:
        """See ``Copier``."""
        with self._changed:
            self._ahead.clear()
            if self._running is not None:
                self._running.work.stop()
            self._changed.wait_for(lambda: self._running is None)

    def go_on(self, jobs: Iterable[Job]) -> None:
        """See ``Copier``."""
        with self._changed:
            self._ahead.extend(jobs)
            self._changed.notify_all()

    def turn(self) -> bool:
        """See ``Copier``."""
        return False

    def take_over(self) -> list[Job]:
        """See ``Copier``."""
        with self._changed:
            over, self._over = self._over, []
            if over and self._wake_fd is not None:
                os.eventfd_read(self._wake_fd)
        return over

    def fileno(self) -> int | None:
        """See ``Copier``."""
        return self._wake_fd

    def close(self) -> None:
        """See ``Copier``."""
        self.halt()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._wake_fd is not None:
            os.close(self._wake_fd)
            self._wake_fd = None

    def _work(self) -> None:
        with suppress(OSError):  # where threads have no priority of their own it shares the cores as they are
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (job := self._next()) is not None:
            is_over = _run(job, None, self._clock_ns)
            with self._changed:
                self._running = None
                if is_over:
                    self._over.append(job)
                    assert self._wake_fd is not None
                    os.eventfd_write(self._wake_fd, 1)
                self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ahead or self._is_closed)
            if self._is_closed:
                return None
            self._running = self._ahead.popleft()
            return self._running


def _run(job: Job, most_bytes: int | None, clock_ns: Callable[[], int]) -> bool:
    """Copy, until it is stopped at the latest; whether the job is over."""
    if job.started_ns is None:
        job.started_ns = clock_ns()
    try:
        job.work.run(most_bytes)
    except Exception:
        log.exception("copy %d failed", job.copy.transfer_id)
        job.has_failed = True
    job.ended_ns = clock_ns()
    return job.has_failed or job.work.is_complete


class Copies:
    """A worker's copies beside its steps. All calls come from the loop's thread."""

    def __init__(
        self, device: Device, emit: Callable[[ports.TransferEnded], None], copier: Copier,
        failpoint: Failpoint = nowhere,
    ) -> None:
        self._device = device
        self._emit = emit
        self._copier = copier
        self._reach = failpoint
        self._begun = CopiesBeside()
        self._jobs: dict[TransferId, Job] = {}

    def begin(self, command: ports.SendKV) -> None:
        """A copy's turn has come in the control stream."""
        copy = BesideCopy(
            command.transfer_id, command.layers,
            command.src_blocks if command.to_host else command.dst_blocks,
            command.dst_blocks if command.to_host else command.src_blocks, command.to_host,
        )
        self._begun.begin(copy)
        try:
            job = Job(copy, self._open(copy, 0))
        except Exception:
            log.exception("copy %d cannot be made", copy.transfer_id)
            self._end(copy, None)
            return
        self._jobs[copy.transfer_id] = job
        self._copier.put(job)
        self._reach(f"before_{_what(copy)}")

    def refuse(self, command: ports.SendKV) -> None:
        """It was withdrawn before it began."""
        self._emit(ports.TransferEnded(command.transfer_id, False, 0, 0))

    def cancel(self, transfer_id: TransferId) -> bool:
        """End a copy at its next piece; whether there was such a one. One that is complete by then ends complete."""
        if transfer_id not in self._jobs:
            return False
        with self.halted():
            self._tell_over()
            job = self._jobs.get(transfer_id)
            if job is not None:
                self._end(job.copy, job)
        return True

    def serve(self) -> bool:
        """Take a turn where that is this thread's to do, and tell of what has ended; whether anything was done."""
        if not self._jobs:
            return False
        is_busy = self._copier.turn()
        return self._tell_over() or is_busy

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Nothing is copied inside, and what is mapped may change; see ``change_layout``. It waits for one piece."""
        if not self._jobs:
            yield
            return
        self._copier.halt()
        try:
            yield
        finally:
            self._tell_over()
            self._copier.go_on(self._reopened())

    def change_layout(
        self, kv_layers: LayerRange, capacity_blocks: int, moved: Sequence[tuple[int, int]]
    ) -> None:
        """A layout has been applied, while halted."""
        self._tell_over()
        for copy in self._begun.change_layout(kv_layers, capacity_blocks, moved):
            self._tell(copy, self._jobs.pop(copy.transfer_id), complete=False)

    def fileno(self) -> int | None:
        """Readable when ``serve`` has something to tell; None: it has to be called again and again."""
        return self._copier.fileno()

    def close(self) -> None:
        """Copy nothing more, and tell nothing: the worker ends. Idempotent."""
        self._copier.close()
        self._begun.clear()
        self._jobs.clear()

    def _open(self, copy: BesideCopy, skip_bytes: int) -> HostCopy:
        return self._device.copy_beside(
            copy.layers, copy.blocks, copy.slots, to_host=copy.to_host, skip_bytes=skip_bytes
        )

    def _reopened(self) -> list[Job]:
        """All jobs that are left, from where they were: their addresses are looked up and checked anew."""
        for job in list(self._jobs.values()):
            try:
                job.work = self._open(job.copy, job.work.copied_bytes)
            except Exception:
                log.exception("copy %d cannot go on", job.copy.transfer_id)
                self._end(job.copy, job)
        return list(self._jobs.values())

    def _tell_over(self) -> bool:
        over = self._copier.take_over()
        for job in over:
            self._end(job.copy, job)
        return bool(over)

    def _end(self, copy: BesideCopy, job: Job | None) -> None:
        self._begun.end(copy.transfer_id)
        self._jobs.pop(copy.transfer_id, None)
        self._tell(copy, job, complete=job is not None and job.work.is_complete and not job.has_failed)

    def _tell(self, copy: BesideCopy, job: Job | None, *, complete: bool) -> None:
        num_bytes = 0 if job is None else job.work.copied_bytes
        took_ns = 0 if job is None or job.started_ns is None else job.ended_ns - job.started_ns
        self._emit(ports.TransferEnded(copy.transfer_id, complete, num_bytes, took_ns))
        self._reach(f"after_{_what(copy)}")


def _what(copy: BesideCopy) -> str:
    """For failpoints."""
    return "checkpoint" if copy.to_host else "prefetch"


def copy_kind(command: ports.SendKV) -> Kind:
    """Of a copy inside this worker."""
    if not command.beside_steps:
        return Kind.COPY
    return Kind.COPY_OUT_BESIDE if command.to_host else Kind.COPY_IN_BESIDE
