"""When offline work stood still, and why: from the log, and at the command line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harvested_runs import harvested
from logged_runs import run as made_run

from jettison.cli.main import main
from jettison.policy.standing import Standstill
from jettison.report.decisions import decisions_of
from jettison.report.offlinework import abandoned_at, pauses, seconds_by_reason, stood_still
from jettison.report.results import RunResult, write_results


def stands(at_s: float, reason: str, stood_ms: float = 200.0, **more: Any) -> dict[str, Any]:
    return {"t": at_s, "kind": "offline_stands", "group": 0, "reason": reason, "stood_ms": stood_ms, **more}


def goes_on(at_s: float, **more: Any) -> dict[str, Any]:
    return {"t": at_s, "kind": "offline_goes_on", "group": 0, "ms": 1.0, **more}


LOG = [
    stands(1.0, "a", free_blocks=3), stands(2.0, "b", 1200.0), stands(2.5, "key", request="r1"), goes_on(4.0),
    goes_on(4.5, request="r1"), stands(9.0, "a"),
]  # fmt: skip


def test_a_time_lasts_as_long_as_its_reason() -> None:
    run = made_run(log=LOG, num_requests=10)
    found = [(s.begin_s, s.end_s, s.request, s.reason) for s in stood_still(run)]
    assert found == [(0.8, 2.0, None, "a"), (2.0, 4.0, None, "b"), (2.3, 4.5, "r1", "key"), (8.8, None, None, "a")]
    assert stood_still(run)[0].inputs == {"free_blocks": 3}
    assert seconds_by_reason(run, stood_still(run)) == pytest.approx({"a": 1.2 + run.duration_s - 8.8, "b": 2.0})
    assert next(iter(seconds_by_reason(run, stood_still(run)))) == "a"
    assert stood_still(made_run(log=[])) == []


def test_pauses_last_until_they_are_over_or_the_run_is() -> None:
    log = [
        {"t": 1.0, "kind": "offline_paused", "group": 0}, {"t": 1.5, "kind": "offline_paused", "group": 1},
        {"t": 3.0, "kind": "offline_resumed", "group": 0, "ms": 2000.0},
        {"t": 3.5, "kind": "step_abandoned", "group": 1},
        {"t": 4.0, "kind": "offline_resumed", "group": 2, "ms": 1000.0},
    ]  # fmt: skip
    run = made_run(log=log)
    assert pauses(run) == [(1.0, 3.0), (1.5, None), (3.0, 4.0)]
    assert abandoned_at(run) == [3.5]
    (first, second) = [d for d in decisions_of(run) if d.kind == "pause offline"]
    assert first.outcome == {"paused_s": 2.0} and second.outcome == {}


def test_a_step_that_had_no_safepoint_left_is_not_given_up() -> None:
    asked = {"kind": "step_abandon_asked", "group": 0, "request": "r1", "deadline_ms": 4.0, "runs_on": [3.0, 3.0]}
    log = [{"t": 1.0, **asked}, {"t": 2.0, **asked}, {"t": 2.001, "kind": "step_abandoned", "group": 0, "tokens": 7,
                                                     "after_ms": 1.0}]  # fmt: skip
    outcomes = [d.outcome for d in decisions_of(made_run(log=log)) if d.kind == "give up step"]
    assert outcomes == [{"given_up": False}, {"given_up_after_ms": pytest.approx(1.0), "tokens": 7}]


def test_a_step_that_shed_rows_tells_what_became_of_them() -> None:
    asked = {"kind": "step_shed_asked", "group": 0, "request": "r1", "online": 2, "offline": 3, "saved_ms": 4.0}
    shed = {"kind": "step_shed", "group": 0, "tokens": 7, "layers": 5, "after_ms": 1.0}
    log = [
        {"t": 1.0, **asked}, {"t": 1.001, **shed}, {"t": 1.5, "kind": "slice_computed", "group": 0},
        {"t": 2.0, **asked}, {"t": 3.0, **asked}, {"t": 3.0005, **shed},
        {"t": 3.1, "kind": "slice_discarded", "group": 0, "reason": "room"},
    ]
    outcomes = [d.outcome for d in decisions_of(made_run(log=log)) if d.kind == "shed rows"]
    common = {"tokens": 7, "layers": 5}
    assert outcomes == [
        common | {"shed_after_ms": pytest.approx(1.0), "computed_after_ms": pytest.approx(499.0)}, {"shed": False},
        common | {"shed_after_ms": pytest.approx(0.5), "discarded_after_ms": pytest.approx(99.5), "reason": "room"},
    ]


def test_steps_that_are_filled_no_more_are_a_decision_with_what_was_foreseen_and_what_came() -> None:
    need = {"group": 0, "ahead_s": 2.0, "online_blocks": 60, "growth_blocks": 41, "blocks": 100, "online_requests": 5}
    log = [{"t": 1.0, "kind": "filling_stops", **need},
           {"t": 1.5, "kind": "filling_goes_on", **need, "online_blocks": 52, "growth_blocks": 30}]  # fmt: skip
    (stopped,) = decisions_of(made_run(log=log))
    assert stopped.kind == "stop filling" and stopped.group == 0
    assert stopped.inputs == {"ahead_s": 2.0, "online_blocks": 60, "blocks": 100, "online_requests": 5}
    assert stopped.predicted == {"growth_blocks": 41}
    assert stopped.outcome == {"filled_again_after_s": 0.5, "online_blocks": 52}


def test_staying_awake_for_a_batch_is_a_decision_with_its_prices() -> None:
    event = {"t": 2.0, "kind": "sleep_put_off", "kept": 2, "idle": 3, "tokens_per_s": 900.0, "next_tokens_per_s": 90.0,
             "price_batch_token": 0.01, "price_device_second": 1.0}  # fmt: skip
    log = [event, {"t": 5.0, "kind": "falling_asleep", "worker": 1, "reason": "no online request for 10 s"}]
    stays, _ = decisions_of(made_run(log=log))
    assert stays.kind == "stay awake" and stays.outcome == {"next_sleep_after_s": 3.0}
    assert stays.inputs == {"kept": 2, "idle": 3, "price_batch_token": 0.01, "price_device_second": 1.0}
    assert stays.predicted == {"tokens_per_s": 900.0, "next_tokens_per_s": 90.0}


@pytest.fixture(scope="module")
def run() -> RunResult:
    return harvested()


def test_a_run_says_when_its_batch_stood_still(run: RunResult) -> None:
    stood = stood_still(run)
    assert stood and {s.reason for s in stood} <= {str(why) for why in Standstill}
    online = next(s for s in stood if s.reason == Standstill.PAUSED)
    assert online.inputs["online_waiting"] > 0 and online.inputs["hosted"] > 0
    # Nothing was harvested then: the counters say the same as the log.
    for each in stood:
        assert each.end_s is not None
        for kind in ("prompt", "output"):
            points = [v for t, v in run.series[f"offline_{kind}_tokens"] if each.begin_s + 0.02 < t < each.end_s - 0.1]
            assert len(set(points)) <= 1


def test_steps_that_were_given_up_are_decisions(run: RunResult) -> None:
    given_up = [d for d in decisions_of(run) if d.kind == "give up step"]
    assert sum("tokens" in d.outcome for d in given_up) == run.events["steps_abandoned"] > 0
    first = given_up[0]
    assert first.inputs["deadline_ms"] > 0 and first.predicted["runs_on"]
    assert str(first.inputs["request"]).startswith("r")
    assert [d for d in decisions_of(run) if d.kind == "stand still"]


def test_explain_says_why_a_batch_stood_still(
    run: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    results, explained = tmp_path / "runs.json", tmp_path / "explained.json"
    calm = harvested("calm", num_bursts=0)
    alone = harvested("alone", pool=None)
    of_others = replace(run, name="of others", classes=None)
    write_results(results, [run, calm, alone, of_others])
    assert main(["explain", str(results), "--why-offline", "--run", "harvest", "--json", str(explained)]) == 0
    text = capsys.readouterr().out
    tokens = run.classes["offline"]["tokens"]
    harvested_told = f"harvested while requests arrived: {tokens['prompt'] + tokens['output']:,.0f} tokens"
    for said in (harvested_told, Standstill.PAUSED, "waiting"):
        assert said in text
    (document,) = json.loads(explained.read_text())["runs"]
    assert len(document["offline_stood_still"]) == len(stood_still(run))
    assert main(["explain", str(results), "--why-offline", "--run", "calm"]) == 0
    assert "never stood still" in capsys.readouterr().out
    assert main(["explain", str(results), "--why-offline", "--run", "alone"]) == 0
    assert "no request of this run was offline" in capsys.readouterr().out
    # Another client had sent the batch: this run's own knew nothing of it, and the server counted.
    assert main(["explain", str(results), "--why-offline", "--run", "of others"]) == 0
    text = capsys.readouterr().out
    assert "harvested while requests arrived: " in text and Standstill.PAUSED in text
    assert main(["explain", str(results), "--why-offline", "--counterfactual", "swap"]) == 2
    assert "--counterfactual does not go with --why-offline" in capsys.readouterr().err
