"""What a question to the forecast is asked about: each worker once, only memory that takes requests, all that wait."""

from __future__ import annotations

from fakes import FakeCluster
from sleepers import crowd, sleep

from jettison.core.ladder.forecasts import Question
from jettison.core.ladder.rung import Means
from jettison.core.moving.restoring import RestorePhase
from jettison.core.params import AwakeParams


def means_of(cluster: FakeCluster) -> Means:
    return cluster.core.ladder.rung("restore").means


def asked(cluster: FakeCluster, apart: tuple[int, ...] = ()) -> Question:
    question = Question.of(means_of(cluster), cluster.now, apart)
    assert question is not None
    return question


def all_tokens(cluster: FakeCluster, *worker_ids: int) -> float:
    return means_of(cluster).loads.outlook.apart_tokens(worker_ids)


def returning(num_workers: int) -> FakeCluster:
    """A pair has been taken apart, and its requests are on their way home while more come."""
    cluster = FakeCluster(num_workers=num_workers, full_blocks=90, auto_restore=False)
    crowd(cluster, 8 * num_workers)
    cluster.run(stop=lambda: cluster.now > 12e6)
    cluster.order("drop")
    cluster.run(stop=lambda: any(len(g.stages) > 1 for g in cluster.core.groups.values()) and not cluster.core.merges)
    cluster.order("restore")
    cluster.run(stop=lambda: any(r.phase is RestorePhase.RETURN for r in cluster.core.restores))
    assert any(r.phase is RestorePhase.RETURN for r in cluster.core.restores)
    return cluster


def test_a_pipeline_whose_requests_go_home_is_no_memory_beside_its_members() -> None:
    for num_workers in (2, 4):
        cluster = returning(num_workers)
        question, traffic = asked(cluster), means_of(cluster).loads.traffic
        assert sum(question._lengths.values()) == num_workers, "each worker serves once"
        assert question._tokens == all_tokens(cluster, *cluster.workers)
        assert question._load.arrivals.lately_per_s == traffic.rates()[0], "what comes, comes once"
        pipeline = cluster.core.restores[0].group
        assert pipeline.queues.running and len(question._load.running) >= len(pipeline.queues.running)


def test_a_restore_that_is_asked_about_as_if_over_gets_no_more_than_all_that_comes() -> None:
    cluster = returning(2)
    question, traffic = asked(cluster, (0, 1)), means_of(cluster).loads.traffic
    assert question._load.arrivals.lately_per_s == traffic.rates()[0]
    assert question._tokens == all_tokens(cluster, 0, 1)


def test_an_instance_that_leaves_for_sleep_is_no_memory_for_those_that_wait() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=24, shard_bytes=256, awake=AwakeParams(), auto_restore=False)
    crowd(cluster, 60)
    cluster.run(stop=lambda: cluster.now > 30e6)
    whole = asked(cluster)
    sleep(cluster, 1)
    assert cluster.core.moves.leavings
    left = asked(cluster)
    assert left._tokens == all_tokens(cluster, 0) < whole._tokens
    assert left._load.arrivals.lately_per_s == whole._load.arrivals.lately_per_s, "it all goes to the other"
    stays = next(g for g in cluster.core.groups.values() if g.worker_ids == (0,))
    assert len(left._load.running) == len(stays.queues.running)


def test_requests_in_a_host_pool_wait_for_memory_in_the_forecast() -> None:
    cluster = FakeCluster(policy="swap", num_workers=1, full_blocks=40, swap_budget=3, host_slots=500)
    crowd(cluster, 60)
    (group,) = cluster.core.groups.values()
    cluster.run(stop=lambda: any(s.num_output > 1 for s in group.queues.stored.values()))
    stored = group.queues.stored
    load = cluster.core.loads.outlook.load([group])
    assert stored and len(load.waiting) == len(group.queues.waiting) + len(stored)
    most_kept = max(s.num_computed for s in stored.values())
    assert any(seen.num_tokens - seen.left_prompt == most_kept for seen in load.waiting), "its KV is not computed again"
