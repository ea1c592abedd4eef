"""Which sleepers give their processes back: never too many, none too early, the longest asleep first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jettison.policy.provisioning import UNKNOWN_START_S, IdleProcess, choose_released, is_given_up

TIMES = st.floats(0.0, 100.0)
IDLE = st.lists(TIMES, max_size=8).map(lambda times: [IdleProcess(w, t) for w, t in enumerate(times)])


@given(IDLE, st.integers(0, 8), st.integers(1, 10), st.none() | TIMES)
def test_what_is_given_back_leaves_the_least_and_was_kept_for_as_long_as_a_start_takes(
    idle: list[IdleProcess], num_awake: int, least: int, start_s: float | None
) -> None:
    num_provisioned = num_awake + len(idle)
    chosen = choose_released(idle, num_provisioned, least, start_s)
    keep_s = UNKNOWN_START_S if start_s is None else start_s
    asleep_s = dict(idle)
    assert len(set(chosen)) == len(chosen)
    assert not chosen or num_provisioned - len(chosen) >= least
    assert all(asleep_s[worker] >= keep_s for worker in chosen)
    left = [each for each in idle if each.worker_id not in chosen]
    may = [each for each in left if each.asleep_s >= keep_s]
    assert not may or num_provisioned - len(chosen) <= least, "one that may go stays"
    assert all(asleep_s[worker] >= each.asleep_s for worker in chosen for each in may), "the longest asleep go first"


@given(TIMES, TIMES, st.none() | TIMES)
def test_a_start_is_given_up_only_once_it_takes_twice_as_long_and_nothing_has_needed_it_for_as_long(
    waits_s: float, calm_s: float, predicted_s: float | None
) -> None:
    expected_s = UNKNOWN_START_S if predicted_s is None else predicted_s
    assert is_given_up(waits_s, calm_s, predicted_s) == (waits_s >= 2 * expected_s and calm_s >= expected_s)
