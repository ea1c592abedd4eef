"""Dispatch: of the groups with the fewest prompts ahead the freest gets the request."""

from __future__ import annotations

import random
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.config.sections import Dispatch
from jettison.policy.dispatch import ORDERS, GroupFreeness, by_requests, choose_group, freeness


def group(
    group_id: int = 0, capacity: int = 100, used: int = 0, queued: int = 0, batch: int = 0, instances: int = 1
) -> GroupFreeness:
    return GroupFreeness(group_id, capacity, used, queued, batch, instances)


@pytest.mark.parametrize(
    ("the_group", "expected"),
    [
        (group(), 100.0),
        (group(used=40, batch=1), 60.0),
        (group(used=40, batch=6), 10.0),
        (group(used=40, queued=30, batch=6), 5.0),
        (group(used=90, queued=30, batch=4), -20.0),
        (group(capacity=200, used=190, queued=30, batch=4, instances=2), -10.0),
        (group(capacity=200, used=40, batch=8, instances=2), 40.0),
        (group(capacity=200, batch=1, instances=2), 200.0),
    ],
)
def test_freeness_is_what_each_request_of_the_batch_could_still_take(the_group: GroupFreeness, expected: float) -> None:
    assert freeness(the_group) == expected


def test_the_freest_group_wins() -> None:
    assert choose_group([group(0, used=50, batch=5), group(1, used=20, batch=5)], 10) == 1


def test_the_larger_batch_does_not_make_a_shortage_look_smaller() -> None:
    assert choose_group([group(0, used=90, queued=40, batch=30), group(1, used=90, queued=20, batch=5)], 10) == 1


def ahead(group_id: int, tokens: int, used: int = 0, instances: int = 1) -> GroupFreeness:
    return group(group_id, 100 * instances, used, batch=1, instances=instances)._replace(
        prefill_tokens=tokens, step_tokens=100
    )


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([ahead(0, 100), ahead(1, 99, used=90)], 1),  # a step less to wait for
        ([ahead(0, 99), ahead(1, 0, used=90)], 0),  # less than that makes no difference
        ([ahead(0, 399, used=10), ahead(1, 300, used=11)], 0),
        ([ahead(0, 400), ahead(1, 700, instances=2)], 1),  # two share them
        ([ahead(0, 400), ahead(1, 800, instances=2)], 1),  # a tie, and freer
        ([ahead(0, 4000), ahead(1, 0, used=101)], 0),  # a queue for memory is longer than any for compute
        ([ahead(0, 0, used=120), ahead(1, 4000, used=110)], 1),  # both are such: the freer
    ],
)
def test_prompts_ahead_count_before_freeness(groups: list[GroupFreeness], expected: int) -> None:
    assert choose_group(groups, 1) == choose_group(groups[::-1], 1) == expected


@given(st.lists(st.integers(50, 1600), min_size=1, max_size=40), st.integers(1, 6))
def test_a_burst_of_prompts_spreads_by_what_they_take(prompts: list[int], num_groups: int) -> None:
    """With memory to spare no group is ahead of another by more than the longest prompt and a step."""
    groups = [ahead(i, 0) for i in range(num_groups)]
    for tokens in prompts:
        chosen = choose_group(groups, 1)
        assert chosen is not None
        g = groups[chosen]
        groups[chosen] = g._replace(prefill_tokens=g.prefill_tokens + tokens, batch_size=g.batch_size + 1)
    loads = [g.prefill_tokens for g in groups]
    assert max(loads) - min(loads) <= max(prompts) + 100


def test_what_waits_counts_as_used_so_a_burst_spreads() -> None:
    groups = {0: group(0), 1: group(1), 2: group(2)}
    chosen: list[int] = []
    for _ in range(9):
        target = choose_group(list(groups.values()), 20)
        assert target is not None
        chosen.append(target)
        g = groups[target]
        groups[target] = g._replace(queued_blocks=g.queued_blocks + 20, batch_size=g.batch_size + 1)
    assert [chosen.count(g) for g in groups] == [3, 3, 3]


