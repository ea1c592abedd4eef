"""Drop plans as a whole: against exhaustive search, with pulls, strategies, links; and the work they take."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.memory.stages import Pull, stage_bytes
from jettison.policy.links import Links
from jettison.policy.merge import (
    LINK_CHOICES,
    DropPlan,
    MergeCandidate,
    MergeStrategy,
    Partner,
    PlannerParams,
    choose_partner,
    plan_drop,
    pull_seconds,
    throughput_cost,
)
from jettison.policy.ranges import Member, PlanningWork, has_stages, plan_stages
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, layer_shard


def shape(num_layers: int = 24) -> ModelShape:
    shards = {layer_shard(i): 100 for i in range(num_layers)} | {EMBED_SHARD: 50, HEAD_SHARD: 50}
    return ModelShape(num_layers, 64, 4, 2, 16, 128, 256, 2, False, shards)


def group(group_id: int, size: int, num_layers: int = 24, pressure: float = 0.5, free: int = 0) -> MergeCandidate:
    edges = [round(num_layers * k / size) for k in range(size + 1)]
    ranges = tuple(LayerRange(edges[k], edges[k + 1]) for k in range(size))
    return MergeCandidate(group_id, tuple(range(100 * group_id, 100 * group_id + size)), ranges, pressure, free)


def sizes_after(groups: list[MergeCandidate], plan: DropPlan) -> list[int]:
    gone = {g for m in plan.merges for g in m.sources}
    return sorted([len(m.stages) for m in plan.merges] + [len(g.members) for g in groups if g.group_id not in gone])


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    head, rest = items[0], items[1:]
    for parts in partitions(rest):
        yield [[head], *parts]
        for i in range(len(parts)):
            yield [*parts[:i], [head, *parts[i]], *parts[i + 1 :]]


uneven = st.lists(st.integers(1, 3), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(uneven, st.integers(1, 6000), st.integers(0, 4), st.data())
def test_a_plan_is_valid_sufficient_where_any_is_and_as_small_as_can_be(
    sizes: list[int], required: int, asker: int, data: st.DataObject
) -> None:
    the_shape = shape()
    copy = the_shape.parameter_bytes
    groups = [group(i, size, pressure=data.draw(st.sampled_from([0.2, 0.9])), free=data.draw(st.sampled_from([0, 500])))
              for i, size in enumerate(sizes)]  # fmt: skip
    asking = asker % len(sizes)
    plan = plan_drop(groups, required, the_shape, asking=asking)

    num_merges = sum(len(m.sources) - 1 for m in plan.merges)
    assert plan.freed_bytes == num_merges * copy, "each merge frees one copy"
    assert num_merges == min(-(-required // copy), len(sizes) - 1), "as soon as enough, and no more"
    assert plan.sufficient == (required <= (len(sizes) - 1) * copy)
    if num_merges:
        assert any(asking in m.sources for m in plan.merges), "who asked is relieved"
    held = {w: r for g in groups for w, r in zip(g.members, g.resident, strict=True)}
    for merge in plan.merges:
        assert sorted(s.worker_id for s in merge.stages) == sorted(w for g in merge.sources for w in groups[g].members)
        assert [s.layers.lo for s in merge.stages] == [0, *(s.layers.hi for s in merge.stages[:-1])]
        assert merge.stages[-1].layers.hi == the_shape.num_layers and not merge.pulls
        assert all(held[s.worker_id].covers(s.layers) and len(s.layers) > 0 for s in merge.stages)
        kept = sum(stage_bytes(s.layers, the_shape) for s in merge.stages)
        dropped = sum(stage_bytes(held[s.worker_id], the_shape) for s in merge.stages) - kept
        assert dropped == (len(merge.sources) - 1) * copy

    # Exhaustively: of all groupings that free as much and merge the asker, the one with the smallest largest group.
    best = min(
        max(sum(sizes[i] for i in part) for part in parts)
        for parts in partitions(list(range(len(sizes))))
        if len(sizes) - len(parts) == num_merges
        and (not num_merges or any(asking in part and len(part) > 1 for part in parts))
    )
    largest = sizes_after(groups, plan)[-1]
    assert largest <= best + max(sizes), "greedy: at most one of the largest groups more than the optimum"
    if set(sizes) == {1}:
        assert largest == best or num_merges > len(sizes) // 2


@pytest.mark.parametrize(
    ("num", "merges", "expected"), [(8, 4, [2] * 4), (8, 6, [4, 4]), (8, 7, [8]), (5, 2, [1, 2, 2])]
)
def test_throughput_greedy_keeps_groups_small(num: int, merges: int, expected: list[int]) -> None:
    groups = [group(i, 1) for i in range(num)]
    plan = plan_drop(groups, merges * shape().parameter_bytes, shape(), asking=0)
    assert sizes_after(groups, plan) == expected


@pytest.mark.parametrize(("region", "expected"), [(3 * 2500, [1, 1, 1, 5]), (0, [1] * 6 + [2]), (None, [8])])
def test_memory_greedy_grows_one_group_until_the_added_memory_exceeds_the_first(
    region: int | None, expected: list[int]
) -> None:
    groups = [group(i, 1) for i in range(8)]
    plan = plan_drop(groups, 1, shape(), PlannerParams(strategy="memory", kv_region_bytes=region), asking=3)
    assert sizes_after(groups, plan) == expected
    assert 3 in plan.merges[0].sources


def test_an_uneven_group_that_asks_takes_in_a_small_one() -> None:
    groups = [group(0, 3), group(1, 1), group(2, 1), group(3, 2)]
    assert sizes_after(groups, plan_drop(groups, 1, shape(), asking=0)) == [1, 2, 4]
    assert sizes_after(groups, plan_drop(groups, 1, shape())) == [2, 2, 3], "no group asks: the paper's two smallest"


def test_repeated_drops_go_on_from_what_members_hold() -> None:
    the_shape, groups = shape(), [group(i, 1) for i in range(5)]
    for _ in range(4):
        plan = plan_drop(groups, 1, the_shape, asking=groups[0].group_id)
        (merge,) = plan.merges
        assert not merge.pulls
        new = MergeCandidate(
            merge.sources[0], tuple(s.worker_id for s in merge.stages), tuple(s.layers for s in merge.stages), 0.5, 0
        )
        groups = [g for g in groups if g.group_id not in merge.sources] + [new]
    assert len(groups) == 1 and sum(len(r) for r in groups[0].resident) == 24


def test_among_about_equal_partners_the_nearest() -> None:
    groups = [group(i, 1, free=1000 + i) for i in range(4)]
    near = PlannerParams(links=Links({0: 0, 100: 1, 200: 0, 300: 1}))
    assert [m.sources for m in plan_drop(groups, 1, shape(), near, asking=0).merges] == [(0, 2)]
    assert [m.sources for m in plan_drop(groups, 1, shape(), asking=0).merges] == [(0, 3)], "else the freest"
    roomy = [*groups[:3], group(3, 1, free=10_000)]
    assert [m.sources for m in plan_drop(roomy, 1, shape(), near, asking=0).merges] == [(0, 3)], "room before links"


def test_a_partner_in_the_same_machine_is_found_however_many_others_have_as_much_room() -> None:
    """All alike, as before the first drop: by room and number no group of the asker's machine would be looked at."""
    num = 4 * LINK_CHOICES
    groups = [group(i, 1, num_layers=48) for i in range(num)]
    near = PlannerParams(links=Links({100 * i: i // (2 * LINK_CHOICES) for i in range(num)}))
    plan = plan_drop(groups, 1, shape(48), near, asking=num - 1)
    assert [m.sources for m in plan.merges] == [(num - 1, 2 * LINK_CHOICES)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_equal_instances_pair_inside_their_machines(pairs_of_machines: list[int], rng: random.Random) -> None:
    """With an even number in each machine no pair spans two, whichever asks and however workers are numbered."""
    homes = [machine for machine, pairs in enumerate(pairs_of_machines) for _ in range(2 * pairs)]
    rng.shuffle(homes)
    groups = [group(i, 1) for i in range(len(homes))]
    params = PlannerParams(links=Links({100 * i: home for i, home in enumerate(homes)}))
    required = sum(pairs_of_machines) * shape().parameter_bytes
    plan = plan_drop(groups, required, shape(), params, asking=rng.randrange(len(homes)))
    assert plan.sufficient
    assert all(len({homes[g] for g in m.sources}) == 1 and len(m.sources) == 2 for m in plan.merges)


def test_of_far_partners_the_one_behind_the_faster_network() -> None:
    groups = [group(i, 1) for i in range(3)]
    slow = {(0, 1): 3.0}  # what comes back would be fast: the worse direction counts
    params = PlannerParams(links=Links({0: 0, 100: 1, 200: 2}, slow))
    assert [m.sources for m in plan_drop(groups, 1, shape(), params, asking=0).merges] == [(0, 2)]


# --- pulls


def crowded(free: int) -> list[MergeCandidate]:
    """Three members hold nothing but the first two of six layers: no order of stages fits."""
    first = tuple(LayerRange(*r) for r in ((0, 2), (2, 6)))
    second = tuple(LayerRange(*r) for r in ((0, 1), (1, 2), (2, 6)))
    return [MergeCandidate(0, (0, 1), first, 0.5, free), MergeCandidate(1, (10, 11, 12), second, 0.5, free)]


def test_missing_shards_are_pulled_only_where_that_is_cheaper_than_not_merging() -> None:
    the_shape, groups = shape(6), crowded(free=10_000)
    required = the_shape.parameter_bytes
    assert not plan_drop(groups, required, the_shape).sufficient
    willing = PlannerParams(link_bytes_per_s=100.0, max_pull_s=math.inf)
    plan = plan_drop(groups, required, the_shape, willing)
    assert plan.sufficient
    (merge,) = plan.merges
    assert merge.pulls
    held = {w: the_shape.shards_for(r) for g in groups for w, r in zip(g.members, g.resident, strict=True)}
    for stage in merge.stages:
        pulled = {p.shard for p in merge.pulls if p.dst == stage.worker_id}
        assert pulled == the_shape.shards_for(stage.layers) - held[stage.worker_id]
    assert all(p.shard in held[p.src] and p.src != p.dst for p in merge.pulls)
    seconds = pull_seconds(merge.pulls, the_shape, 100.0)
    hasty = PlannerParams(link_bytes_per_s=100.0, max_pull_s=seconds * 0.99)
    assert not plan_drop(groups, required, the_shape, hasty).sufficient


def test_pulls_take_what_their_own_links_take() -> None:
    the_shape = shape(6)
    shards = sorted(the_shape.shard_bytes)[:3]
    pulls = [Pull(shards[0], 0, 2), Pull(shards[1], 1, 2), Pull(shards[2], 0, 1)]
    sizes = [the_shape.shard_bytes[shard] for shard in shards]
    rates = {(0, 2): 10.0, (1, 2): 100.0}
    assert pull_seconds(pulls, the_shape, 50.0, rates.get) == max(sizes[0] / 10.0 + sizes[1] / 100.0, sizes[2] / 50.0)
    assert pull_seconds(pulls, the_shape, 50.0) == max(sizes[0] + sizes[1], sizes[2]) / 50.0


def test_nothing_is_pulled_into_memory_that_is_full() -> None:
    the_shape = shape(6)
    willing = PlannerParams(max_pull_s=math.inf)
    assert not plan_drop(crowded(free=0), the_shape.parameter_bytes, the_shape, willing).sufficient


def test_the_nearest_holder_sends() -> None:
    members = [Member(0, LayerRange(0, 1)), Member(1, LayerRange(0, 1)), Member(2, LayerRange(1, 4)),
               Member(3, LayerRange(1, 4))]  # fmt: skip
    plan = plan_stages(members, shape(4), may_pull=True, distance=lambda a, b: 1.0 if a == 2 else 5.0)
    assert plan is not None and plan.pulls and {p.src for p in plan.pulls} == {2}
    assert plan_stages(members, shape(4)) is None


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(2, 4), st.data())
def test_pulls_make_any_residency_serve_and_none_are_made_where_an_order_fits(num: int, data: st.DataObject) -> None:
    the_shape = shape(6)
    cuts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=num, unique=True).map(sorted))
    edges = [0, *cuts, 6]
    members = [Member(i, LayerRange(lo, hi)) for i, (lo, hi) in enumerate(itertools.pairwise(edges))]
    held_ranges = st.sampled_from([m.resident for m in members])
    members += [Member(10 + i, data.draw(held_ranges)) for i in range(6 - len(members))]
    plan = plan_stages(members, the_shape, may_pull=True)
    assert plan is not None
    assert [s.layers.lo for s in plan.stages] == [0, *(s.layers.hi for s in plan.stages[:-1])]
    held = {m.worker_id: the_shape.shards_for(m.resident) for m in members}
    for pull in plan.pulls:
        held[pull.dst] |= {pull.shard}
    assert all(the_shape.shards_for(s.layers) <= held[s.worker_id] for s in plan.stages)
    assert (plan_stages(members, the_shape) is not None) == (not plan.pulls)


# --- bounds and partners that do not fit


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(uneven, st.integers(1, 12), st.integers(0, 6), st.integers(0, 4), st.sampled_from(["throughput", "memory"]))
def test_no_group_that_is_made_is_larger_than_the_bound_and_nothing_is_left_that_it_allows(
    sizes: list[int], most: int, num_copies: int, asker: int, strategy: MergeStrategy
) -> None:
    the_shape = shape()
    groups = [group(i, size) for i, size in enumerate(sizes)]
    params = PlannerParams(strategy=strategy, most_members=most)
    plan = plan_drop(groups, num_copies * the_shape.parameter_bytes, the_shape, params, asker % len(sizes))
    assert all(len(m.stages) <= most for m in plan.merges)
    assert plan.freed_bytes == sum(len(m.sources) - 1 for m in plan.merges) * the_shape.parameter_bytes
    assert len({g for m in plan.merges for g in m.sources}) == sum(len(m.sources) for m in plan.merges)
    if strategy == "throughput" and not plan.sufficient:
        left = sizes_after(groups, plan)
        assert len(left) < 2 or left[0] + left[1] > most, "the two smallest would still fit"
    if most >= sum(sizes):
        free = PlannerParams(strategy=strategy)
        assert plan == plan_drop(groups, num_copies * the_shape.parameter_bytes, the_shape, free, asker % len(sizes))


@pytest.mark.parametrize(("most", "expected"), [(8, [8]), (7, [4, 4]), (3, [2] * 4), (1, [1] * 8)])
def test_with_a_bound_on_length_pipelines_stay_as_even_as_without(most: int, expected: list[int]) -> None:
    groups = [group(i, 1) for i in range(8)]
    plan = plan_drop(groups, 7 * shape().parameter_bytes, shape(), PlannerParams(most_members=most), asking=0)
    assert sizes_after(groups, plan) == expected
    assert plan.sufficient == (expected == [8])


def parts(group_id: int, *bounds: tuple[int, int], pressure: float = 0.5, free: int = 0) -> MergeCandidate:
    workers = tuple(range(100 * group_id, 100 * group_id + len(bounds)))
    return MergeCandidate(group_id, workers, tuple(LayerRange(*b) for b in bounds), pressure, free)


def test_a_group_whose_roomiest_partner_does_not_fit_takes_another_of_that_size() -> None:
    """Two members hold the first layer alone: one of them would have none. A partner that is cut elsewhere fits."""
    pressed = parts(0, (0, 1), (1, 8), pressure=0.9)
    alike = parts(1, (0, 1), (1, 8), free=1000)
    other = parts(2, (0, 4), (4, 8))
    assert plan_drop([pressed, alike], 1, shape(8)).merges == ()
    plan = plan_drop([pressed, alike, other], 1, shape(8))
    assert plan.sufficient and [set(m.sources) for m in plan.merges] == [{0, 2}]


def test_of_partners_that_do_not_fit_only_so_many_are_tried() -> None:
    """No group fits another: the work is a bounded number of tries for each group."""

    def work(num: int) -> PlanningWork:
        groups = [parts(i, (0, 1), (1, 2)) for i in range(num)]
        counted = PlanningWork()
        assert plan_drop(groups, 10**9, shape(2), work=counted).merges == ()
        return counted

    small, large = work(100), work(800)
    assert large.num_heap_operations <= 9 * small.num_heap_operations


# --- cost


def profiled(num_instances: int) -> float:
    """Each further stage costs a tenth."""
    return 100.0 * num_instances * 0.9 ** (num_instances - 1)


def cost_of(sizes: list[int]) -> float:
    cost = throughput_cost(sizes, profiled)
    assert cost is not None
    return cost


def test_v1s_cost_prefers_many_small_groups() -> None:
    assert cost_of([1] * 8) == pytest.approx(1.0)
    assert cost_of([2] * 4) < cost_of([5, 1, 1, 1])
    assert cost_of([8]) > 2.0
    assert throughput_cost([1, 2], lambda size: 100.0 if size == 1 else None) is None, "not profiled"


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(1, 4))
def test_throughput_greedy_is_v1s_optimum_for_equal_instances(num: int, merges: int) -> None:
    merges = min(merges, num - 1)
    groups = [group(i, 1) for i in range(num)]
    plan = plan_drop(groups, merges * shape().parameter_bytes, shape(), asking=0)
    best = min(
        cost_of([len(p) for p in parts])
        for parts in partitions(list(range(num)))
        if num - len(parts) >= merges
    )
    assert cost_of(sizes_after(groups, plan)) == pytest.approx(best, rel=0.03)


