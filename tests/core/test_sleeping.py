"""Workers that sleep: what they serve goes elsewhere, no group or plan has them, and they come back when woken."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster, Faults
from sleepers import crowd, is_asleep, of_kind, sleep
from test_migrating import begin

from jettison.core.moving.sleeping import EMPTY
from jettison.core.params import AwakeParams, ProvisionParams
from jettison.core.ports import SendShard, WorkerGone
from jettison.core.requests import Phase, RequestState
from jettison.types import ServiceClass


def wake(cluster: FakeCluster, worker_id: int) -> None:
    cluster.carry_out(cluster.core.request_wake(worker_id, cluster.now))


def test_it_gives_up_its_layers_and_serves_again_when_it_is_woken() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40)
    sleep(cluster, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 2))
    worker = cluster.core.state.workers[2]
    assert worker.layout == EMPTY and worker.ledger.capacity == 0 and worker.is_asleep
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
    sleep(cluster, 1)
    crowd(cluster, 40)
    cluster.run()
    drops = [r for r in cluster.records if r.kind == "drop"]
    assert drops and all(1 not in r.fields["workers"] for r in drops)  # type: ignore[operator]
    cluster.expect_outputs()


@pytest.mark.parametrize("restarts", [False, True])
def test_one_that_dies_asleep_comes_back_asleep(restarts: bool) -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40)
    sleep(cluster, 0)
    if restarts:
        cluster.run(stop=lambda: is_asleep(cluster, 0))
    cluster.kill(0)
    cluster.restart_at(0, cluster.now / 1e6 + 100)
    crowd(cluster, 12)
    cluster.run(stop=lambda: any(r.kind == "worker_joined" for r in cluster.records))
    cluster.run(stop=lambda: cluster.core.sleepers.is_idle and not cluster.core.in_transition)
    worker = cluster.core.state.workers[0]
    assert worker.alive and worker.is_asleep and worker.layout == EMPTY and not worker.unfilled
    wake(cluster, 0)
    cluster.run()
    assert any(g.worker_ids == (0,) for g in cluster.core.groups.values())
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_who_cannot_sleep_is_told_why() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=40)
    sleep(cluster, 0)
    with pytest.raises(ValueError, match="asleep already, or about to be"):
        sleep(cluster, 0)
    cluster.run(stop=lambda: is_asleep(cluster, 0))
    with pytest.raises(ValueError, match="asleep already"):
        sleep(cluster, 0)
    with pytest.raises(ValueError, match="level 1 makes one"):
        sleep(cluster, 1)
    with pytest.raises(ValueError, match="no level 3"):
        sleep(cluster, 1, level=3)
    with pytest.raises(ValueError, match="not asleep"):
        wake(cluster, 1)
    assert not cluster.kept


@pytest.mark.parametrize("seed", range(6))
def test_refused_layouts_and_deaths_of_others_meanwhile(seed: int) -> None:
    rng = random.Random(seed)
    cluster = FakeCluster(
        num_workers=4, full_blocks=30, eager=True, seed=seed,
        faults=Faults(apply=0.3, offer=0.2, load=0.2, move=0.1, budget=8),
    )
    sleep(cluster, 3)
    crowd(cluster, 40)
    cluster.kill_at(rng.randrange(4), rng.uniform(1, 60))
    for worker in range(4):
        cluster.restart_at(worker, rng.uniform(80, 300))
        cluster.restart_at(worker, 2_000.0)
    cluster.run(stop=lambda: is_asleep(cluster, 3) and cluster.core.state.workers[3].alive and cluster.now > 4e8)
    wake(cluster, 3)
    cluster.run()
    assert all(w.alive and not w.is_asleep for w in cluster.core.state.workers.values())
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
    sleep(cluster, holder)
    worker = cluster.core.state.workers[holder]
    cluster.run(stop=lambda: not worker.num_relayouts_open)
    assert worker.is_asleep and worker.layout.shards and not cluster.core.sleepers.is_idle
    cluster.fetched.clear()
    cluster.kill(dead)
    cluster.run(stop=lambda: any(r.kind == "recovered" for r in cluster.records))
    assert cluster.fetched and not any(isinstance(a, SendShard) and a.src == holder for a in cluster.fetched)


def test_the_destination_of_a_migration_gives_way_and_sleeps() -> None:
    cluster, migration = begin(others=0)
    (worker_id,) = migration.destination.worker_ids
    sleep(cluster, worker_id)
    cluster.run(stop=lambda: is_asleep(cluster, worker_id))
    assert migration.state.group_id == migration.source.group_id
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_worker_whose_layers_are_changing_does_not_sleep() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40, auto_restore=False)
    cluster.core.recoveries.come_home(0, cluster.now)  # it waits for what a move of the past has left under way
    with pytest.raises(ValueError, match="layers of worker 0 are changing"):
        sleep(cluster, 0)
    cluster.run()
    cluster.order("drop")
    for worker_id in cluster.core.merges[0].worker_ids:
        with pytest.raises(ValueError, match=f"layers of worker {worker_id} are changing"):
            sleep(cluster, worker_id)


def test_who_can_serve_is_counted_anew_after_each_change() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40)
    cluster.core.state.workers[2].full_blocks = 20
    assert cluster.core.state.alive_workers() == (3, 20)
    sleep(cluster, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 2))
    assert cluster.core.state.alive_workers() == (2, 40)
    wake(cluster, 2)
    assert cluster.core.state.alive_workers() == (3, 20)
    cluster.run(stop=lambda: not cluster.core.in_transition)
    sleep(cluster, 0)
    cluster.run(stop=lambda: is_asleep(cluster, 0))
    assert cluster.core.state.alive_workers() == (2, 20)


def test_a_request_that_only_fits_with_a_sleeper_is_taken_and_wakes_it() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40, shard_bytes=6000, eager=True)
    longest = cluster.core.max_request_blocks() * BLOCK_SIZE
    sleep(cluster, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 2))
    assert cluster.core.max_request_blocks() * BLOCK_SIZE == longest
    cluster.submit("short", [1] * 20, 20, cluster.now / 1e6)
    cluster.run()
    assert is_asleep(cluster, 2)
    cluster.submit("long", [1] * (longest - 20), 20, cluster.now / 1e6)
    cluster.run()
    assert not cluster.core.state.workers[2].is_asleep and cluster.ends["long"] != ["error"]
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_request_that_counted_on_a_dead_worker_wakes_a_sleeper_once_that_one_is_gone_for_good() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=24, eager=True)
    sleep(cluster, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 2))
    cluster.kill(0)
    cluster.run(stop=lambda: bool(of_kind(cluster, "worker_lost")))
    cluster.submit("long", [1 + i % 50 for i in range(20)], 100, cluster.now / MS + 1, ignore_eos=True)
    cluster.run(until_ms=cluster.now / MS + 2)
    assert is_asleep(cluster, 2), "what is awake would hold it, with the dead worker"
    cluster.at(cluster.now + 5 * MS, WorkerGone(0))
    cluster.run(until_ms=cluster.now / MS + 2_000)
    assert not cluster.core.state.workers[2].is_asleep
    cluster.run()
    cluster.expect_outputs()


def test_a_worker_that_an_accepted_request_needs_does_not_sleep() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40, shard_bytes=6000, eager=True)
    longest = cluster.core.max_request_blocks() * BLOCK_SIZE
    cluster.submit("long", [1] * (longest - 20), 20, 0.0)
    cluster.run(until_ms=0.5)
    idle = next(g.worker_ids[0] for g in cluster.core.groups.values() if not g.queues.all_requests())
    with pytest.raises(ValueError, match="memory here holds"):
        sleep(cluster, idle)
    cluster.run()
    cluster.expect_outputs()


# --- what they serve goes elsewhere ------------------------------------------------------------------------------


def on(cluster: FakeCluster, worker_id: int) -> list[RequestState]:
    return [s for g in cluster.core.state.groups_of[worker_id] for s in g.queues.all_requests()]


def test_running_requests_migrate() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=120, max_seqs=8)
    crowd(cluster, 12)
    cluster.run(until_ms=15)
    before = on(cluster, 0)
    assert before and {s.phase for s in before} == {Phase.RUNNING}
    sleep(cluster, 0)
    crowd(cluster, 2, first=20, at_ms=cluster.now / 1e6)
    cluster.run(stop=lambda: is_asleep(cluster, 0))
    assert any(not s.is_finished for s in before) and cluster.core.state.counters.num_migrations == len(before)
    assert not cluster.core.state.counters.num_recomputed_tokens
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_as_many_migrate_at_once_as_links_take_the_largest_first() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=120, max_seqs=8)
    for i in range(12):
        cluster.submit(f"r{i}", [1 + i] * (6 + 2 * i), 40, 0.2 * i)
    cluster.run(until_ms=25)
    sizes = [s.num_tokens for s in on(cluster, 0) if s.num_output and s.num_tokens - s.num_computed <= 1]
    assert len(sizes) > 2
    sleep(cluster, 0)
    under_way = [m.state.num_tokens for m in cluster.core.migrations.under_way]
    assert len(under_way) == len(sizes), "there is room for all, and the link takes them in one epoch"
    assert under_way == sorted(under_way, reverse=True)
    cluster.run(stop=lambda: is_asleep(cluster, 0))
    assert not cluster.core.state.counters.num_recomputed_tokens
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_queued_ones_are_dispatched_again_and_none_comes_after_them() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=60, max_seqs=2)
    crowd(cluster, 20)
    cluster.run(until_ms=15)
    assert any(s.phase is Phase.WAITING for s in on(cluster, 0))
    sleep(cluster, 0)
    assert not any(s.phase is Phase.WAITING for s in on(cluster, 0))
    crowd(cluster, 6, first=20, at_ms=cluster.now / 1e6)
    cluster.run(stop=lambda: any(s.phase is Phase.WAITING for s in on(cluster, 0)) or is_asleep(cluster, 0))
    assert is_asleep(cluster, 0)
    cluster.run()
    cluster.expect_outputs()


def test_what_fits_nowhere_is_served_to_its_end_first() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=40)
    crowd(cluster, 16)
    cluster.run(until_ms=30)
    served = [s for s in on(cluster, 1) if s.phase is Phase.RUNNING]
    cluster.core.state.workers[0].ledger.allocate("ballast", cluster.core.state.workers[0].ledger.num_free)
    cluster.core.state.workers[0].ghosts["ballast"] = {-1}  # as if something of the past held all that is free
    sleep(cluster, 1)
    cluster.run(stop=lambda: all(s.is_finished for s in served))
    cluster.core.state.workers[0].ledger.release("ballast")
    cluster.core.state.workers[0].ghosts.clear()
    cluster.run()
    assert is_asleep(cluster, 1) and not cluster.core.state.counters.num_migrations
    cluster.expect_outputs()


def test_it_can_be_called_back_until_its_layout_goes() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=60)
    crowd(cluster, 10)
    cluster.run(until_ms=8)
    sleep(cluster, 0)
    assert cluster.core.sleepers.leaving == [0]
    wake(cluster, 0)
    assert not cluster.core.sleepers.out and [r.kind for r in cluster.records][-1] == "stays_awake"
    sleep(cluster, 0)
    cluster.run(stop=lambda: not cluster.core.sleepers.is_idle)
    wake(cluster, 0)  # its layout is going: it sleeps, and is woken at once
    cluster.run()
    assert [r.kind for r in cluster.records if r.kind in ("asleep", "woken")] == ["asleep", "woken"]
    assert len(cluster.core.groups) == 2
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_all_sleep_when_what_was_accepted_has_ended_and_the_first_request_wakes_one() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=60)
    crowd(cluster, 6)
    cluster.run(until_ms=8)
    sleep(cluster, 0, 1, level=1)
    cluster.run(stop=lambda: cluster.core.sleepers.asleep == {0, 1} and cluster.core.sleepers.is_idle)
    assert cluster.core.max_request_blocks() and not cluster.core.groups
    assert {k.shard for k in cluster.kept} == cluster.core.state.shape.all_shards
    cluster.expect_outputs()
    crowd(cluster, 4, first=6, at_ms=cluster.now / 1e6)
    cluster.run()
    assert len(cluster.core.sleepers.asleep) == 1
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_request_that_comes_while_all_are_leaving_calls_one_back() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=60)
    crowd(cluster, 2)
    cluster.run(until_ms=8)
    sleep(cluster, 0, 1, level=1)
    crowd(cluster, 1, first=2, at_ms=cluster.now / 1e6)
    cluster.run()
    assert cluster.core.sleepers.asleep == {1} and len(cluster.core.groups) == 1
    cluster.expect_outputs()


def test_merged_groups_are_a_complete_copy_together() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40, auto_restore=False)
    cluster.order("drop")
    cluster.run(stop=lambda: not cluster.core.in_transition)
    (pipeline,) = cluster.core.state.pipelines.values()
    (alone,) = {0, 1, 2} - set(pipeline.worker_ids)
    with pytest.raises(ValueError, match="does not serve by itself"):
        sleep(cluster, pipeline.worker_ids[0])
    sleep(cluster, alone)
    cluster.run(stop=lambda: is_asleep(cluster, alone))
    wake(cluster, alone)
    cluster.run()
    assert not cluster.core.state.workers[alone].unfilled
    assert {a.src for a in cluster.fetched if isinstance(a, SendShard)} >= set(pipeline.worker_ids)


def test_one_that_leaves_stays_where_the_last_other_copy_dies() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=60)
    crowd(cluster, 6)
    cluster.run(until_ms=8)
    sleep(cluster, 0)
    cluster.kill(1)
    cluster.restart_at(1, cluster.now / 1e6 + 100)
    cluster.run()
    (stays,) = [r for r in cluster.records if r.kind == "stays_awake"]
    assert "no host copy" in str(stays.fields["reason"]) and len(cluster.core.groups) == 2
    cluster.expect_outputs()


def test_offline_requests_give_up_their_blocks_and_are_queued_elsewhere() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=60, offline="harvest")
    for i in range(6):
        cluster.submit(f"o{i}", [1 + i] * 12, 60, 0.4 * i, service_class=ServiceClass.OFFLINE)
    cluster.run(until_ms=20)
    assert on(cluster, 0)
    sleep(cluster, 0)
    cluster.run(stop=lambda: is_asleep(cluster, 0))
    assert not all(s.is_finished for s in cluster.core.state.requests.values())
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def offline_on_two(**more: object) -> FakeCluster:
    cluster = FakeCluster(num_workers=2, full_blocks=200, offline="harvest", checkpoint_free=0.0, **more)  # type: ignore[arg-type]
    for i in range(6):
        cluster.submit(f"o{i}", [1 + i] * 20, 60, 0.4 * i, service_class=ServiceClass.OFFLINE)
    cluster.run(until_ms=40)
    assert on(cluster, 0) and not cluster.core.state.counters.checkpointed_blocks
    return cluster


def test_offline_work_is_checkpointed_before_its_device_sleeps() -> None:
    cluster = offline_on_two()
    sealed = sum(s.num_computed // BLOCK_SIZE for s in on(cluster, 0))
    sleep(cluster, 0)
    assert cluster.core.sleepers.leaving == [0]
    cluster.run(stop=lambda: is_asleep(cluster, 0))
    counters = cluster.core.state.counters
    assert sealed > 0 and counters.checkpointed_blocks >= sealed and counters.checkpoint_frees > 0
    assert counters.num_recomputed_tokens < sealed * BLOCK_SIZE, "what was at the host is not computed again"
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_where_online_requests_wait_offline_work_is_not_waited_for() -> None:
    cluster = offline_on_two(max_seqs=6)
    crowd(cluster, 20, at_ms=cluster.now / 1e6)
    cluster.run(stop=lambda: bool(cluster.core.state.changes.queued_online))
    sleep(cluster, 0)
    assert not any(s.is_offline and s.phase is Phase.RUNNING and not s.num_pending for s in on(cluster, 0))
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_full_host_pool_holds_no_sleep_up() -> None:
    cluster = offline_on_two(host_slots=1)
    sleep(cluster, 0)
    cluster.run(until_ms=cluster.now / 1e6 + 900, stop=lambda: is_asleep(cluster, 0))
    assert is_asleep(cluster, 0)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("policy", ["recompute", "swap"])
def test_what_host_pools_have_comes_back_before_the_last_one_sleeps(policy: str) -> None:
    """No other group can take it: freed offline requests, and swapped out ones, end here."""
    cluster = FakeCluster(
        policy=policy, num_workers=1, full_blocks=80, host_slots=500, offline="harvest", checkpoint_free=0.9
    )
    for i in range(12):
        service_class = ServiceClass.ONLINE if policy == "swap" else ServiceClass.OFFLINE
        cluster.submit(f"o{i}", [1 + i] * 24, 80, 0.3 * i, service_class=service_class)
    for i in range(8):
        cluster.submit(f"r{i}", [2 + i] * 30, 30, 40 + 0.5 * i)
    stored = cluster.core.groups[0].queues.stored
    cluster.run(stop=lambda: len(stored) > 1 and cluster.now > 44e6)  # all have come: the next would call it back
    assert stored
    sleep(cluster, 0, level=1)
    cluster.run(stop=lambda: is_asleep(cluster, 0))
    assert is_asleep(cluster, 0)
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("dies", [None, 0, 1])
def test_workers_that_fall_asleep_together_write_the_machines_copy_once(dies: int | None) -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40)
    sleep(cluster, 0, 1, level=1)
    if dies is None:
        cluster.run(stop=lambda: is_asleep(cluster, 0) and is_asleep(cluster, 1))
        assert {k.worker_id for k in cluster.kept} == {0, 1}, "both write"
        assert len(cluster.kept) == len(cluster.core.state.shape.all_shards)
        return
    cluster.run(stop=lambda: len(cluster.kept) == 3)
    cluster.kill(dies)
    cluster.run(stop=lambda: is_asleep(cluster, 1 - dies))
    assert {k.shard for k in cluster.kept} == cluster.core.state.shape.all_shards
    assert cluster.core.sleepers.host_copy(1 - dies) == cluster.core.state.shape.all_shards


def test_a_worker_with_a_copy_of_its_own_counts_on_no_other_and_on_none_after_its_death() -> None:
    """As on hosts that are not this one, where each worker's keeper has the memory."""
    cluster = FakeCluster(num_workers=2, full_blocks=40)
    core = cluster.core
    core.reconfigure(replace(core.params, machine_of={0: 5, 1: 5}, shares_copies=False))
    sleep(cluster, 0, level=1)
    cluster.run(stop=lambda: is_asleep(cluster, 0))
    everything = core.state.shape.all_shards
    assert (core.sleepers.host_copy(0), core.sleepers.host_copy(1)) == (everything, frozenset())
    with pytest.raises(ValueError, match="level 1 makes one"):
        sleep(cluster, 1, level=2)
    sleep(cluster, 1, level=1)
    cluster.run(stop=lambda: is_asleep(cluster, 1))
    assert {k.worker_id for k in cluster.kept} == {0, 1} and len(cluster.kept) == 2 * len(everything)
    cluster.kill(0)
    cluster.run(stop=lambda: not core.state.workers[0].alive)
    assert (core.sleepers.host_copy(0), core.sleepers.host_copy(1)) == (frozenset(), everything)


