"""The drop plan: who merges with whom, and who runs which layers."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.memory.stages import StagePlan, stage_bytes
from jettison.policy.merge import DropPlan, GroupMerge, MergeCandidate, plan_drop, plan_ranges
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, layer_shard

LAYER = 100


def shape(
    num_layers: int = 12, embed: int = 50, head: int | None = None, *, tied: bool = False,
    layers: list[int] | None = None,
) -> ModelShape:
    shards = {layer_shard(i): size for i, size in enumerate(layers or [LAYER] * num_layers)}
    shards[EMBED_SHARD] = embed
    if not tied:
        shards[HEAD_SHARD] = embed if head is None else head
    return ModelShape(len(layers or range(num_layers)), 64, 4, 2, 16, 128, 256, 2, tied, shards)


def instance(group_id: int, pressure: float = 0.5, free: int = 0, num_layers: int = 12) -> MergeCandidate:
    return MergeCandidate(group_id, (group_id,), (LayerRange(0, num_layers),), pressure, free)


def merged(group_id: int, *parts: tuple[int, int], first_worker: int = 100, pressure: float = 0.5) -> MergeCandidate:
    workers = tuple(range(first_worker, first_worker + len(parts)))
    return MergeCandidate(group_id, workers, tuple(LayerRange(*p) for p in parts), pressure, 0)


def ranges(stages: tuple[StagePlan, ...] | None) -> list[tuple[int, int]]:
    assert stages is not None
    return [tuple(s.layers) for s in stages]


# --- plan_drop


def test_each_merge_frees_one_copy_and_the_plan_stops_as_soon_as_it_is_enough() -> None:
    the_shape = shape()
    copy = the_shape.parameter_bytes
    groups = [instance(i) for i in range(6)]
    for required, num_merges in [(1, 1), (copy, 1), (copy + 1, 2), (3 * copy, 3), (5 * copy, 5)]:
        plan = plan_drop(groups, required, the_shape)
        assert plan.freed_bytes == num_merges * copy and plan.sufficient
        assert sum(len(m.sources) - 1 for m in plan.merges) == num_merges


def test_nothing_required_merges_nothing() -> None:
    assert plan_drop([instance(0), instance(1)], 0, shape()) == DropPlan((), 0, 0)


def test_the_best_plan_is_returned_and_flagged_where_none_suffices() -> None:
    the_shape = shape()
    plan = plan_drop([instance(i) for i in range(3)], 10 * the_shape.parameter_bytes, the_shape)
    assert not plan.sufficient and plan.freed_bytes == 2 * the_shape.parameter_bytes
    assert [set(m.sources) for m in plan.merges] == [{0, 1, 2}]


@pytest.mark.parametrize("groups", [[], [instance(0)]])
def test_one_group_cannot_drop(groups: list[MergeCandidate]) -> None:
    plan = plan_drop(groups, 1, shape())
    assert plan.merges == () and not plan.sufficient


def test_the_two_smallest_merge_first() -> None:
    """The paper's example: of groups of sizes 1, 2 and 3 those of sizes 1 and 2."""
    three, two = merged(2, (0, 4), (4, 8), (8, 12), first_worker=20), merged(1, (0, 6), (6, 12), first_worker=10)
    groups = [three, two, instance(0)]
    plan = plan_drop(groups, 1, shape())
    assert [set(m.sources) for m in plan.merges] == [{0, 1}]


def test_the_group_that_asks_is_paired_with_the_freest() -> None:
    groups = [instance(0, 0.9, 10), instance(1, 1.4, 0), instance(2, 0.2, 80), instance(3, 0.3, 70)]
    plan = plan_drop(groups, 1, shape())
    assert [set(m.sources) for m in plan.merges] == [{1, 2}]


def test_the_second_pair_is_the_second_most_pressed_with_the_second_freest() -> None:
    groups = [instance(0, 0.9, 10), instance(1, 1.4, 0), instance(2, 0.2, 80), instance(3, 0.3, 70)]
    plan = plan_drop(groups, shape().parameter_bytes + 1, shape())
    assert [set(m.sources) for m in plan.merges] == [{0, 3}, {1, 2}]


def test_the_plan_does_not_depend_on_the_order_of_the_groups() -> None:
    groups = [instance(i, 0.1 * (i % 3), 10 * (i % 4)) for i in range(7)]
    plans = {plan_drop(random.Random(i).sample(groups, 7), 1500, shape()) for i in range(10)}
    assert len(plans) == 1


