"""What the overload policy is told of a group: how soon blocks come free."""

from __future__ import annotations

import pytest
from fakes import FakeCluster

from jettison.core.load.monitor import BlockRates, GroupMonitor, Stays, TrafficMonitor
from jettison.core.preemption import Preemption


def burst_after_calm(num_output: int) -> FakeCluster:
    """Four calm seconds, then more requests at once than the memory holds; all with so many output tokens."""
    cluster = FakeCluster(full_blocks=24, seed=1, max_tokens=256)
    for i in range(10):
        cluster.submit(f"calm{i}", [3] * 8, num_output, at_ms=400.0 * i)
    for i in range(24):
        cluster.submit(f"burst{i}", [3] * 40, num_output, at_ms=4_200.0 + i, ignore_eos=True)
    cluster.run()
    return cluster


def drops(cluster: FakeCluster) -> int:
    return sum(record.kind == "drop" for record in cluster.records)


def test_a_burst_of_requests_that_stay_for_a_few_steps_is_no_reason_to_drop() -> None:
    assert drops(burst_after_calm(2)) == 0


def test_a_burst_of_requests_that_stay_is_one() -> None:
    assert drops(burst_after_calm(60)) > 0


def test_the_mean_stay_counts_blocks() -> None:
    traffic = TrafficMonitor()
    assert traffic.mean_stay_s is None
    traffic.note_stay(num_first_blocks=1, num_blocks=1, stay_s=1.0)
    traffic.note_stay(num_first_blocks=1, num_blocks=3, stay_s=5.0)
    assert traffic.mean_stay_s == pytest.approx((1 * 1.0 + 2 * 5.0) / 4), "block-seconds over blocks given back"


def test_the_mean_stay_follows_the_load() -> None:
    traffic = TrafficMonitor()
    for _ in range(500):
        traffic.note_stay(2, 2, 10.0)
    for _ in range(200):
        traffic.note_stay(2, 2, 1.0)
    assert traffic.mean_stay_s is not None and traffic.mean_stay_s < 1.5


def test_a_refusal_counts_for_a_few_looks() -> None:
    monitor = GroupMonitor()
    assert monitor.refusal(0) is None
    monitor.note_refused("not worth it", 100_000_000)
    assert monitor.refusal(200_000_000) == "not worth it" and monitor.refusal(2_000_000_000) is None


def arriving(per_tick: list[int]) -> tuple[float, float, float, float]:
    """Rates after ticks, ten a second, in each of which so many requests of ten tokens came."""
    traffic = TrafficMonitor()
    for tick, number in enumerate(per_tick):
        for _ in range(number):
            traffic.note_arrival(10)
        traffic.ticks.add(tick * 100_000_000)
    return traffic.rates()


def test_what_comes_usually_does_not_count_a_burst_and_a_burst_lasts_as_long_as_it_has() -> None:
    assert arriving([1]) == (0.0, 0.0, 0.0, 0.0)
    assert arriving([0] * 100) == (0.0, 0.0, 0.0, 0.0)
    assert arriving([1] * 120) == pytest.approx((10.0, 10.0, 12.0, 10.0)), "as long as it is seen"
    assert arriving([1] * 500) == pytest.approx((10.0, 10.0, 40.0, 10.0)), "no longer than is remembered"
    lately, usually, lasted_s, prompt = arriving([1] * 100 + [7] * 20)
    assert (lately, usually) == pytest.approx((70.0, 10.0)) and lasted_s == 2.0 and prompt == 10.0
    lately, usually, lasted_s, _ = arriving([1] * 80 + [7] * 20 + [1] * 20)
    assert (lately, usually) == pytest.approx((10.0, 10.0))
    lately, usually, *_ = arriving([1] * 300 + [7] * 50 + [1] * 10)
    assert (lately, usually) == pytest.approx((10.0, 10.0)), "half of the last ten seconds were a burst"


