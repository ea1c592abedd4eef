"""How many instances offline work is worth: by price, by floor, and what a wake has to earn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.batchworth import Backlog, BatchPrices, num_to_wake, num_worth

LONE_S, ROW_S = 0.02, 0.0001


def made(num: float, *, busy: float = 0.0, left: float = 1e9) -> Backlog:
    """Prompts of 2,000 tokens and answers of 200; steps as of a model of 14B."""
    return Backlog(num, 0, 2000.0, 200.0, 100, 0.0002, lambda rows: LONE_S + ROW_S * rows, busy, left)


backlogs = st.builds(
    lambda num, num_busy, prompt, output, most, token_s, lone_s, busy: Backlog(
        num, num_busy, prompt, output, most, token_s, lambda rows: lone_s + ROW_S * rows, busy, 1e6
    ),
    st.floats(0.0, 500.0), st.integers(0, 8), st.floats(1.0, 5000.0), st.floats(1.0, 1000.0), st.integers(1, 256),
    st.floats(1e-5, 1e-3), st.floats(1e-3, 0.1), st.floats(0.0, 5000.0),
)
prices = st.builds(
    lambda device, token, floor: BatchPrices(device_second=device, batch_token=token, floor_tokens_per_s=floor),
    st.floats(0.0, 10.0), st.floats(0.0, 0.1), st.floats(0.0, 20_000.0),
)


@given(backlogs, st.integers(0, 20))
def test_each_further_instance_does_less_than_the_one_before(backlog: Backlog, num: int) -> None:
    done = [backlog.tokens_per_s(each) for each in (num, num + 1, num + 2)]
    assert done[0] <= done[1] * (1 + 1e-9) and done[1] <= done[2] * (1 + 1e-9)
    assert done[2] - done[1] <= done[1] - done[0] + 1e-6 * done[2]


@given(backlogs, prices, st.integers(0, 20))
def test_what_is_kept_awake_by_price_pays_and_one_more_would_not(
    backlog: Backlog, told: BatchPrices, most: int
) -> None:
    paid = replace(told, floor_tokens_per_s=0.0)
    num = num_worth(backlog, paid, most)

    def pays(which: int) -> bool:
        more = backlog.tokens_per_s(which) - backlog.tokens_per_s(which - 1)
        return paid.batch_token > 0.0 and more * paid.batch_token >= paid.device_second

    assert 0 <= num <= most
    assert num == 0 or pays(num)
    assert num == most or not pays(num + 1)


@given(backlogs, prices, st.integers(0, 20), st.floats(1.0, 3.0))
def test_more_is_never_worth_less(backlog: Backlog, told: BatchPrices, most: int, factor: float) -> None:
    num = num_worth(backlog, told, most)
    assert num_worth(backlog, told, most, factor) >= num
    assert num_worth(backlog, replace(told, batch_token=factor * told.batch_token), most) >= num
    assert num_worth(backlog, replace(told, device_second=factor * told.device_second), most) <= num
    assert num_worth(backlog, told, most + 1) >= num


@given(backlogs, prices, st.integers(0, 8), st.lists(st.floats(0.0, 60.0), max_size=8))
def test_no_more_is_woken_than_is_worth_it_and_than_sleeps(
    backlog: Backlog, told: BatchPrices, num_awake: int, wakes_s: list[float]
) -> None:
    num = num_to_wake(backlog, told, num_awake, wakes_s)
    worth = num_worth(backlog, told, num_awake + len(wakes_s))
    assert num <= len(wakes_s) and num <= max(0, worth - num_awake)
    assert num == max(0, worth - num_awake) or any(wakes_s), "a wake that takes no time costs nothing"


@pytest.mark.parametrize(("token", "num"), [(0.0, 0), (1e-5, 0), (2.5e-4, 1), (1e-2, 8)])
def test_a_token_s_price_says_how_many_are_kept_awake(token: float, num: int) -> None:
    assert num_worth(made(64), BatchPrices(batch_token=token), 8) == num


def test_without_requests_or_prices_nothing_is_kept_awake() -> None:
    assert num_worth(made(0), BatchPrices(batch_token=1.0, floor_tokens_per_s=1e5), 8) == 0
    assert num_worth(made(64), BatchPrices(), 8) == 0 and not BatchPrices().are_there


def test_a_floor_counts_what_busy_instances_do_and_takes_no_more_than_it_needs() -> None:
    one = made(64).tokens_per_s(1)
    for busy, num in ((0.0, 2), (0.2 * one, 1), (1.3 * one, 0)):
        assert num_worth(made(64, busy=busy), BatchPrices(floor_tokens_per_s=1.2 * one), 8) == num


def test_a_floor_that_is_out_of_reach_wakes_none_that_bring_it_no_nearer() -> None:
    assert num_worth(made(1), BatchPrices(floor_tokens_per_s=1e6), 8) <= 1
    assert 0 < num_worth(made(64), BatchPrices(floor_tokens_per_s=1e5), 50) < 50


def test_a_wake_has_to_be_earned_before_the_work_is_done() -> None:
    told = BatchPrices(batch_token=1e-3)
    assert num_to_wake(made(64), told, 1, [2.0] * 3) == 3, "there is work for long"
    assert num_to_wake(made(64, left=1e3), told, 1, [2.0] * 3) == 0, "it is done before one is awake"
    floor = BatchPrices(floor_tokens_per_s=1.5 * made(64).tokens_per_s(1))
    assert num_to_wake(made(64, left=1e3), floor, 1, [2.0] * 3) == 1, "a floor is to be kept whatever it costs"
