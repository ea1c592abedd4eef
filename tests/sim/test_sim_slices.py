"""Simulated workers shed rows by the rules of live ones, and lose no time by it but for a second read of weights."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from offlinesteps import COMMAND_NS, REPORT_NS, expect_fast_forwards_change_nothing, harvesting
from scenarios import COST, Watched, make_shape

from jettison.core import ports
from jettison.core.totals import counters
from jettison.sim.cluster import SimulatedCluster
from jettison.sim.executor import ModelledExecutor
from jettison.sim.faults import draw_faults
from jettison.sim.setup import ClusterSetup, Hops
from jettison.types import Request, SamplingParams, ServiceClass


def shedding(policy: str = "recompute", **changes: Any) -> ClusterSetup:
    setup = harvesting(policy, **changes)
    return replace(setup, limits=replace(setup.limits, sheds_rows=True))


def one_step(every: int, asks_ns: int | None, *, num_layers: int = 8) -> list[tuple[ports.Event, int]]:
    """The ends of steps of an offline prompt of 20 tokens, the first of which is told to shed its rows after a time."""
    ends: list[tuple[ports.Event, int]] = []
    executor = ModelledExecutor(replace(COST, num_layers=num_layers), overhead_s=1e-3)
    setup = shedding(
        every=every, shape=make_shape(num_layers), executor=executor, hops=Hops(COMMAND_NS / 1e9, REPORT_NS / 1e9)
    )
    cluster = SimulatedCluster(setup, on_event=lambda event, now_ns: ends.append((event, now_ns)))
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    cluster.submit(Request("batch", (0,) * 20, params, 0, service_class=ServiceClass.OFFLINE), 0)
    if asks_ns is not None:
        cluster.loop.at(asks_ns, lambda: cluster.workers[0].abandon(1))
    cluster.run()
    return [(event, now_ns) for event, now_ns in ends if not isinstance(event, ports.Tick | ports.Arrived)]


@pytest.mark.parametrize("every", [1, 2, 3, 9])
def test_the_parts_of_a_step_take_its_time_together(every: int) -> None:
    ((_, whole_ns),) = one_step(every, None)
    for share in (0.2, 0.5, 0.8):
        first, *rest = one_step(every, round(share * whole_ns))
        if not rest:
            assert every == 9 or share == 0.8, "past the last safepoint"
            continue
        event, shed_ns = first
        ((last, end_ns),) = rest
        assert isinstance(event, ports.StepCompleted) and isinstance(last, ports.StepCompleted)
        assert event.kept_layers and event.kept_layers % every == 0 and not event.tokens
        assert last.kept_layers is None and len(last.tokens) == 1
        again_ns = end_ns - whole_ns - COMMAND_NS - REPORT_NS
        assert 0 <= again_ns <= 1_000_000 + round(2e9 * COST.step_s) + 2, "what a step takes beside its layers"
        assert shed_ns < whole_ns


def batch_beside_chat(setup: ClusterSetup, seed: int, num_chats: int = 12) -> Watched:
    watched = Watched(setup, checks=True)
    rng = random.Random(seed)
    for i in range(10):
        watched.submit(f"batch-{i}", rng.randint(100, 400), rng.randint(20, 60), 0.0, ServiceClass.OFFLINE)
    for i in range(num_chats):
        watched.submit(f"chat-{i}", rng.randint(5, 40), rng.randint(2, 20), rng.uniform(0.01, 0.4))
    return watched


@pytest.mark.parametrize(("policy", "num_workers"), [("recompute", 1), ("pipeline", 2), ("drop", 2)])
@pytest.mark.parametrize("seed", range(3))
def test_an_arrival_waits_for_the_next_safepoint_and_nothing_is_computed_twice(
    policy: str, num_workers: int, seed: int
) -> None:
    watched = batch_beside_chat(shedding(policy, num_workers=num_workers), seed)
    watched.cluster.run()
    watched.expect_all_served()
    totals = counters(watched.cluster.core)
    assert totals["steps_shed"] > 0 or policy == "pipeline"
    assert totals["slices_resumed"] >= totals["steps_shed"] - totals["slices_discarded"]
    assert totals["steps_abandoned"] == 0 or policy != "recompute"


@pytest.mark.parametrize("seed", range(6))
def test_faults_leave_nothing_of_a_slice(seed: int) -> None:
    setup = shedding("drop", num_workers=3, num_blocks=60)
    watched = batch_beside_chat(setup, seed, num_chats=40)
    watched.cluster.inject(draw_faults(seed, range(3), 1.5, 1 + seed % 4))
    watched.cluster.run()
    watched.expect_all_served()
    assert counters(watched.cluster.core)["steps_shed"] > 0


@pytest.mark.parametrize("seed", range(8))
def test_fast_forwards_change_nothing_beside_steps_that_shed(seed: int) -> None:
    rng = random.Random(seed)
    changes = {
        "num_workers": rng.randint(1, 3), "num_blocks": rng.choice([36, 80, 300]),
        "hops": Hops(rng.choice([0.0, 5e-5]), rng.choice([0.0, 5e-5])),
        "executor": ModelledExecutor(COST, noise=rng.choice([0.0, 0.05]), seed=seed),
    }
    policy = rng.choice(["drop", "recompute", "swap", "migrate"])
    expect_fast_forwards_change_nothing(shedding(policy, **changes), seed)
