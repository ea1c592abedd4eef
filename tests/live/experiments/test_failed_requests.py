"""Runs in which requests fail are not taken for good ones, whichever command has served them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jettison.cost.model import CostModel
from jettison.cost.speed import MachineSpeed
from jettison.demo import burst as demo
from jettison.demo.burst import DemoModel, make_setup, run_burst
from jettison.errors import JettisonError
from jettison.live.experiments import overload as experiment
from jettison.live.experiments.overload import measure_speed_at
from jettison.report.failures import exit_if_unanswered
from jettison.report.results import RequestCounts, RequestRecord, RunResult, build_run
from jettison.simulate import validate_command as validating
from jettison.simulate.validation import Trio
from jettison.workload.synthetic import Burst, Lengths, SyntheticSpec

MODEL = DemoModel(layers=2, hidden=64, heads=2, kv_heads=1, kv_tokens_per_instance=512, context=512)

BURST = SyntheticSpec(
    "little burst", rate_per_s=40.0, duration_s=2.0, prompt=Lengths(median=60, sigma=0.2, cap=100),
    output=Lengths(median=12, sigma=0.2, cap=20), bursts=(Burst(0.5, 0.5, 4.0),),
)  # fmt: skip


def answered(index: int) -> RequestRecord:
    return RequestRecord(index, 0.0, 4, 2, "completed", 0.0, 0.1, 0.3, 2, [0.2])


def half_failed(name: str) -> RunResult:
    lost = RequestRecord(1, 0.0, 4, 2, "failed", 0.0, None, 0.2, error="ClientOSError: connection reset")
    return build_run(name, [answered(0), lost], events={"drops": 0})


def test_a_machine_is_not_measured_by_what_a_dying_server_answered(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(experiment, "replay_sync", lambda url, load, options: half_failed(options.name))
    with pytest.raises(JettisonError, match=r"^warm up: 1 of 2 requests were not answered \(1 failed\); the first"):
        measure_speed_at("http://127.0.0.1:9", make_setup(tmp_path, 0, MODEL))


def test_a_demo_with_failures_says_so_first_and_fails(tmp_path: Path, monkeypatch, capsys) -> None:
    speed = MachineSpeed(2000.0, 0.01, 0.0005)

    def run_policy(setup: object, policy: str, load: object, *, name: str, **_: Any) -> RunResult:
        return half_failed(name) if name == "burst: drop" else build_run(name, [answered(0), answered(1)])

    monkeypatch.setattr(demo, "measure_speed", lambda _: speed)
    monkeypatch.setattr(demo, "run_policy", run_policy)
    with pytest.raises(JettisonError) as raised:
        run_burst(tmp_path, 0, model=MODEL, burst=BURST)
    shown = capsys.readouterr().out
    told = "burst: drop: 1 of 2 requests were not answered (1 failed); the first error: ClientOSError: connection reset"
    assert shown.index(told) < shown.index("P99 TTFT")
    assert str(raised.value) == told
    document = json.loads((tmp_path / "report.json").read_text())
    assert [failed["run"] for failed in document["failures"]] == ["burst: drop"], "the report is there all the same"
    assert (tmp_path / "report.html").read_text().index(told) > 0


COST = CostModel(2, 1e-9, 1e-8, 2e-6, 5e-5, 3e-4, 0.0, 0.0, 5e-5, 2e-6)


@pytest.mark.parametrize("fails_first", [True, False])
def test_a_validation_with_failures_says_so_first_and_fails(tmp_path: Path, monkeypatch, fails_first: bool) -> None:
    good = build_run("drop", [answered(0), answered(1)])
    live, again = (half_failed("drop"), good) if fails_first else (good, half_failed("drop"))
    trio = Trio("s", "drop", 0, live, again, good, COST)
    monkeypatch.setattr(validating, "run_trios", lambda *_: [trio])
    monkeypatch.setattr(validating, "parse_spec", lambda *_: None)
    for name in ("check_both_sides", "ensure_profiled"):
        monkeypatch.setattr(validating, name, lambda *_, **__: None)
    monkeypatch.setattr(validating, "cases_of", lambda *_, **__: [])
    written: list[object] = []
    monkeypatch.setattr(validating, "write_document", lambda *arguments: written.append(arguments))
    console = Console(record=True, width=160)
    with pytest.raises(JettisonError, match=r"^drop: 1 of 2 requests were not answered"):
        validating.validate_command({}, "s", tmp_path, json_out=tmp_path / "v.json", console=console)
    text = console.export_text()
    told = f"s, drop, seed 0, {'live' if fails_first else 'live again'}: 1 of 2 requests"
    assert text.index(told) < text.index("metric") and written


def test_a_script_ends_with_one_where_requests_failed() -> None:
    console = Console(record=True, width=160)
    exit_if_unanswered([build_run("good", [answered(0)])], console)
    rejected = RunResult("bad", requests=RequestCounts(3, completed=2, rejected=1))
    with pytest.raises(SystemExit) as left:
        exit_if_unanswered([rejected], console)
    assert left.value.code == 1 and "bad: 1 of 3 requests were not answered (1 rejected)" in console.export_text()
