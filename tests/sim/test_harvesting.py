"""Checkpoints, frees and prefetches in virtual time: workers copy as simulated ones do, memory is planned as real."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scenarios import Watched, make_setup

from jettison.core.ladder.lists import with_offline
from jettison.core.observing import OfflineGauges, offline_gauges
from jettison.core.totals import counters
from jettison.policy.offline import OfflineParams
from jettison.types import Request, SamplingParams, ServiceClass


def harvested(policy: str, parts: tuple[str, ...], num_workers: int = 2) -> Watched:
    """A batch that fills memory, and bursts of online requests that need some of it."""
    setup = make_setup(policy, num_workers=num_workers, num_blocks=60)
    offline = OfflineParams(checkpoints="checkpoint" in parts, prefetches="prefetch" in parts)
    rungs = with_offline(setup.params.rungs, parts)
    watched = Watched(replace(setup, params=replace(setup.params, rungs=rungs, offline=offline)), check_every=1)
    for i in range(12 * num_workers):
        sampling = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
        request = Request(f"batch-{i}", (i,) * 100, sampling, 0, service_class=ServiceClass.OFFLINE)
        watched.requests[request.request_id] = request
        watched.cluster.submit(request, 0)
    for burst in range(3):
        for i in range(5 * num_workers):
            watched.submit(f"chat-{burst}-{i}", 120, 30, 0.3 + 0.5 * burst + 0.004 * i)
    watched.cluster.run()
    watched.expect_all_served()
    assert watched.cluster.core.hosted.is_idle
    return watched


@pytest.mark.parametrize("policy", ["recompute", "drop", "swap+drop", "pipeline"])
@pytest.mark.parametrize("parts", [("scheduler", "checkpoint"), ("scheduler", "checkpoint", "prefetch")])
def test_a_batch_is_freed_and_comes_back_beside_bursts(policy: str, parts: tuple[str, ...]) -> None:
    totals = counters(harvested(policy, parts).cluster.core)
    assert totals["checkpointed_blocks"] > 0
    assert totals["checkpoint_frees"] > 0 and totals["prefetched_blocks"] > 0


def test_checkpoints_save_what_would_be_computed_again() -> None:
    without = counters(harvested("recompute", ("scheduler",), 1).cluster.core)
    with_them = counters(harvested("recompute", ("scheduler", "checkpoint", "prefetch"), 1).cluster.core)
    assert with_them["recomputed_tokens"] < without["recomputed_tokens"]


def burst_beside_a_batch(num_chats: int = 8, *, prompt: int = 120, output: int = 60) -> Watched:
    """Online requests that take all memory from a batch for a while."""
    setup = make_setup("recompute", num_workers=1, num_blocks=60)
    rungs = with_offline(setup.params.rungs, ("scheduler", "checkpoint", "prefetch"))
    watched = Watched(replace(setup, params=replace(setup.params, rungs=rungs, offline=OfflineParams())))
    for i in range(6):
        watched.submit(f"batch-{i}", 100, 150, 0.0, ServiceClass.OFFLINE)
    for i in range(num_chats):
        watched.submit(f"chat-{i}", prompt, output, 0.3 + 0.004 * i)
    return watched


def test_what_a_batch_does_can_be_read_at_any_moment() -> None:
    watched = burst_beside_a_batch()
    core = watched.cluster.core
    seen: list[tuple[OfflineGauges, int]] = []

    def look() -> None:
        watched.cluster.settle()
        gauges = offline_gauges(core.groups[0])
        seen.append((gauges, core.ladder.lag_blocks))
        if not gauges.offline_running:
            assert core.ladder.lag_blocks == 0, "nobody runs whose blocks could be copied"

    for at_ms in range(1, 4000, 5):
        watched.cluster.loop.at(at_ms * 1_000_000, look)
    watched.cluster.run()
    watched.expect_all_served()
    for name in OfflineGauges._fields:
        assert any(getattr(gauges, name) > 0 for gauges, _ in seen), name
    assert any(lag > 0 for _, lag in seen)
    assert any(g.offline_hosted == 6 and not g.offline_running for g, _ in seen)
    assert seen[-1] == (OfflineGauges(), 0)


def test_a_group_that_has_nothing_to_run_but_what_comes_back_is_counted_once() -> None:
    watched = burst_beside_a_batch(num_chats=1, prompt=900, output=2)
    watched.cluster.run()
    watched.expect_all_served()
    assert counters(watched.cluster.core)["prefetch_stalls"] == 1
