"""The processes of an engine that is measured: their processor time, and signals to all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import psutil


def members_of(pid: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    own = psutil.Process(pid)
    return [own, *own.children(recursive=True)]


def processor_s(members: Sequence[psutil.Process]) -> float:
    """Seconds of processor time that they have used."""
    total = 0.0
    for member in members:
        with contextlib.suppress(psutil.Error):
            times = member.cpu_times()
            total += times.user + times.system
    return total


def signal_all(members: Sequence[psutil.Process], number: int) -> None:
    """Send all of them a signal; those that have ended are passed over."""
    for member in members:
        with contextlib.suppress(psutil.Error):
            member.send_signal(number)
