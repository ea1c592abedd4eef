"""Restore: where missing shards come from, in which order, and when a restore must not begin or go on."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster

from jettison.core import ports
from jettison.core.ladder import restore as restore_rung
from jettison.core.ladder.forecasts import TakingApart
from jettison.core.moving.restoring import RestorePhase, Restoring
from jettison.core.pending import TransferPurpose
from jettison.memory.stages import StagePlan
from jettison.policy.forecast import Forecast
from jettison.policy.overload import Trigger
from jettison.types import LayerRange
from longrun import part_of


def merged_pair(num_workers: int, **more: object) -> FakeCluster:
    """Two of the workers are one pipeline, the others serve alone; every shard that is dropped is overwritten."""
    cluster = FakeCluster(num_workers=num_workers, auto_restore=False, **more)  # type: ignore[arg-type]
    for worker in cluster.workers.values():
        worker.spoilt = lambda: True
    cluster.order("drop")
    cluster.run(until_ms=50)
    assert sorted(len(g.stages) for g in cluster.core.groups.values()) == [1] * (num_workers - 2) + [2]
    return cluster


def members(cluster: FakeCluster) -> set[int]:
    return {w for g in cluster.core.groups.values() if len(g.stages) > 1 for w in g.worker_ids}


def restore(cluster: FakeCluster) -> None:
    cluster.order("restore")
    cluster.run()
    cluster.expect_nothing_left()
    assert all(len(g.stages) == 1 for g in cluster.core.groups.values())
    assert cluster.core.state.counters.num_restores == 1


def asked_by_shard(cluster: FakeCluster) -> dict[tuple[int, str], list[int | None]]:
    """(who lacks it, shard) -> whom it was asked of, in order; None: the folder."""
    asked: dict[tuple[int, str], list[int | None]] = defaultdict(list)
    for action in cluster.fetched:
        if isinstance(action, ports.SendShard):
            asked[action.dst, action.shard].append(action.src)
        else:
            asked[action.worker_id, action.shard].append(None)
    return asked


def test_members_are_asked_first() -> None:
    cluster = merged_pair(4)
    inside = members(cluster)
    restore(cluster)
    asked = asked_by_shard(cluster)
    assert len(asked) == len(cluster.shape.all_shards)
    assert all(len(sources) == 1 and sources[0] in inside for sources in asked.values())


def test_the_nearest_holder_is_asked_before_a_member_across_the_network() -> None:
    cluster = merged_pair(4)
    (lender, *_), (first, *_) = sorted(members(cluster)), sorted(set(cluster.workers) - members(cluster))
    machine_of = dict.fromkeys(cluster.workers, 1) | {lender: 0, first: 0}
    cluster.core.reconfigure(replace(cluster.core.params, machine_of=machine_of))
    restore(cluster)
    for (worker, _), sources in asked_by_shard(cluster).items():
        assert [machine_of[s] for s in sources if s is not None] == [machine_of[worker]]


def test_after_a_pull_that_failed_an_instance_outside_is_asked_and_the_folder_last() -> None:
    cluster = merged_pair(4)
    inside = members(cluster)
    outside = set(cluster.workers) - inside
    cluster.fails_shard = lambda move: move.src in inside or move.shard == "layer:1"
    restore(cluster)
    for (_, shard), sources in asked_by_shard(cluster).items():
        assert sources[0] in inside
        if shard == "layer:1":
            assert set(sources[1:3]) == outside and sources[3:] == [None]
        else:
            assert len(sources) == 2 and sources[1] in outside
    helpers = [sources[1] for sources in asked_by_shard(cluster).values()]
    assert set(helpers) == outside, "one of two idle instances was asked for everything"


def test_a_helper_that_drops_the_shard_meanwhile_is_not_waited_for() -> None:
    cluster = merged_pair(4)
    inside = members(cluster)
    cluster.fails_shard = lambda move: move.src in inside
    cluster.order("restore")
    cluster.run(stop=lambda: sum(isinstance(a, ports.SendShard) and a.src not in inside for a in cluster.fetched) > 3)
    helpers = [g for g in cluster.core.groups.values() if not inside & set(g.worker_ids)]
    # A burst there is served first. Each helper keeps what nobody has asked it for.
    stages = (StagePlan(3, LayerRange(0, 2)), StagePlan(2, LayerRange(2, 4)))
    cluster.carry_out(cluster.core.moves.merge(helpers, stages, cluster.now))
    cluster.run()
    asked = asked_by_shard(cluster)
    assert any(len(sources) > 2 for sources in asked.values()), "nobody else was asked"
    assert all(None not in sources for sources in asked.values())
    assert cluster.core.state.counters.num_drops == 2 and cluster.core.state.counters.num_restores == 1
    assert all(w.unfilled == set() for w in cluster.core.state.workers.values())
    cluster.core.check()


def test_a_helper_may_die() -> None:
    cluster = merged_pair(3)
    inside = members(cluster)
    (helper,) = set(cluster.workers) - inside
    cluster.fails_shard = lambda move: move.src in inside
    cluster.order("restore")
    cluster.run(stop=lambda: any(isinstance(a, ports.SendShard) and a.src == helper for a in cluster.fetched))
    cluster.kill(helper)
    cluster.restart_at(helper, cluster.now / MS + 500)
    cluster.run()
    assert cluster.core.state.counters.num_restores == 1
    cluster.expect_nothing_left()


def test_the_folder_is_read_one_shard_after_the_other_and_no_further_once_called_off() -> None:
    cluster = merged_pair(2)
    cluster.fails_shard = lambda move: True
    cluster.order("restore")
    (moving,) = cluster.core.restores
    seen: list[int] = []

    def called_off() -> bool:
        loads = moving._fetching.loads.values()
        seen.append(len(loads))
        assert len({load.worker_id for load in loads}) == len(loads)
        return len([a for a in cluster.fetched if isinstance(a, ports.LoadShard)]) == 3

    cluster.run(stop=called_off)
    assert max(seen) == 2
    cluster.carry_out(cluster.core.request_drop(cluster.now))  # turns it round
    assert moving.phase is RestorePhase.TURNING
    cluster.run()
    assert moving.phase is RestorePhase.TURNED
    assert len([a for a in cluster.fetched if isinstance(a, ports.LoadShard)]) == 3


# --- requests that are known to outgrow a member


def prefers_members(cluster: FakeCluster, min_settled_s: float = 0.05) -> None:
    params = cluster.core.params
    cluster.core.reconfigure(replace(params, restore=replace(params.restore, min_settled_s=min_settled_s)))


@pytest.mark.parametrize("is_early", [False, True])
def test_no_restore_while_a_request_is_known_to_outgrow_a_member(
    monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """10 tokens in and 120 to come, where a member holds 96: what it holds now says nothing."""
    cluster = FakeCluster()
    prefers_members(cluster)
    if is_early:
        params = cluster.core.params
        cluster.core.reconfigure(
            replace(params, overload=replace(params.overload, trigger=Trigger.FORECAST))
        )
        found = TakingApart(Forecast(100.0, 0.0, 0.0), Forecast(50.0, 0.0, 0.0), Forecast(100.0, 0.0, 0.0))
        monkeypatch.setattr(restore_rung, "taking_apart", lambda *_: found)
        monkeypatch.setattr(cluster.core.loads, "recompute_block_s", lambda group: 0.001)
    cluster.order_at("drop", 1)
    cluster.submit("long", [3] * 10, 120, 20, ignore_eos=True)
    cluster.submit("short", [4] * 10, 10, 20, ignore_eos=True)
    cluster.run(stop=lambda: "long" in cluster.ends)
    assert not [r for r in cluster.records if r.kind == "restore_begin"]
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    counters = cluster.core.state.counters
    assert counters.num_drops == 1 and counters.num_preemptions == 0 and counters.num_restores == 1


def test_a_request_that_will_outgrow_a_member_turns_a_restore_round_although_it_runs() -> None:
    cluster = FakeCluster()
    prefers_members(cluster)
    cluster.order_at("drop", 1)
    cluster.submit("calm", [5] * 6, 70, 20, ignore_eos=True)
    cluster.run(stop=lambda: any(r.kind == "restore_begin" for r in cluster.records))
    (moving,) = cluster.core.restores
    cluster.fails_shard = lambda move: move.shard != "layer:0"  # and so it takes a while
    cluster.submit("long", [3] * 10, 120, cluster.now / MS + 0.1, ignore_eos=True)
    moving._fits = lambda: False  # type: ignore[method-assign]
    cluster.run(stop=lambda: moving.is_over)
    assert moving.failure == "a request needs all members' memory"
    cluster.run()
    cluster.expect_outputs()
    assert cluster.core.state.counters.num_preemptions == 0


def test_a_request_that_only_half_of_the_members_can_hold_lets_them_split_in_two() -> None:
    cluster = FakeCluster(num_workers=4, num_layers=8)
    prefers_members(cluster, 0.3)
    for at_ms in (1, 60, 120):
        cluster.order_at("drop", at_ms)
    one = cluster.workers[0].full_blocks * BLOCK_SIZE
    cluster.submit("long", [3] * 10, one + 20, 200, ignore_eos=True)
    cluster.run(stop=lambda: "long" in cluster.ends)
    splits = [r.fields["homes"] for r in cluster.records if r.kind == "split"]
    assert len(splits) == 1 and sorted(map(len, splits[0].values())) == [2, 2]  # type: ignore[attr-defined]
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert cluster.core.state.counters.num_preemptions == 0


def short_answers(max_tokens: int, seed: int, *, most_of: int | None = None) -> FakeCluster:
    """A pair that was merged once, under a steady load of answers of about 8 tokens, each allowed ``max_tokens``.

    Every ``most_of``-th answer comes to all that it is allowed.
    """
    rng = random.Random(seed)
    cluster = FakeCluster(full_blocks=24, max_seqs=8)
    cluster.order_at("drop", 20)
    for index in range(800):
        is_long = most_of is not None and index % most_of == 0
        prompt = [rng.randrange(1, 60) for _ in range(8)]
        stops = () if is_long else tuple(range(1, 9))
        cluster.submit(f"r{index}", prompt, max_tokens, 30.0 + 6 * index, stop_token_ids=stops)
    return cluster


def first_restored_ns(cluster: FakeCluster) -> int:
    cluster.run(stop=lambda: cluster.core.state.counters.num_restores == 1)
    assert not cluster.core.state.pipelines
    return cluster.now


def test_what_clients_allow_at_most_does_not_keep_a_pipeline_that_holds_little() -> None:
    assert first_restored_ns(short_answers(120, 1)) <= 1.1 * first_restored_ns(short_answers(60, 1))


@pytest.mark.parametrize("seed", part_of(range(4), (3,)))
def test_answers_that_outgrow_a_member_against_the_forecast_end_and_drops_stay_few(seed: int) -> None:
    """One answer in 80 needs more than a member has: each may cost a drop of its own, and is computed to its end."""
    cluster = short_answers(120, seed, most_of=80)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    counters = cluster.core.state.counters
    assert len(cluster.ends) == 800
    assert counters.num_drops <= 1 + 800 // 80 and counters.num_restores <= counters.num_drops


# --- requests on their way home after the split


def split_of_pair() -> tuple[FakeCluster, Restoring]:
    """A pipeline of two that has split while six requests ran there: the first of them are on their way home."""
    cluster = merged_pair(2, full_blocks=180)
    for index in range(6):
        cluster.submit(f"r{index}", [index + 1] * 60, 60, cluster.now / MS + index, ignore_eos=True)
    cluster.run(until_ms=cluster.now / MS + 60)
    cluster.order("restore")
    (moving,) = cluster.core.restores
    cluster.run(stop=lambda: moving.has_split)
    assert moving.returning is not None and not moving.returning.is_idle
    return cluster, moving


def num_preemptions(cluster: FakeCluster) -> int:
    groups = cluster.core.groups.values()
    return cluster.core.state.counters.num_preemptions + sum(g.counters.num_preemptions for g in groups)


@pytest.mark.parametrize("num_lost", [1, 6])
def test_requests_whose_way_home_fails_are_computed_again_there_and_not_sent_twice(num_lost: int) -> None:
    cluster, moving = split_of_pair()
    returning, transfers = moving.returning, cluster.core.state.book.transfers
    assert returning is not None
    lost: dict[str, int] = {}

    def fails(move: ports.SendKV) -> bool:
        name = transfers[move.transfer_id].request.request_id
        if name in lost or len(lost) < num_lost:
            lost[name] = lost.get(name, 0) + 1
        return name in lost

    def is_done() -> bool:
        distrusted = cluster.core.state.distrusted
        assert not distrusted.keys() & returning.on_their_way.keys(), "its room at home is counted twice"
        return moving.is_over

    cluster.fails_move = fails
    cluster.run(stop=is_done)
    assert moving.phase is RestorePhase.DONE
    assert list(lost.values()) == [1] * num_lost, "tried again"
    homes = {g.group_id for g in returning.homes}
    states = cluster.core.state.requests
    assert all(name in states and states[name].group_id in homes for name in lost)
    assert num_preemptions(cluster) == num_lost
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_requests_whose_way_home_is_called_off_are_not_computed_again() -> None:
    cluster, moving = split_of_pair()
    assert moving.returning is not None
    transfers = cluster.core.state.book.transfers
    under_way = {i for i, pending in transfers.items() if pending.purpose is TransferPurpose.RETURN}
    cluster.carry_out(cluster.core.request_drop(cluster.now))  # turns it round
    assert moving.phase is RestorePhase.TURNING
    assert cluster.cancelled_transfers & under_way
    cluster.run()
    assert moving.phase is RestorePhase.TURNED
    assert num_preemptions(cluster) == 0
    cluster.expect_outputs()
    cluster.expect_nothing_left()


# --- three members, of which one is left over


def full_triple() -> FakeCluster:
    """A pipeline of three that holds more than any member could by itself."""
    cluster = FakeCluster(num_workers=3, num_layers=6, full_blocks=60, auto_restore=False, exchange="transfer")
    for at_ms in (1, 60):
        cluster.order_at("drop", at_ms)
    for index in range(8):
        cluster.submit(f"r{index}", [index + 1] * 40, 60, 120 + index, ignore_eos=True)
    cluster.run(until_ms=200)
    assert [len(g.stages) for g in cluster.core.groups.values()] == [3]
    return cluster


def leave_one_over(cluster: FakeCluster) -> Restoring:
    cluster.order("restore")
    (moving,) = cluster.core.restores
    assert len(moving.left_over) == 1 and moving.left_over[0] == moving.worker_ids[1]
    return moving


def test_three_that_hold_more_than_one_could_become_two_and_one() -> None:
    cluster = full_triple()
    moving = leave_one_over(cluster)
    (alone,) = moving.left_over
    before = cluster.core.state.workers[alone].layout
    cluster.run(stop=lambda: moving.has_split)
    assert [g.worker_ids for g in moving.homes] == [(moving.worker_ids[0], moving.worker_ids[2])]
    cluster.submit("new", [9] * 10, 10, cluster.now / MS + 0.1)
    cluster.run(stop=lambda: moving.is_over)
    assert moving.phase is RestorePhase.DONE and cluster.core.state.workers[alone].layout == before
    cluster.run(stop=lambda: len(cluster.core.groups) == 2)
    assert any(g.worker_ids == (alone,) for g in cluster.core.groups.values())
    assert len(cluster.ends) < 9, "requests run on meanwhile"
    assert num_preemptions(cluster) == 0
    counters = cluster.core.state.counters
    assert counters.num_restores == 1 and counters.num_recoveries == 0
    assert [r.kind for r in cluster.records if r.kind in ("came_home", "recovered")] == ["came_home"]
    cluster.run()
    restored_and_exact(cluster)


def restored_and_exact(cluster: FakeCluster) -> None:
    """Whatever has happened: every answer is right, and after further restores each worker is an instance."""
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    for _ in range(2):
        cluster.order("restore")
        cluster.run(stop=lambda: not cluster.core.in_transition)
        cluster.run()
    assert sorted(g.worker_ids for g in cluster.core.groups.values()) == [(0,), (1,), (2,)]
    full = cluster.core.state.stage_layout(cluster.core.state.shape.all_layers)
    assert all(w.layout == full and not w.unfilled for w in cluster.core.state.workers.values())


PHASES = [p for p in RestorePhase if p not in (RestorePhase.TURNING, RestorePhase.REDROP, RestorePhase.TURNED)]


def at_phase(phase: RestorePhase) -> tuple[FakeCluster, Restoring]:
    """A triple on its way to two and one, as soon as it is in this phase (or past it, where it takes no time)."""
    cluster = full_triple()
    moving = leave_one_over(cluster)
    order = list(RestorePhase)
    cluster.run(stop=lambda: order.index(moving.phase) >= order.index(phase))
    return cluster, moving


@pytest.mark.parametrize("member", range(3))
@pytest.mark.parametrize("phase", PHASES)
def test_any_of_three_may_die_at_any_time(phase: RestorePhase, member: int) -> None:
    cluster, moving = at_phase(phase)
    dead = moving.worker_ids[member]
    cluster.kill(dead)
    cluster.restart_at(dead, cluster.now / MS + 300)
    restored_and_exact(cluster)


@pytest.mark.parametrize("phase", PHASES[:-1])
@pytest.mark.parametrize("num_refusals", [0, 1])
def test_three_are_one_again_where_a_burst_turns_them_round(phase: RestorePhase, num_refusals: int) -> None:
    """Also where a member then refuses to merge: the requests go on returning, and one is left over again."""
    cluster, moving = at_phase(phase)
    if moving.is_over:
        return
    cluster.carry_out(cluster.core.request_drop(cluster.now))
    assert moving.phase in (RestorePhase.TURNING, RestorePhase.REDROP)
    for worker in moving.homes and moving.homes[0].worker_ids:
        cluster.workers[worker].fail_applies = num_refusals
    cluster.run(stop=lambda: not cluster.core.in_transition)
    assert moving.phase is RestorePhase.TURNED
    refused = moving.has_split and num_refusals
    assert sorted(len(g.stages) for g in cluster.core.groups.values()) == ([1, 2] if refused else [3])
    assert num_preemptions(cluster) == 0
    restored_and_exact(cluster)


@pytest.mark.parametrize("phase", PHASES)
def test_clients_may_leave_while_one_is_left_over(phase: RestorePhase) -> None:
    cluster, _ = at_phase(phase)
    for index in range(0, 8, 2):
        cluster.cancel(f"r{index}", cluster.now / MS + 0.3 * index)
    restored_and_exact(cluster)


def test_who_is_left_over_comes_home_though_peers_and_folder_refuse_at_first() -> None:
    cluster, moving = at_phase(RestorePhase.DONE)
    (alone,) = moving.left_over
    cluster.workers[alone].fail_applies = 2
    left = iter(range(3))
    cluster.fails_shard = lambda move: next(left, None) is not None
    restored_and_exact(cluster)
