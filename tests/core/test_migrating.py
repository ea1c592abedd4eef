"""The migrate baseline and the migration machine: one owner in every phase; with pretend KV that every step checks."""

from __future__ import annotations

import random

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster, Faults, expect_all_well, tokens

from jettison.core.moving.passage import RelocationPhase
from jettison.core.moving.relocate import MAX_FINAL_BLOCKS, Relocation
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.memory.stages import StagePlan
from jettison.types import LayerRange


def begin(
    *, prompt: int = 100, output: int = 120, others: int = 2, full_blocks: int = 120, faults: Faults | None = None,
    warm_ms: float = 60.0, seed: int = 0,
) -> tuple[FakeCluster, Relocation]:
    """A request that decodes at instance 0 is sent to instance 1; both serve others."""
    cluster = FakeCluster(
        policy="recompute", full_blocks=full_blocks, max_tokens=64, faults=faults, prefix_caching=True, seed=seed
    )
    cluster.submit("traveller", tokens(1, prompt), output)
    for i in range(2 * others):
        cluster.submit(f"r{i}", tokens(i + 2, 10), 60, 1.0 + i)
    cluster.run(until_ms=warm_ms)
    state = cluster.core.state.requests["traveller"]
    source = cluster.core.groups[state.group_id]
    destination = cluster.core.groups[1 - state.group_id]
    return cluster, start(cluster, state, source, destination)


def start(cluster: FakeCluster, state: RequestState, source: Group, destination: Group) -> Relocation:
    migrations = cluster.core.migrations
    cluster.carry_out(migrations.start(state, source, destination, cluster.now))
    return migrations.under_way[-1]


def run_until(cluster: FakeCluster, migration: Relocation, phase: RelocationPhase) -> None:
    cluster.run(stop=lambda: migration.phase is phase)
    assert migration.phase is phase


