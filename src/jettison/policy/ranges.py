"""Which layers each member of a merged group keeps, and which shards it has to pull first (design 5.1).

Pure. Ranges are contiguous, cover every layer once, and lie inside the layers that their members hold wherever an order
of stages allows that. Where none does, the plan names each missing shard with a member that can send it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from jettison.memory.stages import Pull, StagePlan, stage_bytes
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, WorkerId, layer_shard

LinkDistance = Callable[[WorkerId, WorkerId], float]
"""How far two workers are from each other, in any unit: 0 in one machine, more across switches."""


class Member(NamedTuple):
    """A worker and the layers whose parameters it holds."""

    worker_id: WorkerId
    resident: LayerRange
    budget_bytes: int | None = None
    """Its bytes for parameters and KV; None = not known."""


class StageTerms(NamedTuple):
    """The parts of a stage's time for the microbatches that the group will have."""

    layer_s: float
    entry_s: float = 0.0
    """The embedding, on the first stage."""
    head_s: float = 0.0
    """The head and sampling, on the last stage."""
    step_s: float = 0.0
    """What every stage takes, whatever its layers."""

    def of(self, lo: int, hi: int, num_layers: int) -> float:
        """Seconds of a stage of the layers from ``lo`` to before ``hi``, of a model of ``num_layers``."""
        ends = (self.entry_s if lo == 0 else 0.0) + (self.head_s if hi == num_layers else 0.0)
        return self.step_s + (hi - lo) * self.layer_s + ends


class Aims(NamedTuple):
    """What a merged group is to do: to serve as much a second as it can with the KV that requests can use."""

    useful_bytes: int
    """KV bytes, of all layers, that requests can use at most; 0: any number."""
    terms: Callable[[float], StageTerms]
    """Of a stage's time, for a microbatch of requests that hold so many KV bytes."""

    def rate(self, stages: Sequence[StagePlan], kv_bytes: float, num_layers: int) -> float:
        """KV bytes that are in use over the time of the slowest stage: as requests hold alike, what is served a
        second."""
        used = min(kv_bytes, self.useful_bytes) if self.useful_bytes else kv_bytes
        terms = self.terms(used / len(stages))  # as many microbatches as stages
        slowest_s = max(terms.of(*stage.layers, num_layers) for stage in stages)
        return used / slowest_s if slowest_s > 0.0 else 0.0


class RangePlan(NamedTuple):
    """Stages in pipeline order, and the shards to pull before any member drops anything."""

    stages: tuple[StagePlan, ...]
    pulls: tuple[Pull, ...] = ()


@dataclass(slots=True)
class PlanningWork:
    """Operations that plans have taken, for a caller that bounds them."""

    num_heap_operations: int = 0
    num_range_steps: int = 0
    """Members looked at and ends of stages compared."""


def plan_stages(
    members: Sequence[Member], shape: ModelShape, *, may_pull: bool = False, distance: LinkDistance | None = None,
    work: PlanningWork | None = None, aims: Aims | None = None,
) -> RangePlan | None:
    """Contiguous layer ranges for all members: the ranges that leave the group the most KV, or with ``aims`` those with
    which it serves most.

    The group holds as many tokens as its tightest stage. A stage has for the KV of its layers what its parameters
    (embedding and head counted) leave of its member's budget. Where no budget is known, the largest stage is as small
    as can be by parameter bytes; among equals the numbers of layers are even.

    A pipeline is as fast as its slowest stage, and a head of many words takes as long as several layers: with as many
    layers each, all stages but the last one wait for it. Cuts that give it fewer layers leave less for KV, as another
    member has more (``aims``: which is worth more).

    Members that hold a part are ordered by its middle; members that hold everything (wholes) go wherever they spare the
    others most (members holding 0-23, 24-47 and everything: first, third, second). Where that order allows no split
    inside the layers that members hold, the split with the fewest bytes to pull is taken (``may_pull``), each shard
    from the nearest holder that has least to send. None if there is no split.
    """
    if len(members) > shape.num_layers:
        return None
    work = work or PlanningWork()
    parts, wholes = _ordered(members, shape)
    is_inside = _has_split([m.resident for m in parts], len(wholes), shape.num_layers, work)
    if not is_inside and not may_pull:
        return None
    search = partial(_best_split, parts, wholes, shape, work, may_pull=not is_inside)
    stages = _stages(search(), parts, wholes)
    if aims is not None:
        stages = _serving_most(stages, members, shape, aims, lambda *limit: _stages(search(*limit), parts, wholes))
    pulls = () if is_inside else _plan_pulls(stages, members, shape, distance)
    return None if pulls is None else RangePlan(stages, pulls)


