"""A burst that arrives while a device sleeps: carried by waking over a fast link, by dropping over a slow one, and
``explain`` says which way was taken and why. Faults beside it lose nothing.

``JETTISON_WAKE_SCHEDULES=20000`` is the long run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from scenarios import PROFILE, Watched, make_setup
from schedules import END_NS, batches, beside_offline, expect_met, run_to_its_end

from jettison.core.ladder.lists import with_wake
from jettison.core.params import AwakeParams
from jettison.policy.overload import Trigger
from jettison.report.decisions import Decision, decisions_of
from jettison.report.explain import print_decisions
from jettison.report.results import RunResult
from jettison.sim.faults import draw_faults
from jettison.sim.links import LinkSpec, Topology
from jettison.sim.setup import ClusterSetup

NUM_SCHEDULES = int(os.environ.get("JETTISON_WAKE_SCHEDULES", "25"))
BATCH = 25
QUIET_S = 3.0
FAST, SLOW = 4e9, 4e5
"""Bytes a second of each link; parameters have 0.8 MB."""


def sleepy(
    setup: ClusterSetup, awake: AwakeParams, link_bytes_per_s: float = FAST, disk_bytes_per_s: float | None = None
) -> ClusterSetup:
    """The same, with the rung that wakes, and links and disks that carry so much, as profiled. Without a disk it is as
    slow as the links: parameters come from peers."""
    disk_bytes_per_s = disk_bytes_per_s or link_bytes_per_s
    profile = replace(PROFILE, link_bytes_per_s=link_bytes_per_s, disk_bytes_per_s=disk_bytes_per_s)
    params = replace(
        setup.params, rungs=with_wake(setup.params.rungs, setup.params.static_pipeline), awake=awake, profile=profile
    )
    topology = Topology(LinkSpec(link_bytes_per_s, profile.link_latency_s, 1.0))
    return replace(setup, params=params, profile=profile, topology=topology)


def burst_after_quiet(link_bytes_per_s: float, disk_bytes_per_s: float | None = None) -> Watched:
    """Three devices, of which one falls asleep in the quiet before the burst. The burst's prompts are long: a device
    more computes them, and a merge does not."""
    awake = AwakeParams(min_awake=2, falls_asleep=True, after_s=1.0)
    setup = make_setup(num_workers=3, num_blocks=40)
    weighed = replace(setup.params, overload=replace(setup.params.overload, trigger=Trigger.FORECAST))
    watched = Watched(sleepy(replace(setup, params=weighed), awake, link_bytes_per_s, disk_bytes_per_s))
    for i in range(6):
        watched.submit(f"early{i}", 30, 120, 0.1 * i)
    for i in range(60):
        watched.submit(f"r{i}", 100, 60, QUIET_S + 0.006 * i)
    watched.cluster.start_ticks()
    watched.cluster.run(until_ns=round(QUIET_S * 1e9))
    assert len(watched.cluster.core.sleepers.asleep) == 1
    watched.cluster.run(until_ns=END_NS)
    watched.expect_all_served()
    return watched


def explained(watched: Watched) -> tuple[list[Decision], str]:
    """Decisions of the run, and the table that people see."""
    log = [{"t": r.time_ns / 1e9, "kind": r.kind} | dict(r.fields) for r in watched.records]
    run = RunResult(name="burst", events={"log": log})
    decisions = decisions_of(run)
    text = StringIO()
    print_decisions(decisions, Console(file=text, width=200))
    return decisions, text.getvalue()


def test_over_a_fast_link_the_burst_is_carried_by_waking() -> None:
    watched = burst_after_quiet(FAST)
    decisions, text = explained(watched)
    first = next(d for d in decisions if d.kind == "wake sleepers")
    assert first.predicted["taken_request_s"] < first.predicted["stay_request_s"]
    assert first.outcome["serves_after_s"] == pytest.approx(first.predicted["wake_s"], rel=1.0, abs=0.02)
    assert first.inputs["reason"] == "memory keeps the queue out"
    assert "wake sleepers" in text
    kinds = watched.kinds()
    assert "drop" not in kinds[: kinds.index("woken")]


def test_over_a_slow_link_the_burst_is_carried_by_dropping() -> None:
    watched = burst_after_quiet(SLOW)
    decisions, _ = explained(watched)
    first = next(d for d in decisions if d.kind in ("drop", "wake sleepers"))
    assert first.kind == "drop" and first.predicted["taken_request_s"] < first.predicted["stay_request_s"]
    kinds = watched.kinds()
    assert "woken" not in kinds or kinds.index("drop") < kinds.index("woken")


def test_over_a_slow_link_who_has_a_fast_disk_is_woken_from_it() -> None:
    decisions, text = explained(burst_after_quiet(SLOW, FAST))
    first = next(d for d in decisions if d.kind == "wake sleepers")
    assert first.inputs["source"] == "model folder"
    woken = next(d for d in decisions if d.kind == "wake")
    assert woken.outcome["pulled_bytes"] == 0
    assert woken.outcome["serves_after_s"] == pytest.approx(woken.predicted["predicted_s"], rel=1.0, abs=0.02)
    assert "source model folder" in text


def run_schedule(seed: int) -> Watched:
    """Bursts, quiet, and faults, of sleepers and of those that wake among them."""
    rng = random.Random(seed)
    num_workers = rng.randint(3, 5)
    awake = AwakeParams(rng.randint(1, 2), rng.choice([None, num_workers - 1]), True, 0.05)
    setup = sleepy(make_setup(rng.choice(["drop", "migrate", "recompute"]), num_workers=num_workers), awake,
                   rng.choice([FAST, 1e8, 1e7]))
    setup, offline_share = beside_offline(setup, seed)
    watched = Watched(setup, check_every=5)
    watched.load(seed, num_requests=6 * num_workers, span_s=0.2, mean_output=25, offline_share=offline_share)
    for i in range(12):
        watched.submit(f"late{i}", 40, 30, 1.0 + 0.002 * i)
    watched.cluster.start_ticks()
    watched.cluster.inject(draw_faults(seed, range(num_workers), 1.2, seed % 4))
    run_to_its_end(watched)
    watched.expect_one_end_each()
    return watched


@pytest.mark.parametrize("seeds", batches(NUM_SCHEDULES, BATCH, 50))
def test_any_schedule_leaves_every_request_with_one_end(seeds: Sequence[int]) -> None:
    expect_met(run_schedule, seeds, {"asleep", "woken", "wake_decided", "worker_lost"})


def test_compressed_steps_change_nothing() -> None:
    """Falling asleep goes by the clock: fast-forward stops for it."""

    def times(compress: bool) -> object:
        awake = AwakeParams(min_awake=1, falls_asleep=True, after_s=0.3)
        setup = sleepy(make_setup("recompute", num_workers=3, num_blocks=80), awake)
        watched = Watched(replace(setup, compress=compress), checks=False)
        for i in range(4):
            watched.submit(f"r{i}", 30, 400, 0.4 * i)
        watched.cluster.start_ticks()
        watched.cluster.run(until_ns=5 * 10**9)
        assert "asleep" in watched.kinds()
        return watched.times, [(r.kind, r.time_ns) for r in watched.records]

    assert times(compress=True) == times(compress=False)
