"""Several rungs at once: drops begin although KV is on the host, on its way there or on its way to another group.

With pretend KV that every step checks: what a stored request is given back is what was stored, wherever its group runs.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fakes import MS, SHARD_BYTES, FakeCluster, Faults

from jettison.core.moving.hostedkv import HostedPhase
from jettison.core.pending import TransferPurpose
from jettison.core.ports import CancelTransfer, SendKV, WorkerLost
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.group import Group
from jettison.core.serving.holds import GroupHold
from longrun import part_of

TOGETHER = "swap+migrate+drop"


def crowd(cluster: FakeCluster, num: int, *, prompt: int = 12, output: int = 60, every_ms: float = 0.5) -> None:
    rng = random.Random(num)
    for i in range(num):
        tokens = [rng.randrange(1, 60) for _ in range(prompt + i % 5)]
        cluster.submit(f"r{i}", tokens, output + i % 7, every_ms * i)


def expect_all_well(cluster: FakeCluster) -> None:
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    for pool in cluster.core.hosted.swap.pools.values():
        assert pool.num_free == pool.num_slots


def stored(cluster: FakeCluster) -> list[str]:
    return [r for group in cluster.core.groups.values() for r in group.queues.stored]


def recomputed(cluster: FakeCluster, request_id: str, before: int) -> bool:
    return cluster.core.state.requests[request_id].num_preemptions > before


def swapping(**options: object) -> FakeCluster:
    """Two instances that have stored requests, and a queue; drops are ordered by hand."""
    cluster = FakeCluster(policy="swap", full_blocks=40, host_slots=500, prefix_caching=False, **options)  # type: ignore[arg-type]
    crowd(cluster, 24)
    cluster.run(stop=lambda: len(stored(cluster)) >= 3)
    return cluster


def test_a_drop_begins_at_once_although_requests_are_stored() -> None:
    cluster = swapping()
    before = set(stored(cluster))
    cluster.order("drop")
    assert len(cluster.core.merges) == 1
    cluster.run(stop=lambda: any(len(g.stages) == 2 for g in cluster.core.groups.values()))
    (merged,) = cluster.core.groups.values()
    assert before & set(merged.queues.stored), "they have gone along"
    assert cluster.core.state.counters.hosted_carried >= len(before & set(merged.queues.stored))
    cluster.run()
    expect_all_well(cluster)


def test_a_stored_request_runs_on_in_the_pipeline_from_the_host_pools_of_others() -> None:
    cluster = swapping()
    cluster.order("drop")
    cluster.run(stop=lambda: bool(cluster.core.state.pipelines))
    (merged,) = cluster.core.groups.values()
    counts = {r: s.num_preemptions for r, s in merged.queues.stored.items()}
    assert counts
    cluster.sent.clear()
    cluster.run(stop=lambda: all(r not in merged.queues.stored and r not in merged.queues.moving for r in counts))
    brought = [move for move in cluster.sent if move.from_host]
    assert brought and all(move.src != move.dst for move in brought), "a stage's part came from another's pool"
    back = [r for r in counts if r in cluster.core.state.requests]
    assert back and not any(recomputed(cluster, r, counts[r]) for r in back)
    cluster.run()
    expect_all_well(cluster)


def test_a_stored_request_runs_on_after_the_restore() -> None:
    cluster = swapping()
    cluster.order("drop")
    cluster.run(stop=lambda: bool(cluster.core.state.pipelines))
    (merged,) = cluster.core.groups.values()
    counts = {r: s.num_preemptions for r, s in merged.queues.stored.items()}
    cluster.core.ladder.rung("swap").look = lambda moment, now_ns: ()  # type: ignore[method-assign]  # kept on the host
    queues = merged.queues
    cluster.run(stop=lambda: merged.blocks.num_used <= 30 and not queues.waiting and not cluster.core.in_transition)
    assert merged.queues.stored.keys() >= counts.keys() and merged.queues.running
    cluster.order("restore")
    cluster.run(stop=lambda: not cluster.core.state.pipelines)
    assert {r for g in cluster.core.groups.values() for r in g.queues.stored} >= counts.keys(), "they have gone along"
    del cluster.core.ladder.rung("swap").look
    for group in cluster.core.groups.values():
        group.touch()
    cluster.run(stop=lambda: not stored(cluster))
    back = [r for r in counts if r in cluster.core.state.requests]
    assert back and not any(recomputed(cluster, r, counts[r]) for r in back)
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("phase", [HostedPhase.OUT, HostedPhase.IN])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_on_its_way_gives_way_at_once(phase: HostedPhase, seed: int) -> None:
    cluster = FakeCluster(
        policy="swap", full_blocks=40, host_slots=500, swap_budget=1, prefix_caching=False, seed=seed
    )
    crowd(cluster, 24)
    hosted = cluster.core.hosted.swap

    def on_the_way() -> bool:
        return any(hosted.of(g, phase) and any(e.state.transfers for e in hosted.of(g, phase))
                   for g in cluster.core.groups.values())

    cluster.run(stop=on_the_way)
    (entry, *_) = [e for g in cluster.core.groups.values() for e in hosted.of(g, phase)]
    cluster.order("drop")
    assert len(cluster.core.merges) == 1, "at once"
    expected = Phase.RUNNING if phase is HostedPhase.OUT else Phase.STORED
    assert entry.state.phase is expected
    assert cluster.core.state.counters.hosted_brought_back >= 1
    cluster.run()
    expect_all_well(cluster)


def test_a_drop_begins_within_the_same_step_as_without_the_other_rungs() -> None:
    """The same requests with and without a host pool full of others' KV: the drop is decided and executed alike."""
    times: list[int] = []
    for policy in ("recompute", "swap"):
        cluster = FakeCluster(policy=policy, full_blocks=40, host_slots=500, prefix_caching=False)
        crowd(cluster, 24)
        cluster.run(until_ms=60)
        began_ns, steps = cluster.now, cluster.num_steps
        cluster.order("drop")
        cluster.run(stop=lambda: bool(cluster.core.state.pipelines))  # noqa: B023
        times.append(cluster.num_steps - steps)
        assert cluster.now > began_ns
        cluster.run()
        expect_all_well(cluster)
    assert abs(times[0] - times[1]) <= 1, "steps that ended between the decision and the merged group"


