"""The five properties of MELL's Theorem 1, as counts of devices that break them. Independent of the code that keeps
them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from jettison.policy.packing.types import SizeClass, size_class
from jettison.types import GroupId, RequestId

if TYPE_CHECKING:
    from jettison.policy.packing.mell import Packing


class Exceptions(NamedTuple):
    """Devices that break a property of Theorem 1 (MELL, section VII). Sharing is left aside."""

    unpaired_m: int
    """1. M-devices with M alone, and other than two."""
    uncompleted_s: int
    """2. S-devices with other than three S."""
    unfilled_t: int
    """3. T-devices below 3/4."""
    lone_l: int
    """4. L-devices without M and S that some M or S of an M- or S-device would fit, were there no T beside it."""
    unfilled_others: int
    """5. S-, M- and L-devices below 3/4 while there are T-devices."""
    misfits: int
    """Devices with a mix of classes that no category has: M and S that weigh less than a device (an M is a half, an S a
    third: they weigh as much as Theorem 2 counts for a device), an L with two."""


ALLOWED = Exceptions(1, 1, 1, 0, 0, 0)
"""The constant of Theorem 1: one incomplete device of each kind, three together."""


def count_exceptions(devices: Mapping[GroupId, Mapping[RequestId, int]], capacity: int) -> Exceptions:
    """Counted from the requests on each device and their sizes alone."""
    unpaired = uncompleted = unfilled_t = unfilled_others = misfits = num_t = 0
    rooms: list[int] = []
    middles: list[int] = []
    for sizes in devices.values():
        bigs = sorted((s for s in sizes.values() if size_class(s, capacity) >= SizeClass.S), reverse=True)
        classes = [size_class(s, capacity) for s in bigs]
        is_filled = 4 * sum(sizes.values()) >= 3 * capacity
        if not classes:
            num_t += 1
            unfilled_t += not is_filled
            continue
        unfilled_others += not is_filled
        if classes[0] is SizeClass.L:
            misfits += len(classes) > 2
            rooms += [capacity - bigs[0]] if len(classes) == 1 else []
            continue
        middles += bigs
        is_mixed = classes[0] is not classes[-1]
        misfits += is_mixed and 3 * classes.count(SizeClass.M) + 2 * classes.count(SizeClass.S) < 6
        unpaired += classes[0] is SizeClass.M and not is_mixed and len(classes) != 2
        uncompleted += classes[0] is SizeClass.S and len(classes) != 3
    smallest = min(middles, default=capacity)
    lone = sum(room >= smallest for room in rooms)
    return Exceptions(unpaired, uncompleted, unfilled_t, lone, unfilled_others if num_t else 0, misfits)


def num_owed(packing: Packing) -> int:
    """Owed moves: exceptions beyond the constant, over the devices that are packed. These stay because requests are
    held or pinned, or devices are too few. Each takes at least one move of an item to mend. Looks at every request."""
    devices = {b.device: packing.requests_on(b.device) for b in packing.book.bins.values() if b.is_taking}
    found = count_exceptions(devices, packing.params.capacity)
    return sum(_beyond(found, ALLOWED))


def _beyond(found: Iterable[int], allowed: Iterable[int]) -> Iterable[int]:
    return (max(0, many - few) for many, few in zip(found, allowed))
