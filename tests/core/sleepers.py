"""Loads, and orders to sleep, of tests with workers that sleep."""

from __future__ import annotations

import random

from fakes import FakeCluster


def crowd(cluster: FakeCluster, num: int, *, first: int = 0, at_ms: float = 0.0) -> None:
    rng = random.Random(first)
    for i in range(first, first + num):
        cluster.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(12)], 40, at_ms + 0.4 * i)


def sleep(cluster: FakeCluster, *worker_ids: int, level: int = 2) -> None:
    cluster.carry_out(cluster.core.request_sleep(worker_ids, level, cluster.now))


def is_asleep(cluster: FakeCluster, worker_id: int) -> bool:
    return cluster.core.state.workers[worker_id].is_asleep and cluster.core.sleepers.is_idle
