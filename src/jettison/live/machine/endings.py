"""A command that started servers ends them also when it is told to end itself."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

CODE = 128 + signal.SIGTERM


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
