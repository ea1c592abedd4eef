"""Which way lets the head of a queue in soonest: blocks that come free by themselves, a migration, a sleeper that is
woken, or a drop (beyond the papers: MELL activates devices, KunServe drops layers, and neither knows the other). Pure.

    wait      what runs gives back what the queue needs
    migrate   bytes over a link, or tokens that the destination computes, whole epochs of what either may take of it
    wake      parameters over a link (or from host memory, or the disk), mapped, and a first step
    drop      missing shards are pulled, the step in flight ends, layers are unmapped and their pages mapped as KV, KV
              lands that has to before there is room, and a first step

A time that is not known is None: such a way is taken where no other is there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import NamedTuple


class Way(StrEnum):
    """Of two that are as soon, the one that comes first here is cheaper."""

    WAIT = "wait"
    MIGRATE = "migrate"
    WAKE = "wake"
    DROP = "drop"


Times = Mapping[Way, float | None]
"""Seconds until the head is let in, of the ways that there are; None: not known."""


class WakeSource(StrEnum):
    """Where a sleeper's parameters come from."""

    PEERS = "peers"
    HOST = "host copy"
    DISK = "model folder"


BUSY_SHARE = 0.2
"""Of its rate, what the link of a peer carries that serves meanwhile: parameters go between the layers of its steps,
for a quarter of the time that these take (``live.worker.peers``)."""


class WakeForecast(NamedTuple):
    """What is known of waking one sleeper."""

    num_bytes: int
    """Of parameters; 0: it has not given them up yet."""
    bytes_per_s: float | None
    """From where they come."""
    map_s: float
    first_step_s: float
    source: WakeSource = WakeSource.PEERS
    is_busy: bool = False
    """Others serve meanwhile."""
    wait_s: float = 0.0
    """Until those who have the parameters are through with the steps that they are at: before, they hear of nothing."""


class Migration(NamedTuple):
    """What is known of making room by moving requests away."""

    num_bytes: int
    bytes_per_epoch: float | None
    """That the link takes without disturbing anybody; None: not known, or KV does not travel."""
    num_tokens: int
    tokens_per_epoch: float | None
    """That the destination computes beside its batch; None: not known, or it computes none."""
    epoch_s: float


def wake_s(wake: WakeForecast) -> float | None:
    """Seconds, before any such wake has been measured; None where the rate is not known."""
    if not wake.num_bytes:
        return wake.first_step_s
    if not wake.bytes_per_s:
        return None
    return max(wake.wait_s, wake.map_s) + wake.num_bytes / wake.bytes_per_s + wake.first_step_s


class WakesTaken:
    """How long wakes have taken, by source and by whether others served meanwhile: what the next is predicted by."""

    def __init__(self) -> None:
        self._seconds_per_byte: dict[tuple[WakeSource, bool], float] = {}

    def note(self, wake: WakeForecast, took_s: float) -> None:
        """One is over, ``took_s`` after the order; half of what is believed is the newest."""
        if not wake.num_bytes:
            return
        key, newest = (wake.source, wake.is_busy), took_s / wake.num_bytes
        self._seconds_per_byte[key] = (self._seconds_per_byte.get(key, newest) + newest) / 2

    def seconds(self, wake: WakeForecast) -> float | None:
        """Until a sleeper serves: as such wakes have taken, else as ``wake_s`` has it, but no less beside others' work
        than without; None where nothing is known."""
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
        """Of the sources that one sleeper has, the one that is predicted to be over first; else the first."""
        known = [(s, i) for i, wake in enumerate(wakes) if (s := self.seconds(wake)) is not None]
        return list(wakes)[min(known)[1] if known else 0]


def migrate_s(migration: Migration) -> float | None:
    """Seconds, as KV or as tokens, whichever is over first; None where neither is known."""
    kinds = (
        (migration.num_bytes, migration.bytes_per_epoch), (migration.num_tokens, migration.tokens_per_epoch),
    )  # fmt: skip
    epochs = [size / bound for size, bound in kinds if bound]
    if not epochs:
        return None
    # What fits into one epoch takes its part of it; the next begins when the next is planned.
    least = min(epochs)
    return migration.epoch_s * (least if least <= 1.0 else math.ceil(least))


def drop_s(
    step_left_s: float, unmap_s: float, map_s: float, first_step_s: float, pull_s: float = 0.0, land_s: float = 0.0
) -> float:
    """Seconds. ``pull_s``: until shards are there that a member lacks; ``land_s``: until so much of the exchange has
    landed that what it still needs leaves room for the head."""
    return pull_s + step_left_s + unmap_s + map_s + land_s + first_step_s


def blocks_to_land(num_head: int, num_freed: int, num_landing: int) -> int:
    """Blocks of an exchange that have to land before the head of the queue finds room: what is freed is for those first
    (admission leaves free what the exchange still needs)."""
    return min(num_landing, max(0, num_landing + num_head - num_freed))


def soonest(times: Times) -> Way:
    """The way with the least time; where none is known, the cheapest that is no waiting. Raises ValueError without
    any way."""
    known = {way: seconds for way, seconds in times.items() if seconds is not None and seconds < math.inf}
    if known:
        return min(known, key=lambda way: (known[way], list(Way).index(way)))
    unknown = [way for way in Way if way in times and way is not Way.WAIT]
    return unknown[0] if unknown else min(times, key=list(Way).index)


def is_worth_waiting_for(left_s: float, other_s: float) -> bool:
    """Whether something that is predicted to be over in ``left_s`` (less than 0: it is late) holds back another way
    that would take ``other_s``: it is not later, and not late by more than the other would take."""
    return -other_s <= left_s <= other_s


def num_to_wake(missing_blocks: int, blocks_each: int, num_asleep: int, num_on_the_way: int) -> int:
    """How many more are woken so that what is missing finds room with those that are on their way."""
    wanted = max(1, -(-missing_blocks // max(1, blocks_each)))
    return max(0, min(wanted - num_on_the_way, num_asleep))


def may_wake(num_up: int, max_awake: int | None) -> int | None:
    """How many may be woken where so many are up; None: any number."""
    return None if max_awake is None else max(0, max_awake - num_up)


def ways_as_fields(times: Times, taken: Way, ways: Collection[Way] = tuple(Way)) -> dict[str, object]:
    """For the event log."""
    return {"way": str(taken)} | {f"{way}_s": times[way] for way in ways if times.get(way) is not None}
