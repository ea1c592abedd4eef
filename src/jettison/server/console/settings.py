"""Settings of the console."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jettison.core.ports import Record


class RecentRecords(Protocol):
    """``Engine.records_since``."""

    def __call__(self, after_ns: int, most: int) -> Sequence[Record]:
        """The newest records later than ``after_ns`` of the monotonic clock, oldest first, at most ``most``."""
        ...


def no_records(after_ns: int, most: int) -> Sequence[Record]:
    """Of an engine without an event log."""
    return ()


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """What the server serves of it, and to which clients."""

    is_on: bool = True
    is_open: bool = False
    """Whether its data needs no key where keys are required. The page itself never needs one."""
    records: RecentRecords = no_records
    clock: Callable[[], int] | None = None
    """Nanoseconds of the monotonic clock, for tests; None: the system's."""
