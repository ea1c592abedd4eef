"""Online and offline requests: what an offline one waits for is no overload, forbids no restore and stops nobody."""

from __future__ import annotations

import random

import pytest
from fakes import FakeCluster, Faults, tokens

from jettison.core.ladder.rung import Moment
from jettison.core.load.monitor import GroupMonitor, Stays
from jettison.core.observing import offline_gauges
from jettison.core.requests import RequestState
from jettison.core.totals import counters
from jettison.types import ServiceClass
from longrun import part_of


def offline(cluster: FakeCluster, name: str, num_prompt: int, num_output: int, at_ms: float = 0.0) -> None:
    cluster.submit(name, tokens(len(name), num_prompt), num_output, at_ms, service_class=ServiceClass.OFFLINE)


def running(cluster: FakeCluster) -> list[RequestState]:
    return [s for group in cluster.core.groups.values() for s in group.queues.running.values()]


def kinds(cluster: FakeCluster) -> list[str]:
    return [record.kind for record in cluster.records]


def test_an_offline_head_that_memory_keeps_out_is_no_overload() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=24, eager=True)
    for i in range(40):
        offline(cluster, f"batch-{i}", 20, 60, 0.2 * i)
    cluster.run()
    assert "drop" not in kinds(cluster) and "drop_declined" not in kinds(cluster)
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    online = FakeCluster(num_workers=2, full_blocks=24, eager=True)
    for i in range(40):
        online.submit(f"batch-{i}", tokens(i, 20), 60, 0.2 * i)
    online.run()
    assert "drop" in kinds(online), "the same requests, online, are one"


def test_offline_requests_that_wait_forbid_no_restore() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=60, max_seqs=2, eager=True)
    for i in range(60):
        offline(cluster, f"batch-{i}", 10, 60)
    cluster.run(until_ms=5)
    cluster.order("drop")
    cluster.run(stop=lambda: "restore_done" in kinds(cluster))
    assert "restore_done" in kinds(cluster), "little is held, and what waits is no reason to stay merged"
    assert any(g.queues.waiting_offline for g in cluster.core.groups.values())
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_online_requests_go_first_whenever_they_came() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=40, max_seqs=2, policy="recompute")
    for i in range(6):
        offline(cluster, f"batch-{i}", 10, 30)
    cluster.submit("chat", tokens(1, 10), 30, 5.0)
    cluster.run(stop=lambda: "chat" in {s.request_id for s in running(cluster)})
    assert sum(s.num_output > 0 for s in running(cluster)) <= 2
    waiting = cluster.core.groups[0].queues.waiting_offline
    assert len(waiting) >= 3, "the batch's others still wait"
    cluster.run()
    cluster.expect_outputs()


def test_the_offline_one_gives_way_where_blocks_run_out() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=20, policy="recompute", prefix_caching=False)
    offline(cluster, "batch", 20, 40)
    cluster.submit("chat-0", tokens(1, 20), 40, 1.0)
    cluster.submit("chat-1", tokens(2, 20), 40, 2.0)  # the newest, and yet not the victim
    cluster.run(stop=lambda: any(s.num_preemptions for s in cluster.core.state.requests.values()))
    states = cluster.core.state.requests
    assert states["batch"].num_preemptions == 1
    assert not any(states[r].num_preemptions for r in ("chat-0", "chat-1") if r in states)
    cluster.run()
    cluster.expect_outputs()


def test_the_queue_limit_counts_online_requests() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=20, max_seqs=1, policy="recompute")
    for i in range(8):
        offline(cluster, f"batch-{i}", 10, 20)
    cluster.run(until_ms=2)
    assert cluster.core.num_waiting == 0
    assert cluster.core.ladder.why_refuse("", 4, 0, cluster.now) is None


def long_offline(cluster: FakeCluster, name: str, at_ms: float) -> None:
    """Foreseen to hold all that a member on its own has room for."""
    cluster.submit(name, tokens(9, 100), 140, at_ms, service_class=ServiceClass.OFFLINE, ignore_eos=True)


def test_an_offline_request_that_waits_forbids_no_restore_whatever_it_may_become() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=60, max_seqs=1, eager=True)
    for i in range(4):
        cluster.submit(f"chat-{i}", tokens(i, 10), 100)
    for i in range(10):
        offline(cluster, f"batch-{i}", 10, 100, 0.5)
    long_offline(cluster, "long-one", 1.0)
    cluster.run(until_ms=5)
    cluster.order("drop")
    cluster.run(stop=lambda: "restore_done" in kinds(cluster))
    assert cluster.core.state.requests["long-one"].first_scheduled_ns is None, "it waits, and they are apart"


