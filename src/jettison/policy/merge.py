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
    holds (members holding 0-23, 24-47 and everything come first, third, second). Two orders are tried, by the middle
    of what they hold and by earliest end; the one whose largest stage is smaller wins. None if neither allows each
    member a layer.
    """
    members = [(r, w) for g in groups for w, r in zip(g.members, g.resident, strict=True)]
    if len(members) > shape.num_layers:
        return None
    by_middle = sorted(members, key=lambda m: (m[0].lo + m[0].hi, m[0].lo, m[1]))
    by_deadline = _by_deadline(members, shape.num_layers)
    splits = [_split(order, shape) for order in ([by_middle] if by_middle == by_deadline else [by_middle, by_deadline])]
    return min((s for s in splits if s), key=lambda s: max(stage_bytes(p.layers, shape) for p in s), default=None)


def stage_bytes(layers: LayerRange, shape: ModelShape) -> int:
    """Parameter bytes that a stage of ``layers`` holds."""
    return sum(shape.shard_bytes[shard] for shard in shape.shards_for(layers))


def _by_deadline(members: Sequence[tuple[LayerRange, WorkerId]], num_layers: int) -> list[tuple[LayerRange, WorkerId]]:
    """At each even share of the layers the member that holds it and whose layers end first."""
    left = sorted(members, key=lambda m: (m[0].hi, m[0].lo, m[1]))
    order: list[tuple[LayerRange, WorkerId]] = []
    for index in range(len(members)):
        layer = index * num_layers // len(members)
        chosen = next((m for m in left if m[0].lo <= layer < m[0].hi), left[0])
        left.remove(chosen)
        order.append(chosen)
    return order


def _split(members: Sequence[tuple[LayerRange, WorkerId]], shape: ModelShape) -> tuple[StagePlan, ...] | None:
    """Ranges for members in this order, as even as what they hold allows; None if it does not."""
    bounds = _bounds_of_ends([resident for resident, _ in members], shape.num_layers)
    if bounds is None:
        return None
    extra_first = shape.shard_bytes[EMBED_SHARD]
    extra_last = extra_first if shape.tied_embeddings else shape.shard_bytes[HEAD_SHARD]
    prefix = [0]
    for layer in range(shape.num_layers):
        prefix.append(prefix[-1] + shape.shard_bytes[layer_shard(layer)])
    left = prefix[-1] + extra_first + extra_last

    stages: list[StagePlan] = []
    lo = 0
    for index, (_, worker) in enumerate(members):
        # An even share of what is left: a member that must take more or less than its share changes it for the others.
        share = left / (len(members) - index)
        extra = extra_first if index == 0 else 0
        earliest, latest = bounds[index]
        ends = range(max(earliest, lo + 1), latest + 1)
        hi = min(ends, key=lambda end: abs(prefix[end] - prefix[lo] + extra - share))
        left -= prefix[hi] - prefix[lo] + extra
        stages.append(StagePlan(worker, LayerRange(lo, hi)))
        lo = hi
    return tuple(stages)


def _bounds_of_ends(resident: Sequence[LayerRange], num_layers: int) -> list[tuple[int, int]] | None:
    """Earliest and latest end of each stage, in this order, so that all can run inside what they hold; or None."""
    earliest = [0] * len(resident)
    for index in range(len(resident)):
        after_previous = earliest[index - 1] + 1 if index else 1
        next_begins = resident[index + 1].lo if index + 1 < len(resident) else num_layers
        earliest[index] = max(after_previous, next_begins)
    latest = [0] * len(resident)
    for index in reversed(range(len(resident))):
        before_next = latest[index + 1] - 1 if index + 1 < len(resident) else num_layers
        latest[index] = min(before_next, resident[index].hi)
    bounds = list(zip(earliest, latest, strict=True))
    return bounds if resident[0].lo == 0 and all(lo <= hi for lo, hi in bounds) else None
