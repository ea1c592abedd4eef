"""Workers set aside: no group, no plan and no home has them, and they come back when they are woken."""

from __future__ import annotations

import random

import pytest
from fakes import BLOCK_SIZE, FakeCluster, Faults
from test_migrating import begin

from jettison.core.moving.aside import EMPTY
from jettison.core.ports import SendShard


def crowd(cluster: FakeCluster, num: int, *, first: int = 0, at_ms: float = 0.0) -> None:
    rng = random.Random(first)
    for i in range(first, first + num):
        cluster.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(12)], 40, at_ms + 0.4 * i)


def aside(cluster: FakeCluster, worker_id: int) -> None:
    cluster.carry_out(cluster.core.request_set_aside(worker_id, cluster.now))


def advance_one(cluster: FakeCluster) -> None:
    """One event."""
    num_before = len(cluster.log)
    cluster.run(stop=lambda: len(cluster.log) > num_before)


def wake(cluster: FakeCluster, worker_id: int) -> None:
    cluster.carry_out(cluster.core.request_wake(worker_id, cluster.now))


def test_it_gives_up_its_layers_and_serves_again_when_it_is_woken() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40)
    aside(cluster, 2)
    cluster.run(stop=lambda: cluster.core.aside.is_idle)
    worker = cluster.core.state.workers[2]
    assert worker.layout == EMPTY and worker.ledger.capacity == 0 and worker.is_aside
    crowd(cluster, 20, at_ms=cluster.now / 1e6)
    cluster.run()
    assert all(2 not in g.worker_ids for g in cluster.core.groups.values())
    wake(cluster, 2)
    cluster.run(stop=lambda: not cluster.core.in_transition)
    assert worker.layout == cluster.core.state.stage_layout(cluster.core.state.shape.all_layers) and not worker.unfilled
    assert any(g.worker_ids == (2,) for g in cluster.core.groups.values())
    crowd(cluster, 20, first=20, at_ms=cluster.now / 1e6)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_no_drop_plan_has_it() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=24, eager=True)
    aside(cluster, 1)
    crowd(cluster, 40)
    cluster.run()
    drops = [r for r in cluster.records if r.kind == "drop"]
    assert drops and all(1 not in r.fields["workers"] for r in drops)  # type: ignore[operator]
    cluster.expect_outputs()


@pytest.mark.parametrize("restarts", [False, True])
def test_one_that_dies_aside_comes_back_aside(restarts: bool) -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40)
    aside(cluster, 0)
    if restarts:
        cluster.run(stop=lambda: cluster.core.aside.is_idle)
    cluster.kill(0)
    cluster.restart_at(0, cluster.now / 1e6 + 100)
    crowd(cluster, 12)
    cluster.run(stop=lambda: any(r.kind == "worker_joined" for r in cluster.records))
    cluster.run(stop=lambda: cluster.core.aside.is_idle and not cluster.core.in_transition)
    worker = cluster.core.state.workers[0]
    assert worker.alive and worker.is_aside and worker.layout == EMPTY and not worker.unfilled
    wake(cluster, 0)
    cluster.run()
    assert any(g.worker_ids == (0,) for g in cluster.core.groups.values())
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_one_that_is_in_use_or_the_last_is_not_set_aside() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=40)
    crowd(cluster, 4)
    cluster.run(until_ms=3)
    with pytest.raises(ValueError, match="in use"):
        aside(cluster, 0)
    cluster.run()
    aside(cluster, 0)
    cluster.run(stop=lambda: cluster.core.aside.is_idle)
    with pytest.raises(ValueError, match="aside already"):
        aside(cluster, 0)
    with pytest.raises(ValueError, match="the last"):
        aside(cluster, 1)
    with pytest.raises(ValueError, match="not aside"):
        wake(cluster, 1)


