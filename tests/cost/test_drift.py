"""Probes make a line of speeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.drift import BIN_S, FASTEST, SLOWEST, had_share, probes_evened, speed_line


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


def test_what_a_probe_takes_longer_beside_others_is_no_drift() -> None:
    alone = [(0.0, 0.010, 1.0), (1.0, 0.010, 1.0), (2.0, 0.090, 1.0)]
    crowded = [(3.0, 0.012, 2.0), (4.0, 0.012, 2.0)]
    probes = [*alone[:1], *crowded[:1], (5.0, 0.011, 1.5), (6.0, 0.008, 0.0), (7.0, 0.024, 2.0)]
    evened = probes_evened(probes, alone, crowded)
    assert evened == [(at, pytest.approx(took)) for at, took in [(0, 1), (3, 1), (5, 1), (6, 1), (7, 2)]]


def test_without_a_difference_to_be_seen_all_probes_are_compared_alike() -> None:
    alone, crowded = [(0.0, 0.010, 1.90)], [(1.0, 0.020, 2.0)]
    assert probes_evened([(5.0, 0.010, 0.0)], alone, crowded) == [(5.0, 1.0)]
    assert probes_evened([(5.0, 0.040, 0.0)], [], crowded) == [(5.0, 2.0)]
    assert probes_evened([(5.0, 0.040, 0.0)], [], []) == [(5.0, 0.040)], "nothing is usual: told as it is"
    faster = [(1.0, 0.005, 2.0)]
    assert probes_evened([(5.0, 0.010, 0.0)], alone, faster) == [(5.0, 1.0)], "others make nothing faster"


def test_what_a_hypervisor_withholds_makes_cores_slower_by_its_share_of_what_was_wanted() -> None:
    probes = [(10.5, 0.01), (14.0, 0.01), (17.0, 0.01)]
    taken = [(8.0, 10.0, 1.0, 9.0), (10.0, 11.0, 1.5, 0.5), (11.0, 12.0, 1.5, 0.5), (12.0, 14.0, 0.0, 0.0)]
    line = speed_line(probes, 0.01, 10.0, speed=0.8, taken=taken)
    assert line == ((0.0, pytest.approx(0.8 * 0.75)), (BIN_S, pytest.approx(0.8)))
    assert had_share([], 0.0, 1.0) == had_share(taken, 12.0, 13.0) == 1.0, "nobody wanted any"
    assert had_share([(0.0, 1.0, 0.0, 0.5)], 0.0, 1.0) == 0.0


def test_a_machine_that_stood_still_counts_for_as_long_as_it_did() -> None:
    """No probe was taken for 4 s, and what the next one tells of them is of both bins that they lie in."""
    taken = [(0.0, 1.0, 2.0, 0.0), (1.0, 5.0, 2.0, 6.0), (5.0, 6.0, 2.0, 0.0)]
    assert had_share(taken, 0.0, 6.0) == pytest.approx(0.5)
    line = speed_line([(0.5, 0.01), (7.0, 0.01)], 0.01, 0.0, taken=taken)
    assert line == ((0.0, pytest.approx(3.0 / 6.0)), (2 * BIN_S, pytest.approx(1.0))), "also where no probe was taken"
