"""Who makes room for the head of a queue that memory keeps out everywhere, and where the head goes. Pure; beyond MELL,
which knows no queue.

What is free is in pieces: no group has room for a large request, all together have it several times over. Some group
lacks least. There the head waits, and those whose leaving lets it in go where they have room now: as few blocks as will
do, since what moves is held at both ends until it has moved.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from jettison.types import GroupId, RequestId

CANDIDATES = 16
"""Groups, those with most free blocks, where room is looked for: the others lack more."""


class Movable(NamedTuple):
    """A running request that may go."""

    request_id: RequestId
    num_blocks: int


class Holder(NamedTuple):
    """One group."""

    group_id: GroupId
    num_free: int
    """Blocks above its watermark, less what waits there (but for the head); negative where that is more."""
    movable: Sequence[Movable] = ()
    takes_head: bool = True
    """Nobody else waits there."""
    machine: Hashable = None
    """Inside one, links are fast."""


class Leave(NamedTuple):
    """One request goes."""

    request_id: RequestId
    destination: GroupId


class Relief(NamedTuple):
    """How the head gets in."""

    group_id: GroupId
    """Where it waits."""
    leaves: tuple[Leave, ...]
    """From there; none: there is room."""
    num_blocks: int
    """That move."""


def plan_relief(head_blocks: int, holders: Sequence[Holder]) -> Relief | None:
    """The way that moves the fewest blocks; None where none has room enough for who would have to go."""
    takers = sorted((h for h in holders if h.takes_head), key=lambda h: (-h.num_free, h.group_id))[:CANDIDATES]
    found = (_relief_at(holder, head_blocks - holder.num_free, holders) for holder in takers)
    return min((r for r in found if r is not None), key=lambda r: (r.num_blocks, r.group_id), default=None)


def _relief_at(holder: Holder, missing: int, holders: Iterable[Holder]) -> Relief | None:
    if missing <= 0:
        return Relief(holder.group_id, (), 0)
    options = (_leaves(rows, holder, holders) for rows in _leaving(holder.movable, missing))
    for option in options:
        if option is not None:
            leaves, num_blocks = option
            return Relief(holder.group_id, leaves, num_blocks)
    return None


def _leaving(movable: Sequence[Movable], missing: int) -> list[list[Movable]]:
    """Sets whose leaving suffices, the fewest blocks first: the one smallest request that does, and the largest that do
    not, as many as it takes, without those that turn out not to be needed."""
    rows = sorted(movable, key=lambda m: (m.num_blocks, m.request_id))
    at = bisect.bisect_left(rows, missing, key=lambda m: m.num_blocks)
    sets = [[rows[at]]] if at < len(rows) else []
    several: list[Movable] = []
    total = 0
    for row in reversed(rows[:at]):
        if total >= missing:
            break
        several.append(row)
        total += row.num_blocks
    if total >= missing:
        for row in sorted(several, key=lambda m: m.num_blocks):
            if total - row.num_blocks >= missing:
                several.remove(row)
                total -= row.num_blocks
        sets.append(several)
    return sorted(sets, key=lambda chosen: sum(m.num_blocks for m in chosen))


def _leaves(
    rows: Iterable[Movable], source: Holder, holders: Iterable[Holder]
) -> tuple[tuple[Leave, ...], int] | None:
    """Each to where least is left beside it, in the source's machine where there is room, the largest first; None where
    one finds no room."""
    free = {h.group_id: h.num_free for h in holders if h is not source}
    is_far = {h.group_id: h.machine != source.machine for h in holders}
    leaves: list[Leave] = []
    total = 0
    for row in sorted(rows, key=lambda m: (-m.num_blocks, m.request_id)):
        roomy = [g for g, num in free.items() if num >= row.num_blocks]
        if not roomy:
            return None
        to = min(roomy, key=lambda g: (is_far[g], free[g], g))
        free[to] -= row.num_blocks
        leaves.append(Leave(row.request_id, to))
        total += row.num_blocks
    return tuple(leaves), total
