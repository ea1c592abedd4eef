"""What is known of load: what the prefix cache spares, and what groups, pipelines and links are taken to do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fakes import FakeCluster

from jettison.core.load.monitor import NUM_PROMPTS, TrafficMonitor
from jettison.core.ports import Action, Event, StepCompleted
from jettison.cost.hardware import BatchPoint, HardwareProfile
from jettison.cost.model import ChunkShape, CostModel
from jettison.cost.predictor import UNEVEN
from jettison.cost.stepwork import LONE_STEP, NOTHING, Measure, Part, StepWork, period_of, step_of
from jettison.policy.exchange import ExchangeCosts, ExchangeMode


def test_the_share_is_by_tokens_and_exact_while_prompts_are_few() -> None:
    traffic = TrafficMonitor()
    assert traffic.prefix_hit_share == 0.0
    for num_tokens, num_cached in ((100, 90), (300, 0), (200, 60)):
        traffic.note_prompt(num_tokens, num_cached)
    assert traffic.prefix_hit_share == pytest.approx(150 / 600)


@pytest.mark.parametrize(("before", "after"), [(90, 0), (0, 90)])
def test_the_share_follows_the_last_few_hundred_prompts(before: int, after: int) -> None:
    traffic = TrafficMonitor()
    for _ in range(100_000):
        traffic.note_prompt(100, before)
    assert traffic.prefix_hit_share == pytest.approx(before / 100)
    for _ in range(3 * NUM_PROMPTS):
        traffic.note_prompt(100, after)
    assert traffic.prefix_hit_share == pytest.approx(after / 100, abs=0.06)


def test_each_prompt_counts_once_with_what_its_first_admission_found() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=40, max_tokens=64)
    shared = [7] * 16
    cluster.submit("first", [*shared, 1, 2, 3, 4], 3)
    for i in range(3):
        cluster.submit(f"r{i}", [*shared, 10 + i, 2, 3, 4], 3, at_ms=200 * (i + 1))
    cluster.run()
    traffic = cluster.core.loads.traffic
    assert traffic.num_prompts == 4 and traffic.prefix_hit_share == pytest.approx(3 * 16 / (4 * 20))
    # Recomputing after a preemption is no new prompt.
    crowded = FakeCluster(num_workers=1, full_blocks=12, max_tokens=64, policy="recompute")
    rng = random.Random(1)
    for i in range(6):
        crowded.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(12)], 20)
    crowded.run()
    assert sum(g.counters.num_preemptions for g in crowded.core.groups.values()) > 0
    assert crowded.core.loads.traffic.num_prompts == 6


def merged_cluster(**options: object) -> FakeCluster:
    """Two workers as one pipeline that has stepped long enough for its fit to know it."""
    cluster = FakeCluster(full_blocks=400, auto_restore=False, **options)  # type: ignore[arg-type]
    cluster.carry_out(cluster.core.request_drop(0))
    for i in range(24):
        cluster.submit(f"r{i}", [1 + (i + j) % 60 for j in range(20 + i)], 40, at_ms=5 * i)
    cluster.run(until_ms=150)
    return cluster


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_step_that_has_prepared_others_teaches_no_time(num_stages: int) -> None:
    """Of a pipeline, the time to the end of the next step is of it, too."""
    cluster = merged_cluster() if num_stages == 2 else FakeCluster(num_workers=1, full_blocks=400)
    for i in range(4):
        cluster.submit(f"late{i}", [1 + (i + j) % 60 for j in range(20 + i)], 40, at_ms=200)
    core, ends, learned = cluster.core, list[tuple[int, bool]](), list[tuple[int, int, Part]]()
    handle, observe = core.handle, core.state.predictor.observe

    def prepared(event: Event, now_ns: int) -> list[Action]:
        if isinstance(event, StepCompleted):
            event = event._replace(has_prepared=len(ends) % 3 == 1)
            ends.append((now_ns, event.has_prepared))
        return handle(event, now_ns)

    def note(work: StepWork, times_ns: Sequence[int], group_id: int = 0, part: Part = LONE_STEP) -> None:
        learned.append((times_ns[0], times_ns[-1], part))
        observe(work, times_ns, group_id, part)

    cluster.core.handle = prepared  # type: ignore[method-assign]
    core.state.predictor.observe = note  # type: ignore[method-assign]
    cluster.run()
    untold = {end_ns for end_ns, has_prepared in ends if has_prepared}
    assert len(untold) > 10 and {end_ns for _, end_ns, _ in learned} == {end_ns for end_ns, _ in ends} - untold
    periods = {begin_ns for begin_ns, _, part in learned if part.measure is Measure.PERIOD}
    assert untold.isdisjoint(periods) and bool(periods) == (num_stages == 2)


def test_what_an_exchange_costs_is_a_microbatchs_affair() -> None:
    cluster = merged_cluster()
    (group,) = cluster.core.groups.values()
    predictor, costs = cluster.core.state.predictor, cluster.core.loads.exchange_costs(group)
    num_requests = len(group.queues.running) + len(group.queues.moving)
    kv_tokens = group.blocks.num_used * group.limits.block_size
    decodes = StepWork.decodes(num_requests // 2, kv_tokens // 2)
    assert costs.step_s == predictor.predict_s(decodes, step_of(2))
    # All stages work on what is computed again: requests as long as the group's, whose later chunks attend to the
    # earlier ones; a shorter one in a single chunk.
    budget, mean = group.limits.max_num_batched_tokens, kv_tokens // num_requests
    assert mean > budget
    for num_tokens, context in ((1000, (mean - budget) // 2), (budget, 0)):
        step_s = predictor.predict_s(NOTHING.with_prompt(budget, context), step_of(2))
        assert step_s and costs.recompute_s(num_tokens) == pytest.approx(num_tokens / (2 * budget / step_s))


PROFILE = HardwareProfile(
    CostModel(4, 1e-8, 1e-8, 1e-5, 1e-4, 1e-4, 0.0, 0.0, 0.0, 0.0), link_bytes_per_s=3e9, link_latency_s=4e-3,
    remap_fixed_s=0.0, remap_s_per_byte=0.0, host_copy_bytes_per_s=1e9, disk_bytes_per_s=1e9,
)


@pytest.mark.parametrize("has_profiled_links", [True, False])
def test_a_link_that_was_not_profiled_is_not_known(has_profiled_links: bool) -> None:
    core = FakeCluster(profile=PROFILE).core
    core.reconfigure(replace(core.params, has_profiled_links=has_profiled_links))
    costs = core.loads.exchange_costs(core.groups[0])
    assert costs.link_bytes_per_s((0, 1)) == (3e9 if has_profiled_links else None)
    assert costs.round_trip_s == (8e-3 if has_profiled_links else ExchangeCosts().round_trip_s)


POINTS = tuple(BatchPoint(stages, 8, 256, rate) for stages, rate in ((1, 100.0), (2, 180.0), (4, 300.0)))


def test_rates_of_groups_count_what_arrives_and_what_pipelines_have_shown() -> None:
    for profile in (None, replace(PROFILE, batch_points=POINTS)):
        cluster = FakeCluster(full_blocks=400, profile=profile)
        for i in range(240):
            cluster.submit(f"r{i}", [1 + (i + j) % 60 for j in range(20)], 10, at_ms=50 * i)
        cluster.run(until_ms=11_500)
        core = cluster.core
        assert bool(core.loads.compute.group_rates()) == (profile is not None)
    traffic = core.loads.traffic.traffic()
    assert traffic is not None and traffic.prompt_tokens > 0
    assert not core.state.predictor.measured_pipelines, "what was assumed is not what was seen"
    rates = core.loads.compute.group_rates()
    assert set(rates) == {1, 2, 4}
    assert rates[1] < 100.0 and rates[2] < 180.0 and rates[4] < 300.0, "prompts take their part"
    work, end_ns = core.loads.compute.steady_step(), cluster.now
    assert work is not None
    step_ns = round((core.state.predictor.predict_s(work) or 0.0) * 1e9)
    for part, took_ns in ((LONE_STEP, step_ns), (period_of(2), round(0.8 * step_ns))):  # 0.625 of two instances' rate
        for _ in range(100):
            core.state.predictor.observe(work, (end_ns, end_ns := end_ns + took_ns), 0, part)
    seen = core.loads.compute.group_rates()
    assert seen[2] == pytest.approx(2 * rates[1] * 0.625, rel=0.05), "as pipelines of two have served"
    assert seen[2] < 0.8 * rates[2] and (seen[1], seen[4]) == (rates[1], rates[4])


def test_other_parameters_keep_what_steps_have_taught() -> None:
    core = merged_cluster().core
    seen = core.state.predictor
    core.reconfigure(replace(core.params, exchange=ExchangeMode.LIVE))
    assert core.state.predictor is seen


def test_a_profile_answers_before_the_first_step() -> None:
    core = FakeCluster(full_blocks=400, profile=PROFILE).core
    group = core.groups[0]
    assert core.loads.blocks_beside_step(group, 0.5) is not None
    expected = PROFILE.cost.batch_cost_s([ChunkShape(10, 1)] * 3)
    work = StepWork.decodes(3, 30)
    assert core.state.predictor.predict_s(work) == pytest.approx(expected)
    assert core.state.predictor.predict_s(work, period_of(2)) == pytest.approx(UNEVEN * expected / 2)


def test_of_a_pipeline_nothing_is_learned_beside_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last steps run beside the copies of its restore."""
    cluster = FakeCluster(full_blocks=24, max_tokens=64)
    core, kinds = cluster.core, set[tuple[bool, bool]]()
    predictor, whole = core.state.predictor, core.state.predictor.observe

    def observe(work: StepWork, times_ns: Sequence[int], group_id: int = 0, part: Part = LONE_STEP) -> None:
        is_moving = core.moves.is_moving(core.groups[group_id])
        kinds.add((part.num_stages > 1, is_moving))
        assert part.num_stages == 1 or not is_moving
        whole(work, times_ns, group_id, part)

    monkeypatch.setattr(predictor, "observe", observe)
    rng = random.Random(2)
    for i in range(40):
        cluster.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(20)], 40, at_ms=2.0 * i)
    cluster.run()
    kinds_of_log = {record.kind for record in cluster.records}
    assert {"drop", "restore_done"} <= kinds_of_log and (True, False) in kinds
