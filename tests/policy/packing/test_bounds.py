"""Lower bounds never exceed the optimum, and the optimum is one."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.policy.packing.bounds import first_fit_decreasing, l2_bound, optimum, volume_bound

SIZES = st.lists(st.integers(1, 12), min_size=0, max_size=7)


def by_trying_all(sizes: list[int], capacity: int) -> int:
    for count in range(len(sizes) + 1):
        for choice in product(range(count), repeat=len(sizes)):
            used = [0] * count
            for size, at in zip(sizes, choice):
                used[at] += size
            if max(used, default=0) <= capacity:
                return count
    raise AssertionError("one device each is always enough")


@settings(max_examples=40)
@given(SIZES)
def test_bounds_are_below_the_optimum_and_a_repack_is_above(sizes: list[int]) -> None:
    best = by_trying_all(sizes[:5], 12)
    assert optimum(sizes[:5], 12) == best
    assert volume_bound(sizes[:5], 12) <= l2_bound(sizes[:5], 12) <= best <= first_fit_decreasing(sizes[:5], 12)


@pytest.mark.parametrize(
    ("sizes", "volume", "l2", "best"),
    [
        ([], 0, 0, 0),
        ([7, 7, 7], 2, 3, 3),  # above half, one each
        ([6, 6, 4, 4, 4], 2, 2, 2),
        ([9, 9, 4, 4, 4], 3, 3, 3),  # the fours fit beside no nine
        ([5, 5, 5, 5, 5], 3, 3, 3),
        ([8, 8, 5, 5], 3, 3, 3),
    ],
)
def test_known_instances(sizes: list[int], volume: int, l2: int, best: int) -> None:
    assert (volume_bound(sizes, 12), l2_bound(sizes, 12), optimum(sizes, 12)) == (volume, l2, best)


def test_l2_sees_what_volume_does_not() -> None:
    assert volume_bound([7] * 100, 12) == 59
    assert l2_bound([7] * 100, 12) == 100


def test_the_optimum_beats_first_fit_decreasing() -> None:
    sizes = [44, 24, 24, 22, 21, 17, 8, 8, 6, 6]
    assert (first_fit_decreasing(sizes, 61), optimum(sizes, 61)) == (4, 3)


def test_sizes_that_no_device_holds_are_refused() -> None:
    for sizes in ([0], [13]):
        with pytest.raises(ValueError, match="on devices of 12"):
            volume_bound(sizes, 12)
