"""Instances without a process: pressure has one started, a quiet gives it back, and no request notices.

``JETTISON_SCALING_SEEDS=2000`` is the long run.
"""

from __future__ import annotations

import os
import random

import pytest
from fakes import MS, FakeCluster, Faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sleepers import crowd, is_asleep, of_kind, run_to, sleep

from jettison.core import ports
from jettison.core.moving.sleeping import SleepState
from jettison.core.observing import devices_wanted
from jettison.core.params import AwakeParams, ProvisionParams
from jettison.policy.overload import Trigger

AWAKE = AwakeParams(min_awake=2, falls_asleep=True, after_s=0.3)
TWO_OF_THREE = ProvisionParams(min_instances=2, num_at_start=2, start_s=0.2)
NUM_SEEDS = int(os.environ.get("JETTISON_SCALING_SEEDS", "15"))


def elastic(**changes: object) -> FakeCluster:
    """Two of three instances have a process."""
    told: dict[str, object] = {
        "num_workers": 3, "full_blocks": 24, "policy": "recompute", "awake": AWAKE, "provision": TWO_OF_THREE,
        "trigger": Trigger.FORECAST,
    }  # fmt: skip
    return FakeCluster(**told | changes)  # type: ignore[arg-type]


def state_of(cluster: FakeCluster, worker_id: int) -> SleepState:
    return cluster.core.sleepers.state_of(worker_id)


def num_provisioned(cluster: FakeCluster) -> int:
    return cluster.core.sleepers.provisioning.num_provisioned


# --- out and in -----------------------------------------------------------------------------------------------------


def test_pressure_has_a_process_started_that_serves_and_is_given_back_after_the_burst() -> None:
    cluster = elastic()
    assert {g.worker_ids for g in cluster.core.groups.values()} == {(0,), (1,)}
    assert state_of(cluster, 2) is SleepState.UNPROVISIONED
    crowd(cluster, 60)
    cluster.run(stop=lambda: state_of(cluster, 2) is SleepState.STARTING)
    (asked,) = of_kind(cluster, "instance_asked")
    assert (asked.fields["worker"], asked.fields["predicted_s"]) == (2, 0.2)
    gauges = cluster.core.ladder.gauges()
    assert (gauges["instances_provisioned"], gauges["instances_wanted"]) == (2, 3)
    cluster.run()
    (joined,), (woken,) = of_kind(cluster, "worker_joined"), of_kind(cluster, "woken")
    assert joined.time_ns - asked.time_ns == 50 * MS
    assert woken.fields["worker"] == 2 and woken.fields["start_ms"] == 50.0
    assert cluster.core.sleepers.provisioning.start_s == pytest.approx((0.2 + 0.05) / 2)
    run_to(cluster, cluster.now / MS + 5000)
    (asleep,), (released,) = of_kind(cluster, "asleep"), of_kind(cluster, "instance_released")
    assert num_provisioned(cluster) == 2
    assert released.time_ns - asleep.time_ns >= 125 * MS, "kept for as long as a start takes"
    assert not of_kind(cluster, "worker_lost") and not of_kind(cluster, "scale_out")
    counters = cluster.core.state.counters
    assert (counters.num_starts, counters.start_ns, counters.num_releases) == (1, 50 * MS, 1)
    assert counters.num_worker_losses == counters.num_worker_joins == 0
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_second_burst_has_the_process_started_again() -> None:
    cluster = elastic()
    crowd(cluster, 60)
    cluster.run()
    run_to(cluster, cluster.now / MS + 5000)
    (released,) = of_kind(cluster, "instance_released")
    worker = cluster.core.state.workers[released.fields["worker"]]  # type: ignore[index]
    life = worker.life
    crowd(cluster, 60, first=100, at_ms=cluster.now / MS)
    cluster.run()
    assert [r.fields["worker"] for r in of_kind(cluster, "instance_asked")] == [2, worker.worker_id]
    assert worker.alive and worker.life > life
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_where_all_have_a_process_for_good_nothing_is_asked_or_given_back() -> None:
    cluster = elastic(provision=ProvisionParams())
    crowd(cluster, 60)
    cluster.run()
    run_to(cluster, cluster.now / MS + 5000)
    assert of_kind(cluster, "asleep") and not of_kind(cluster, "instance_released")
    assert "instances_wanted" not in cluster.core.ladder.gauges()


def test_a_sleeper_with_a_process_is_woken_before_one_is_started() -> None:
    cluster = elastic(num_workers=4, provision=ProvisionParams(3, 3, 0.2))
    sleep(cluster, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 2))
    assert cluster.core.sleepers.can_wake == [2, 3]
    crowd(cluster, 24, at_ms=cluster.now / MS)
    cluster.run(stop=lambda: bool(of_kind(cluster, "wake_decided")))
    assert of_kind(cluster, "wake_decided")[0].fields["workers"][0] == 2  # type: ignore[index]
    cluster.run()
    cluster.expect_outputs()


