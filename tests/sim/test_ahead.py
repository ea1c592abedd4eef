"""Steps planned ahead, in virtual time: what they save, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scenarios import COST, Watched, make_setup

from jettison.sim.executor import ModelledExecutor
from jettison.sim.setup import ClusterSetup, Hops


def served(setup: ClusterSetup, seed: int = 0, **load: float) -> Watched:
    watched = Watched(setup)
    watched.load(seed, **load)  # type: ignore[arg-type]
    watched.cluster.run()
    watched.expect_all_served()
    return watched


def lone_times(*, steps_ahead: int, hops: Hops, overhead_s: float = 0.0) -> list[int]:
    """When the tokens of a lone request come."""
    setup = make_setup("recompute", num_workers=1, hops=hops, steps_ahead=steps_ahead)
    watched = Watched(replace(setup, executor=ModelledExecutor(COST, overhead_s)))
    watched.submit("r", 100, 40, 0.0)
    watched.cluster.run()
    watched.expect_all_served()
    return watched.times["r"]


def test_a_step_ahead_begins_when_the_one_before_it_ends() -> None:
    hops, none = Hops(3e-4, 2e-4), Hops(0.0, 0.0)
    ideal = lone_times(steps_ahead=0, hops=none)
    assert lone_times(steps_ahead=1, hops=none) == ideal
    assert lone_times(steps_ahead=1, hops=hops) == [ns + 500_000 for ns in ideal], "one way there and back"
    assert lone_times(steps_ahead=0, hops=hops) == [ns + 500_000 * i for i, ns in enumerate(ideal, 1)]


def test_a_step_that_is_late_waits_for_its_hops() -> None:
    """Longer hops than steps: two steps share one round trip."""
    hops = Hops(5e-3, 5e-3)
    slow, ahead = (lone_times(steps_ahead=n, hops=hops) for n in (0, 1))
    assert 0.45 * slow[-1] < ahead[-1] < 0.6 * slow[-1]


def test_the_host_works_beside_the_device() -> None:
    none, overhead_ns = Hops(0.0, 0.0), 400_000
    ideal = lone_times(steps_ahead=0, hops=none)
    hidden = lone_times(steps_ahead=1, hops=none, overhead_s=overhead_ns / 1e9)
    assert hidden == [ns + overhead_ns for ns in ideal], "the first step has no step beside which it could be prepared"


@pytest.mark.parametrize("policy", ["recompute", "swap", "migrate", "drop"])
def test_every_policy_serves_every_request(policy: str) -> None:
    setup = make_setup(policy, steps_ahead=1)
    watched = served(setup, span_s=0.3)
    assert watched.cluster.core.ladder.acts_between_steps == (policy == "swap")
    assert policy != "drop" or {"drop", "restore_done"} <= set(watched.kinds())


@pytest.mark.parametrize("seed", range(3))
def test_it_is_faster_with_short_steps_and_not_otherwise_different(seed: int) -> None:
    def last_ns(steps_ahead: int) -> int:
        setup = make_setup("recompute", num_blocks=300, steps_ahead=steps_ahead, hops=Hops(4e-4, 4e-4))
        times = served(setup, seed, span_s=0.1, num_requests=20).times
        return max(ns for each in times.values() for ns in each)

    assert last_ns(1) < last_ns(0)


@pytest.mark.parametrize("seed", range(4))
def test_steps_are_told_of_one_by_one_however_quiet_the_cluster_is(seed: int) -> None:
    """So the log of a compressed run is that of one without compression."""
    runs = []
    for compress in (True, False):
        setup = make_setup(("drop", "recompute", "migrate", "swap")[seed], num_blocks=80, steps_ahead=1)
        watched = Watched(replace(setup, compress=compress), checks=False)
        watched.load(seed, num_requests=12, span_s=1.0, mean_output=60)
        watched.cluster.cancel("r3", 400_000_000)
        watched.cluster.run()
        runs.append(watched)
    compressed, naive = runs
    assert compressed.cluster.fast_forwards.num_steps == 0
    assert compressed.cluster.log.hexdigest == naive.cluster.log.hexdigest
    assert (compressed.times, compressed.ends) == (naive.times, naive.ends)
    assert compressed.records == naive.records


def test_a_step_behind_one_that_has_sampled_nothing_fails_and_its_requests_run_again() -> None:
    """A worker that refuses the first of two steps: the core hears of both, and of no request's end."""
    watched = Watched(make_setup("recompute", num_workers=1, steps_ahead=1))
    watched.submit("r", 30, 12, 0.0)
    worker = watched.cluster.workers[0]
    watched.cluster.run(until_ns=15_000_000)
    worker._sampled_in = None  # as if it had been another life's step
    watched.cluster.run()
    failed = [r for r in watched.records if r.kind == "step_failed"]
    assert failed and "has sampled none" in str(failed[0].fields["message"])
    watched.expect_all_served()
