"""Twelve tiny instances under a packing: the load's sizes, and what counts as fewer instances at equal evictions."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.packing.live import ARMS, factor_to
from benchmarks.packing.shapes import EQUAL, SHAPES, judge_devices, sized_load


def test_requests_are_of_an_eighth_of_an_instance_to_all_of_it_and_the_same_each_time() -> None:
    load = sized_load(600, 5.0, 1024, seed=3)
    sizes = [row.input_tokens + row.output_tokens for row in load.rows]
    assert len(sizes) == 600 and 0.125 * 1024 - 1 <= min(sizes) < 150 and 950 < max(sizes) <= 1024
    octaves = [sum(low < size <= 2 * low for size in sizes) for low in (127, 254, 508)]
    assert min(octaves) > 150
    assert load.duration_s == pytest.approx(600 / 5.0, rel=0.2)
    assert load == sized_load(600, 5.0, 1024, seed=3) != sized_load(600, 5.0, 1024, seed=4)


def row(arm: str, used: float, evictions: int, ttft_ms: float = 100.0) -> dict[str, Any]:
    return {"arm": arm, "used_mean": used, "evictions": evictions, "ttft_p99_ms": ttft_ms}


def test_instances_are_compared_at_equal_evictions_by_medians() -> None:
    rows = [row("mell", used, 4) for used in (5.0, 5.1, 9.0)] + [
        row("best-fit", 4.8, 30), row("best-fit-roomy", 6.0, 3), row("worst-fit", 6.2, 4), row("none", 12.0, 0),
        row("load-balance", 5.2, 9), row("load-balance-roomy", 5.6, 7),
    ]  # fmt: skip
    verdicts = judge_devices(rows)
    assert [is_met for is_met, _ in verdicts] == [True, True, True, True]
    assert "0.91 of load-balance-roomy's (7)" in verdicts[0][1], "where each evicts more, the one that evicts least"
    assert "0.85 of best-fit-roomy's (3)" in verdicts[1][1] and "0.82 of worst-fit's (4)" in verdicts[2][1]
    assert not judge_devices([*rows, *[row("mell", 5.1, 4, 130.0)] * 5])[-1][0]
    assert judge_devices(rows[3:]) == []


def test_every_arm_that_is_judged_can_be_run() -> None:
    assert {arm for arms in EQUAL.values() for arm in arms} | {"mell", "none", "still", "awake"} <= ARMS.keys()


def test_a_pilot_says_how_much_more_or_less_there_has_to_be() -> None:
    four, twelve = SHAPES["four"], SHAPES["twelve"]
    assert factor_to(four, {"busy": 0.5, "memory": 0.9}) is None and factor_to(four, {"busy": 0.9, "memory": 0.1}) < 1
    assert factor_to(twelve, {"busy": 1.0, "memory": 0.25}) is None
    assert factor_to(twelve, {"busy": 1.0, "memory": 0.1}) > 1 > factor_to(twelve, {"busy": 0.1, "memory": 0.9})
