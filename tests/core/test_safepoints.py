"""Steps of offline requests that may be given up: which are armed, when they are, and that nothing of them is left."""

from __future__ import annotations

import random

import pytest
from batchruns import group_of, kinds, make, names, offline, steps
from fakes import MS, FakeCluster, Faults, tokens

from jettison.core.totals import counters
from jettison.policy.offline import OfflineParams, SloParams


def test_only_steps_of_offline_requests_alone_are_armed() -> None:
    cluster = make()
    issued = steps(cluster)
    offline(cluster, "batch", 10, 30)
    cluster.submit("chat", tokens(1, 10), 10, 8.0, ignore_eos=True)
    cluster.run()
    armed = [names(s) for s in issued if s.safepoint_layers]
    assert armed and all(n == ["batch"] for n in armed)
    assert any("chat" in names(s) for s in issued)
    assert all(s.safepoint_layers == 1 for s in issued if names(s) == ["batch"])


@pytest.mark.parametrize(("params", "expected"), [
    (OfflineParams(slo_aware=False), 0), (OfflineParams(safepoint_layers=3), 3), (OfflineParams(), 3),
])  # fmt: skip
def test_k_is_as_given_else_from_the_predictor(params: OfflineParams, expected: int) -> None:
    cluster = make(num_layers=8, offline=params)
    issued = steps(cluster)
    offline(cluster, "batch", 10, 5)
    cluster.run()
    assert {s.safepoint_layers for s in issued} == {expected}


def long_step(ttft_ms: float, **changes: object) -> FakeCluster:
    """Behind a short step three prompts of 100 tokens are begun in one of some 13 ms, of as many tokens as saturate; 2
    or 3 ms into that step an online request comes."""
    cluster = make(ttft_ms, **changes)
    offline(cluster, "zzzz", 1, 1)
    for name in ("a", "b1", "c22"):
        offline(cluster, name, 100, 20, 0.1)
    cluster.submit("chat", tokens(7, 20), 5, 5.0, ignore_eos=True)
    return cluster


def test_a_step_in_the_way_of_a_deadline_is_given_up_and_the_newest_sit_out() -> None:
    cluster = long_step(10.0)
    issued = steps(cluster)
    cluster.run(until_ms=5.0)
    _, first = issued
    group = group_of(cluster)
    assert cluster.asked_to_abandon == {first.step_id} and set(group.absent) == {"a", "b1", "c22"}
    assert tuple(group.sitting_out) == ("c22",) or set(group.sitting_out) == {"b1", "c22"}
    cluster.run(stop=lambda: len(issued) == 3)
    assert "chat" in names(issued[2]) and "a" in names(issued[2]) and "c22" not in names(issued[2])
    assert not issued[2].safepoint_layers and not group.sitting_out
    asked = next(r for r in cluster.records if r.kind == "step_abandon_asked")
    assert asked.fields["request"] == "chat" and asked.fields["offline"] == 3 and asked.fields["kept"] in (1, 2)
    cluster.run()
    totals = counters(cluster.core)
    assert (totals["steps_abandoned"], totals["tokens_abandoned"]) == (1, sum(row.num_tokens for row in first.rows))
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_deadline_that_holds_changes_nothing() -> None:
    cluster = long_step(200.0)
    cluster.run(until_ms=5.5)
    assert not cluster.asked_to_abandon and not group_of(cluster).absent
    cluster.run()
    assert "step_abandoned" not in kinds(cluster)
    cluster.expect_outputs()


def test_where_the_next_batch_can_be_made_short_enough_the_step_runs_on() -> None:
    """Of decodes of many the next batch is shorter without some: the step under way is nearly over anyway."""
    cluster = make(8.6)
    for i in range(100):
        offline(cluster, f"batch-{i}", 1, 40)
    issued = steps(cluster)
    cluster.run(until_ms=13.0)
    cluster.submit("chat", tokens(7, 20), 5, cluster.now / MS, ignore_eos=True)
    cluster.run(stop=lambda: "chat" in cluster.core.state.requests)
    assert issued[-1].safepoint_layers
    group = group_of(cluster)
    assert not cluster.asked_to_abandon
    if group.sitting_out:
        newest = {s.request_id for s in group.queues.running_offline()[: len(group.sitting_out)]}
        assert set(group.sitting_out) == newest
    cluster.run()
    cluster.expect_outputs()


def test_nothing_is_given_up_for_an_offline_arrival_or_in_priority_mode() -> None:
    for changes in ({"offline": OfflineParams(slo_aware=False, slo=SloParams(ttft_s=0.001))}, {}):
        cluster = make(1.0, **changes)
        for name in ("a", "b1"):
            offline(cluster, name, 100, 20)
        if changes:
            cluster.submit("chat", tokens(7, 20), 5, 3.0)
        else:
            offline(cluster, "c22", 20, 5, 3.0)
        cluster.run()
        assert not cluster.asked_to_abandon
        cluster.expect_outputs()