def pair(used: int, batch: int) -> GroupFreeness:
    """Two members of 100 blocks each, which as a pipeline hold 450."""
    return group(9, 450, used, batch=batch, instances=2)._replace(apart_blocks=200)


def test_a_pipeline_that_will_be_restored_is_as_free_as_its_members_apart() -> None:
    assert freeness(pair(80, 10)) == freeness(group(used=40, batch=5)) == 12.0
    assert choose_group([pair(80, 10), group(used=39, batch=5)], 1) == 0
    assert choose_group([pair(80, 10), group(used=41, batch=5)], 1) == 9


def test_what_members_have_dropped_for_is_the_last_resort_and_is_there() -> None:
    assert choose_group([pair(240, 20), group(used=90, batch=10)], 1) == 9, "21 blocks count, against 10"
    assert choose_group([pair(240, 20), group(used=60, batch=10)], 1) == 0


@given(st.integers(0, 450), st.integers(0, 450), st.integers(0, 40))
def test_a_pipeline_is_the_less_free_the_fuller_it_is(used: int, other: int, batch: int) -> None:
    fuller, emptier = pair(max(used, other), batch), pair(min(used, other), batch)
    assert freeness(fuller) <= freeness(emptier)
    assert freeness(fuller) >= 0.0, "it has room as long as it has memory"


def test_ties_do_not_depend_on_the_order_of_the_groups() -> None:
    groups = [group(i) for i in range(4)]
    assert choose_group(groups, 1) == choose_group(groups[::-1], 1) == 0


def test_a_request_goes_only_where_it_can_fit() -> None:
    assert choose_group([group(0, capacity=30), group(1, capacity=100, used=90, batch=9)], 50) == 1


def test_what_fits_nowhere_goes_to_the_largest() -> None:
    assert choose_group([group(2, capacity=30), group(1, capacity=40), group(0, capacity=40)], 50) == 0


BUSY = st.lists(
    st.builds(
        lambda unfinished, instances, used, ahead: group(used=used, instances=instances)._replace(
            num_unfinished=unfinished, prefill_tokens=ahead
        ),
        st.integers(0, 6), st.integers(1, 3), st.integers(0, 200), st.integers(0, 900),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@given(BUSY)
def test_by_requests_the_fewest_unfinished_for_each_instance_win_and_ties_go_to_the_least_id(
    groups: list[GroupFreeness],
) -> None:
    groups = [g._replace(group_id=i) for i, g in enumerate(groups)]
    chosen = choose_group(groups, 1, by_requests)
    shares = [g.num_unfinished / g.num_instances for g in groups]
    assert chosen == choose_group(groups[::-1], 1, by_requests) == shares.index(min(shares))


def test_every_order_has_a_name_that_can_be_configured() -> None:
    assert tuple(ORDERS) == get_args(Dispatch)


def test_without_groups_there_is_no_choice() -> None:
    assert choose_group([], 1) is None


GROUPS = st.lists(
    st.builds(group, st.just(0), st.integers(1, 100), st.integers(0, 100), st.integers(0, 200), st.integers(0, 30),
              st.integers(1, 3)),
    min_size=1, max_size=6,
)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(GROUPS, st.integers(1, 120), st.randoms(use_true_random=False))
def test_the_choice_is_able_and_at_least_as_free_as_any(
    groups: list[GroupFreeness], need: int, rng: random.Random
) -> None:
    groups = [g._replace(group_id=i) for i, g in enumerate(groups)]
    chosen = next(g for g in groups if g.group_id == choose_group(groups, need))
    able = [g for g in groups if g.capacity_blocks >= need]
    if able:
        assert chosen in able and freeness(chosen) == max(map(freeness, able))
    else:
        assert chosen.capacity_blocks == max(g.capacity_blocks for g in groups)
    shuffled = groups[:]
    rng.shuffle(shuffled)
    assert choose_group(shuffled, need) == chosen.group_id
