"""The second dimension: no device takes more requests than its steps have time for."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from packing_util import CAPACITY, placement, random_operations
from test_mell import check

from jettison.policy.packing.mell import Packing
from jettison.policy.packing.types import Arrive, PackingParams, Resize, Work

PARAMS = PackingParams(capacity=CAPACITY)


@given(st.integers(0, 1 << 30), st.sampled_from(["large", "middles", "edges"]), st.integers(2, 6), st.integers(0, 3))
@settings(max_examples=150)
def test_no_device_takes_more_than_its_steps_have_time_for(seed: int, mix: str, most: int, per_block: int) -> None:
    work = Work(1000, per_block, 1000 * most)
    packing = Packing(PARAMS)
    packing.bound_work(work)
    for operation in random_operations(random.Random(seed), mix, 80, grows=False):
        packing.apply([operation])
        for on_it in placement(packing).values():
            assert sum(on_it.values()) <= CAPACITY
            assert len(on_it) == 1 or 1000 * len(on_it) + per_block * sum(on_it.values()) <= work.most


def test_short_requests_take_as_many_devices_as_steps_ask_for_and_no_bound_takes_as_few_as_memory() -> None:
    packing = Packing(PARAMS)
    packing.bound_work(Work(10, 0, 80))
    arrivals = [Arrive(f"r{i}", 20) for i in range(40)]
    packing.apply(arrivals)
    assert [len(on_it) for on_it in placement(packing).values()] == [8] * 5
    packing.bound_work(None)
    packing.apply([])
    assert len(packing.active) == 1
    check(packing)


def test_a_device_that_has_more_than_steps_have_time_for_keeps_it() -> None:
    packing = Packing(PARAMS)
    packing.apply([Arrive(f"r{i}", 20) for i in range(10)])
    packing.bound_work(Work(10, 0, 50))
    assert packing.apply([Resize("r0", 30)]).moves == ()
    assert packing.apply([Arrive("new", 20)]).opened == (1,)


def test_what_is_about_the_same_is_not_news() -> None:
    assert Work(100, 10, 1000).is_about(Work(109, 10, 1000)) and Work(0, 0, 0).is_about(Work(0, 0, 0))
    assert not Work(100, 10, 1000).is_about(Work(120, 10, 1000)) and not Work(1, 1, 1).is_about(None)