@pytest.mark.parametrize("awake", [None, AwakeParams(min_awake=1)])
def test_a_request_larger_than_an_instance_leaves_the_one_that_is_to_sleep_for_those_that_can_merge(
    awake: AwakeParams | None,
) -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=20, awake=awake)
    cluster.submit("large", [1 + i % 50 for i in range(25 * BLOCK_SIZE)], 30)
    cluster.run(until_ms=1)
    (waits_at,) = cluster.core.groups[cluster.core.state.requests["large"].group_id].worker_ids
    sleep(cluster, waits_at)
    cluster.run()
    (drop,) = of_kind(cluster, "drop")
    assert waits_at not in drop.fields["workers"]  # type: ignore[operator]
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("awake", [None, AwakeParams(min_awake=1, max_awake=1)])
@pytest.mark.parametrize("leaves", [False, True])
def test_an_answer_without_a_given_length_that_outgrows_its_instance_wakes_the_memory_that_it_needs(
    leaves: bool, awake: AwakeParams | None
) -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=20, awake=awake)
    if not leaves:
        sleep(cluster, 1)
        cluster.run(stop=lambda: is_asleep(cluster, 1))
    prompt = [1 + i % 50 for i in range(20)]
    cluster.submit("grows", prompt, 300, cluster.now / MS, has_default_length=True, ignore_eos=True)
    if leaves:
        cluster.run(until_ms=10)
        sleep(cluster, *cluster.core.groups[cluster.core.state.requests["grows"].group_id].worker_ids)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_an_answer_that_outgrows_its_instance_asks_for_the_process_that_was_given_back_meanwhile() -> None:
    cluster = FakeCluster(
        num_workers=4, full_blocks=20, awake=AwakeParams(min_awake=1, max_awake=1), provision=ProvisionParams(1)
    )
    sleep(cluster, 1, 2, 3)
    cluster.run(stop=lambda: all(is_asleep(cluster, worker_id) for worker_id in (1, 2, 3)))
    prompt = [1 + i % 50 for i in range(20)]
    cluster.submit("grows", prompt, 150, cluster.now / MS, has_default_length=True, ignore_eos=True)
    for worker_id in (1, 2, 3):
        cluster.run(until_ms=cluster.now / MS + 5)
        cluster.carry_out(cluster.core.sleepers.release(worker_id, cluster.now, "not needed"))
    cluster.run()
    assert [r.fields["worker"] for r in of_kind(cluster, "instance_asked")] == [1], "no more than it needs"
    cluster.expect_outputs()