def test_full_blocks_travel_while_it_decodes_and_at_most_sixteen_while_it_stands() -> None:
    cluster, migration = begin()
    assert migration.phase is RelocationPhase.COPY and not migration.state.paused
    before = len(migration.state.tokens)
    run_until(cluster, migration, RelocationPhase.DONE)
    assert migration.num_rounds >= 2
    assert [m for m in cluster.sent if len(m.src_blocks) > MAX_FINAL_BLOCKS], "a round while it decodes"
    assert len(cluster.sent[-1].src_blocks) <= MAX_FINAL_BLOCKS
    assert len(migration.state.tokens) > before, "it went on decoding"
    sent = [b for m in cluster.sent for b in m.dst_blocks]
    assert len(sent) == len(set(sent)) == -(-migration.state.num_computed // BLOCK_SIZE), "each block once"
    state = migration.state
    assert state.group_id == migration.destination.group_id and state.request_id in migration.destination.queues.running
    assert not any(ledger.has(state.request_id) for ledger in migration.source.blocks.ledgers)
    assert cluster.core.state.counters.num_migrations == 1 and state.num_preemptions == 0
    cluster.run()
    expect_all_well(cluster)


def test_a_short_request_is_moved_in_one_stop() -> None:
    cluster, migration = begin(prompt=20, warm_ms=30)
    run_until(cluster, migration, RelocationPhase.DONE)
    assert len(cluster.sent) == 1
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_transfer_leaves_the_request_at_its_source(lost: int) -> None:
    cluster, migration = begin()
    def fails(move: object) -> bool:
        return cluster.sent.index(move) == lost  # type: ignore[arg-type]

    cluster.fails_move = fails
    run_until(cluster, migration, RelocationPhase.FAILED)
    assert migration.state.group_id == migration.source.group_id and not migration.state.paused
    assert not any(ledger.has("traveller") for ledger in migration.destination.blocks.ledgers)
    assert cluster.core.state.counters.num_failed_migrations == 1
    cluster.run()
    assert migration.state.num_preemptions == 0
    expect_all_well(cluster)


@pytest.mark.parametrize("phase", [RelocationPhase.COPY, RelocationPhase.FINAL])
@pytest.mark.parametrize("after_ms", [0.0, 0.6, 2.0, 9.0])
def test_cancelled_on_the_way(phase: RelocationPhase, after_ms: float) -> None:
    cluster, migration = begin()
    run_until(cluster, migration, phase)
    cluster.cancel("traveller", cluster.now / MS + after_ms)
    cluster.run()
    assert cluster.ends["traveller"] == ["cancelled"]
    assert migration.is_over
    expect_all_well(cluster)


@pytest.mark.parametrize("output", range(17, 47, 3))
def test_finished_on_the_way(output: int) -> None:
    cluster, migration = begin(output=output, warm_ms=30)
    cluster.run()
    assert migration.is_over
    expect_all_well(cluster)


def test_a_failing_step_ends_the_request_and_its_migration() -> None:
    cluster, migration = begin()
    cluster.faults = Faults(step=1.0, budget=2)
    cluster.run()
    assert migration.phase is RelocationPhase.FAILED and cluster.ends["traveller"] == ["error"]
    expect_all_well(cluster)


def test_no_room_at_the_destination_starts_nothing() -> None:
    cluster = FakeCluster(policy="recompute", full_blocks=40, max_tokens=64)
    cluster.submit("traveller", tokens(1, 60), 80)
    cluster.submit("other", tokens(2, 120), 30, 0.1)
    cluster.run(until_ms=30)
    state = cluster.core.state.requests["traveller"]
    groups, migrations = cluster.core.groups, cluster.core.migrations
    assert migrations.start(state, groups[state.group_id], groups[1 - state.group_id], cluster.now) == []
    assert migrations.is_idle
    cluster.run()
    expect_all_well(cluster)


def test_a_destination_that_fills_up_meanwhile_is_given_up() -> None:
    cluster, migration = begin(full_blocks=60, others=0, prompt=100, output=130)
    # Everything that is left there is taken, so its table cannot grow with the request's.
    ledger = migration.destination.blocks.ledgers[0]
    cluster.submit("filler", tokens(9, (ledger.num_free - 1) * BLOCK_SIZE), 4, cluster.now / MS)
    for i in range(8):
        cluster.submit(f"more{i}", tokens(20 + i, 30), 30, cluster.now / MS + 0.1)
    cluster.run()
    assert migration.is_over
    expect_all_well(cluster)


def test_from_an_instance_to_a_pipeline() -> None:
    """Groups of different shape: the destination's stages each get their layers."""
    cluster = FakeCluster(policy="recompute", num_workers=3, full_blocks=120, max_tokens=64, shard_bytes=256)
    cluster.order("drop")
    cluster.run(until_ms=20)
    assert sorted(len(g.stages) for g in cluster.core.groups.values()) == [1, 2]
    alone = next(g for g in cluster.core.groups.values() if len(g.stages) == 1)
    pipeline = next(g for g in cluster.core.groups.values() if len(g.stages) == 2)
    for i in range(6):
        cluster.submit(f"r{i}", tokens(i, 90), 80, 21 + i)
    cluster.run(until_ms=60)
    state = next(s for s in alone.queues.running.values() if s.num_output)
    migration = start(cluster, state, alone, pipeline)
    run_until(cluster, migration, RelocationPhase.DONE)
    assert {m.dst for m in cluster.sent} == set(pipeline.worker_ids)
    assert state.residences == (pipeline.residence,)
    back = start(cluster, state, pipeline, alone)
    run_until(cluster, back, RelocationPhase.DONE)
    assert state.residences == (alone.residence,)
    assert alone.stages == (StagePlan(alone.worker_ids[0], LayerRange(0, 4)),)
    cluster.run()
    expect_all_well(cluster)


def test_a_migration_gives_way_to_a_drop_and_its_request_stays_at_its_source() -> None:
    cluster, migration = begin()
    state = migration.state
    cluster.order("drop")
    assert len(cluster.core.merges) == 1, "at once"
    assert migration.phase is RelocationPhase.FAILED and state.group_id == migration.source.group_id
    assert not state.transfers and not state.paused, "nothing of the migration holds the request up"
    (destination,) = migration.destination.worker_ids
    assert cluster.core.state.workers[destination].ghosts, "what is still being written is nobody else's yet"
    cluster.run()
    assert cluster.core.state.counters.migrations_given_way == 1
    assert not cluster.core.state.workers[destination].ghosts
    expect_all_well(cluster)


# --- the policy that drives it


def lopsided(seed: int = 0, faults: Faults | None = None) -> FakeCluster:
    """Dispatch balances, but then the clients of one instance leave."""
    cluster = FakeCluster(
        policy="migrate", full_blocks=60, num_workers=2, max_seqs=32, seed=seed, faults=faults, prefix_caching=False,
        migrate_threshold=6.0,
    )
    for i in range(16):
        cluster.submit(f"r{i}", tokens(i, 14), 90, 2.0 * i)
    cluster.run(until_ms=60)
    for request_id in [*cluster.core.groups[1].queues.running]:
        cluster.cancel(request_id, 60)
    return cluster


@pytest.mark.parametrize("seed", range(3))
def test_requests_go_from_the_full_to_the_empty_instance(seed: int) -> None:
    cluster = lopsided(seed)
    cluster.run()
    assert cluster.core.state.counters.num_migrations > 0
    expect_all_well(cluster)


@pytest.mark.parametrize("seed", range(6))
def test_cancels_and_lost_transfers(seed: int) -> None:
    cluster = lopsided(seed, Faults(move=0.4, budget=8))
    rng = random.Random(seed)
    for i in range(0, 16, 3):
        cluster.cancel(f"r{i}", rng.uniform(20, 250))
    cluster.run()
    expect_all_well(cluster)


def test_balanced_instances_are_left_alone() -> None:
    cluster = FakeCluster(policy="migrate", full_blocks=200)
    for i in range(8):
        cluster.submit(f"r{i}", tokens(i, 14), 40, i)
    cluster.run()
    assert not cluster.sent
    expect_all_well(cluster)
