"""Moves in an order in which nobody is ever without room."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.packing.ordering import MoveMode, Order, Step, order_moves
from jettison.policy.packing.types import PackMove

MOVES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 9)), max_size=12).map(
    lambda rows: [PackMove(f"r{i}", a, b, n) for i, (a, b, n) in enumerate(rows) if a != b]
)
ROOMS = st.lists(st.integers(0, 12), min_size=7, max_size=7).map(lambda rooms: dict(enumerate(rooms)))


def replay(order: Order, free: dict[int, int]) -> dict[str, int | None]:
    """Where everybody ends; wave by wave, what is freed counts only from the next one on."""
    free = dict(free)
    where: dict[str, int | None] = {}
    for wave in range(1 + max((step.wave for step in order.steps), default=-1)):
        steps = [step for step in order.steps if step.wave == wave]
        assert steps, "no wave is empty"
        for step in steps:
            name, source, destination, size = step.move
            if step.way is not MoveMode.OUT:
                free[destination] -= size
            if step.way is MoveMode.IN:
                assert where[name] is None
            elif name in where:
                assert where[name] == source
            where[name] = None if step.way is MoveMode.OUT else destination
        assert min(free.values()) >= 0
        for step in steps:
            if step.way is not MoveMode.IN:
                free[step.move.source] += step.move.num_blocks
    return where


@given(MOVES, ROOMS, st.sampled_from([(), (5,), (5, 6), (6, 0)]))
def test_never_over_and_all_arrive_for_whom_there_is_room(
    moves: list[PackMove], free: dict[int, int], spares: tuple[int, ...]
) -> None:
    order = order_moves(moves, free, spares)
    left_out = {move.request_id for move in order.waiting}
    wanted = {move.request_id: move.destination for move in moves if move.request_id not in left_out}
    assert replay(order, free) == wanted
    after = Counter(free)
    for move in moves:
        after[move.destination] -= move.num_blocks
        after[move.source] += move.num_blocks
    if all(room >= 0 for room in after.values()):
        assert not order.waiting, "the desired placement fits, so it is reached"


def test_what_needs_the_room_of_another_waits_for_it() -> None:
    first, second = PackMove("a", 0, 1, 5), PackMove("b", 1, 2, 5)
    order = order_moves([first, second], {0: 0, 1: 0, 2: 5})
    assert order.steps == (Step(0, second), Step(1, first))


def test_a_cycle_goes_by_way_of_a_spare_device() -> None:
    a, b = PackMove("a", 0, 1, 5), PackMove("b", 1, 0, 4)
    order = order_moves([a, b], {0: 0, 1: 1, 9: 4}, spares=[9])
    assert order.steps == (
        Step(0, b._replace(destination=9)), Step(1, a), Step(2, b._replace(source=9)),
    )  # fmt: skip


def test_without_one_the_smallest_goes_out_and_comes_in() -> None:
    a, b = PackMove("a", 0, 1, 5), PackMove("b", 1, 0, 4)
    order = order_moves([a, b], {0: 0, 1: 1})
    assert order.steps == (Step(0, b, MoveMode.OUT), Step(1, a), Step(2, b, MoveMode.IN))


def test_who_has_no_room_in_the_end_stays() -> None:
    order = order_moves([PackMove("a", 0, 1, 5), PackMove("b", 0, 1, 3)], {1: 4})
    assert [step.move.request_id for step in order.steps] == ["b"]
    assert [move.request_id for move in order.waiting] == ["a"]


def test_a_request_moves_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        order_moves([PackMove("a", 0, 1, 5), PackMove("a", 1, 2, 5)], {1: 9, 2: 9})
