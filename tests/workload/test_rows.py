"""Columns are a sequence of rows that costs no more than its arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.workload.rows import Columns, TraceRow, Workload, as_columns

ROWS = st.lists(
    st.builds(
        TraceRow, st.floats(0, 1e6), st.integers(1, 9999), st.integers(1, 9999), st.integers(0, 3), st.booleans()
    ),
    max_size=20,
)


@given(rows=ROWS, index=st.integers(-25, 25), start=st.integers(-25, 25), stop=st.integers(-25, 25))
def test_columns_are_the_rows_they_are_made_of(rows: list[TraceRow], index: int, start: int, stop: int) -> None:
    columns = as_columns(rows)
    assert len(columns) == len(rows)
    assert list(columns) == rows
    assert columns == rows
    assert list(columns[start:stop]) == rows[start:stop]
    assert list(columns[::2]) == rows[::2]
    if -len(rows) <= index < len(rows):
        assert columns[index] == rows[index]
        assert all(type(mine) is type(theirs) for mine, theirs in zip(columns[index], rows[index], strict=True))
    else:
        with pytest.raises(IndexError):
            columns[index]


@given(rows=ROWS)
def test_a_workload_is_sorted_and_ties_keep_their_order(rows: list[TraceRow]) -> None:
    workload = Workload((), "w", "s").with_rows(rows, "note")
    assert list(workload.rows) == sorted(rows, key=lambda row: row.arrival_s)
    assert workload.columns is workload.rows


def test_a_million_requests_are_twenty_megabytes() -> None:
    columns = Columns(np.arange(10**6), np.ones(10**6), np.ones(10**6), np.zeros(10**6), np.zeros(10**6))
    assert columns.cached_tokens is None and columns.is_offline is None
    assert sum(c.nbytes for c in (columns.arrival_s, columns.input_tokens, columns.output_tokens)) == 16 * 10**6
    assert columns[999_999] == (999_999.0, 1, 1, 0, False)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        Columns([1.0, 2.0], [1], [1])


def test_cached_tokens_never_exceed_new_inputs() -> None:
    columns = Columns([0.0, 1.0], [10, 10], [5, 5], [8, 2])
    assert columns.with_lengths([4, 4], [1, 1]).all_cached.tolist() == [4, 2]
