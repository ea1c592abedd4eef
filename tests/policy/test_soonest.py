"""Which way lets the head of a queue in soonest."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.soonest import (
    Migration,
    WakeForecast,
    WakeSource,
    WakesTaken,
    Way,
    drop_s,
    is_worth_waiting_for,
    may_wake,
    migrate_s,
    num_to_wake,
    soonest,
    wake_s,
    ways_as_fields,
)

TIMES = st.dictionaries(
    st.sampled_from(list(Way)), st.none() | st.floats(0.0, 1e6) | st.just(math.inf), min_size=1
)  # fmt: skip


def test_what_each_way_takes() -> None:
    assert wake_s(WakeForecast(2_000, 1_000.0, 0.25, 0.5)) == 2.75
    assert wake_s(WakeForecast(0, None, 0.25, 0.5)) == 0.5, "one that has given nothing up is there at once"
    assert wake_s(WakeForecast(2_000, None, 0.25, 0.5)) is None
    assert drop_s(0.5, 0.25, 0.125, 1.0) == 1.875


SECONDS = st.floats(0.01, 100.0)


@given(SECONDS, SECONDS, st.sampled_from(WakeSource), st.booleans(), st.floats(0.0, 10.0))
def test_after_the_first_wake_as_wakes_have_taken(
    raw_s: float, took_s: float, source: WakeSource, is_busy: bool, first_step_s: float
) -> None:
    taken, wake = WakesTaken(), WakeForecast(1_000, 1_000.0 / raw_s, 0.0, first_step_s, source, is_busy)
    assert taken.seconds(wake) == wake_s(wake)
    taken.note(wake, took_s)
    assert taken.seconds(wake) == pytest.approx(took_s + first_step_s)
    for _ in range(20):
        taken.note(wake, raw_s)
    assert taken.seconds(wake) == pytest.approx(wake_s(wake), rel=0.01)


@given(SECONDS, SECONDS, st.sampled_from(WakeSource))
def test_beside_work_a_wake_takes_no_less_than_without(raw_s: float, took_s: float, source: WakeSource) -> None:
    taken = WakesTaken()
    busy, idle = (WakeForecast(1_000, 1_000.0 / raw_s, 0.0, 0.0, source, is_busy) for is_busy in (True, False))
    taken.note(idle, took_s)
    assert taken.seconds(busy) == pytest.approx(max(raw_s, took_s))


def test_one_that_has_given_nothing_up_teaches_nothing() -> None:
    taken = WakesTaken()
    taken.note(WakeForecast(0, None, 0.0, 0.0), 5.0)
    assert taken.seconds(WakeForecast(1_000, 500.0, 0.0, 0.0)) == 2.0


def test_parameters_come_from_where_they_are_soonest() -> None:
    rates = zip(WakeSource, (200.0, None, 500.0), strict=True)
    peers, disk, host = (WakeForecast(1_000, r, 0.0, 0.0, s, True) for s, r in rates)
    taken = WakesTaken()
    assert taken.soonest([peers, disk]) is peers, "what is not known is not taken"
    assert taken.soonest([peers, disk, host]) is host
    taken.note(host, 9.0)
    assert taken.soonest([peers, disk, host]) is peers
    taken.note(disk, 1.0)
    assert taken.soonest([peers, disk, host]) is disk


@pytest.mark.parametrize(
    ("migration", "expected"),
    [
        (Migration(50, 100.0, 0, None, 2.0), 1.0),
        (Migration(150, 100.0, 0, None, 2.0), 4.0),  # the rest waits for the next epoch, and has all of it
        (Migration(150, 100.0, 30, 60.0, 2.0), 1.0),
        (Migration(150, None, 30, None, 2.0), None),
        (Migration(150, 0.0, 30, 0.0, 2.0), None),  # a link or a batch that takes nothing is no way
    ],
)
def test_a_migration_keeps_to_what_an_epoch_takes(migration: Migration, expected: float | None) -> None:
    assert migrate_s(migration) == expected


@given(TIMES)
def test_none_is_sooner(times: dict[Way, float | None]) -> None:
    taken = soonest(times)
    assert taken in times
    known = [s for s in times.values() if s is not None and s < math.inf]
    if known:
        assert times[taken] == min(known)
    else:
        assert taken is not Way.WAIT or set(times) == {Way.WAIT}, "what is endless or unknown is not waited for"


def test_of_two_the_cheaper() -> None:
    assert soonest({Way.DROP: 1.0, Way.WAKE: 1.0}) is Way.WAKE
    assert soonest({Way.WAKE: 1.0, Way.WAIT: 1.0}) is Way.WAIT
    with pytest.raises(ValueError, match="empty"):
        soonest({})


@given(st.floats(-1e6, 1e6), st.floats(0.0, 1e6))
def test_nothing_is_held_back_for_longer_than_twice(left_s: float, other_s: float) -> None:
    """From the prediction on, at most as long again as the other way takes."""
    if is_worth_waiting_for(left_s, other_s):
        assert left_s <= other_s and -left_s <= other_s


@given(st.integers(0, 10_000), st.integers(1, 500), st.integers(0, 20), st.integers(0, 20))
def test_as_many_are_woken_as_hold_what_is_missing(missing: int, each: int, asleep: int, coming: int) -> None:
    num = num_to_wake(missing, each, asleep, coming)
    assert 0 <= num <= asleep
    assert num == asleep or (num + coming) * each >= missing
    assert num == 0 or (num - 1 + coming) * each < max(1, missing)


def test_never_more_than_may_be_awake() -> None:
    assert may_wake(3, None) is None
    assert (may_wake(3, 5), may_wake(5, 5), may_wake(6, 5)) == (2, 0, 0)


def test_what_is_told() -> None:
    fields = ways_as_fields({Way.WAIT: 3.0, Way.WAKE: None, Way.DROP: 0.5}, Way.DROP)
    assert fields == {"way": "drop", "wait_s": 3.0, "drop_s": 0.5}