def test_a_death_is_not_answered_by_a_process_that_would_come_no_sooner() -> None:
    cluster = elastic(full_blocks=400)
    crowd(cluster, 4)
    cluster.run(until_ms=5)
    cluster.kill(0)
    cluster.restart_at(0, 100)
    cluster.run()
    assert of_kind(cluster, "worker_lost") and not of_kind(cluster, "instance_asked")
    cluster.expect_outputs()


def test_a_crash_of_the_only_instance_asks_for_at_most_one_process() -> None:
    cluster = elastic(
        num_workers=4, awake=AwakeParams(min_awake=1), provision=ProvisionParams(1, 1, 2.0), start_ms=2000.0
    )
    crowd(cluster, 1)
    cluster.run(until_ms=5)
    cluster.kill(0)
    cluster.restart_at(0, 1500)
    cluster.run()
    assert of_kind(cluster, "worker_lost") and len(of_kind(cluster, "instance_asked")) <= 1
    cluster.expect_outputs()


@pytest.mark.parametrize("sleeps", [False, True])
def test_more_is_asked_for_where_the_last_sleeper_is_gone_for_good(sleeps: bool) -> None:
    cluster = FakeCluster(
        num_workers=3, full_blocks=24, policy="drop", shard_bytes=400, awake=AwakeParams(min_awake=1), eager=True,
        auto_restore=False,
    )
    if sleeps:
        sleep(cluster, 2)
        cluster.run(stop=lambda: is_asleep(cluster, 2))
    cluster.kill(2)
    run_to(cluster, cluster.now / MS + 300)
    cluster.at(cluster.now + MS, ports.WorkerGone(2))
    run_to(cluster, cluster.now / MS + 300)
    assert not sleeps or devices_wanted(cluster.core) == 2, "it is no instance that is awake"
    crowd(cluster, 60, at_ms=cluster.now / MS)
    cluster.run()
    assert of_kind(cluster, "scale_out")
    cluster.expect_outputs()


# --- what a request may count on ------------------------------------------------------------------------------------


def test_a_request_counts_on_no_memory_that_has_no_process_and_keeps_what_it_counts_on() -> None:
    cluster = elastic(policy="drop", shard_bytes=8192)
    two = cluster.core.max_request_blocks()
    whole = FakeCluster(num_workers=3, full_blocks=24, policy="drop", shard_bytes=8192).core.max_request_blocks()
    assert two < whole
    cluster.carry_out(cluster.core.request_wake(2, cluster.now))
    cluster.run(stop=lambda: state_of(cluster, 2) is SleepState.AWAKE)
    assert cluster.core.max_request_blocks() == whole
    sleep(cluster, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 2))
    assert cluster.core.max_request_blocks() == whole, "its memory is there, and wakes for a request"
    run_to(cluster, cluster.now / MS + 5000)
    assert of_kind(cluster, "instance_released") and cluster.core.max_request_blocks() == two


def test_where_the_last_process_is_gone_for_good_another_is_asked_for_and_requests_wait_for_it() -> None:
    cluster = elastic(awake=AwakeParams(min_awake=1), provision=ProvisionParams(1, 1, 2.0), start_ms=2000.0)
    room = cluster.core.max_request_blocks()
    crowd(cluster, 1)
    cluster.run(until_ms=5)
    cluster.kill(0)
    run_to(cluster, 200)
    cluster.at(cluster.now + MS, ports.WorkerGone(0))
    run_to(cluster, 400)
    assert cluster.core.max_request_blocks() == room == cluster.core.max_request_blocks(is_offline=True)
    crowd(cluster, 3, first=10, at_ms=cluster.now / MS)
    cluster.run()
    (asked,) = of_kind(cluster, "instance_asked")
    assert asked.fields["worker"] == 1 and state_of(cluster, 1) is SleepState.AWAKE
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_where_no_process_can_be_asked_for_any_more_requests_are_refused() -> None:
    cluster = elastic(num_workers=2, provision=ProvisionParams(2, 2, 0.2))
    for worker_id in (0, 1):
        cluster.kill(worker_id)
    run_to(cluster, 100)
    for worker_id in (0, 1):
        cluster.at(cluster.now + MS, ports.WorkerGone(worker_id))
    run_to(cluster, 200)
    assert cluster.core.max_request_blocks() == 0


# --- starts that fail or wait ---------------------------------------------------------------------------------------


def test_a_start_that_waits_for_a_place_is_told_once_and_nothing_else_waits() -> None:
    cluster = elastic(start_ms=400.0)
    crowd(cluster, 60)
    for at_ms in (30, 60, 90):
        cluster.at(at_ms * MS, ports.StartFailed(2, "no host has room"))
    cluster.run(stop=lambda: bool(of_kind(cluster, "instance_waits")))
    waits = cluster.core.sleepers.provisioning.waits
    assert waits == {2: "no host has room"}
    cluster.run()
    (told,) = of_kind(cluster, "instance_waits")
    assert told.fields["reason"] == "no host has room" and not waits
    assert len(of_kind(cluster, "instance_asked")) == 1
    cluster.expect_outputs()


