"""Where a request's KV is: shared by those that run, several at once on the way, and never more than is really held."""

from __future__ import annotations

import pytest
from fakes import MS, FakeCluster, Faults
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.core.moving.hostedkv import HostedPhase
from jettison.core.moving.passage import RelocationPhase
from jettison.core.requests import Phase, RequestState
from jettison.core.residence import (
    NOWHERE,
    Residence,
    Residences,
    arenas_of,
    changed,
    check,
    hosted_only,
    in_arenas,
    pools_of,
)
from jettison.core.serving.holds import GroupHold
from jettison.memory.kvtransfers import Place, plan_kv_transfers
from jettison.memory.stages import StagePlan
from jettison.types import LayerRange

PAIR = (StagePlan(0, LayerRange(0, 2)), StagePlan(1, LayerRange(2, 4)))
ALONE = (StagePlan(2, LayerRange(0, 4)),)


# --- the values


def holds(**tokens: int) -> object:
    """``arena0=8``: worker 0 holds arena blocks for 8 tokens; ``host1=4`` likewise."""
    return lambda place: tokens.get(f"{'host' if place.is_host else 'arena'}{place.worker_id}", 0)


def test_a_migration_of_tokens_has_two_residences_in_arenas_with_different_numbers_of_tokens() -> None:
    here, there = arenas_of(PAIR), arenas_of(ALONE).at(12)
    check((here, there), runs_in=here, num_computed=40, held_tokens=holds(arena0=40, arena1=40, arena2=12))
    with pytest.raises(AssertionError, match="holds 8 tokens of 12"):
        check((here, there), runs_in=here, num_computed=40, held_tokens=holds(arena0=40, arena1=40, arena2=8))
    with pytest.raises(AssertionError, match="more than the 10 tokens"):
        check((here, there), runs_in=here, num_computed=10, held_tokens=holds(arena0=40, arena1=40, arena2=12))


def test_a_checkpoint_is_a_residence_in_host_pools_with_a_prefix_and_outlives_the_blocks() -> None:
    here, pools = arenas_of(PAIR), pools_of(PAIR).at(8)
    check((here, pools), runs_in=here, num_computed=40, held_tokens=holds(arena0=40, arena1=40, host0=8, host1=8))
    assert hosted_only((here, pools)) == (pools,) and in_arenas((pools, here)) is here
    assert plan_kv_transfers(pools.places, ALONE) == ((0, 2, (0, 2), True), (1, 2, (2, 4), True))


def test_only_the_group_s_residence_runs() -> None:
    here, other = arenas_of(PAIR), arenas_of(ALONE)
    with pytest.raises(AssertionError, match="runs in"):
        check((here, other), runs_in=here, num_computed=0, held_tokens=holds())
    with pytest.raises(AssertionError, match="runs in"):
        check((here.at(0),), runs_in=here, num_computed=0, held_tokens=holds())
    with pytest.raises(AssertionError, match="runs in"):
        check((here,), runs_in=None, num_computed=0, held_tokens=holds())


def test_a_residence_is_in_arenas_or_in_host_pools() -> None:
    mixed = Residence({Place(0): LayerRange(0, 2), Place(1, is_host=True): LayerRange(2, 4)}, 0)
    with pytest.raises(AssertionError):
        check((mixed,), runs_in=None, num_computed=0, held_tokens=holds())


RESIDENCES = st.lists(
    st.builds(
        lambda worker, is_host, num: Residence({Place(worker, is_host): LayerRange(0, 4)}, num),
        st.integers(0, 3), st.booleans(), st.integers(0, 9),
    ),
    max_size=4,
).map(tuple)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(RESIDENCES, st.data())
def test_one_is_put_in_the_place_of_another_and_all_others_stay(residences: Residences, data: st.DataObject) -> None:
    new = arenas_of(ALONE).at(3)
    old = data.draw(st.sampled_from([*residences, None, arenas_of(PAIR)]))
    after = changed(residences, old, new)
    assert after[-1] is new and list(after[:-1]) == [r for r in residences if r is not old]
    assert changed(after, new, None) == tuple(r for r in residences if r is not old)
    assert list(hosted_only(residences)) == [r for r in residences if r.is_hosted]


def test_having_none_is_shared() -> None:
    assert hosted_only(NOWHERE) is NOWHERE and hosted_only((arenas_of(PAIR),)) is NOWHERE


# --- the moves


def tokens_at(state: RequestState) -> list[tuple[bool, int | None]]:
    """(in host pools?, tokens) of each residence."""
    return [(r.is_hosted, r.num_tokens) for r in state.residences]


def test_requests_of_a_group_share_where_they_run_and_waiting_ones_are_nowhere() -> None:
    cluster = FakeCluster(policy="recompute", num_workers=1, full_blocks=12, max_seqs=3)
    for i in range(6):
        cluster.submit(f"r{i}", [i + 1] * 8, 8, 0.1 * i)
    cluster.run(until_ms=6)
    (group,) = cluster.core.groups.values()
    assert len(group.queues.running) > 1 and group.queues.waiting
    assert len({id(s.residences) for s in group.queues.running.values()}) == 1
    assert all(s.residences is NOWHERE for s in group.queues.waiting)
    cluster.run()
    cluster.expect_nothing_left()


