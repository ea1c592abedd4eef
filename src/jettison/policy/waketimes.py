"""How long waking a sleeper takes: parameters over a link (or from host memory, or the disk), while memory is mapped;
after the first wake as wakes have taken. Pure; beyond the papers.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple


class WakeSource(StrEnum):
    """Where a sleeper's parameters come from."""

    PEERS = "peers"
    HOST = "host copy"
    DISK = "model folder"


BUSY_SHARE = 0.2
"""Share of its rate that a peer's link has for parameters while the peer serves: they go between the layers of its
steps, for a quarter of the steps' time (``live.worker.peers``)."""


UNKNOWN_WAKE_S = 10.0
"""Seconds that a wake is taken to last while nothing is known of it."""

LEAST_OVERDUE_S = 5.0
"""Least seconds by which a wake must be overdue, and by no less than it was to take, not to be counted on any more."""


class WakeForecast(NamedTuple):
    """The known costs of waking one sleeper."""

    num_bytes: int
    """Bytes of parameters; 0: it has not given them up yet."""
    bytes_per_s: float | None
    """Rate of the source."""
    map_s: float
    source: WakeSource = WakeSource.PEERS
    is_busy: bool = False
    """Other instances serve meanwhile."""
    wait_s: float = 0.0
    """Seconds until the peers with the parameters have ended their present steps: only then do they read requests."""
    start_s: float | None = 0.0
    """Seconds that its process takes to start; 0: it has one. None: not known."""


def wake_s(wake: WakeForecast) -> float | None:
    """Seconds of a wake, for as long as no such wake has been measured; None where the rate is not known, or how long
    its process takes to start. A sleeper that has given nothing up is there at once."""
    if not wake.num_bytes:
        return 0.0
    if not wake.bytes_per_s or wake.start_s is None:
        return None
    return wake.start_s + max(wake.wait_s, wake.map_s) + wake.num_bytes / wake.bytes_per_s


class WakesTaken:
    """How long wakes have taken, by source and by whether other instances served meanwhile: the base of predictions."""

    def __init__(self) -> None:
        self._seconds_per_byte: dict[tuple[WakeSource, bool], float] = {}

    def note(self, wake: WakeForecast, took_s: float) -> None:
        """Note a wake that took ``took_s`` from its order on, or from when its process was there. The newest one has
        half of the weight."""
        if not wake.num_bytes:
            return
        key, newest = (wake.source, wake.is_busy), took_s / wake.num_bytes
        self._seconds_per_byte[key] = (self._seconds_per_byte.get(key, newest) + newest) / 2

    def seconds(self, wake: WakeForecast) -> float | None:
        """Seconds until a sleeper serves: as long as such wakes have taken, else by ``wake_s``. A wake beside serving
        instances is taken to be no shorter than one without. None where nothing is known."""
        raw_s = wake_s(wake)
        if not wake.num_bytes:
            return raw_s
        if wake.start_s is None:
            return None
        taken = self._seconds_per_byte.get((wake.source, wake.is_busy))
        if taken is None:
            idle = self._seconds_per_byte.get((wake.source, False))
            if not wake.is_busy or idle is None:
                return raw_s
            return max(raw_s or 0.0, wake.start_s + wake.num_bytes * idle)
        return wake.start_s + wake.num_bytes * taken

    def soonest(self, wakes: Collection[WakeForecast]) -> WakeForecast:
        """Of the sources that one sleeper has, the one predicted to end first; the first one where nothing is known."""
        known = [(s, i) for i, wake in enumerate(wakes) if (s := self.seconds(wake)) is not None]
        return list(wakes)[min(known)[1] if known else 0]


def left_s(waited_s: float, takes_s: float | None) -> float | None:
    """Seconds that are left of a wake that was ordered ``waited_s`` ago and predicted to take ``takes_s`` (None: not
    known). One that is late is expected in as long as it is late by; None of one that is overdue, and not to be counted
    on."""
    due_s, slack_s = (UNKNOWN_WAKE_S, LEAST_OVERDUE_S) if takes_s is None else (takes_s, max(LEAST_OVERDUE_S, takes_s))
    return abs(due_s - waited_s) if waited_s < due_s + slack_s else None


def num_to_wake(missing_blocks: int, blocks_each: int, num_asleep: int, num_on_the_way: int) -> int:
    """How many more sleepers to wake so that ``missing_blocks`` find room, those on their way counted; at most
    ``num_asleep``."""
    wanted = max(1, -(-missing_blocks // max(1, blocks_each)))
    return max(0, min(wanted - num_on_the_way, num_asleep))


def may_wake(num_up: int, max_awake: int | None) -> int | None:
    """How many sleepers may be woken where ``num_up`` instances are up; None: any number."""
    return None if max_awake is None else max(0, max_awake - num_up)
