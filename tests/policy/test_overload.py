"""Overload: whether memory keeps a queue out, and for how much longer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.overload import OverloadParams, memory_binds, memory_wait_s

PARAMS = OverloadParams(min_blocked_s=0.1)


def test_a_queue_that_full_memory_has_kept_out_for_long_enough_counts() -> None:
    assert memory_binds(3, 95, 10, 100, 0.1, PARAMS)


@pytest.mark.parametrize(
    ("num_waiting", "used", "need", "blocked_s"),
    [(0, 95, 10, 1.0), (3, 90, 10, 1.0), (3, 95, 10, None), (3, 95, 10, 0.09)],
    ids=["nothing waits", "there is room", "something else keeps it out", "too short a time"],
)
def test_any_one_reason_makes_it_no_overload(num_waiting: int, used: int, need: int, blocked_s: float | None) -> None:
    assert not memory_binds(num_waiting, used, need, 100, blocked_s, PARAMS)


def test_a_queue_waits_until_enough_has_come_free() -> None:
    assert memory_wait_s(50, 10.0, 60, None) == 5.0
    assert memory_wait_s(-5, 10.0, 60, None) == 0.0


def test_what_was_seen_counts_where_it_is_less_than_what_was_foreseen() -> None:
    assert memory_wait_s(50, 10.0, 60, 6.0) == 10.0, "running requests grow by what comes free"
    assert memory_wait_s(50, 10.0, 60, 60.0) == 5.0
    assert memory_wait_s(50, 10.0, 60, 0.0) == math.inf


@given(st.integers(-100, 100), st.none() | st.floats(0, 50), st.integers(0, 100), st.none() | st.floats(0, 50))
def test_no_wait_is_shorter_for_more_that_is_missing(
    missing: int, freed: float | None, queued: int, admitted: float | None
) -> None:
    wait = memory_wait_s(missing, freed, queued, admitted)
    assert wait >= 0.0 and memory_wait_s(missing + 1, freed, queued, admitted) >= wait
    if not freed and admitted is None:
        assert wait == (math.inf if missing > 0 else 0.0), "nothing comes free that is known of"
