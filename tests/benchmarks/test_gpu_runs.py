"""What `gpu overload`, `faults`, `price`, `peer` and `foreseen` do, without a card: loads, rows, checks, one engine."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from benchmarks.gpu import check, faults, foreseen, overload, peer
from benchmarks.gpu.engine import config_for
from benchmarks.gpu.replay import PolicyEngine, at_once, measured_speed, replay
from benchmarks.gpu.results import Results
from benchmarks.gpu.shapes import TINY, folder_of
from jettison.core.ladder.lists import overload_name
from jettison.cost.speed import MachineSpeed
from jettison.live.engine.assembly import assemble
from jettison.live.engine.deployed import deployment_of
from jettison.report.results import RequestRecord, build_run
from jettison.simulate.calibrate import peak_demand_tokens
from jettison.workload.conditions import capacities

OPTIONS = argparse.Namespace(
    device="cpu", tiny=True, instances=2, seconds_a_policy=4.0, seed=0, trace=None, requests=5, rate=6.0, seconds=8.0,
    overload_trigger="forecast", timeline=None,
)


@pytest.fixture
def models(tmp_path):
    for shape, layout in TINY.items():
        layout.write(folder_of(tmp_path, shape))
    return tmp_path


def row(p99_s: float, load: float = 0.5, **events: float) -> dict:
    return {"requests": 10, "unanswered": 0, "tokens_per_s": 1.0, "ttft_p50_s": 0.1, "ttft_p99_s": p99_s,
            "tpot_p50_s": 0.1, "tpot_p99_s": 0.1, "end_to_end_p50_s": 1.0, "end_to_end_p99_s": 2.0,
            "events": events, "fairness": {"mean_load": load}}  # fmt: skip


class TestOverload:
    def test_a_burst_has_as_many_users_as_the_peak_asks_for(self, models):
        deployment = deployment_of(assemble(overload.config_of(models, OPTIONS)))
        capacity, _ = capacities(deployment)
        speed = MachineSpeed(20_000.0, 0.001)
        base = overload.base_load(OPTIONS, 300)
        assert base.duration_s == pytest.approx(0.95 * 4.0)
        load = overload.with_peak(base, 1.4 * capacity, speed, deployment, 0)
        assert peak_demand_tokens(load, speed, deployment) == pytest.approx(1.4 * capacity, rel=0.15)

    def test_more_users_come_at_the_same_moments_and_fewer_are_drawn(self):
        base = overload.base_load(OPTIONS, 300)
        more, fewer = overload.with_users(base, 2.0, 0), overload.with_users(base, 0.5, 0)
        assert len(more.rows) == 2 * len(base.rows) and 0.3 * len(base.rows) < len(fewer.rows) < 0.7 * len(base.rows)
        assert more.rows[-1].arrival_s == pytest.approx(base.rows[-1].arrival_s, abs=0.5)

    def test_a_trace_s_slice_is_replayed_in_the_seconds_of_a_policy(self, tmp_path):
        trace = tmp_path / "trace.csv"
        lines = [f"2023-11-16 18:15:{second:02d}.0000000,100,40\n" for second in range(0, 60, 2)]
        trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
        told = {"trace": trace, "format": None, "unit": None, "slice": 20.0, "slice_index": 1, "length_scale": 0.5}
        load = overload.base_load(argparse.Namespace(**vars(OPTIONS) | told), 300)
        assert len(load.rows) == 10 and {(r.input_tokens, r.output_tokens) for r in load.rows} == {(50, 20)}
        assert load.duration_s == pytest.approx(0.95 * 4.0, rel=0.15)

    def test_checks_have_the_issue_s_targets_and_say_what_card_they_are_of(self):
        deployment = SimpleNamespace(shape=SimpleNamespace(parameter_bytes=764), budget_bytes=1000)
        checks = overload.checks_of({"recompute": row(6.0, 0.9), "drop": row(1.0, drops=2, restores=1)}, deployment)
        found = {check["name"].partition(" (")[0]: check for check in checks}
        assert all(overload.ONE_CARD in check["name"] for check in checks)
        assert [found[name]["pass"] for name in ("parameters' share of memory", "mean load", "drops seen",
                "restores seen", "P99 TTFT, recompute's over drop's")] == [True] * 5  # fmt: skip
        assert found["mean load"]["value"] == 0.5, "a baseline's own queue is no load"
        assert found["drop: TTFT P99, s"]["target"] is None
        worse = overload.checks_of({"recompute": row(2.0), "drop": row(1.0)}, deployment)
        assert [check["pass"] for check in worse if check["pass"] is not None].count(False) == 3


@pytest.mark.live
async def test_policies_follow_each_other_over_the_same_workers(models):
    engine = PolicyEngine(overload.config_of(models, OPTIONS))
    try:
        await engine.start()
        pids = [worker.pid for worker in engine.snapshot().workers]
        speed = await measured_speed(engine, (2, 4), 48)
        assert speed.prefill_tokens_per_s > 0 and speed.decode_base_s > 0
        for policy in ("recompute", "drop", "swap", "migrate", "drop"):
            engine.serve_by(policy)
            assert overload_name(engine.core.params.rungs, static_pipeline=False) == policy
            if policy == "drop":
                engine.orders.request_drop()
            run = await replay(engine, at_once([(40, 30)] * 8, "at once"), policy, most_s=60.0)
            assert (run.requests.completed, run.requests.submitted) == (8, 8)
            assert run.config["fairness"]["peak_demand_tokens"] > 0 and run.output_tokens_per_s > 0
            assert engine.totals()["drops"] == (policy == "drop") and await engine.until_whole(30.0)
        assert [worker.pid for worker in engine.snapshot().workers] == pids
    finally:
        await engine.close()


@pytest.mark.live
async def test_what_has_not_ended_in_time_is_not_answered(models):
    engine = PolicyEngine(config_for("7b", models, OPTIONS, num_threads=1))
    try:
        await engine.start()
        run = await replay(engine, at_once([(8, 4), (8, 8000)], "at once"), "cut off", most_s=0.5)
        assert run.requests.unanswered == 1 and run.requests.completed == 1
        assert engine.core.state.is_idle()
    finally:
        await engine.close()


def test_tokens_that_differ_or_are_missing_are_counted():
    assert faults.differing([[1, 2, 3], [4]], [[1, 2, 3], [4]]) == 0
    assert faults.differing([[1, 9, 3], [4]], [[1, 2, 3], [4, 5]]) == 2


def test_an_exchange_has_its_target_where_it_is_between_two_cards(tmp_path, capsys):
    results = Results(str(tmp_path / "out.json"))
    for rate, num_cards in ((3.6, 0), (3.6, 1), (3.6, 2), (24.0, 2)):
        faults.tell_rate(rate, num_cards, results)
        checks = check.measured(tmp_path / "out.json")
        assert [(each.target, each.passed) for each in checks] == [("20.0", rate > 20.0)] * (num_cards > 1)
    assert "in turns on one card, GB/s: 3.6 \n" in capsys.readouterr().out


def test_differences_of_a_simulation_have_the_issue_s_bounds(tmp_path, capsys):
    def run(name: str, factor: float):
        record = RequestRecord(0, 0.0, 8, 4, "completed", 0.0, factor, 3 * factor, 4, [factor] * 3)
        return build_run(name, [record])

    results = Results(str(tmp_path / "out.json"))
    foreseen.tell_differences(run("live", 1.0), run("again", 1.05), run("simulated", 1.15), results)
    said = capsys.readouterr().out
    assert "TTFT mean, simulated over live: 0.15 (target 0.1)" in said
    assert "TTFT P99, simulated over live: 0.15 (target 0.2)" in said and "live again over live: 0.05" in said


def test_the_peer_gets_the_bench_s_first_requests():
    assert peer.lengths(OPTIONS) == peer.lengths(argparse.Namespace(tiny=True, requests=9))[:5]
    assert all(2 <= a <= 24 and 2 <= b <= 24 for a, b in peer.lengths(OPTIONS))