@pytest.mark.parametrize("seed", range(6))
def test_refused_layouts_and_deaths_of_others_meanwhile(seed: int) -> None:
    rng = random.Random(seed)
    cluster = FakeCluster(
        num_workers=4, full_blocks=30, eager=True, seed=seed,
        faults=Faults(apply=0.3, offer=0.2, load=0.2, move=0.1, budget=8),
    )
    aside(cluster, 3)
    crowd(cluster, 40)
    cluster.kill_at(rng.randrange(4), rng.uniform(1, 60))
    for worker in range(4):
        cluster.restart_at(worker, rng.uniform(80, 300))
        cluster.restart_at(worker, 2_000.0)
    cluster.run(stop=lambda: cluster.core.aside.is_idle and cluster.core.state.workers[3].alive and cluster.now > 4e8)
    wake(cluster, 3)
    cluster.run()
    assert all(w.alive and not w.is_aside for w in cluster.core.state.workers.values())
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_one_that_could_not_give_up_its_layers_yet_is_asked_for_no_shard() -> None:
    cluster = FakeCluster(num_workers=4, full_blocks=40, auto_restore=False)
    cluster.order("drop")
    cluster.run(stop=lambda: not cluster.core.in_transition)
    (pipeline,) = cluster.core.state.pipelines.values()
    dead, survivor = pipeline.worker_ids
    cluster.workers[survivor].spoilt = lambda: True
    _, holder = sorted({*cluster.workers} - {dead, survivor})
    cluster.workers[holder].fail_applies = 1
    aside(cluster, holder)
    worker = cluster.core.state.workers[holder]
    cluster.run(stop=lambda: not worker.num_relayouts_open)
    assert worker.is_aside and worker.layout.shards and not cluster.core.aside.is_idle
    cluster.fetched.clear()
    cluster.kill(dead)
    cluster.run(stop=lambda: any(r.kind == "recovered" for r in cluster.records))
    assert cluster.fetched and not any(isinstance(a, SendShard) and a.src == holder for a in cluster.fetched)


def test_the_destination_of_a_migration_is_not_set_aside() -> None:
    """While the request stands still for its last blocks no transfer may be open: only its reserved blocks tell."""
    cluster, migration = begin(others=0)
    (worker_id,) = migration.destination.worker_ids
    while not migration.is_over:
        assert cluster.core.aside.why_not(worker_id) is not None, migration.phase
        advance_one(cluster)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_worker_whose_layers_are_changing_is_not_set_aside() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40, auto_restore=False)
    cluster.core.recoveries.come_home(0, cluster.now)  # it waits for what a move of the past has left under way
    with pytest.raises(ValueError, match="layers of worker 0 are changing"):
        aside(cluster, 0)
    cluster.run()
    cluster.order("drop")
    for worker_id in cluster.core.merges[0].worker_ids:
        with pytest.raises(ValueError, match=f"layers of worker {worker_id} are changing"):
            aside(cluster, worker_id)


def test_who_can_serve_is_counted_anew_after_each_change() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40)
    cluster.core.state.workers[2].full_blocks = 20
    assert cluster.core.state.alive_workers() == (3, 20)
    aside(cluster, 2)
    assert cluster.core.state.alive_workers() == (2, 40)
    cluster.run(stop=lambda: cluster.core.aside.is_idle)
    wake(cluster, 2)
    assert cluster.core.state.alive_workers() == (3, 20)
    cluster.run(stop=lambda: not cluster.core.in_transition)
    aside(cluster, 0)
    assert cluster.core.state.alive_workers() == (2, 20)


def test_a_request_that_only_fits_with_the_one_aside_is_refused_with_both_numbers() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40, shard_bytes=6000, eager=True)
    longest = cluster.core.max_request_blocks() * BLOCK_SIZE
    aside(cluster, 2)
    least = cluster.core.max_request_blocks() * BLOCK_SIZE
    assert least < longest
    cluster.submit("fits", [1] * (least - 20), 20, 1.0)
    cluster.submit("long", [1] * (longest - 20), 20, 2.0)
    cluster.run(until_ms=3.0)
    assert cluster.ends["long"] == ["error"]
    assert cluster.errors["long"] == (
        f"Memory holds {least} tokens of one request; this one asks for {longest} tokens "
        f"({longest - 20} in the prompt, 20 for the completion)."
    )
    cluster.run()
    wake(cluster, 2)
    cluster.run(stop=lambda: not cluster.core.in_transition)
    assert cluster.core.max_request_blocks() * BLOCK_SIZE == longest
    cluster.submit("again", [2] * (longest - 20), 20, cluster.now / 1e6)
    cluster.run()
    assert cluster.ends["again"] != ["error"]
    cluster.expect_nothing_left()


def test_a_worker_that_an_accepted_request_needs_is_not_set_aside() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40, shard_bytes=6000, eager=True)
    longest = cluster.core.max_request_blocks() * BLOCK_SIZE
    cluster.submit("long", [1] * (longest - 20), 20, 0.0)
    cluster.run(until_ms=0.5)
    idle = next(g.worker_ids[0] for g in cluster.core.groups.values() if not g.queues.all_requests())
    with pytest.raises(ValueError, match="Memory holds"):
        aside(cluster, idle)
    cluster.run()
    cluster.expect_outputs()