@pytest.mark.parametrize("seed", range(int(os.environ.get("JETTISON_SLEEP_SEEDS", "12"))))
def test_random_histories_lose_nothing(seed: int) -> None:
    """Sleep and wake orders, refusals, lost transfers and deaths in any order: one owner, every token once."""
    rng = random.Random(seed)
    cluster = FakeCluster(
        num_workers=4, full_blocks=40, eager=True, seed=seed,
        faults=Faults(apply=0.2, offer=0.1, load=0.1, move=0.1, budget=6),
    )
    crowd(cluster, 50)
    at = sorted(rng.uniform(1, 200) for _ in range(rng.randrange(4, 14)))

    def order() -> None:
        worker = rng.randrange(4)
        try:
            if rng.random() < 0.6:
                sleep(cluster, *(range(4) if rng.random() < 0.15 else (worker,)), level=rng.choice((1, 2)))
            else:
                wake(cluster, worker)
        except ValueError:
            pass

    for ms in at:
        cluster.at(int(ms * 1e6), order)
    for _ in range(rng.randrange(3)):
        cluster.kill_at(rng.randrange(4), rng.uniform(1, 200))
    for worker in range(4):
        cluster.restart_at(worker, rng.uniform(80, 300))
        cluster.restart_at(worker, 2_000.0)
    crowd(cluster, 20, first=50, at_ms=300)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
