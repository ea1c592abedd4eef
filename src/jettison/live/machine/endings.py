"""A command that started processes ends them also when it is told to end itself, and where it is killed."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

CODE = 128 + signal.SIGTERM

_PR_SET_PDEATHSIG = 1


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM (of ``timeout``, a service manager, CI) unwinds the stack as Ctrl-C does, so that servers, workers and
    temporary folders go with it; the exit code is a shell's for it. For the main thread of a command."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(*_: object) -> NoReturn:
    raise SystemExit(CODE)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process with the thread that began it, whatever it does then; end it at once where that
    process, ``parent_pid``, is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the request was made
        os._exit(1)
