"""Which layers each member of a merged group keeps, and which shards it has to pull first (design 5.1).

Pure. Ranges are contiguous, cover every layer once, and lie inside what their members hold wherever an order of stages
allows that; where none does, the shards that are missing are named with the member that can send them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, ShardId, WorkerId, layer_shard

LinkDistance = Callable[[WorkerId, WorkerId], float]
"""How far two workers are from each other, in any unit: 0 in one machine, more across switches."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One member's part of a merged group."""

    worker_id: WorkerId
    layers: LayerRange


class Pull(NamedTuple):
    """A shard that a member needs for its stage and does not hold."""

    shard: ShardId
    src: WorkerId
    dst: WorkerId


class Member(NamedTuple):
    """A worker and the layers whose parameters it holds."""

    worker_id: WorkerId
    resident: LayerRange


class RangePlan(NamedTuple):
    """Stages in pipeline order, and what has to be pulled before anybody drops anything."""

    stages: tuple[StagePlan, ...]
    pulls: tuple[Pull, ...] = ()


def plan_stages(
    members: Sequence[Member], shape: ModelShape, *, may_pull: bool = False, distance: LinkDistance | None = None
) -> RangePlan | None:
    """Contiguous layer ranges for all members, balanced by parameter bytes, embedding and head counted.

    Members that hold a part are ordered by the middle of it, those that hold everything go wherever they relieve the
    others most (members holding 0-23, 24-47 and everything: first, third, second). In that order the largest stage is
    as small as can be; among equals the numbers of layers are even, since the stage with most layers bounds the
    group's KV. Where that order allows no split inside what members hold, the one with the fewest bytes to pull is
    taken (``may_pull``), each shard from the nearest holder that has least to send. None if there is no split.
    """
    if len(members) > shape.num_layers:
        return None
    wholes = sorted(m.worker_id for m in members if m.resident == shape.all_layers)
    parts = sorted(
        (m for m in members if m.resident != shape.all_layers),
        key=lambda m: (m.resident.lo + m.resident.hi, m.resident.lo, m.worker_id),
    )
    residents = [m.resident for m in parts]
    split = _best_split(residents, len(wholes), shape, may_pull=False)
    if split is None and may_pull:
        split = _best_split(residents, len(wholes), shape, may_pull=True)
    if split is None:
        return None
    part_workers, whole_workers = iter([m.worker_id for m in parts]), iter(wholes)
    stages: list[StagePlan] = []
    lo = 0
    for hi, is_whole in split:
        stages.append(StagePlan(next(whole_workers if is_whole else part_workers), LayerRange(lo, hi)))
        lo = hi
    pulls = _plan_pulls(stages, members, shape, distance) if may_pull else ()
    return None if pulls is None else RangePlan(tuple(stages), pulls)


def stage_bytes(layers: LayerRange, shape: ModelShape) -> int:
    """Parameter bytes that a stage of ``layers`` holds."""
    return sum(shape.shard_bytes[shard] for shard in shape.shards_for(layers))


def _plan_pulls(
    stages: Sequence[StagePlan], members: Sequence[Member], shape: ModelShape, distance: LinkDistance | None
) -> tuple[Pull, ...] | None:
    """Every shard that a stage lacks, from the nearest member that holds it; None if nobody does."""
    held = {m.worker_id: shape.shards_for(m.resident) for m in members}
    sent = dict.fromkeys(held, 0)
    pulls: list[Pull] = []
    for stage in stages:
        for shard in sorted(shape.shards_for(stage.layers) - held[stage.worker_id]):
            holders = [
                (distance(w, stage.worker_id) if distance is not None else 0.0, sent[w], w)
                for w, shards in held.items()
                if shard in shards
            ]
            if not holders:
                return None
            src = min(holders)[2]
            sent[src] += shape.shard_bytes[shard]
            pulls.append(Pull(shard, src, stage.worker_id))
    return tuple(pulls)


_Split = tuple[tuple[int, bool], ...]
"""End of each stage, and whether a member runs it that holds everything."""


def _best_split(parts: Sequence[LayerRange], num_wholes: int, shape: ModelShape, *, may_pull: bool) -> _Split | None:
    """Where to cut, for parts in this order and wholes anywhere.

    Dynamic programming over (end of the last stage so far, wholes used); O(layers) for two members,
    O(members * wholes * layers squared) for many.
    """
    num_stages, num_layers = len(parts) + num_wholes, shape.num_layers
    bytes_before = _bytes_before(shape)
    # State -> (bytes to pull, bytes of the largest stage, sum of squared layer counts, the cuts that lead there).
    best: dict[tuple[int, int], tuple[int, int, int, _Split]] = {(0, 0): (0, 0, 0, ())}
    for index in range(num_stages):
        following: dict[tuple[int, int], tuple[int, int, int, _Split]] = {}
        for (lo, used), (pulled, largest, squares, cuts) in best.items():
            choices = [(shape.all_layers, True)] if used < num_wholes else []
            if index - used < len(parts) and (may_pull or parts[index - used].lo <= lo):
                choices.append((parts[index - used], False))
            for resident, is_whole in choices:
                first = num_layers if index == num_stages - 1 else lo + 1
                limit = num_layers if may_pull else resident.hi
                for hi in range(first, min(limit, num_layers - (num_stages - index - 1)) + 1):
                    size = bytes_before[hi] - bytes_before[lo]
                    there_lo, there_hi = max(lo, resident.lo), min(hi, resident.hi)
                    have = max(0, bytes_before[there_hi] - bytes_before[there_lo]) if there_lo < there_hi else 0
                    value = (
                        pulled + size - have, max(largest, size), squares + (hi - lo) ** 2, (*cuts, (hi, is_whole))
                    )
                    state = (hi, used + is_whole)
                    if state not in following or value < following[state]:
                        following[state] = value
        best = following
    found = best.get((num_layers, num_wholes))
    return found[3] if found is not None else None


def _bytes_before(shape: ModelShape) -> list[int]:
    """Parameter bytes before each layer's beginning: the embedding is part of the first layer, the head of the last."""
    extra_first = shape.shard_bytes[EMBED_SHARD]
    extra_last = extra_first if shape.tied_embeddings else shape.shard_bytes[HEAD_SHARD]
    before = [0]
    for layer in range(shape.num_layers):
        before.append(before[-1] + shape.shard_bytes[layer_shard(layer)])
    return [0, *(b + extra_first for b in before[1:-1]), before[-1] + extra_first + extra_last]
