"""Who falls asleep by itself, and when (MELL section VI: an idle device is terminated). Pure.

Only without pressure; one that no online request has used for a while, and that the packing (where there is one) does
not want; never so many that fewer than ``min_awake`` serve. Offline work keeps nobody awake, unless a deadline of it
would be missed by those that are left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from jettison.types import GroupId


class IdleGroup(NamedTuple):
    """An instance without online requests."""

    group_id: GroupId
    empty_s: float
    """Since the last of them left, or since it began to serve."""


class OfflineWork(NamedTuple):
    """One offline request that has a deadline."""

    due_s: float
    """From now."""
    work_s: float
    """Of one instance."""


def choose_sleepers(
    idle: Sequence[IdleGroup], num_serving: int, min_awake: int, after_s: float, unwanted: Collection[GroupId] | None,
) -> list[GroupId]:
    """Those that may sleep now, the longest empty first. ``unwanted``: by the packing; None: it has no say."""
    may = [g for g in idle if g.empty_s >= after_s and (unwanted is None or g.group_id in unwanted)]
    may.sort(key=lambda g: (-g.empty_s, -g.group_id))
    return [g.group_id for g in may[: max(0, num_serving - min_awake)]]


def misses_deadline(work: Sequence[OfflineWork], num_instances: int) -> bool:
    """Whether so many instances, which serve what is due first, would be late with some of it."""
    total_s = 0.0
    for each in sorted(work):
        total_s += each.work_s
        if total_s > max(0, num_instances) * each.due_s:
            return True
    return False
