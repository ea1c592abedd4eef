"""Which group gets a new request: the first in an order of groups, of which there are two.

Pure. ``by_freeness``, ours: of the groups with the fewest prompts ahead the freest (Llumnix's metric, design 5.1).
Freeness = (capacity - virtual usage) / batch size, in blocks; the future need of queued requests counts as usage, so a
burst spreads over the groups before any of its requests is admitted. Freeness knows nothing of compute: of two
instances with the same memory one may have a prompt of 16,000 tokens to compute first. So groups are first compared by
the prompt tokens ahead of a newcomer, in full steps: less than a step makes little difference to it. Where the queue
has outgrown the memory, a newcomer waits for memory anyhow, and freeness alone counts.

A pipeline that will be restored is compared by the blocks that its members would have free as separate instances. With
the memory of the dropped layers it would look so free that it drew most arrivals and never became empty enough to be
restored. That memory is the last resort, and counts as a tenth.

``by_requests``, for baselines: the fewest unfinished requests for each instance, and nothing else, as a proxy before
several engines does that counts open connections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jettison.types import GroupId

LAST_RESORT = 0.1
"""Weight of a free block that a pipeline has only until it is restored."""

DispatchKey = tuple[float, float, int, GroupId]


class GroupFreeness(NamedTuple):
    """One group as the dispatcher sees it. A group is one pooled unit, whatever its number of instances."""

    group_id: GroupId
    capacity_blocks: int
    used_blocks: int
    queued_blocks: int
    """Need of all waiting online requests."""
    batch_size: int
    num_instances: int
    """Batch sizes are compared per instance."""
    prefill_tokens: int = 0
    """Prompt tokens that its running and waiting online requests still have to compute; of a waiting request the whole
    prompt, as its cached part is not known yet."""
    step_tokens: int = 1
    """Token budget of a step."""
    apart_blocks: int | None = None
    """Of a pipeline that will be restored: what its members would hold together as instances."""
    num_unfinished: int = 0
    """Requests that it was given and that have not ended, of both classes."""


def freeness(group: GroupFreeness) -> float:
    """Blocks that each request of the batch could still take; negative when the queue outgrows the memory.

    A shortage is divided by the instances alone: shared out among the requests too, it would look smaller the more of
    them suffer from it, and a burst would follow the longest queue.
    """
    taken = group.used_blocks + group.queued_blocks
    free: float = group.capacity_blocks - taken
    if free < 0:
        return free / group.num_instances
    if group.apart_blocks is not None:
        apart = min(group.apart_blocks, group.capacity_blocks)
        free = max((apart - taken) / group.num_instances, LAST_RESORT * free)
    return free / max(1.0, group.batch_size / group.num_instances)


DispatchOrder = Callable[[GroupFreeness], DispatchKey]
"""The group with the least key goes first."""


def by_freeness(group: GroupFreeness) -> DispatchKey:
    """The order of groups: the fewest prompts ahead first, then the freest, then the smaller batch, then the smaller id
    (which is the key's last)."""
    free = freeness(group)
    steps = math.inf if free < 0 else steps_ahead(group)
    return steps, -free, group.batch_size, group.group_id


def by_requests(group: GroupFreeness) -> DispatchKey:
    """The order of groups by unfinished requests for each instance, then by id."""
    return group.num_unfinished / group.num_instances, 0.0, 0, group.group_id


ORDERS: Mapping[str, DispatchOrder] = {"freest": by_freeness, "fewest-requests": by_requests}
"""By the values of ``--dispatch``."""


def steps_ahead(group: GroupFreeness) -> int:
    """How many full steps each of its instances needs for the prompts ahead of a newcomer."""
    return group.prefill_tokens // (group.step_tokens * group.num_instances)


def choose_group(
    groups: Sequence[GroupFreeness], needed_blocks: int, order: DispatchOrder = by_freeness
) -> GroupId | None:
    """The first group that could hold ``needed_blocks`` at all; if none could, the largest. None without groups.

    Ties go to the smaller id, so that the choice does not depend on the sequence of ``groups``.
    """
    if not groups:
        return None
    able = [g for g in groups if g.capacity_blocks >= needed_blocks]
    if not able:
        return max(groups, key=lambda g: (g.capacity_blocks, -g.group_id)).group_id
    return min(able, key=order).group_id
