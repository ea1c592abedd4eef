"""Rebalancing: only what overflows moves, and only to where it can start."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.rebalance import GroupQueue, QueuedRequest, plan_rebalance


def group(
    group_id: int, limit: int, running: int, free: int, waiting: list[int], *, open_: bool = True, blocked: bool = False
) -> GroupQueue:
    requests = [QueuedRequest(f"g{group_id}-{i}", size) for i, size in enumerate(waiting)]
    return GroupQueue(group_id, limit, running, free, requests, open_, blocked)


def test_the_overflow_of_a_merged_group_goes_to_a_spare_one() -> None:
    merged, spare = group(0, 4, 3, 100, [2, 2, 2, 2]), group(1, 4, 1, 100, [])
    plan = plan_rebalance([merged, spare])
    assert [(m.request_id, m.destination) for m in plan] == [("g0-1", 1), ("g0-2", 1), ("g0-3", 1)]


def test_nothing_overflows_nothing_moves() -> None:
    assert plan_rebalance([group(0, 8, 3, 0, [2, 2, 2, 2]), group(1, 8, 0, 100, [])]) == ()


def test_a_group_that_is_being_emptied_gets_nothing() -> None:
    assert plan_rebalance([group(0, 2, 2, 10, [1]), group(1, 8, 0, 100, [], open_=False)]) == ()


def test_no_room_no_move_but_a_smaller_one_behind_may_go() -> None:
    plan = plan_rebalance([group(0, 1, 1, 0, [9, 3]), group(1, 4, 0, 5, [])])
    assert [m.request_id for m in plan] == ["g0-1"]


def test_what_memory_keeps_out_goes_where_there_is_room() -> None:
    short, spare = group(0, 8, 3, 4, [2, 3, 1], blocked=True), group(1, 8, 1, 4, [])
    assert [(m.request_id, m.destination) for m in plan_rebalance([short, spare])] == [("g0-1", 1), ("g0-2", 1)]
    assert plan_rebalance([group(0, 8, 3, 4, [2, 3, 1]), spare]) == ()


def test_two_that_are_short_of_memory_send_each_other_nothing() -> None:
    assert plan_rebalance([group(0, 8, 3, 2, [3, 1], blocked=True), group(1, 8, 1, 2, [4], blocked=True)]) == ()


def test_what_is_kept_at_most_is_kept_though_there_are_places_and_room() -> None:
    queue, dry = group(0, 8, 1, 100, [2, 2, 2], open_=False), group(1, 8, 1, 3, [])
    assert plan_rebalance([queue, dry]) == ()
    plan = plan_rebalance([replace(queue, most_kept=2), dry])
    assert [(m.request_id, m.destination) for m in plan] == [("g0-2", 1)]


GROUPS = st.lists(
    st.tuples(
        st.integers(1, 10), st.integers(0, 12), st.integers(-5, 60), st.lists(st.integers(1, 15), max_size=12),
        st.booleans(), st.booleans(),
    ),
    min_size=1, max_size=5,
)


@given(GROUPS)
def test_destinations_can_start_what_they_are_given(
    drawn: list[tuple[int, int, int, list[int], bool, bool]]
) -> None:
    groups = [group(i, *rest[:4], open_=rest[4], blocked=rest[5]) for i, rest in enumerate(drawn)]
    plan = plan_rebalance(groups)
    assert len({m.request_id for m in plan}) == len(plan)
    sizes = {r.request_id: r.num_blocks for g in groups for r in g.waiting}
    for g in groups:
        gone = [m for m in plan if m.source == g.group_id]
        assert {m.request_id for m in gone} <= {r.request_id for r in g.overflow()}
        come = [m for m in plan if m.destination == g.group_id]
        assert not come or (g.takes_new and not gone)
        assert len(come) <= g.num_spare_places
        assert not come or sum(sizes[m.request_id] for m in come) <= g.num_spare_blocks
    stuck = {r.request_id for g in groups for r in g.overflow()} - {m.request_id for m in plan}
    for g in groups:
        come = [sizes[m.request_id] for m in plan if m.destination == g.group_id]
        if g.takes_new and len(come) < g.num_spare_places:
            room = g.num_spare_blocks - sum(come)
            others = {r.request_id for o in groups if o is not g for r in o.overflow()} & stuck
            assert all(sizes[r] > room for r in others)


def asking_every_group(groups: list[GroupQueue]) -> list[tuple[str, int, int]]:
    """The rule as it is said: each in turn to the roomiest group that fits."""
    places = {g.group_id: g.num_spare_places for g in groups if g.takes_new}
    blocks = {g.group_id: g.num_spare_blocks for g in groups if g.takes_new}
    overflowing = [(position, g.group_id, r) for g in groups for position, r in enumerate(g.overflow())]
    plan = []
    for _, source, request in sorted(overflowing, key=lambda entry: entry[:2]):
        fitting = [g for g in places if g != source and places[g] > 0 and blocks[g] >= request.num_blocks]
        if fitting:
            destination = max(fitting, key=lambda g: (blocks[g], -g))
            places[destination] -= 1
            blocks[destination] -= request.num_blocks
            plan.append((request.request_id, source, destination))
    return plan


@given(GROUPS)
def test_each_goes_where_most_memory_is_left(drawn: list[tuple[int, int, int, list[int], bool, bool]]) -> None:
    groups = [group(i, *rest[:4], open_=rest[4], blocked=rest[5]) for i, rest in enumerate(drawn)]
    assert list(plan_rebalance(groups)) == asking_every_group(groups)
