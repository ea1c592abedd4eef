"""Which instances exchange requests, and which request goes (the ``migrate`` baseline; Llumnix, OSDI 2024). Pure.

Freeness of an instance = (memory - virtual usage) / batch size, where the request at the head of the queue counts as
usage and as part of the batch: blocks that each request could still take, a measure of how long the instance can go on.
Instances below a threshold give, instances above it take; the lowest is paired with the highest, the second lowest with
the second highest, and so on, one request at a time a pair. Dispatch (``policy.dispatch``) counts the whole queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from jettison.memory.kvtransfers import MigrationKind
from jettison.types import GroupId, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationParams:
    """When to migrate. The defaults are those of Llumnix's release."""

    threshold_blocks: float = 3.0
    """Freeness (blocks a request) below which an instance gives and above which it takes."""
    period_s: float = 0.05
    """Between two looks at all instances."""
    retry_s: float = 1.0
    """Pause between a failed transfer of two instances and their next one: a request stands still while its last blocks
    travel, so tries in a row over a broken link would never let it go on."""
    kind: MigrationKind | None = MigrationKind.KV
    """How requests go; None: each as is best for it and for the requests beside it (``policy.movekinds``)."""
    max_step_tokens: int | None = None
    """Most tokens of requests that go as tokens in one step of the destination; None: as many as the step has room
    for."""


class InstanceLoad(NamedTuple):
    """One group as the migration policy sees it."""

    group_id: GroupId
    capacity_blocks: int
    used_blocks: int
    """Held by requests, including requests on their way here."""
    head_blocks: int
    """Need of the request at the head of the queue; 0 when nothing waits."""
    batch_size: int
    """Running requests, and the one at the head of the queue."""
    takes: bool = True
    """Its batch has a place for another, and nothing caps what it admits."""


class MigrationRow(NamedTuple):
    """A running request that may go."""

    request_id: RequestId
    priority: int
    """Lower is sooner served."""
    num_blocks: int


class Pair(NamedTuple):
    """One instance gives to another."""

    source: GroupId
    destination: GroupId


def instance_freeness(load: InstanceLoad) -> float:
    """Blocks that each request could still take; negative when the head of the queue does not fit."""
    free = load.capacity_blocks - load.used_blocks - load.head_blocks
    # Divided, a shortage would look smaller the more requests suffer from it.
    return free / max(1, load.batch_size) if free > 0 else float(free)


def may_give(load: InstanceLoad, params: MigrationParams) -> bool:
    """Whether an instance would give a request away, were there one to take it."""
    return load.batch_size > 0 and instance_freeness(load) < params.threshold_blocks


def plan_pairs(
    loads: Sequence[InstanceLoad], params: MigrationParams, avoided: Set[Pair] = frozenset(),
    distance: Callable[[GroupId, GroupId], float] | None = None,
) -> tuple[Pair, ...]:
    """Sources (lowest freeness first) with destinations (highest first). Ties go to the nearest by ``distance``, where
    there is one (beyond Llumnix), then to the smaller id.

    A source passes over destinations that it is to avoid; they are left to the next source.
    """
    rated = [(instance_freeness(load), load.group_id) for load in loads if load.batch_size > 0]
    sources = sorted(entry for entry in rated if entry[0] < params.threshold_blocks)
    if not sources:
        return ()
    rated_takers = ((-instance_freeness(load), load.group_id) for load in loads if load.takes)
    takers = (entry for entry in rated_takers if -entry[0] > params.threshold_blocks)
    # Each avoided pair makes its source pass over one destination at most.
    most = len(sources) + len(avoided)
    destinations = heapq.nsmallest(most, takers) if distance is None else sorted(takers)
    pairs: list[Pair] = []
    for _, source in sources:
        taker = _taker(source, destinations, avoided, distance)
        if taker is not None:
            destinations.remove(taker)
            pairs.append(Pair(source, taker[1]))
    return tuple(pairs)


def _taker(
    source: GroupId, destinations: Sequence[tuple[float, GroupId]], avoided: Set[Pair],
    distance: Callable[[GroupId, GroupId], float] | None,
) -> tuple[float, GroupId] | None:
    """The destination of a source, of these, the freest first; None: there is none."""
    allowed = (entry for entry in destinations if Pair(source, entry[1]) not in avoided)
    first = next(allowed, None)
    if first is None or distance is None:
        return first
    alike = takewhile(lambda entry: entry[0] == first[0], allowed)
    return min((first, *alike), key=lambda entry: distance(source, entry[1]))


def choose_request(
    rows: Sequence[MigrationRow], source: InstanceLoad, destination: InstanceLoad, params: MigrationParams
) -> RequestId | None:
    """Of the lowest priority the shortest request, if the pair is better off after its move; None = no move.

    Better off: the destination stays above the threshold and at least as free as the source then is, so that the
    request is not sent back by the next look.
    """
    if not rows:
        return None
    row = min(rows, key=lambda r: (-r.priority, r.num_blocks, r.request_id))
    left = source._replace(used_blocks=source.used_blocks - row.num_blocks, batch_size=source.batch_size - 1)
    joined = destination._replace(
        used_blocks=destination.used_blocks + row.num_blocks, batch_size=destination.batch_size + 1
    )
    after = instance_freeness(joined)
    return row.request_id if after > params.threshold_blocks and after >= instance_freeness(left) else None
