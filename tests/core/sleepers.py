"""Loads, orders to sleep, and records of tests with workers that sleep."""

from __future__ import annotations

import random

from fakes import MS, FakeCluster

from jettison.core.ports import Record


def crowd(cluster: FakeCluster, num: int, *, first: int = 0, at_ms: float = 0.0) -> None:
    rng = random.Random(first)
    for i in range(first, first + num):
        cluster.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(12)], 40, at_ms + 0.4 * i)


def sleep(cluster: FakeCluster, *worker_ids: int, level: int = 2) -> None:
    cluster.carry_out(cluster.core.request_sleep(worker_ids, level, cluster.now))


def is_asleep(cluster: FakeCluster, worker_id: int) -> bool:
    return cluster.core.state.workers[worker_id].is_asleep and cluster.core.sleepers.is_idle


def of_kind(cluster: FakeCluster, kind: str) -> list[Record]:
    return [r for r in cluster.records if r.kind == kind]


def run_to(cluster: FakeCluster, at_ms: float) -> None:
    """Ticks included, also where nothing is left to do."""
    cluster.at(int(at_ms * MS), lambda: None)
    cluster.run(stop=lambda: cluster.now >= at_ms * MS or not cluster.heap or cluster.heap[0][0] > at_ms * MS)
