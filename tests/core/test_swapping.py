"""The swap baseline: KV goes to the host and comes back, piece by piece; with pretend KV that every step checks."""

from __future__ import annotations

import random

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster, Faults

from jettison.core.moving.hostedkv import HostedPhase
from jettison.core.ports import RunStep, SendKV, TransferEnded
from jettison.core.serving.holds import GroupHold
from jettison.types import ServiceClass


def burst(cluster: FakeCluster, num: int, *, prompt: int = 12, output: int = 60) -> None:
    rng = random.Random(num)
    for i in range(num):
        tokens = [rng.randrange(1, 60) for _ in range(prompt + i % 5)]
        cluster.submit(f"r{i}", tokens, output + i % 7, 0.5 * i)


def burst_at(cluster: FakeCluster, number: int) -> None:
    for i in range(20):
        cluster.submit(f"b{number}-{i}", [1 + (i + j) % 50 for j in range(12)], 60, cluster.now / MS + 0.5 * i)


def recomputed(cluster: FakeCluster) -> int:
    return sum(g.counters.num_recomputed_tokens for g in cluster.core.groups.values())


def expect_all_well(cluster: FakeCluster) -> None:
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    for pool in cluster.core.hosted.swap.pools.values():
        assert pool.num_free == pool.num_slots


@pytest.mark.parametrize("budget", [1, 3, 1000, None])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_does_not_fit_goes_to_the_host_and_nothing_is_computed_twice(budget: int | None, num_workers: int) -> None:
    cluster = FakeCluster(policy="swap", num_workers=num_workers, full_blocks=40, swap_budget=budget, host_slots=500)
    burst(cluster, 10 * num_workers)
    cluster.run()
    expect_all_well(cluster)
    counters = cluster.core.state.counters
    assert counters.swapped_out_blocks > 0 and counters.swapped_in_blocks == counters.swapped_out_blocks
    assert sum(len(s.src_blocks) for s in cluster.swapped if s.from_host) == counters.swapped_in_blocks
    assert recomputed(cluster) == 0


def test_a_step_carries_at_most_the_budget_in_and_out() -> None:
    cluster = FakeCluster(policy="swap", num_workers=1, full_blocks=40, swap_budget=3, host_slots=500)
    burst(cluster, 12)
    per_step: dict[int, int] = {}
    group = cluster.core.groups[0]
    original = cluster.core.handle

    def handle(event: object, now_ns: int) -> list[object]:
        actions = original(event, now_ns)  # type: ignore[arg-type]
        carried = sum(len(a.src_blocks) for a in actions if isinstance(a, SendKV))
        if group.in_flight:
            per_step[group.counters.num_steps] = per_step.get(group.counters.num_steps, 0) + carried
        return actions  # type: ignore[return-value]

    cluster.core.handle = handle  # type: ignore[method-assign,assignment]
    cluster.run()
    expect_all_well(cluster)
    assert max(per_step.values()) == 3


def test_no_online_request_waits_for_offline_ones_and_these_stay_out_while_none_is_let_in() -> None:
    cluster = FakeCluster(
        policy="swap", num_workers=1, full_blocks=40, host_slots=500, offline="harvest", prefix_caching=False)
    burst(cluster, 3)
    for i in range(3):
        cluster.submit(f"batch-{i}", [1 + i] * 12, 80, 5.0, service_class=ServiceClass.OFFLINE, ignore_eos=True)
    swap, group = cluster.core.hosted.swap, cluster.core.groups[0]

    def away() -> set[str]:
        return {e.state.request_id for e in swap.of(group, HostedPhase.STORED) if e.state.is_offline}

    cluster.run(stop=lambda: bool(away()))
    assert away() and not any(e.state.is_offline for e in swap.owed(group))
    group.hold("test", GroupHold.OFFLINE)
    before = away()
    cluster.run(stop=lambda: all(s.is_offline for s in cluster.core.state.requests.values()))
    assert before <= away()
    group.release("test", GroupHold.OFFLINE)
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize(("num_workers", "policy"), [(1, "swap"), (2, "swap"), (2, "swap+drop"), (4, "swap+drop")])
def test_what_is_copied_behind_a_step_is_in_the_work_of_the_next(num_workers: int, policy: str) -> None:
    """Told of once, and before that step is observed; what has been copied by then delays nothing."""
    cluster = FakeCluster(policy=policy, num_workers=num_workers, full_blocks=40, swap_budget=3, host_slots=500)
    burst(cluster, 12 * num_workers)
    core, behind = cluster.core, dict[int, dict[int, int]]()
    seen: dict[int, int] = {}
    original = core.handle

    def handle(event: object, now_ns: int) -> list[object]:
        if isinstance(event, TransferEnded):
            for pieces in behind.values():
                pieces.pop(event.transfer_id, None)
        actions = original(event, now_ns)  # type: ignore[arg-type]
        for action in actions:
            if isinstance(action, RunStep):
                flight = core.groups[action.group_id].in_flight[action.step_id]
                seen[action.step_id] = flight.work.num_copied_bytes
                assert seen[action.step_id] == sum(behind.pop(action.group_id, {}).values())
            elif isinstance(action, SendKV) and action.src == action.dst:
                pending = core.state.book.transfers[action.transfer_id]
                assert pending.request is not None
                behind.setdefault(pending.request.group_id, {})[action.transfer_id] = pending.num_bytes
        return actions  # type: ignore[return-value]

    core.handle = handle  # type: ignore[method-assign,assignment]
    cluster.run()
    expect_all_well(cluster)
    assert sum(seen.values()) > 0


