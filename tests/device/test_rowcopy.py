"""Rows copied in pieces: exact, stopped between two pieces, going on where they were, on a thread beside other work."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.device import rowcopy
from jettison.device.kernels.library import supported_variants
from jettison.device.rowcopy import RowCopy

WAYS = ["native", "slow"] if supported_variants() else ["slow"]


@pytest.fixture(params=WAYS)
def _each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "slow":
        monkeypatch.setattr(rowcopy, "_copy_rows", lambda: rowcopy._copy_rows_slowly)


def make(num_rows: int, row_bytes: int, piece_bytes: int) -> tuple[RowCopy, np.ndarray, np.ndarray]:
    """Every other row of one array, in reverse, to the rows of another."""
    source = np.random.default_rng(num_rows).integers(0, 256, (2 * num_rows, row_bytes), dtype=np.uint8)
    target = np.zeros((num_rows, row_bytes), dtype=np.uint8)
    order = np.arange(2 * num_rows - 1, -1, -2, dtype=np.int64)
    sources = source.ctypes.data + order * row_bytes
    targets = target.ctypes.data + np.arange(num_rows, dtype=np.int64) * row_bytes
    copy = RowCopy(sources, targets, row_bytes, piece_bytes=piece_bytes)
    return copy, source[::-2], target  # a view, which keeps the source


@pytest.mark.usefixtures("_each_way")
@pytest.mark.parametrize(("num_rows", "row_bytes", "piece_bytes"), [(5, 96, 96), (5, 97, 10), (3, 8, 1000), (0, 8, 8)])
def test_all_rows_arrive(num_rows: int, row_bytes: int, piece_bytes: int) -> None:
    copy, wanted, target = make(num_rows, row_bytes, piece_bytes)
    copy.run()
    assert copy.is_complete and copy.copied_bytes == copy.num_bytes == num_rows * row_bytes
    np.testing.assert_array_equal(target, wanted)


@pytest.mark.usefixtures("_each_way")
def test_a_stopped_copy_does_nothing_and_another_goes_on_where_it_was() -> None:
    copy, wanted, target = make(4, 100, 30)
    copy.run(most_bytes=110)
    assert copy.copied_bytes == 130, "whole pieces, none across two rows"
    copy.stop()
    copy.run()
    assert copy.copied_bytes == 130 and not copy.is_complete
    np.testing.assert_array_equal(target.reshape(-1)[:130], wanted.reshape(-1)[:130])
    assert not target.reshape(-1)[130:].any()
    rest = RowCopy(copy._sources, copy._targets, 100, skip_bytes=130, piece_bytes=30)
    rest.run()
    assert rest.is_complete
    np.testing.assert_array_equal(target, wanted)


@given(st.integers(0, 6), st.integers(1, 50), st.integers(1, 60), st.lists(st.integers(1, 80), max_size=8))
def test_turns_add_up(num_rows: int, row_bytes: int, piece_bytes: int, turns: list[int]) -> None:
    copy, wanted, target = make(num_rows, row_bytes, piece_bytes)
    for most_bytes in turns:
        before = copy.copied_bytes
        copy.run(most_bytes)
        least = min(before + most_bytes, copy.num_bytes)
        assert least <= copy.copied_bytes < before + most_bytes + piece_bytes
    copy.run()
    np.testing.assert_array_equal(target, wanted)


def test_another_thread_sees_how_far_it_is() -> None:
    copy, wanted, target = make(64, 1 << 18, 1 << 16)
    thread = threading.Thread(target=copy.run)
    thread.start()
    seen = [copy.copied_bytes]
    while not copy.is_complete:
        seen.append(copy.copied_bytes)
    thread.join()
    assert seen == sorted(seen)
    np.testing.assert_array_equal(target, wanted)
