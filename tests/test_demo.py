"""``jettison demo``, whole, on a model and a burst that take no time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import jettison
from jettison.demo.burst import DemoModel, run_burst
from jettison.report.results import read_results
from jettison.workload.synthetic import Burst, Lengths, SyntheticSpec

MODEL = DemoModel(layers=2, hidden=64, heads=2, kv_heads=1, kv_tokens_per_instance=512, context=512)
BURST = SyntheticSpec(
    "little burst", rate_per_s=40.0, duration_s=2.0, prompt=Lengths(median=60, sigma=0.2, cap=100),
    output=Lengths(median=12, sigma=0.2, cap=20), bursts=(Burst(0.5, 0.5, 4.0),),
)  # fmt: skip


@pytest.mark.live
@pytest.mark.slow
def test_a_demo_leaves_a_report_of_four_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    sources = str(Path(jettison.__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [sources, os.environ.get("PYTHONPATH")])))
    assert run_burst(tmp_path, seed=1, model=MODEL, burst=BURST) == 0
    runs = read_results(tmp_path / "report.json")
    assert [run.name for run in runs] == ["burst: recompute", "burst: drop", "beyond: recompute", "beyond: drop"]
    for run in runs:
        assert run.requests.completed == run.requests.submitted > 0
        assert run.config["policy"] == run.name.rpartition(" ")[2]
        assert run.config["deployment"]["settings"]["overload"] == run.config["policy"]
        assert run.config["fairness"]["kv_capacity_tokens"] == 1024
    assert len({run.requests.submitted for run in runs}) == 1
    assert not any(run.events["drops"] for run in runs if run.config["policy"] == "recompute")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.rstrip().endswith("</html>") and all(run.name in page for run in runs)
    shown = capsys.readouterr().out
    assert "P99 TTFT" in shown and "2.20 of it: more than dropping carries" in shown
