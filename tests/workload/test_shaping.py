from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.errors import ConfigError
from jettison.workload import shaping
from jettison.workload.traces import TraceRow, Workload

ROW = st.tuples(st.floats(0, 1000), st.integers(1, 5000), st.integers(1, 2000)).map(lambda row: TraceRow(*row))
ROWS = st.lists(ROW, max_size=40)


def workload_of(rows: list[TraceRow]) -> Workload:
    return Workload(tuple(sorted(rows, key=lambda row: row.arrival_s)), "w", "made up")


@given(rows=ROWS, window_s=st.floats(5.0, 700.0))
def test_slices_hold_every_request_once_and_in_order(rows: list[TraceRow], window_s: float) -> None:
    workload = workload_of(rows)
    cut = shaping.slices(workload, window_s)
    together = [row[1:] for part in cut for row in part.rows]
    assert together == [row[1:] for row in workload.rows]
    back = [row.arrival_s + index * window_s for index, part in enumerate(cut) for row in part.rows]
    assert back == pytest.approx([row.arrival_s for row in workload.rows], abs=1e-6)
    assert all(0 <= row.arrival_s <= window_s * (1 + 1e-9) for part in cut for row in part.rows)
    assert sum(part.duration_s for part in cut) == pytest.approx(workload.duration_s, abs=1e-6)


def test_silent_windows_are_kept() -> None:
    cut = shaping.slices(workload_of([TraceRow(1, 1, 1), TraceRow(35, 1, 1)]), 10)
    assert [len(part.rows) for part in cut] == [1, 0, 0, 1]
    assert [part.duration_s for part in cut] == [10, 10, 10, 5]
    assert "slice 3 of 4" in cut[3].notes[-1]


@pytest.mark.parametrize(("last_s", "window_s"), [(0.35, 0.01), (0.69, 0.01), (0.7, 0.1), (3.0, 1.0), (0.3, 0.1)])
def test_a_last_request_at_an_edge_is_in_a_slice_though_floats_disagree(last_s: float, window_s: float) -> None:
    cut = shaping.slices(workload_of([TraceRow(0, 1, 1), TraceRow(last_s, 2, 2)]), window_s)
    assert [row.input_tokens for part in cut for row in part.rows] == [1, 2]
    assert cut[-1].rows and all(0 <= row.arrival_s <= part.duration_s for part in cut for row in part.rows)


@given(rows=ROWS, keep=st.floats(0.01, 1.0), seed=st.integers(0, 2**31))
def test_thinning_keeps_a_subset_and_the_same_one(rows: list[TraceRow], keep: float, seed: int) -> None:
    workload = workload_of(rows)
    thinned = shaping.thin_by_probability(workload, keep, seed)
    remaining = list(workload.rows)
    for row in thinned.rows:
        remaining.remove(row)
    assert thinned == shaping.thin_by_probability(workload, keep, seed)


def test_thinning_by_probability_has_its_rate_and_nests() -> None:
    workload = workload_of([TraceRow(float(index), 1, 1) for index in range(20_000)])
    half = shaping.thin_by_probability(workload, 0.5, seed=7)
    fifth = shaping.thin_by_probability(workload, 0.2, seed=7)
    assert len(half.rows) == pytest.approx(10_000, abs=4 * 71)  # four standard deviations
    assert set(fifth.rows) < set(half.rows)  # one draw per arrival: a smaller share is a subset


def test_every_kth_is_kept() -> None:
    workload = workload_of([TraceRow(float(index), 1, 1) for index in range(10)])
    assert [row.arrival_s for row in shaping.thin_every(workload, 4).rows] == [0, 4, 8]


@given(rows=ROWS, scale=st.floats(0.01, 100))
def test_time_scaling_keeps_proportions(rows: list[TraceRow], scale: float) -> None:
    workload = workload_of(rows)
    scaled = shaping.scale_time(workload, scale)
    assert [row.arrival_s * scale for row in scaled.rows] == pytest.approx([row.arrival_s for row in workload.rows])
    assert [row[1:] for row in scaled.rows] == [row[1:] for row in workload.rows]


