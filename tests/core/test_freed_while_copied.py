"""A request that is freed while some of its blocks are on their way to the host: it keeps them, and comes back with
them when they are there, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster, Faults
from test_checkpoints import Evicted, batch, evict, expect_all_well, harvesting, stored

from jettison.core.ladder.free import is_checkpointed, is_preemptible
from jettison.core.ladder.rung import Moment
from jettison.core.moving.hostedkv import HostedKV, HostedPhase
from jettison.core.ports import Action
from jettison.core.requests import Phase, RequestState


def freed_while_copied(**options: object) -> tuple[FakeCluster, Evicted, HostedKV]:
    """A cluster, a request of it that was just freed, and its entry, which waits for pieces."""
    cluster = harvesting(prefix_caching=False, **options)
    batch(cluster, 5)
    checkpoints = cluster.core.checkpoints

    def is_on_its_way(state: RequestState) -> bool:
        kept = state.num_computed // BLOCK_SIZE - checkpoints.num_lacking_blocks(state)
        return kept > checkpoints.num_written_blocks(state)

    evicted = evict(cluster, is_on_its_way)
    entry = cluster.core.hosted.store.entry(evicted.state)
    assert entry is not None and entry.phase is HostedPhase.STORED and entry.awaits_pieces
    return cluster, evicted, entry


def test_it_keeps_what_is_on_its_way_and_comes_back_when_that_is_there() -> None:
    cluster, evicted, entry = freed_while_copied()
    state = evicted.state
    assert state.num_computed > evicted.num_kept, "more than what was written at that moment"
    assert entry.num_blocks * BLOCK_SIZE == state.num_computed
    lost = cluster.core.state.counters.freed_recomputed_tokens
    assert lost == evicted.num_computed - state.num_computed
    cluster.run(stop=lambda: state.phase is not Phase.STORED)
    assert not entry.awaits_pieces and entry.phase is HostedPhase.IN
    cluster.run(stop=lambda: state.phase is Phase.RUNNING)
    assert state.num_computed == entry.num_blocks * BLOCK_SIZE, "nothing more was lost"
    cluster.run()
    expect_all_well(cluster)


def test_it_is_computed_again_where_a_piece_fails() -> None:
    cluster, evicted, _ = freed_while_copied()
    cluster.faults = Faults(swap=1.0, budget=8)
    cluster.run(stop=lambda: evicted.state.phase is not Phase.STORED)
    assert cluster.num_faults and evicted.state.num_computed == 0
    assert cluster.core.state.counters.hosted_given_up == 1
    cluster.faults.budget = 0
    cluster.run()
    expect_all_well(cluster)


def test_it_may_be_cancelled() -> None:
    cluster, evicted, _ = freed_while_copied()
    worker = cluster.core.state.workers[0]
    assert worker.copying
    cluster.cancel(evicted.state.request_id, cluster.now / MS)
    cluster.run(stop=lambda: evicted.state.phase is Phase.FINISHED)
    assert worker.copying, "the piece holds its blocks and slots by itself"
    cluster.run()
    expect_all_well(cluster)


def drop(cluster: FakeCluster) -> None:
    cluster.order("drop")


def die(cluster: FakeCluster) -> None:
    worker_id = next(w for w, worker in cluster.core.state.workers.items() if worker.copying)
    cluster.kill(worker_id)
    cluster.restart_at(worker_id, cluster.now / MS + 50)


def drop_and_restore(cluster: FakeCluster) -> None:
    cluster.order("drop")
    cluster.order_at("restore", cluster.now / MS + 40)


@pytest.mark.parametrize("happens", [drop, drop_and_restore, die])
@pytest.mark.parametrize("seed", range(3))
def test_it_outlives_what_happens_to_its_group(happens: Callable[[FakeCluster], None], seed: int) -> None:
    cluster, evicted, entry = freed_while_copied(policy="drop", num_workers=2, full_blocks=60, seed=seed)
    happens(cluster)
    assert evicted.state.request_id in stored(cluster) or happens is die
    cluster.run(stop=lambda: evicted.state.phase is not Phase.STORED)
    assert happens is die or not entry.awaits_pieces
    cluster.run()
    expect_all_well(cluster)
    assert cluster.num_deaths == (happens is die)


def test_online_requests_take_the_blocks_of_those_that_lose_least() -> None:
    """The newest is in the midst of a long prompt, of which the host has only the beginning; it stays."""
    cluster = harvesting(prefix_caching=False, max_tokens=32)
    batch(cluster, 4, prompt=60)
    core, (group,) = cluster.core, cluster.core.groups.values()
    core.ladder.rung("harvest")._budget_blocks = lambda group: 2  # type: ignore[attr-defined]
    free, climb, found = core.ladder.rung("free"), core.ladder.climb, list[list[int]]()

    def look_at_victims(moment: Moment, now_ns: int) -> list[Action]:
        actions = climb(moment, now_ns)
        ready = [s for s in group.queues.running_offline() if is_preemptible(s) and is_checkpointed(s)]
        lacking = {s.request_id: core.checkpoints.num_lacking_blocks(s) for s in ready}
        if moment is Moment.BEFORE_STEPS and ready and lacking[ready[0].request_id] > min(lacking.values()):
            found.append([lacking[r] for r in free._victims(group, 10**6)])  # type: ignore[attr-defined]
            least = next(r for r, num in lacking.items() if num == min(lacking.values()))
            assert free._victims(group, 1) == (least,), "the newest of those"  # type: ignore[attr-defined]
        return actions

    core.ladder.climb = look_at_victims  # type: ignore[method-assign]
    cluster.run()
    assert found and all(lacking == sorted(lacking) for lacking in found)
    expect_all_well(cluster)
