"""Free ids in runs: the lowest first, whatever was given back in whatever order."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from jettison.memory.freeblocks import FreeBlocks, runs_of


@given(st.lists(st.integers(0, 40), unique=True))
def test_runs_name_every_id_once_and_in_order(ids: list[int]) -> None:
    runs = runs_of(ids)
    assert [block for lo, hi in runs for block in range(lo, hi)] == ids
    assert all(hi != lo for (_, hi), (lo, _) in itertools.pairwise(runs)), "runs as long as they can be"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_the_lowest_ids_are_taken_whatever_came_back_before(moves: list[tuple[bool, int]]) -> None:
    free, expected, taken = FreeBlocks([(0, 50)]), set(range(50)), list[int]()
    for takes, number in moves:
        if takes:
            lowest = sorted(expected)[:number]
            assert free.take(len(lowest)) == lowest
            expected -= set(lowest)
            taken += lowest
        elif taken:
            block = taken.pop(number % len(taken))
            free.give(block, block + 1)
            expected.add(block)
        free.check()
        assert free.ids() == sorted(expected) and free.num == len(expected)


def test_runs_that_touch_are_joined_in_the_end() -> None:
    free = FreeBlocks()
    for first in (0, 1):
        for block in range(first, 10_000, 2):
            free.give(block, block + 1)
    free.check()
    assert len(list(free)) < 9_000
    assert free.take(10_000) == list(range(10_000)) and free.num == 0
