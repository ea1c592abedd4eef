"""A burst on two devices of three that there may be: carried by dropping first, then by the third, which was started
meanwhile; back to two afterwards. Faults beside it lose nothing.

``JETTISON_SCALING_SCHEDULES=20000`` is the long run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from scenarios import PAGE_BYTES, Watched, make_setup, make_shape
from schedules import END_NS, batches, expect_met, run_to_its_end
from test_waking import sleepy

from jettison.core.params import AwakeParams, ProvisionParams
from jettison.policy.overload import Trigger
from jettison.report.decisions import decisions_of
from jettison.report.results import RunResult
from jettison.sim.faults import draw_faults
from jettison.sim.setup import ClusterSetup

NUM_SCHEDULES = int(os.environ.get("JETTISON_SCALING_SCHEDULES", "25"))
BATCH = 25
START_S = 1.0


def elastic(
    setup: ClusterSetup, least: int, at_start: int, start_s: float = START_S, after_s: float = 0.5
) -> ClusterSetup:
    """The same, with so many processes, and starts that take so long, as is known."""
    awake = AwakeParams(min_awake=least, falls_asleep=True, after_s=after_s)
    setup = sleepy(setup, awake)
    provision = ProvisionParams(least, at_start, start_s)
    overload = replace(setup.params.overload, trigger=Trigger.FORECAST)
    return replace(setup, params=replace(setup.params, provision=provision, overload=overload), start_s=start_s)


def burst(*, compress: bool = True, checks: bool = True) -> Watched:
    """Seconds of requests, more than two hold however they are merged."""
    shape = make_shape(shard_bytes=8 * PAGE_BYTES)  # a copy of the model is worth as much as one instance's KV
    setup = elastic(make_setup(num_workers=3, num_blocks=40, shape=shape), least=2, at_start=2)
    watched = Watched(replace(setup, compress=compress), checks=checks)
    for i in range(400):
        watched.submit(f"r{i}", 20, 160, 0.1 + 0.006 * i)
    watched.submit("late", 20, 20, 60.0)  # until then the clock goes on
    watched.cluster.start_ticks()
    watched.cluster.run(until_ns=END_NS)
    return watched


@pytest.fixture(scope="module")
def carried() -> Watched:
    """The burst with compressed steps: no look at the books parts them."""
    return burst(checks=False)


def test_a_burst_is_carried_by_dropping_then_by_the_third_and_two_are_left(carried: Watched) -> None:
    watched = carried
    watched.expect_all_served()
    kinds = watched.kinds()
    first = kinds.index("instance_asked")
    assert kinds.index("drop") < kinds.index("worker_joined") < kinds.index("woken") < kinds.index("instance_released")
    records = watched.records
    joined = next(r for r in records[first:] if r.kind == "worker_joined")
    assert joined.time_ns - records[first].time_ns == START_S * 1e9 and joined.fields["worker"] == 2
    provisioning = watched.cluster.core.sleepers.provisioning
    assert (provisioning.num_provisioned, provisioning.num_wanted) == (2, 2)
    assert provisioning.start_s == pytest.approx(START_S)
    log = [{"t": r.time_ns / 1e9, "kind": r.kind} | dict(r.fields) for r in records]
    decisions = decisions_of(RunResult(name="burst", events={"log": log}))
    started = next(d for d in decisions if d.kind == "start instance")
    assert started.predicted["predicted_s"] == START_S and started.outcome["start_ms"] == 1e3 * START_S
    assert "release instance" in {d.kind for d in decisions}


def test_the_same_without_compressed_steps(carried: Watched) -> None:
    other = burst(compress=False)
    assert carried.times == other.times
    assert [(r.kind, r.time_ns) for r in carried.records] == [(r.kind, r.time_ns) for r in other.records]


def run_schedule(seed: int) -> Watched:
    """Bursts, a quiet, and faults, of instances that come and go."""
    rng = random.Random(seed)
    num_workers = rng.randint(2, 5)
    least = rng.randint(1, num_workers - 1)
    setup = make_setup(rng.choice(["drop", "migrate", "recompute"]), num_workers=num_workers)
    setup = elastic(setup, least, rng.randint(least, num_workers), rng.choice([0.02, 0.2]), after_s=0.05)
    watched = Watched(setup, check_every=5)
    watched.load(seed, num_requests=8 * num_workers, span_s=0.2, mean_output=25)
    for i in range(12):
        watched.submit(f"late{i}", 40, 30, 1.0 + 0.002 * i)
    watched.cluster.start_ticks()
    watched.cluster.inject(draw_faults(seed, range(num_workers), 1.2, seed % 4))
    run_to_its_end(watched)
    watched.expect_one_end_each()
    return watched


@pytest.mark.parametrize("seeds", batches(NUM_SCHEDULES, BATCH, 50))
def test_any_schedule_leaves_every_request_with_one_end(seeds: Sequence[int]) -> None:
    met = {"asleep", "woken", "worker_lost", "instance_asked", "instance_released"}
    expect_met(run_schedule, seeds, met)
