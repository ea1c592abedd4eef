"""How much more KV online requests take in filled steps: against the same played turn by turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.forecast import Arrivals, Load, Seen
from jettison.policy.onlineneed import most_growth_tokens, stay_s

NONE = Arrivals(0.0, 0.0, 0.0, 0.0, ())
STEADY = Arrivals(2.0, 2.0, 1.0, 100.0, (10.0, 30.0))

seen = st.builds(lambda tokens, left: Seen(tokens, 1, float(left)), st.integers(1, 500), st.integers(1, 60))
requests = st.lists(seen, max_size=8)


def played(running: list[Seen], waiting: list[Seen], num_turns: int) -> float:
    """Most tokens over those that running ones hold, each turn before answers that end in it have ended."""
    all_of, held = [*running, *waiting], sum(each.num_tokens for each in running)
    return float(max(
        sum(each.num_tokens + turn for each in all_of if each.left_output >= turn) - held
        for turn in range(num_turns + 1)
    ))  # fmt: skip


@given(requests, requests, st.integers(1, 80))
def test_it_is_what_is_held_at_most_when_every_turn_is_played(
    running: list[Seen], waiting: list[Seen], num_turns: int
) -> None:
    found = most_growth_tokens(Load(running, waiting, NONE), 0.5, 0.5 * num_turns)
    assert found == pytest.approx(max(0.0, played(running, waiting, num_turns)))


@given(requests, requests, st.floats(0.1, 30.0), st.floats(0.0, 30.0))
def test_it_grows_with_time_and_arrivals_and_covers_the_queue(
    running: list[Seen], waiting: list[Seen], ahead_s: float, more_s: float
) -> None:
    alone = most_growth_tokens(Load(running, waiting, NONE), 0.1, ahead_s)
    assert alone >= sum(each.num_tokens for each in waiting)
    assert most_growth_tokens(Load(running, waiting, NONE), 0.1, ahead_s + more_s) >= alone
    assert most_growth_tokens(Load(running, waiting, STEADY), 0.1, ahead_s) >= alone


def test_arrivals_bring_their_prompts_and_half_of_what_the_first_of_them_gets() -> None:
    load = Load([], [], STEADY)
    assert most_growth_tokens(load, 0.1, 1.0) == pytest.approx(2 * 1.0 * (100.0 + 5.0))


@given(st.floats(3.0, 100.0))
def test_no_more_of_them_are_there_than_come_while_one_stays(ahead_s: float) -> None:
    """Little's law: two a second, which stay for 2.1 seconds, with answers of 20 tokens."""
    assert most_growth_tokens(Load([], [], STEADY), 0.1, ahead_s) == pytest.approx(2 * 2.1 * (100.0 + 10.0))


def test_a_burst_counts_for_as_long_as_it_lasts() -> None:
    burst = Load([], [], Arrivals(10.0, 1.0, 2.0, 50.0, (100.0,)))
    assert most_growth_tokens(burst, 0.1, 5.0) == pytest.approx((10.0 * 2.0 + 1.0 * 3.0) * (50.0 + 25.0))
    short = Load([], [], Arrivals(10.0, 1.0, 2.0, 50.0, (4.0,)))
    assert most_growth_tokens(short, 0.1, 5.0) == pytest.approx(10.0 * 0.5 * 52.0), "at its end, not later"


def test_a_request_stays_for_its_answer() -> None:
    assert stay_s(STEADY, 0.1) == pytest.approx(2.1)
    assert stay_s(NONE, 0.1) == pytest.approx(0.1)


@given(requests, st.floats(0.5, 30.0), st.floats(0.0, 3.0))
def test_more_than_are_expected_hold_more_and_relatively_less_of_many(
    running: list[Seen], ahead_s: float, deviations: float
) -> None:
    def extra(times: float) -> float:
        arrivals = STEADY._replace(lately_per_s=2.0 * times, usually_per_s=2.0 * times)
        load = Load([], [], arrivals)
        expected = most_growth_tokens(load, 0.1, ahead_s)
        return (most_growth_tokens(load, 0.1, ahead_s, deviations) - expected) / expected

    assert extra(1.0) == pytest.approx(10.0 * extra(100.0), abs=1e-9) and extra(1.0) >= 0.0
    load = Load(running, [], STEADY)
    assert most_growth_tokens(load, 0.1, ahead_s, deviations) >= most_growth_tokens(load, 0.1, ahead_s)