@given(rows=ROWS, factor=st.floats(0.001, 10), floor=st.integers(1, 64), limit=st.integers(2, 4096))
def test_lengths_respect_floor_and_context(rows: list[TraceRow], factor: float, floor: int, limit: int) -> None:
    scaled = shaping.scale_lengths(workload_of(rows), factor, floor_tokens=floor)
    assert all(min(row.input_tokens, row.output_tokens) >= floor for row in scaled.rows)
    capped = shaping.cap_lengths(scaled, limit)
    for row, before in zip(capped.rows, scaled.rows, strict=True):
        assert row.input_tokens >= 1 and row.output_tokens >= 1
        assert row.input_tokens + row.output_tokens <= limit
        assert row == before or before.input_tokens + before.output_tokens > limit


def test_lengths_of_another_trace_come_in_its_order_and_start_again() -> None:
    arrivals = workload_of([TraceRow(float(index), 1, 1) for index in range(5)])
    lengths = workload_of([TraceRow(9, 10, 1), TraceRow(10, 20, 2)])
    swapped = shaping.swap_lengths(arrivals, lengths)
    assert [row.input_tokens for row in swapped.rows] == [10, 20, 10, 20, 10]
    assert [row.arrival_s for row in swapped.rows] == [0, 1, 2, 3, 4]


def test_limits_are_said_in_the_notes() -> None:
    workload = workload_of([TraceRow(float(index), 1, 1) for index in range(10)])
    few = shaping.limit(workload, num_requests=3, duration_s=8)
    assert len(few.rows) == 3
    assert few.notes[-1] == "kept arrivals before 8 s and the first 3 requests"
    assert shaping.limit(workload) is workload
    assert shaping.limit(workload, duration_s=4.5).duration_s == 4.5


@pytest.mark.parametrize(
    "shape",
    [
        lambda w: shaping.slices(w, 0),
        lambda w: shaping.thin_by_probability(w, 0, 1),
        lambda w: shaping.thin_by_probability(w, 1.5, 1),
        lambda w: shaping.thin_every(w, 0),
        lambda w: shaping.scale_time(w, -1),
        lambda w: shaping.scale_lengths(w, 0),
        lambda w: shaping.scale_lengths(w, 1, floor_tokens=0),
        lambda w: shaping.scale_lengths(w, 1e300),
        lambda w: shaping.scale_lengths(w, 1, input_factor=1e308),
        lambda w: shaping.cap_lengths(w, 1),
        lambda w: shaping.cap_lengths(w, 2**31),
        lambda w: shaping.swap_lengths(w, Workload((), "none", "none")),
        lambda w: shaping.limit(w, num_requests=-1),
        lambda w: shaping.limit(w, duration_s=0),
    ],
)
def test_nonsense_is_refused(shape) -> None:
    with pytest.raises(ConfigError):
        shape(workload_of([TraceRow(0, 1, 1)]))


def test_what_no_column_and_no_memory_holds_is_refused() -> None:
    workload = workload_of([TraceRow(float(second), 100, 20) for second in range(1, 5)])
    for shape, message in (
        (lambda: shaping.scale_lengths(workload, 1e8), r"length scale 1e\+08: a length comes to 1e\+10 tokens, 2147"),
        (lambda: shaping.scale_lengths(workload, 1.0, input_factor=3e7), r"3e\+07 \(inputs\) and 1 \(outputs\): "),
        (lambda: shaping.scale_time(workload, 1e-300), "the last requests would come after"),
        (lambda: shaping.slices(workload, 1e-9), "more than 1,000,000 slices of 1e-09 s"),
        (lambda: shaping.slices(workload, 5e-324), "more than 1,000,000 slices"),
    ):
        with pytest.raises(ConfigError, match=message):
            shape()
    assert shaping.scale_lengths(workload, 2e7).columns.input_tokens.tolist() == [2 * 10**9] * 4


def test_functions_add_one_note_and_keep_the_source() -> None:
    workload = workload_of([TraceRow(float(index), 100, 100) for index in range(50)])
    shaped = shaping.cap_lengths(shaping.scale_time(shaping.thin_by_probability(workload, 0.5, 3), 2.0), 64)
    assert len(shaped.notes) == 3
    assert shaped.source == "made up"
    assert np.all([row.input_tokens == 1 for row in shaped.rows])
