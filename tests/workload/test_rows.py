"""Columns are a sequence of rows that costs no more than its arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.errors import ConfigError
from jettison.workload.rows import MAX_TOKENS, Columns, TraceRow, Workload, as_columns, check_number

ROWS = st.lists(
    st.builds(
        TraceRow, st.floats(0, 1e6), st.integers(1, 9999), st.integers(1, 9999), st.integers(0, 3), st.booleans(),
        st.sampled_from([0, 0, 1, MAX_TOKENS]),
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
    assert columns[999_999] == (999_999.0, 1, 1, 0, False, 0)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        Columns([1.0, 2.0], [1], [1])


@pytest.mark.parametrize("tokens", [MAX_TOKENS + 1, 10**30, -1, 3e9, float("nan"), float("inf")])
def test_a_length_that_a_column_cannot_hold_is_refused_not_wrapped(tokens: float) -> None:
    for lengths in ([[tokens, 1], [1, 1]], [[1, 1], [1, tokens]], [[1, 1], [1, 1], [0, tokens]]):
        with pytest.raises(ConfigError, match=r"^a length of .* tokens, 0 to 2147483647 are possible"):
            Columns([0.0, 1.0], *lengths)
    with pytest.raises(ConfigError, match="a length of"):
        as_columns([TraceRow(0.0, 5, 5)]).with_lengths([tokens], [5])
    assert Columns([0.0], [MAX_TOKENS], [float(MAX_TOKENS)])[0] == (0.0, MAX_TOKENS, MAX_TOKENS, 0, False, 0)
    with pytest.raises(ConfigError, match=r"^tenant number"):
        Columns([0.0], [1], [1], tenant=[tokens])


def test_a_number_of_requests_has_a_bound() -> None:
    check_number(10**8, "w")
    for count in (10**8 + 1, 1e300, float("inf"), float("nan"), 10**400):
        with pytest.raises(ConfigError, match=r"^w: more than 100,000,000 requests"):
            check_number(count, "w")


def test_cached_tokens_never_exceed_new_inputs() -> None:
    columns = Columns([0.0, 1.0], [10, 10], [5, 5], [8, 2])
    assert columns.with_lengths([4, 4], [1, 1]).all_cached.tolist() == [4, 2]
