"""Which device is closed, and where its requests go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.packing.closing import plan_closing
from jettison.policy.packing.types import Work

CAPACITY = 20
PLACED = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4).filter(lambda s: sum(s) <= CAPACITY), max_size=6)


@given(PLACED)
def test_one_device_is_emptied_and_no_other_overflows(rows: list[list[int]]) -> None:
    placed = {d: {f"r{d}-{i}": size for i, size in enumerate(sizes)} for d, sizes in enumerate(rows)}
    moves = plan_closing(placed, CAPACITY)
    if not moves:
        return
    (source,) = {move.source for move in moves}
    assert {move.request_id: move.num_blocks for move in moves} == placed[source]
    used = {d: sum(sizes.values()) for d, sizes in placed.items() if d != source}
    for move in moves:
        used[move.destination] += move.num_blocks
    assert all(num <= CAPACITY for num in used.values())


def test_the_device_with_the_fewest_requests_is_closed_and_the_fullest_that_has_room_takes_them() -> None:
    placed = {0: {"a": 9, "b": 3}, 1: {"c": 4}, 2: {"d": 15}}
    assert [(m.request_id, m.source, m.destination) for m in plan_closing(placed, CAPACITY)] == [("c", 1, 2)]


def test_where_nothing_fits_elsewhere_nobody_moves() -> None:
    assert plan_closing({0: {"a": 12}, 1: {"b": 12}}, CAPACITY) == ()
    assert plan_closing({0: {"a": 1}}, CAPACITY) == plan_closing({}, CAPACITY) == ()


def test_a_device_with_a_request_that_cannot_go_is_not_closed() -> None:
    placed = {0: {"a": 3}, 1: {"b": 4}, 2: {"c": 9}}
    assert {m.request_id for m in plan_closing(placed, CAPACITY)} == {"a"}
    assert {m.request_id for m in plan_closing(placed, CAPACITY, {"a"})} == {"b"}
    assert plan_closing(placed, CAPACITY, {"a", "b", "c"}) == ()


def test_no_device_gets_more_requests_than_its_work_allows() -> None:
    placed = {0: {f"a{i}": 1 for i in range(4)}, 1: {f"b{i}": 1 for i in range(5)}}
    assert len(plan_closing(placed, CAPACITY, work=Work(1, 0, 9))) == 4
    assert plan_closing(placed, CAPACITY, work=Work(1, 0, 8)) == ()
