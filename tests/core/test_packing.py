"""The rung that packs online requests onto few groups; with pretend KV that every step checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import BLOCK_SIZE, MS, FakeCluster, tokens
from sleepers import is_asleep, run_to, sleep

from jettison.core.ladder.lists import parse_overload, with_packing
from jettison.core.ladder.packing import newcomers
from jettison.core.ladder.packing.desired import Owed
from jettison.core.ladder.packing.newcomers import fits_compute
from jettison.core.ladder.packing.pack import PackRung, StopOffer
from jettison.core.ladder.packing.relief import LetIn, Reliefs
from jettison.core.ladder.rung import Moment
from jettison.core.params import AwakeParams
from jettison.core.ports import Record
from jettison.core.requests import Phase, RequestState
from jettison.errors import ConfigError
from jettison.memory.kvtransfers import MigrationKind
from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.packing.params import Gather, PackParams
from jettison.policy.packing.types import Grip
from jettison.types import ServiceClass


def packed(
    packer: str = "mell", *, workers: int = 3, full_blocks: int = 160, max_seqs: int = 16, offline: str | None = None,
    **more: object,
) -> FakeCluster:
    packing = PackParams(packer=packer, epoch_s=0.05, head_room=0.05, **more)  # type: ignore[arg-type]
    return FakeCluster(
        policy="recompute", num_workers=workers, full_blocks=full_blocks, max_tokens=64, prefix_caching=False,
        max_seqs=max_seqs, offline=offline, packing=packing,
    )


def rung_of(cluster: FakeCluster) -> PackRung:
    rung = cluster.core.ladder.rung("pack")
    assert isinstance(rung, PackRung)
    return rung


def homes(cluster: FakeCluster) -> set[int]:
    return {g.group_id for g in cluster.core.groups.values() if g.queues.all_requests()}


def expect_all_well(cluster: FakeCluster) -> None:
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


def test_newcomers_share_an_instance_while_it_holds_them() -> None:
    cluster = packed(full_blocks=400)
    for i in range(6):
        cluster.submit(f"r{i}", tokens(i, 20), 60, 20.0 * i)
    cluster.run(until_ms=150)
    assert len(homes(cluster)) == 1
    assert len(rung_of(cluster).closed()) == 2
    expect_all_well(cluster)


def test_beside_a_rung_that_spreads_requests_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="--overload migrate spreads"):
        with_packing(parse_overload("migrate+drop").rungs)


def test_under_pressure_nothing_moves_and_newcomers_go_where_they_would_without_it() -> None:
    cluster = spread_out()
    cluster.core.loads.kept_out.add(0)  # nothing waits there, so nobody has to make room
    rung, state = rung_of(cluster), next(iter(cluster.core.state.requests.values()))
    assert rung.pressure() and rung.place(state) is None
    offers = [o for o in rung.look(Moment.BEFORE_STEPS, cluster.now + 10**9) if not isinstance(o, Record)]
    assert not offers


def test_a_move_into_a_group_that_lacks_memory_is_called_off() -> None:
    cluster = spread_out(kinds=frozenset({MigrationKind.KV}))
    migrations = cluster.core.migrations
    cluster.run(stop=lambda: not migrations.is_idle)
    assert not migrations.is_idle, "the next epoch begins some"
    cluster.core.loads.kept_out |= {m.destination.group_id for m in migrations.under_way}
    under_way = list(migrations.under_way)
    stops = [o for o in rung_of(cluster).look(Moment.BEFORE_STEPS, cluster.now) if isinstance(o, StopOffer)]
    named = {r for stop in stops for r in stop.request_ids}
    assert named == {m.state.request_id for m in under_way if m.stopped_ns is None}
    expect_all_well(cluster)


def test_offline_requests_are_not_packed() -> None:
    cluster = packed()
    cluster.submit("batch", tokens(1, 20), 100, service_class=ServiceClass.OFFLINE)
    cluster.run(until_ms=120)
    rung = rung_of(cluster)
    assert rung.gauges()["devices_used"] == rung.gauges()["devices_needed"] == 0
    assert rung.closed() == frozenset(cluster.core.groups)
    expect_all_well(cluster)


def test_offline_work_that_fills_all_memory_spreads_no_newcomers() -> None:
    """One instance holds all that is online at once; offline work, which makes way, has all blocks of all three."""
    cluster = packed(max_seqs=64, offline="harvest")
    for i in range(350):
        cluster.submit(f"o{i}", tokens(i, 12), 40, 0.05 * i, service_class=ServiceClass.OFFLINE)
    for i in range(20):
        cluster.submit(f"r{i}", tokens(i, 20), 20, 100 + 15.0 * i)
    used: list[int] = []
    for at_ms in range(110, 400, 10):
        cluster.run(until_ms=at_ms)
        groups = cluster.core.groups.values()
        assert sum(g.queues.num_running_offline for g in groups) > 16
        used.append(sum(bool(g.queues.online_requests()) for g in groups))
    assert sum(used) <= 1.1 * len(used), used
    expect_all_well(cluster)


def test_where_memory_is_unlike_one_small_request_does_not_make_a_pool_of_one_full() -> None:
    """Any request takes all devices of such a pool; three of them fit it all the same."""
    cluster = packed(workers=2)
    fake, worker = cluster.workers[1], cluster.core.state.workers[1]
    fake.full_blocks = fake.capacity = worker.full_blocks = 80
    worker.ledger.resize(80)
    for i in range(3):
        cluster.submit(f"r{i}", tokens(i, 20), 60, 20.0 * i)
    cluster.run(until_ms=55)
    assert homes(cluster) == {0}
    expect_all_well(cluster)


def test_a_dead_sleeper_is_no_pressure() -> None:
    cluster = packed()
    sleep(cluster, 2)
    cluster.run(stop=lambda: is_asleep(cluster, 2))
    cluster.kill(2)
    cluster.run(stop=lambda: any(r.kind == "worker_lost" for r in cluster.records))
    assert rung_of(cluster).pressure() is None
    cluster.kill(1)
    cluster.run(stop=lambda: sum(r.kind == "worker_lost" for r in cluster.records) == 2)
    assert rung_of(cluster).pressure() == "a worker is down"


def test_a_dear_move_is_refused_and_told() -> None:
    cluster = spread_out(some_end=True)
    counters = cluster.core.state.counters
    cluster.run(until_ms=cluster.now / MS + 20)
    before = counters.packing_migrations  # who is about to run out of memory gives requests away at any price
    cluster.run(until_ms=cluster.now / MS + 100)
    assert counters.packing_refused and counters.packing_migrations == before
    refused = [r.fields["refused"] for r in cluster.records if r.kind == "packed" and "refused" in r.fields]
    assert refused and all(row["cost_device_s"] > row["saved_device_s"] for row in refused[0])  # type: ignore[index]
    expect_all_well(cluster)


def spread_out(packer: str = "mell", *, some_end: bool = False, **more: object) -> FakeCluster:
    """Requests fill three instances; most of them leave, and those that stay are on three instances."""
    cluster = packed(packer, **more)
    if some_end:  # what has ended tells how long the others stay
        cluster.submit("short", tokens(99, 8), 2)
    for i in range(18):
        cluster.submit(f"r{i}", tokens(i, 50), 200, 0.5 * i)
    cluster.run(until_ms=100)
    kept: set[int] = set()
    for request_id, state in list(cluster.core.state.requests.items()):
        if state.group_id in kept:
            cluster.cancel(request_id, cluster.now / MS)
        kept.add(state.group_id)
    assert len(kept) == 3
    return cluster


@pytest.mark.parametrize("kinds", [frozenset({MigrationKind.KV}), frozenset({MigrationKind.TOKENS}),
                                   frozenset(MigrationKind)])
def test_requests_spread_over_three_end_up_on_fewer(kinds: frozenset[MigrationKind]) -> None:
    cluster = spread_out(kinds=kinds)
    counters = cluster.core.state.counters
    before = counters.packing_migrations
    cluster.run(until_ms=cluster.now / MS + 200)
    assert cluster.core.state.requests, "they are not just over"
    assert counters.packing_migrations > before
    assert bool(counters.num_token_migrations) <= (MigrationKind.TOKENS in kinds)
    assert len(homes(cluster)) < 3
    expect_all_well(cluster)


def test_where_requests_gather_only_to_empty_an_instance_they_are_looked_at_no_more_often() -> None:
    cluster = spread_out(gather=Gather.CLOSE)
    seats = rung_of(cluster).desired._seats
    cluster.run(until_ms=cluster.now / MS + 250)
    assert len(homes(cluster)) < 3 and cluster.core.state.counters.packing_migrations
    decoding = [r for r, s in cluster.core.state.requests.items() if s.num_output]
    assert decoding and all(seats.by_id[r].grip is Grip.HELD for r in decoding) and not seats.restless
    assert not rung_of(cluster).desired.refuses()
    expect_all_well(cluster)


@pytest.mark.parametrize(("saves_idle", "awake"), [
    (True, AwakeParams()), (False, AwakeParams(min_awake=1, falls_asleep=True, after_s=1e6)),
    (False, AwakeParams()), (False, AwakeParams(min_awake=3, falls_asleep=True, after_s=1e6)),
])  # fmt: skip
def test_an_emptied_instance_pays_for_moves_where_it_will_sleep_or_is_given_back(
    saves_idle: bool, awake: AwakeParams
) -> None:
    cluster = spread_out(some_end=True, saves_idle=saves_idle)
    state = cluster.core.state
    cluster.core.reconfigure(replace(state.params, awake=awake))
    before = state.counters.packing_migrations
    cluster.run(until_ms=cluster.now / MS + 200)
    pays = saves_idle or (awake.min_awake < 3 and awake.falls_asleep)
    assert (len(homes(cluster)) < 3) == pays == (state.counters.packing_migrations > before)
    assert pays or state.counters.packing_refused
    expect_all_well(cluster)


def test_a_long_prompt_goes_to_an_empty_instance_where_decodes_leave_it_too_little_time() -> None:
    def stays_with_others(ttft_s: float) -> bool:
        cluster = FakeCluster(
            policy="recompute", num_workers=2, full_blocks=1000, max_tokens=64, prefix_caching=False, max_seqs=16,
            offline=OfflineParams(slo=SloParams(ttft_s=ttft_s, tpot_s=10.0)),
            packing=PackParams(epoch_s=0.05, head_room=0.05),
        )
        for i in range(4):
            cluster.submit(f"r{i}", tokens(i, 20), 200, 20.0 * i, ignore_eos=True)
        cluster.submit("long", tokens(9, 900), 2, 150.0)
        requests = cluster.core.state.requests
        cluster.run(stop=lambda: "long" in requests)
        group = cluster.core.groups[requests["r0"].group_id]
        assert fits_compute(cluster.core.state, group, requests["long"]) == (ttft_s > 1.0)
        is_there = requests["long"].group_id == group.group_id
        expect_all_well(cluster)
        return is_there

    assert stays_with_others(100.0) and not stays_with_others(0.001)


@pytest.mark.parametrize("packer", ["best-fit", "worst-fit", "load-balance"])
def test_the_others_pack_by_the_same_interface(packer: str) -> None:
    cluster = spread_out(packer)
    cluster.run(until_ms=cluster.now / MS + 300)
    migrated = cluster.core.state.counters.packing_migrations
    assert not migrated if packer.endswith("-fit") else True
    expect_all_well(cluster)


def placed_by_hand(cluster: FakeCluster, home_of: dict[str, int]) -> None:
    """These requests are queued in these groups when they come; others where they would be."""
    dispatcher, place = cluster.core.dispatcher, cluster.core.dispatcher.place

    def by_hand(state: RequestState) -> bool:
        if state.request_id not in home_of:
            return place(state)
        cluster.core.groups[home_of.pop(state.request_id)].queues.enqueue(state)
        return True

    dispatcher.place = by_hand  # type: ignore[method-assign]


def test_a_packer_that_spreads_moves_requests_though_that_saves_no_instance() -> None:
    cluster = packed("load-balance", workers=2)
    placed_by_hand(cluster, {f"r{i}": 0 for i in range(6)})
    cluster.submit("short", tokens(9, 8), 2)
    for i in range(6):
        cluster.submit(f"r{i}", tokens(i, 40), 120, 20.0, ignore_eos=True)
    run_to(cluster, 600)
    assert cluster.core.state.counters.packing_migrations > 0
    cluster.run()
    cluster.expect_outputs()


def fragmented() -> FakeCluster:
    """Two instances, each half full of requests that will hold more than one instance could."""
    cluster = packed(workers=2, full_blocks=400)
    placed_by_hand(cluster, {f"r{i}": i % 2 for i in range(4)})
    for i in range(4):
        cluster.submit(f"r{i}", tokens(i, 400), 200, ignore_eos=True)
    return cluster


def test_running_requests_make_room_for_a_head_that_no_instance_has_room_for() -> None:
    cluster = fragmented()
    state = cluster.core.state
    cluster.run(stop=lambda: len(state.requests) == 4 and all(s.num_output for s in state.requests.values()))
    frees = [g.blocks.num_free for g in cluster.core.groups.values()]
    cluster.submit("large", tokens(9, (max(frees) + 8) * BLOCK_SIZE), 2, cluster.now / MS + 1)
    before = set(state.requests)
    cluster.run(stop=lambda: "large" in state.requests and state.requests["large"].phase is Phase.RUNNING)
    assert before <= set(state.requests), "nobody had to end for it"
    assert not any(s.num_preemptions for s in state.requests.values()), "nor to be computed again"
    reasons = [str(r.fields["reason"]) for r in cluster.records if r.kind == "pack"]
    assert "it makes room for large" in reasons
    expect_all_well(cluster)


def test_a_head_that_memory_keeps_out_opens_no_instance_while_those_in_use_can_make_room() -> None:
    cluster = packed(workers=3, full_blocks=400)
    placed_by_hand(cluster, {f"r{i}": i % 2 for i in range(6)} | {"large": 0})
    for i in range(6):  # two of class M and a small one each: none of them has to move
        cluster.submit(f"r{i}", tokens(i, 600 if i < 4 else 80), 200, ignore_eos=True)
    core, rung, state = cluster.core, rung_of(cluster), cluster.core.state
    cluster.run(stop=lambda: len(state.requests) == 6 and all(s.num_output for s in state.requests.values()))
    frees = [core.groups[g].blocks.num_free for g in (0, 1)]
    cluster.submit("large", tokens(9, (max(frees) + 8) * BLOCK_SIZE), 2, cluster.now / MS + 1)
    cluster.run(stop=lambda: "large" in state.requests)
    core.loads.kept_out.add(0)
    assert rung.shut() == rung.closed() == {2}, "its queue is not rebalanced to there"

    def let_in(closed: set[int]) -> LetIn:
        reliefs = Reliefs(state, core.loads, core.migrations, lambda group: True, lambda group_id: 0, lambda: closed)
        return next(reliefs.wanted({}, cluster.now))

    assert let_in({2}).relief.group_id in (0, 1) and let_in({2}).relief.leaves
    assert let_in(set()).relief.group_id == 2 and not let_in(set()).relief.leaves
    expect_all_well(cluster)


def test_an_instance_is_opened_for_a_head_where_those_in_use_have_no_room_for_it_together() -> None:
    cluster = packed(workers=3, full_blocks=400)
    placed_by_hand(cluster, {f"r{i}": i % 2 for i in range(6)} | {"large": 0})
    for i in range(6):
        cluster.submit(f"r{i}", tokens(i, 400), 200, ignore_eos=True)
    state = cluster.core.state
    cluster.run(stop=lambda: len(state.requests) == 6 and all(s.num_output for s in state.requests.values()))
    cluster.submit("large", tokens(9, 350 * BLOCK_SIZE), 2, cluster.now / MS + 1)
    cluster.run(stop=lambda: "large" in state.requests and state.requests["large"].phase is Phase.RUNNING)
    assert state.requests["large"].group_id == 2
    expect_all_well(cluster)


def test_a_saturated_pool_leaves_newcomers_to_dispatch_and_moves_nobody() -> None:
    cluster = fragmented()
    cluster.run(until_ms=120)
    rung, desired = rung_of(cluster), rung_of(cluster).desired
    assert rung.pressure() is None and all(desired.pool_of(g).is_saturated for g in cluster.core.groups)
    assert desired.place(next(iter(cluster.core.state.requests.values()))) is None
    assert not cluster.core.state.counters.packing_migrations
    expect_all_well(cluster)


def test_a_request_goes_to_who_has_its_system_prompt_and_shares_the_blocks() -> None:
    packing = PackParams(epoch_s=0.05, head_room=0.05)
    cluster = FakeCluster(
        policy="recompute", num_workers=3, full_blocks=400, max_tokens=2048, prefix_caching=True, packing=packing
    )
    # Both instances are filled to more than 3/4, and the second one has less left: there a newcomer goes.
    placed_by_hand(cluster, {"first": 0} | {f"a{i}": 0 for i in range(5)} | {f"b{i}": 1 for i in range(5)})
    system = tokens(50, 40)
    cluster.submit("first", [*system, *tokens(1, 8)], 100, ignore_eos=True)
    for i in range(5):
        cluster.submit(f"a{i}", tokens(100 + i, 156), 100, ignore_eos=True)
        cluster.submit(f"b{i}", tokens(200 + i, 188), 100, ignore_eos=True)
    cluster.submit("other", tokens(2, 48), 20, 70.0, ignore_eos=True)
    cluster.submit("second", [*system, *tokens(3, 8)], 20, 71.0, ignore_eos=True)
    requests = cluster.core.state.requests
    cluster.run(stop=lambda: "second" in requests and requests["second"].num_output > 0)
    assert [requests[name].group_id for name in ("first", "other", "second")] == [0, 1, 0]
    ledger = cluster.core.groups[0].blocks.ledgers[0]
    shared = set(ledger.table("first").ids) & set(ledger.table("second").ids)
    assert len(shared) == len(system) // BLOCK_SIZE
    rung_of(cluster).check()
    expect_all_well(cluster)


def test_what_refused_moves_cost_in_instances_is_told() -> None:
    cluster = spread_out(some_end=True)
    cluster.run(until_ms=cluster.now / MS + 120)
    told = [r.fields for r in cluster.records if r.kind == "packed" and r.fields["lost"]]
    assert told and rung_of(cluster).gauges()["packing_lost"] >= 1
    expect_all_well(cluster)


def unlike(*full_blocks: int, head_room: float = 0.05) -> FakeCluster:
    """Packed instances of these capacities: a pool for each."""
    packing = PackParams(epoch_s=0.05, head_room=head_room)
    cluster = FakeCluster(
        policy="recompute", num_workers=len(full_blocks), full_blocks=min(full_blocks), max_tokens=2048,
        prefix_caching=False, packing=packing,
    )
    for worker_id, num_blocks in enumerate(full_blocks):
        fake, worker = cluster.workers[worker_id], cluster.core.state.workers[worker_id]
        fake.full_blocks = fake.capacity = worker.full_blocks = num_blocks
        worker.ledger.resize(num_blocks)
    return cluster


@pytest.mark.parametrize("spare_blocks", [60, 200])
def test_two_that_change_places_wait_or_pass_through_a_spare_of_their_own_pool(
    spare_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = unlike(60, 60, spare_blocks)
    placed_by_hand(cluster, {"a": 0, "b": 1})
    for name in ("a", "b"):
        cluster.submit(name, tokens(ord(name), 36 * BLOCK_SIZE), 40, ignore_eos=True)
    cluster.run(stop=lambda: sum(s.num_output > 2 for s in cluster.core.state.requests.values()) == 2)
    rung, groups = rung_of(cluster), cluster.core.groups
    rung.desired.refresh(cluster.now)
    a, b = (cluster.core.state.requests[name] for name in ("a", "b"))
    circle = [Owed(a, groups[0], groups[1]), Owed(b, groups[1], groups[0])]
    assert not list(rung._ordered(circle)) and not rung._leaving, "no group lacks room"
    monkeypatch.setattr(rung, "_lacks_room", lambda group: True)
    moves = list(rung._ordered(circle))
    monkeypatch.undo()
    by_way = {o.destination.group_id for o in moves}
    assert by_way == ({2} if spare_blocks == 60 else set()), "else one is computed again"
    assert bool(rung._leaving) == (spare_blocks != 60)
    expect_all_well(cluster)


def test_a_newcomer_for_whom_a_pool_has_no_place_in_time_goes_to_one_in_use_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = unlike(60, 60, 200)
    desired = rung_of(cluster).desired
    cluster.submit("first", tokens(1, 20), 60, ignore_eos=True)
    cluster.submit("late", tokens(2, 20), 60, 30.0, ignore_eos=True)
    cluster.run(stop=lambda: "first" in cluster.core.state.requests)
    monkeypatch.setattr(newcomers, "has_room", lambda cluster, group, state: group.group_id != 2)
    cluster.run(stop=lambda: "late" in cluster.core.state.requests)
    assert cluster.core.state.requests["late"].group_id in (0, 1)
    assert desired.place(cluster.core.state.requests["late"]) in (0, 1)
    desired.check()
    monkeypatch.undo()
    expect_all_well(cluster)
