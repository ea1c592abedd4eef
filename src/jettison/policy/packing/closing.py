"""Moves that close a device, and no others: of all moves in MELL's table these save most for their cost. Pure.

A device is closed where all of its requests fit on others as they stand: no request there gives way.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from jettison.policy.packing.types import PackMove, Work
from jettison.types import GroupId, RequestId

CLOSES_EVERY = 5
"""Epochs between two looks for devices to close: fewer hardly close more, and more move the same requests again."""

CANDIDATES = 4
"""Devices that are tried, those with the fewest requests first, then the emptiest."""


def plan_closing(
    placed: Mapping[GroupId, Mapping[RequestId, int]], capacity: int, pinned: Set[RequestId] = frozenset(),
    work: Work | None = None,
) -> tuple[PackMove, ...]:
    """The moves that close one device: of those in use (``placed``: with sizes of their requests) the one that takes
    the fewest moves, and where no request is ``pinned``. Its requests go the largest first, each to the device with the
    least room that suffices, by memory and by ``work``. Empty where no device can be closed."""
    free = {device: capacity - sum(sizes.values()) for device, sizes in placed.items()}
    movable = [device for device, sizes in placed.items() if pinned.isdisjoint(sizes)]
    emptiest = sorted(movable, key=lambda d: (len(placed[d]), -free[d], d))
    for device in emptiest[:CANDIDATES]:
        left = {other: room for other, room in free.items() if other != device}
        num_there = {other: len(placed[other]) for other in left}
        moves: list[PackMove] = []
        for request_id, num_blocks in sorted(placed[device].items(), key=lambda row: (-row[1], row[0])):
            roomy = [
                other for other, room in left.items()
                if num_blocks <= (room if work is None else work.room(num_there[other], capacity - room, room))
            ]
            if not roomy:
                break
            to = min(roomy, key=lambda other: (left[other], other))
            left[to] -= num_blocks
            num_there[to] += 1
            moves.append(PackMove(request_id, device, to, num_blocks))
        if len(moves) == len(placed[device]):
            return tuple(moves)
    return ()
