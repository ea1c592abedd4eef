"""Settings of the console."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Protocol

from jettison.live.engine.api import LogPart


class RecentRecords(Protocol):
    """``Engine.records_since``."""

    def __call__(self, after_ns: int, most: int, kinds: Container[str], until_ns: int | None = None) -> LogPart:
        """The newest records of these kinds, later than ``after_ns`` of the monotonic clock and not later than
        ``until_ns``, at most ``most``."""
        ...


def no_records(after_ns: int, most: int, kinds: Container[str], until_ns: int | None = None) -> LogPart:
    """Of an engine without an event log: what happened is not known."""
    return LogPart((), 0, is_kept=False)


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """What the server serves of it, and to which clients."""

    is_on: bool = True
    is_open: bool = False
    """Whether its data needs no key where keys are required. The page itself never needs one."""
    records: RecentRecords = no_records
    clock: Callable[[], int] | None = None
    """Nanoseconds of the monotonic clock, for tests; None: the system's."""
