"""Offline work that stands still in virtual time: the log says so, says why, and says when it goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scenarios import PROFILE, Watched, make_setup

from jettison.core.ladder.lists import with_offline
from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.standing import Standstill
from jettison.sim.faults import Crash
from jettison.sim.setup import setup_from_profile
from jettison.types import ServiceClass

PARTS = ("scheduler", "checkpoint", "prefetch")


def harvesting(policy: str = "recompute", *, num_workers: int = 1, num_blocks: int = 200, max_num_seqs: int = 64,
               tpot_s: float | None = None, ttft_s: float | None = None, **offline: Any) -> Watched:
    setup = make_setup(policy, num_workers=num_workers, num_blocks=num_blocks)
    params = OfflineParams(slo=SloParams(ttft_s=ttft_s, tpot_s=tpot_s), **offline)
    rungs = with_offline(setup.params.rungs, PARTS)
    limits = replace(setup.limits, max_num_seqs=max_num_seqs)
    return Watched(replace(setup, limits=limits, params=replace(setup.params, offline=params, rungs=rungs)))


def batch(watched: Watched, num: int, *, output: int = 100, at_s: float = 0.0, tenant: str = "") -> None:
    for i in range(num):
        watched.submit(f"batch-{tenant}{i}", 100, output, at_s, ServiceClass.OFFLINE, tenant)


def stands(watched: Watched) -> list[dict[str, Any]]:
    """Run to the end; what was told, of which each has gone on."""
    watched.cluster.run()
    watched.expect_all_served()
    told = [dict(r.fields) for r in watched.records if r.kind == "offline_stands"]
    ends = [r.fields for r in watched.records if r.kind == "offline_goes_on"]
    begun = {(t["group"], t.get("request")) for t in told}
    assert begun == {(e["group"], e.get("request")) for e in ends}
    return told


def test_work_that_gets_on_is_not_told_of() -> None:
    watched = harvesting()
    batch(watched, 8)
    watched.submit("chat", 100, 100, 0.1)
    assert stands(watched) == []


def test_online_work_that_fills_the_time_of_steps() -> None:
    watched = harvesting(tpot_s=0.0015)
    batch(watched, 4)
    watched.submit("chat", 30, 300, 0.05)
    (told,) = stands(watched)
    assert told["reason"] == Standstill.TIME and told["group"] == 0 and told["online_running"] == 1
    assert told["with_one_more_ms"] > told["may_take_ms"] > 1.3
    assert told["stood_ms"] >= 200


def test_online_requests_that_take_all_memory() -> None:
    watched = harvesting(num_blocks=60)
    batch(watched, 6)
    for i in range(14):
        watched.submit(f"chat-{i}", 120, 60, 0.3 + 0.004 * i)
    told = stands(watched)
    assert [t["reason"] for t in told][:1] == [Standstill.PAUSED]
    assert told[0]["hosted"] > 0 and told[0]["online_waiting"] > 0


def test_online_requests_that_take_every_place() -> None:
    watched = harvesting(max_num_seqs=4)
    batch(watched, 2, at_s=0.01)
    for i in range(4):
        watched.submit(f"chat-{i}", 20, 250, 0.0)
    (told,) = stands(watched)
    assert (told["reason"], told["free_places"], told["waiting"]) == (Standstill.PLACES, 0, 2)


def test_requests_that_wait_behind_another_key() -> None:
    """The first key's requests were long; the other's are served until it is due again."""
    watched = harvesting(num_blocks=100, max_num_seqs=2)
    for i in range(3):
        watched.submit(f"long-{i}", 1500, 2, 0.0, ServiceClass.OFFLINE, "a")
    batch(watched, 10, tenant="b", output=150, at_s=0.2)
    batch(watched, 2, tenant="a", at_s=0.3)
    behind = [t for t in stands(watched) if t["reason"] == Standstill.OTHERS]
    assert behind and {t["request"] for t in behind} <= {"long-2", "batch-a0"}
    assert behind[0]["own_virtual_tokens"] > behind[0]["next_virtual_tokens"]
    assert str(behind[0]["next_request"]).startswith("batch-b")


def test_steps_that_are_given_up_again_and_again() -> None:
    """Not even the shortest comes to its end between two arrivals."""
    told = stands(_beside_arrivals(0.0025))
    assert [t["reason"] for t in told][:1] == [Standstill.ABANDONED]
    assert told[0]["abandoned_steps"] > 3


def test_steps_become_so_short_that_they_end_between_arrivals() -> None:
    watched = _beside_arrivals(0.006)
    assert stands(watched) == []
    assert 2 <= watched.cluster.core.state.counters.num_abandoned_steps < 10


def _beside_arrivals(every_s: float) -> Watched:
    watched = harvesting(ttft_s=0.004, tpot_s=0.0015, safepoint_layers=1)
    watched.submit("batch", 128, 3, 0.0, ServiceClass.OFFLINE)
    for i in range(round(0.24 / every_s)):
        watched.submit(f"chat-{i}", 5, 1, 0.002 + every_s * i)
    return watched


def beside_a_dear_host_link() -> Watched:
    """A batch that is freed for a burst. Copies are slow, and slow steps down: that of one request would cost the
    others more than computing it again."""
    setup = make_setup("recompute", num_workers=1, num_blocks=60)
    dear = replace(PROFILE, host_copy_bytes_per_s=1e7, beside_bytes_per_s=1e7, beside_byte_s=1e-7)
    setup = replace(setup, profile=dear, params=replace(
        setup.params, profile=dear, rungs=with_offline(setup.params.rungs, PARTS), offline=OfflineParams()))
    watched = Watched(setup)
    batch(watched, 6)
    for i in range(6):
        watched.submit(f"chat-{i}", 120, 60, 0.3 + 0.004 * i)
    watched.cluster.run()
    watched.expect_all_served()
    return watched


def test_a_host_link_that_steps_have_less_room_for_than_computing_again_takes() -> None:
    watched = beside_a_dear_host_link()
    told = [r.fields for r in watched.records if r.kind == "offline_computed_again"]
    assert told and {t["reason"] for t in told} == {"the link would take longer than computing it"}
    assert all(t["requests"] and t["blocks"] > t["blocks_a_step"] for t in told)
    assert watched.cluster.core.state.counters.checkpoints_dropped == sum(t["requests"] for t in told)


@pytest.mark.parametrize(("exchange", "why"), [
    ("transfer", Standstill.LAYOUT), ("recompute", Standstill.AGAIN),
])  # fmt: skip
def test_instances_that_merge_over_a_slow_link(exchange: str, why: Standstill) -> None:
    setup = make_setup("drop", num_blocks=60, exchange=exchange)
    slow = replace(PROFILE, link_bytes_per_s=3e4)
    params = replace(setup.params, profile=slow, rungs=with_offline(setup.params.rungs, PARTS))
    watched = Watched(setup_from_profile(setup.shape, setup.limits, params, 2, setup.memory, slow))
    batch(watched, 8, output=120)
    watched.cluster.loop.at(100_000_000, watched.cluster.request_drop)
    told = stands(watched)
    assert why in [t["reason"] for t in told]
    assert "drop" in watched.kinds()


def test_work_that_no_worker_can_take() -> None:
    watched = harvesting()
    batch(watched, 2)
    watched.cluster.inject([Crash(0.1, 0, detect_s=0.01, restart_after_s=0.6)])
    told = stands(watched)
    assert [(t["group"], t["reason"]) for t in told] == [(None, Standstill.NO_WORKER)]
    assert told[0]["waiting"] == 2


@pytest.mark.parametrize("seed", range(4))
def test_fast_forwards_tell_the_same(seed: int) -> None:
    runs = []
    for compress in (False, True):
        setup = make_setup("swap", num_workers=2, num_blocks=40)
        offline = OfflineParams(slo_aware=bool(seed % 2))
        parts = PARTS if seed % 2 else ()
        params = replace(setup.params, offline=offline, rungs=with_offline(setup.params.rungs, parts))
        watched = Watched(replace(setup, compress=compress, params=params), checks=False)
        watched.load(seed, num_requests=60, span_s=1.0, mean_prompt=60, offline_share=0.5, num_tenants=3)
        watched.cluster.run()
        watched.expect_all_served()
        runs.append(watched)
    naive, compressed = runs
    assert compressed.records == naive.records


@pytest.mark.parametrize("seed", range(6))
def test_nothing_came_of_offline_work_while_it_is_said_to_stand(seed: int) -> None:
    watched = harvesting(num_blocks=40, tpot_s=(0.003, 0.006)[seed % 2], ttft_s=0.004)
    watched.load(seed, num_requests=60, span_s=1.0, mean_prompt=60, offline_share=0.4)
    told = stands(watched)
    times = sorted(t for name, r in watched.requests.items() if r.service_class is ServiceClass.OFFLINE
                   for t in watched.times[name])  # fmt: skip
    ends = {r.fields["ms"]: r.time_ns for r in watched.records if r.kind == "offline_goes_on"}
    for record in watched.records:
        if record.kind == "offline_stands" and "request" not in record.fields:
            begin_ns = record.time_ns - round(record.fields["stood_ms"] * 1e6)  # type: ignore[operator]
            assert not [t for t in times if begin_ns < t <= record.time_ns], record
    assert all(ms >= 200 for ms in ends) and len(told) >= len(ends)
