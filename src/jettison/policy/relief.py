"""Relief: which running requests move to make room for the head of a queue that no group has memory for, and where the
head goes. Pure; beyond MELL, which knows no queue.

Free memory is in pieces: no group has room for a large request, although all together have several times as much. The
head waits at one group; running requests leave that group for others that have room now, until the head fits. As few
blocks move as suffice, since both ends hold a request's blocks until it has moved.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from jettison.policy.links import MachineDistance, one_or_another
from jettison.types import GroupId, RequestId

CANDIDATES = 16
"""Groups where room for the head is looked for, those with most free blocks: the others lack more."""


class Movable(NamedTuple):
    """A running request that may go."""

    request_id: RequestId
    num_blocks: int


class Holder(NamedTuple):
    """One group."""

    group_id: GroupId
    num_free: int
    """Blocks above its watermark, less the need of the requests that wait there (except the head); negative where they
    need more."""
    movable: Sequence[Movable] = ()
    takes_head: bool = True
    """The head may wait there: no other request does."""
    machine: Hashable = None
    """Inside one machine links are fast."""


class Leave(NamedTuple):
    """One request goes."""

    request_id: RequestId
    destination: GroupId


class Relief(NamedTuple):
    """A way to let the head in."""

    group_id: GroupId
    """Where the head waits."""
    leaves: tuple[Leave, ...]
    """Requests that leave this group; none: there is room."""
    num_blocks: int
    """Blocks that move."""


def plan_relief(
    head_blocks: int, holders: Sequence[Holder], distance: MachineDistance = one_or_another
) -> Relief | None:
    """The way that moves the fewest blocks; None where no group has room for the requests that would have to leave.
    ``distance``: between the machines of two holders."""
    takers = sorted((h for h in holders if h.takes_head), key=lambda h: (-h.num_free, h.group_id))[:CANDIDATES]
    found = (_relief_at(holder, head_blocks - holder.num_free, holders, distance) for holder in takers)
    return min((r for r in found if r is not None), key=lambda r: (r.num_blocks, r.group_id), default=None)


def _relief_at(
    holder: Holder, missing: int, holders: Iterable[Holder], distance: MachineDistance
) -> Relief | None:
    if missing <= 0:
        return Relief(holder.group_id, (), 0)
    options = (_leaves(rows, holder, holders, distance) for rows in _leaving(holder.movable, missing))
    for option in options:
        if option is not None:
            leaves, num_blocks = option
            return Relief(holder.group_id, leaves, num_blocks)
    return None


def _leaving(movable: Sequence[Movable], missing: int) -> list[list[Movable]]:
    """Sets of requests that free enough by leaving, the fewest blocks first. One is the smallest single request that
    suffices. The other is made of the largest ones that do not suffice alone, as many as it takes, less those that turn
    out not to be needed."""
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
    rows: Iterable[Movable], source: Holder, holders: Iterable[Holder], distance: MachineDistance
) -> tuple[tuple[Leave, ...], int] | None:
    """A destination for each request, the largest first: of the nearest groups with room for it, the one with the
    least. Also the sum of their blocks. None where a request finds no room."""
    free = {h.group_id: h.num_free for h in holders if h is not source}
    away = {h.group_id: distance(source.machine, h.machine) for h in holders}
    leaves: list[Leave] = []
    total = 0
    for row in sorted(rows, key=lambda m: (-m.num_blocks, m.request_id)):
        roomy = [g for g, num in free.items() if num >= row.num_blocks]
        if not roomy:
            return None
        to = min(roomy, key=lambda g: (away[g], free[g], g))
        free[to] -= row.num_blocks
        leaves.append(Leave(row.request_id, to))
        total += row.num_blocks
    return tuple(leaves), total
