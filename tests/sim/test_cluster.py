"""Whole clusters in virtual time: every policy serves every request, the same seed gives the same hash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scenarios import COST, PAGE_BYTES, Watched, make_setup, make_shape

from jettison.core import ports
from jettison.cost.model import ChunkShape
from jettison.cost.stepwork import LONE_STEP, Part, StepWork
from jettison.sim.executor import ModelledExecutor
from jettison.sim.links import LinkClass, LinkSpec, Topology
from jettison.sim.setup import Hops
from jettison.types import layer_shard

POLICIES = ("drop", "recompute", "swap", "migrate", "pipeline")


def run(setup, seed: int = 0, *, checks: bool = True, **load) -> Watched:  # type: ignore[no-untyped-def]
    watched = Watched(setup, checks=checks)
    watched.load(seed, **load)
    watched.cluster.run(until_ns=600 * 10**9)
    return watched


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_every_request(policy: str, num_workers: int) -> None:
    if policy == "pipeline" and num_workers == 3:
        num_workers = 4
    watched = run(make_setup(policy, num_workers=num_workers), num_requests=25 * num_workers)
    watched.expect_all_served()


@pytest.mark.parametrize("exchange", ["transfer", "recompute", "live", "auto"])
def test_an_overload_is_dropped_exchanged_and_restored(exchange: str) -> None:
    slow = Topology(LinkSpec.of(LinkClass.ETHERNET, 2e6))
    watched = run(make_setup(exchange=exchange, topology=slow), seed=1, num_requests=60)
    watched.expect_all_served()
    counters = watched.cluster.core.state.counters
    assert counters.num_drops >= 1 and counters.num_restores + counters.num_turned_restores >= 1
    assert (counters.num_live_rows > 0) == (exchange == "live") or exchange == "auto"
    assert watched.cluster.num_activations > 0
    assert any(times.bubble_ns for times in watched.cluster.bubbles.totals.values())


def test_the_same_seed_gives_the_same_hash_and_another_one_does_not() -> None:
    first, again, other = (run(make_setup(), seed, checks=False) for seed in (3, 3, 4))
    assert first.times == again.times
    assert first.cluster.log.hexdigest == again.cluster.log.hexdigest != other.cluster.log.hexdigest


def test_noise_is_part_of_the_seed() -> None:
    def noisy(seed: int) -> Watched:
        return run(make_setup(executor=ModelledExecutor(COST, noise=0.1, seed=seed)), checks=False)

    assert noisy(1).times == noisy(1).times != noisy(2).times


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    setup = make_setup("recompute", num_workers=1, hops=Hops(0.0, 0.0))
    watched = Watched(setup)
    watched.submit("r", 100, 3, 0.25)
    watched.cluster.run()
    prefill = COST.batch_cost_s([ChunkShape(0, 100)])
    decodes = [COST.batch_cost_s([ChunkShape(context, 1)]) for context in (100, 101)]
    ends = [0.25 + prefill, 0.25 + prefill + decodes[0], 0.25 + prefill + sum(decodes)]
    assert [t / 1e9 for t in watched.times["r"]] == pytest.approx(ends, abs=1e-8)


def test_a_hop_to_the_worker_and_one_back_are_paid_by_every_step() -> None:
    def last(hops: Hops) -> int:
        watched = Watched(make_setup("recompute", num_workers=1, hops=hops))
        watched.submit("r", 100, 3, 0.0)
        watched.cluster.run()
        return watched.times["r"][-1]

    assert last(Hops(1e-3, 2e-3)) - last(Hops(0.0, 0.0)) == 9_000_000


def test_a_slow_link_makes_a_static_pipeline_slower() -> None:
    def duration(rate: float) -> int:
        setup = make_setup("pipeline", topology=Topology(LinkSpec.of(LinkClass.ETHERNET, rate)))
        return run(setup, checks=False).cluster.loop.now_ns

    assert duration(1e5) > duration(1e8)


def test_bulk_in_front_of_activations_costs_time() -> None:
    """The ablation: without coordination a pipeline waits for whole transfers."""
    def stall(coordinate: bool) -> float:
        topology = Topology(LinkSpec.of(LinkClass.ETHERNET, 2e6))
        setup = make_setup(exchange="transfer", coordinate_links=coordinate, piece_bytes=4096, topology=topology)
        watched = run(setup, seed=1, num_requests=60, checks=False)
        watched.expect_all_served()
        assert watched.cluster.core.state.counters.num_drops
        return watched.cluster.activation_ns / watched.cluster.num_activations

    assert stall(False) > stall(True)


def test_blocks_move_inside_a_device_at_its_own_speed() -> None:
    """A shrink that evacuates blocks stands still for as long as the device's memory takes, not the host's link."""
    def moved_ns(device_bytes_per_s: float | None) -> int:
        profile = replace(make_setup().profile, device_copy_bytes_per_s=device_bytes_per_s, host_copy_bytes_per_s=1e5)
        watched = run(make_setup(profile=profile), seed=3, num_requests=60)
        watched.expect_all_served()
        assert watched.cluster.core.state.counters.num_restores
        return watched.cluster.loop.now_ns

    assert moved_ns(1e12) < moved_ns(None)


def test_swaps_over_a_host_link_run_beside_the_steps() -> None:
    slow_copies = replace(make_setup("swap").profile, host_copy_bytes_per_s=1e6)
    inline = run(make_setup("swap", profile=slow_copies), seed=1, num_requests=60)
    topology = make_setup().topology
    beside = Topology(topology.between, host=LinkSpec.of(LinkClass.PCIE, 1e6))
    engine = run(make_setup("swap", profile=slow_copies, topology=beside), seed=1, num_requests=60)
    for watched in (inline, engine):
        watched.expect_all_served()
        assert watched.cluster.core.state.counters.swapped_out_blocks
    assert engine.cluster.loop.now_ns < inline.cluster.loop.now_ns


def test_the_step_that_waits_for_copies_is_observed_with_their_bytes() -> None:
    """On devices that copy on the thread that computes: what a step of an instance takes is what it computes, and what
    is copied before it."""
    setup = make_setup("swap", hops=Hops(0.0, 0.0))
    setup = replace(setup, profile=replace(setup.profile, host_copy_bytes_per_s=2e6))
    watched = Watched(setup)
    watched.load(1, num_requests=60)
    steps: list[tuple[float, float]] = []
    observe = watched.cluster.core.state.predictor.observe

    def note(work: StepWork, times_ns: Sequence[int], group_id: int = 0, part: Part = LONE_STEP) -> None:
        observe(work, times_ns, group_id, part)
        if part == LONE_STEP and len(times_ns) == 2:
            took_s = (times_ns[1] - times_ns[0]) / 1e9
            steps.append((work.num_copied_bytes / 2e6, took_s))

    watched.cluster.core.state.predictor.observe = note  # type: ignore[method-assign]
    watched.cluster.run(until_ns=600 * 10**9)
    watched.expect_all_served()
    copied = [step for step in steps if step[0]]
    assert len(copied) > 10
    most_s = max(took_s for copied_s, took_s in steps if not copied_s)
    assert all(copied_s <= took_s <= copied_s + most_s for copied_s, took_s in copied)


def test_a_run_can_be_cut_short_and_go_on() -> None:
    watched = Watched(make_setup())
    watched.load(0)
    watched.cluster.run(until_ns=50_000_000)
    assert watched.cluster.loop.now_ns <= 50_000_000
    assert len(watched.ends) < len(watched.requests)
    watched.cluster.run()
    watched.expect_all_served()


def test_a_cancelled_request_frees_its_blocks() -> None:
    watched = Watched(make_setup())
    watched.load(0)
    for i in range(0, 40, 3):
        watched.cluster.cancel(f"r{i}", 60_000_000)
    watched.cluster.run()
    assert all(len(ends) == 1 for ends in watched.ends.values())
    watched.expect_nothing_left()


def test_a_drop_and_a_restore_can_be_ordered() -> None:
    watched = Watched(make_setup(eager=False, num_blocks=400))
    watched.load(0)
    watched.cluster.run(until_ns=30_000_000)
    watched.cluster.request_drop()
    watched.cluster.run(until_ns=120_000_000)
    assert "drop" in watched.kinds()
    watched.cluster.request_restore()
    watched.cluster.run()
    assert "restore_done" in watched.kinds() or "restore_turned" in watched.kinds()
    watched.expect_all_served()


def test_a_step_waits_for_one_piece_of_a_load_and_not_for_the_shard() -> None:
    """42 MB at 1 GB a second are twenty pieces of 2 ms."""
    setup = make_setup("pipeline", shape=make_shape(shard_bytes=10_240 * PAGE_BYTES), num_blocks=400)
    watched = Watched(setup)
    watched.submit("r", 16, 60, 0.0)
    watched.cluster.run(until_ns=60_000_000)
    worker = watched.cluster.workers[0]
    worker.deliver(ports.LoadShard(0, 1_000_000, layer_shard(0)), watched.cluster.loop.now_ns)
    worker.deliver(ports.LoadShard(0, 1_000_001, layer_shard(1)), watched.cluster.loop.now_ns)
    watched.cluster.run()
    watched.expect_all_served()
    gaps = np.diff(watched.times["r"])
    assert gaps.max() > gaps.min() + 1_000_000, "the load took no time"
    assert gaps.max() < gaps.min() + 5_000_000, "a step waited for more than a piece"