@pytest.mark.parametrize("seed", part_of(range(14), range(5)))
def test_all_rungs_under_faults_deaths_and_orders(seed: int) -> None:
    rng = random.Random(seed)
    num_workers = rng.choice([2, 3, 4])
    cluster = FakeCluster(
        policy=rng.choice([TOGETHER, "swap+drop", "migrate+drop", "swap+migrate"]), num_workers=num_workers,
        full_blocks=rng.randint(24, 50), host_slots=rng.choice([16, 500]), swap_budget=rng.choice([1, 4, None]),
        prefix_caching=rng.random() < 0.5, eager=True, seed=seed, migrate_threshold=rng.choice([3.0, 8.0]),
        exchange=rng.choice(["auto", "live", "transfer"]),
        faults=Faults(apply=0.1, offer=0.05, load=0.1, move=0.05, step=0.002, swap=0.05, remote=0.05, budget=5),
    )
    crowd(cluster, 16 * num_workers, output=rng.choice([30, 70]), every_ms=rng.choice([0.3, 2.0]))
    for _ in range(4):
        cluster.order_at(rng.choice(["drop", "restore"]), rng.uniform(5, 400))
    if rng.random() < 0.5:
        worker = rng.randrange(num_workers)
        cluster.kill_at(worker, rng.uniform(10, 200))
        cluster.restart_at(worker, rng.uniform(250, 600))
    for i in range(0, 16 * num_workers, 7):
        cluster.cancel(f"r{i}", rng.uniform(0, 300))
    for worker in range(num_workers):
        cluster.restart_at(worker, 3_000.0 + worker)
    cluster.run()
    expect_all_well(cluster)


def pipeline_with_stored(policy: str, seed: int = 0, num_stored: int = 4) -> tuple[FakeCluster, Group]:
    """A merged group of which some requests are stored, and all but three others have left."""
    cluster = FakeCluster(
        policy=policy, full_blocks=60, host_slots=500, prefix_caching=False, seed=seed, swap_budget=1,
        auto_restore=False,
    )
    for worker in cluster.workers.values():
        worker.spoilt = lambda: True
    crowd(cluster, 60, output=140, every_ms=0.2)
    cluster.run(until_ms=20)
    cluster.order("drop")
    cluster.run(stop=lambda: bool(cluster.core.state.pipelines) and not cluster.core.merges)
    (merged,) = cluster.core.state.pipelines.values()
    cluster.run(stop=lambda: len(merged.queues.stored) >= num_stored)
    for request_id in [*list(merged.queues.running)[:-3], *(s.request_id for s in merged.queues.waiting)]:
        cluster.cancel(request_id, cluster.now / 1e6 + 0.01)
    return cluster, merged


@pytest.mark.parametrize("policy", ["swap", "swap+drop"])
@pytest.mark.parametrize("seed", part_of(range(3), (0,)))
def test_a_restore_over_kv_that_comes_back_lets_running_requests_grow(policy: str, seed: int) -> None:
    """What was on its way back gives way, so nothing will free the blocks that are missing: some are recomputed."""
    cluster, merged = pipeline_with_stored(policy, seed)
    cluster.run(stop=lambda: merged.holds_preemption and bool(cluster.core.hosted.swap.of(merged, HostedPhase.IN)))
    cluster.order("restore")
    (restore,) = cluster.core.restores
    rng = random.Random(seed)
    for i in range(16):
        prompt = [rng.randrange(1, 60) for _ in range(12)]
        cluster.submit(f"n{i}", prompt, 200, cluster.now / 1e6 + 0.3 * i)
    cluster.run(stop=lambda: restore.is_over)
    assert restore.is_over
    cluster.run()
    expect_all_well(cluster)


