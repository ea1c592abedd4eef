"""Deaths, cuts, slow workers, late and repeated messages: every request has one end, nothing leaks, seeds replay.

``JETTISON_FAULT_SCHEDULES=20000`` is the long run (``JETTISON_LONG=1``: more of those with a cluster left over, too);
``JETTISON_FAULT_SEED=12345`` runs that schedule and no other.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from scenarios import Watched, make_setup
from schedules import run_to_its_end

from jettison.config.offline import HARVEST_PARTS
from jettison.core.ladder.lists import with_offline
from jettison.core.moving.migrations import may_go
from jettison.core.pending import Book
from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.overload import OverloadParams
from jettison.sim.faults import Crash, Cut, Delay, Duplicate, Fault, Slow, draw_faults
from jettison.sim.links import LinkClass, LinkSpec, Topology
from jettison.sim.transfers import Transfers
from jettison.types import ServiceClass
from longrun import part_of

NUM_SCHEDULES = int(os.environ.get("JETTISON_FAULT_SCHEDULES", "100"))
LONE_SEED = os.environ.get("JETTISON_FAULT_SEED")

SLOW = Topology(LinkSpec.of(LinkClass.ETHERNET, 2e7))
"""So that transfers take as long as steps, and faults meet them."""

BATCH = 50
"""Schedules a test."""

REPLAYED_EVERY = 9
"""One schedule of so many runs twice; odd, so that any number of faults is among them."""

CHECK_EVERY = 5
"""Events from one look at the core's books to the next (``Watched``: in a crowd more); second runs look after each."""

TO_BE_MET = {
    "worker_lost", "worker_joined", "step_failed", "recovered", "drop", "exchange_done", "restore_begin", "tokens",
    "migration fell back",
}
"""By some schedule of each batch: faults that meet nothing prove nothing."""

SPAN_S = 0.3
FEW_BLOCKS = 14
"""So that memory is short, and requests are swapped out or migrate."""
MOST_WORKERS = 4


