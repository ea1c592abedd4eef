"""Steps that shed their offline rows for an online arrival: nothing is computed twice, and nothing of a slice counts
before its end, whatever needs its blocks meanwhile."""

from __future__ import annotations

import random

import pytest
from batchruns import group_of, kinds, make, names, offline, steps
from fakes import FakeCluster, Faults, tokens

from jettison.core.discards import Discard
from jettison.core.ports import StepFailed, Tick
from jettison.core.requests import RequestState
from jettison.core.totals import counters
from jettison.policy.batching import BlockedBy
from jettison.policy.offline import OfflineParams, SloParams
from jettison.types import Request, SamplingParams
from longrun import LONG


def shedding(**changes: object) -> FakeCluster:
    return make(**({"ttft_ms": 100.0, "sheds_rows": True, "seed": 1} | changes))


def shed_at(ms: float, **changes: object) -> FakeCluster:
    """Behind a short step three prompts of 100 tokens are begun in one long step; an online request comes at a time."""
    cluster = shedding(**changes)
    offline(cluster, "zzzz", 1, 1)
    for name in ("a", "b1", "c22"):
        offline(cluster, name, 100, 20, 0.1)
    cluster.submit("chat", tokens(7, 20), 5, ms, ignore_eos=True)
    return cluster


def until_shed(cluster: FakeCluster) -> None:
    """Until rows are kept that something has been computed of."""
    cluster.run(stop=lambda: group_of(cluster).slices.kept is not None)
    assert group_of(cluster).slices.kept is not None


def test_a_step_of_offline_requests_alone_is_kept_and_goes_on_behind_the_online_one() -> None:
    cluster = shed_at(5.0)
    issued = steps(cluster)
    until_shed(cluster)
    first, online = issued[1], issued[2]
    assert first.sheds_from == 0 and first.safepoint_layers
    assert names(online) == ["chat"] and not online.safepoint_layers, "the slice's requests wait"
    assert set(group_of(cluster).absent) >= {row.state.request_id for row in first.rows}
    cluster.run()
    resumed = next(step for step in issued if step.resumes is not None)
    assert resumed.resumes is not None and resumed.resumes.step_id == first.step_id
    assert resumed.rows[resumed.sheds_from :] == first.rows
    totals = counters(cluster.core)
    assert totals["steps_shed"] >= 1 and totals["slices_resumed"] >= 1
    assert totals["steps_abandoned"] == totals["tokens_abandoned"] == totals["recomputed_tokens"] == 0
    assert {"step_shed_asked", "step_shed"} <= set(kinds(cluster))
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_step_of_both_classes_commits_its_online_rows_and_keeps_the_others() -> None:
    cluster = shedding()
    for name in ("a", "b1", "c22"):
        offline(cluster, name, 30, 300)
    cluster.submit("first", tokens(3, 10), 200, 30.0, ignore_eos=True)
    issued = steps(cluster)
    cluster.run(stop=lambda: bool(issued) and bool(issued[-1].sheds_from))
    mixed = issued[-1]
    assert names(mixed)[0] == "first" and all(row.state.is_offline for row in mixed.rows[1:])
    group, state = group_of(cluster), mixed.rows[0].state
    num_before, now_ms = state.num_tokens, cluster.now / 1e6
    cluster.submit("second", tokens(4, 10), 5, now_ms + 0.01, ignore_eos=True)
    cluster.asked_to_abandon.add(mixed.step_id)
    cluster.run(stop=lambda: mixed.step_id not in group.in_flight)
    assert state.num_tokens == num_before + 1
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("what", ["cancel", "drop", "kill"])
def test_what_needs_a_slices_blocks_discards_it(what: str) -> None:
    cluster = shed_at(5.0, num_workers=2, policy="drop")
    cluster.run(stop=lambda: any(g.slices.kept for g in cluster.core.groups.values()))
    (group,) = (g for g in cluster.core.groups.values() if g.slices.kept)
    kept = group.slices.kept
    assert kept is not None
    if what == "cancel":
        cluster.cancel(kept.rows[0].state.request_id, cluster.now / 1e6)
    elif what == "drop":
        cluster.order("drop")
        assert group.slices.kept is None and all(not row.state.num_pending for row in kept.rows)
    else:
        cluster.kill(group.worker_ids[0])
        cluster.restart_at(group.worker_ids[0], cluster.now / 1e6 + 100)
    cluster.run()
    reasons = {record.fields["reason"] for record in cluster.records if record.kind == "slice_discarded"}
    assert reasons <= {str(why) for why in Discard} and (reasons or what == "kill")
    assert counters(cluster.core)["slices_discarded"] == len(
        [record for record in cluster.records if record.kind == "slice_discarded"])
    if what != "cancel":
        cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("what", ["fails", "kill"])
def test_a_slice_that_is_lost_with_the_step_it_goes_on_with_is_counted(what: str) -> None:
    cluster = shed_at(5.0, num_workers=1)
    group = group_of(cluster)
    cluster.run(stop=lambda: any(flight.step.resumes for flight in group.in_flight.values()))
    (flight,) = group.in_flight.values()
    rows = flight.step.rows[flight.step.sheds_from :]
    if what == "kill":
        cluster.kill(group.worker_ids[0])
        cluster.restart_at(group.worker_ids[0], cluster.now / 1e6 + 100)
    else:
        cluster.carry_out(cluster.core.handle(StepFailed(flight.step.step_id, "it broke"), cluster.now))
    cluster.run()
    (lost,) = (record.fields for record in cluster.records if record.kind == "slice_discarded")
    assert lost["reason"] == str(Discard.LOST if what == "kill" else Discard.FAILED)
    assert lost["tokens"] == sum(row.num_tokens for row in rows) > 0
    assert counters(cluster.core)["slices_discarded"] == 1
    cluster.expect_nothing_left()