def test_an_abandoned_step_leaves_its_requests_as_they_were() -> None:
    cluster = long_step(2.0)
    cluster.run(until_ms=4.0)
    before = snapshot(cluster)
    cluster.run(stop=lambda: "step_abandoned" in kinds(cluster))
    running = {s.request_id: s for s in group_of(cluster).queues.running.values() if s.is_offline}
    after = snapshot(cluster)
    for name in running:
        assert after[name][0] == before[name][0] == 0, "nothing counts as computed"
        assert after[name][1:] == before[name][1:], "its blocks stay its own"
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def snapshot(cluster: FakeCluster) -> dict[str, tuple[int, list[int], list[int]]]:
    ledger = cluster.core.state.workers[0].ledger
    return {
        s.request_id: (s.num_computed, list(s.output), list(ledger.table(s.request_id).ids))
        for s in group_of(cluster).queues.running.values()
    }


def test_a_group_whose_only_requests_sit_out_plans_with_them() -> None:
    """The online request that they made way for cannot be let in: memory lacks."""
    cluster = make(1.0, full_blocks=80)
    offline(cluster, "batch", 300, 10)
    cluster.submit("chat", tokens(7, 40), 5, 3.0, ignore_eos=True)
    cluster.run(until_ms=4.0)
    assert cluster.asked_to_abandon
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("seed", range(4))
def test_a_pipeline_gives_up_its_newest_step_and_plans_nothing_behind_it(seed: int) -> None:
    cluster = make(1.0, num_workers=2, num_layers=8, policy="pipeline", seed=seed, max_tokens=40, profile=None)
    for i in range(6):
        offline(cluster, f"batch-{i}", 60, 60)
    for i in range(20):
        cluster.submit(f"chat-{i}", tokens(i, 10), 1, 50.0 + 9.3 * i, ignore_eos=True)
    issued = steps(cluster)
    cluster.run(stop=lambda: bool(cluster.asked_to_abandon))
    (step_id,) = cluster.asked_to_abandon
    asked = {r.state.request_id for s in issued if s.step_id == step_id for r in s.rows}
    num_before = len(issued)
    group = group_of(cluster)
    cluster.run(stop=lambda: step_id not in group.in_flight)
    for step in issued[num_before:]:
        assert asked.isdisjoint(names(step)) or step_id not in group.in_flight
    cluster.run()
    assert counters(cluster.core)["steps_abandoned"] > 0
    assert "chunk_overtaken" not in kinds(cluster) and counters(cluster.core)["num_preemptions"] == 0
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_chunks_that_followed_one_that_was_given_up_are_computed_again() -> None:
    """Nobody asked: a worker may still have given a step up behind which others were planned."""
    cluster = make(1000.0, num_workers=2, policy="pipeline", max_tokens=16, faults=Faults(abandon=0.3))
    for i in range(3):
        offline(cluster, f"batch-{i}", 120, 20)
    cluster.run()
    assert counters(cluster.core)["steps_abandoned"] > 5 and counters(cluster.core)["num_preemptions"] > 0
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_cancelled_request_of_an_abandoned_step_is_freed() -> None:
    cluster = long_step(1.0)
    cluster.cancel("b1", 5.1)
    cluster.run()
    assert counters(cluster.core)["steps_abandoned"] == 1 and cluster.ends["b1"] == ["cancelled"]
    cluster.expect_nothing_left()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["drop", "recompute", "swap", "migrate", "pipeline"])
def test_whatever_moves_an_abandoned_step_leaves_nothing(policy: str, seed: int) -> None:
    cluster = make(
        2.0, num_workers=2, full_blocks=40, policy=policy, seed=seed, max_tokens=32, eager=True,
        faults=Faults(abandon=0.2), prefix_caching=True, profile=None,
    )
    rng = random.Random(seed)
    for i in range(40):
        if rng.random() < 0.6:
            offline(cluster, f"batch-{i}", rng.randint(1, 60), rng.randint(1, 40), rng.uniform(0, 150))
        else:
            cluster.submit(f"chat-{i}", tokens(i, rng.randint(1, 30)), rng.randint(1, 30), rng.uniform(50, 300))
    if policy == "drop":
        cluster.order_at("drop", 40)
        cluster.order_at("restore", 150)
    cluster.run()
    assert counters(cluster.core)["steps_abandoned"] > 0
    cluster.expect_outputs()
    cluster.expect_nothing_left()
