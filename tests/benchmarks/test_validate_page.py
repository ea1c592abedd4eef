"""The page of validations: live, live again and simulated, and how far apart they are."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.simulator.validate import render


def row(scenario: str, metric: str, sides: tuple[float, float, float], is_count: bool = False) -> dict[str, object]:
    live, again, simulated = sides
    over = (simulated - live, again - live) if is_count else (simulated / live - 1, again / live - 1)
    return {
        "scenario": scenario, "metric": metric, "live": live, "live_again": again, "simulated": simulated,
        "difference": over[0], "floor": over[1], "is_count": is_count,
    }  # fmt: skip


def test_each_line_has_the_simulation_and_the_floor_beside_the_live_run(tmp_path: Path) -> None:
    means = [
        row("chat, drop", "TTFT mean", (0.2, 0.3, 0.15)), row("chat, drop", "preemptions", (10.0, 7.5, 14.0), True),
    ]  # fmt: skip
    (tmp_path / "chat.json").write_text(json.dumps({"format": "jettison-validation-4", "means": means}))
    text = render(tmp_path)
    assert "| chat, drop | TTFT mean | 0.2 | 0.3 | 0.15 | -25.0% | +50.0% |" in text
    assert "|  | preemptions | 10 | 7.5 | 14 | +4.0 | -2.5 |" in text


def test_where_nothing_ran_there_is_no_table(tmp_path: Path) -> None:
    assert "|" not in render(tmp_path)
