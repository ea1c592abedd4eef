"""The page of validations: what it says of two live runs, and of one beside its simulation."""

from __future__ import annotations

import json
from pathlib import Path

from validate import render, render_twice


def row(scenario: str, metric: str, real: float, simulated: float, difference: float) -> dict[str, object]:
    return {
        "scenario": scenario, "metric": metric, "real": real, "simulated": simulated, "difference": difference,
        "within": True, "within_goal": False,
    }  # fmt: skip


def test_two_live_runs_differ_by_their_means_and_by_the_seed_that_differs_most(tmp_path: Path) -> None:
    means = [row("chat, drop", "TTFT mean", 0.2, 0.15, -0.25), row("chat, drop", "preemptions", 10.0, 7.5, 9.0)]
    seeds = [
        row("chat, drop, seed 0", "TTFT mean", 0.2, 0.1, -0.5), row("chat, drop, seed 1", "TTFT mean", 0.2, 0.2, 0.0),
        row("chat, drop, seed 0", "preemptions", 10.0, 14.0, 4.0),
        row("chat, drop, seed 1", "preemptions", 10.0, 1.0, -9.0),
        row("chat-4, drop, seed 0", "TTFT mean", 0.2, 0.9, 3.5),
    ]  # fmt: skip
    (tmp_path / "chat.json").write_text(json.dumps({"means": means, "rows": seeds}))
    text = render_twice(tmp_path)
    assert "| chat, drop | TTFT mean | 0.2 | 0.15 | -25.0% | -50.0% |" in text
    assert "| chat, drop | preemptions | 10 | 7.5 | -2.5 | -9.0 |" in text


def test_where_nothing_ran_twice_nothing_is_said(tmp_path: Path) -> None:
    assert render_twice(tmp_path) == ""


def test_the_committed_page_is_of_the_committed_results() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "validation"
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert page == render(folder / "results") + render_twice(folder / "twice")