def freeing(blocks_per_tick: list[int], used: int, mean_stay_s: float, num_running: int = 100) -> float | None:
    """What is foreseen to come free, after ten ticks a second in each of which so many blocks were given back."""
    (group, *_), monitor = FakeCluster(num_workers=1, full_blocks=400).core.groups.values(), GroupMonitor()
    group.blocks.ledgers[0].allocate("r0", used)
    group.queues.running = dict.fromkeys(map(str, range(num_running)))  # type: ignore[arg-type]
    for tick, blocks in enumerate(blocks_per_tick):
        group.counters.num_freed_blocks += blocks
        monitor.note_totals(group)
        monitor.ticks.add(tick * 100_000_000)
    now_ns = len(blocks_per_tick) * 100_000_000
    return monitor._freed_per_s(group, monitor.rates(), Stays(mean_stay_s), now_ns)


def test_what_stays_for_long_comes_free_as_it_did_over_the_last_seconds() -> None:
    calm_then_none = [1] * 60 + [0] * 40
    assert freeing(calm_then_none, used=300, mean_stay_s=30.0) == pytest.approx(6.0, rel=0.02), "and not 10 a second"
    assert freeing([3] * 100, used=300, mean_stay_s=30.0) == pytest.approx(10.0), "no more than Little's law"
    assert freeing([1] * 10, used=300, mean_stay_s=30.0) == pytest.approx(10.0), "too little was seen"
    assert freeing([0] * 51, used=300, mean_stay_s=30.0) == pytest.approx(5.0), "half of the window was"
    assert freeing([0] * 101, used=300, mean_stay_s=30.0) == pytest.approx(0.3), "one of a hundred requests"
    assert freeing([0] * 101, used=300, mean_stay_s=30.0, num_running=2) == pytest.approx(10.0), "two tell nothing"
    assert freeing(calm_then_none, 300, 9.0, num_running=0) == pytest.approx(300 / 9.0), "as in a burst of short ones"


def queue_behind_full_memory(num_output: int, prompt: int = 32) -> FakeCluster:
    """One instance, and far more requests than it can hold."""
    cluster = FakeCluster(
        num_workers=1, full_blocks=24, seed=1, max_tokens=256, policy="recompute", prefix_caching=False
    )
    for i in range(2000):
        cluster.submit(f"r{i}", [3] * prompt, num_output, at_ms=0.001 * i, ignore_eos=True)
    return cluster


def let_in_per_s(cluster: FakeCluster) -> float | None:
    (group,) = cluster.core.groups.values()
    monitor = cluster.core.loads.monitor(group)
    return monitor._admitted_per_s(group, monitor.rates(), monitor.blocked_s(cluster.now))


def test_what_a_queue_got_is_known_once_memory_has_kept_it_out_for_a_while() -> None:
    cluster = queue_behind_full_memory(12)
    (group,) = cluster.core.groups.values()
    cluster.run(until_ms=2_000)
    assert cluster.core.loads.monitor(group).blocked_s(cluster.now) is not None and let_in_per_s(cluster) is None
    cluster.run(until_ms=3_000)
    before, began_ns = len(group.queues.waiting), cluster.now
    cluster.run(until_ms=5_000)
    let_in = (before - len(group.queues.waiting)) * group.limits.blocks_for(32) / ((cluster.now - began_ns) / 1e9)
    assert group.queues.waiting and let_in_per_s(cluster) == pytest.approx(let_in, rel=0.1)


def test_a_queue_that_got_nothing_counts_as_if_its_head_were_let_in_now() -> None:
    cluster = queue_behind_full_memory(9_000, prompt=60)  # the first one takes what there is, and goes on for long
    (group,) = cluster.core.groups.values()
    cluster.run(until_ms=20)
    for state in list(group.queues.running.values())[1:]:
        cluster.core.groups[group.group_id].preempt(state, Preemption.STEP)
    need = cluster.core.loads.monitor(group).head_need_blocks(group)
    assert need > 0
    rates = BlockRates(0.0, 0.0, 0.0, 0.0, 0.0, let_in=-5.0)
    monitor = cluster.core.loads.monitor(group)
    assert monitor._admitted_per_s(group, rates, 60.0) == need / 2.0
    assert monitor._admitted_per_s(group, rates._replace(let_in=100.0), 60.0) == 100.0
    assert monitor._admitted_per_s(group, rates, 2.4) is None and monitor._admitted_per_s(group, None, 60.0) is None
