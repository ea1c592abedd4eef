"""How long wakes take, and how many sleepers are woken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.waketimes import WakeForecast, WakeSource, WakesTaken, left_s, may_wake, num_to_wake, wake_s

SECONDS = st.floats(0.01, 100.0)


def test_a_wake_takes_its_bytes_and_what_comes_before_them() -> None:
    assert wake_s(WakeForecast(2_000, 1_000.0, 0.25)) == 2.25
    assert wake_s(WakeForecast(2_000, 1_000.0, 0.25, wait_s=0.5)) == 2.5, "memory is mapped while peers end their steps"
    assert wake_s(WakeForecast(0, None, 0.25)) == 0.0, "one that has given nothing up is there at once"
    assert wake_s(WakeForecast(2_000, None, 0.25)) is None


@given(SECONDS, SECONDS, st.sampled_from(WakeSource), st.booleans())
def test_after_the_first_wake_as_wakes_have_taken(
    raw_s: float, took_s: float, source: WakeSource, is_busy: bool
) -> None:
    taken, wake = WakesTaken(), WakeForecast(1_000, 1_000.0 / raw_s, 0.0, source, is_busy)
    assert taken.seconds(wake) == wake_s(wake)
    taken.note(wake, took_s)
    assert taken.seconds(wake) == pytest.approx(took_s)
    for _ in range(20):
        taken.note(wake, raw_s)
    assert taken.seconds(wake) == pytest.approx(wake_s(wake), rel=0.01)


@given(SECONDS, SECONDS, st.sampled_from(WakeSource))
def test_beside_work_a_wake_takes_no_less_than_without(raw_s: float, took_s: float, source: WakeSource) -> None:
    taken = WakesTaken()
    busy, idle = (WakeForecast(1_000, 1_000.0 / raw_s, 0.0, source, is_busy) for is_busy in (True, False))
    taken.note(idle, took_s)
    assert taken.seconds(busy) == pytest.approx(max(raw_s, took_s))


def test_one_that_has_given_nothing_up_teaches_nothing() -> None:
    taken = WakesTaken()
    taken.note(WakeForecast(0, None, 0.0), 5.0)
    assert taken.seconds(WakeForecast(1_000, 500.0, 0.0)) == 2.0


def test_parameters_come_from_where_they_are_soonest() -> None:
    rates = zip(WakeSource, (200.0, None, 500.0), strict=True)
    peers, disk, host = (WakeForecast(1_000, r, 0.0, s, True) for s, r in rates)
    taken = WakesTaken()
    assert taken.soonest([peers, disk]) is peers, "what is not known is not taken"
    assert taken.soonest([peers, disk, host]) is host
    taken.note(host, 9.0)
    assert taken.soonest([peers, disk, host]) is peers
    taken.note(disk, 1.0)
    assert taken.soonest([peers, disk, host]) is disk


@pytest.mark.parametrize(("waited_s", "takes_s", "left"), [
    (0.0, 2.0, 2.0), (2.0, 2.0, 0.0), (3.0, 2.0, 1.0), (6.9, 2.0, 4.9), (7.0, 2.0, None), (39.0, 20.0, 19.0),
    (40.0, 20.0, None), (4.0, None, 6.0), (12.0, None, 2.0), (15.0, None, None),
])  # fmt: skip
def test_a_late_wake_is_expected_in_as_long_as_it_is_late_by_until_it_is_overdue(
    waited_s: float, takes_s: float | None, left: float | None
) -> None:
    assert left_s(waited_s, takes_s) == (left if left is None else pytest.approx(left))


@given(st.integers(0, 10_000), st.integers(1, 500), st.integers(0, 20), st.integers(0, 20))
def test_as_many_are_woken_as_hold_what_is_missing(missing: int, each: int, asleep: int, coming: int) -> None:
    num = num_to_wake(missing, each, asleep, coming)
    assert 0 <= num <= asleep
    assert num == asleep or (num + coming) * each >= missing
    assert num == 0 or (num - 1 + coming) * each < max(1, missing)


def test_never_more_than_may_be_awake() -> None:
    assert may_wake(3, None) is None
    assert (may_wake(3, 5), may_wake(5, 5), may_wake(6, 5)) == (2, 0, 0)
