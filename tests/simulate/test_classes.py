"""A batch beside a load, in virtual time: who is sent when, what each class is counted by, what a spec says of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))

from scenarios import make_setup
from specs import spec

from jettison.errors import ConfigError
from jettison.policy.offline import OfflineParams
from jettison.report.classes import TOKEN_SERIES, class_figure, grown, total_per_s
from jettison.report.results import SENDERS_ENDED, RunResult, read_results, write_results
from jettison.simulate.cases import cases_of, run_case
from jettison.simulate.run import SimulationOptions, simulate_workload
from jettison.simulate.sizing import Objective
from jettison.simulate.spec import parse_spec
from jettison.simulate.workloads import build_pool
from jettison.workload.lengths import Lengths, LogNormalPair
from jettison.workload.pool import OfflinePool
from jettison.workload.traces import TraceRow, Workload, read_trace, write_trace

FIXED = LogNormalPair(Lengths(40, 0.0, 40), Lengths(10, 0.0, 10))
CHAT = Workload(tuple(TraceRow(0.1 * i, 30, 8) for i in range(10)), "chat", "made up", span_s=2.0)


def served(pool: OfflinePool | None, load: Workload = CHAT, **options: Any) -> RunResult:
    setup = make_setup("recompute", num_workers=1)
    return simulate_workload(load, setup, SimulationOptions(pool=pool, observe_interval_s=0.05, **options))


def test_an_endless_batch_keeps_its_number_unfinished_until_arrivals_end() -> None:
    run = served(OfflinePool(FIXED, unfinished=4))
    assert run.classes is not None
    offline = run.classes["offline"]
    rows = offline["requests_detail"]
    assert {row["status"] for row in rows} == {"completed"} and len(rows) > 8
    open_at = [sum(r["scheduled_s"] <= t < r["scheduled_s"] + r["e2e_s"] for r in rows) for t in (0.3, 0.9, 1.5)]
    assert open_at == [4, 4, 4]
    assert max(row["scheduled_s"] for row in rows) <= 2.0
    assert offline["unfinished"] <= 4
    assert run.requests_detail is not None and len(run.requests_detail) == 10 == run.ttft_s.count
    assert run.requests.submitted == 10 + len(rows) == run.requests.completed


def test_a_batch_that_the_run_s_end_cuts_off_has_failed_and_no_cluster_holds_it() -> None:
    pool = OfflinePool(FIXED, unfinished=1, num_requests=1000)
    run = served(pool, until_s=1.0)
    assert run.classes is not None and run.classes["offline"]["requests"]["submitted"] == 1000
    assert run.classes["offline"]["unfinished"] == 0 < run.classes["offline"]["requests"]["failed"]
    assert run.requests.submitted == len(CHAT.rows) + 1000 > run.requests.completed
    assert not Objective(ttft_p99_s=1e9).holds([run])


def test_a_batch_with_an_end_is_served_to_it() -> None:
    run = served(OfflinePool(FIXED, num_requests=30, start_s=0.5))
    assert run.classes is not None
    rows = run.classes["offline"]["requests_detail"]
    assert [row["scheduled_s"] for row in rows] == [0.5] * 30
    assert run.classes["offline"]["requests"]["completed"] == 30
    whole = run.series["offline_prompt_tokens"][-1][1], run.series["offline_output_tokens"][-1][1]
    assert whole == (30 * 40, 30 * 10)


def test_tokens_count_in_the_arrival_window_and_once() -> None:
    run = served(OfflinePool(FIXED, unfinished=8))
    assert class_figure(run, "online", "tokens", "prompt") == 10 * 30
    assert class_figure(run, "online", "tokens", "output_per_s") == pytest.approx(10 * 8 / 2.0)
    parts = [grown(run.series[name], 0.0, 2.0) for name in TOKEN_SERIES]
    assert total_per_s(run) == pytest.approx(sum(p or 0 for p in parts) / 2.0)


def test_objectives_are_judged_by_request_and_by_gap() -> None:
    run = served(OfflinePool(FIXED, unfinished=4), slo_ttft_s=10.0, slo_tpot_s=1e-9)
    assert class_figure(run, "online", "ttft_within") == 1.0
    assert class_figure(run, "online", "gaps_within") == 0.0
    assert class_figure(run, "online", "requests_within") == 0.0
    rough = served(OfflinePool(FIXED, unfinished=4), slo_ttft_s=10.0, slo_tpot_s=0.1, detail=False)
    exact = served(OfflinePool(FIXED, unfinished=4), slo_ttft_s=10.0, slo_tpot_s=0.1)
    assert class_figure(rough, "online", "gaps_within") == class_figure(exact, "online", "gaps_within")
    shares = [class_figure(run, "online", "requests_within") for run in (rough, exact)]
    assert shares[0] == shares[1] and shares[0] is not None
    means = [class_figure(run, "online", "itl_s", "mean") for run in (rough, exact)]
    assert means[0] == pytest.approx(means[1])
    assert class_figure(rough, "offline", "itl_s", "mean") == pytest.approx(means[0], rel=0.5)


def test_where_offline_requests_are_not_served_those_of_a_trace_are_refused_as_live() -> None:
    setup = make_setup("recompute", num_workers=1)
    setup = replace(setup, params=replace(setup.params, offline=OfflineParams(serves=False)))
    rows = tuple(TraceRow(0.1 * i, 30, 8, is_offline=i % 2 == 1) for i in range(6))
    run = simulate_workload(Workload(rows, "both", "made up", span_s=2.0), setup, SimulationOptions())
    assert class_figure(run, "offline", "requests", "failed") == 3
    assert class_figure(run, "online", "requests", "completed") == 3


def test_where_offline_requests_are_not_served_no_batch_is_sent() -> None:
    setup = make_setup("recompute", num_workers=1)
    setup = replace(setup, params=replace(setup.params, offline=OfflineParams(serves=False)))
    alone = simulate_workload(CHAT, setup, SimulationOptions(pool=OfflinePool(FIXED, unfinished=4)))
    assert class_figure(alone, "offline", "requests", "submitted") == 0
    assert class_figure(alone, "online", "tokens", "prompt") == 300
    assert total_per_s(alone) == class_figure(alone, "online", "tokens", "total_per_s")


def test_a_batch_that_cannot_be_served_ends_the_run_all_the_same() -> None:
    run = served(OfflinePool(LogNormalPair(Lengths(5000, 0.0, 5000), Lengths(1, 0.0, 1)), unfinished=2))
    assert class_figure(run, "offline", "requests", "failed") == 2


@pytest.mark.parametrize("unfinished", [None, 3])
def test_a_request_that_is_too_long_ends_its_own_sender_alone(unfinished: int | None) -> None:
    lengths = LogNormalPair(Lengths(400, 1.5, 5000), Lengths(4, 0.0, 4))
    run = served(OfflinePool(lengths, unfinished, num_requests=30, seed=3))
    assert run.classes is not None
    counts = run.classes["offline"]["requests"]
    assert counts["completed"] + counts["failed"] == counts["submitted"]
    assert counts["submitted"] == 30 and counts["failed"] > 3
    if unfinished is not None:  # else a sender a request
        errors = [row["error"] for row in run.classes["offline"]["requests_detail"] if row["error"]]
        assert sum("tokens exceed" in error for error in errors) == unfinished
        assert {error for error in errors if "tokens exceed" not in error} == {SENDERS_ENDED}


def test_classes_survive_a_recording_and_its_simulation(tmp_path: Path) -> None:
    rows = tuple(TraceRow(0.1 * i, 30, 8, 0, i % 2 == 1) for i in range(10))
    write_trace(tmp_path / "recorded.csv", Workload(rows, "mixed", "made up", span_s=2.0))
    run = served(None, read_trace(tmp_path / "recorded.csv"))
    assert run.ttft_s.count == 5
    assert class_figure(run, "offline", "tokens", "prompt") == class_figure(run, "online", "tokens", "prompt")
    write_results(tmp_path / "run.json", [run])
    again = read_results(tmp_path / "run.json")[0]
    assert class_figure(again, "offline", "requests", "completed") == 5


def test_a_run_without_offline_requests_is_as_it_was() -> None:
    run = served(None)
    assert run.classes is None and not set(TOKEN_SERIES) & run.series.keys()


BATCH = {"lengths": {"input": 50, "output": 10}, "unfinished": 3, "max_input_tokens": 40, "max_output_tokens": 5}


def test_a_spec_says_batch_mode_and_objectives() -> None:
    raw = spec(variants=[
        {"name": mode, "policy": "recompute", "settings": {"offline": mode, "slo_ttft_ms": 1500, "slo_tpot_ms": 110}}
        for mode in ("none", "priority")
    ])  # fmt: skip
    raw["workload"] = {"arrivals": {"process": "poisson", "rate_per_s": 20, "duration_s": 1.0},
                       "lengths": {"input": 40, "output": 10}, "offline": BATCH}  # fmt: skip
    pool = build_pool(parse_spec(raw).workload, 7)
    assert pool is not None and pool.seed == 7 and next(pool.lengths_drawn()) == (40, 5)
    none, priority = (run_case(case) for case in cases_of(raw, "little"))
    assert class_figure(none, "offline", "requests", "submitted") == 0
    assert (class_figure(priority, "offline", "requests", "completed") or 0) > 3
    assert none.goodput is not None and (none.goodput["slo_ttft_s"], none.goodput["slo_tpot_s"]) == (1.5, 0.11)
    assert "beside it an endless batch, 3 unfinished" in " ".join(priority.config["workload"]["notes"])


@pytest.mark.parametrize(("change", "said"), [
    ({"unfinished": None}, "workload.offline.unfinished is missing"),
    ({"lengths": {"trace": "x.csv"}}, "workload.offline.lengths.trace is for a trace's arrivals"),
    ({"max_input_tokens": 0}, "workload.offline.max_input_tokens needs"),
])  # fmt: skip
def test_a_batch_that_makes_no_sense_is_one_line(change: dict[str, Any], said: str) -> None:
    raw = spec()
    raw["workload"] |= {"offline": {key: value for key, value in (BATCH | change).items() if value is not None}}
    with pytest.raises(ConfigError, match=said):
        parse_spec(raw)
