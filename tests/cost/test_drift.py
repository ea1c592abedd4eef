"""Probes make a line of speeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.drift import BIN_S, FASTEST, SLOWEST, speed_line


def test_speeds_are_over_the_reference_and_a_disturbed_probe_does_not_count() -> None:
    probes = [(100.0, 0.010), (101.0, 0.010), (102.0, 0.500), (103.1, 0.020), (104.0, 0.020)]
    assert speed_line(probes, 0.010, 100.0) == ((0.0, pytest.approx(1.0)), (BIN_S, pytest.approx(0.5)))


def test_what_was_before_the_run_does_not_count_and_gaps_go_on() -> None:
    line = speed_line([(90.0, 0.5), (100.5, 0.01), (112.5, 0.04)], 0.02, 100.0)
    assert line == ((0.0, pytest.approx(2.0)), (4 * BIN_S, pytest.approx(0.5)))
    assert speed_line([(110.0, 0.01)], 0.01, 100.0) == ((0.0, pytest.approx(1.0)),)  # nothing was seen before it


def test_nothing_seen_is_no_drift() -> None:
    assert speed_line([], 0.01, 0.0) == ()
    assert speed_line([(1.0, 0.01)], 0.0, 0.0) == (), "nobody has measured what a probe takes"


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(1e-5, 10.0)), max_size=40), st.floats(1e-4, 1.0))
def test_lines_are_sorted_and_within_what_can_be_measured(probes: list[tuple[float, float]], reference: float) -> None:
    line = speed_line(probes, reference, 10.0)
    assert [at for at, _ in line] == sorted({at for at, _ in line})
    assert all(SLOWEST <= speed <= FASTEST for _, speed in line) and (not line or line[0][0] == 0.0)


def test_probes_are_scaled_by_how_fast_cores_were_when_their_reference_was_taken() -> None:
    assert speed_line([(1.0, 0.01)], 0.02, 0.0, speed=0.9) == ((0.0, pytest.approx(1.8)),)