# --- work


def planning_work(groups: list[MergeCandidate], merges: int, num_layers: int, params: PlannerParams) -> PlanningWork:
    work = PlanningWork()
    the_shape = shape(num_layers)
    plan_drop(groups, merges * the_shape.parameter_bytes, the_shape, params, asking=0, work=work)
    return work


@pytest.mark.parametrize("num_layers", [2, 48])
@pytest.mark.parametrize("linked", [False, True])
def test_the_work_grows_like_n_log_n(linked: bool, num_layers: int) -> None:
    """Heap operations, each O(log N), grow linearly, and so does the work for the ranges of pairs."""

    def work(num: int) -> PlanningWork:
        links = Links({i: i % 7 for i in range(num)}) if linked else None
        groups = [MergeCandidate(i, (i,), (LayerRange(0, num_layers),), i % 5 / 5, 10 * (i % 3)) for i in range(num)]
        return planning_work(groups, num // 2, num_layers, PlannerParams(links=links))

    small, large = work(200), work(1600)
    assert large.num_heap_operations <= 9 * small.num_heap_operations
    assert large.num_range_steps <= 9 * small.num_range_steps


@pytest.mark.parametrize("strategy", ["throughput", "memory"])
def test_ranges_are_planned_for_what_is_left_and_not_on_the_way(strategy: MergeStrategy) -> None:
    """All instances become one group, by as many merges: its ranges cost what they cost, the merges next to nothing."""
    num, num_layers = 32, 48
    groups = [group(i, 1, num_layers) for i in range(num)]
    work = planning_work(groups, num - 1, num_layers, PlannerParams(strategy=strategy))
    once = PlanningWork()
    members = [Member(w, r) for g in groups for w, r in zip(g.members, g.resident, strict=True)]
    assert plan_stages(members, shape(num_layers), work=once) is not None
    assert once.num_range_steps <= num * num_layers**2 // 2
    assert work.num_range_steps <= once.num_range_steps + num**2


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 8), st.data())
def test_whether_there_are_ranges_is_known_without_them(num_layers: int, data: st.DataObject) -> None:
    """Against all ways to cut and all places for those that hold everything, the others ordered by their middles."""
    bounds = st.tuples(st.integers(0, num_layers - 1), st.integers(1, num_layers)).filter(lambda b: b[0] < b[1])
    residents = [LayerRange(*b) for b in data.draw(st.lists(bounds, min_size=1, max_size=5))]
    members = [Member(i, r) for i, r in enumerate(residents)]
    everything = LayerRange(0, num_layers)
    parts = sorted((r for r in residents if r != everything), key=lambda r: (r.lo + r.hi, r.lo))
    num = len(residents)
    expected = False
    for places in itertools.combinations(range(num), num - len(parts)):
        rest = iter(parts)
        order = [everything if i in places else next(rest) for i in range(num)]
        for cuts in itertools.combinations(range(1, num_layers), num - 1):
            stages = itertools.pairwise([0, *cuts, num_layers])
            expected |= all(r.lo <= lo and hi <= r.hi for r, (lo, hi) in zip(order, stages, strict=True))
    the_shape = shape(num_layers)
    assert has_stages(members, the_shape) == expected
    plan = plan_stages(members, the_shape)
    assert (plan is not None) == expected
    if plan is not None:
        held = {m.worker_id: m.resident for m in members}
        assert all(held[s.worker_id].covers(s.layers) for s in plan.stages)


def test_a_drop_takes_the_partner_that_choose_partner_names() -> None:
    """Whatever the sizes, the room and the machines, where the layers of any two groups fit together."""
    rng = random.Random(5)
    for _ in range(200):
        num = rng.randint(2, 40)
        links = rng.choice([None, Links({100 * i: i % rng.choice([1, 2, 7]) for i in range(num)})])
        groups = [
            group(i, rng.choice([1, 1, 1, 2]), pressure=rng.choice([0.2, 0.9]), free=200 * rng.randint(0, 3))
            for i in range(num)
        ]
        asking = rng.randrange(num)

        def machines(workers: tuple[int, ...], links: Links | None = links) -> frozenset[int]:
            return frozenset() if links is None else frozenset(links.machine(w) for w in workers)

        others = [
            Partner(len(g.members), -g.free_bytes, g.pressure, g.group_id, machines(g.members))
            for g in groups if g.group_id != asking
        ]
        chosen = choose_partner(machines(groups[asking].members), others, shape(), links)
        plan = plan_drop(groups, 1, shape(), PlannerParams(links=links), asking)
        assert chosen is not None and plan.merges[0].sources == (asking, chosen.order)
