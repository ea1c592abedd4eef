"""How many safepoints a step has, and who makes way for an online request: the least that keeps the deadline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.safepoints import (
    Ahead,
    ArrivalView,
    MakingWay,
    choose_safepoint_layers,
    lengthened_s,
    next_safepoint_s,
    plan_making_way,
    shortened_s,
)


@pytest.mark.parametrize(("num_layers", "stage_s", "ttft_s", "expected"), [
    (32, 0.0985, 1.5, 15),  # as few as are allowed: two on the way
    (32, 3.2, 1.5, 1),
    (32, 1.6, 1.5, 3),  # 50 ms a layer, 150 ms a stretch
    (32, 100.0, 1.5, 1),
    (32, None, 1.5, 15),
    (32, 1.0, None, 15),
    (2, 1.0, 1.5, 1),
    (1, 1.0, 1.5, 1),
])  # fmt: skip
def test_a_stretch_takes_a_tenth_of_the_objective_at_most(num_layers, stage_s, ttft_s, expected):
    assert choose_safepoint_layers(num_layers, stage_s, ttft_s) == expected


@given(st.integers(3, 200), st.floats(1e-4, 100), st.floats(1e-3, 100))
def test_every_step_has_two_safepoints_on_its_way(num_layers, stage_s, ttft_s):
    every = choose_safepoint_layers(num_layers, stage_s, ttft_s)
    assert (num_layers - 1) // every >= 2
    assert every == 1 or every * stage_s / num_layers <= ttft_s / 10 * 1.000001


@pytest.mark.parametrize(("elapsed_s", "expected"), [
    (0.0, 0.3), (0.1, 0.2), (0.31, 0.29), (0.85, 0.05), (0.95, 0.05), (5.0, 0.0),
])  # fmt: skip
def test_the_next_safepoint(elapsed_s, expected):
    assert next_safepoint_s(10, 3, 1.0, elapsed_s) == pytest.approx(expected)


def lone(waits_s: float) -> Ahead:
    return Ahead(waits_s, waits_s)


def fitting(cost_s: float, each_s: float, num: int):
    """A batch takes so long without offline requests, of which there are ``num``, and so much longer with each."""
    return lambda given_up, room_s: None if room_s < cost_s else min(num, int((room_s - cost_s) / each_s + 1e-9))


@pytest.mark.parametrize(("left_s", "expected"), [
    (3.0, MakingWay(False, 4)),  # 1.0 until the step is over, 0.5 for the arrivals, 0.25 for each offline request
    (2.5, MakingWay(False, 4)),
    (2.1, MakingWay(False, 2)),
    (1.5, MakingWay(False, 0)),
    (1.4, MakingWay(True, 3)),  # its next safepoint is 0.1 away
    (0.6, MakingWay(True, 0)),
    (0.3, MakingWay(True, 0)),  # too late all the same, but the sooner the better
    (-1.0, MakingWay(True, 0)),
])  # fmt: skip
def test_as_few_leave_as_the_deadline_asks_for(left_s, expected):
    view = ArrivalView(left_s, 1, lone(1.0), lone(0.1), 1.0)
    assert plan_making_way(view, fitting(0.5, 0.25, 4)) == expected


def test_a_step_is_asked_behind_its_last_safepoint_too_where_the_deadline_is_missed():
    """It may be slower than predicted."""
    assert plan_making_way(ArrivalView(1.0, 1, lone(0.2), lone(0.2), 9.0), fitting(0.9, 0.25, 4)) == MakingWay(True, 0)
    assert plan_making_way(ArrivalView(1.0, 1, lone(0.0), lone(0.0), 9.0), fitting(0.9, 0.25, 4)) == MakingWay(False, 0)


def test_an_arrival_waits_for_a_step_no_longer_than_for_one_of_both_classes_whatever_its_deadline():
    assert plan_making_way(ArrivalView(9.0, 1, lone(1.0), lone(0.1), 1.0), fitting(0.5, 0.25, 4)) == MakingWay(False, 4)
    assert plan_making_way(ArrivalView(9.0, 1, lone(1.1), lone(0.1), 1.0), fitting(0.5, 0.25, 4)) == MakingWay(True, 4)


def test_a_step_is_asked_to_be_given_up_once():
    assert plan_making_way(ArrivalView(1.1, 1, None, lone(0.1), 9.0), fitting(0.5, 0.25, 4)) == MakingWay(False, 2)


def test_steps_past_the_first_stage_run_to_their_ends():
    """Giving the newest one up makes room for a batch only as far as those before it do."""
    runs_on, given_up = Ahead(0.5, 1.5), Ahead(0.1, 0.9)
    assert runs_on.room_s(2.0, 2) == pytest.approx(1.0)
    assert given_up.room_s(2.0, 2) == pytest.approx(1.9)
    assert given_up.room_s(1.0, 2) == pytest.approx(0.2)
    assert plan_making_way(ArrivalView(2.0, 2, runs_on, given_up, 9.0), fitting(1.2, 0.25, 4)) == MakingWay(True, 2)


def steps_between(gap_s: float, step_s: float, least_s: float, num_gaps: int) -> tuple[list[int], float | None]:
    """Steps of offline requests alone that end in each of so many gaps between arrivals, each of which gives up the one
    under way; and what the next may take. They are as long as they may be, within these bounds."""
    longest_s, num_given_up, ended = None, 0, []
    for _ in range(num_gaps):
        left_s, num = gap_s, 0
        while left_s > 0:
            took_s = step_s if longest_s is None else min(step_s, max(least_s, longest_s))
            if took_s > left_s:
                num_given_up += 1
                longest_s = shortened_s(longest_s, left_s, num_given_up)
            else:
                num_given_up, num = 0, num + 1
                longest_s = None if longest_s is None else lengthened_s(longest_s, took_s)
            left_s -= took_s
        ended.append(num)
    return ended, longest_s


@given(st.floats(1e-3, 1.0), st.floats(1.01, 1e3), st.floats(1e-3, 0.99))
def test_offline_work_gets_on_between_arrivals_that_come_faster_than_its_steps_end(gap_s, times, least_share):
    ended, longest_s = steps_between(gap_s, times * gap_s, least_share * gap_s, 200)
    assert ended[:2] == [0, 0] and ended[2], "two in a row, and then a shorter one"
    assert sum(num > 0 for num in ended) > 60, "and so it goes on"
    assert longest_s is not None and longest_s < 2 * gap_s


@given(st.floats(1e-3, 1.0), st.floats(1.0, 1e3))
def test_one_step_given_up_at_a_time_shortens_none(gap_s, times):
    _, longest_s = steps_between(gap_s * times, gap_s, gap_s, 20)
    assert longest_s is None


def test_steps_are_as_long_as_ever_once_arrivals_are_rare():
    longest_s = shortened_s(None, 0.01, 2)
    assert longest_s == 0.005 and shortened_s(None, 0.01, 1) is None
    for _ in range(100):
        if longest_s is not None:
            longest_s = lengthened_s(longest_s, min(longest_s, 1.0))
    assert longest_s is None
    assert lengthened_s(1e-300, 0.02) == pytest.approx(0.025), "however short they were to be"
