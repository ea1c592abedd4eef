"""Pairs of instances and the request that goes (Llumnix)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.migration import (
    InstanceLoad,
    MigrationParams,
    MigrationRow,
    Pair,
    choose_request,
    instance_freeness,
    may_give,
    plan_pairs,
)

PARAMS = MigrationParams(threshold_blocks=3.0)


def load(group_id: int = 0, used: int = 0, head: int = 0, batch: int = 1, capacity: int = 100) -> InstanceLoad:
    return InstanceLoad(group_id, capacity, used, head, batch)


@pytest.mark.parametrize(
    ("instance", "expected"),
    [(load(), 100.0), (load(used=40, batch=6), 10.0), (load(used=40, head=30, batch=6), 5.0),
     (load(used=90, head=30, batch=6), -20.0), (load(batch=0), 100.0)],
)
def test_the_head_of_the_queue_counts_as_usage(instance: InstanceLoad, expected: float) -> None:
    assert instance_freeness(instance) == expected


def test_the_lowest_is_paired_with_the_highest() -> None:
    loads = [load(0, 99, batch=5), load(1, 20, batch=5), load(2, 100, 30, 9), load(3, 50, batch=5), load(4, 85, 0, 5)]
    assert plan_pairs(loads, PARAMS) == (Pair(2, 1), Pair(0, 3))


def test_one_that_takes_none_is_passed_over() -> None:
    loads = [load(0, 99, batch=5), load(1, 20, batch=5)._replace(takes=False), load(2, 50, batch=5)]
    assert plan_pairs(loads, PARAMS) == (Pair(0, 2),)


LOADS = st.lists(
    st.builds(load, st.just(0), st.integers(0, 100), st.integers(0, 60), st.integers(0, 20)), max_size=7
).map(lambda loads: [x._replace(group_id=i) for i, x in enumerate(loads)])


@given(LOADS)
def test_nobody_is_in_two_pairs_and_all_givers_are_below_all_takers(loads: list[InstanceLoad]) -> None:
    pairs = plan_pairs(loads, PARAMS)
    members = [g for pair in pairs for g in pair]
    assert len(members) == len(set(members))
    for pair in pairs:
        assert instance_freeness(loads[pair.source]) < PARAMS.threshold_blocks
        assert instance_freeness(loads[pair.destination]) > PARAMS.threshold_blocks
    assert plan_pairs(loads[::-1], PARAMS) == pairs
    givers = sorted((instance_freeness(x), x.group_id) for x in loads if may_give(x, PARAMS))
    above = [x for x in loads if instance_freeness(x) > PARAMS.threshold_blocks]
    takers = sorted((-instance_freeness(x), x.group_id) for x in above)
    assert [tuple(pair) for pair in pairs] == [(s, d) for (_, s), (_, d) in zip(givers, takers)]


@given(LOADS, st.sets(st.builds(Pair, st.integers(0, 6), st.integers(0, 6))))
def test_avoided_pairs_cost_nobody_more_than_their_end(loads: list[InstanceLoad], avoided: set[Pair]) -> None:
    pairs = plan_pairs(loads, PARAMS, avoided)
    assert not avoided & set(pairs)
    members = [g for pair in pairs for g in pair]
    assert len(members) == len(set(members))
    left = {x.group_id for x in loads if instance_freeness(x) > PARAMS.threshold_blocks} - set(members)
    givers = {x.group_id for x in loads if may_give(x, PARAMS)} - set(members)
    assert {Pair(s, d) for s in givers for d in left} <= avoided, "two are left that may be a pair"


def test_of_destinations_as_free_the_nearest_is_taken() -> None:
    loads = [InstanceLoad(0, 100, 100, 0, 4), *(InstanceLoad(i, 100, 0, 0, 0) for i in (1, 2, 3)),
             InstanceLoad(4, 100, 100, 0, 4)]  # fmt: skip
    away = {(0, 1): 2.0, (0, 2): 1.0, (0, 3): 2.0, (4, 1): 2.0, (4, 2): 1.0, (4, 3): 1.0}
    assert plan_pairs(loads, PARAMS) == (Pair(0, 1), Pair(4, 2))
    assert plan_pairs(loads, PARAMS, distance=lambda *pair: away[pair]) == (Pair(0, 2), Pair(4, 3))
    freest = [*loads, InstanceLoad(5, 200, 0, 0, 0)]
    assert plan_pairs(freest, PARAMS, distance=lambda *pair: away.get(pair, 9.0))[0] == Pair(0, 5), "room counts first"


def test_low_priority_goes_first_then_the_shortest() -> None:
    rows = [MigrationRow("a", 0, 2), MigrationRow("b", 1, 9), MigrationRow("c", 1, 4)]
    assert choose_request(rows, load(used=95, batch=9), load(1), PARAMS) == "c"
    assert choose_request(rows[:1], load(used=95, batch=9), load(1), PARAMS) == "a"
    assert choose_request([], load(used=95, batch=9), load(1), PARAMS) is None


@given(st.integers(80, 130), st.integers(1, 20), st.integers(0, 100), st.integers(0, 20), st.integers(1, 40))
def test_a_request_that_went_is_not_sent_back(used: int, batch: int, other: int, others: int, blocks: int) -> None:
    source, destination = load(0, used, batch=batch), load(1, other, batch=others)
    row = MigrationRow("r", 0, blocks)
    if choose_request([row], source, destination, PARAMS) is None:
        return
    left = source._replace(used_blocks=used - blocks, batch_size=batch - 1)
    joined = destination._replace(used_blocks=other + blocks, batch_size=others + 1)
    assert Pair(1, 0) not in plan_pairs([left, joined], PARAMS)