def test_a_restore_lets_in_a_request_for_which_stored_ones_leave_no_room() -> None:
    """They return when it is over, and it is not over while a request waits."""
    cluster, merged = pipeline_with_stored("swap", num_stored=8)
    cluster.run(stop=lambda: not merged.queues.waiting)
    cluster.order("restore")
    (restore,) = cluster.core.restores
    cluster.submit("long", [1] * 220, 6, cluster.now / 1e6 + 0.1)
    cluster.run(stop=lambda: restore.is_over)
    assert restore.is_over
    cluster.run()
    expect_all_well(cluster)


def test_a_swap_rung_that_goes_leaves_nothing_set_on_groups() -> None:
    cluster, merged = pipeline_with_stored("swap+drop")
    cluster.run()
    merged = next(iter(cluster.core.groups.values()))
    merged.hold("swap", GroupHold.PREEMPTION)
    merged.blocks.reserve_everywhere("swap", 3)
    cluster.core.reconfigure(replace(cluster.core.params, rungs=("drop", "restore", "scale", "shed")))
    assert not merged.holds_preemption and not merged.blocks.landing


def turned_back(exchange: str, seed: int) -> tuple[FakeCluster, list[RequestState]]:
    """A pipeline was just formed, and requests in it turned back from the host while a copy engine copied pieces."""
    cluster = FakeCluster(
        policy="swap", full_blocks=40, host_slots=500, prefix_caching=False, swap_budget=4, seed=seed,
        exchange=exchange,
    )
    copied, entries = cluster._copy_here, cluster.core.hosted.swap.entries

    def late(piece: SendKV) -> None:
        cluster.at(cluster.now + 20 * MS, copied(piece))

    cluster._copy_here = late  # type: ignore[method-assign,assignment]
    crowd(cluster, 24)
    cluster.run(stop=lambda: any(e.phase is HostedPhase.OUT and e.state.transfers for e in entries.values()))
    cluster.order("drop")
    leaving = [entry.state for entry in entries.values() if entry.phase is HostedPhase.LEAVING]
    cluster.run(stop=lambda: bool(cluster.core.state.pipelines))
    assert any(state.transfers for state in leaving), "a piece outlasts the change of layouts"
    return cluster, leaving


@pytest.mark.parametrize("exchange", ["auto", "recompute"])
@pytest.mark.parametrize("seed", range(4))
def test_a_drop_over_requests_that_have_just_turned_back_from_the_host(exchange: str, seed: int) -> None:
    """They run on meanwhile: none is computed again before the pieces have ended."""
    cluster, _ = turned_back(exchange, seed)
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("seed", range(4))
def test_a_death_calls_each_transfer_of_such_a_request_off_once(seed: int) -> None:
    """Pieces of the host's and the exchange's."""
    cluster, leaving = turned_back("transfer", seed)
    core = cluster.core

    def purposes(state: RequestState) -> set[TransferPurpose]:
        return {core.state.book.transfers[i].purpose for i in state.transfers}

    assert any(purposes(state) >= {TransferPurpose.HOST, TransferPurpose.EXCHANGE} for state in leaving)
    dead = core.merges[0].worker_ids[seed % 2]
    actions = core.handle(WorkerLost(dead), cluster.now)
    called_off = [action for action in actions if isinstance(action, CancelTransfer)]
    assert called_off and len(set(called_off)) == len(called_off)


def too_large_apart() -> FakeCluster:
    """Two instances, just split, and on the host a request that neither could hold."""
    cluster = FakeCluster(
        policy="swap+drop", full_blocks=20, host_slots=500, shard_bytes=SHARD_BYTES // 16, max_tokens=64,
        prefix_caching=False, auto_restore=False,
    )
    rng = random.Random(1)
    cluster.order("drop")
    cluster.run(stop=lambda: bool(cluster.core.state.pipelines) and not cluster.core.in_transition)
    begun_ms = cluster.now / MS
    for i in range(7):
        cluster.submit(f"r{i}", [rng.randrange(1, 60) for _ in range(12)], 30, begun_ms, ignore_eos=True)
    prompt = [rng.randrange(1, 60) for _ in range(100)]
    cluster.submit("long", prompt, 40, begun_ms + 0.1, ignore_eos=True)
    cluster.run(stop=lambda: "long" in stored(cluster))
    cluster.order("restore")
    cluster.run(stop=lambda: any(r.kind == "split" for r in cluster.records))
    assert cluster.core.state.counters.hosted_carried
    return cluster


def test_a_stored_request_that_no_home_can_hold_waits_for_the_next_pipeline() -> None:
    """Others pass it meanwhile."""
    cluster = too_large_apart()
    cluster.run(stop=lambda: not cluster.core.in_transition)
    cluster.run(until_ms=cluster.now / MS + 200)
    (home,) = [g for g in cluster.core.groups.values() if g.queues.has_waiting]
    (long,) = home.queues.waiting
    assert long.request_id == "long" and not home.blocks.landing and home.blocks.num_free == home.blocks.capacity
    for i in range(8):
        cluster.submit(f"n{i}", [1 + i] * 12, 30, cluster.now / MS + 0.1, ignore_eos=True)
    cluster.run(stop=lambda: all(f"n{i}" in cluster.ends for i in range(8)))
    assert "long" not in cluster.ends
    cluster.order("drop")
    cluster.run()
    expect_all_well(cluster)
