"""When a step sheds its offline rows, and in how many layers they join a later one."""

from __future__ import annotations

import pytest

from jettison.policy.slices import JoinView, ShedView, plan_joining, sheds


@pytest.mark.parametrize(("view", "expected"), [
    (ShedView(whole_left_s=0.05, stop_s=0.002, online_left_s=0.01, offline_left_s=0.045), True),
    (ShedView(whole_left_s=0.05, stop_s=0.002, online_left_s=0.04, offline_left_s=0.045), False),  # weights bind it
    (ShedView(whole_left_s=0.05, stop_s=0.002, online_left_s=0.0, offline_left_s=0.048), True),  # there is no price
    (ShedView(whole_left_s=0.004, stop_s=0.004, online_left_s=0.0, offline_left_s=0.0), True),  # no safepoint is left
    (ShedView(whole_left_s=-0.01, stop_s=0.0, online_left_s=0.0, offline_left_s=0.0), True),  # it is late
])  # fmt: skip
def test_a_step_sheds_where_the_arrival_gains_more_than_the_stage_loses(view: ShedView, expected: bool) -> None:
    assert sheds(view) is expected
    if view.whole_left_s > view.stop_s:
        parts_s = view.stop_s + view.online_left_s + view.offline_left_s
        assert view.saved_s + view.price_s == pytest.approx(view.offline_left_s)
        assert view.price_s == pytest.approx(parts_s - view.whole_left_s)


@pytest.mark.parametrize(("awaits_first", "layer_s", "room_s", "expected"), [
    (False, 0.002, 0.009, 4), (False, 0.002, 1.0, 10), (True, 0.002, 0.009, 4),
    (False, 0.002, 0.001, 1), (False, 0.002, -0.1, 1), (True, 0.002, 0.001, 0), (True, 0.002, -0.1, 0),
    (False, None, 1.0, 0), (False, 0.0, 0.0, 10),
])  # fmt: skip
def test_rows_join_for_as_long_as_there_is_time_and_for_a_layer_at_least_where_no_request_waits(
    awaits_first: bool, layer_s: float | None, room_s: float, expected: int
) -> None:
    assert plan_joining(JoinView(awaits_first, 10, layer_s, room_s)) == expected
