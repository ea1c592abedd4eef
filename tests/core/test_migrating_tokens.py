"""Requests that migrate as tokens: the destination computes them while the source goes on; with pretend KV that every
step checks, and the core's books looked at after every event.

``JETTISON_EXAMPLES=3000`` looks further than the default.
"""

from __future__ import annotations

import os
import random

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster, Faults, tokens
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jettison.core import ports
from jettison.core.advice import Going
from jettison.core.moving.astokens import MAX_FINAL_TOKENS, TokenRelocation
from jettison.core.moving.passage import Passage, RelocationPhase
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.group import Group
from jettison.memory.kvtransfers import MigrationKind
from jettison.types import ServiceClass

N_EXAMPLES = int(os.environ.get("JETTISON_EXAMPLES", "12"))


def begin(
    *, prompt: int = 100, output: int = 120, step_tokens: int | None = 8, others: int = 2, warm_ms: float = 60.0,
    full_blocks: int = 120, seed: int = 0, **flags: object,
) -> tuple[FakeCluster, TokenRelocation]:
    """A request that decodes at instance 0 goes to instance 1; both serve others."""
    cluster = FakeCluster(policy="recompute", full_blocks=full_blocks, max_tokens=64, seed=seed, **flags)  # type: ignore[arg-type]
    cluster.submit("traveller", tokens(1, prompt), output, ignore_eos=True)
    for i in range(2 * others):
        cluster.submit(f"r{i}", tokens(i + 2, 10), 60, 1.0 + i)
    cluster.run(until_ms=warm_ms)
    state = cluster.core.state.requests["traveller"]
    source, destination = cluster.core.groups[state.group_id], cluster.core.groups[1 - state.group_id]
    return cluster, start(cluster, state, source, destination, step_tokens)


def start(
    cluster: FakeCluster, state: RequestState, source: Group, destination: Group, step_tokens: int | None = 8,
    kind: MigrationKind = MigrationKind.TOKENS,
) -> TokenRelocation:
    migrations = cluster.core.migrations
    actions = migrations.start(
        state, source, destination, cluster.now, going=Going(kind, step_tokens)
    )
    cluster.carry_out(actions + cluster.core.stepping.plan(cluster.now))
    migration = migrations.under_way[-1]
    return migration  # type: ignore[return-value]


def strangers(*, to_pipeline: bool, prompt: int = 90, seed: int = 0) -> tuple[FakeCluster, TokenRelocation]:
    """A request goes from an instance to a pipeline of two, or back."""
    cluster = FakeCluster(policy="recompute", num_workers=3, full_blocks=120, max_tokens=64, shard_bytes=256, seed=seed)
    cluster.order("drop")
    cluster.run(until_ms=20)
    for i in range(6):
        cluster.submit(f"r{i}", tokens(i, prompt), 80, 21 + i, ignore_eos=True)
    cluster.run(until_ms=60)
    alone = next(g for g in cluster.core.groups.values() if len(g.stages) == 1)
    pipeline = next(g for g in cluster.core.groups.values() if len(g.stages) == 2)
    source, destination = (alone, pipeline) if to_pipeline else (pipeline, alone)
    state = next(s for s in source.queues.running.values() if s.num_output)
    return cluster, start(cluster, state, source, destination)


def holders(cluster: FakeCluster, request_id: str) -> set[int]:
    return {w.worker_id for w in cluster.core.state.workers.values() if w.ledger.has(request_id)}


def expect_one_owner(cluster: FakeCluster, migration: Passage) -> None:
    state = migration.state
    if state.is_finished:
        return
    owner = migration.destination if migration.phase is RelocationPhase.DONE else migration.source
    assert state.group_id == owner.group_id and state.request_id in owner.queues.running
    queues = [g for g in cluster.core.groups.values() if state in g.queues.all_requests()]
    assert queues == [owner], "it is seen once"
    if migration.is_over:
        assert holders(cluster, state.request_id) == set(owner.worker_ids)
    else:
        assert holders(cluster, state.request_id) == {*owner.worker_ids, *migration.destination.worker_ids}


