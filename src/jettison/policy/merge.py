"""The drop plan: which groups to merge, and which layers each member keeps (KunServe v3 Fig. 6, design 5.1).

Pure. ``plan_drop`` repeats "merge the two smallest groups" until enough bytes are freed; every merge frees exactly one
copy of the parameters, whatever the sizes. ``plan_ranges`` divides the layers of a merged group.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jettison.types import EMBED_SHARD, HEAD_SHARD, GroupId, LayerRange, ModelShape, WorkerId, layer_shard


class MergeCandidate(NamedTuple):
    """A group that may be merged."""

    group_id: GroupId
    members: tuple[WorkerId, ...]
    resident: tuple[LayerRange, ...]
    """What each member still holds, in the order of ``members``."""
    pressure: float
    """Load over capacity."""
    free_bytes: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One member's part of a merged group."""

    worker_id: WorkerId
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class GroupMerge:
    """One new group made of existing ones, stages in pipeline order."""

    sources: tuple[GroupId, ...]
    stages: tuple[StagePlan, ...]


@dataclass(frozen=True, slots=True)
class DropPlan:
    """New groups and what they free. ``sufficient`` is False when even merging everything frees too little."""

    merges: tuple[GroupMerge, ...]
    freed_bytes: int
    required_bytes: int

    @property
    def sufficient(self) -> bool:
        """Whether the requirement is met."""
        return self.freed_bytes >= self.required_bytes


class _Node(NamedTuple):
    """Heap entry: smallest group first; among equals the one under most pressure, then most free memory."""

    num_members: int
    order: int
    candidate: tuple[MergeCandidate, ...]


def plan_drop(groups: Sequence[MergeCandidate], required_bytes: int, shape: ModelShape) -> DropPlan:
    """Merge groups, two smallest first, until ``required_bytes`` are freed or one group is left. O(N log N).

    Ties (all groups, at first) are broken so that the plan relieves the group that asked: the group under the highest
    pressure is paired with the one that has the most free memory. Groups whose members cannot be ordered into
    contiguous ranges inside what they hold are not merged (members would have to pull before they drop).
    """
    copy_bytes = shape.parameter_bytes
    by_pressure = sorted(groups, key=lambda g: (-g.pressure, g.group_id))
    by_room = sorted(groups, key=lambda g: (-g.free_bytes, g.pressure, g.group_id))
    # Interleave: most pressed, freest, second most pressed, second freest, ... so that heap order pairs them.
    order: dict[GroupId, int] = {}
    for pressed, roomy in zip(by_pressure, by_room, strict=True):
        for group in (pressed, roomy):
            order.setdefault(group.group_id, len(order))
    heap = [_Node(len(g.members), order[g.group_id], (g,)) for g in groups]
    heapq.heapify(heap)
    freed = 0
    counter = len(order)
    settled: list[_Node] = []
    while len(heap) >= 2 and freed < required_bytes:
        first = heapq.heappop(heap)
        second = heapq.heappop(heap)
        members = first.candidate + second.candidate
        if plan_ranges(members, shape) is None:
            settled.append(first)
            heapq.heappush(heap, second)
            continue
        freed += copy_bytes
        heapq.heappush(heap, _Node(first.num_members + second.num_members, counter, members))
        counter += 1
    merges = []
    for node in (*heap, *settled):
        if len(node.candidate) > 1:
            stages = plan_ranges(node.candidate, shape)
            assert stages is not None
            merges.append(GroupMerge(tuple(g.group_id for g in node.candidate), stages))
    merges.sort(key=lambda m: m.sources)
    return DropPlan(tuple(merges), freed, required_bytes)


def plan_ranges(groups: Sequence[MergeCandidate], shape: ModelShape) -> tuple[StagePlan, ...] | None:
    """Contiguous layer ranges for all members of ``groups``, balanced by parameter bytes, embedding and head counted.

    Members are ordered by where the layers they hold begin and end, so that each range lies inside what its member
    holds (members holding 0-23, 24-47 and everything come first, third, second). None if no balanced split fits.
    """
    members = [(r, w) for g in groups for w, r in zip(g.members, g.resident, strict=True)]
    members.sort(key=lambda m: (m[0].lo + m[0].hi, m[0].lo, m[1]))
    num = len(members)
    if num > shape.num_layers:
        return None
    weights = [shape.shard_bytes[layer_shard(i)] for i in range(shape.num_layers)]
    extra_first = shape.shard_bytes[EMBED_SHARD]
    extra_last = extra_first if shape.tied_embeddings else shape.shard_bytes[HEAD_SHARD]
    total = sum(weights) + extra_first + extra_last
    prefix = [0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)

    stages: list[StagePlan] = []
    lo = 0
    for index, (resident, worker) in enumerate(members):
        last = index == num - 1
        if last:
            hi = shape.num_layers
        else:
            goal = total * (index + 1) / num - extra_first
            latest = shape.num_layers - (num - index - 1)
            # A member may not run past what it holds, nor end before the next member's layers begin.
            latest = min(latest, resident.hi)
            earliest = max(lo + 1, members[index + 1][0].lo)
            if earliest > latest:
                return None
            hi = min(range(earliest, latest + 1), key=lambda cut: abs(prefix[cut] - goal))
        stage = LayerRange(lo, hi)
        if not stage.layers() or not resident.covers(stage):
            return None
        stages.append(StagePlan(worker, stage))
        lo = hi
    return tuple(stages)
