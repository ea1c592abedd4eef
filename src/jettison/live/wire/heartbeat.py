"""How a hung worker is told from a busy one: a thread in the worker beats, its keeper listens (promise R9).

    worker                                        keeper
    main thread: unit += 1, waiting = ...
    beat thread: (unit, waiting) every interval  --pipe-->  Listener.why_hung(now, patience)

A stopped process (SIGSTOP, a debugger, a machine that swaps) beats no more: *silent*. A long step lets other threads
run, so it beats on; but one whose single unit of work lasts beyond any reason is *stuck*. A pipe and not the control
channel, whose socket and buffers belong to the main thread.
"""

from __future__ import annotations

import os
import signal
import struct
import threading
from typing import NamedTuple

from jettison.live.wire.lease import boot_clock_s
from jettison.live.wire.stepflag import StepFlag

_BEAT = struct.Struct("<Q?")
"""Units of work begun so far, and whether the main thread waits for something to do."""


class Patience(NamedTuple):
    """How long a worker may be silent, and in one unit of work, before it counts as hung; 0: for ever."""

    silence_s: float
    stuck_s: float

    @property
    def beat_interval_s(self) -> float:
        """Several beats before silence means something; and little is added to the time that finding it takes.

        A beat may be read one interval after it was sent, and silence seen one interval after it is too long.
        """
        return max(0.02, min(1.0, (self.silence_s or self.stuck_s or 1.0) / 10))


def why_hung(silent_s: float, unit_s: float, patience: Patience) -> str | None:
    """Why a worker counts as hung that has been silent, and in one unit of work, for so long; None: it does not."""
    if patience.silence_s and silent_s > patience.silence_s:
        return f"silent for {silent_s:.1f} s"
    if patience.stuck_s and unit_s > patience.stuck_s:
        return f"in one unit of work for {unit_s:.0f} s"
    return None


class Heart:
    """A worker's end. The main thread writes two attributes; a daemon thread sends them, and ends the process where its
    keeper's lease is over (``wire.lease``): the keeper itself may be stopped, or dead."""

    def __init__(self, fd: int, interval_s: float, flag: StepFlag | None = None) -> None:
        """``flag``: where the keeper writes how long the lease lasts."""
        self._flag = flag
        self.unit = 0
        self.waiting = False
        self._fd = fd
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to beat, and to look at the lease: before the worker loads."""
        os.set_blocking(self._fd, False)
        self._thread = threading.Thread(target=self._beat, name="jettison-heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more, and look at no lease. Idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _beat(self) -> None:
        is_heard = True
        while is_heard or self._flag is not None:
            if self._stopped.wait(self._interval_s):
                return
            if self._flag is not None and self._flag.is_over(boot_clock_s()):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                os.write(self._fd, _BEAT.pack(self.unit, self.waiting))
            except BlockingIOError:
                continue  # the keeper is slow: it has enough beats to read
            except OSError:
                is_heard = False  # the keeper is gone: its lease is not


class Listener:
    """The keeper's end of one worker's beats. Times are seconds of any steady clock."""

    def __init__(self, fd: int, now_s: float) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._unit = -1
        self.begin(now_s)

    def begin(self, now_s: float) -> None:
        """Count from now on."""
        self._beat_s = self._unit_s = now_s

    def read(self, now_s: float) -> None:
        """Take the beats that have come."""
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:
            return
        whole = len(data) - len(data) % _BEAT.size
        if not whole:
            return
        self._beat_s = now_s
        unit, waiting = _BEAT.unpack_from(data, whole - _BEAT.size)
        if waiting or unit != self._unit:
            self._unit, self._unit_s = unit, now_s

    def excuse(self, away_s: float, now_s: float) -> None:
        """The listener itself was away for so long: that is no worker's fault. Nothing counts from later than now."""
        self._beat_s = min(now_s, self._beat_s + away_s)
        self._unit_s = min(now_s, self._unit_s + away_s)

    def ages_s(self, now_s: float) -> tuple[float, float]:
        """How long ago the last beat came, and how long the worker has been in one unit of work."""
        return now_s - self._beat_s, now_s - self._unit_s

    def why_hung(self, now_s: float, patience: Patience) -> str | None:
        """Why the worker counts as hung; None while it does not."""
        return why_hung(*self.ages_s(now_s), patience)

    def close(self) -> None:
        """Close the pipe's end."""
        os.close(self._fd)