def expect_all_well(cluster: FakeCluster) -> None:
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert not any(group.guests for group in cluster.core.groups.values())


@pytest.mark.parametrize("shape", ["singles", "to_pipeline", "to_instance"])
def test_the_destination_computes_it_while_it_decodes_and_stops_it_for_a_few_tokens(shape: str) -> None:
    cluster, migration = begin() if shape == "singles" else strangers(to_pipeline=shape == "to_pipeline")
    state, destination = migration.state, migration.destination
    before, widest, missing = state.num_tokens, 0, []

    def watch() -> bool:
        nonlocal widest
        expect_one_owner(cluster, migration)
        for flight in destination.in_flight.values():
            assert not any(row.samples for row in flight.step.rows[: len(flight.guests)])
            widest = max(widest, *(row.num_tokens for row in flight.step.rows[: len(flight.guests)]), 0)
        missing.append(state.num_tokens - state.num_computed)
        return migration.is_over

    cluster.run(stop=watch)
    assert migration.phase is RelocationPhase.DONE and migration.num_rounds >= 1
    assert state.num_tokens > before + 4, "it went on decoding"
    assert widest == 8, "the caller's bound"
    assert 1 <= missing[-1] <= MAX_FINAL_TOKENS
    assert not cluster.sent, "no KV has travelled"
    assert state.num_preemptions == 0
    counters = cluster.core.state.counters
    assert (counters.num_migrations, counters.num_token_migrations) == (1, 1)
    assert counters.migrated_tokens == migration.num_tokens > before - MAX_FINAL_TOKENS
    (record,) = [r for r in cluster.records if r.kind == "migrated"]
    assert (record.fields["went_as"], record.fields["tokens"]) == ("tokens", migration.num_tokens)
    expect_all_well(cluster)


def test_its_work_is_nobodys_twice() -> None:
    cluster, migration = begin(others=0)
    fresh = [g.counters.fresh for g in (migration.source, migration.destination)]
    cluster.run()
    assert migration.phase is RelocationPhase.DONE
    assert sum(f.online_prompt for f in fresh) == 100 and sum(f.online_output for f in fresh) == 120
    expect_all_well(cluster)


def test_an_idle_destination_takes_steps_of_it_alone() -> None:
    cluster, migration = begin(others=0, step_tokens=None)
    assert not migration.destination.queues.running
    (flight,) = migration.destination.in_flight.values()
    assert [row.num_tokens for row in flight.step.rows] == [64], "as much as a step holds"
    cluster.run(stop=lambda: migration.is_over)
    assert migration.phase is RelocationPhase.DONE
    expect_all_well(cluster)