@pytest.mark.parametrize(("is_offline", "turned"), [(True, 0), (False, 1)])
def test_an_offline_request_that_arrives_during_a_restore_turns_nothing_round(is_offline: bool, turned: int) -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=60, eager=True)
    for worker in cluster.workers.values():
        worker.spoilt = lambda: True
    cluster.submit("chat", tokens(1, 10), 400)
    cluster.run(until_ms=5)
    cluster.order("drop")
    cluster.run(stop=lambda: any(r.phase == "pull" for r in cluster.core.restores))
    service_class = ServiceClass.OFFLINE if is_offline else ServiceClass.ONLINE
    cluster.submit(
        "late", tokens(9, 100), 140 if is_offline else 200, cluster.now / 1e6 + 0.01, service_class=service_class,
        ignore_eos=True,
    )
    (restore,) = cluster.core.restores
    cluster.run(stop=lambda: "late" in cluster.core.state.requests)
    for _ in range(3):  # as ticks would, before it comes to an end
        cluster.carry_out(cluster.core.ladder.climb(Moment.TICK, cluster.now))
    assert (restore.failure is not None) == bool(turned)
    cluster.run(stop=lambda: restore.is_over)
    assert cluster.core.state.counters.num_turned_restores == turned


def test_requests_without_a_group_count_for_the_queue_limit_by_class() -> None:
    cluster = FakeCluster(num_workers=1, policy="recompute")
    cluster.run(until_ms=1)
    cluster.kill(0)
    cluster.run(until_ms=100)
    for i in range(8):
        offline(cluster, f"batch-{i}", 10, 20, 100.5 + i)
    cluster.run(until_ms=130)
    core = cluster.core
    assert len(core.state.unplaced) == 8 and core.num_waiting == 0
    assert core.ladder.why_refuse("", 1, 0, cluster.now) is None
    cluster.submit("chat", tokens(1, 10), 20, 130.5)
    cluster.run(until_ms=131)
    assert core.num_waiting == 1 and core.ladder.why_refuse("", 1, 0, cluster.now) is not None


def test_retry_after_never_tells_how_long_the_batch_has_waited() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=2_000, max_seqs=1, policy="recompute")
    for i in range(6):
        offline(cluster, f"batch-{i}", 10, 1_000)
    cluster.run(until_ms=5_000)
    assert len(cluster.core.groups[0].queues.waiting_offline) >= 2, "they have waited for 5 s"
    for i in range(2):
        cluster.submit(f"chat-{i}", tokens(i, 10), 50, 5_000.1)
    cluster.run(until_ms=5_000.2)
    assert cluster.core.num_waiting == 2 and cluster.core.loads.predicted_wait_s(cluster.now) < 0.01


def beside_a_batch(num_offline: int) -> FakeCluster:
    """Online requests in a steady stream, and so many offline ones of another kind beside them."""
    cluster = FakeCluster(num_workers=2, full_blocks=400, seed=3, prefix_caching=False)
    for i in range(100):
        cluster.submit(f"chat-{i}", tokens(i, 12), 8, 30.0 * i, ignore_eos=True)
    for i in range(num_offline):
        offline(cluster, f"batch-{i}", 150, 40, 2.0 + 3.0 * i)
    cluster.run(until_ms=2_900)
    return cluster


def test_load_is_online_load() -> None:
    alone, beside = beside_a_batch(0).core, beside_a_batch(300).core
    assert beside.loads.offline_traffic.num_arrived == 300 and beside.loads.offline_traffic.num_ended > 0
    assert beside.loads.traffic.num_arrived == alone.loads.traffic.num_arrived
    assert beside.loads.traffic.traffic() == pytest.approx(alone.loads.traffic.traffic(), rel=0.05)
    for group_id in beside.groups:
        group = beside.groups[group_id]
        rates = beside.loads.monitor(group).rates()
        assert rates is not None and rates.arrived * group.limits.block_size < 2 * 12 * 33
        assert group.queues.queued_tokens() + group.queues.unfinished_tokens() <= 12 * 3
        load = beside.loads.outlook.load([group])
        assert len(load.running) <= 12 and not load.waiting, "a batch is none of the requests that forecasts play"