def test_a_start_that_nothing_needs_any_more_is_given_up() -> None:
    cluster = elastic(start_ms=60_000.0)
    crowd(cluster, 60)
    cluster.run(stop=lambda: bool(of_kind(cluster, "instance_asked")))
    run_to(cluster, 20_000)
    (given_up,) = of_kind(cluster, "instance_given_up")
    last_ns = max(at_ns for at_ns, kind in cluster.log if kind == "StepCompleted")
    assert given_up.fields["worker"] == 2 and given_up.time_ns > last_ns
    assert state_of(cluster, 2) is SleepState.UNPROVISIONED
    assert not cluster.starts
    cluster.core.handle(ports.StartFailed(2, "too late"), cluster.now)
    assert not of_kind(cluster, "instance_waits")
    cluster.expect_outputs()


def test_a_start_that_never_ends_lets_no_process_go_that_is_to_be_kept() -> None:
    cluster = elastic(
        full_blocks=400, start_ms=1e9, awake=AwakeParams(1, None, True, 0.3), provision=ProvisionParams(2, 2, 0.5)
    )
    cluster.submit("long", [5] * 20, 1200, ignore_eos=True)
    cluster.run(until_ms=1)
    cluster.carry_out(cluster.core.request_wake(2, cluster.now))
    for at_ms in range(100, 4000, 100):
        run_to(cluster, at_ms)
        assert num_provisioned(cluster) >= 2, f"after {at_ms} ms"
    assert state_of(cluster, 1) is SleepState.ASLEEP, "it could go, if the start had ended"


def test_orders_by_hand_start_one_and_no_order_puts_what_is_not_there_to_sleep() -> None:
    cluster = elastic(full_blocks=400)
    with pytest.raises(ValueError, match="asleep already"):
        sleep(cluster, 2)
    cluster.carry_out(cluster.core.request_wake(2, cluster.now))
    with pytest.raises(ValueError, match="still being started"):
        sleep(cluster, 2)
    with pytest.raises(ValueError, match="not asleep"):
        cluster.core.request_wake(2, cluster.now)
    cluster.run(stop=lambda: state_of(cluster, 2) is SleepState.AWAKE)
    assert num_provisioned(cluster) == 3


# --- whatever happens -----------------------------------------------------------------------------------------------


def run_history(seed: int, policy: str) -> FakeCluster:
    """Bursts and quiets, deaths and refused layouts, of two to five instances that come and go."""
    rng = random.Random(seed)
    num_workers = rng.randint(2, 5)
    least = rng.randint(1, num_workers - 1)
    at_start = rng.randint(least, num_workers)
    cluster = FakeCluster(
        num_workers=num_workers, full_blocks=24, policy=policy, seed=seed, trigger=Trigger.FORECAST, eager=True,
        awake=AwakeParams(least, None, True, 0.1), start_ms=rng.choice([5.0, 50.0, 300.0]),
        provision=ProvisionParams(least, at_start, rng.choice([None, 0.05])), faults=Faults(apply=0.05, move=0.02),
    )
    faults: list[str] = []
    handle = cluster.core.handle

    def checked(event, now_ns):  # type: ignore[no-untyped-def]
        actions = handle(event, now_ns)
        provisioning = cluster.core.sleepers.provisioning
        if not least <= provisioning.num_provisioned <= provisioning.num_wanted <= num_workers:
            faults.append(f"{provisioning.num_provisioned} of {provisioning.num_wanted} at {now_ns}")
        return actions

    cluster.core.handle = checked  # type: ignore[method-assign]
    at_ms = 0.0
    for burst in range(3):
        crowd(cluster, rng.randint(1, 25), first=100 * burst, at_ms=at_ms)
        at_ms += rng.choice([50.0, 400.0, 1500.0])
    for _ in range(rng.randint(0, 2)):
        victim, dies_ms = rng.randrange(num_workers), rng.uniform(1, at_ms)
        cluster.kill_at(victim, dies_ms)
        cluster.restart_at(victim, dies_ms + rng.uniform(40, 400))
        cluster.restart_at(victim, at_ms + 2000)
    cluster.run()
    run_to(cluster, cluster.now / MS + 3000)
    assert not faults
    cluster.core.check()
    cluster.expect_outputs()
    return cluster


@pytest.mark.parametrize("policy", ["recompute", "drop"])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=NUM_SEEDS, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_stream_is_lost_and_no_fewer_processes_are_left_than_may_be(seed: int, policy: str) -> None:
    run_history(seed, policy)
