"""Online and offline requests: what an offline one waits for is no overload, forbids no restore and stops nobody."""

from __future__ import annotations

import random

import pytest
from fakes import FakeCluster, Faults

from jettison.core.requests import RequestState
from jettison.types import ServiceClass


def tokens(seed: int, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 60) for _ in range(num)]


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
    cluster.submit("chat-0", tokens(1, 20), 40)
    offline(cluster, "batch", 20, 40)
    cluster.submit("chat-1", tokens(2, 20), 40, 1.0)  # the newest, and yet not the victim
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
    assert cluster.core.why_refuse("", 4, 0, cluster.now) is None


@pytest.mark.parametrize("seed", range(8))
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