def test_groups_that_cannot_be_split_are_left_alone_and_the_others_merge() -> None:
    small = shape(2)
    pairs = [merged(i, (0, 1), (1, 2), first_worker=10 * i) for i in (1, 2)]
    assert plan_drop(pairs, 1, small).merges == ()
    plan = plan_drop([*pairs, instance(5, num_layers=2), instance(6, num_layers=2)], 10**9, small)
    assert [set(m.sources) for m in plan.merges] == [{5, 6}]


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(0, 6), st.randoms(use_true_random=False))
def test_group_sizes_follow_the_papers_heap(sizes: list[int], num_copies: int, rng: random.Random) -> None:
    the_shape = shape(64)
    groups = []
    for i, size in enumerate(sizes):
        edges = [round(64 * k / size) for k in range(size + 1)]
        parts = list(itertools.pairwise(edges))
        groups.append(merged(i, *parts, first_worker=10 * i, pressure=rng.random()))
    plan = plan_drop(groups, num_copies * the_shape.parameter_bytes, the_shape)

    expected = sizes[:]
    heapq.heapify(expected)
    for _ in range(min(num_copies, len(sizes) - 1)):
        heapq.heappush(expected, heapq.heappop(expected) + heapq.heappop(expected))
    gone = {g for m in plan.merges for g in m.sources}
    have = [len(m.stages) for m in plan.merges] + [size for i, size in enumerate(sizes) if i not in gone]
    assert sorted(have) == sorted(expected)
    assert plan.freed_bytes == min(num_copies, len(sizes) - 1) * the_shape.parameter_bytes
    for merge in plan.merges:
        assert {s.worker_id for s in merge.stages} == {w for g in merge.sources for w in groups[g].members}


def test_freed_bytes_are_what_the_members_drop() -> None:
    the_shape = shape()
    for num in range(2, 7):
        stages = plan_ranges([instance(i) for i in range(num)], the_shape)
        assert stages is not None
        dropped = num * the_shape.parameter_bytes - sum(stage_bytes(s.layers, the_shape) for s in stages)
        assert dropped == (num - 1) * the_shape.parameter_bytes


# --- plan_ranges


def test_two_instances_take_half_each() -> None:
    assert ranges(plan_ranges([instance(0), instance(1)], shape())) == [(0, 6), (6, 12)]


def test_the_order_of_stages_follows_what_members_hold() -> None:
    """Members holding 0-23, 24-47 and everything: first, third, second."""
    groups = [merged(0, (0, 24), (24, 48), first_worker=0), MergeCandidate(1, (2,), (LayerRange(0, 48),), 0.0, 0)]
    stages = plan_ranges(groups, shape(48))
    assert stages is not None
    assert [s.worker_id for s in stages] == [0, 2, 1]
    assert ranges(stages) == [(0, 16), (16, 32), (32, 48)]


def test_embedding_and_head_count() -> None:
    assert ranges(plan_ranges([instance(0), instance(1)], shape(embed=400, head=0))) == [(0, 4), (4, 12)]
    assert ranges(plan_ranges([instance(0), instance(1)], shape(embed=0, head=400))) == [(0, 8), (8, 12)]


def test_tied_embeddings_are_needed_at_both_ends() -> None:
    tied = shape(embed=400, tied=True)
    stages = plan_ranges([instance(i) for i in range(3)], tied)
    assert ranges(stages) == [(0, 3), (3, 9), (9, 12)]
    assert stages is not None and EMBED_SHARD in tied.shards_for(stages[-1].layers)
    assert stage_bytes(stages[-1].layers, tied) == 700


def test_a_huge_embedding_leaves_the_rest_even() -> None:
    groups = [instance(i, num_layers=7) for i in range(3)]
    assert ranges(plan_ranges(groups, shape(7, embed=5000, head=0))) == [(0, 1), (1, 4), (4, 7)]


@pytest.mark.parametrize(
    ("num_layers", "parts"),
    [
        (2, [[(0, 1), (1, 2)], [(0, 1), (1, 2)]]),  # more members than layers
        (6, [[(0, 2), (2, 6)], [(0, 1), (1, 2), (2, 3), (3, 6)], [(0, 2), (2, 6)]]),  # four members for two layers
    ],
)
def test_no_split_where_members_cannot_have_a_layer_each(num_layers: int, parts: list[list[tuple[int, int]]]) -> None:
    groups = [merged(i, *p, first_worker=10 * i) for i, p in enumerate(parts)]
    assert plan_ranges(groups, shape(num_layers)) is None


def test_a_member_that_holds_one_layer_runs_it() -> None:
    groups = [merged(0, (0, 3), (3, 4), (4, 7)), instance(1, num_layers=7)]
    stages = plan_ranges(groups, shape(7))
    assert stages is not None and (3, 4) in ranges(stages)