@pytest.mark.parametrize("kind", list(MigrationKind))
def test_a_shared_prefix_goes_once_and_is_found_at_the_destination(kind: MigrationKind) -> None:
    cluster = FakeCluster(policy="recompute", full_blocks=160, max_tokens=64)
    shared = tokens(5, 80)
    for name, salt in (("a", 1), ("b", 2)):
        cluster.submit(name, shared + tokens(salt, 20), 150, ignore_eos=True)
        cluster.submit(f"{name}-other", tokens(salt + 10, 10), 20, 0.5)
    cluster.run(until_ms=60)
    requests = cluster.core.state.requests
    source = cluster.core.groups[requests["a"].group_id]
    destination = cluster.core.groups[1 - source.group_id]
    if requests["b"].group_id != source.group_id:  # both are to come from one group
        back = start(cluster, requests["b"], destination, source)
        cluster.run(stop=lambda: back.is_over)
        destination.blocks.ledgers[0].forget_cached()
    first = start(cluster, requests["a"], source, destination, kind=kind)
    assert first.num_cached_blocks == 0
    cluster.run(stop=lambda: first.is_over)
    assert first.phase is RelocationPhase.DONE
    (ledger,) = destination.blocks.ledgers
    assert len(ledger.lookup(requests["a"].hashes)) >= 80 // BLOCK_SIZE, "found at once"
    second = start(cluster, requests["b"], source, destination, kind=kind)
    assert second.num_cached_blocks == 80 // BLOCK_SIZE
    cluster.run(stop=lambda: second.is_over)
    assert second.phase is RelocationPhase.DONE
    tables = [ledger.table(name).ids for name in ("a", "b")]
    assert tables[0][: 80 // BLOCK_SIZE] == tables[1][: 80 // BLOCK_SIZE], "one copy"
    if kind is MigrationKind.KV:
        assert second.num_bytes < 0.6 * first.num_bytes
    else:
        assert second.num_tokens < first.num_tokens - 40
    assert cluster.core.state.counters.migration_cached_blocks >= 80 // BLOCK_SIZE
    expect_all_well(cluster)


@pytest.mark.parametrize("phase", [RelocationPhase.COPY, RelocationPhase.FINAL])
@pytest.mark.parametrize("shape", ["singles", "to_pipeline", "to_instance"])
def test_called_off_it_has_never_left_its_source(phase: RelocationPhase, shape: str) -> None:
    cluster, migration = begin() if shape == "singles" else strangers(to_pipeline=shape == "to_pipeline")
    cluster.run(stop=lambda: migration.phase is phase)
    cluster.carry_out(migration.cancel())
    assert migration.phase is RelocationPhase.FAILED and not migration.state.paused, "it runs on at once"
    assert migration.cancel() == []
    expect_one_owner(cluster, migration)
    assert migration.state.num_preemptions == 0
    expect_all_well(cluster)


def test_what_a_step_still_writes_to_is_nobody_elses_until_it_has_ended() -> None:
    cluster, migration = begin(others=0)
    (worker_id,) = migration.destination.worker_ids
    worker = cluster.core.state.workers[worker_id]
    assert migration.destination.in_flight
    cluster.carry_out(migration.cancel())
    assert worker.ghosts and worker.ledger.num_held, "written to"
    cluster.run(stop=lambda: not migration.destination.in_flight)
    assert not worker.ghosts and not worker.ledger.num_held
    expect_all_well(cluster)


@pytest.mark.parametrize("after_ms", [0.0, 0.6, 2.0, 9.0, 15.0])
@pytest.mark.parametrize("phase", [RelocationPhase.COPY, RelocationPhase.FINAL])
def test_its_client_leaves_on_the_way(phase: RelocationPhase, after_ms: float) -> None:
    cluster, migration = begin()
    cluster.run(stop=lambda: migration.phase is phase)
    cluster.cancel("traveller", cluster.now / MS + after_ms)
    cluster.run()
    assert cluster.ends["traveller"] == ["cancelled"] and migration.is_over
    expect_all_well(cluster)


@pytest.mark.parametrize("output", range(17, 60, 3))
def test_it_ends_on_the_way(output: int) -> None:
    cluster, migration = begin(output=output, warm_ms=30)
    cluster.run()
    assert migration.is_over
    expect_all_well(cluster)


def test_a_step_that_fails_at_the_destination_is_not_the_requests_end() -> None:
    cluster, migration = begin(others=0)
    (step_id,) = migration.destination.in_flight
    group, state = migration.destination, migration.state
    assert [row.state for row in group.in_flight[step_id].step.rows] == [state]
    cluster.carry_out(cluster.core.handle(ports.StepFailed(step_id, "injected"), cluster.now))
    assert migration.phase is RelocationPhase.FAILED and migration.lost_transfer
    assert state.phase is Phase.RUNNING and not state.is_finished
    expect_all_well(cluster)


def test_a_full_destination_is_given_up() -> None:
    cluster, migration = begin(full_blocks=60, others=0, output=130)
    ledger = migration.destination.blocks.ledgers[0]
    cluster.submit("filler", tokens(9, (ledger.num_free - 1) * BLOCK_SIZE), 4, cluster.now / MS)
    for i in range(8):
        cluster.submit(f"more{i}", tokens(20 + i, 30), 30, cluster.now / MS + 0.1)
    cluster.run()
    assert migration.is_over
    expect_all_well(cluster)


def test_it_does_not_go_where_there_is_no_room_nor_before_it_decodes() -> None:
    cluster = FakeCluster(policy="recompute", full_blocks=40, max_tokens=16)
    cluster.submit("traveller", tokens(1, 60), 80)
    cluster.submit("other", tokens(2, 120), 30, 0.1)
    cluster.run(until_ms=2)
    groups, migrations = cluster.core.groups, cluster.core.migrations
    state, other = (cluster.core.state.requests[name] for name in ("traveller", "other"))
    assert not other.num_output
    for traveller in (other, state):
        ends = groups[traveller.group_id], groups[1 - traveller.group_id]
        assert migrations.start(traveller, *ends, cluster.now, going=Going(MigrationKind.TOKENS, None)) == []
        cluster.run(until_ms=60)
    assert migrations.is_idle
    expect_all_well(cluster)


def test_a_request_that_grows_as_fast_as_it_is_computed_stays() -> None:
    cluster, migration = begin(step_tokens=1, output=400, others=0, full_blocks=200)
    cluster.run(stop=lambda: migration.is_over)
    assert migration.phase is RelocationPhase.FAILED and migration.state.phase is Phase.RUNNING
    expect_all_well(cluster)


def test_it_gives_way_to_a_drop_at_once() -> None:
    cluster, migration = begin()
    cluster.order("drop")
    assert len(cluster.core.merges) == 1
    assert migration.phase is RelocationPhase.FAILED and not migration.state.paused
    cluster.run()
    assert cluster.core.state.counters.migrations_given_way == 1
    expect_all_well(cluster)


@pytest.mark.parametrize("victim", ["source", "destination"])
@pytest.mark.parametrize("phase", [RelocationPhase.COPY, RelocationPhase.FINAL])
@pytest.mark.parametrize("shape", ["singles", "to_pipeline", "to_instance"])
def test_a_death_at_either_end(victim: str, phase: RelocationPhase, shape: str) -> None:
    cluster, migration = begin() if shape == "singles" else strangers(to_pipeline=shape == "to_pipeline")
    cluster.run(stop=lambda: migration.phase is phase)
    group: Group = getattr(migration, victim)
    cluster.kill(group.worker_ids[-1])
    cluster.restart_at(group.worker_ids[-1], cluster.now / MS + 90)
    cluster.run()
    assert migration.is_over
    expect_all_well(cluster)


def test_a_guest_that_is_near_too_many_deaths_is_tried_alone_where_it_runs() -> None:
    cluster, migration = begin(others=0)
    state = migration.state
    state.suspicion.num_deaths = cluster.core.params.faults.max_deaths_per_request - 2
    (victim,) = migration.destination.worker_ids
    assert migration.destination.in_flight
    cluster.kill(victim)
    cluster.restart_at(victim, cluster.now / MS + 90)
    cluster.run(stop=lambda: migration.is_over)
    assert state.on_trial and state.request_id in migration.source.queues.suspects
    expect_all_well(cluster)


def test_the_rung_moves_requests_as_tokens() -> None:
    cluster = FakeCluster(
        policy="migrate", full_blocks=60, max_seqs=32, migrate_threshold=6.0, migration_kind="tokens",
        migration_step_tokens=8,
    )
    for i in range(16):
        cluster.submit(f"r{i}", tokens(i, 14), 90, 2.0 * i)
    cluster.run(until_ms=60)
    for request_id in [*cluster.core.groups[1].queues.running]:
        cluster.cancel(request_id, 60)
    cluster.run()
    counters = cluster.core.state.counters
    assert counters.num_token_migrations == counters.num_migrations > 0 == counters.migrated_bytes
    expect_all_well(cluster)


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6), shape=st.sampled_from(["singles", "to_pipeline", "to_instance"]),
    victims=st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 60.0)), max_size=2),
    cancels_ms=st.none() | st.floats(0.0, 60.0), calls_off_ms=st.none() | st.floats(0.0, 40.0),
    faults=st.builds(Faults, step=st.sampled_from([0.0, 0.02]), budget=st.just(3)), prompt=st.integers(20, 110),
    crowd=st.integers(0, 12),
)
def test_anything_at_any_time(
    seed: int, shape: str, victims: list[tuple[int, float]], cancels_ms: float | None, calls_off_ms: float | None,
    faults: Faults, prompt: int, crowd: int,
) -> None:
    if shape == "singles":
        cluster, migration = begin(prompt=prompt, seed=seed, full_blocks=100)
    else:
        cluster, migration = strangers(to_pipeline=shape == "to_pipeline", prompt=prompt, seed=seed)
    now_ms, num_workers = cluster.now / MS, len(cluster.workers)
    cluster.faults = Faults(**vars(faults))
    for i in range(crowd):  # so that memory is short at either end
        cluster.submit(f"crowd{i}", tokens(i + 50, 40), 40, now_ms + 1.5 * i)
    if cancels_ms is not None:
        cluster.cancel(migration.state.request_id, now_ms + cancels_ms)
    if calls_off_ms is not None:
        cluster.at(int((now_ms + calls_off_ms) * MS), lambda: cluster.carry_out(migration.cancel()))
    for victim, after_ms in victims:
        cluster.kill_at(victim % num_workers, now_ms + after_ms)
        cluster.restart_at(victim % num_workers, now_ms + after_ms + 120)
    cluster.run()
    for worker_id in range(num_workers):  # those that had died when they were to be killed, too
        cluster.restart_at(worker_id, cluster.now / MS + 1.0)
    expect_all_well(cluster)


