"""Deadlines as demand: who is late on a supply, whom to wake for it, who may go."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jettison.policy.deadlines import (
    LEAST_SHARE,
    MOST_SHARE,
    SLEEP_MARGIN,
    WAKE_MARGIN,
    Demand,
    Seen,
    Supply,
    ends,
    expected_tokens,
    lateness,
    may_go,
    needed_now,
    plan_wakes,
    share_of,
    work_before,
)

SECONDS = st.floats(0.1, 100.0)
TENANTS = st.sampled_from(["a", "b", "c"])
WORK = st.lists(
    st.builds(lambda due_s, work_s, tenant: Demand(due_s, work_s, tenant=tenant), SECONDS, SECONDS, TENANTS),
    min_size=1, max_size=6,
)  # fmt: skip
ANSWERS = st.builds(
    lambda due_s, work_s, lone_s, more_s, fills, tenant: Demand(
        due_s, work_s, 0.3 * work_s, lone_s, lone_s + more_s, fills, tenant
    ),
    st.none() | st.floats(-10.0, 100.0), SECONDS, st.floats(0.0, 20.0), st.floats(0.0, 20.0), st.floats(0.1, 8.0),
    TENANTS,
)  # fmt: skip
DEMANDS = st.lists(ANSWERS, min_size=1, max_size=6)
SUPPLIES = st.builds(
    Supply, st.integers(0, 4), st.floats(0.1, 1.0), st.just(()), st.floats(0.1, 1.0), st.floats(0.0, 3.0)
)
WAKES = st.lists(st.floats(0.0, 10.0), max_size=4)


def played(demands: list[Demand], supply: Supply) -> list[float]:
    """When each is done, moment by moment: tenants share alike, each serves what is due first."""
    left, found, now_s = [d.work_s for d in demands], [math.inf] * len(demands), 0.0
    while True:
        heads = {}
        for i in sorted(range(len(demands)), key=lambda i: demands[i].due_s or 0.0):
            if left[i] > 0.0:
                heads.setdefault(demands[i].tenant, i)
        rate = supply.rate + supply.coming_share * sum(at_s <= now_s for at_s in supply.coming_s)
        next_s = min((at_s for at_s in supply.coming_s if at_s > now_s), default=math.inf)
        if not heads or (not rate and next_s == math.inf):
            return found
        each = rate / len(heads)
        step_s = min(next_s - now_s, min(left[i] for i in heads.values()) / each if each else math.inf)
        for i in heads.values():
            left[i] -= step_s * each
            if left[i] <= 1e-9:
                left[i], found[i] = 0.0, now_s + step_s
        now_s += step_s


@given(WORK, st.integers(0, 4), SECONDS, st.lists(SECONDS, max_size=3), SECONDS)
def test_ends_are_those_of_tenants_that_share_alike_and_each_serves_what_is_due_first(
    demands: list[Demand], num_now: int, share: float, coming_s: list[float], coming_share: float
) -> None:
    assume(len({d.due_s for d in demands}) == len(demands))
    supply = Supply(num_now, share, tuple(coming_s), coming_share)
    assert ends(demands, supply) == pytest.approx(played(demands, supply), rel=1e-6)


WHOLE = st.integers(1, 50)


@given(st.lists(st.builds(lambda due, work: Demand(due, 4 * work), WHOLE, WHOLE), min_size=1, max_size=5),
       st.sampled_from([1, 2, 4]))
def test_of_one_tenant_what_any_order_meets_is_met(demands: list[Demand], num: int) -> None:
    def meets(order: tuple[Demand, ...]) -> bool:
        done_s = 0.0
        for demand in order:
            done_s += demand.work_s / num
            if done_s > (demand.due_s or 0.0):
                return False
        return True

    assert any(map(meets, permutations(demands))) == (not any(lateness(demands, Supply(num), 1.0)))


@given(DEMANDS, SUPPLIES, WAKES)
def test_more_instances_are_never_later_and_more_margin_never_earlier(
    demands: list[Demand], supply: Supply, wakes_s: list[float]
) -> None:
    before, after = (lateness(demands, s, 1.25) for s in (supply, supply.and_woken(wakes_s)))
    assert all(a <= b * (1 + 1e-9) + 1e-9 for a, b in zip(after, before, strict=True))
    assert all(a >= b for a, b in zip(lateness(demands, supply, 1.6), before, strict=True))


@given(DEMANDS, SUPPLIES, WAKES)
def test_the_fewest_are_woken_with_which_nothing_is_late(
    demands: list[Demand], supply: Supply, wakes_s: list[float]
) -> None:
    plan = plan_wakes(demands, supply, wakes_s)

    def late_with(num: int) -> float:
        return sum(lateness(demands, supply.and_woken(sorted(wakes_s)[:num]), WAKE_MARGIN))

    if plan is None:
        assert not late_with(0) or late_with(len(wakes_s)) > 0.0, "whoever could save everything is woken"
        return
    assert 1 <= plan.num <= len(wakes_s) and late_with(0) > 0.0
    assert plan.late_with_s == late_with(plan.num) < late_with(0)
    assert plan.demand.due_s is not None and plan.demand.due_s > 0.0
    if not late_with(len(wakes_s)):
        assert not late_with(plan.num) and late_with(plan.num - 1)


@given(DEMANDS, SUPPLIES, st.integers(1, 4))
def test_who_was_woken_may_not_go_again_at_once(demands: list[Demand], supply: Supply, num_asleep: int) -> None:
    """With the share that was foreseen of them."""
    supply = supply._replace(coming_share=supply.share)
    plan = plan_wakes(demands, supply, [0.0] * num_asleep)
    if plan is None or plan.late_with_s > 0.0:
        return
    assert not may_go(demands, supply._replace(num_now=supply.num_now + plan.num), plan.num)


@given(DEMANDS, SUPPLIES, st.integers(1, 4), WAKES)
def test_whoever_has_gone_is_not_woken_at_once(
    demands: list[Demand], supply: Supply, num: int, wakes_s: list[float]
) -> None:
    if may_go(demands, supply, num) and not any(lateness(demands, supply._replace(num_now=supply.num_now - num), 1.6)):
        assume(num <= supply.num_now)
        assert plan_wakes(demands, supply._replace(num_now=supply.num_now - num), wakes_s) is None
    assert SLEEP_MARGIN > WAKE_MARGIN


def test_what_was_due_before_now_wakes_nobody_and_hides_nothing() -> None:
    late = Demand(-1.0, 50.0)
    assert plan_wakes([late], Supply(1), [0.1]) is None
    assert plan_wakes([late, Demand(60.0, 1.0)], Supply(1), [0.1]).num == 1, "it is served first all the same"  # type: ignore[union-attr]
    assert plan_wakes([late, Demand(70.0, 1.0)], Supply(1), [0.1]) is None


def test_what_is_lost_hides_nothing_that_can_be_saved() -> None:
    lost, saved = Demand(1.0, 40.0), Demand(40.0, 8.0)
    plan = plan_wakes([lost, saved], Supply(1), [0.0] * 9)
    assert plan is not None and plan.demand is lost and plan.num > 1
    assert not lateness([lost, saved], Supply(1).and_woken([0.0] * plan.num), WAKE_MARGIN)[1]


def test_an_answer_that_takes_longer_than_there_is_time_wakes_nobody() -> None:
    late = [Demand(10.0, 1.0, 0.1, 30.0, 30.0, 0.1)]
    assert plan_wakes(late, Supply(1), [0.1] * 3) is None
    plan = plan_wakes(late, Supply(0), [0.1] * 3)
    assert plan is not None and plan.num == 1, "it keeps the answers that it has, and three bring no more"


def test_a_window_of_a_seventh_more_than_all_need_wakes_all_at_once_and_a_long_one_nobody() -> None:
    def num_woken(due_s: float) -> int:
        plan = plan_wakes([Demand(due_s, 400.0)], Supply(1), [1.0] * 3)
        return 0 if plan is None else plan.num

    assert [num_woken(due_s) for due_s in (115.0, 200.0, 300.0, 501.0)] == [3, 2, 1, 0]


@given(WORK, st.integers(1, 4))
def test_what_deadlines_need_is_enough_for_them(demands: list[Demand], num: int) -> None:
    needed = needed_now(demands, Supply(num))
    assert needed is not None
    is_enough = needed / WAKE_MARGIN <= num * (1 + 1e-9)
    assert is_enough == (not any(x > 1e-6 for x in lateness(demands, Supply(num), 1.0)))
    assert needed_now([Demand(None, 1.0), Demand(-1.0, 1.0)], Supply(num)) is None


def test_requests_that_are_due_at_no_time_go_first() -> None:
    assert work_before([Demand(10.0, 3.0), Demand(None, 2.0), Demand(5.0, 1.0)]) == [6.0, 2.0, 3.0]


SEEN = st.builds(Seen, st.floats(0.0, 1e5), st.floats(0.0, 1e5), st.floats(0.0, 1e4))


@given(st.lists(SEEN, max_size=3), st.floats(0.0, 1.0))
def test_a_share_has_bounds_and_is_the_least_of_what_was_seen(seen: list[Seen], assumed: float) -> None:
    share = share_of(seen, 1e-3, 1e-2, assumed)
    assert LEAST_SHARE <= share <= MOST_SHARE
    assert all(share <= share_of([each], 1e-3, 1e-2, assumed) for each in seen)


def test_what_was_seen_for_long_counts_and_not_what_was_assumed() -> None:
    assert share_of([], 1.0, 1.0, 0.9) == 0.9
    assert share_of([Seen(100.0, 200.0, 1_000.0)], 1.0, 1.0, 0.9) == pytest.approx(0.3, rel=0.01)


@given(st.integers(0, 50), st.lists(st.floats(1.0, 500.0), max_size=20), st.floats(1.0, 500.0), st.floats(1.0, 500.0))
def test_answers_are_as_long_as_those_of_the_batch(
    num: int, running: list[float], usual: float, longest: float
) -> None:
    found = expected_tokens(num, 30.0 * num, running, usual, longest)
    assert 1.0 <= found <= max(1.0, longest)
    assert expected_tokens(0, 0.0, [], usual, longest) == min(usual, longest)
    if num and not running and longest >= 30.0:
        assert found == pytest.approx(30.0)
    assert expected_tokens(num, 30.0 * num, [x + 1.0 for x in running], usual, longest) >= found


def test_those_under_way_count_before_short_answers_alone_speak_for_all() -> None:
    assert expected_tokens(10, 50.0, [100.0] * 30, 5.0, 1000.0) == pytest.approx((50 + 3000) / 40)
