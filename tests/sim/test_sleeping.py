"""Modelled workers that sleep and wake: what it takes from each source, and faults at every phase of it.

``JETTISON_SLEEP_SCHEDULES=20000`` is the long run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest
from scenarios import PROFILE, Watched, make_setup
from schedules import END_NS, batches, beside_offline, expect_met, expect_same_again, run_to_its_end

from jettison.core.moving.sleeping import SleepState
from jettison.sim.faults import Crash, draw_faults

NUM_SCHEDULES = int(os.environ.get("JETTISON_SLEEP_SCHEDULES", "50"))
BATCH = 50
SPAN_S = 0.3
TO_BE_MET = {"asleep", "woken", "stays_awake", "worker_lost", "migrated"}


def slept(level: int, *worker_ids: int, num_workers: int = 2) -> Watched:
    watched = Watched(make_setup(num_workers=num_workers))
    watched.cluster.start_ticks()
    watched.cluster.request_sleep(worker_ids, level)
    sleepers = watched.cluster.core.sleepers
    watched.cluster.run(until_ns=END_NS, is_over=lambda: sleepers.asleep >= set(worker_ids) and sleepers.is_idle)
    return watched


def woken_ms(watched: Watched, worker_id: int) -> float:
    watched.cluster.request_wake(worker_id)
    watched.cluster.run(until_ns=END_NS, is_over=lambda: "woken" in watched.kinds())
    (woken,) = (record for record in watched.records if record.kind == "woken")
    return float(str(woken.fields["ms"]))


def test_a_sleeper_holds_nothing_but_its_workspace() -> None:
    watched = slept(2, 0)
    report = watched.cluster.workers[0].memory.report()
    assert report["parameter_bytes"] == report["kv_bytes"] == 0
    assert report["free_bytes"] == report["budget_bytes"] - report["workspace_bytes"]
    woken_ms(watched, 0)
    assert watched.cluster.workers[0].memory.report() == watched.cluster.workers[1].memory.report()


def test_waking_takes_what_the_source_takes() -> None:
    """A peer's link, the machine's copy and the disk, in this order where they are so fast."""
    num_bytes = make_setup().shape.parameter_bytes
    peer_ms = woken_ms(slept(2, 0), 0)
    host_ms = woken_ms(slept(1, 0, 1), 0)
    alone = slept(1, 0, 1)
    alone.cluster.shared_copy(0).clear()  # as after a restart of the machine: nothing but the disk is left
    disk_ms = woken_ms(alone, 0)
    assert host_ms - 1e3 * PROFILE.host_copy_cost_s(num_bytes) == pytest.approx(
        disk_ms - 1e3 * PROFILE.disk_cost_s(num_bytes), abs=0.01
    )
    assert peer_ms > 1e3 * num_bytes / PROFILE.link_bytes_per_s


@pytest.mark.parametrize("state", [SleepState.LEAVING, SleepState.EMPTYING, SleepState.ASLEEP, SleepState.WAKING])
@pytest.mark.parametrize("level", [1, 2])
def test_a_death_at_each_phase(state: SleepState, level: int) -> None:
    watched = Watched(make_setup(num_workers=3, num_blocks=80), check_every=1)
    watched.load(3, num_requests=24, span_s=0.2)
    cluster, sleepers = watched.cluster, watched.cluster.core.sleepers
    cluster.run(until_ns=50_000_000)
    cluster.request_sleep([0], level)
    if state is SleepState.WAKING:
        cluster.run(until_ns=END_NS, is_over=lambda: sleepers.state_of(0) is SleepState.ASLEEP)
        cluster.request_wake(0)
    cluster.run(until_ns=END_NS, is_over=lambda: sleepers.state_of(0) is state)
    assert sleepers.state_of(0) is state
    cluster.inject((Crash(cluster.loop.now_ns / 1e9, 0, 0.2, detect_s=0.0),))
    cluster.run(until_ns=END_NS)
    watched.expect_one_end_each()
    assert sleepers.state_of(0) is (SleepState.AWAKE if state is SleepState.WAKING else SleepState.ASLEEP)


def run_schedule(seed: int) -> Watched:
    """Sleep and wake orders by lot beside drops, restores and faults."""
    rng = random.Random(seed)
    num_workers = rng.randint(2, 4)
    setup = make_setup(rng.choice(["drop", "swap", "migrate", "recompute"]), num_workers=num_workers)
    setup, offline_share = beside_offline(setup, seed)
    watched = Watched(setup, check_every=5)
    watched.load(seed, num_requests=6 * num_workers, span_s=0.2, mean_output=25, offline_share=offline_share)
    cluster = watched.cluster

    def order() -> None:
        workers = list(range(num_workers)) if rng.random() < 0.1 else [rng.randrange(num_workers)]
        try:
            if rng.random() < 0.6:
                cluster.request_sleep(workers, rng.choice((1, 2)))
            else:
                cluster.request_wake(workers[0])
        except ValueError:  # refused: it is asleep, or moves, or is dead, ...
            return

    for _ in range(rng.randint(2, 10)):
        cluster.loop.at(rng.randrange(int(SPAN_S * 1e9)), order)
    for _ in range(rng.randint(0, 2)):
        cluster.loop.at(rng.randrange(int(SPAN_S * 1e9)), rng.choice([cluster.request_drop, cluster.request_restore]))
    cluster.inject(draw_faults(seed, range(num_workers), SPAN_S, seed % 4))
    run_to_its_end(watched)
    watched.expect_one_end_each()
    return watched


@pytest.mark.parametrize("seeds", batches(NUM_SCHEDULES, BATCH, 100))
def test_any_schedule_leaves_every_request_with_one_end(seeds: Sequence[int]) -> None:
    expect_met(run_schedule, seeds, TO_BE_MET)


def test_a_schedule_replays() -> None:
    expect_same_again(run_schedule, 7)
