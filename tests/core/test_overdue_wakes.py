"""Wakes and starts that do not end: what needs memory is given other sleepers', and more is asked for from outside."""

from __future__ import annotations

import pytest
from fakes import MS, FakeCluster
from sleepers import crowd, is_asleep, of_kind, run_to, sleep

from jettison.core.params import AwakeParams, ProvisionParams

NEVER = 10**9
OVERDUE_MS = 15_000.0
"""When a wake is overdue that nothing is known of, since its order."""


def with_a_stuck_wake(policy: str, *sleeping: int, **changes: object) -> FakeCluster:
    """Of three, these sleep; the first of them is woken, and its layout is refused each time."""
    cluster = FakeCluster(num_workers=3, full_blocks=24, policy=policy, awake=AwakeParams(), **changes)  # type: ignore[arg-type]
    sleep(cluster, *sleeping)
    cluster.run(stop=lambda: all(is_asleep(cluster, w) for w in sleeping))
    cluster.workers[sleeping[0]].fail_applies = NEVER
    cluster.carry_out(cluster.core.request_wake(sleeping[0], cluster.now))
    return cluster


@pytest.mark.parametrize("has_default_length", [False, True])
@pytest.mark.parametrize("waits_ms", [0.0, OVERDUE_MS + 1000.0])
def test_a_request_that_needs_two_wakes_another_where_the_first_wake_does_not_end(
    waits_ms: float, has_default_length: bool
) -> None:
    cluster = with_a_stuck_wake("drop", 1, 2)
    run_to(cluster, cluster.now / MS + waits_ms)
    prompt = [1 + i % 50 for i in range(20)]
    cluster.submit("big", prompt, 100, cluster.now / MS, ignore_eos=True, has_default_length=has_default_length)
    came_ms = cluster.now / MS
    run_to(cluster, came_ms + OVERDUE_MS + 10_000)
    assert not cluster.core.sleepers.asleep and cluster.core.sleepers.waking == [1]
    if waits_ms and not has_default_length:
        assert of_kind(cluster, "woken")[0].time_ns / MS < came_ms + 1000, "at once, as the first wake is overdue"
    cluster.expect_outputs()


def test_an_answer_that_outgrows_its_instance_wakes_a_sleeper_where_a_start_finds_no_place() -> None:
    cluster = FakeCluster(
        num_workers=3, full_blocks=24, policy="drop", awake=AwakeParams(min_awake=1),
        provision=ProvisionParams(2, 2, 1.0), start_ms=1e9,
    )
    sleep(cluster, 1)
    cluster.run(stop=lambda: is_asleep(cluster, 1))
    cluster.carry_out(cluster.core.request_wake(2, cluster.now))
    prompt = [1 + i % 50 for i in range(20)]
    cluster.submit("open", prompt, 100, cluster.now / MS, has_default_length=True, ignore_eos=True)
    run_to(cluster, 2 * OVERDUE_MS)
    assert [r.fields["worker"] for r in of_kind(cluster, "woken")] == [1]
    cluster.expect_outputs()


def test_memory_that_binds_wakes_another_where_the_first_wake_is_overdue() -> None:
    cluster = with_a_stuck_wake("recompute", 1, 2)
    run_to(cluster, cluster.now / MS + OVERDUE_MS + 1000)
    for i in range(3):
        cluster.submit(f"r{i}", [1 + i] * 12, 60, cluster.now / MS, ignore_eos=True)
    run_to(cluster, cluster.now / MS + 5000)
    assert [r.fields["workers"] for r in of_kind(cluster, "wake_decided")] == [[2]]
    cluster.expect_outputs()


@pytest.mark.parametrize("waits_ms", [0.0, OVERDUE_MS + 1000.0])
def test_more_is_asked_for_from_outside_where_the_only_wake_is_overdue(waits_ms: float) -> None:
    cluster = with_a_stuck_wake("drop", 1, eager=True, auto_restore=False, shard_bytes=400)
    crowd(cluster, 60, at_ms=cluster.now / MS + waits_ms)
    run_to(cluster, cluster.now / MS + waits_ms + 5000)
    assert bool(of_kind(cluster, "scale_out")) == bool(waits_ms)


@pytest.mark.parametrize("waits_ms", [0.0, OVERDUE_MS + 1000.0])
def test_more_is_asked_for_from_outside_where_the_only_start_is_overdue(waits_ms: float) -> None:
    cluster = FakeCluster(
        num_workers=3, full_blocks=24, policy="drop", shard_bytes=400, eager=True, auto_restore=False,
        awake=AwakeParams(min_awake=1), provision=ProvisionParams(2, 2, None), start_ms=1e9,
    )
    cluster.submit("long", [1] * 12, 2000, ignore_eos=True)  # else the start would be given up
    cluster.submit("long too", [2] * 12, 2000, ignore_eos=True)
    cluster.carry_out(cluster.core.request_wake(2, cluster.now))
    crowd(cluster, 60, at_ms=waits_ms)
    run_to(cluster, waits_ms + 5000)
    assert bool(of_kind(cluster, "scale_out")) == bool(waits_ms)