@pytest.mark.parametrize("num_offline", [0, 100])
def test_a_batch_keeps_no_drop_from_being_made(num_offline: int) -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=100, eager=True, seed=2, prefix_caching=False)
    for i in range(num_offline):
        offline(cluster, f"batch-{i}", 300, 4, 10.0 * i)
    for i in range(60):
        cluster.submit(f"chat-{i}", tokens(i, 20), 60, 500.0 + 4 * i, ignore_eos=True)
    cluster.run(until_ms=1_000)
    assert "drop" in kinds(cluster)


def test_what_the_group_holds_comes_free_as_each_class_stays() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=100, policy="recompute", prefix_caching=False)
    cluster.submit("chat", tokens(1, 40), 300)
    offline(cluster, "batch", 120, 250)
    cluster.run(until_ms=30)
    group = cluster.core.groups[0]
    online, batch = (group.blocks.num_used_by([name]) for name in ("chat", "batch"))
    assert online and batch and online + batch == group.blocks.num_used
    freed = GroupMonitor()._freed_per_s(group, None, Stays(2.0, 50.0), cluster.now)
    assert freed == pytest.approx(online / 2.0 + batch / 50.0)


def test_blocks_that_a_batchs_lines_share_are_counted_once() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=200, policy="recompute")
    for i in range(6):
        prefix = tokens(1, 120)
        cluster.submit(f"line-{i}", prefix + tokens(10 + i, 5), 60, 20.0 * i, service_class=ServiceClass.OFFLINE)
    cluster.run(until_ms=130)
    group = cluster.core.groups[0]
    names = [s.request_id for s in group.queues.holding_offline()]
    assert group.blocks.num_used_by(names) > group.blocks.num_used, "some are shared"
    assert offline_gauges(group).offline_blocks == group.blocks.num_used


@pytest.mark.parametrize("seed", part_of(range(8), range(4)))
def test_both_classes_under_faults_deaths_and_orders(seed: int) -> None:
    rng = random.Random(seed)
    num_workers = rng.choice([2, 3])
    cluster = FakeCluster(
        policy=rng.choice(["drop", "swap+migrate+drop", "swap", "migrate"]), num_workers=num_workers,
        full_blocks=rng.randint(20, 50), host_slots=500, eager=True, seed=seed, prefix_caching=rng.random() < 0.5,
        faults=Faults(apply=0.1, offer=0.05, load=0.1, move=0.05, step=0.002, swap=0.05, remote=0.05, budget=4),
    )
    for i in range(20 * num_workers):
        service_class = rng.choice([ServiceClass.ONLINE, ServiceClass.OFFLINE])
        cluster.submit(
            f"r{i}", tokens(i, rng.randint(1, 30)), rng.randint(1, 45), 0.4 * i, service_class=service_class,
            tenant=rng.choice(["", "a", "b"]),
        )
    for _ in range(3):
        cluster.order_at(rng.choice(["drop", "restore"]), rng.uniform(5, 300))
    cluster.kill_at(0, rng.uniform(10, 200))
    for worker in range(num_workers):
        cluster.restart_at(worker, 2_000.0 + worker)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_tokens_count_once_however_often_they_are_computed() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=20, policy="recompute", prefix_caching=False)
    for i in range(6):
        cluster.submit(f"chat-{i}", tokens(i, 20), 40, 0.1 * i)
        offline(cluster, f"batch-{i}", 30, 25, 0.1 * i)
    cluster.run()
    total = counters(cluster.core)
    assert total["recomputed_tokens"] > 0
    assert (total["online_prompt_tokens"], total["online_output_tokens"]) == (6 * 20, 6 * 40)
    assert (total["offline_prompt_tokens"], total["offline_output_tokens"]) == (6 * 30, 6 * 25)


def test_tokens_of_the_prefix_cache_are_not_computed() -> None:
    cluster = FakeCluster(num_workers=1, full_blocks=40)
    for i in range(2):
        cluster.submit(f"chat-{i}", tokens(7, 20), 5, 50.0 * i)
    cluster.run()
    total = counters(cluster.core)
    assert total["prefix_cache_hits"] > 0
    assert total["online_prompt_tokens"] == 2 * 20 - total["prefix_cache_hits"]
