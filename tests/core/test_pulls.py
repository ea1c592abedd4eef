"""Drops whose members must fetch shards first, and requests for more instances: with pretend KV that steps check."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster, Faults
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_any_schedule import N_EXAMPLES

from jettison.core import ports
from jettison.core.ladder.forecasts import Question
from jettison.core.ladder.lists import parse_overload
from jettison.core.ladder.rung import Moment
from jettison.core.ladder.scale import ScaleRung
from jettison.core.moving.merging import MergePhase
from jettison.core.serving.holds import DROP, LOST_PEER
from jettison.memory.layout import LayoutSpec
from jettison.memory.stages import StagePlan
from jettison.policy.overload import OverloadParams, Trigger
from jettison.types import LayerRange
from longrun import part_of

RESIDENCIES = {
    3: [[(0, 4)], [(0, 1), (1, 4)]],  # a member that holds everything makes room for any order
    # More members than layers hold nothing but the first: no order of stages lies inside what they hold.
    4: [[(0, 1), (1, 4)], [(0, 1), (1, 4)]],
    5: [[(0, 2), (2, 6)], [(0, 1), (1, 2), (2, 6)]],
}


def arranged(
    groups: Sequence[Sequence[tuple[int, int]]], *, seed: int = 0, faults: Faults | None = None,
    policy: str = "drop", exchange: str = "auto",
) -> FakeCluster:
    """A cluster whose workers already form these groups, as after earlier drops."""
    num_layers = max(hi for parts in groups for _, hi in parts)
    cluster = FakeCluster(
        num_workers=sum(len(parts) for parts in groups), full_blocks=60, num_layers=num_layers, seed=seed,
        auto_restore=False, shard_bytes=512, faults=faults, policy=policy, host_slots=500, swap_budget=1,
        exchange=exchange,
    )
    state = cluster.core.state
    for group in list(state.groups.values()):
        state.dissolve(group)
    worker_id = 0
    for parts in groups:
        stages = []
        for part in parts:
            layers = LayerRange(*part)
            spec = LayoutSpec(cluster.shape.shards_for(layers), layers)
            fake, worker = cluster.workers[worker_id], state.workers[worker_id]
            fake.apply(spec, ())
            fake.lent.clear()  # long ago: others have written those pages
            worker.layout = spec
            worker.ledger.resize(fake.capacity)
            stages.append(StagePlan(worker_id, layers))
            worker_id += 1
        state.form_group(tuple(stages))
    return cluster


def fill(cluster: FakeCluster, num: int = 8, tag: str = "r", at_ms: float = 0.0) -> None:
    rng = random.Random(num)
    for i in range(num):
        cluster.submit(f"{tag}{i}", [rng.randrange(1, 60) for _ in range(10 + i % 5)], 60 + i, at_ms + i)


def drop_while_running(cluster: FakeCluster) -> None:
    """A drop is asked for while requests run, and everything goes on to rest."""
    fill(cluster)
    cluster.run(until_ms=60)
    cluster.order("drop")
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def phases_seen(cluster: FakeCluster) -> list[MergePhase]:
    """Run to rest, noting the phases of the first merge."""
    seen: list[MergePhase] = []

    def note() -> bool:
        for merge in cluster.core.merges:
            if not seen or seen[-1] is not merge.phase:
                seen.append(merge.phase)
        return False

    cluster.run(stop=note)
    return seen


def kinds(cluster: FakeCluster) -> list[str]:
    return [r.kind for r in cluster.records]


@pytest.mark.parametrize("num_members", sorted(RESIDENCIES))
@pytest.mark.parametrize("seed", part_of(range(3), (0,)))
def test_members_fetch_what_their_stage_lacks_and_then_drop(num_members: int, seed: int) -> None:
    cluster = arranged(RESIDENCIES[num_members], seed=seed)
    fill(cluster)
    cluster.run(until_ms=60)
    cluster.order("drop")
    seen = phases_seen(cluster)
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    needs_pull = num_members != 3
    assert (MergePhase.PULL in seen) == needs_pull
    (group,) = cluster.core.groups.values()
    assert len(group.stages) == num_members
    assert (cluster.core.state.counters.pulled_bytes > 0) == needs_pull
    for worker in cluster.workers.values():
        assert worker.filled == worker.spec.shards, "what was pulled and is not needed has been dropped"


@pytest.mark.parametrize("num_members", [4, 5])
@pytest.mark.parametrize("seed", part_of(range(4), range(2)))
def test_a_transfer_that_fails_is_replaced_by_the_model_folder(num_members: int, seed: int) -> None:
    cluster = arranged(RESIDENCIES[num_members], seed=seed, faults=Faults(move=1.0, budget=1))
    drop_while_running(cluster)
    assert len(cluster.core.groups) == 1 and cluster.num_faults == 1


@pytest.mark.parametrize("num_members", [4, 5])
def test_a_pull_that_failed_is_asked_of_another_holder_before_the_folder(num_members: int) -> None:
    cluster = arranged(RESIDENCIES[num_members], faults=Faults(load=1.0, budget=100))
    failed: set[tuple[int, str]] = set()

    def fails_once(move: ports.SendShard) -> bool:
        is_first = (move.dst, move.shard) not in failed
        failed.add((move.dst, move.shard))
        return is_first

    cluster.fails_shard = fails_once
    drop_while_running(cluster)
    assert failed and "drop" in kinds(cluster) and cluster.num_faults == 0, "nobody had to read the folder"


@pytest.mark.parametrize("num_members", [4, 5])
@pytest.mark.parametrize("seed", part_of(range(4), range(2)))
def test_a_shard_that_can_be_had_nowhere_leaves_everything_as_it_was(num_members: int, seed: int) -> None:
    cluster = arranged(RESIDENCIES[num_members], seed=seed, faults=Faults(load=1.0, budget=2))
    cluster.fails_shard = lambda _: True  # nobody's copy arrives, and the folder cannot be read
    before = {w: s.layout for w, s in cluster.core.state.workers.items()}
    capacity = {w: s.ledger.capacity for w, s in cluster.core.state.workers.items()}
    drop_while_running(cluster)
    assert "drop_failed" in kinds(cluster) and "drop" not in kinds(cluster)
    assert len(cluster.core.groups) == 2
    assert {w: s.layout for w, s in cluster.core.state.workers.items()} == before
    assert {w: s.ledger.capacity for w, s in cluster.core.state.workers.items()} == capacity


@pytest.mark.parametrize("num_failures", [1, 2, 4])
@pytest.mark.parametrize("num_members", [4, 5])
def test_members_that_refuse_a_layout_during_a_merge_with_pulls(num_members: int, num_failures: int) -> None:
    cluster = arranged(RESIDENCIES[num_members], seed=num_failures)
    fill(cluster)
    cluster.run(until_ms=60)
    for worker in cluster.workers.values():
        worker.fail_applies = num_failures
    cluster.order("drop")
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert "drop_failed" in kinds(cluster) and len(cluster.core.groups) == 2
    cluster.order("drop")
    fill(cluster, tag="again", at_ms=cluster.now / MS)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("seed", part_of(range(6), range(3)))
def test_any_fault_during_a_merge_with_pulls(seed: int) -> None:
    cluster = arranged(RESIDENCIES[5], seed=seed, faults=Faults(0.3, 0.3, 0.3, 0.3, 0.0, budget=6))
    fill(cluster, 10)
    for i in range(0, 10, 3):
        cluster.cancel(f"r{i}", 60 + 3 * i)
    cluster.run(until_ms=60)
    cluster.order("drop")
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


# --- deaths


MEMBERS = {num: sum(len(parts) for parts in groups) for num, groups in RESIDENCIES.items()}
PULL_PHASES = [
    MergePhase.DRAIN, MergePhase.MAP, MergePhase.PULL, MergePhase.QUIESCE, MergePhase.REMAP, MergePhase.EXCHANGE,
]


def expect_recovery(cluster: FakeCluster) -> None:
    """Run to rest with everybody back: nothing lost, and every worker of a broken group is an instance again."""
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert all(w.alive and not w.unfilled for w in cluster.core.state.workers.values())
    assert {w for g in cluster.core.groups.values() for w in g.worker_ids} == set(cluster.workers)
    for worker in cluster.workers.values():
        assert worker.filled == worker.spec.shards


def die_in(cluster: FakeCluster, phase: MergePhase, victim: int, *, some_have_come: bool = False) -> None:
    """Bring a drop into a phase, and kill a member there (``some_have_come``: when the first shard has arrived)."""
    cluster.order("drop")
    cluster.run(stop=lambda: any(m.phase is phase for m in cluster.core.merges))
    assert any(m.phase is phase for m in cluster.core.merges), f"{phase} was not reached"
    if some_have_come:
        moves = len(cluster.core.state.book.transfers)
        cluster.run(stop=lambda: len(cluster.core.state.book.transfers) < moves)
    cluster.kill(victim)
    cluster.run(stop=lambda: "worker_lost" in kinds(cluster))
    fill(cluster, 4, tag="after", at_ms=cluster.now / MS)
    cluster.restart_at(victim, cluster.now / MS + 60)


@pytest.mark.parametrize("num_members", part_of([4, 5], [5]))
@pytest.mark.parametrize(("phase", "some_have_come"), [*((p, False) for p in PULL_PHASES), (MergePhase.PULL, True)])
def test_any_member_may_die_in_any_phase_of_a_drop_with_pulls(
    phase: MergePhase, some_have_come: bool, num_members: int
) -> None:
    for victim in range(MEMBERS[num_members]):
        cluster = arranged(RESIDENCIES[num_members], seed=victim)
        fill(cluster)
        cluster.run(until_ms=60)
        die_in(cluster, phase, victim, some_have_come=some_have_come)
        assert not cluster.core.merges, "a drop ends with its member"
        expect_recovery(cluster)


@pytest.mark.parametrize("num_members", part_of([4, 5], [4]))
@pytest.mark.parametrize("phase", [MergePhase.GIVE_BACK, MergePhase.REVERTING, MergePhase.REFILLING], ids=str)
def test_any_member_may_die_while_a_failed_drop_with_pulls_is_undone(phase: MergePhase, num_members: int) -> None:
    for victim in range(MEMBERS[num_members]):
        gives_back = phase is MergePhase.GIVE_BACK
        faults = Faults(load=1.0, budget=2) if gives_back else None
        cluster = arranged(RESIDENCIES[num_members], seed=victim, faults=faults)
        if gives_back:
            cluster.fails_shard = lambda _, cluster=cluster: bool(cluster.core.merges)
        fill(cluster)
        cluster.run(until_ms=60)
        if not gives_back:  # somebody refuses to drop, after all pulls have come
            cluster.order("drop")
            cluster.run(stop=lambda cluster=cluster: any(m.phase is MergePhase.QUIESCE for m in cluster.core.merges))
            cluster.workers[0].fail_applies = 1
            cluster.run(stop=lambda cluster=cluster: any(m.phase is phase for m in cluster.core.merges))
            assert any(m.phase is phase for m in cluster.core.merges)
        die_in(cluster, phase, victim)
        expect_recovery(cluster)


def with_chunk_behind(cluster: FakeCluster) -> ports.RunStep | None:
    """A step under way that needs its peers, with a later chunk of one of its requests under way behind it."""
    for group in cluster.core.groups.values():
        steps = [flight.step for flight in group.in_flight.values()]
        for step, *later in (steps[i:] for i in range(len(steps))):
            ids = {row.state.request_id for row in step.rows}
            if any(row.remote for row in step.rows) and any(r.state.request_id in ids for s in later for r in s.rows):
                return step
    return None


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "silent"])
def test_a_chunk_behind_a_step_that_a_peer_held_up_counts_for_nothing(dies: bool) -> None:
    """It runs on KV that the step before it never wrote: what comes of it is wrong, and no client gets it."""
    num_spoilt = 0
    for seed in part_of(range(12), (0, 3, 4)):
        faults = Faults(remote=0.0 if dies else 1.0, budget=4)
        cluster = arranged(RESIDENCIES[5], seed=seed, faults=faults, exchange="live")
        fill(cluster)
        for i in range(3):
            cluster.submit(f"long {i}", [1 + (7 * i + j) % 50 for j in range(300)], 5, 61.0 + i)
        cluster.run(until_ms=60)
        cluster.order("drop")
        cluster.run(stop=lambda cluster=cluster: with_chunk_behind(cluster) is not None)
        step = with_chunk_behind(cluster)
        if step is not None and dies:
            victim = next(part.src for row in step.rows for part in row.remote)
            cluster.kill(victim)
            cluster.restart_at(victim, cluster.now / MS + 60)
        expect_recovery(cluster)
        num_spoilt += cluster.num_spoilt_rows
    assert num_spoilt > 0, "no chunk was behind a step that was held up"


@pytest.mark.slow
@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    num_members=st.sampled_from([4, 5]),
    seed=st.integers(0, 10_000),
    faults=st.builds(Faults, move=st.sampled_from([0.0, 0.3]), load=st.sampled_from([0.0, 0.3]), budget=st.just(4)),
    deaths=st.lists(
        st.tuples(st.integers(0, 4), st.floats(0, 150), st.floats(35, 200)), min_size=1, max_size=4
    ),
    cancelled=st.lists(st.tuples(st.integers(0, 7), st.floats(0, 150)), max_size=3),
)
@example(  # a peer dies that a step needs, with a chunk behind that step which needs none
    num_members=5, seed=5438, faults=Faults(budget=4), deaths=[(3, 50.0, 35.0)], cancelled=[(0, 0.0)],
)
def test_any_deaths_around_a_drop_with_pulls(
    num_members: int, seed: int, faults: Faults, deaths: list[tuple[int, float, float]],
    cancelled: list[tuple[int, float]],
) -> None:
    cluster = arranged(RESIDENCIES[num_members], seed=seed, faults=Faults(**vars(faults)))
    fill(cluster)
    cluster.order_at("drop", 60)
    for number, at_ms, back_after_ms in deaths:
        cluster.kill_at(number % MEMBERS[num_members], 55 + at_ms)
        cluster.restart_at(number % MEMBERS[num_members], 55 + at_ms + back_after_ms)
    for number, at_ms in cancelled:
        cluster.cancel(f"r{number}", 55 + at_ms)
    for worker in cluster.workers:
        cluster.restart_at(worker, 900.0 + worker)
    expect_recovery(cluster)


# --- scale out


def test_a_burst_no_plan_can_hold_asks_once_and_is_served_all_the_same() -> None:
    cluster = FakeCluster(full_blocks=16, shard_bytes=256)
    rng = random.Random(1)
    for i in range(60):
        cluster.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(14)], 30, i * 0.5)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    asked = [r for r in cluster.records if r.kind == "scale_out"]
    assert len(asked) == 1 == cluster.core.ladder.num_scale_outs
    assert asked[0].fields["missing_bytes"] > 0  # type: ignore[operator]


def test_a_burst_that_one_drop_holds_does_not_ask() -> None:
    cluster = FakeCluster()
    fill(cluster, 20)
    cluster.run()
    assert "drop" in kinds(cluster) and "scale_out" not in kinds(cluster)


def merged() -> SimpleNamespace:
    """As much of a merged group as the watch reads."""
    blocks, queues = SimpleNamespace(capacity=100, num_used=0), SimpleNamespace(queued_blocks=lambda: 0)
    return SimpleNamespace(group_id=3, stages=(0, 1), blocks=blocks, queues=queues)


def watch(demands: Sequence[int], step_ms: int = 500, **changes: Any) -> list[ports.Action]:
    """Records of a watch that sees these demands."""
    core = FakeCluster(**changes).core
    group, watcher = merged(), core.ladder.rung("scale")
    assert isinstance(watcher, ScaleRung)
    records: list[ports.Action] = []
    for i, demand in enumerate(demands):
        group.blocks.num_used = demand
        core.state.pipelines = {group.group_id: group}  # type: ignore[dict-item]
        now_ns = i * step_ms * MS
        for offer in watcher.look(Moment.TICK, now_ns):
            records += watcher.begin(offer, now_ns)
        records += watcher.leave(now_ns)
    return records


def test_a_continuous_rise_after_a_drop_asks_before_memory_is_full() -> None:
    records = watch(range(20, 80, 5))
    assert [r.kind for r in records if isinstance(r, ports.Record)] == ["scale_out"]
    block_bytes = FakeCluster().shape.block_bytes_per_layer(BLOCK_SIZE) * 4
    assert isinstance(records[0], ports.Record) and records[0].fields["missing_bytes"] % block_bytes == 0  # type: ignore[operator]


@pytest.mark.parametrize(("is_worth_it", "asks"), [(True, 1), (False, 0)])
def test_a_rise_asks_only_where_the_forecast_says_that_memory_is_worth_a_device(
    monkeypatch: pytest.MonkeyPatch, is_worth_it: bool, asks: int
) -> None:
    answer = SimpleNamespace(is_worth_a_device=is_worth_it)
    monkeypatch.setattr(Question, "of", lambda means, now_ns, apart=(): answer)
    assert len(watch(range(20, 80, 5), trigger=Trigger.FORECAST)) == asks
    assert len(watch(range(20, 80, 5), trigger=Trigger.PRESSURE)) == 1, "no forecast is made"


@pytest.mark.parametrize("demands", [[50] * 30, [20, 30, 40, 10, 20, 30, 40, 10] * 3, list(range(5, 35))])
def test_a_level_a_falling_and_a_slow_demand_do_not_ask(demands: list[int]) -> None:
    assert watch(demands) == []


def test_the_episode_ends_after_a_quiet_while_and_another_may_begin() -> None:
    records = watch([*range(20, 80, 10), *[10] * 14, *range(20, 80, 10)])
    assert [r.kind for r in records if isinstance(r, ports.Record)] == ["scale_out", "scale_out_over", "scale_out"]


# --- all overloaded groups count


def test_what_every_overloaded_group_needs_is_required() -> None:
    cluster = FakeCluster(num_workers=4, full_blocks=16, shard_bytes=512, policy="recompute")
    rng = random.Random(2)
    for i in range(40):
        cluster.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(16)], 40, i * 0.2)
    cluster.run(until_ms=60)
    at_once = OverloadParams(trigger=Trigger.PRESSURE)
    cluster.core.reconfigure(replace(cluster.core.params, **parse_overload("drop")._asdict(), overload=at_once))
    cluster.run(stop=lambda: "drop_decided" in kinds(cluster))
    decided = next(r.fields for r in cluster.records if r.kind == "drop_decided")
    assert len(decided["overloaded_groups"]) > 1  # type: ignore[arg-type]
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("policy", ["swap", "swap+drop"])
def test_running_requests_may_grow_while_shards_are_pulled(policy: str) -> None:
    """Requests on their way to the host have given way to the drop: their blocks are not about to be free."""
    cluster = arranged(RESIDENCIES[4], policy=policy)
    fill(cluster, 30)
    cluster.run(stop=lambda: any(g.holds_preemption for g in cluster.core.groups.values()))
    cluster.order("drop")
    (merge,) = cluster.core.merges
    cluster.run(stop=lambda: merge.phase is MergePhase.PULL)
    assert not any(group.holds_preemption for group in merge.sources)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_pull_does_not_lift_the_pause_for_a_lost_peer() -> None:
    """A member is lost while the groups drain for a pull: until its death is known, no further step is sent there."""
    cluster = arranged(RESIDENCIES[4])
    fill(cluster)
    cluster.run(stop=lambda: all(g.in_flight for g in cluster.core.groups.values()))
    lost, other = cluster.core.groups.values()
    cluster.order("drop")
    (merge,) = cluster.core.merges
    assert merge.phase is MergePhase.DRAIN and lost.in_flight
    for step_id in list(lost.in_flight):
        cluster.core.handle(ports.StepFailed(step_id, "gone", lost.worker_ids[1]), cluster.now)
    cluster.run(stop=lambda: merge.phase is MergePhase.PULL)
    assert not other.paused and lost.paused == {LOST_PEER}, "the pull goes on beside steps of the other group alone"
    cluster.run(stop=lambda: bool(other.in_flight))
    assert not lost.in_flight
    cluster.run(stop=lambda: merge.phase is not MergePhase.PULL)
    assert merge.phase is MergePhase.QUIESCE and lost.paused == {LOST_PEER, DROP}
