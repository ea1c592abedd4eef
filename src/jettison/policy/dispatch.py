"""Which group gets a new request: the freest one (Llumnix's metric, design 5.1).

Pure. Freeness = (capacity - virtual usage) / batch size, in blocks; what queued requests will need counts as
usage, so a burst spreads over the groups before anything of it has been admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jettison.types import GroupId

DispatchKey = tuple[float, int, GroupId]


class GroupFreeness(NamedTuple):
    """One group as the dispatcher sees it. A group is one pooled unit, whatever its number of instances."""

    group_id: GroupId
    capacity_blocks: int
    used_blocks: int
    queued_blocks: int
    """Need of all waiting requests."""
    batch_size: int
    num_instances: int
    """Batch sizes are compared per instance."""


def freeness(group: GroupFreeness) -> float:
    """Blocks that each request of the batch could still take; negative when the queue outgrows the memory.

    A shortage is divided by the instances alone: shared out among the requests too, it would look smaller the more of
    them suffer from it, and a burst would follow the longest queue.
    """
    free = group.capacity_blocks - group.used_blocks - group.queued_blocks
    if free < 0:
        return free / group.num_instances
    return free / max(1.0, group.batch_size / group.num_instances)


def dispatch_key(group: GroupFreeness) -> DispatchKey:
    """The order of groups: the freest first, then the smaller batch, then the smaller id (which is the key's last)."""
    return -freeness(group), group.batch_size, group.group_id


def choose_group(groups: Sequence[GroupFreeness], needed_blocks: int) -> GroupId | None:
    """The freest group that could hold ``needed_blocks`` at all; if none could, the largest. None without groups.

    Ties go to the smaller batch, then to the smaller id, so that the choice does not depend on order.
    """
    if not groups:
        return None
    able = [g for g in groups if g.capacity_blocks >= needed_blocks]
    if not able:
        return max(groups, key=lambda g: (g.capacity_blocks, -g.group_id)).group_id
    return min(able, key=dispatch_key).group_id
