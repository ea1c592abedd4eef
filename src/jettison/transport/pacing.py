"""Pacing: a limit on the rate at which one end of a link sends, for experiments where the kernel offers none (`tc`
refused). Off unless a placement asks for it.

A token bucket: it fills at the rate, up to ``burst_bytes``, and nothing is sent while it is empty. Bytes count as sent
when a socket has taken them: between workers of one machine that is as good as arrived.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

MIN_BURST_BYTES = 16 << 10
BURST_S = 2e-3
"""Seconds of the rate that the bucket holds, so that a fast link does not wake for every packet."""

_CLOCK_MONOTONIC = 1
_NANOSECONDS = 1_000_000_000


class Pacer:
    """The bucket. Shared by all connections of one end of a link; the caller asks for the urgent ones first."""

    def __init__(self, bytes_per_s: float, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """The bucket is full at first. Raises ValueError for a rate that is not above 0."""
        if not 0.0 < bytes_per_s < float("inf"):
            raise ValueError(f"a link carries more than 0 bytes a second, not {bytes_per_s}")
        self.burst_bytes = max(MIN_BURST_BYTES, int(bytes_per_s * BURST_S))
        self._per_ns = bytes_per_s / _NANOSECONDS
        self._clock_ns = clock_ns
        self._left = float(self.burst_bytes)
        self._filled_ns = clock_ns()

    def left(self) -> int:
        """Bytes that may be sent now."""
        now_ns = self._clock_ns()
        self._left = min(float(self.burst_bytes), self._left + (now_ns - self._filled_ns) * self._per_ns)
        self._filled_ns = now_ns
        return int(self._left)

    def spend(self, num_bytes: int) -> None:
        """Note that ``num_bytes`` have been sent."""
        self._left -= num_bytes

    def wait_ns(self) -> int:
        """Nanoseconds until half of the bucket may be sent: waking for less costs more than it brings."""
        return max(1, int((self.burst_bytes / 2 - self._left) / self._per_ns))


class Alarm:
    """A descriptor that is readable from a time on (``timerfd``, which Python 3.11 does not have)."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._is_set = False

    def set(self, wait_ns: int) -> None:
        """Be readable after ``wait_ns``, and not before; 0: never."""
        if wait_ns or self._is_set:
            self._is_set = bool(wait_ns)
            spec = (ctypes.c_long * 4)(0, 0, *divmod(wait_ns, _NANOSECONDS))
            if self._libc.timerfd_settime(self.fd, 0, spec, None):
                raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """Give the descriptor back; once."""
        os.close(self.fd)