def draw_surroundings(seed: int) -> dict[str, Any]:
    """What a schedule strikes: fast links inside machines of two, links to host memory, both, neither; room or little.

    From another stream than the rest, so that schedules named by older findings stay what they were.
    """
    rng = random.Random(f"surroundings {seed}")
    inside = rng.choice([None, LinkSpec.of(LinkClass.NVLINK, 2e8)])
    host = rng.choice([None, LinkSpec.of(LinkClass.PCIE, rng.choice([2e6, 2e7, 2e8]), rng.choice([0.0, 1.0]))])
    machine_of = {} if inside is None else {worker: worker // 2 for worker in range(MOST_WORKERS)}
    topology = replace(SLOW, inside=inside, host=host, machine_of=machine_of)
    if rng.random() < 0.5:
        return {"topology": topology}
    return {"topology": topology, "num_blocks": FEW_BLOCKS, "policy": rng.choice([None, "swap", "migrate"])}


def draw_offline(seed: int) -> dict[str, Any]:
    """What part of a schedule's requests is offline, and what is done with it. From a stream of its own, as above."""
    rng = random.Random(f"offline {seed}")
    parts = rng.choice([(), HARVEST_PARTS, HARVEST_PARTS, HARVEST_PARTS[:2], HARVEST_PARTS[:1]])
    params = OfflineParams(
        slo_aware=bool(parts), checkpoints="checkpoint" in parts, prefetches="prefetch" in parts,
        slo=SloParams(ttft_s=rng.choice([None, 0.001, 0.01])), checkpoint_below_free=rng.choice([0.5, 1.0]),
    )
    return {"offline": params, "parts": parts, "offline_share": rng.choice([0.2, 0.5, 0.8])}


def draw_migrations(seed: int) -> dict[str, Any]:
    """Running requests that are sent from group to group meanwhile, as KV and as tokens. From a stream of its own, as
    above."""
    rng = random.Random(f"migrations {seed}")
    kinds = rng.choice([[MigrationKind.TOKENS], list(MigrationKind)])
    times = sorted(rng.uniform(0.01, SPAN_S) for _ in range(rng.randint(5, 40)))
    return {"migrations": [(at_s, rng.choice(kinds), rng.choice([None, 4, 16]), rng.random()) for at_s in times]}


def migrate(watched: Watched, kind: MigrationKind, step_tokens: int | None, lot: float) -> None:
    """Some request that can go leaves its group for another, as the lot falls."""
    groups = watched.cluster.core.groups
    states = [s for g in groups.values() for s in g.queues.running.values() if may_go(s)]
    if not states:
        return
    state = states[int(lot * len(states))]
    others = [g for g in groups if g != state.group_id]
    if others:
        watched.cluster.request_migration(
            state.request_id, others[int(lot * 997) % len(others)], kind, step_tokens
        )


def faulty(seed: int, faults: tuple[Fault, ...] | None = None, *, num_workers: int | None = None,
           policy: str | None = None, exchange: str | None = None, check_every: int = CHECK_EVERY,
           offline: OfflineParams | None = None, parts: tuple[str, ...] = (), offline_share: float = 0.0,
           migrations: Sequence[tuple[float, MigrationKind, int | None, float]] = (),
           **surroundings: Any) -> Watched:
    """A burst meets faults; where dropping is the policy, drops and restores are ordered for them to meet."""
    rng = random.Random(seed)
    num_workers = num_workers or rng.randint(2, MOST_WORKERS)
    policy = policy or rng.choice(["drop", "drop", "drop", "swap", "migrate", "recompute", "pipeline"])
    if policy == "pipeline":
        num_workers = 2 * ((num_workers + 1) // 2)
    exchange = exchange or rng.choice(["auto", "live", "transfer", "recompute"])
    setup = make_setup(policy, num_workers=num_workers, exchange=exchange, **({"topology": SLOW} | surroundings))
    if offline is not None:
        rungs = with_offline(setup.params.rungs, parts)
        setup = replace(setup, params=replace(setup.params, rungs=rungs, offline=offline))
    watched = Watched(setup, check_every=check_every)
    num_requests = (6 if offline is None else 14) * num_workers  # of both classes more than there is room for
    watched.load(seed, num_requests=num_requests, span_s=0.2, mean_output=25, offline_share=offline_share)
    cluster = watched.cluster
    if faults is None:
        faults = draw_faults(seed, range(num_workers), SPAN_S, 1 + seed % 4)
        for order in (cluster.request_drop, cluster.request_restore, cluster.request_drop):
            cluster.loop.at(rng.randrange(int(SPAN_S * 1e9)), order)
    cluster.inject(faults)
    for at_s, *how in migrations:
        cluster.loop.at(round(at_s * 1e9), partial(migrate, watched, *how))
    return run_to_its_end(watched)


def met(watched: Watched) -> set[str]:
    """What went on in a run."""
    counters = watched.cluster.core.state.counters
    moves = {"swap": counters.swapped_out_blocks, "migration": counters.num_migrations}
    moves |= {
        "tokens": counters.num_token_migrations, "migration fell back": counters.num_failed_migrations,
        "migration gave way": counters.migrations_given_way,
    }  # fmt: skip
    moves |= {
        "step_abandoned": counters.num_abandoned_steps, "checkpoint": counters.checkpointed_blocks,
        "free": counters.checkpoint_frees, "discard": counters.offline_discards, "prefetch": counters.prefetched_blocks,
    }  # fmt: skip
    broken_off = {f"death in: {what}" for what in watched.broken_off}
    return set(watched.kinds()) | broken_off | {name for name, number in moves.items() if number}


def expect_same_again(first: Watched, again: Watched) -> None:
    assert first.cluster.log.hexdigest == again.cluster.log.hexdigest, "the second run has another hash"
    assert (first.times, first.ends) == (again.times, again.ends)


def run_schedule(seed: int, *, replays: bool, more: dict[str, Any] | None = None) -> Watched:
    """A failure of any kind names the schedule, and how to run it alone."""
    surroundings = draw_surroundings(seed) | (more or {})
    try:
        watched = faulty(seed, **surroundings)
        watched.expect_one_end_each()
        if replays:
            expect_same_again(watched, faulty(seed, check_every=1, **surroundings))
    except Exception as error:
        alone = f"JETTISON_FAULT_SEED={seed} python -m pytest tests/sim/test_faults.py -k any_schedule"
        raise AssertionError(f"schedule {seed}: {error!r}\nTo run it alone: {alone}") from error
    return watched


def drawn_batches() -> list[object]:
    """Those of the short run are quick enough for every change."""
    if LONE_SEED is not None:
        return [[int(LONE_SEED)]]
    firsts = range(0, NUM_SCHEDULES, BATCH)
    return [
        pytest.param(range(first, first + BATCH), marks=[pytest.mark.slow] if first >= 100 else [], id=str(first))
        for first in firsts
    ]


@pytest.mark.parametrize("seeds", drawn_batches())
def test_any_schedule_of_faults_leaves_every_request_with_one_end(seeds: Sequence[int]) -> None:
    seen: set[str] = set()
    for seed in seeds:
        seen |= met(run_schedule(
            seed, replays=len(seeds) == 1 or seed % REPLAYED_EVERY == 0,
            more=(draw_offline(seed) if seed % 2 else {}) | (draw_migrations(seed) if seed // 2 % 2 else {}),
        ))  # fmt: skip
    if len(seeds) > 1:
        assert seen >= TO_BE_MET, f"none of {seeds} has met {TO_BE_MET - seen}"


OFFLINE_DEEDS = [
    *((what, policy) for what in ("checkpoint", "prefetch", "stored", "abandoned step", "pause")
      for policy in ("drop", "pipeline")), ("pause in a drop", "swap+drop"),
]  # fmt: skip
"""What is done for offline requests, and the policy beside it."""


@pytest.mark.parametrize("seeds", [range(first, first + 8) for first in part_of((0, 8, 16, 24, 32), (0, 8, 16))])
def test_schedules_of_faults_around_steps_ahead(seeds: Sequence[int]) -> None:
    num_ahead = 0
    for seed in seeds:
        more = {"steps_ahead": 1} | (draw_migrations(seed) if seed % 2 else {})
        num_ahead += run_schedule(seed, replays=False, more=more).cluster.core.state.counters.num_steps_ahead
    assert num_ahead


@pytest.mark.parametrize(("what", "policy", "victim"), part_of(
    [(what, policy, victim) for what, policy in OFFLINE_DEEDS for victim in (0, 1)],
    [(what, policy, (i + i // 2) % 2) for i, (what, policy) in enumerate(OFFLINE_DEEDS)],
))
def test_a_death_in_whatever_is_done_for_offline_requests(what: str, policy: str, victim: int) -> None:
    setup = make_setup(policy, num_blocks=60, topology=replace(SLOW, host=LinkSpec.of(LinkClass.PCIE, 2e7)))
    offline = OfflineParams(slo=SloParams(ttft_s=0.001))
    params = replace(setup.params, rungs=with_offline(setup.params.rungs, HARVEST_PARTS), offline=offline)
    if what == "pause in a drop":  # which is ordered
        params = replace(params, overload=OverloadParams(min_blocked_s=1e6))
    watched = Watched(replace(setup, params=params), check_every=CHECK_EVERY)
    for i in range(40):
        watched.submit(f"batch-{i}", 20 + 20 * (i % 5), 120, 0.0, ServiceClass.OFFLINE)
    for i in range(30):
        watched.submit(f"chat-{i}", 320, 30, 0.2 + 0.02 * i)
    cluster = watched.cluster
    if what == "pause in a drop":
        cluster.run(until_ns=900 * 10**9, is_over=lambda: "pause" in watched.under_way(victim))
        cluster.request_drop()
    cluster.run(until_ns=900 * 10**9, is_over=lambda: what in watched.under_way(victim))
    cluster.inject((Crash(cluster.loop.now_ns / 1e9, victim, 0.2, detect_s=0.0),))
    cluster.run(until_ns=900 * 10**9)
    watched.expect_one_end_each()
    assert what in watched.broken_off


@pytest.mark.parametrize(("policy", "move"), [("swap", "swap"), ("migrate", "migration")])
def test_drawn_schedules_meet_swaps_and_migrations(policy: str, move: str) -> None:
    seeds = [seed for seed in range(100) if draw_surroundings(seed).get("policy") == policy]
    runs = [met(run_schedule(seed, replays=False)) for seed in seeds]
    assert sum({move, "worker_lost"} <= run for run in runs) > 1


def test_a_schedule_that_fails_in_any_way_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "expect_one_end_each", lambda self: {}["nothing"])
    with pytest.raises(AssertionError, match=r"schedule 3: KeyError\(.*\n.*JETTISON_FAULT_SEED=3 python -m pytest"):
        run_schedule(3, replays=False)


def test_a_request_that_ended_while_its_migration_gave_way_is_freed() -> None:
    run_schedule(12125, replays=False)


def test_requests_that_a_bug_has_failed_are_not_taken_for_victims_of_deaths() -> None:
    watched = Watched(make_setup())
    watched.load(1, num_requests=3)
    watched.cluster.inject((Crash(0.5, 0, 0.1), Crash(0.5, 1, None)))
    watched.cluster.workers[0].filled.clear()  # as if it had dropped layers that the core has it run
    watched.cluster.run(until_ns=900 * 10**9)
    assert {"worker_lost", "worker_gone"} <= met(watched)
    with pytest.raises(AssertionError, match="the model step failed"):
        watched.expect_one_end_each()


@pytest.mark.parametrize("first", part_of((0, 20, 40, 60, 80), (0,)))
def test_faults_while_one_of_three_is_left_over(first: int) -> None:
    """Three hold more than one could, and are split: from then on faults strike, and a burst may turn it round."""
    seen: list[set[str]] = []
    for seed in range(first, first + 20):
        watched = Watched(make_setup("drop", num_workers=3, topology=SLOW), check_every=CHECK_EVERY)
        watched.load(seed, num_requests=24, span_s=0.2, mean_output=40)
        cluster, rng = watched.cluster, random.Random(seed)
        for at_s, order in ((0.0, cluster.request_drop), (0.05, cluster.request_drop), (0.12, cluster.request_restore)):
            cluster.loop.at(round(at_s * 1e9), order)
        cluster.run(until_ns=900 * 10**9, is_over=lambda kinds=watched.kinds: "restore_begin" in kinds())
        now_s = cluster.loop.now_ns / 1e9
        faults = draw_faults(seed, range(3), SPAN_S, 1 + seed % 3)
        cluster.inject(tuple(replace(fault, at_s=fault.at_s + now_s) for fault in faults))
        if seed % 3 == 0:
            cluster.loop.after(rng.randrange(int(SPAN_S * 1e8)), cluster.request_drop)
        cluster.run(until_ns=900 * 10**9)
        watched.expect_one_end_each()
        splits = (record.fields["left_over"] for record in watched.records if record.kind == "split")
        seen.append(met(watched) | {"left over" for left_over in splits if left_over})
    assert sum({"left over", "worker_lost"} <= kinds for kinds in seen) > 4
    assert any({"left over", "came_home"} <= kinds for kinds in seen)
    assert any({"left over", "restore_turned"} <= kinds for kinds in seen)


def test_a_copy_to_the_host_that_ends_after_a_landing_counts_for_what_is_computed_there() -> None:
    """The request has gone as tokens, of which the last few are computed with its next one."""
    run_schedule(539, replays=True, more=draw_offline(539) | draw_migrations(539))


@pytest.mark.parametrize("seed", [2353, 2874])
def test_requests_whose_way_home_is_cut_for_good_are_computed_again_there(seed: int) -> None:
    """The link between a pipeline's members goes down while it is split: the same transfer was tried for ever."""
    watched = faulty(seed)
    watched.expect_one_end_each()
    assert "split" in watched.kinds()


def test_what_others_hold_of_a_transfer_is_given_back_where_sender_and_receiver_die_in_turn() -> None:
    """The receiver's recovery waited for the end of it, died with its worker, and a third one's blocks waited on."""
    watched = faulty(9367, **draw_surroundings(9367))
    watched.expect_one_end_each()
    assert watched.kinds().count("worker_lost") >= 2 and "drop" in watched.kinds()


def test_what_is_ordered_from_a_worker_that_died_unnoticed_reaches_no_later_life() -> None:
    """Its next life dropped layers that the core had it run."""
    watched = faulty(14506, **draw_surroundings(14506))
    watched.expect_one_end_each()
    assert "step_failed" not in watched.kinds()


def test_a_chunk_whose_end_is_heard_of_before_the_failure_of_the_chunk_before_it_counts_for_nothing() -> None:
    """Two workers tell of the two, and word from one of them is late."""
    watched = faulty(18256)
    watched.expect_one_end_each()
    assert {"step_failed", "worker_lost"} & set(watched.kinds()) and "chunk_overtaken" in watched.kinds()


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


@pytest.mark.parametrize(("num_workers", "seed"), [(2, 5), (3, 4)])
def test_requests_that_cannot_migrate_over_a_cut_link_decode_where_they_are(num_workers: int, seed: int) -> None:
    """The same migration was tried at once and for ever, and its request stood still from each try to the next."""
    watched = faulty(
        seed, (Cut(0.0, 0, 1),), policy="migrate", num_workers=num_workers, num_blocks=FEW_BLOCKS, exchange="auto"
    )
    watched.expect_all_served()
    counters = watched.cluster.core.state.counters
    assert 0 < counters.num_failed_migrations < 3
    assert bool(counters.num_migrations) == (num_workers > 2), "others are migrated to"


def test_a_cut_between_separate_instances_is_not_noticed_until_they_need_it() -> None:
    watched = faulty(1, (Cut(0.0, 0, 1),), policy="recompute", num_workers=2)
    watched.expect_all_served()
    assert "worker_lost" not in watched.kinds()


@pytest.mark.parametrize("seed", range(4))
def test_transfers_that_neither_end_of_a_cut_link_has_heard_of_end_when_both_have_told_of_the_link(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut strikes as soon as one begins."""
    begun, ended = list[float](), list[int]()
    start, end_lost = Transfers.start, Book.end_lost
    monkeypatch.setattr(Transfers, "start", lambda all_, one: (begun.append(all_._loop.now_ns / 1e9), start(all_, one)))
    run = partial(faulty, seed, policy="migrate", num_workers=2, **draw_migrations(seed))
    run((Cut(1000.0, 0, 1),))
    monkeypatch.setattr(
        Book, "end_lost", lambda book, ids, now_ns: (ended.extend(ids), end_lost(book, ids, now_ns))[1]
    )
    for at_s in begun[:3]:
        ended.clear()
        watched = run((Cut(at_s + 1e-6, 0, 1),))
        watched.expect_all_served()
        assert ended and "worker_lost" not in watched.kinds()


def test_drawn_schedules_are_in_order_and_depend_on_the_seed_alone() -> None:
    faults = draw_faults(5, range(4), 2.0, 30)
    assert faults == draw_faults(5, range(4), 2.0, 30) != draw_faults(6, range(4), 2.0, 30)
    assert [f.at_s for f in faults] == sorted(f.at_s for f in faults)
    assert {type(f) for f in faults} == {Crash, Cut, Slow, Delay, Duplicate}
