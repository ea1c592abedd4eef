"""The pipeline baseline: pairs from the start, more KV for good, never restored."""

from __future__ import annotations

import random

import pytest
from fakes import FakeCluster

from jettison.core import ports
from jettison.core.founding import initial_groups


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_pairs_serve_and_stay(num_workers: int) -> None:
    cluster = FakeCluster(policy="pipeline", num_workers=num_workers, full_blocks=24)
    sizes = [len(g.stages) for g in cluster.core.groups.values()]
    assert sizes == [2] * (num_workers // 2) + [1] * (num_workers % 2)
    paired = range(num_workers // 2 * 2)
    assert all(cluster.core.state.workers[w].ledger.capacity > 24 for w in paired)
    rng = random.Random(1)
    for i in range(20):
        cluster.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(12)], 40, i)
    cluster.order_at("restore", 30)
    cluster.order_at("drop", 40)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert [len(g.stages) for g in cluster.core.groups.values()] == sizes
    assert not [r for r in cluster.records if r.kind.startswith(("drop", "restore"))]


def test_every_stage_has_its_layers_once() -> None:
    cluster = FakeCluster(num_workers=5, num_layers=5)
    groups = initial_groups(range(5), cluster.shape, static_pipeline=True)
    assert [w for g in groups for w in [s.worker_id for s in g]] == [0, 1, 2, 3, 4]
    for stages in groups:
        layers = [layer for s in stages for layer in s.layers.layers()]
        assert layers == list(range(5))


def test_word_of_a_chunk_before_that_of_the_one_it_follows_makes_the_request_computed_again() -> None:
    cluster = FakeCluster(policy="pipeline", max_tokens=8)
    (group,) = cluster.core.groups.values()
    cluster.submit("a", [1] * 40, 5)
    cluster.run(stop=lambda: len(group.in_flight) == 2)
    first, second = group.in_flight
    cluster.carry_out(cluster.core.handle(ports.StepCompleted(second, [], {}, 1), cluster.now))
    assert [(r.kind, dict(r.fields)) for r in cluster.records] == [
        ("chunk_overtaken", {"group": group.group_id, "step": second, "request": "a"})
    ]
    state = cluster.core.state.requests["a"]
    assert state.recompute and state.num_computed == 0
    failed = ports.StepFailed(first, "the stage before was not heard of", recompute=True)
    cluster.carry_out(cluster.core.handle(failed, cluster.now))
    assert group.counters.num_preemptions == 1
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