def _stages(split: _Split, parts: Sequence[Member], wholes: Sequence[Member]) -> tuple[StagePlan, ...]:
    """The stages that a split cuts."""
    part_workers, whole_workers = iter(parts), iter(wholes)
    stages: list[StagePlan] = []
    lo = 0
    for hi, is_whole in split:
        member = next(whole_workers if is_whole else part_workers)
        stages.append(StagePlan(member.worker_id, LayerRange(lo, hi)))
        lo = hi
    return tuple(stages)


def _serving_most(
    stages: tuple[StagePlan, ...], members: Sequence[Member], shape: ModelShape, aims: Aims,
    search: Callable[[StageTerms, float], tuple[StagePlan, ...]],
) -> tuple[StagePlan, ...]:
    """Of ``stages``, which leave the most KV, and all that are faster the ones with which the group serves most;
    ``search``: which leave the most KV of those whose slowest stage takes less than a time, or the fastest."""
    budgets = {m.worker_id: m.budget_bytes for m in members}
    num_layers = shape.num_layers

    def kv_bytes(stages: Sequence[StagePlan]) -> float:
        tightest = max(_tightness(len(s.layers), stage_bytes(s.layers, shape), budgets[s.worker_id]) for s in stages)
        return num_layers / tightest if tightest else float(aims.useful_bytes or 1)

    terms = aims.terms(kv_bytes(stages) / len(stages))
    best, best_rate = stages, aims.rate(stages, kv_bytes(stages), num_layers)
    for _ in range(num_layers):  # each is faster by a part of a layer's time at least, and few are
        limit_s = max(terms.of(*s.layers, num_layers) for s in stages)
        stages = search(terms, limit_s)
        if max(terms.of(*s.layers, num_layers) for s in stages) >= limit_s:
            break
        rate = aims.rate(stages, kv_bytes(stages), num_layers)
        if rate > best_rate:
            best, best_rate = stages, rate
    return best


def has_stages(members: Sequence[Member], shape: ModelShape, work: PlanningWork | None = None) -> bool:
    """Whether ``plan_stages`` finds ranges without a pull, for much less work: while merging only that matters.

    O(members), and one look at a set of layers for each pair of a member with a part and one with everything.
    """
    if len(members) > shape.num_layers:
        return False
    parts, wholes = _ordered(members, shape)
    return _has_split([m.resident for m in parts], len(wholes), shape.num_layers, work or PlanningWork())


def _plan_pulls(
    stages: Sequence[StagePlan], members: Sequence[Member], shape: ModelShape, distance: LinkDistance | None
) -> tuple[Pull, ...] | None:
    """Every shard that a stage lacks, from the nearest member that holds it; None if none does."""
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


def _ordered(members: Sequence[Member], shape: ModelShape) -> tuple[list[Member], list[Member]]:
    """Members that hold a part, by its middle, and members that hold everything (wholes)."""
    wholes = sorted(m for m in members if m.resident == shape.all_layers)
    parts = sorted(
        (m for m in members if m.resident != shape.all_layers),
        key=lambda m: (m.resident.lo + m.resident.hi, m.resident.lo, m.worker_id),
    )
    return parts, wholes


def _has_split(parts: Sequence[LayerRange], num_wholes: int, num_layers: int, work: PlanningWork) -> bool:
    """Whether stages fit inside what members hold, for parts in this order and wholes anywhere.

    Keeps, for each number of wholes used, the layers at which the stages so far can end, as bits of a number.
    """
    work.num_range_steps += len(parts) + num_wholes
    if not parts:
        return num_wholes <= num_layers
    work.num_range_steps += len(parts) * num_wholes
    ends = [1]
    for _ in range(num_wholes):
        ends.append(_ends_after(ends[-1], 0, num_layers))
    for part in parts:
        ends[0] = _ends_after(ends[0], part.lo, part.hi)
        for used in range(1, num_wholes + 1):
            ends[used] = _ends_after(ends[used], part.lo, part.hi) | _ends_after(ends[used - 1], 0, num_layers)
    return bool(ends[num_wholes] >> num_layers)


def _ends_after(begins: int, lo: int, hi: int) -> int:
    """Where one more stage can end that begins at one of ``begins`` (bits) and lies inside [lo, hi)."""
    begins >>= lo
    if not begins:
        return 0
    first_end = lo + (begins & -begins).bit_length()  # one layer after the first place to begin at
    return (1 << hi + 1) - (1 << first_end) if first_end <= hi else 0


