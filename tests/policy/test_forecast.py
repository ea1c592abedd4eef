"""The fluid model: what it says where the truth is known, and what always holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.cost.stepwork import StepWork
from jettison.policy.forecast import (
    FIRST_TOKEN,
    Arrangement,
    Arrivals,
    Forecast,
    Load,
    Plan,
    Seen,
    Timed,
    first_token_weight,
    forecast,
    turn_time,
)

TURN_S = 0.02
NONE = Arrivals(0.0, 0.0, 1.0, 10.0, [50.0])


def steady(capacity: float = math.inf, turn_s: float = TURN_S, starts_s: float = 0.0) -> Arrangement:
    """Turns that take the same whatever is in them."""
    return Arrangement(capacity, lambda rows, kv, prompt: turn_s, 1000.0, 1000, starts_s)


def decoding(num: int, left: float, tokens: int = 10) -> list[Seen]:
    return [Seen(tokens, 1, left) for _ in range(num)]


def waiting(num: int, prompt: int = 10, left: float = 50.0) -> list[Seen]:
    return [Seen(prompt, prompt, left, has_first_token=False) for _ in range(num)]


def test_requests_that_decode_alone_cost_the_time_that_their_tokens_take() -> None:
    found = forecast(Load(decoding(4, 100.0), [], NONE), Plan(steady()), 10.0)
    assert found.cost_request_s == pytest.approx(4 * 100 * TURN_S, rel=0.05)
    assert found.waiting_s == 0.0 and found.longest_wait_s == 0.0


def test_a_queue_waits_until_memory_comes_free() -> None:
    load = Load(decoding(5, 100.0, tokens=100), waiting(1, prompt=700), NONE)
    kept_out, let_in = forecast(load, Plan(steady(1100.0)), 10.0), forecast(load, Plan(steady()), 10.0)
    assert kept_out.longest_wait_s == pytest.approx(100 * TURN_S, rel=0.1)
    assert let_in.longest_wait_s <= 2 * TURN_S
    assert kept_out.cost_request_s - let_in.cost_request_s == pytest.approx(FIRST_TOKEN * 100 * TURN_S, rel=0.1)


def test_a_wait_weighs_as_much_as_the_words_that_objectives_let_come_slowly() -> None:
    assert first_token_weight(2.0, 0.1, 200.0) == pytest.approx(200 * 0.1 / 2.0)
    assert first_token_weight(2.0, 0.1, 20.0) == FIRST_TOKEN, "never less than where no objective is named"
    assert {first_token_weight(*objectives, 200.0) for objectives in ((None, 0.1), (2.0, None))} == {FIRST_TOKEN}
    load = Load(decoding(5, 100.0, tokens=100), waiting(1, prompt=700), NONE)
    plan = Plan(steady(1100.0))
    plain, weighed = (forecast(each, plan, 10.0) for each in (load, load._replace(first_token_weight=9.0)))
    assert weighed.waiting_s == plain.waiting_s and weighed.first_token_weight == 9.0
    assert weighed.cost_request_s - plain.cost_request_s == pytest.approx((9.0 - FIRST_TOKEN) * plain.waiting_s)


def test_a_burst_lasts_as_long_as_it_is_told_to() -> None:
    arrivals = Arrivals(20.0, 2.0, 3.0, 10.0, [50.0])
    assert len(arrivals.times(10.0)) == pytest.approx(60 + 14, abs=2)
    assert len(Arrivals(0.0, 2.0, 3.0, 10.0, [50.0]).times(10.0)) == pytest.approx(14, abs=1)
    assert arrivals.times(0.01) == [] and Arrivals(0.0, 0.0, 1.0, 1.0, [1.0]).times(9.0) == []


@given(st.floats(0, 40), st.floats(0, 40), st.floats(0, 20), st.floats(0, 20))
def test_as_many_requests_come_as_the_rates_of_their_times_say(
    lately: float, usually: float, lasts_s: float, until_s: float
) -> None:
    times = Arrivals(lately, usually, lasts_s, 10.0, [50.0]).times(until_s)
    first_s = min(lasts_s, until_s)
    assert len(times) == pytest.approx(lately * first_s + usually * (until_s - first_s), abs=1.001)
    assert times == sorted(times) and all(0.0 < at_s <= until_s for at_s in times)


def test_rare_arrivals_of_late_do_not_keep_the_usual_ones_away() -> None:
    assert len(Arrivals(0.03, 0.6, 2.0, 10.0, [50.0]).times(20.0)) == pytest.approx(11, abs=1)


def test_a_few_large_requests_hold_their_memory_though_thousands_wait() -> None:
    load = Load(decoding(2, 2000.0, tokens=50_000), waiting(4000, prompt=100, left=2.0), NONE)
    full, ample = (forecast(load, Plan(steady(tokens)), 10.0) for tokens in (100_100.0, 1e9))
    assert full.waiting_s > 3 * ample.waiting_s


def test_full_memory_has_the_request_that_ends_last_wait_again() -> None:
    load = Load([Seen(50, 1, 60.0), Seen(50, 1, 400.0)], [], NONE)
    free, full = forecast(load, Plan(steady()), 10.0), forecast(load, Plan(steady(120.0)), 10.0)
    assert full.cost_request_s > free.cost_request_s


def test_the_second_arrangement_comes_once_requests_fit_into_it() -> None:
    load = Load(decoding(4, 100.0, tokens=100), [], NONE)
    found = forecast(load, Plan(steady(1000.0), steady(400.0, 0.01, starts_s=0.5), 0.9), 10.0)
    assert found.returns_s == pytest.approx(100 * TURN_S, rel=0.1), "as the requests end"
    at_once = forecast(load, Plan(steady(1000.0), steady(1000.0, 0.01, starts_s=0.5)), 10.0)
    assert at_once.returns_s == pytest.approx(0.5, abs=0.1) and at_once.cost_request_s < found.cost_request_s


def test_a_capped_plan_empties_its_memory_though_requests_wait() -> None:
    load = Load(decoding(9, 50.0, tokens=100), waiting(20, prompt=100), NONE)
    slow, fast = steady(1000.0), steady(300.0, 0.001, starts_s=0.1)
    full, capped = forecast(load, Plan(slow, fast), 4.0), forecast(load, Plan(slow, fast, is_capped=True), 4.0)
    assert capped.returns_s == pytest.approx(50 * TURN_S, rel=0.2)
    assert full.returns_s is None or full.returns_s > 2 * capped.returns_s, "memory stays full"


def test_a_pipeline_turns_as_often_as_its_periods_and_its_way_allow() -> None:
    step, period = (lambda work: 0.03), (lambda work: 0.002 * work.num_rows)
    turn_s = turn_time([Timed(2, 2, step, period)])
    assert turn_s(4, 100, 0) == 0.03, "few rows: one way through both stages"
    assert turn_s(40, 100, 0) == pytest.approx(2 * 0.002 * 20)
    lone = Timed(2, 1, lambda work: 0.01, lambda work: 0.01)
    assert turn_time([lone, Timed(2, 2, step, period)])(4, 10, 0) == pytest.approx(4 / (2 / 0.01 + 2 / 0.03))


def test_the_work_of_a_turn_is_shared_among_instances() -> None:
    seen: list[StepWork] = []
    turn_time([Timed(4, 1, lambda work: seen.append(work) or 1.0, lambda work: 1.0)])(10, 400, 100)
    assert seen == [StepWork.decodes(3, 100).with_prompt(25)]


def test_of_many_requests_each_one_stands_for_several() -> None:
    few = forecast(Load(decoding(300, 100.0), waiting(60), NONE), Plan(steady(6000.0)), 10.0)
    roomy = steady(60000.0)._replace(max_running=9000, prompt_budget=10_000.0)
    many = forecast(Load(decoding(3000, 100.0), waiting(600), NONE), Plan(roomy), 10.0)
    assert many.cost_request_s == pytest.approx(10 * few.cost_request_s, rel=0.15)
    assert many.waiting_s == pytest.approx(10 * few.waiting_s, rel=0.2)


def test_cost_up_to_a_time_lies_between_the_seconds_about_it() -> None:
    found = Forecast(9.0, 0.0, 0.0, None, (1.0, 3.0, 4.0))
    assert [found.cost_until(s) for s in (0.0, 0.5, 1.0, 1.5, 2.5, 3.0, 99.0)] == [0.0, 0.5, 1.0, 2.0, 3.5, 4.0, 4.0]


requests = st.builds(
    Seen, st.integers(1, 200), st.integers(1, 100), st.floats(1, 300), st.booleans()
)


@settings(max_examples=60)
@given(
    st.lists(requests, max_size=20), st.lists(requests, max_size=20), st.floats(0, 30), st.floats(0, 10),
    st.floats(200, 5000),
)
def test_any_load_has_a_cost_and_its_parts_are_within_it(
    running: list[Seen], queue: list[Seen], lately: float, usually: float, capacity: float
) -> None:
    load = Load(running, queue, Arrivals(lately, usually, 2.0, 20.0, [10.0, 80.0]))
    found = forecast(load, Plan(steady(capacity)), 5.0)
    assert math.isfinite(found.cost_request_s) and found.cost_request_s >= found.waiting_s >= 0.0
    assert found.longest_wait_s <= 10.0 + 1.0
    assert len(found.by_second) == 5 and list(found.by_second) == sorted(found.by_second)
    ample = forecast(load, Plan(steady()), 5.0)
    assert ample.waiting_s <= found.waiting_s + 1.0, "no request waits longer for more memory"
