"""A workload in, a result in the format of live runs out."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))

from scenarios import make_setup

from jettison.report.results import first_error, read_results, summarize, write_results
from jettison.sim.faults import Crash
from jettison.simulate.clients import Edge, GapHistogram
from jettison.simulate.run import SimulationOptions, not_modelled, simulate_workload
from jettison.workload.prompts import PromptMaker
from jettison.workload.traces import TraceRow, Workload


def workload(seed: int = 0, num: int = 100) -> Workload:
    rng = random.Random(seed)
    rows = sorted(TraceRow(rng.random() ** 2, rng.randint(1, 150), rng.randint(1, 90)) for _ in range(num))
    return Workload(tuple(rows), "test", "made up")


def test_a_run_reads_back_and_is_the_same_again(tmp_path: Path) -> None:
    runs = [simulate_workload(workload(), make_setup(p), SimulationOptions(name=p)) for p in ("drop", "recompute")]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    write_results(paths[0], runs)
    write_results(paths[1], [
        simulate_workload(workload(), make_setup(p), SimulationOptions(name=p)) for p in ("drop", "recompute")
    ])
    assert paths[0].read_bytes() == paths[1].read_bytes()
    drop, recompute = read_results(paths[0])
    for run in (drop, recompute):
        assert run.requests.completed == 100
        assert {"queue", "running", "kv_usage", "worker_memory_bytes/kv/0", "kv_blocks_used/0"} <= run.series.keys()
        assert run.config["fairness"]["kv_capacity_tokens"] == 2 * 36 * 16
    assert drop.events["drops"] >= 1 and recompute.events["drops"] == 0
    assert any(entry["kind"] == "drop" for entry in drop.events["log"])


def test_the_edge_is_added_to_every_latency_and_to_no_gap() -> None:
    setup = make_setup("recompute", num_workers=1)
    load = Workload((TraceRow(0.5, 40, 5), TraceRow(9.0, 10, 3)), "two", "made up")
    bare = simulate_workload(load, setup)
    edged = simulate_workload(load, setup, SimulationOptions(edge=Edge(0.003, 0.001)))
    assert edged.ttft_s.p50 == pytest.approx((bare.ttft_s.p50 or 0) + 0.004)
    assert edged.e2e_s.max == pytest.approx((bare.e2e_s.max or 0) + 0.004)
    assert edged.itl_s.mean == pytest.approx(bare.itl_s.mean)


def test_what_cannot_ever_fit_is_refused_and_the_rest_served() -> None:
    load = Workload((TraceRow(0.0, 5000, 5), TraceRow(0.0, 10, 3)), "two", "made up")
    run = simulate_workload(load, make_setup())
    assert (run.requests.completed, run.requests.failed) == (1, 1)
    assert run.requests_detail is not None and "exceed" in str(run.requests_detail[0]["error"])


def test_one_tenants_five_hundred_long_requests_hold_up_no_other_ones_few() -> None:
    """Three requests behind five hundred of another tenant: as if those were few."""
    many = [TraceRow(0.001 * i, 120, 60, tenant=1) for i in range(500)]
    few = [TraceRow(0.5 + 0.001 * i, 60, 40, tenant=2) for i in range(3)]
    setup = make_setup("recompute", num_workers=1)
    told = simulate_workload(Workload((*many, *few), "told", "made up"), setup)
    as_one = [row._replace(tenant=0) for row in (*many, *few)]
    untold = simulate_workload(Workload(tuple(as_one), "untold", "made up"), setup)
    waits = []
    for run in (told, untold):
        assert run.requests_detail is not None and run.requests.completed == 503
        waits.append(max(float(record["ttft_s"]) for record in run.requests_detail[-3:]))
    assert waits[0] < waits[1] / 20
    assert told.config["event_log_hash"] != untold.config["event_log_hash"]


def test_what_is_open_when_time_is_up_has_failed() -> None:
    run = simulate_workload(workload(), make_setup(), SimulationOptions(until_s=0.3))
    assert run.requests.failed > 0 and run.requests.completed > 0
    assert run.requests.submitted == 100


def test_without_detail_gaps_are_binned_to_about_a_percent() -> None:
    full = simulate_workload(workload(), make_setup("recompute"))
    brief = simulate_workload(workload(), make_setup("recompute"), SimulationOptions(detail=False))
    assert brief.requests_detail is None
    assert brief.ttft_s == full.ttft_s and brief.e2e_s == full.e2e_s
    for name in ("mean", "p50", "p90", "p99", "max"):
        assert getattr(brief.itl_s, name) == pytest.approx(getattr(full.itl_s, name), rel=0.02)
        assert getattr(brief.tpot_s, name) == pytest.approx(getattr(full.tpot_s, name), rel=1e-6)


def test_gap_histogram_against_the_plain_summary() -> None:
    rng = random.Random(0)
    gaps = [rng.lognormvariate(-3.0, 1.0) for _ in range(5000)]
    histogram = GapHistogram()
    for gap in gaps:
        histogram.add(gap)
    plain, binned = summarize(gaps), histogram.summary()
    for name in ("mean", "p50", "p90", "p99", "max"):
        assert getattr(binned, name) == pytest.approx(getattr(plain, name), rel=0.02)
    assert GapHistogram().summary().mean is None


def test_prefixes_are_shared_where_prompts_are_given_and_caching_is_on() -> None:
    setup = make_setup("recompute", num_workers=1, num_blocks=400)
    setup = replace(setup, limits=replace(setup.limits, enable_prefix_caching=True))
    load = Workload(tuple(TraceRow(0.2 * i, 100, 4) for i in range(10)), "ten", "made up")
    shared = PromptMaker(seed=0, low_token_id=8, high_token_id=256, shared_prefix_tokens=64, num_shared_prefixes=1)
    alone = PromptMaker(seed=0, low_token_id=8, high_token_id=256)
    hits = [
        simulate_workload(load, setup, SimulationOptions(prompts=prompts)).events["prefix_cache_hits"]
        for prompts in (shared, alone)
    ]
    assert hits == [9 * 64, 0]


def test_faults_are_part_of_a_run() -> None:
    run = simulate_workload(workload(), make_setup(), SimulationOptions(faults=(Crash(0.2, 1, 0.5),)))
    assert run.requests.completed == 100
    assert run.events["worker_losses"] == 1 and run.events["worker_joins"] == 1


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    simulate_workload(workload(), make_setup(), SimulationOptions(on_progress=lambda *n: seen.append(n)))
    assert seen == [(i, 100) for i in range(1, 101)]


def test_what_a_recording_says_and_no_simulation_heeds_is_noted() -> None:
    plain = Workload((TraceRow(0.0, 40, 5), TraceRow(0.1, 60, 3)), "two", "made up", ("a note",))
    assert not_modelled(plain) == ()
    rows = (TraceRow(0.0, 4000, 5, 3200, True), TraceRow(0.1, 60, 3), TraceRow(0.2, 10, 1, 0, True))
    run = simulate_workload(replace(plain, rows=rows), make_setup())
    assert list(run.config["fairness"]["arrivals"]) == [
        "made up", "a note",
        "3,200 of 4,070 input tokens came from a prefix cache where this was recorded: computed here",
    ]
    assert run.config["workload"]["notes"] == list(run.config["fairness"]["arrivals"])[1:]


@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_a_static_pipeline_has_the_capacity_of_its_poorest_stages(num_workers: int) -> None:
    setup = make_setup("pipeline", num_workers=num_workers)
    run = simulate_workload(workload(num=5), setup)
    # What its groups really hold, at the first sample.
    groups = {name: points[0][1] for name, points in run.series.items() if name.startswith("kv_blocks_total/")}
    held = sum(groups.values()) * setup.limits.block_size
    header = run.config["fairness"]
    assert len(groups) == (num_workers + 1) // 2
    assert header["kv_capacity_tokens"] == header["merged_capacity_tokens"] == held


def test_the_share_of_parameters_is_the_budget_s_unless_it_is_said() -> None:
    setup = make_setup()
    of_budget = setup.shape.parameter_bytes / setup.memory.budget_bytes
    for said, expected in ((None, of_budget), (0.344, 0.344)):
        run = simulate_workload(workload(num=5), setup, SimulationOptions(parameter_share=said))
        assert run.config["fairness"]["parameter_share"] == pytest.approx(expected)


def test_a_full_queue_refuses_as_live_where_it_has_a_limit() -> None:
    load = Workload(tuple(TraceRow(0.0, 40, 20) for _ in range(30)), "at once", "made up")
    setup = make_setup("recompute", num_workers=1)
    setup = replace(setup, limits=replace(setup.limits, max_num_seqs=4))
    assert simulate_workload(load, setup).requests.completed == 30
    run = simulate_workload(load, replace(setup, max_num_queued_reqs=5))
    assert run.requests.rejected > 10 and run.requests.rejected + run.requests.completed == 30
    assert (first_error(run) or "").startswith("The queue is full: 5 requests wait, and 5 may")
