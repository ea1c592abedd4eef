"""Sizes run ahead of what requests hold; and what refused moves cost is counted."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from packing_properties import num_owed
from packing_util import CAPACITY, random_operations

from jettison.policy.packing.lost import devices_lost
from jettison.policy.packing.mell import Packing
from jettison.policy.packing.reserve import Growing, ReserveParams, plan_resizes, reserved_blocks
from jettison.policy.packing.types import Arrive, Depart, Grip, PackingParams, Resize

PARAMS = ReserveParams(epoch_s=1.0, ahead_s=4.0)


@given(st.integers(1, 100), st.floats(0, 10), st.integers(100, 150))
def test_a_reserve_lasts_beyond_the_next_epoch(num_blocks: int, rate: float, capacity: int) -> None:
    size = reserved_blocks(num_blocks, rate, capacity, PARAMS)
    assert num_blocks <= size <= capacity
    assert size == capacity or size >= num_blocks + rate
    assert plan_resizes([Growing("a", num_blocks, size, rate)], capacity, PARAMS) == []


def test_a_class_is_crossed_before_the_request_crosses_it() -> None:
    rows = [Growing("near", 599, 599, 2.0), Growing("far", 500, 599, 2.0), Growing("full", 2400, 2400, 2.0)]
    # The 8: what it grows by while its next reserve lasts.
    assert plan_resizes(rows, CAPACITY, PARAMS) == [Resize("near", 607, 8)]


@given(st.integers(1, 100), st.floats(0, 10), st.integers(100, 150), st.integers(1, 150))
def test_no_room_is_reserved_for_what_a_request_may_not_write(
    num_blocks: int, rate: float, capacity: int, most_blocks: int
) -> None:
    num_blocks = min(num_blocks, most_blocks)
    size = reserved_blocks(num_blocks, rate, capacity, PARAMS, most_blocks)
    assert num_blocks <= size <= min(capacity, max(num_blocks, most_blocks))
    assert size in (most_blocks, reserved_blocks(num_blocks, rate, capacity, PARAMS))


def test_devices_lost_to_refused_moves_are_counted() -> None:
    packing = Packing(PackingParams(capacity=CAPACITY))
    packing.apply([Arrive(f"m{i}", 1100) for i in range(20)])
    for i in range(20):
        packing.pin(f"m{i}", Grip.HELD)
    plan = packing.apply([Depart(next(iter(packing.requests_on(device)))) for device in packing.active])
    placed = [packing.requests_on(device) for device in packing.active]
    assert (len(placed), plan.moves, num_owed(packing), devices_lost(placed, CAPACITY)) == (10, (), 9, 5)


def test_nothing_is_lost_where_no_request_is_held() -> None:
    packing = Packing(PackingParams(capacity=CAPACITY))
    for operation in random_operations(random.Random(1), "all", 200, grows=False):
        packing.apply([operation])
        assert num_owed(packing) == 0
    assert devices_lost([packing.requests_on(device) for device in packing.active], CAPACITY) <= 1


@given(st.integers(1, 100), st.floats(0, 10), st.integers(1, 150))
def test_a_request_gets_no_larger_size_than_it_may_ever_hold(num_blocks: int, rate: float, most_blocks: int) -> None:
    row = Growing("a", num_blocks, num_blocks, rate, max(num_blocks, most_blocks))
    assert all(resize.num_blocks <= row.most_blocks for resize in plan_resizes([row], 150, PARAMS))