def optimum(residents: list[LayerRange], the_shape: ModelShape) -> int | None:
    """Bytes of the largest stage of the best split in any order; None if there is no split."""
    num_layers, best = the_shape.num_layers, None
    for order in set(itertools.permutations(residents)):
        worst_until: dict[int, int] = {0: 0}
        for resident in order:
            following: dict[int, int] = {}
            for lo, worst in worst_until.items():
                if lo < resident.lo:
                    continue
                for hi in range(lo + 1, resident.hi + 1):
                    value = max(worst, stage_bytes(LayerRange(lo, hi), the_shape))
                    following[hi] = min(value, following.get(hi, value))
            worst_until = following
        if num_layers in worst_until:
            best = worst_until[num_layers] if best is None else min(best, worst_until[num_layers])
    return best


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_ranges_partition_the_layers_inside_what_members_hold_and_are_balanced(data: st.DataObject) -> None:
    """Groups grow by merging, as in a cluster: two layers a member are then enough for any order of merges."""
    num_members = data.draw(st.integers(2, 5))
    size = st.sampled_from([LAYER, LAYER, 60, 140]) if data.draw(st.booleans()) else st.just(LAYER)
    layers = data.draw(st.lists(size, min_size=2 * num_members, max_size=2 * num_members + 4))
    embed, head = data.draw(st.sampled_from([(0, 0), (50, 50), (300, 300), (300, 0), (900, 900)]))
    the_shape = shape(layers=layers, embed=embed, head=head, tied=data.draw(st.booleans()))
    num_layers = len(layers)
    groups = [instance(i, num_layers=num_layers) for i in range(num_members)]
    while len(groups) > 1:
        sources = [groups.pop(data.draw(st.integers(0, len(groups) - 1))) for _ in range(2)]
        stages = plan_ranges(sources, the_shape)
        assert stages is not None
        resident = {w: r for g in sources for w, r in zip(g.members, g.resident, strict=True)}
        assert sorted(resident) == sorted(s.worker_id for s in stages)
        assert [s.layers.lo for s in stages] == [0, *(s.layers.hi for s in stages[:-1])]
        assert stages[-1].layers.hi == num_layers and all(len(s.layers) > 0 for s in stages)
        assert all(resident[s.worker_id].covers(s.layers) for s in stages)
        best = optimum(list(resident.values()), the_shape)
        assert best is not None
        assert max(stage_bytes(s.layers, the_shape) for s in stages) <= best + max(layers)
        groups.append(
            MergeCandidate(
                sources[0].group_id, tuple(s.worker_id for s in stages), tuple(s.layers for s in stages), 0.0, 0
            )
        )


def test_a_plan_tells_its_merges_as_plain_data() -> None:
    merge = GroupMerge((3, 1), (StagePlan(7, LayerRange(0, 5)), StagePlan(4, LayerRange(5, 12))))
    told = DropPlan((merge,), 900, 800).merges_as_fields()
    assert told == [{"groups": [3, 1], "stages": [{"worker": 7, "layers": [0, 5]}, {"worker": 4, "layers": [5, 12]}]}]
    assert json.loads(json.dumps(told)) == told


def tokens(stage: LayerRange, the_shape: ModelShape, budget: int) -> float:
    """KV bytes that a stage has for each of its layers."""
    return (budget - stage_bytes(stage, the_shape)) / len(stage)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_with_a_budget_no_split_leaves_the_group_more_kv(data: st.DataObject) -> None:
    num_members, num_layers = data.draw(st.integers(2, 5)), data.draw(st.integers(5, 14))
    embed, head = data.draw(st.sampled_from([(50, 50), (300, 300), (300, 0), (0, 250)]))
    the_shape = shape(num_layers, embed=embed, head=head, tied=data.draw(st.booleans()))
    spare = st.integers(100, 3000)
    alike = data.draw(st.none() | spare)
    budgets = [the_shape.parameter_bytes + (alike or data.draw(spare)) for _ in range(num_members)]
    stages = plan_ranges(with_budgets(budgets, num_layers), the_shape)
    assert stages is not None and [s.worker_id for s in stages] == list(range(num_members))
    best = max(
        min(
            tokens(LayerRange(lo, hi), the_shape, budget)
            for budget, (lo, hi) in zip(budgets, itertools.pairwise((0, *cuts, num_layers)), strict=True)
        )
        for cuts in itertools.combinations(range(1, num_layers), num_members - 1)
    )
    found = (tokens(s.layers, the_shape, budget) for s, budget in zip(stages, budgets, strict=True))
    assert min(found) == pytest.approx(best)


def test_a_member_with_more_memory_keeps_more_layers() -> None:
    the_shape = shape(12, embed=0, head=0)
    assert ranges(plan_ranges(with_budgets([3000, 9000], 12), the_shape)) == [(0, 3), (3, 12)]


def with_budgets(budgets: Sequence[int], num_layers: int) -> list[MergeCandidate]:
    """Instances that have so much for parameters and KV."""
    return [instance(i, num_layers=num_layers)._replace(budgets=(budget,)) for i, budget in enumerate(budgets)]


def test_large_ends_do_not_make_the_stages_between_them_the_tightest() -> None:
    """As Qwen2.5-14B on eight A800: balanced by bytes, stages in the middle had seven layers, and eight instances in
    one group no more KV than in four."""
    the_shape = shape(48, embed=283, head=283)
    groups = [instance(i, num_layers=48) for i in range(8)]
    assert max(hi - lo for lo, hi in ranges(plan_ranges(groups, the_shape))) == 7
    assert ranges(plan_ranges(with_budgets([13500] * 8, 48), the_shape)) == [(6 * i, 6 * i + 6) for i in range(8)]
