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
    stages: tuple[StagePlan, ...]
    """Empty for a group that is not merged."""


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
    heap = [_Node(len(g.members), order[g.group_id], (g,), ()) for g in groups]
    heapq.heapify(heap)
    freed = 0
    counter = len(order)
    settled: list[_Node] = []
    while len(heap) >= 2 and freed < required_bytes:
        first = heapq.heappop(heap)
        second = heapq.heappop(heap)
        members = first.candidate + second.candidate
        stages = plan_ranges(members, shape)
        if stages is None:
            settled.append(first)
            heapq.heappush(heap, second)
            continue
        freed += copy_bytes
        heapq.heappush(heap, _Node(first.num_members + second.num_members, counter, members, stages))
        counter += 1
    merges = [
        GroupMerge(tuple(g.group_id for g in node.candidate), node.stages) for node in (*heap, *settled) if node.stages
    ]
    merges.sort(key=lambda m: m.sources)
    return DropPlan(tuple(merges), freed, required_bytes)


def plan_ranges(groups: Sequence[MergeCandidate], shape: ModelShape) -> tuple[StagePlan, ...] | None:
    """Contiguous layer ranges for all members of ``groups``, balanced by parameter bytes, embedding and head counted.

    Each range lies inside what its member holds. Members that hold a part are ordered by the middle of it, those that
    hold everything go wherever they relieve the others most (members holding 0-23, 24-47 and everything: first,
    third, second). In that order the largest stage is as small as can be; among equals the numbers of layers are
    even, since the stage with most layers bounds the group's KV. None if that order allows no split.
    """
    members = [(r, w) for g in groups for w, r in zip(g.members, g.resident, strict=True)]
    if len(members) > shape.num_layers:
        return None
    wholes = sorted(w for r, w in members if r == shape.all_layers)
    parts = sorted((r.lo + r.hi, r.lo, w, r) for r, w in members if r != shape.all_layers)
    split = _best_split([r for *_, r in parts], len(wholes), shape)
    if split is None:
        return None
    part_workers, whole_workers = iter([w for _, _, w, _ in parts]), iter(wholes)
    stages: list[StagePlan] = []
    lo = 0
    for hi, is_whole in split:
        stages.append(StagePlan(next(whole_workers if is_whole else part_workers), LayerRange(lo, hi)))
        lo = hi
    return tuple(stages)


def stage_bytes(layers: LayerRange, shape: ModelShape) -> int:
    """Parameter bytes that a stage of ``layers`` holds."""
    return sum(shape.shard_bytes[shard] for shard in shape.shards_for(layers))


_Split = tuple[tuple[int, bool], ...]
"""End of each stage, and whether a member runs it that holds everything."""


def _best_split(parts: Sequence[LayerRange], num_wholes: int, shape: ModelShape) -> _Split | None:
    """Where to cut, for parts in this order and wholes anywhere.

    Dynamic programming over (end of the last stage so far, wholes used); O(layers) for two members,
    O(members * wholes * layers squared) for many.
    """
    num_stages, num_layers = len(parts) + num_wholes, shape.num_layers
    bytes_before = _bytes_before(shape)
    # State -> (bytes of the largest stage, sum of squared layer counts, the cuts that lead there).
    best: dict[tuple[int, int], tuple[int, int, _Split]] = {(0, 0): (0, 0, ())}
    for index in range(num_stages):
        following: dict[tuple[int, int], tuple[int, int, _Split]] = {}
        for (lo, used), (largest, squares, cuts) in best.items():
            limits = [(num_layers, True)] if used < num_wholes else []
            if index - used < len(parts) and parts[index - used].lo <= lo:
                limits.append((parts[index - used].hi, False))
            for limit, is_whole in limits:
                first = num_layers if index == num_stages - 1 else lo + 1
                for hi in range(first, min(limit, num_layers - (num_stages - index - 1)) + 1):
                    size = bytes_before[hi] - bytes_before[lo]
                    value = (max(largest, size), squares + (hi - lo) ** 2, (*cuts, (hi, is_whole)))
                    state = (hi, used + is_whole)
                    if state not in following or value < following[state]:
                        following[state] = value
        best = following
    found = best.get((num_layers, num_wholes))
    return found[2] if found is not None else None


def _bytes_before(shape: ModelShape) -> list[int]:
    """Parameter bytes before each layer's beginning: the embedding is part of the first layer, the head of the last."""
    extra_first = shape.shard_bytes[EMBED_SHARD]
    extra_last = extra_first if shape.tied_embeddings else shape.shard_bytes[HEAD_SHARD]
    before = [0]
    for layer in range(shape.num_layers):
        before.append(before[-1] + shape.shard_bytes[layer_shard(layer)])
    return [0, *(b + extra_first for b in before[1:-1]), before[-1] + extra_first + extra_last]
