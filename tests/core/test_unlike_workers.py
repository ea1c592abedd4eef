"""Workers of unlike capacity: plans that name members go by each one's own; who is dead or asleep is in none."""

from __future__ import annotations

import pytest
from fakes import BLOCK_SIZE, FakeCluster
from sleepers import is_asleep, sleep

from jettison.core.ladder.drop import DropRung
from jettison.core.ladder.dropplans import DropPlanner, block_bytes, kv_region_bytes
from jettison.core.requests import RequestState
from jettison.types import Request, SamplingParams


def unlike(*full_blocks: int, **options: object) -> FakeCluster:
    cluster = FakeCluster(num_workers=len(full_blocks), shard_bytes=1024, eager=True, **options)  # type: ignore[arg-type]
    for worker_id, num_blocks in enumerate(full_blocks):
        fake, worker = cluster.workers[worker_id], cluster.core.state.workers[worker_id]
        fake.full_blocks = fake.capacity = worker.full_blocks = num_blocks
        worker.ledger.resize(num_blocks)
    return cluster


def test_a_member_with_more_memory_keeps_more_layers() -> None:
    cluster = unlike(20, 80)
    cluster.order("drop")
    cluster.run(stop=lambda: bool(cluster.core.state.pipelines))
    (merged,) = cluster.core.groups.values()
    layers = {s.worker_id: len(s.layers) for s in merged.stages}
    assert layers == {0: 1, 1: 3}
    assert merged.blocks.capacity > 20 + 80 - 20, "the poorer one is not what all are taken for"


def test_a_request_that_outgrows_the_smaller_and_has_room_at_the_larger_fits_somewhere() -> None:
    """So no drop begins for it unweighed."""
    cluster = unlike(20, 80, policy="drop")
    small = cluster.core.groups[0]
    small.queues.enqueue(RequestState(Request("long", (1,) * 21 * BLOCK_SIZE, SamplingParams(max_tokens=9), 0), 0))
    rung = cluster.core.ladder.rung("drop")
    assert isinstance(rung, DropRung)
    assert not rung._fits_nowhere(small)
    large = cluster.core.groups[1]
    large.queues.enqueue(RequestState(Request("longest", (1,) * 81 * BLOCK_SIZE, SamplingParams(max_tokens=9), 0), 1))
    assert rung._fits_nowhere(large)


@pytest.mark.parametrize("full_blocks", [(20, 22), (20, 80), (20, 30, 40), (30, 60, 30)])
def test_the_longest_request_that_is_promised_runs(full_blocks: tuple[int, ...]) -> None:
    cluster = unlike(*full_blocks)
    longest = cluster.core.max_request_blocks() * BLOCK_SIZE
    assert longest > min(full_blocks) * BLOCK_SIZE
    for i in range(3):
        cluster.submit(f"long{i}", [1 + i] * (longest - 20), 20, i)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_any_member_may_be_given_a_request_so_the_poorest_is_promised_where_none_merge() -> None:
    assert unlike(20, 80, policy="recompute").core.max_request_blocks() == 20


def test_who_is_dead_or_asleep_is_in_no_plan() -> None:
    cluster = unlike(20, 30, 40, 50)
    state = cluster.core.state
    assert kv_region_bytes(state) == 140 * block_bytes(state)
    sleep(cluster, 3)
    cluster.run(stop=lambda: is_asleep(cluster, 3))
    cluster.kill(2)
    cluster.run(stop=lambda: not state.workers[2].alive)
    assert kv_region_bytes(state) == 50 * block_bytes(state)
    assert state.alive_workers() == (2, 20)


def test_the_planner_is_told_each_members_own_memory() -> None:
    cluster = unlike(20, 80)
    state = cluster.core.state
    planner = DropPlanner(state, cluster.core.loads)
    budgets = [planner.candidate(group).budgets for group in cluster.core.groups.values()]
    assert budgets == [(num * block_bytes(state) + state.shape.parameter_bytes,) for num in (20, 80)]