# A group issues a step with tokens of a guest, and in the same event the source preempts the guest's request.
@example(seed=487, policy="migrate+drop", offline="harvest", step_tokens=2, orders=[("drop", 80.0)], dies_ms=None,
         prefix_caching=True)
@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6), policy=st.sampled_from(["migrate", "swap+migrate+drop", "migrate+drop"]),
    offline=st.sampled_from([None, "harvest"]), step_tokens=st.sampled_from([None, 2, 8]),
    orders=st.lists(st.tuples(st.sampled_from(["drop", "restore"]), st.floats(0, 200)), max_size=3),
    dies_ms=st.none() | st.floats(0.0, 200.0), prefix_caching=st.booleans(),
)
def test_beside_other_rungs(
    seed: int, policy: str, offline: str | None, step_tokens: int | None, orders: list[tuple[str, float]],
    dies_ms: float | None, prefix_caching: bool,
) -> None:
    cluster = FakeCluster(
        policy=policy, num_workers=3, full_blocks=40, max_seqs=16, migrate_threshold=8.0, migration_kind="tokens",
        migration_step_tokens=step_tokens, offline=offline, seed=seed, eager=True, prefix_caching=prefix_caching,
        shard_bytes=1024, checkpoint_free=1.0,
    )
    rng = random.Random(seed)
    for i in range(24):
        is_offline = offline is not None and rng.random() < 0.5
        cluster.submit(
            f"r{i}", tokens(i % 5, rng.randint(1, 50)), rng.randint(2, 60), rng.uniform(0, 120),
            service_class=ServiceClass.OFFLINE if is_offline else ServiceClass.ONLINE,
        )
        if rng.random() < 0.2:
            cluster.cancel(f"r{i}", rng.uniform(0, 250))
    for what, at_ms in orders:
        cluster.order_at(what, at_ms)
    if dies_ms is not None:
        cluster.kill_at(seed % 3, dies_ms)
        cluster.restart_at(seed % 3, dies_ms + 150)
    expect_all_well(cluster)
