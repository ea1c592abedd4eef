"""Overload: each verdict at its threshold, and the two workloads that must be told apart."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.policy.overload import (
    GroupLoad,
    OverloadParams,
    assess_overload,
    cannot_keep_up,
    foreseen_missing_blocks,
    merging_costs_s,
    share_ahead_of_last,
)

PARAMS = OverloadParams(min_blocked_s=0.1, min_gain_s=0.2, min_gain_ratio=1.5, horizon_s=1.0)

BINDING = GroupLoad(
    group_id=0,
    capacity_blocks=100,
    used_blocks=95,
    head_need_blocks=10,
    queue_need_blocks=45,
    num_waiting=5,
    head_blocked_by_memory=True,
    head_blocked_s=0.5,
    freed_blocks_per_s=20.0,  # 40 blocks are missing: 2 s
    queued_prefill_tokens=1000,
    prefill_tokens_per_s=2000.0,  # 0.5 s
)


def test_memory_binds() -> None:
    verdict = assess_overload(BINDING, PARAMS)
    assert verdict.overloaded and verdict.reason == "memory binds"
    assert (verdict.load, verdict.memory_wait_s, verdict.compute_wait_s) == (1.05, 2.0, 0.5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_waiting": 0, "head_need_blocks": 0, "queue_need_blocks": 0}, "nothing waits"),
        ({"head_blocked_by_memory": False}, "memory does not bind"),
        ({"used_blocks": 90}, "memory does not bind"),
        ({"head_blocked_s": 0.0999}, "blocked for too short a time"),
        ({"head_blocked_s": 0.1999, "surge": 1.69}, "a queue of chance, blocked for too short a time"),
        ({"prefill_tokens_per_s": 1000 / 1.81}, "predicted gain too small"),
        ({"freed_blocks_per_s": 400.0}, "predicted gain too small"),
        ({"prefill_tokens_per_s": 1000 / 1.4}, "compute binds"),
        # 2 s are less than what it would fall behind: a ninth of 20 s that it stays at least, or of its requests' stay.
        ({"merged_compute_load": 0.911, "separate_compute_load": 0.72}, "a pipeline could not keep up"),
        ({"merged_compute_load": 1.0, "separate_compute_load": 0.95, "mean_stay_s": 41.0},
         "a pipeline could not keep up"),
        ({"merged_compute_load": 0.81, "separate_compute_load": None}, "a pipeline could not keep up"),
        ({"merged_compute_load": 1.5, "separate_compute_load": 1.34}, "a pipeline could not keep up"),
        ({"merged_compute_load": 1.111, "separate_compute_load": 0.9, "surge": 9.0}, "a pipeline could not keep up"),
        # However long the wait: a quarter of the throughput is too much.
        ({"merged_compute_load": 2.0, "separate_compute_load": 1.4, "freed_blocks_per_s": None},
         "a pipeline could not keep up"),
        ({"prefill_fill": 0.6}, "compute binds"),
        ({"freed_blocks_per_s": 400.0, "admitted_blocks_per_s": 70.0}, "predicted gain too small"),
        ({"freed_blocks_per_s": 400.0, "admitted_blocks_per_s": 62.0}, "compute binds"),
        # Kept out for a second, the last of five waits behind four fifths of 0.5 s.
        ({"freed_blocks_per_s": 400.0, "admitted_blocks_per_s": 76.0, "head_blocked_s": 1.0},
         "predicted gain too small"),
        ({"prefill_fill": 0.6, "head_blocked_s": 1.0}, "compute binds"),
        ({"merged_compute_load": 0.81, "separate_compute_load": 0.8, "is_yielding": True},
         "a pipeline could not keep up"),
    ],
)
def test_each_reason_not_to_drop(changes: dict[str, float], reason: str) -> None:
    verdict = assess_overload(BINDING._replace(**changes), PARAMS)
    assert not verdict.overloaded and verdict.reason == reason


@pytest.mark.parametrize(
    "changes",
    [
        {"used_blocks": 91},
        {"head_blocked_s": 0.1},
        {"head_blocked_s": 0.1, "surge": 1.7},
        {"head_blocked_s": 0.2, "surge": 1.69},
        {"merged_compute_load": 0.8, "separate_compute_load": 0.7},
        {"merged_compute_load": 0.81, "separate_compute_load": 0.74},  # 1.7 s behind, for a wait of 2 s
        {"merged_compute_load": 2.0, "separate_compute_load": 1.5, "freed_blocks_per_s": None},
        {"prefill_tokens_per_s": 1000 / 1.4, "head_blocked_s": 1.0},  # seen, and so believed
        {"freed_blocks_per_s": 400.0, "admitted_blocks_per_s": 74.0, "head_blocked_s": 1.0},
        {"merged_compute_load": 0.99, "separate_compute_load": 0.9, "surge": 2.0},  # the burst is in it, and passes
        {"prefill_tokens_per_s": 1000 / 1.4, "unfinished_prefill_tokens": 300},  # theirs whatever the queue waits for
        {"merged_compute_load": 1.5, "separate_compute_load": 1.5},  # small batches cost as much as bubbles
        {"head_need_blocks": 101, "prefill_tokens_per_s": 1.0},  # only a merged group could ever take it
        {"prefill_tokens_per_s": 1000 / 1.3},
        {"freed_blocks_per_s": 400.0, "admitted_blocks_per_s": 59.0},  # seen: 0.76 s for 45 blocks
        {"freed_blocks_per_s": 400.0, "admitted_blocks_per_s": 0.0},
        {"freed_blocks_per_s": None},
        {"freed_blocks_per_s": 0.0},
        {"freed_blocks_per_s": -30.0},
        {"prefill_tokens_per_s": None},
    ],
)
def test_just_across_each_threshold(changes: dict[str, float]) -> None:
    assert assess_overload(BINDING._replace(**changes), PARAMS).overloaded


@pytest.mark.parametrize(("surge", "wait_s", "drops"), [
    (1.0, 0.6, True), (1.0, 0.4, False), (1.9, 0.4, False), (2.0, 0.4, True), (2.0, 0.19, False),
    (None, 0.4, True), (None, 0.19, False), (4.0, 0.11, True), (4.0, 0.09, False),
])
def test_a_queue_that_chance_has_made_must_be_longer_than_one_of_a_burst(
    surge: float | None, wait_s: float, drops: bool
) -> None:
    params = OverloadParams(min_gain_s=0.5, surge_gain_s=0.2, min_surge=2.0)
    load = BINDING._replace(surge=surge, queued_prefill_tokens=0, freed_blocks_per_s=40 / wait_s)
    verdict = assess_overload(load, params)
    assert verdict.overloaded == drops
    assert drops or verdict.reason == "predicted gain too small"


@pytest.mark.parametrize(("surge", "share", "wait_s"), [
    (None, 0.25, 2.0), (1.69, 0.25, 2.0), (1.7, 0.25, 8.0), (1.7, 1.0, 2.0), (1.7, 0.0, 20.0),
])
def test_in_a_burst_what_grows_takes_its_share_of_what_comes_free(
    surge: float | None, share: float, wait_s: float
) -> None:
    verdict = assess_overload(BINDING._replace(surge=surge, admitted_share=share), PARAMS)
    assert verdict.memory_wait_s == pytest.approx(wait_s)


def test_nothing_ever_comes_free() -> None:
    verdict = assess_overload(BINDING._replace(freed_blocks_per_s=0.0), PARAMS)
    assert verdict.overloaded and math.isinf(verdict.memory_wait_s)


def test_nearly_full_without_a_queue_is_healthy() -> None:
    full = BINDING._replace(used_blocks=100, num_waiting=0, head_need_blocks=0, queue_need_blocks=0)
    assert not assess_overload(full, PARAMS).overloaded


def test_code_completion_does_not_drop() -> None:
    """2,000 tokens in, 28 out: prompts fill the steps, and what ends frees as many blocks as compute can fill."""
    rate, waiting = 4.0, 30  # requests a second that compute allows
    load = GroupLoad(
        group_id=0, capacity_blocks=2000, used_blocks=1950, head_need_blocks=125, queue_need_blocks=125 * waiting,
        num_waiting=waiting, head_blocked_by_memory=True, head_blocked_s=1.0, freed_blocks_per_s=rate * 127,
        queued_prefill_tokens=2000 * waiting, prefill_tokens_per_s=rate * 2000,
    )
    verdict = assess_overload(load, PARAMS)
    assert not verdict.overloaded and verdict.memory_wait_s < PARAMS.min_gain_ratio * verdict.compute_wait_s


def test_long_answers_drop() -> None:
    """200 tokens in, 500 out: the queue could be prefilled in a second, but blocks come free over half a minute."""
    waiting = 60
    load = GroupLoad(
        group_id=0, capacity_blocks=2000, used_blocks=1995, head_need_blocks=13, queue_need_blocks=13 * waiting,
        num_waiting=waiting, head_blocked_by_memory=True, head_blocked_s=1.0, freed_blocks_per_s=26.0,
        queued_prefill_tokens=200 * waiting, prefill_tokens_per_s=10_000.0,
    )
    verdict = assess_overload(load, PARAMS)
    assert verdict.overloaded and verdict.memory_wait_s > 20 * verdict.compute_wait_s


def test_a_pipeline_may_use_up_what_separate_instances_have_to_spare() -> None:
    """A queue grows by what is beyond all compute: 0.02 of it for a minute, though separate instances needed 0.87."""
    surging = BINDING._replace(surge=PARAMS.min_surge, mean_stay_s=60.0)
    spare = surging._replace(merged_compute_load=1.02, separate_compute_load=0.87)
    assert merging_costs_s(spare, PARAMS) == pytest.approx(0.02 * 60.0)
    both = surging._replace(merged_compute_load=1.2, separate_compute_load=1.1)
    assert merging_costs_s(both, PARAMS) == pytest.approx(0.1 * 60.0)
    # In no burst a pipeline is to catch up, too.
    calm = spare._replace(surge=1.0, merged_compute_load=0.9, separate_compute_load=0.75)
    assert merging_costs_s(calm, PARAMS) == pytest.approx((0.9 - PARAMS.max_compute_load) * 60.0)
    assert merging_costs_s(calm._replace(mean_stay_s=0.0), PARAMS) == pytest.approx(0.1 * PARAMS.least_merged_s)
    too_slow = spare._replace(merged_compute_load=1.2)
    assert merging_costs_s(too_slow, PARAMS) == math.inf == merging_costs_s(spare._replace(is_yielding=True), PARAMS)


RATES = st.one_of(st.none(), st.floats(-10, 1000))


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.builds(
        GroupLoad, st.just(0), st.integers(0, 100), st.integers(0, 100), st.integers(0, 50), st.integers(0, 500),
        st.integers(0, 50), st.booleans(), st.floats(0, 10), RATES, st.integers(0, 10_000), RATES, RATES, RATES,
        RATES, st.floats(0, 1), st.floats(0, 1), RATES, RATES, RATES, st.integers(0, 10_000), st.floats(0, 1),
        RATES, st.floats(0, 100), st.booleans(),
    ).filter(lambda load: load.unfinished_prefill_tokens <= load.queued_prefill_tokens)
)
def test_any_load_has_a_verdict_and_only_memory_that_binds_is_overload(load: GroupLoad) -> None:
    verdict = assess_overload(load, PARAMS)
    assert not math.isnan(verdict.memory_wait_s) and not math.isnan(verdict.compute_wait_s)
    if not verdict.overloaded:
        return
    if verdict.reason == "memory will bind":
        assert load.demand_blocks_per_s is not None and load.released_blocks_per_s is not None
        assert load.demand_blocks_per_s > load.released_blocks_per_s and load.foreseen_s >= PARAMS.min_foreseen_s
    else:
        assert load.num_waiting and load.head_blocked_by_memory and verdict.load > 1.0
        assert load.head_blocked_s >= PARAMS.min_blocked_s
        # The waits in the verdict are those of now.
        if verdict.reason == "the head of the queue fits into no group as it is":
            return
        height = 1.0 if load.surge is None else max(1.0, load.surge / PARAMS.min_surge)
        is_seen = load.head_blocked_s >= PARAMS.min_seen_s
        ahead_s = verdict.compute_wait_s * (share_ahead_of_last(load) if is_seen else 1.0)
        assert verdict.memory_wait_s - ahead_s >= PARAMS.min_gain_s / height * 0.999
        assert verdict.gain_s == verdict.memory_wait_s - ahead_s
        of_queue = 1.0 - load.unfinished_prefill_tokens / max(1, load.queued_prefill_tokens)
        assert is_seen or verdict.memory_wait_s >= PARAMS.min_gain_ratio * verdict.compute_wait_s * of_queue
        assert not cannot_keep_up(load, PARAMS) or verdict.memory_wait_s > merging_costs_s(load, PARAMS)
        assert load.prefill_fill <= PARAMS.max_prefill_fill


RISING = GroupLoad(
    group_id=0, capacity_blocks=100, used_blocks=70, head_need_blocks=0, queue_need_blocks=0, num_waiting=0,
    head_blocked_by_memory=False, head_blocked_s=0.0, freed_blocks_per_s=15.0, queued_prefill_tokens=0,
    prefill_tokens_per_s=2000.0, demand_blocks_per_s=70.0, released_blocks_per_s=20.0, foreseen_s=0.2,
)


def test_a_burst_is_foreseen_before_anything_waits() -> None:
    assert foreseen_missing_blocks(RISING, PARAMS) == 20.0
    verdict = assess_overload(RISING, PARAMS)
    assert verdict.overloaded and verdict.reason == "memory will bind" and verdict.memory_wait_s == 1.0


@pytest.mark.parametrize(("freed", "missing", "wait_s"), [
    (11.0, 29.0, 29 / 11),  # answers of six seconds: 70 blocks will come free over a little more
    (0.0, 40.0, math.inf),
    (-20.0, 20.0, math.inf),  # before anything has ended at all, less growth: 50 a second arrive
    (None, 40.0, math.inf),
])
def test_a_burst_is_foreseen_although_nothing_was_released_of_late(
    freed: float | None, missing: float, wait_s: float
) -> None:
    load = RISING._replace(released_blocks_per_s=0.0, freed_blocks_per_s=freed, arriving_tokens_per_s=800.0)
    assert foreseen_missing_blocks(load, PARAMS) == missing
    verdict = assess_overload(load, PARAMS)
    assert verdict.overloaded and verdict.reason == "memory will bind"
    assert verdict.memory_wait_s == pytest.approx(wait_s)


@pytest.mark.parametrize(
    "changes",
    [
        {"demand_blocks_per_s": None},
        {"released_blocks_per_s": None},
        {"released_blocks_per_s": 0.0},  # nothing has ended, and nothing arrives
        {"released_blocks_per_s": 0.0, "used_blocks": 95, "arriving_tokens_per_s": 0.0},
        # Nothing has ended of late, but what is held will in time.
        {"released_blocks_per_s": 0.0, "freed_blocks_per_s": 50.0, "arriving_tokens_per_s": 400.0},
        # What runs grows by 66 blocks a second, and 4 arrive where 5 are free.
        {"released_blocks_per_s": 0.0, "used_blocks": 95, "freed_blocks_per_s": -66.0, "arriving_tokens_per_s": 64.0},
        {"used_blocks": 95, "demand_blocks_per_s": 20.0},  # high usage without a burst
        {"used_blocks": 95, "demand_blocks_per_s": 29.0},
        {"used_blocks": 50},  # rising, but there is room
        {"foreseen_s": 0.1},
        {"merged_compute_load": 0.9, "separate_compute_load": 0.7},
        {"queued_prefill_tokens": 3800},
        {"arriving_tokens_per_s": 3800.0},  # what arrives until then takes two seconds to compute
    ],
)
def test_high_usage_alone_is_never_a_reason(changes: dict[str, float | None]) -> None:
    assert not assess_overload(RISING._replace(**changes), PARAMS).overloaded