def test_what_has_arrived_at_the_destination_grows_by_rounds_and_is_forgotten_where_it_falls_back() -> None:
    for falls_back in (False, True):
        cluster = FakeCluster(policy="recompute", full_blocks=160, max_tokens=64)
        cluster.submit("traveller", list(range(1, 61)) * 3, 120, ignore_eos=True)
        cluster.run(until_ms=60)
        state = cluster.core.state.requests["traveller"]
        source = cluster.core.groups[state.group_id]
        destination = cluster.core.groups[1 - state.group_id]
        cluster.carry_out(cluster.core.migrations.start(state, source, destination, cluster.now))
        (relocation,) = cluster.core.migrations.under_way
        assert tokens_at(state) == [(False, None), (False, 0)]
        cluster.run(stop=lambda r=relocation: r.phase is RelocationPhase.FINAL)
        (_, _), (_, arrived) = tokens_at(state)
        assert arrived is not None and 0 < arrived <= state.num_computed
        assert state.residences[0] is source.residence and state.residences[1].places is destination.residence.places
        if falls_back:
            cluster.carry_out(relocation.cancel())
        cluster.run(stop=lambda r=relocation: r.is_over)
        assert state.residences == ((source if falls_back else destination).residence,)
        cluster.run()
        cluster.expect_nothing_left()


def test_out_to_host_pools_and_back() -> None:
    cluster = FakeCluster(policy="recompute", num_workers=1, full_blocks=60, max_tokens=64)
    cluster.submit("r", list(range(1, 41)), 60, ignore_eos=True)
    cluster.run(until_ms=30)
    state, hosted = cluster.core.state.requests["r"], cluster.core.hosted.swap
    (group,) = cluster.core.groups.values()
    group.hold("test", GroupHold.STEPS)
    cluster.run(stop=lambda: not group.in_flight)
    group.release("test", GroupHold.STEPS)
    hosted.send_out(state)
    computed = state.num_computed
    assert tokens_at(state) == [(False, computed), (True, 0)]
    cluster.carry_out(hosted.send(lambda group: 3))
    cluster.run(stop=lambda: not state.transfers)
    assert tokens_at(state) == [(False, computed), (True, 12)]
    while state.phase is Phase.MOVING:
        cluster.carry_out(hosted.send(lambda group: 3))
        cluster.run(stop=lambda: not state.transfers)
        cluster.core.check()
    assert tokens_at(state) == [(True, computed)]
    hosted.bring_back(state)
    assert tokens_at(state) == [(True, computed), (False, 0)]
    cluster.carry_out(hosted.send(lambda group: 2))
    cluster.run(stop=lambda: not state.transfers)
    assert tokens_at(state) == [(True, computed), (False, 8)]
    hosted.give_way(group.worker_ids)
    assert tokens_at(state) == [(True, computed)]
    assert [e.phase for e in hosted.of(group, *HostedPhase)] == [HostedPhase.STORED]
    hosted.bring_back(state)
    while state.phase is Phase.MOVING:
        cluster.carry_out(hosted.send(lambda group: 100))
        cluster.run(stop=lambda: not state.transfers)
    assert state.residences == (group.residence,)
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@pytest.mark.parametrize("comes_back", [None, 0, 8], ids=["stored", "about_to_come_back", "coming_back"])
def test_what_a_dead_worker_s_pool_had_of_a_request_that_lives_elsewhere_is_computed_again(
    comes_back: int | None
) -> None:
    """A pipeline splits while a request is stored at both members, and the one that it does not go home to dies."""
    cluster = FakeCluster(full_blocks=60, max_tokens=64, auto_restore=False)
    cluster.order("drop")
    cluster.run(until_ms=60)
    for i in range(3):
        cluster.submit(f"r{i}", list(range(1, 41)), 100, 60, ignore_eos=True)
    cluster.run(until_ms=120)
    (group,) = cluster.core.groups.values()
    state, hosted = cluster.core.state.requests["r0"], cluster.core.hosted.swap
    group.hold("test", GroupHold.STEPS)
    cluster.run(stop=lambda: not group.in_flight)
    group.release("test", GroupHold.STEPS)
    hosted.send_out(state)
    cluster.carry_out(hosted.send(lambda group: 100))
    cluster.run(stop=lambda: state.phase is Phase.STORED)
    cluster.order("restore")
    cluster.run(stop=lambda: not cluster.core.restores)
    (home,) = cluster.core.groups[state.group_id].worker_ids
    assert state.residences[0].worker_ids == (0, 1) and state.phase is Phase.STORED
    if comes_back is not None:
        hosted.bring_back(state)
        cluster.carry_out(hosted.send(lambda group: comes_back))
        assert bool(state.transfers) == bool(comes_back)
    cluster.kill(1 - home)
    cluster.restart_at(1 - home, cluster.now / MS + 200)
    cluster.run(stop=lambda: state.phase in (Phase.WAITING, Phase.RUNNING))
    assert state.num_preemptions == 2 and cluster.core.state.counters.hosted_given_up <= 1
    assert not any(pool.holders() for pool in hosted.pools.values())
    cluster.run()
    cluster.expect_outputs()
    cluster.expect_nothing_left()


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6), st.sampled_from(["drop", "swap+drop", "migrate+drop", "swap+migrate+drop"]))
def test_a_running_request_is_where_its_group_runs_whatever_has_moved_it(seed: int, policy: str) -> None:
    cluster = FakeCluster(
        policy=policy, num_workers=3, full_blocks=24, seed=seed, eager=True, shard_bytes=1024,
        faults=Faults(move=0.1, apply=0.05, swap=0.05, budget=4),
    )
    for i in range(24):
        cluster.submit(f"r{i}", [i + 1] * (4 + (seed + 7 * i) % 30), 30, 3.0 * i)
    cluster.order_at("drop", 40)
    cluster.order_at("restore", 120)
    cluster.run()  # each event is followed by all checks
    cluster.expect_outputs()
    cluster.expect_nothing_left()
    assert cluster.now > MS