def test_the_budget_is_the_inverse_of_predicting() -> None:
    cluster = FakeCluster(policy="swap", num_workers=1, full_blocks=40, swap_budget=None, host_slots=10**6)
    burst(cluster, 6)
    cluster.run(until_ms=60)
    core, (group,) = cluster.core, cluster.core.groups.values()
    (flight,) = group.in_flight.values()
    block_bytes = core.state.shape.num_layers * core.state.shape.block_bytes_per_layer(BLOCK_SIZE)

    def step_s(num_blocks: int) -> float:
        seconds = core.state.predictor.predict_s(flight.work._replace(num_copied_bytes=num_blocks * block_bytes))
        assert seconds is not None
        return seconds

    num_blocks = core.loads.blocks_beside_step(group, 0.25)
    assert num_blocks is not None and 0 < num_blocks < 10**6
    assert step_s(num_blocks) <= 1.25 * step_s(0) < step_s(num_blocks + 1)


def test_nothing_is_kept_of_groups_that_are_no_more() -> None:
    cluster = FakeCluster(policy="swap+drop", num_workers=2, full_blocks=40, swap_budget=3, host_slots=500)
    for number in range(4):
        burst_at(cluster, number)
        cluster.run()
        cluster.order("drop")
        cluster.run()
        cluster.order("restore")
        cluster.run()
    assert cluster.core.state.counters.swapped_out_blocks and cluster.core.state.next_group_id > 10
    assert len(cluster.core.hosted.swap._allowances) <= 3


def test_blocks_are_not_reused_before_their_copy_has_ended() -> None:
    """The pretend worker copies late; a block given to another request meanwhile would carry the wrong tokens."""
    cluster = FakeCluster(policy="swap", num_workers=1, full_blocks=30, swap_budget=1, host_slots=500, seed=4)
    cluster.worker_free_at[0] = 0
    burst(cluster, 9, output=80)
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("host_slots", [0, 2, 9])
def test_a_victim_that_does_not_fit_the_pool_is_recomputed(host_slots: int) -> None:
    cluster = FakeCluster(policy="swap", num_workers=1, full_blocks=40, host_slots=host_slots)
    burst(cluster, 12)
    cluster.run()
    expect_all_well(cluster)
    assert recomputed(cluster) > 0
    if host_slots != 2:
        assert (cluster.core.state.counters.swapped_out_blocks > 0) == (host_slots > 0)


@pytest.mark.parametrize("seed", range(6))
def test_cancels_at_any_moment_give_everything_back(seed: int) -> None:
    cluster = FakeCluster(policy="swap", num_workers=2, full_blocks=36, swap_budget=1 + seed % 3, seed=seed)
    burst(cluster, 20)
    rng = random.Random(seed)
    for i in range(0, 20, 2):
        cluster.cancel(f"r{i}", rng.uniform(10, 400))
    cluster.run()
    expect_all_well(cluster)


@pytest.mark.parametrize("phase", ["out", "stored", "in"])
def test_cancelled_in_each_phase(phase: str) -> None:
    cluster = FakeCluster(policy="swap", num_workers=1, full_blocks=40, swap_budget=1)
    burst(cluster, 12)

    def reached() -> bool:
        return any(str(s.phase) == phase for s in cluster.core.hosted.swap.entries.values())

    cluster.run(stop=reached)
    assert reached()
    victim = next(r for r, s in cluster.core.hosted.swap.entries.items() if str(s.phase) == phase)
    cluster.cancel(victim, cluster.now / MS)
    cluster.run()
    assert cluster.ends[victim] == ["cancelled"]
    expect_all_well(cluster)


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_that_fails_costs_a_recomputation_and_nothing_else(seed: int) -> None:
    cluster = FakeCluster(
        policy="swap", num_workers=1, full_blocks=40, swap_budget=2, seed=seed, faults=Faults(swap=0.3, budget=6)
    )
    burst(cluster, 12)
    cluster.run()
    assert cluster.num_faults > 0 and recomputed(cluster) > 0
    expect_all_well(cluster)


def test_newcomers_wait_for_who_was_admitted_before_them() -> None:
    cluster = FakeCluster(policy="swap", num_workers=1, full_blocks=40, prefix_caching=False)
    burst(cluster, 10)
    cluster.run(stop=lambda: cluster.core.state.counters.swapped_out_blocks > 0)
    group = cluster.core.groups[0]
    needs = sum(-(-len(s.tokens) // BLOCK_SIZE) for s in [*group.queues.moving.values(), *group.queues.stored.values()])
    assert group.blocks.landing[0] == needs > 0
    cluster.run()
    expect_all_well(cluster)