@pytest.mark.parametrize("sheds", [True, False])
def test_a_step_makes_way_for_a_request_that_comes_from_another_group(sheds: bool) -> None:
    """Memory keeps it out of its group, and a batch alone runs in the other one."""
    cluster = shedding(num_workers=2, full_blocks=84, sheds_rows=sheds, ttft_ms=100.0 if sheds else 6.0)
    here, there = cluster.core.groups.values()
    cluster.submit("large", tokens(9, 300), 40, ignore_eos=True)
    cluster.run(stop=lambda: bool(here.queues.running))
    for name in ("a", "b1", "c22"):
        offline(cluster, name, 100, 20, cluster.now / 1e6)
    issued = steps(cluster)
    cluster.run(stop=lambda: any(len(f.step.rows) > 1 or f.work.num_tokens > 60 for f in there.in_flight.values()))
    state = RequestState(Request("chat", tuple(tokens(7, 60)), SamplingParams(max_tokens=5), cluster.now), 99)
    cluster.core.state.requests["chat"] = state
    here.queues.enqueue(state)
    here.head_blocked_by = BlockedBy.MEMORY
    cluster.core.state.changes.came.clear()  # it had come here before
    cluster.carry_out(cluster.core.handle(Tick(), cluster.now))
    assert state.group_id == there.group_id
    assert {"rebalanced", "step_shed_asked" if sheds else "step_abandon_asked"} <= set(kinds(cluster)), issued


def test_a_slice_gives_way_where_memory_keeps_an_online_request_out() -> None:
    cluster = shed_at(5.0, full_blocks=84)
    cluster.submit("large", tokens(9, 200), 5, 5.5, ignore_eos=True)
    cluster.run()
    assert any(record.fields.get("reason") == str(Discard.ROOM) for record in cluster.records)
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_the_slice_joins_online_steps_for_as_many_layers_as_they_have_time_for() -> None:
    params = OfflineParams(slo=SloParams(ttft_s=0.1, tpot_s=0.006))
    cluster = shedding(num_layers=8, offline=params, seed=6)
    offline(cluster, "zzzz", 1, 1)
    for name in ("a", "b1", "c22", "d333"):
        offline(cluster, name, 100, 20, 0.1)
    cluster.submit("chat", tokens(7, 20), 60, 5.0, ignore_eos=True)
    issued = steps(cluster)
    until_shed(cluster)
    cluster.run()
    joined = [step for step in issued if step.resumes is not None]
    assert len(joined) >= 2 and all(names(step)[0] == "chat" and step.sheds_from == 1 for step in joined)
    layers = [step.resumes.num_layers for step in joined if step.resumes is not None]
    assert layers == sorted(layers) and all(step.resumes and step.resumes.most_layers for step in joined[:-1])
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_workers_that_cannot_shed_are_never_asked_to() -> None:
    cluster = shed_at(5.0, sheds_rows=False, ttft_ms=10.0)
    issued = steps(cluster)
    cluster.run()
    assert all(step.sheds_from is None and step.resumes is None for step in issued)
    assert counters(cluster.core)["steps_abandoned"] == 1
    cluster.expect_outputs()


@pytest.mark.parametrize("seed", range(40 if LONG else 5))
@pytest.mark.parametrize("policy", ["drop", "recompute", "swap", "migrate", "pipeline"])
def test_whatever_happens_meanwhile_a_slice_leaves_nothing(policy: str, seed: int) -> None:
    rng = random.Random(f"{policy} {seed}")
    cluster = shedding(
        num_workers=2, full_blocks=40, policy=policy, seed=seed, max_tokens=32, eager=True, num_layers=6,
        faults=Faults(abandon=0.3, step=0.01 if seed % 2 else 0.0), prefix_caching=True, profile=None,
        offline="harvest", swap_budget=8,
    )
    for i in range(40):
        at_ms = rng.uniform(0, 250)
        if rng.random() < 0.6:
            offline(cluster, f"batch-{i}", rng.randint(1, 60), rng.randint(1, 40), at_ms)
        else:
            cluster.submit(f"chat-{i}", tokens(i, rng.randint(1, 30)), rng.randint(1, 30), at_ms)
        if rng.random() < 0.15:
            cluster.cancel(f"batch-{i}", at_ms + rng.uniform(0, 100))
    if policy == "drop":
        cluster.order_at("drop", 40)
        cluster.order_at("restore", 150)
        if seed % 2:
            cluster.kill_at(rng.randrange(2), rng.uniform(20, 200))
            for at_ms in (300, 400):
                for worker in range(2):
                    cluster.restart_at(worker, at_ms)
    cluster.run()
    assert cluster.num_shed > 0 and counters(cluster.core)["slices_resumed"] > 0
    cluster.expect_outputs()
    cluster.expect_nothing_left()
