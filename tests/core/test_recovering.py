"""Workers that die: at any moment of any move, one or all of them, coming back soon, late or never."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster, Faults, expect_all_well
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_any_schedule import ASKED, CLUSTER, FAULTS, N_EXAMPLES, Asked, Cluster, build
from test_restoring import asked_by_shard

from jettison.core import ports
from jettison.core.ladder.swap import SwapRung
from jettison.core.moving.merging import MergePhase
from jettison.core.moving.recovery import RecoveryPhase
from jettison.core.moving.restoring import RestorePhase
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.group import Group
from jettison.memory.stages import StagePlan
from jettison.types import LayerRange


def tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(1, 60) for _ in range(num)]


def fill(cluster: FakeCluster, num: int, *, prompt: int = 14, output: int = 60, tag: str = "r") -> None:
    rng = random.Random(num)
    for i in range(num):
        cluster.submit(f"{tag}{i}", tokens(rng, prompt), output, cluster.now / MS + 0.1 * i)


def drop_all(cluster: FakeCluster) -> Group:
    """Let a few steps go by, and order a drop that merges everybody: the group they are then."""
    cluster.run(until_ms=40)
    cluster.order("drop")
    cluster.run(stop=lambda: not cluster.core.in_transition)
    (group,) = cluster.core.groups.values()
    return group


def expect_a_return(cluster: FakeCluster, worker_id: int) -> None:
    """A worker dies and comes back soon, and nobody has lost anything by it."""
    cluster.kill(worker_id)
    cluster.restart_at(worker_id, cluster.now / MS + 100)
    cluster.run()
    expect_all_well(cluster)


def kinds(cluster: FakeCluster) -> list[str]:
    return [r.kind for r in cluster.records]


# --- one death, everywhere


@pytest.mark.slow
@settings(max_examples=2 * N_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cluster=CLUSTER,
    faults=FAULTS,
    requests=st.lists(ASKED, min_size=1, max_size=20),
    orders=st.lists(st.tuples(st.sampled_from(["drop", "drop", "restore"]), st.floats(0, 300)), max_size=6),
    deaths=st.lists(
        st.tuples(st.integers(0, 3), st.floats(0, 400), st.one_of(st.floats(35, 400), st.none())),
        min_size=1, max_size=5,
    ),
)
def test_any_schedule_of_deaths_keeps_every_invariant(
    cluster: Cluster, faults: Faults, requests: list[Asked], orders: list[tuple[str, float]],
    deaths: list[tuple[int, float, float | None]],
) -> None:
    fake = build(cluster, Faults(**vars(faults)), requests, orders)
    last_ms = 0.0
    for number, at_ms, back_after_ms in deaths:
        worker = number % cluster.num_workers
        fake.kill_at(worker, at_ms)
        last_ms = max(last_ms, at_ms + (back_after_ms or 0.0))
        if back_after_ms is not None:
            fake.restart_at(worker, at_ms + back_after_ms)
    for worker in range(cluster.num_workers):  # in the end everybody is back: requests as large as all of them wait
        fake.restart_at(worker, last_ms + 500 + worker)
    fake.run()
    fake.expect_outputs()
    fake.expect_nothing_left()
    assert all(w.alive for w in fake.core.state.workers.values())
    assert len(fake.core.groups) == len({w for g in fake.core.groups.values() for w in g.worker_ids}) or any(
        len(g.stages) > 1 for g in fake.core.groups.values()
    )


MERGE_PHASES = [MergePhase.QUIESCE, MergePhase.REMAP, MergePhase.EXCHANGE, MergePhase.REVERTING, MergePhase.REFILLING]
RESTORE_PHASES = [
    RestorePhase.DRAIN_1, RestorePhase.MAP, RestorePhase.PULL, RestorePhase.FIT, RestorePhase.DRAIN_2,
    RestorePhase.SPREAD, RestorePhase.RETURN, RestorePhase.TURNING, RestorePhase.REDROP,
]


def reach(cluster: FakeCluster, phase: MergePhase | RestorePhase) -> None:
    """Bring a cluster of running requests into a phase of a move."""
    core = cluster.core

    def is_reached() -> bool:
        return any(move.phase is phase for move in (*core.merges, *core.restores))

    def run_to(reached: Callable[[], bool]) -> None:
        cluster.run(stop=reached)
        assert reached(), f"{phase} was not reached"

    if phase in (MergePhase.REVERTING, MergePhase.REFILLING):
        cluster.workers[1].fail_applies = 1
    cluster.order("drop")
    if isinstance(phase, RestorePhase):
        cluster.run(stop=lambda: not core.in_transition)
        if phase is RestorePhase.FIT:
            # Requests that wait keep a restore in FIT until they are through.
            fill(cluster, 20, tag="late")
            cluster.run(until_ms=cluster.now / MS + 1)
        cluster.order("restore")
        if phase in (RestorePhase.TURNING, RestorePhase.REDROP):
            run_to(lambda: any(r.phase is RestorePhase.PULL for r in core.restores))
            cluster.order("drop")
    if not is_reached():
        run_to(is_reached)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("phase", [*MERGE_PHASES, *RESTORE_PHASES], ids=str)
def test_a_death_in_every_phase_of_every_move(phase: MergePhase | RestorePhase, seed: int, victim: int) -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=90, auto_restore=False, seed=seed, max_seqs=8)
    fill(cluster, 8)
    cluster.run(until_ms=40)
    reach(cluster, phase)
    cluster.kill(victim)
    cluster.run(stop=lambda: "worker_lost" in kinds(cluster))
    fill(cluster, 4, tag="after")
    cluster.restart_at(victim, cluster.now / MS + 60)
    cluster.run()
    assert "worker_joined" in kinds(cluster)
    expect_all_well(cluster)
    assert all(len(g.stages) == 1 for g in cluster.core.groups.values())


@pytest.mark.parametrize("phase", list(RecoveryPhase)[:3], ids=str)
@pytest.mark.parametrize("second", [0, 1])
def test_a_second_death_in_every_phase_of_a_recovery(phase: RecoveryPhase, second: int) -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=60, auto_restore=False, seed=3)
    fill(cluster, 10)
    cluster.run(until_ms=40)
    cluster.order("drop")
    cluster.run(stop=lambda: not cluster.core.in_transition)
    pipeline = next(g for g in cluster.core.groups.values() if len(g.stages) == 2)
    dead, survivor = pipeline.worker_ids
    (other,) = {0, 1, 2} - {dead, survivor}
    cluster.kill(dead)

    def recovers() -> bool:
        recovery = cluster.core.recoveries.by_worker.get(survivor)
        return recovery is not None and recovery.phase is phase

    cluster.run(stop=recovers)
    assert recovers()
    cluster.kill((survivor, other)[second])
    for worker in range(3):
        cluster.restart_at(worker, cluster.now / MS + 100)
    cluster.run()
    expect_all_well(cluster)


# --- requests


def test_requests_go_on_in_a_live_group_at_once_and_in_order() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=200, auto_restore=False)
    fill(cluster, 12)
    cluster.run(until_ms=40)
    before = {r: len(out) for r, out in cluster.outputs.items()}
    assert any(before.values())
    cluster.kill(0)
    cluster.run(stop=lambda: "worker_lost" in kinds(cluster))
    (group,) = cluster.core.groups.values()
    states = [*group.queues.running.values(), *group.queues.waiting]
    assert len(states) == 12 and not cluster.core.state.unplaced
    assert [s.order for s in group.queues.waiting] == sorted(s.order for s in group.queues.waiting)
    assert all(len(cluster.outputs[r]) >= num for r, num in before.items())
    cluster.run()
    expect_all_well(cluster)


def test_without_any_worker_requests_wait_and_new_ones_are_taken() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=60)
    fill(cluster, 6)
    cluster.run(until_ms=30)
    cluster.kill(0)
    cluster.kill(1)
    cluster.run(stop=lambda: kinds(cluster).count("worker_lost") == 2)
    fill(cluster, 2, tag="new")
    cluster.cancel("r5", cluster.now / MS + 1)
    cluster.run(until_ms=cluster.now / MS + 5)
    assert len(cluster.core.state.unplaced) == 7 and cluster.core.num_waiting == 7
    cluster.restart_at(1, cluster.now / MS + 300)
    cluster.run()
    expect_all_well(cluster)
    assert cluster.ends["r5"] == ["cancelled"]
    assert sum(e == ["length"] for e in cluster.ends.values()) == 7


def test_an_outage_that_lasts_too_long_ends_requests_with_an_error() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=60)
    fill(cluster, 3)
    cluster.run(until_ms=20)
    cluster.kill(0)
    cluster.at(70_000 * MS, lambda: None)  # something to wait for
    cluster.run(until_ms=59_000)
    assert not cluster.ends
    cluster.run(until_ms=61_000)
    assert all(ends == ["error"] for ends in cluster.ends.values()) and len(cluster.ends) == 3
    cluster.core.check()


def test_an_outage_is_as_long_as_each_request_has_waited_through_it() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=60)
    fill(cluster, 3)
    cluster.run(until_ms=20)
    cluster.kill(0)
    cluster.submit("late", tokens(random.Random(0), 10), 5, 59_000)
    cluster.submit("later", tokens(random.Random(1), 10), 5, 100_000)
    cluster.at(200_000 * MS, lambda: None)  # something to wait for
    cluster.run(until_ms=61_000)
    assert sorted(cluster.ends) == ["r0", "r1", "r2"], "it has waited for two seconds"
    cluster.run(until_ms=118_900)
    assert "late" not in cluster.ends
    cluster.run(until_ms=119_200)
    assert cluster.ends["late"] == ["error"]
    cluster.restart_at(0, 150_000)
    cluster.run(until_ms=155_000)
    assert cluster.ends["later"] == ["length"]
    cluster.core.check()


def test_a_worker_that_is_gone_for_good_takes_what_only_fitted_with_it() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=20, auto_restore=False)
    most = cluster.core.max_request_blocks()
    cluster.submit("large", tokens(random.Random(0), 70), 60, 0.0)
    cluster.submit("small", tokens(random.Random(1), 10), 20, 0.0)
    cluster.run(until_ms=10)
    cluster.kill(0)
    cluster.run(stop=lambda: "worker_lost" in kinds(cluster))
    assert cluster.core.max_request_blocks() == most, "it may come back"
    cluster.at(cluster.now + 5 * MS, ports.WorkerGone(0))
    cluster.run()
    assert cluster.ends == {"large": ["error"], "small": ["length"]}
    assert cluster.core.max_request_blocks() < most
    cluster.expect_nothing_left()


def test_what_arrives_too_large_for_what_is_left_is_told_at_once() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=20, auto_restore=False)
    cluster.kill(0)
    cluster.run(stop=lambda: "worker_lost" in kinds(cluster))
    cluster.submit("hopeful", tokens(random.Random(0), 70), 60, cluster.now / MS + 1)
    cluster.run(until_ms=cluster.now / MS + 2)
    assert "hopeful" in cluster.core.state.requests, "the worker may come back"
    cluster.at(cluster.now + 5 * MS, ports.WorkerGone(0))
    cluster.submit("late", tokens(random.Random(0), 70), 60, cluster.now / MS + 10)
    cluster.submit("small", tokens(random.Random(1), 10), 20, cluster.now / MS + 11)
    cluster.run()
    assert cluster.ends == {"hopeful": ["error"], "late": ["error"], "small": ["length"]}
    for name in ("hopeful", "late"):
        assert "length is 80 tokens" in cluster.errors[name] and "requested 130" in cluster.errors[name]
    cluster.expect_nothing_left()


def test_a_pipeline_that_cannot_be_formed_again_holds_nothing() -> None:
    cluster = FakeCluster(num_workers=4, full_blocks=20, policy="pipeline")
    most = cluster.core.max_request_blocks()
    fill(cluster, 8)
    cluster.run(until_ms=10)
    cluster.kill(0)
    cluster.run(stop=lambda: "worker_lost" in kinds(cluster))
    cluster.at(cluster.now + MS, ports.WorkerGone(0))
    cluster.run(until_ms=cluster.now / MS + 5)
    assert cluster.core.max_request_blocks() == most, "the other pair is whole"
    cluster.kill(3)
    cluster.run(stop=lambda: kinds(cluster).count("worker_lost") == 2)
    assert cluster.core.max_request_blocks() == most, "it may come back"
    cluster.at(cluster.now + MS, ports.WorkerGone(3))
    fill(cluster, 1, tag="late")
    cluster.run(until_ms=cluster.now / MS + 5)
    assert cluster.core.max_request_blocks() == 0
    assert cluster.core.state.is_idle() and all(len(e) == 1 for e in cluster.ends.values())
    assert "error" in cluster.ends["late0"]


def test_a_worker_that_is_gone_for_good_cuts_lengths_that_nobody_asked_for() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=20, auto_restore=False)
    most = cluster.core.max_request_blocks() * BLOCK_SIZE

    def submit(name: str, num_prompt: int, at_ms: float, **params: object) -> None:
        prompt = tokens(random.Random(num_prompt), num_prompt)
        cluster.submit(name, prompt, most - num_prompt, at_ms, has_default_length=True, ignore_eos=True, **params)

    submit("chat", 10, 0.0)
    submit("holds_more", 85, 0.0)
    submit("wants_more", 11, 0.0, min_tokens=80)
    cluster.run(until_ms=10)
    cluster.kill(0)
    cluster.run(stop=lambda: "worker_lost" in kinds(cluster))
    cluster.at(cluster.now + 5 * MS, ports.WorkerGone(0))
    submit("later", 12, cluster.now / MS + 10)
    cluster.run()
    left = cluster.core.max_request_blocks() * BLOCK_SIZE
    assert left < most
    assert cluster.ends == {"chat": ["length"], "holds_more": ["error"], "wants_more": ["error"], "later": ["length"]}
    assert (len(cluster.outputs["chat"]), len(cluster.outputs["later"])) == (left - 10, left - 12)
    cluster.expect_nothing_left()


def test_a_request_that_kills_workers_does_not_kill_for_ever() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=60, auto_restore=False)
    cluster.submit("poison", tokens(random.Random(0), 10), 500, 0.0)
    deaths = 0
    while "poison" not in cluster.ends:
        state = cluster.core.state.requests.get("poison")
        cluster.run(until_ms=cluster.now / MS + 30)
        state = cluster.core.state.requests["poison"]
        (worker,) = cluster.core.groups[state.group_id].worker_ids
        cluster.kill(worker)
        deaths += 1
        lost = kinds(cluster).count("worker_lost")
        cluster.run(stop=lambda lost=lost: kinds(cluster).count("worker_lost") > lost)
        cluster.restart_at(worker, cluster.now / MS + 1)
        assert deaths <= 3
    assert deaths == 3 and cluster.ends["poison"] == ["error"]
    fill(cluster, 4, output=10)
    cluster.run()
    expect_all_well(cluster)


def test_a_step_that_lost_its_input_ends_no_request() -> None:
    """Survivors notice a dead link before the controller hears of the death."""
    cluster = FakeCluster(num_workers=2, full_blocks=60, auto_restore=False)
    fill(cluster, 6)
    group = drop_all(cluster)
    cluster.run(stop=lambda: bool(group.in_flight))
    cluster.core.handle(ports.StepFailed(next(iter(group.in_flight)), "gone", group.worker_ids[0]), cluster.now)
    assert group.paused and not cluster.ends
    expect_a_return(cluster, group.worker_ids[0])


def test_a_chunk_after_one_that_never_came_counts_for_nothing() -> None:
    """The link is there again for the second chunk of a prompt: it runs on KV that the first one did not write."""
    cluster = FakeCluster(num_workers=2, full_blocks=60, auto_restore=False)
    fill(cluster, 2)
    group = drop_all(cluster)
    cluster.submit("long", tokens(random.Random(1), 60), 10, cluster.now / MS + 1)

    def chunks() -> list[int]:
        return [i for i, f in group.in_flight.items() if any(r.state.request_id == "long" for r in f.step.rows)]

    cluster.run(stop=lambda: len(chunks()) == 2)
    first, second = chunks()
    cluster.core.handle(ports.StepFailed(first, "gone", group.worker_ids[0]), cluster.now)
    cluster.run(stop=lambda: second not in group.in_flight)
    state = cluster.core.state.requests["long"]
    assert state.num_output == state.num_computed == state.num_pending == 0
    expect_a_return(cluster, group.worker_ids[0])


# --- memory


def test_blocks_that_a_dead_peer_may_still_write_are_not_given_away_before_the_fence() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=60, auto_restore=False)
    fill(cluster, 8)
    cluster.run(until_ms=40)
    cluster.order("drop")
    cluster.run(stop=lambda: bool(cluster.core.state.book.transfers))
    move = next(iter(cluster.core.state.book.transfers.values())).transfer
    cluster.kill(move.src)
    cluster.run(stop=lambda: "worker_lost" in kinds(cluster))
    survivor = cluster.core.state.workers[move.dst]
    assert survivor.ghosts and survivor.ledger.num_held > 0
    assert all("\0" in r for r in survivor.ledger.requests())
    cluster.run(stop=lambda: not survivor.ghosts)
    assert move.src in cluster.workers[move.dst].fenced_lives
    cluster.run()
    expect_all_well(cluster)


def test_missing_shards_come_from_any_live_worker_else_from_the_folder() -> None:
    for num_workers in (2, 3):
        cluster = FakeCluster(num_workers=num_workers, full_blocks=60, auto_restore=False)
        fill(cluster, 6)
        cluster.run(until_ms=40)
        cluster.order("drop")
        cluster.run(stop=lambda cluster=cluster: not cluster.core.in_transition)
        pipeline = next(g for g in cluster.core.groups.values() if len(g.stages) == 2)
        cluster.workers[pipeline.worker_ids[1]].spoilt = lambda: True
        asked: list[object] = []
        carry_out = cluster._carry_out
        cluster._carry_out = lambda a, asked=asked, carry=carry_out: (asked.append(a), carry(a))  # type: ignore
        cluster.kill(pipeline.worker_ids[0])
        cluster.run()
        pulled = [a for a in asked if isinstance(a, ports.SendShard)]
        loaded = [a for a in asked if isinstance(a, ports.LoadShard)]
        (others,) = [set(range(num_workers)) - set(pipeline.worker_ids)]
        assert {a.src for a in pulled} == others
        assert bool(pulled) != bool(loaded)
        expect_all_well(cluster)


def half_dead(num_workers: int) -> tuple[FakeCluster, int, list[int]]:
    """A pipeline of two has just lost a member: the cluster, the other member, and who serves alone."""
    cluster = FakeCluster(num_workers=num_workers, full_blocks=60, auto_restore=False)
    fill(cluster, 6)
    cluster.run(until_ms=40)
    cluster.order("drop")
    cluster.run(stop=lambda: not cluster.core.in_transition)
    (pipeline,) = (g for g in cluster.core.groups.values() if len(g.stages) == 2)
    dead, survivor = pipeline.worker_ids
    cluster.workers[survivor].spoilt = lambda: True
    cluster.fetched.clear()
    cluster.kill(dead)
    return cluster, survivor, sorted(set(range(num_workers)) - {dead, survivor})


def expect_recovered(cluster: FakeCluster, survivor: int) -> None:
    """Every shard is there; then the cluster serves what is left."""
    cluster.run(stop=lambda: "recovered" in kinds(cluster))
    assert survivor not in cluster.core.recoveries.by_worker
    assert cluster.workers[survivor].filled == set(cluster.shape.all_shards)
    cluster.run()
    expect_all_well(cluster)


def asked_for(cluster: FakeCluster, survivor: int) -> dict[str, list[int | None]]:
    """Shard -> whom the survivor asked, in order; None: the folder."""
    return {shard: sources for (worker, shard), sources in asked_by_shard(cluster).items() if worker == survivor}


def sends(cluster: FakeCluster, source: int) -> bool:
    """Whether somebody was asked for a shard."""
    return any(isinstance(a, ports.SendShard) and a.src == source for a in cluster.fetched)


def test_the_nearest_holder_is_asked_for_a_shard_then_the_others_and_the_folder_last() -> None:
    cluster, survivor, (far, near) = half_dead(4)
    machine_of = dict.fromkeys(cluster.workers, 0) | {survivor: 1, near: 1}
    cluster.core.reconfigure(replace(cluster.core.params, machine_of=machine_of))
    missing = cluster.shape.all_shards - cluster.workers[survivor].filled
    nowhere = min(missing)
    cluster.fails_shard = lambda move: move.src == near or move.shard == nowhere
    expect_recovered(cluster, survivor)
    asked = asked_for(cluster, survivor)
    assert asked.keys() == missing and len(asked) > 1
    assert asked.pop(nowhere) == [near, far, None]
    assert all(sources == [near, far] for sources in asked.values())


def test_what_not_even_the_folder_gives_is_asked_for_again_from_the_beginning() -> None:
    cluster, survivor, (holder,) = half_dead(3)
    cluster.fails_shard = lambda _: True
    cluster.faults = Faults(load=1.0, budget=3)
    most_loads = 0

    def look() -> bool:
        nonlocal most_loads
        recovery = cluster.core.recoveries.by_worker.get(survivor)
        most_loads = max(most_loads, len(recovery._fetching.loads) if recovery is not None else 0)
        return "recovered" in kinds(cluster)

    cluster.run(stop=look)
    expect_recovered(cluster, survivor)
    asked = asked_for(cluster, survivor)
    assert cluster.num_faults == 3 and sum(sources.count(None) - 1 for sources in asked.values()) == 3
    for sources in asked.values():
        assert sources[-1] is None and set(sources) == {holder, None}
        assert (None, None) not in pairwise(sources), "the folder was asked twice in a row"
    assert most_loads == 1, "one load after the other"


def test_without_any_holder_the_folder_is_asked_until_it_answers() -> None:
    cluster, survivor, _ = half_dead(2)
    cluster.faults = Faults(load=1.0, budget=5)
    expect_recovered(cluster, survivor)
    assert cluster.num_faults == 5
    assert {source for sources in asked_for(cluster, survivor).values() for source in sources} == {None}


def test_a_holder_may_die_while_it_sends() -> None:
    cluster, survivor, (one, other) = half_dead(4)
    cluster.run(stop=lambda: sends(cluster, one))
    cluster.kill(one)
    expect_recovered(cluster, survivor)
    asked = asked_for(cluster, survivor)
    assert any(sources == [one, other] for sources in asked.values())
    assert all(None not in sources for sources in asked.values())


def test_a_link_that_fails_between_two_that_live_ends_transfers_when_both_have_told_of_it() -> None:
    """Neither may have heard of what was on the way."""
    cluster, survivor, (holder,) = half_dead(3)
    (dead,) = set(cluster.workers) - {survivor, holder}
    cluster.run(stop=lambda: sends(cluster, holder))
    book, recoveries = cluster.core.state.book, cluster.core.recoveries
    under_way = {i for i, pending in book.transfers.items() if pending.ends == (holder, survivor)}
    assert under_way
    for event in (ports.LinkLost(survivor, dead, 0), *2 * [ports.LinkLost(survivor, holder, 0)]):
        cluster._process(event)
        assert under_way <= set(book.transfers), "what the other end has not told of may still arrive"
    for transfer_id in under_way:
        del cluster.under_way[transfer_id]
    cluster._process(ports.LinkLost(holder, survivor, 0))
    assert not under_way & set(book.transfers) and not recoveries._parted
    expect_recovered(cluster, survivor)
    cluster.restart_at(dead, cluster.now / 1e6 + 1)
    cluster.run()
    life = cluster.core.state.workers[dead].life
    cluster._process(ports.LinkLost(survivor, dead, life - 1))
    assert not recoveries._parted, "a link to a life that is over says nothing of the next one's"
    cluster._process(ports.LinkLost(survivor, dead, life))
    assert recoveries._parted
    cluster.kill(dead)
    cluster.run()
    assert not recoveries._parted
    expect_all_well(cluster)


def test_a_holder_may_drop_what_it_sends() -> None:
    """A burst there is served first: nobody who sends a shard is kept from a move of its own."""
    cluster, survivor, helpers = half_dead(4)
    cluster.run(stop=lambda: all(sends(cluster, h) for h in helpers))
    assert cluster.core.moves.moving_workers() == {survivor}
    groups = [g for g in cluster.core.groups.values() if set(g.worker_ids) <= set(helpers)]
    stages = (StagePlan(helpers[1], LayerRange(0, 2)), StagePlan(helpers[0], LayerRange(2, 4)))
    cluster.carry_out(cluster.core.moves.merge(groups, stages, cluster.now))
    expect_recovered(cluster, survivor)
    assert any(len(sources) > 1 for sources in asked_for(cluster, survivor).values()), "nobody else was asked"
    assert cluster.core.state.counters.num_drops == 2


def test_survivors_have_shards_for_each_other() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=60, num_layers=6, auto_restore=False)
    fill(cluster, 6)
    cluster.run(until_ms=40)
    for _ in range(2):
        cluster.order("drop")
        cluster.run(stop=lambda: not cluster.core.in_transition)
    (group,) = cluster.core.groups.values()
    dead, *survivors = group.worker_ids
    for worker in survivors:
        cluster.workers[worker].spoilt = lambda: True
    cluster.fetched.clear()
    cluster.kill(dead)
    cluster.run(stop=lambda: kinds(cluster).count("recovered") == 2)
    assert any(sends(cluster, worker) for worker in survivors)
    cluster.run()
    expect_all_well(cluster)


def test_members_of_a_split_pipeline_serve_on_while_the_rest_recovers() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=90, auto_restore=False, seed=5)
    fill(cluster, 8)
    cluster.run(until_ms=40)
    reach(cluster, RestorePhase.RETURN)
    homes = {g.worker_ids[0]: g for g in cluster.core.restores[0].homes}
    cluster.run(stop=lambda: any(g.queues.running for g in homes.values()))
    (survivor,) = [w for w, g in homes.items() if g.queues.running][:1]
    computed = {s.request_id: s.num_preemptions for s in homes[survivor].queues.running.values()}
    cluster.kill(1 - survivor)
    cluster.run(stop=lambda: "worker_lost" in kinds(cluster))
    assert homes[survivor].group_id in cluster.core.groups
    for request_id, num in computed.items():
        if request_id in cluster.core.state.requests:
            assert cluster.core.state.requests[request_id].num_preemptions == num, "its KV was at home"
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("empty", [(1,), (0, 2)])
def test_workers_that_have_loaded_nothing_are_filled_by_those_that_have_and_serve(empty: tuple[int, ...]) -> None:
    cluster = FakeCluster(num_workers=3, auto_restore=False)
    for worker_id in empty:
        cluster.workers[worker_id].filled = set()
    cluster.at(0, ports.WorkersEmpty(empty))
    fill(cluster, 9)
    cluster.run()
    expect_all_well(cluster)
    assert {w for g in cluster.core.groups.values() for w in g.worker_ids} == {0, 1, 2}
    sends = [move for move in cluster.fetched if isinstance(move, ports.SendShard)]
    assert sends == cluster.fetched and {move.src for move in sends}.isdisjoint(empty)
    assert all(cluster.workers[w].filled == cluster.shape.all_shards for w in empty)


def test_blocks_of_old_steps_are_not_given_away_before_the_fence() -> None:
    """A step of the dead pipeline may still run at the survivor: ready steps overtake those that wait for input."""
    cluster = FakeCluster(num_workers=2, full_blocks=60, auto_restore=False)
    fill(cluster, 6)
    cluster.run(until_ms=40)
    cluster.order("drop")
    cluster.run(stop=lambda: not cluster.core.in_transition)
    (group,) = cluster.core.groups.values()
    dead, survivor = group.worker_ids
    cluster.run(stop=lambda: bool(group.in_flight))
    held = cluster.core.state.workers[survivor].ledger.num_held
    cluster.kill(dead)
    cluster.run(stop=lambda: "worker_lost" in kinds(cluster))
    ghosts = cluster.core.state.workers[survivor].ghosts
    assert ghosts and not any(ghosts.values()), "no transfer is under way: only the fence holds them"
    cluster.core.handle(ports.Tick(), cluster.now)
    assert cluster.core.state.workers[survivor].ledger.num_held >= held
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("num_poisons", "after"), [(1, 1), (2, 1), (1, 7), (1, 30)])
@pytest.mark.parametrize("seed", range(2))
def test_a_request_that_kills_workers_ends_and_its_neighbours_do_not(
    seed: int, num_poisons: int, after: int, merged: bool
) -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=90, auto_restore=False, seed=seed, max_seqs=8)
    fill(cluster, 12, output=40)
    cluster.run(until_ms=30)
    if merged:
        cluster.order("drop")
        cluster.run(stop=lambda: not cluster.core.in_transition)
    for i in range(num_poisons):
        cluster.submit(f"poison{i}", tokens(random.Random(i), 10 + i), 400, cluster.now / MS + 1 + i)
        cluster.poison[f"poison{i}"] = after
    fill(cluster, 6, tag="late", output=30)
    cluster.run()
    # Trials of 4, 16 and 64 tokens, two deaths before each.
    assert cluster.num_deaths <= num_poisons * (2 * (1 + (after > 4) + (after > 16)) + 1)
    for i in range(num_poisons):
        assert cluster.ends.pop(f"poison{i}") == ["error"]
        del cluster.requests[f"poison{i}"]
    assert all(ends == ["length"] or ends == ["stop"] for ends in cluster.ends.values())
    expect_all_well(cluster)
    assert not any(g.queues.suspects for g in cluster.core.groups.values())


def test_three_deaths_in_a_long_life_are_no_pattern() -> None:
    """Who got its tokens alone between them is acquitted."""
    cluster = FakeCluster(num_workers=2, full_blocks=400, auto_restore=False, max_seqs=8)
    fill(cluster, 4, output=300)
    for i in range(5):
        cluster.kill_at(i % 2, 60 + 240 * i)
        cluster.restart_at(i % 2, 60 + 240 * i + 100)
    cluster.run()
    assert {end for ends in cluster.ends.values() for end in ends} <= {"length", "stop"}
    expect_all_well(cluster)


def test_a_sleeper_whose_pool_a_request_left_gets_no_layers_back_by_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request comes back from its pool to another worker, which dies meanwhile."""
    cluster = FakeCluster(num_workers=3, full_blocks=60, policy="swap", host_slots=500, swap_budget=1)
    fill(cluster, 6, prompt=30, output=120)
    cluster.run(until_ms=60)
    workers = cluster.core.state.workers
    (group,) = (g for g in cluster.core.groups.values() if g.worker_ids == (0,))
    monkeypatch.setattr(SwapRung, "_returning", lambda self, group: ())

    def settled() -> list[RequestState]:
        running = group.queues.running.values()
        return [s for s in running if s.is_settled and not s.num_pending and s.num_computed]

    cluster.run(stop=lambda: bool(settled()))
    state = settled()[0]
    cluster.core.hosted.swap.send_out(state)
    cluster.run(stop=lambda: state.phase is Phase.STORED)
    cluster.carry_out(cluster.core.request_sleep([0], 2, cluster.now))
    cluster.run(stop=lambda: workers[0].is_asleep and cluster.core.sleepers.is_idle)
    monkeypatch.undo()
    cluster.run(stop=lambda: any(p.ends[0] == 0 != p.ends[1] for p in cluster.core.state.book.transfers.values()))
    dead = next(p.ends[1] for p in cluster.core.state.book.transfers.values() if p.ends[0] == 0 != p.ends[1])
    cluster.kill(dead)
    cluster.restart_at(dead, cluster.now / MS + 300)
    cluster.run()
    assert workers[0].is_asleep and not workers[0].layout.shards, "it sleeps on, and holds nothing"
    cluster.expect_outputs()
    cluster.core.check()
