"""The rung ``wake``: pressure wakes sleepers where that is soonest, and who is not needed falls asleep.

``JETTISON_WAKE_SEEDS=2000`` is the long run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

import pytest
from fakes import MS, FakeCluster, Faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sleepers import crowd, is_asleep, of_kind, run_to, sleep

from jettison.core.ladder.packing.pack import PackRung
from jettison.core.params import AwakeParams
from jettison.core.ports import LoadShard, OfflineStored, SendShard, StoredWork, Tick, WorkersEmpty
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import COEFFICIENTS, CostModel
from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.overload import Trigger
from jettison.policy.packing.params import PackParams
from jettison.policy.slo import AHEAD_SHARE
from jettison.types import ServiceClass

AUTO = AwakeParams(min_awake=2, falls_asleep=True, after_s=0.5)


# --- pressure -------------------------------------------------------------------------------------------------------


def asleep_under_pressure(policy: str = "recompute", **changes: object) -> FakeCluster:
    """Two of three sleep, and more comes than one holds."""
    cluster = FakeCluster(num_workers=3, full_blocks=24, policy=policy, awake=AwakeParams(), **changes)  # type: ignore[arg-type]
    sleep(cluster, 1, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 1) and is_asleep(cluster, 2))
    crowd(cluster, 24, at_ms=cluster.now / MS)
    return cluster


def test_memory_that_binds_wakes_as_many_as_have_what_is_missing() -> None:
    cluster = asleep_under_pressure(trigger=Trigger.FORECAST)
    cluster.run()
    (first, *_) = of_kind(cluster, "wake_decided")
    assert first.fields["group"] == 0
    assert first.fields["stay_request_s"] > first.fields["taken_request_s"]  # type: ignore[operator]
    assert set(first.fields["workers"]) == {1, 2}, "24 requests of 13 blocks and room for 24 blocks"  # type: ignore[call-overload]
    assert not cluster.core.sleepers.asleep and len(of_kind(cluster, "woken")) == 2
    assert {s for r in of_kind(cluster, "rebalanced") for s in r.fields["to"]} or len(cluster.core.groups) == 3  # type: ignore[attr-defined]
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_queue_that_is_let_in_by_itself_wakes_nobody() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40, policy="recompute", awake=AwakeParams())
    sleep(cluster, 2)
    crowd(cluster, 4)
    cluster.run()
    assert is_asleep(cluster, 2) and not of_kind(cluster, "wake_decided")
    cluster.expect_outputs()


def test_one_that_is_about_to_sleep_is_called_back_at_once() -> None:
    cluster = FakeCluster(num_workers=2, full_blocks=24, policy="recompute", awake=AwakeParams())
    crowd(cluster, 12)
    cluster.run(until_ms=10)
    cluster.core.state.workers[0].ledger.allocate("ballast", cluster.core.state.workers[0].ledger.num_free)
    cluster.core.state.workers[0].ghosts["ballast"] = {-1}
    sleep(cluster, 1)
    cluster.run(stop=lambda: bool(of_kind(cluster, "stays_awake")))
    assert of_kind(cluster, "wake_decided")[0].fields["parameter_bytes"] == 0
    cluster.core.state.workers[0].ledger.release("ballast")
    cluster.core.state.workers[0].ghosts.clear()
    cluster.run()
    assert not of_kind(cluster, "asleep")
    cluster.expect_outputs()


def test_never_more_than_may_be_awake_are_woken_and_they_are_no_more_at_the_start() -> None:
    cluster = FakeCluster(
        num_workers=4, full_blocks=24, policy="recompute", awake=AwakeParams(min_awake=1, max_awake=2)
    )
    run_to(cluster, 200)
    assert cluster.core.sleepers.asleep == {2, 3}
    crowd(cluster, 40, at_ms=cluster.now / MS)
    cluster.run()
    assert cluster.core.sleepers.asleep == {2, 3}
    cluster.kill(0)
    cluster.run(stop=lambda: bool(of_kind(cluster, "woken")))
    assert len(cluster.core.sleepers.asleep) == 1, "one of the two that may be awake is dead"
    cluster.expect_outputs()


def test_no_more_are_awake_at_the_start_where_some_are_filled_by_peers_first() -> None:
    cluster = FakeCluster(
        num_workers=4, full_blocks=24, policy="recompute", awake=AwakeParams(min_awake=1, max_awake=2)
    )
    for worker_id in (2, 3):
        cluster.workers[worker_id].filled = set()
    cluster.at(0, WorkersEmpty((2, 3)))
    cluster.at(1 * MS, Tick())
    run_to(cluster, 5000)
    assert cluster.core.sleepers.asleep == {2, 3}
    cluster.carry_out(cluster.core.request_wake(3, cluster.now))
    run_to(cluster, 10_000)
    assert cluster.core.sleepers.asleep == {2}, "an order by hand holds"


def test_lost_capacity_is_answered_at_once() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40, policy="recompute", awake=AwakeParams())
    sleep(cluster, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 2))
    cluster.kill(0)
    cluster.run(stop=lambda: bool(of_kind(cluster, "worker_lost")))
    assert [r.fields["workers"] for r in of_kind(cluster, "wake_decided")] == [[2]]
    cluster.run(stop=lambda: bool(of_kind(cluster, "woken")))
    crowd(cluster, 8, at_ms=cluster.now / MS)
    cluster.run()
    assert len(of_kind(cluster, "wake_decided")) == 1
    cluster.expect_outputs()


@pytest.mark.parametrize("num_awake", [1, 2])
def test_one_sleeper_is_woken_for_each_death_though_a_request_has_no_group(num_awake: int) -> None:
    cluster = FakeCluster(num_workers=5, full_blocks=400, policy="recompute", awake=AwakeParams(1))
    sleep(cluster, *range(num_awake, 5))
    cluster.run(stop=lambda: len(cluster.core.sleepers.asleep) == 5 - num_awake and cluster.core.sleepers.is_idle)
    crowd(cluster, 2, at_ms=cluster.now / MS)
    cluster.run(until_ms=cluster.now / MS + 5)
    for worker_id in range(num_awake):
        cluster.kill(worker_id)
    cluster.run()
    assert len(of_kind(cluster, "woken")) == num_awake and len(cluster.core.sleepers.asleep) == 5 - 2 * num_awake
    cluster.expect_outputs()


def test_a_dead_sleeper_is_no_loss() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=40, policy="recompute", awake=AwakeParams())
    sleep(cluster, 1, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 1) and is_asleep(cluster, 2))
    cluster.kill(2)
    cluster.run(stop=lambda: bool(of_kind(cluster, "worker_lost")))
    run_to(cluster, cluster.now / MS + 300)
    assert cluster.core.sleepers.asleep == {1, 2} and not of_kind(cluster, "wake_decided")


def test_nobody_outside_is_asked_while_somebody_sleeps() -> None:
    cluster = asleep_under_pressure("drop", shard_bytes=400, eager=True, auto_restore=False)
    cluster.run()
    scale_outs, woken = of_kind(cluster, "scale_out"), of_kind(cluster, "woken")
    assert len(woken) == 2
    assert all(s.time_ns >= max(w.time_ns for w in woken) for s in scale_outs)
    cluster.expect_outputs()


def test_prompts_ahead_that_break_the_objective_everywhere_wake_one() -> None:
    cluster = FakeCluster(
        num_workers=2, full_blocks=400, policy="recompute", awake=AwakeParams(min_awake=1), max_tokens=16,
        offline=OfflineParams(checkpoints=False, prefetches=False, slo=SloParams(ttft_s=0.1)),
    )
    crowd(cluster, 6)
    cluster.run()
    sleep(cluster, 1)
    cluster.run(stop=lambda: is_asleep(cluster, 1))
    for i in range(16):
        cluster.submit(f"long{i}", [1 + i] * 90, 4, cluster.now / MS)
    cluster.run()
    (decided,) = of_kind(cluster, "wake_decided")
    assert decided.fields["compute_wait_s"] > AHEAD_SHARE * decided.fields["slo_ttft_s"]  # type: ignore[operator]
    assert len(of_kind(cluster, "woken")) == 1
    cluster.expect_outputs()


# --- falling asleep -------------------------------------------------------------------------------------------------


def test_who_is_empty_for_long_enough_sleeps_and_enough_stay_awake() -> None:
    cluster = FakeCluster(num_workers=4, full_blocks=40, policy="recompute", awake=AUTO)
    run_to(cluster, 450)
    assert not cluster.core.sleepers.leaving and not cluster.core.sleepers.asleep
    run_to(cluster, 900)
    assert cluster.core.sleepers.asleep == {2, 3}
    run_to(cluster, 5_000)
    assert cluster.core.sleepers.asleep == {2, 3}
    assert {r.fields["reason"] for r in of_kind(cluster, "falling_asleep")} == {"no online request for 0.5 s"}


def test_who_serves_now_and_then_stays() -> None:
    cluster = FakeCluster(num_workers=3, full_blocks=60, policy="recompute", awake=AwakeParams(1, None, True, 0.5))
    for at_ms in range(0, 3_000, 300):  # short ones: at no tick does any of them run
        for i in range(3):
            cluster.submit(f"r{at_ms}-{i}", [1 + i] * 8, 4, at_ms + 20.0)
    run_to(cluster, 3_000)
    assert not of_kind(cluster, "falling_asleep")
    run_to(cluster, 4_500)
    assert len(cluster.core.sleepers.asleep) == 2
    cluster.expect_outputs()


def test_that_somebody_waits_for_a_step_elsewhere_keeps_nobody_awake() -> None:
    """At every tick: in a large cluster it is always so."""
    cluster = FakeCluster(
        num_workers=3, full_blocks=400, policy="recompute", max_tokens=16, awake=AwakeParams(1, None, True, 0.3),
        packing=PackParams(packer="mell", epoch_s=0.05, head_room=0.05),
    )
    waiting: list[int] = []
    for tick_ms in range(100, 2_500, 100):
        for i in range(12):
            cluster.submit(f"r{tick_ms}-{i}", [1 + i] * 60, 2, tick_ms - 1.0)
        cluster.at(tick_ms * MS, lambda: waiting.append(cluster.core.num_waiting))
    run_to(cluster, 2_500)
    assert waiting and min(waiting) > 0, waiting
    assert cluster.core.sleepers.asleep
    cluster.run()
    cluster.expect_outputs()


def steady_prompts(cluster: FakeCluster, *, end_ms: int, num: int, num_tokens: int = 60) -> None:
    """So many every 100 ms, each with an answer of two tokens: nearly all compute, and little memory."""
    rng = random.Random(num)
    for at_ms in range(50, end_ms, 100):
        for i in range(num):
            cluster.submit(f"p{at_ms}-{i}", [rng.randrange(1, 60) for _ in range(num_tokens)], 2, at_ms)


def with_objective(num_workers: int, after_s: float = 0.3, **changes: object) -> FakeCluster:
    offline = OfflineParams(checkpoints=False, prefetches=False, slo=SloParams(ttft_s=1.0))
    return FakeCluster(
        num_workers=num_workers, full_blocks=400, policy="recompute", max_tokens=16,
        awake=AwakeParams(1, None, True, after_s), offline=offline, **changes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("num", "num_awake"), [(1, 1), (8, 2), (14, 3)])
def test_so_many_stay_awake_as_arriving_prompts_keep_half_busy(num: int, num_awake: int) -> None:
    """Memory would do with one. 600 tokens a second for each of ``num``, where an instance computes 6,000 to 7,500."""
    cluster = with_objective(6, 3.0, packing=PackParams(packer="mell", epoch_s=0.05, head_room=0.05))
    steady_prompts(cluster, end_ms=7_000, num=num)
    run_to(cluster, 7_000)
    assert 6 - len(cluster.core.sleepers.asleep) == num_awake
    assert cluster.core.ladder.gauges()["devices_needed"] == num_awake
    run_to(cluster, 30_000)
    assert len(cluster.core.sleepers.asleep) == 5, "prompts have ceased"
    cluster.expect_outputs()


def test_no_seat_of_an_ended_request_keeps_an_instance_in_use() -> None:
    """The last ones end in the midst of an epoch, behind which no request comes."""
    cluster = with_objective(2, packing=PackParams(packer="mell", epoch_s=1.0, head_room=0.05))
    rung = cluster.core.ladder.rung("pack")
    assert isinstance(rung, PackRung)
    for i in range(6):
        cluster.submit(f"r{i}", [1 + i] * 200, 2, 1050.0)
    cluster.run(stop=lambda: len(cluster.core.state.requests) == 6)
    assert rung.desired.active()
    run_to(cluster, 5_000)
    assert not cluster.core.state.requests and not rung.desired.active()
    cluster.expect_outputs()


def test_more_prompts_than_those_awake_compute_wake_before_queues_break_the_objective() -> None:
    cluster = with_objective(4)
    sleep(cluster, 1, 2, 3)
    cluster.run(stop=lambda: {1, 2, 3} <= cluster.core.sleepers.asleep)
    steady_prompts(cluster, end_ms=6_000, num=10)
    run_to(cluster, 6_000)
    decided = of_kind(cluster, "wake_decided")
    assert [r.fields["reason"] for r in decided] == ["more prompts arrive than those who are awake compute"]
    assert len(cluster.core.groups) == 2, "6,000 tokens a second, and one computes as many"
    cluster.run()
    cluster.expect_outputs()


def test_whom_a_packing_empties_falls_asleep_while_others_serve() -> None:
    cluster = FakeCluster(
        num_workers=3, full_blocks=400, policy="recompute", max_tokens=64, awake=AwakeParams(1, None, True, 0.2),
        packing=PackParams(packer="mell", epoch_s=0.05, head_room=0.05),
    )
    for i in range(6):
        cluster.submit(f"r{i}", [1 + i] * 20, 400, 20.0 * i)
    cluster.run(until_ms=400)
    assert len(cluster.core.state.requests) == 6
    assert len(cluster.core.sleepers.asleep) == 2
    cluster.run()
    assert cluster.core.state.counters.num_preemptions == 0, "one is woken before they outgrow the other"
    cluster.expect_outputs()


@pytest.mark.parametrize("num_served", [0, 1])
def test_with_packing_instances_sleep_before_a_first_request_and_after_wakes_by_hand(num_served: int) -> None:
    cluster = FakeCluster(
        num_workers=3, full_blocks=24, policy="recompute", awake=AwakeParams(1, None, True, 0.2),
        packing=PackParams(packer="mell", epoch_s=0.05, head_room=0.05),
    )
    crowd(cluster, num_served)
    run_to(cluster, 3_000)
    assert len(cluster.core.sleepers.asleep) == 2
    for worker_id in sorted(cluster.core.sleepers.asleep):
        cluster.carry_out(cluster.core.request_wake(worker_id, cluster.now))
    cluster.run(stop=lambda: len(of_kind(cluster, "woken")) == 2)
    run_to(cluster, cluster.now / MS + 5_000)
    assert len(cluster.core.sleepers.asleep) == 2 and len(of_kind(cluster, "asleep")) == 4
    cluster.core.check()


def test_offline_work_keeps_nobody_awake() -> None:
    cluster = FakeCluster(
        num_workers=3, full_blocks=60, offline="harvest", policy="recompute", awake=AwakeParams(1, None, True, 0.3)
    )
    for i in range(9):
        cluster.submit(f"o{i}", [1 + i] * 12, 200, 0.4 * i, service_class=ServiceClass.OFFLINE)
    cluster.run(until_ms=700)
    assert len(cluster.core.sleepers.asleep) == 2
    assert any(not s.is_finished for s in cluster.core.state.requests.values())
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_a_deadline_of_offline_work_keeps_them_awake() -> None:
    def asleep_at(due_ms: float) -> int:
        cluster = FakeCluster(
            num_workers=3, full_blocks=60, offline="harvest", policy="recompute", awake=AwakeParams(1, None, True, 0.3)
        )
        for i in range(9):
            cluster.submit(
                f"o{i}", [1 + i] * 12, 200, 0.4 * i, service_class=ServiceClass.OFFLINE, deadline_ns=int(due_ms * MS)
            )
        cluster.run(until_ms=700)
        num_asleep = len(cluster.core.sleepers.asleep)
        cluster.run()
        cluster.expect_outputs()
        return num_asleep

    assert asleep_at(3_600_000.0) == 2
    assert asleep_at(800.0) == 0


def test_a_load_that_hovers_at_the_limit_does_not_put_the_same_one_to_sleep_over_and_over() -> None:
    """Every second more comes than one holds; asleep after 0.3 s without requests, it would be woken each time."""
    cluster = FakeCluster(num_workers=2, full_blocks=24, policy="recompute", awake=AwakeParams(1, None, True, 0.3))
    for second in range(20):
        crowd(cluster, 10, first=100 * second, at_ms=1_000.0 * second)
    run_to(cluster, 20_000)
    assert len(of_kind(cluster, "woken")) <= 4
    run_to(cluster, 20_000 + 8 * 300 + 500)
    assert len(cluster.core.sleepers.asleep) == 1, "when the need is gone for good, it sleeps"
    cluster.expect_outputs()


def profiled(link: float, disk: float) -> HardwareProfile:
    return HardwareProfile(CostModel(4, *[1e-5] * len(COEFFICIENTS)), link, 1e-4, 1e-3, 1e-11, disk, disk)


@pytest.mark.parametrize(("link", "disk", "kind", "source"), [
    (1e9, 1e4, SendShard, "peers"), (1e4, 1e9, LoadShard, "model folder"),
])  # fmt: skip
def test_parameters_come_from_where_they_are_soonest_and_the_prediction_is_told_beside_what_it_took(
    link: float, disk: float, kind: type, source: str
) -> None:
    cluster = FakeCluster(num_workers=2, policy="recompute", awake=AwakeParams(1), profile=profiled(link, disk))
    sleep(cluster, 1)
    cluster.run(stop=lambda: is_asleep(cluster, 1))
    for _ in range(2):
        cluster.fetched.clear()
        cluster.carry_out(cluster.core.request_wake(1, cluster.now))
        cluster.run(stop=lambda: not cluster.core.in_transition)
        assert cluster.fetched and {type(a) for a in cluster.fetched} == {kind}
        sleep(cluster, 1)
        cluster.run(stop=lambda: is_asleep(cluster, 1))
    first, second = of_kind(cluster, "woken")
    assert {r.fields["source"] for r in of_kind(cluster, "waking")} == {source}
    assert second.fields["predicted_ms"] == pytest.approx(first.fields["since_order_ms"]), "as the first has taken"


def test_a_folder_that_gives_nothing_is_no_dead_end() -> None:
    cluster = FakeCluster(
        num_workers=2, policy="recompute", awake=AwakeParams(1), profile=profiled(1e4, 1e9),
        faults=Faults(load=1.0, budget=1_000),
    )
    sleep(cluster, 1)
    cluster.run(stop=lambda: is_asleep(cluster, 1))
    cluster.carry_out(cluster.core.request_wake(1, cluster.now))
    cluster.run(stop=lambda: not cluster.core.in_transition)
    assert {type(a) for a in cluster.fetched} == {LoadShard, SendShard}
    assert not cluster.core.state.workers[1].unfilled


@pytest.mark.parametrize(
    ("nums_stored", "due_ms", "num_asleep"),
    [((400,), 4_000.0, 0), ((400,), 3_600_000.0, 2), ((9,), 4_000.0, 2), ((8,) * 50, 4_000.0, 0)],
)
def test_a_deadline_of_stored_work_keeps_them_awake(
    nums_stored: tuple[int, ...], due_ms: float, num_asleep: int
) -> None:
    """Lines of batches that wait for a place in the window; those that have one are not counted twice, nor taken from
    each batch that is due at the same second."""
    cluster = FakeCluster(
        num_workers=3, full_blocks=60, offline="harvest", policy="recompute", awake=AwakeParams(1, None, True, 0.3)
    )
    deadline_ns = int(due_ms * MS)
    for i in range(9):
        cluster.submit(
            f"o{i}", [1 + i] * 12, 150, 0.4 * i, service_class=ServiceClass.OFFLINE, deadline_ns=deadline_ns
        )
    cluster.at(int(5 * MS), OfflineStored(tuple(StoredWork(deadline_ns, n, 12 * n, 200 * n) for n in nums_stored)))
    run_to(cluster, 700)
    assert len(cluster.core.sleepers.asleep) == num_asleep
    cluster.at(cluster.now + 1, OfflineStored(()))
    run_to(cluster, cluster.now / MS + 600)
    assert len(cluster.core.sleepers.asleep) == 2, "what has been answered keeps nobody awake"
    cluster.run()
    cluster.expect_outputs()


def test_nobody_sleeps_by_itself_where_that_was_not_asked_for() -> None:
    cluster = FakeCluster(num_workers=4, full_blocks=40, policy="recompute", awake=AwakeParams(after_s=0.1))
    run_to(cluster, 3_000)
    assert not cluster.core.sleepers.asleep and not cluster.core.awaits_tick


# --- any history ----------------------------------------------------------------------------------------------------


def watch(cluster: FakeCluster, min_awake: int) -> list[str]:
    """Faults of what goes to sleep by itself, seen at each such decision."""
    faults: list[str] = []
    sleepers = cluster.core.sleepers
    sleep_now = sleepers.sleep

    def watched(
        worker_ids: list[int], level: int, now_ns: int, reason: str = "requested",
        told: Mapping[str, object] | None = None,
    ) -> object:
        if reason != "requested":
            state = cluster.core.state
            serving = {w for w, groups in state.groups_of.items() if groups} - set(sleepers.leaving)
            if len(serving - set(worker_ids)) < min_awake:
                faults.append(f"{cluster.now}: {worker_ids} of {serving}")
            if cluster.core.loads.kept_out or state.unplaced_online() or cluster.core.merges or cluster.core.restores:
                faults.append(f"{cluster.now}: under pressure")
            if any(g.queues.serves_online for w in worker_ids for g in state.groups_of[w]):
                faults.append(f"{cluster.now}: {worker_ids} serve")
        return sleep_now(worker_ids, level, now_ns, reason, told)

    sleepers.sleep = watched  # type: ignore[method-assign, assignment]
    return faults


def run_history(seed: int, num_bursts: int, num_deaths: int, policy: str, min_awake: int) -> FakeCluster:
    """Bursts with quiet between them, deaths at any time, refusals: the cluster sleeps and wakes by itself."""
    rng = random.Random(seed)
    cluster = FakeCluster(
        num_workers=4, full_blocks=30, eager=True, seed=seed, policy=policy, offline=rng.choice([None, "harvest"]),
        faults=Faults(apply=0.1, offer=0.05, load=0.1, move=0.1, budget=5),
        awake=AwakeParams(min_awake, rng.choice([None, 3]), True, 0.15),
    )
    faults = watch(cluster, min_awake)
    at_ms = 0.0
    for burst in range(num_bursts):
        at_ms += rng.uniform(200, 900)
        crowd(cluster, rng.randrange(4, 20), first=100 * burst, at_ms=at_ms)
        if rng.random() < 0.5:
            service_class = ServiceClass.OFFLINE
            cluster.submit(f"o{burst}", [3] * 12, 60, at_ms, service_class=service_class)
    for _ in range(num_deaths):
        worker = rng.randrange(4)
        cluster.kill_at(worker, rng.uniform(100, at_ms + 300))
    for worker in range(4):
        cluster.restart_at(worker, at_ms + 200)
        cluster.restart_at(worker, at_ms + 1_000)
    run_to(cluster, at_ms + 1_200)
    cluster.run()
    assert not faults, faults
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    return cluster


@settings(
    max_examples=int(os.environ.get("JETTISON_WAKE_SEEDS", "8")), deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 2),
    st.sampled_from(["drop", "recompute", "migrate", "swap"]), st.integers(1, 3),
)
def test_any_history_of_bursts_and_deaths(
    seed: int, num_bursts: int, num_deaths: int, policy: str, min_awake: int
) -> None:
    """One owner, every token once, and never too few awake by themselves."""
    run_history(seed, num_bursts, num_deaths, policy, min_awake)


@pytest.mark.parametrize("policy", ["drop", "recompute"])
def test_such_histories_sleep_and_wake(policy: str) -> None:
    kinds = {r.kind for seed in range(2) for r in run_history(seed, 3, 1, policy, 2).records}
    assert {"asleep", "woken", "wake_decided", "worker_lost"} <= kinds