_Split = tuple[tuple[int, bool], ...]
"""End of each stage, and whether a whole runs it."""

_State = tuple[int, int]
"""End of the last stage so far, and wholes used."""


class _Value(NamedTuple):
    """Value of a way to a state; less is better, the first field that differs decides."""

    pulled_bytes: int
    slowest_s: float
    """Longest time of the stages so far; 0 while each is below the limit."""
    tightest: float
    """Largest ``_tightness`` of the stages so far."""
    largest_bytes: int
    """Parameter bytes of the largest stage so far."""
    squares: int
    """Sum of squared layer counts."""
    rank_before: int
    """Rank of the state that it comes from."""


def _tightness(num_layers: int, parameter_bytes: int, budget_bytes: int | None) -> float:
    """Layers per byte that a stage has for their KV; 0 where its budget is not known."""
    if budget_bytes is None:
        return 0.0
    return num_layers / (budget_bytes - parameter_bytes) if budget_bytes > parameter_bytes else math.inf


def _best_split(
    parts: Sequence[Member], wholes: Sequence[Member], shape: ModelShape, work: PlanningWork,
    terms: StageTerms | None = None, limit_s: float = math.inf, *, may_pull: bool,
) -> _Split:
    """Where to cut, for parts in this order and wholes, in their order, anywhere between; a split must exist. With
    ``terms``: of splits whose stages all take less than ``limit_s`` if there are any.

    Dynamic programming over (end of the last stage so far, wholes used); O(layers) for two members,
    O(members * wholes * layers squared) for many.
    """
    num_wholes, num_layers = len(wholes), shape.num_layers
    num_stages = len(parts) + num_wholes
    bytes_before = _bytes_before(shape)
    best: dict[_State, _Value] = {(0, 0): _Value(0, 0.0, 0.0, 0, 0, 0)}
    rounds: list[tuple[list[_State], dict[_State, _Value]]] = []
    for index in range(num_stages):
        # States by the cuts that lead to them, earliest first: between equal values the earlier cuts decide.
        states = [state for _, state in sorted((value.rank_before, state) for state, value in best.items())]
        following: dict[_State, _Value] = {}
        for rank, (lo, used) in enumerate(states):
            pulled, slowest_s, tightest, largest, squares, _ = best[lo, used]
            choices = [(wholes[used], True)] if used < num_wholes else []
            if index - used < len(parts) and (may_pull or parts[index - used].resident.lo <= lo):
                choices.append((parts[index - used], False))
            for (_, resident, budget_bytes), is_whole in choices:
                first = num_layers if index == num_stages - 1 else lo + 1
                limit = num_layers if may_pull else resident.hi
                ends = range(first, min(limit, num_layers - (num_stages - index - 1)) + 1)
                work.num_range_steps += len(ends)
                for hi in ends:
                    size = bytes_before[hi] - bytes_before[lo]
                    have = bytes_before[min(hi, resident.hi)] - bytes_before[max(lo, resident.lo)]
                    took_s = 0.0 if terms is None else terms.of(lo, hi, num_layers)
                    value = _Value(
                        pulled + size - max(0, have), max(slowest_s, took_s if took_s >= limit_s else 0.0),
                        max(tightest, _tightness(hi - lo, size, budget_bytes)), max(largest, size),
                        squares + (hi - lo) ** 2, rank,
                    )
                    state = (hi, used + is_whole)
                    if state not in following or value < following[state]:
                        following[state] = value
        rounds.append((states, following))
        best = following
    state, cuts = (num_layers, num_wholes), []
    for states, following in reversed(rounds):
        before = states[following[state].rank_before]
        cuts.append((state[0], state[1] > before[1]))
        state = before
    return tuple(reversed(cuts))


def _bytes_before(shape: ModelShape) -> list[int]:
    """Parameter bytes before each layer's beginning: the embedding is part of the first layer, the head of the last."""
    extra_first = shape.shard_bytes[EMBED_SHARD]
    extra_last = extra_first if shape.tied_embeddings else shape.shard_bytes[HEAD_SHARD]
    before = [0]
    for layer in range(shape.num_layers):
        before.append(before[-1] + shape.shard_bytes[layer_shard(layer)])
    return [0, *(b + extra_first for b in before[1:-1]), before[-1] + extra_first + extra_last]
