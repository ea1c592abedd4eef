"""Stages balanced in time: against every other split, and what a head of many words does to a pair."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.memory.stages import StagePlan, stage_bytes
from jettison.policy.merge import MergeCandidate, PlannerParams, plan_drop
from jettison.policy.ranges import Aims, Member, StageTerms, plan_stages
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, layer_shard

LAYER_BYTES = 100


def shape(num_layers: int, head_bytes: int = 50) -> ModelShape:
    shards = {layer_shard(i): LAYER_BYTES for i in range(num_layers)} | {EMBED_SHARD: 50, HEAD_SHARD: head_bytes}
    return ModelShape(num_layers, 64, 4, 2, 16, 128, 256, 2, False, shards)


def slowest_s(stages: tuple[StagePlan, ...], times: StageTerms, num_layers: int) -> float:
    return max(times.of(*s.layers, num_layers) for s in stages)


def kv_bytes(stages: tuple[StagePlan, ...], members: list[Member], the_shape: ModelShape) -> float:
    """KV of all layers that the tightest stage allows."""
    budgets = {m.worker_id: m.budget_bytes for m in members}
    left = [
        ((budgets[s.worker_id] or 0) - stage_bytes(s.layers, the_shape)) * the_shape.num_layers / len(s.layers)
        for s in stages
    ]
    return min(left)


def splits(members: list[Member], num_layers: int) -> list[tuple[StagePlan, ...]]:
    """Every way to cut for every order of members inside what they hold."""
    found = []
    for order in itertools.permutations(members):
        for cuts in itertools.combinations(range(1, num_layers), len(members) - 1):
            ranges = [LayerRange(lo, hi) for lo, hi in itertools.pairwise((0, *cuts, num_layers))]
            if all(m.resident.covers(r) for m, r in zip(order, ranges, strict=True)):
                found.append(tuple(StagePlan(m.worker_id, r) for m, r in zip(order, ranges, strict=True)))
    return found


seconds = st.integers(0, 40).map(float)


@settings(max_examples=200)
@given(
    st.integers(4, 9), st.integers(1, 4), st.integers(1, 5), seconds, seconds, st.integers(900, 4000),
    st.integers(0, 6000), st.lists(st.integers(1, 8), max_size=2, unique=True),
)
def test_no_other_split_serves_more_and_none_that_holds_what_is_needed_is_faster(
    num_layers: int, num_members: int, layer_s: int, entry_s: float, head_s: float, budget: int, needed: int,
    cuts: list[int],
) -> None:
    the_shape, terms = shape(num_layers), StageTerms(float(layer_s), entry_s, head_s)
    aims = Aims(needed, lambda _: terms)
    # The first members are what an earlier merge has made of instances, the others hold everything.
    bounds = [0, *sorted(c for c in cuts if c < num_layers), num_layers]
    held = [LayerRange(lo, hi) for lo, hi in itertools.pairwise(bounds)] if len(bounds) - 1 <= num_members else []
    held += [LayerRange(0, num_layers)] * (num_members - len(held))
    members = [Member(w, resident, budget) for w, resident in enumerate(held)]
    plan = plan_stages(members, the_shape, aims=aims)
    assert plan is not None
    others = [(s, kv) for s in splits(members, num_layers) if (kv := kv_bytes(s, members, the_shape)) > 0]
    if not others:
        return
    here = kv_bytes(plan.stages, members, the_shape)
    most = max(aims.rate(s, kv, num_layers) for s, kv in others)
    assert math.isclose(aims.rate(plan.stages, here, num_layers), most)
    enough = [s for s, kv in others if kv >= needed > 0]
    if enough and here >= needed:
        assert slowest_s(plan.stages, terms, num_layers) == min(slowest_s(s, terms, num_layers) for s in enough)


@pytest.mark.parametrize(("head_s", "needed", "layers"), [
    (0.0, 24 * 300, 12), (0.9, 24 * 300, 12), (8.0, 24 * 300, 16),
    (8.0, 24 * 10_000, 12),  # more than there can be, and rows cost no time: each byte counts
])  # fmt: skip
def test_a_heavy_head_moves_the_cut(head_s: float, needed: int, layers: int) -> None:
    groups = [MergeCandidate(w, (w,), (LayerRange(0, 24),), 0.5, 0, (7550,), needed // 2) for w in range(2)]
    params = PlannerParams(stage_terms=lambda _: StageTerms(1.0, 0.0, head_s))
    (merge,) = plan_drop(groups, 1, shape(24), params).merges
    assert [len(s.layers) for s in merge.stages] == [layers, 24 - layers]


def test_where_each_row_takes_time_a_fast_pipeline_is_worth_more_than_memory() -> None:
    """Twice the rows in twice the time are served no faster."""
    members = [Member(w, LayerRange(0, 24), 7550) for w in range(2)]
    plan = plan_stages(members, shape(24), aims=Aims(0, lambda kv: StageTerms(kv, 0.0, 8.0 * kv)))
    assert plan is not None and [len(s.layers) for s in plan.stages] == [16, 8]


def test_without_aims_the_split_leaves_most_for_kv() -> None:
    members = [Member(w, LayerRange(0, 24), 7550) for w in range(2)]
    plan = plan_stages(members, shape(24))
    assert plan is not None and [len(s.layers) for s in plan.stages] == [12, 12]
    heavy = plan_stages(members, shape(24, head_bytes=8 * LAYER_BYTES))
    assert heavy is not None and [len(s.layers) for s in heavy.stages] == [13, 11]
