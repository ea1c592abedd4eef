"""Deaths, cuts, slow workers, late and repeated messages: every request has one end, nothing leaks, seeds replay."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from scenarios import Watched, make_setup

from jettison.sim.faults import Crash, Cut, Delay, Duplicate, Fault, Slow, draw_faults
from jettison.sim.links import LinkClass, LinkSpec, Topology

NUM_SCHEDULES = int(os.environ.get("JETTISON_FAULT_SCHEDULES", "1000"))
"""The long run: ``JETTISON_FAULT_SCHEDULES=20000``."""

SLOW = Topology(LinkSpec.of(LinkClass.ETHERNET, 2e7))
"""So that transfers take as long as steps, and faults meet them."""

BATCH = 50
"""Schedules a test."""

SPAN_S = 0.3


def faulty(seed: int, faults: tuple[Fault, ...] | None = None, *, num_workers: int | None = None,
           policy: str | None = None, exchange: str | None = None) -> Watched:
    """A burst meets faults; where dropping is the policy, drops and restores are ordered for them to meet."""
    rng = random.Random(seed)
    num_workers = num_workers or rng.randint(2, 4)
    policy = policy or rng.choice(["drop", "drop", "drop", "swap", "migrate", "recompute", "pipeline"])
    if policy == "pipeline":
        num_workers = 2 * ((num_workers + 1) // 2)
    exchange = exchange or rng.choice(["auto", "live", "transfer", "recompute"])
    setup = make_setup(policy, num_workers=num_workers, exchange=exchange, topology=SLOW)
    watched = Watched(setup, check_every=29)
    watched.load(seed, num_requests=6 * num_workers, span_s=0.2, mean_output=25)
    cluster = watched.cluster
    if faults is None:
        faults = draw_faults(seed, range(num_workers), SPAN_S, 1 + seed % 4)
        for order in (cluster.request_drop, cluster.request_restore, cluster.request_drop):
            cluster.loop.at(rng.randrange(int(SPAN_S * 1e9)), order)
    cluster.inject(faults)
    cluster.run(until_ns=900 * 10**9)
    return watched


@pytest.mark.parametrize("first", [
    pytest.param(first, marks=[pytest.mark.slow] if first >= 100 else []) for first in range(0, NUM_SCHEDULES, BATCH)
])  # fmt: skip
def test_any_schedule_of_faults_leaves_every_request_with_one_end(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + BATCH):
        try:
            watched = faulty(seed)
            watched.expect_one_end_each()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        seen.update(set(watched.kinds()))
    # Faults that meet nothing prove nothing.
    assert {"worker_lost", "worker_joined", "recovered", "drop", "exchange_done", "restore_begin"} <= seen.keys(), seen


@pytest.mark.parametrize("seed", [2353, 2874])
def test_requests_whose_way_home_is_cut_for_good_are_computed_again_there(seed: int) -> None:
    """The link between a pipeline's members goes down while it is split: the same transfer was tried for ever."""
    watched = faulty(seed)
    watched.expect_one_end_each()
    assert "split" in watched.kinds()


def test_a_chunk_whose_end_is_heard_of_before_the_failure_of_the_chunk_before_it_counts_for_nothing() -> None:
    """Two workers tell of the two, and word from one of them is late."""
    watched = faulty(18256)
    watched.expect_one_end_each()
    assert {"step_failed", "worker_lost"} & set(watched.kinds()) and "chunk_overtaken" in watched.kinds()


def test_a_schedule_replays() -> None:
    first, again = faulty(7), faulty(7)
    assert first.cluster.log.hexdigest == again.cluster.log.hexdigest
    assert first.times == again.times


@pytest.mark.parametrize("policy", ["drop", "pipeline", "recompute"])
def test_a_death_costs_a_pause_and_no_token(policy: str) -> None:
    watched = faulty(1, (Crash(0.1, 1, 0.5),), policy=policy, num_workers=2)
    watched.expect_all_served()
    assert {"worker_lost", "worker_joined"} <= set(watched.kinds())


def test_a_worker_that_stays_down_is_given_up() -> None:
    watched = faulty(1, (Crash(0.1, 1, None),), policy="drop", num_workers=3)
    watched.expect_one_end_each()
    assert "worker_gone" in watched.kinds()
    assert not watched.cluster.workers[1].alive


def test_what_only_fitted_with_a_worker_that_stays_down_ends_whenever_it_comes() -> None:
    watched = faulty(1, (Crash(0.1, 1, None),), policy="drop", num_workers=2)
    core, loop = watched.cluster.core, watched.cluster.loop
    room = core.max_request_blocks() * core.state.limits.block_size
    for name, num_prompt, reason in (("fits", room - 1, "length"), ("does not", room, "error")):
        watched.submit(name, num_prompt, 1, loop.now_ns / 1e9 + 1.0)
        watched.cluster.run(until_ns=loop.now_ns + 100 * 10**9)
        assert core.state.is_idle()
        assert watched.ends[name] == [reason]


@pytest.mark.parametrize("what", [
    Slow(0.05, 0, 0.3, 5.0), Delay(0.05, 0, 0.3, 0.02), Duplicate(0.05, 0, 0.5, 0.01), Duplicate(0.0, 1, 2.0, 0.0),
])
@pytest.mark.parametrize("policy", ["drop", "swap", "migrate", "pipeline"])
def test_slow_late_and_repeated_are_only_slow_late_and_repeated(what: Fault, policy: str) -> None:
    faulty(1, (what,), policy=policy, num_workers=2).expect_all_served()


def test_a_cut_pipeline_declares_a_member_lost_and_goes_on() -> None:
    watched = faulty(1, (Cut(0.1, 0, 1),), policy="pipeline", num_workers=2)
    watched.expect_all_served()
    assert "worker_lost" in watched.kinds()


def test_a_cut_between_separate_instances_is_not_noticed_until_they_need_it() -> None:
    watched = faulty(1, (Cut(0.0, 0, 1),), policy="recompute", num_workers=2)
    watched.expect_all_served()
    assert "worker_lost" not in watched.kinds()


def test_drawn_schedules_are_in_order_and_depend_on_the_seed_alone() -> None:
    faults = draw_faults(5, range(4), 2.0, 30)
    assert faults == draw_faults(5, range(4), 2.0, 30) != draw_faults(6, range(4), 2.0, 30)
    assert [f.at_s for f in faults] == sorted(f.at_s for f in faults)
    assert {type(f) for f in faults} == {Crash, Cut, Slow, Delay, Duplicate}
