"""Which way lets the head of a queue in soonest: waiting for blocks to come free, a migration, waking a sleeper, or a
drop (beyond the papers: MELL activates devices, KunServe drops layers, and neither knows the other's way). Pure.

    wait      what runs gives back what the queue needs
    migrate   bytes over a link, or tokens that the destination computes, whole epochs of what either may take of it
    wake      parameters over a link (or from host memory, or the disk), mapped, and a first step
    drop      missing shards are pulled, the step in flight ends, layers are unmapped and their pages mapped as KV, KV
              lands that has to before there is room, and a first step

An unknown time is None: a way of unknown time is taken only where no way's time is known.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import NamedTuple


class Way(StrEnum):
    """Ways out. Of two that are as soon, the one that comes first here is cheaper."""

    WAIT = "wait"
    MIGRATE = "migrate"
    WAKE = "wake"
    DROP = "drop"


Times = Mapping[Way, float | None]
"""Seconds until the head is admitted, by each way that is open; None: not known."""


class WakeSource(StrEnum):
    """Where a sleeper's parameters come from."""

    PEERS = "peers"
    HOST = "host copy"
    DISK = "model folder"


BUSY_SHARE = 0.2
"""Share of its rate that a peer's link has for parameters while the peer serves: they go between the layers of its
steps, for a quarter of the steps' time (``live.worker.peers``)."""


class WakeForecast(NamedTuple):
    """The known costs of waking one sleeper."""

    num_bytes: int
    """Bytes of parameters; 0: it has not given them up yet."""
    bytes_per_s: float | None
    """Rate of the source."""
    map_s: float
    first_step_s: float
    source: WakeSource = WakeSource.PEERS
    is_busy: bool = False
    """Other instances serve meanwhile."""
    wait_s: float = 0.0
    """Seconds until the peers with the parameters have ended their present steps: only then do they read requests."""


class Migration(NamedTuple):
    """The known costs of making room by moving requests away."""

    num_bytes: int
    bytes_per_epoch: float | None
    """Bytes that the link carries without disturbing decodes; None: not known, or KV does not travel."""
    num_tokens: int
    tokens_per_epoch: float | None
    """Tokens that the destination computes beside its batch; None: not known, or it computes none."""
    epoch_s: float


def wake_s(wake: WakeForecast) -> float | None:
    """Seconds of a wake, for as long as no such wake has been measured; None where the rate is not known."""
    if not wake.num_bytes:
        return wake.first_step_s
    if not wake.bytes_per_s:
        return None
    return max(wake.wait_s, wake.map_s) + wake.num_bytes / wake.bytes_per_s + wake.first_step_s


class WakesTaken:
    """How long wakes have taken, by source and by whether other instances served meanwhile: the base of predictions."""

    def __init__(self) -> None:
        self._seconds_per_byte: dict[tuple[WakeSource, bool], float] = {}

    def note(self, wake: WakeForecast, took_s: float) -> None:
        """Note a wake that took ``took_s`` from its order on. The newest one has half of the weight."""
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
        taken = self._seconds_per_byte.get((wake.source, wake.is_busy))
        if taken is None:
            idle = self._seconds_per_byte.get((wake.source, False))
            if not wake.is_busy or idle is None:
                return raw_s
            return max(raw_s or 0.0, wake.num_bytes * idle + wake.first_step_s)
        return wake.num_bytes * taken + wake.first_step_s

    def soonest(self, wakes: Collection[WakeForecast]) -> WakeForecast:
        """Of the sources that one sleeper has, the one predicted to end first; the first one where nothing is known."""
        known = [(s, i) for i, wake in enumerate(wakes) if (s := self.seconds(wake)) is not None]
        return list(wakes)[min(known)[1] if known else 0]


def migrate_s(migration: Migration) -> float | None:
    """Seconds of a migration, as KV or as tokens, whichever ends first; None where neither is known."""
    kinds = (
        (migration.num_bytes, migration.bytes_per_epoch), (migration.num_tokens, migration.tokens_per_epoch),
    )  # fmt: skip
    epochs = [size / bound for size, bound in kinds if bound]
    if not epochs:
        return None
    # Moves of less than an epoch take their part of it; further moves begin only when the next epoch is planned.
    least = min(epochs)
    return migration.epoch_s * (least if least <= 1.0 else math.ceil(least))


def drop_s(
    step_left_s: float, unmap_s: float, map_s: float, first_step_s: float, pull_s: float = 0.0, land_s: float = 0.0
) -> float:
    """Seconds of a drop. ``pull_s``: until members have the shards that they lack; ``land_s``: until so much of the
    exchange has landed that the rest leaves room for the head."""
    return pull_s + step_left_s + unmap_s + map_s + land_s + first_step_s


def blocks_to_land(num_head: int, num_freed: int, num_landing: int) -> int:
    """Blocks of an exchange that have to land before the head of the queue finds room: freed blocks go to the exchange
    first (admission leaves free what the exchange still needs)."""
    return min(num_landing, max(0, num_landing + num_head - num_freed))


def soonest(times: Times) -> Way:
    """The way with the least time; where no time is known, the cheapest way other than waiting. Raises ValueError
    without any way."""
    known = {way: seconds for way, seconds in times.items() if seconds is not None and seconds < math.inf}
    if known:
        return min(known, key=lambda way: (known[way], list(Way).index(way)))
    unknown = [way for way in Way if way in times and way is not Way.WAIT]
    return unknown[0] if unknown else min(times, key=list(Way).index)


def is_worth_waiting_for(left_s: float, other_s: float) -> bool:
    """Whether a way under way that is predicted to end in ``left_s`` (below 0: it is late) holds back another way that
    would take ``other_s``: it ends no later, and is not late by more than the other would take."""
    return -other_s <= left_s <= other_s


def num_to_wake(missing_blocks: int, blocks_each: int, num_asleep: int, num_on_the_way: int) -> int:
    """How many more sleepers to wake so that ``missing_blocks`` find room, those on their way counted; at most
    ``num_asleep``."""
    wanted = max(1, -(-missing_blocks // max(1, blocks_each)))
    return max(0, min(wanted - num_on_the_way, num_asleep))


def may_wake(num_up: int, max_awake: int | None) -> int | None:
    """How many sleepers may be woken where ``num_up`` instances are up; None: any number."""
    return None if max_awake is None else max(0, max_awake - num_up)


def ways_as_fields(times: Times, taken: Way, ways: Collection[Way] = tuple(Way)) -> dict[str, object]:
    """For the event log."""
    return {"way": str(taken)} | {f"{way}_s": times[way] for way in ways if times.get(way) is not None}
