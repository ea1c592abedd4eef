"""Who falls asleep by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.dozing import (
    IdleGroup,
    choose_sleepers,
    next_patience,
    num_for_prompts,
)

IDLE = st.lists(st.floats(0.0, 100.0), max_size=8).map(lambda each: [IdleGroup(i, s) for i, s in enumerate(each)])


@given(IDLE, st.integers(0, 4), st.integers(1, 6), st.floats(0.0, 50.0), st.none() | st.sets(st.integers(0, 8)))
def test_enough_stay_awake_and_only_who_is_idle_and_unwanted_goes(
    idle: list[IdleGroup], num_busy: int, min_awake: int, after_s: float, unwanted: set[int] | None
) -> None:
    num_serving = len(idle) + num_busy
    chosen = choose_sleepers(idle, num_serving, min_awake, after_s, unwanted)
    assert len(set(chosen)) == len(chosen)
    assert not chosen or num_serving - len(chosen) >= min_awake
    empty_s = dict(idle)
    assert all(empty_s[g] >= after_s and (unwanted is None or g in unwanted) for g in chosen)
    left = [g for g in empty_s if g not in chosen and empty_s[g] >= after_s and (unwanted is None or g in unwanted)]
    assert not left or num_serving - len(chosen) <= min_awake, "nobody who may go stays"
    assert all(empty_s[a] >= empty_s[b] for a in chosen for b in left)


@given(st.floats(0.1, 100.0), st.floats(0.01, 8.0), st.integers(10, 60))
def test_a_need_that_comes_back_puts_nobody_to_sleep_over_and_over(
    after_s: float, times: float, num_needs: int
) -> None:
    """Every ``times`` times ``after_s`` memory is needed for a moment."""
    patience, period_s, num_sleeps = 1, times * after_s, 0
    for _ in range(num_needs):
        if period_s > patience * after_s:
            num_sleeps += 1
            patience = next_patience(patience, period_s - patience * after_s, after_s)
    assert num_sleeps <= 4


@given(st.integers(1, 8), st.floats(0.1, 100.0), st.lists(st.floats(0.0, 10_000.0), max_size=20))
def test_patience_has_bounds_and_is_lost_by_long_sleeps(patience: int, after_s: float, sleeps_s: list[float]) -> None:
    for slept_s in sleeps_s:
        patience = next_patience(patience, slept_s, after_s)
        assert 1 <= patience <= 8
    for _ in range(4):
        patience = next_patience(patience, 8 * after_s, after_s)
    assert patience == 1


@given(st.floats(0.1, 1e6), st.lists(st.floats(0.1, 1e6), min_size=1, max_size=8), st.floats(0.05, 1.0))
def test_the_least_number_that_has_time_for_the_prompts_that_arrive(
    arriving: float, rates: list[float], share: float
) -> None:
    num, each = num_for_prompts(arriving, rates, share), share * sum(rates) / len(rates)
    assert num * each >= arriving * (1 - 1e-9) and (num - 1) * each < arriving


def test_nobody_stays_for_prompts_of_which_nothing_is_known() -> None:
    assert num_for_prompts(100.0, []) == 0 and num_for_prompts(0.0, [1.0]) == 0
    assert num_for_prompts(100.0, [0.0, 0.0]) == 3, "decodes leave no time: all, and one more"
