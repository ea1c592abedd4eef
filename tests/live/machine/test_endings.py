"""A command that is told to end."""

from __future__ import annotations

import os
import signal
import time

import pytest

from jettison.live.machine.endings import CODE, ended_by_sigterm


def serve(closed: list[str]) -> None:
    """In place of a server."""
    with ended_by_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10.0)  # the signal ends this
        finally:
            closed.append("server")


def test_what_is_open_is_closed_when_a_command_is_told_to_end() -> None:
    closed: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as told:
        serve(closed)
    assert told.value.code == CODE == 143 and closed == ["server"]
    assert signal.getsignal(signal.SIGTERM) is before
