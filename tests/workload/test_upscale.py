"""TraceUpscaler's promises: more requests at the same moments."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.errors import ConfigError
from jettison.workload.arrivals import Burst, Steady
from jettison.workload.lengths import published_lengths
from jettison.workload.rows import Columns, Workload
from jettison.workload.shaping import joined, replay_burst, skip, upscale, window
from jettison.workload.synthetic import synthesise


def workload(arrivals: list[float], span_s: float | None = None) -> Workload:
    count = len(arrivals)
    return Workload(Columns(arrivals, np.arange(1, count + 1), np.arange(1, count + 1)), "w", "s", (), span_s)


SORTED = st.lists(st.floats(0, 1000).map(lambda at: round(at, 3)), min_size=1, max_size=60).map(sorted)


@given(arrivals=SORTED, seed=st.integers(0, 99))
def test_a_factor_of_one_changes_nothing(arrivals: list[float], seed: int) -> None:
    before = workload(arrivals, 1000.0)
    for keep in ("requests", "span"):
        after = upscale(before, 1.0, seed, keep=keep)
        assert after.rows == before.rows and after.span_s == before.span_s


@given(arrivals=SORTED, factor=st.integers(2, 7))
def test_whole_factors_repeat_every_stamp_exactly(arrivals: list[float], factor: int) -> None:
    repeated = [at for at in arrivals for _ in range(factor)]
    cut = upscale(workload(arrivals), factor, 0)
    assert cut.columns.arrival_s.tolist() == repeated[: len(arrivals)]
    whole = upscale(workload(arrivals), factor, 0, keep="span")
    assert whole.columns.arrival_s.tolist() == repeated


@given(arrivals=SORTED, factor=st.floats(1, 9), seed=st.integers(0, 99))
def test_requests_keep_their_order_and_take_the_new_times(arrivals: list[float], factor: float, seed: int) -> None:
    before = workload(arrivals)
    after = upscale(before, factor, seed)
    assert after.columns.input_tokens.tolist() == before.columns.input_tokens.tolist()
    assert (np.diff(after.columns.arrival_s) >= 0).all()
    assert set(after.columns.arrival_s.tolist()) <= set(arrivals), "no time is invented"
    whole = upscale(before, factor, seed, keep="span")
    count = len(whole.rows)
    assert int(factor) * len(arrivals) <= count <= (int(factor) + 1) * len(arrivals)
    assert whole.columns.input_tokens.tolist() == [1 + i % len(arrivals) for i in range(count)]
    assert upscale(before, factor, seed).rows == after.rows


def all_copies_then_cut(before: Workload, factor: float, seed: int, spread_s: float | None) -> np.ndarray:
    """``keep="requests"`` as it is defined: all copies are made, and the first so many are kept."""
    arrival_s = before.columns.arrival_s
    draws, spread = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
    copies = int(factor) + (draws.random(len(arrival_s)) < factor - int(factor))
    arrivals = np.repeat(arrival_s, copies)[: len(arrival_s)]
    if spread_s is not None:
        offsets = spread.uniform(0.0, spread_s, size=len(arrivals))
        arrivals = np.sort(np.floor(arrivals / spread_s) * spread_s + offsets)
    return arrivals


@given(
    arrivals=SORTED, factor=st.floats(1, 200), seed=st.integers(0, 99), spread_s=st.sampled_from([None, 1.0, 0.3])
)
def test_the_first_copies_are_those_of_making_all(
    arrivals: list[float], factor: float, seed: int, spread_s: float | None
) -> None:
    before = workload(arrivals)
    after = upscale(before, factor, seed, spread_s=spread_s)
    assert after.columns.arrival_s.tolist() == all_copies_then_cut(before, factor, seed, spread_s).tolist()


def test_huge_factors_need_no_memory_where_the_requests_are_kept_and_are_refused_where_the_span_is() -> None:
    before = workload([3.0, 4.0, 9.0])
    for factor in (1e12, 1e300):
        assert upscale(before, factor, 0).columns.arrival_s.tolist() == [3.0] * 3
        with pytest.raises(ConfigError, match=r"^w upscaled 1e\+\d+ times: more than 100,000,000 requests"):
            upscale(before, factor, 0, keep="span")
    assert len(upscale(workload([]), 1e300, 0).rows) == 0


@pytest.mark.parametrize("spread_s", [0.0, 1e-300, 1e300, float("nan")])
def test_copies_are_spread_in_steps_that_a_clock_has(spread_s: float) -> None:
    with pytest.raises(ConfigError, match="the step to spread copies in must be from 1e-09 s"):
        upscale(workload([1.0]), 2.0, 0, spread_s=spread_s)


@pytest.mark.parametrize("factor", [1.5, 2.0, 3.7])
@pytest.mark.parametrize("spread_s", [None, 1.0])
def test_the_pattern_in_time_is_kept(factor: float, spread_s: float | None) -> None:
    """Counts of every window grow by the factor: bursts keep their place, their width and their multiple."""
    process = Steady(30.0, bursts=(Burst(200.0, 40.0, 6.0), Burst(600.0, 10.0, 10.0)))
    before = synthesise(process, published_lengths("burstgpt"), seed=3, duration_s=1000.0)
    after = upscale(before, factor, 4, keep="span", spread_s=spread_s)
    assert after.duration_s == before.duration_s
    edges = np.arange(0.0, 1001.0, 10.0)
    one, other = (np.histogram(w.columns.arrival_s, bins=edges)[0] for w in (before, after))
    sigma = np.sqrt(one * 0.25) + 1  # at most a fair coin for each arrival
    assert (np.abs(other - factor * one) <= 4 * sigma).all()


def test_keeping_the_requests_keeps_the_start_of_the_time() -> None:
    before = synthesise(Steady(20.0), published_lengths("burstgpt"), seed=1, duration_s=500.0)
    after = upscale(before, 4.0, 0)
    assert len(after.rows) == len(before.rows)
    assert after.duration_s == pytest.approx(125.0, rel=0.05)
    assert after.mean_rate_per_s == pytest.approx(80.0, rel=0.05)


def test_one_draw_for_each_arrival_whatever_the_factor() -> None:
    before = workload([float(second) for second in range(200)])
    more, most = (set(upscale(before, f, 5, keep="span").columns.arrival_s.tolist()) for f in (1.3, 1.6))
    doubled = [
        {at for at in range(200) if np.count_nonzero(upscale(before, f, 5, keep="span").columns.arrival_s == at) == 2}
        for f in (1.3, 1.6)
    ]
    assert more == most
    assert doubled[0] < doubled[1]


def test_copies_are_spread_inside_their_own_second() -> None:
    before = workload([0.0, 1.0, 1.0, 5.0])
    after = upscale(before, 3.0, 0, keep="span", spread_s=1.0).columns.arrival_s
    assert np.floor(after).tolist() == [0.0] * 3 + [1.0] * 6 + [5.0] * 3
    assert len(set(after.tolist())) == 12


@pytest.mark.parametrize(("factor", "reason"), [(0.5, "thin"), (float("nan"), "least 1"), (float("inf"), "least 1")])
def test_fewer_requests_are_not_upscaling(factor: float, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        upscale(workload([1.0]), factor, 0)


# Windows, and a burst that comes again.


@given(arrivals=SORTED, edges=st.lists(st.integers(1, 999), min_size=1, max_size=4, unique=True).map(sorted))
def test_windows_side_by_side_hold_every_request_once(arrivals: list[float], edges: list[int]) -> None:
    whole = workload(arrivals, 1000.5)
    bounds = [0.0, *map(float, edges), None]
    parts = [window(whole, lo or 0.0, hi) for lo, hi in pairwise(bounds)]
    together = [tokens for part in parts for tokens in part.columns.input_tokens.tolist()]
    assert together == whole.columns.input_tokens.tolist()
    assert sum(part.duration_s for part in parts) == pytest.approx(1000.5)
    assert all((part.columns.arrival_s >= 0).all() for part in parts)


@pytest.mark.parametrize(("start", "end"), [(-1.0, 5.0), (5.0, 5.0), (2000.0, None)])
def test_a_window_outside_of_the_trace_is_refused(start: float, end: float | None) -> None:
    with pytest.raises(ConfigError, match="no window"):
        window(workload([1.0, 7.0], 10.0), start, end)


def test_a_burst_is_repeated_with_its_intervals_and_requests() -> None:
    before = workload([0.0, 4.0, 4.5, 9.0], 10.0)
    after = replay_burst(before, 4.0, 6.0, 2)
    assert after.columns.arrival_s.tolist() == [0.0, 4.0, 4.5, 6.0, 6.5, 8.0, 8.5]
    assert after.columns.input_tokens.tolist() == [1, 2, 3, 2, 3, 2, 3]
    assert after.duration_s == 10.0
    with pytest.raises(ConfigError, match="no burst"):
        replay_burst(before, 5.0, 8.0, 2)
    with pytest.raises(ConfigError, match="at least once"):
        replay_burst(before, 4.0, 6.0, 0)
    with pytest.raises(ConfigError, match="4 s to 6 s of w repeated: more than 100,000,000 requests"):
        replay_burst(before, 4.0, 6.0, 10**12)
    with pytest.raises(ConfigError, match="too long"):
        replay_burst(workload([0.0, 9e9], 1e10), 5.0, 1e10, 50)


@given(arrivals=SORTED, repeats=st.integers(1, 30), width_s=st.floats(0.1, 500.0))
def test_repeating_is_putting_the_burst_behind_itself(arrivals: list[float], repeats: int, width_s: float) -> None:
    before, start_s = workload(arrivals, 1001.0), arrivals[0]
    end_s = start_s + width_s
    burst = window(before, start_s, end_s).columns
    one = before.columns.at(before.columns.arrival_s < end_s)
    again = (burst.with_arrivals(burst.arrival_s + end_s + k * (end_s - start_s)) for k in range(repeats))
    assert replay_burst(before, start_s, end_s, repeats).rows == joined([one, *again]).in_order()


def test_rows_can_be_left_out() -> None:
    after = skip(workload([1.0, 4.0, 4.5], 10.0), 1)
    assert after.columns.arrival_s.tolist() == [0.0, 0.5]
    assert after.span_s == 6.0
    with pytest.raises(ConfigError, match="3 requests"):
        skip(workload([1.0, 4.0, 4.5]), 3)
