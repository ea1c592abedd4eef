"""Live against simulated: what counts as near, and cores that a whole cluster shares."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from specs import deployment, spec

from jettison.config.files import read_yaml_mapping
from jettison.cost.deployment import deployment_to_document
from jettison.cost.drift import AS_MEASURED, MachineThen
from jettison.cost.hostcosts import HostCosts
from jettison.errors import ConfigError
from jettison.live.yardstick import Reading
from jettison.report.results import RunResult, Summary
from jettison.simulate.cases import cases_of, run_case
from jettison.simulate.spec import parse_spec
from jettison.simulate.sweeps import expand_sweep, set_at
from jettison.simulate.validate_command import check_both_sides, print_comparison, validate_command
from jettison.simulate.validate_live import machine_then
from jettison.simulate.validation import Pair, compare, compare_means, worst
from jettison.simulate.validation_file import read_document

COSTS = HostCosts(
    num_cores=2, core_speeds=(1.0, 0.8), worker_step_s=1e-4, controller_step_s=2e-4, controller_row_s=1e-5,
    controller_request_s=1e-3, controller_token_s=5e-5, controller_tick_s=1e-4, client_request_s=5e-4,
    client_token_s=5e-5, hop_s=3e-5,
)  # fmt: skip


def run(tokens_per_s: float, ttft: float, **events: int) -> RunResult:
    times = Summary(ttft, ttft, ttft, 3 * ttft, 4 * ttft)
    return RunResult("r", ttft_s=times, tpot_s=times, e2e_s=times, output_tokens_per_s=tokens_per_s, events=events)


def test_differences_against_what_is_demanded() -> None:
    pair = Pair("s", "drop", 0, run(100.0, 1.0, drops=2, preemptions=4), run(104.0, 1.07, drops=3, preemptions=6))
    rows = {row.metric: row for row in compare(pair)}
    assert rows["output tokens/s"].difference == pytest.approx(0.04)
    assert rows["output tokens/s"].is_within and not rows["output tokens/s"].is_within_goal
    assert rows["TPOT mean"].is_within and rows["TTFT mean"].is_within_goal
    assert rows["drops"].is_within and not rows["preemptions"].is_within
    assert worst(list(rows.values())).metric == "preemptions"
    assert rows["drops"].as_dict() == {
        "scenario": "s, drop, seed 0", "metric": "drops", "real": 2.0, "simulated": 3.0, "difference": 1.0,
        "within": True, "within_goal": True, "severity": 1.0,
    }


def test_counts_of_several_seeds_are_apart_by_the_seed_that_is_most() -> None:
    pairs = [
        Pair("s", "drop", 0, run(100.0, 1.0, drops=2), run(100.0, 1.0, drops=4)),
        Pair("s", "drop", 1, run(100.0, 1.0, drops=4), run(100.0, 1.0, drops=2)),
    ]
    rows = {row.metric: row for row in compare_means(pairs)}
    assert rows["drops"].real == rows["drops"].simulated == 3.0, "their means are equal"
    assert abs(rows["drops"].difference) == 2.0 and not rows["drops"].is_within


@pytest.mark.parametrize(("speed", "warns"), [(1.0, False), (0.85, False), (1.19, False), (1.4, True), (0.7, True)])
def test_a_machine_that_has_changed_since_its_calibration_is_named(speed: float, warns: bool) -> None:
    then = MachineThen(((0.0, speed), (3.0, speed)), (1.0, 0.9), 1.0)
    console = Console(record=True, width=200)
    print_comparison([Pair("s", "drop", 0, run(100.0, 1.0), run(100.0, 1.0), then=then)], console)
    assert ("times as fast as when they were calibrated" in console.export_text()) is warns


def test_means_are_over_seeds_of_the_same_scenario() -> None:
    pairs = [
        Pair("s", "drop", seed, run(100.0, 1.0 + seed), run(100.0, 1.5)) for seed in (0, 1)
    ] + [Pair("s", "recompute", 0, run(100.0, 1.0), run(100.0, 1.0))]
    rows = {(row.scenario, row.metric): row for row in compare_means(pairs)}
    assert rows["s, drop", "TTFT mean"].difference == pytest.approx(0.0)
    assert rows["s, recompute", "TTFT mean"].real == 1.0


def test_what_one_side_does_not_have_is_not_compared() -> None:
    lone = replace(run(100.0, 1.0), tpot_s=Summary())
    assert "TPOT mean" not in {row.metric for row in compare(Pair("s", "d", 0, lone, run(100.0, 1.0)))}


# --- what the machine was meanwhile

COSTS_4 = HostCosts(num_cores=4, core_speeds=(1.0, 0.9, 0.8, 0.7))
AROUND = (
    Reading(0.8, 0.6, 1.2, ((0.0, 1.0),), ((1.0, 2.0),), ((1, 0.8), (16, 1.2)), ((1, 1.2),)),
    Reading(1.0, 0.84, 1.0, ((10.0, 11.0),), ((11.0, 12.0),), ((1, 1.0), (16, 1.0), (256, 0.8)),
        ((1, 1.4), (64, 1.0))),
)


def test_a_run_is_as_fast_as_the_yardstick_around_it_and_the_probes_in_it() -> None:
    probes = [(0.5, 1.0), (1.0, 1.0), (4.0, 0.5), (8.0, 2.0), (9.5, 7.0), (11.0, 1.0)]
    then = machine_then((3.0, 9.0), probes, AROUND, AROUND, COSTS, 2)
    assert then.speed == ((0.0, pytest.approx(0.9 / 0.5)), (3.0, pytest.approx(0.9 / 2.0)))
    assert then.core_speeds == pytest.approx((1.0, 0.8)), "0.72 of 0.9"
    assert then.controller_factor == pytest.approx(1.1)
    costs = then.costs(COSTS)
    assert costs.core_speeds == then.core_speeds
    assert costs.controller_step_s == pytest.approx(1.1 * COSTS.controller_step_s)
    assert costs.worker_step_s == COSTS.worker_step_s
    assert dict(costs.step_shape) == pytest.approx({1: 0.9, 16: 1.1, 256: 1.0})
    assert dict(costs.crowded_shape) == pytest.approx({1: 1.3, 64: 1.1})


def test_shapes_are_those_of_all_layings_together() -> None:
    steeper = replace(AROUND[0], alone=9.0, step_shape=((1, 1.2), (16, 1.1)), crowded_shape=((1, 1.6), (64, 1.0)))
    then = machine_then((3.0, 9.0), [], AROUND, [*AROUND, steeper], COSTS, 2)
    assert dict(then.step_shape) == pytest.approx({1: 1.0, 16: 1.1, 256: (1.2 + 0.8 + 1.1) / 3})
    assert dict(then.crowded_shape) == pytest.approx({1: 1.4, 64: (1.2 + 1.0 + 1.0) / 3})
    assert then.speed == ((0.0, pytest.approx(0.9)),), "and speeds are of those around the run"


def test_what_was_withheld_makes_a_run_slower_than_processor_times_tell() -> None:
    probes = [(4.0, 1.0), (7.0, 1.0), (11.0, 1.0)]
    taken = [(3.0, 6.0, 4.5, 1.5), (6.0, 9.0, 4.5, 0.0), (9.0, 11.0, 0.0, 1.5)]
    then = machine_then((3.0, 9.0), probes, AROUND, AROUND, COSTS, 2, taken)
    assert then.speed == ((0.0, pytest.approx(0.9 * 0.75)), (3.0, pytest.approx(0.9)))
    assert then.had_share == pytest.approx(9.0 / 10.5)


def test_without_probes_a_run_is_as_fast_as_the_yardstick_around_it() -> None:
    assert machine_then((3.0, 9.0), [(1.0, 0.01)], AROUND, AROUND, COSTS, 2).speed == ((0.0, pytest.approx(0.9)),)
    assert AS_MEASURED.costs(COSTS) == COSTS


def test_only_as_many_cores_are_crowded_as_instances_have_threads() -> None:
    two, one = (machine_then((3.0, 9.0), [], AROUND, AROUND, COSTS_4, number).core_speeds for number in (2, 1))
    assert two == pytest.approx((1.0, 0.8, 0.8 * 8 / 9, 0.7 * 8 / 9)) and one == COSTS_4.core_speeds
    threads = replace(COSTS_4, threads_per_worker=2)
    assert machine_then((3.0, 9.0), [], AROUND, AROUND, threads, 2).core_speeds[-1] == pytest.approx(0.8)


def test_a_file_of_another_version_is_no_document(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text, why in (("{}", "no result"), ("[", "no result"), ('{"format": "jettison-validation-1"}', "too little")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            read_document(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_document(tmp_path / "none.json")


# --- simulated on cores that are shared


def shared(
    costs: HostCosts = COSTS, instances: int = 2, then: MachineThen = AS_MEASURED, **changes: Any
) -> list[RunResult]:
    described = deployment_to_document(deployment(costs=costs, num_instances=instances))
    cases = cases_of(spec(cluster={"description": described}, **changes), "file")
    return [run_case(case, then=then) for case in cases]


def test_everyone_is_served_and_the_same_again() -> None:
    first, again = shared(), shared()
    for one, other in zip(first, again, strict=True):
        assert one.requests.completed == one.requests.submitted > 0
        assert one.config["event_log_hash"] == other.config["event_log_hash"]
    assert first[1].events["drops"] >= 1


@pytest.mark.parametrize("then", [
    MachineThen(speed=((0.0, 0.8),)), MachineThen(core_speeds=(1.0, 0.5)), MachineThen(controller_factor=1.5),
    MachineThen(step_shape=((1, 1.3), (256, 1.2))), MachineThen(crowded_shape=((1, 1.5), (256, 1.4))),
])
def test_all_that_a_machine_was_then_is_simulated(then: MachineThen) -> None:
    (usual,), (slower,) = shared(variants=["recompute"]), shared(variants=["recompute"], then=then)
    assert usual.tpot_s.mean and slower.tpot_s.mean
    assert slower.tpot_s.mean > 1.01 * usual.tpot_s.mean


def test_sharing_costs_time_and_more_cores_give_it_back() -> None:
    few = shared(variants=["recompute"])[0]
    many = shared(replace(COSTS, num_cores=8, core_speeds=(1.0,) * 8), variants=["recompute"])[0]
    alone = run_case(cases_of(spec(variants=["recompute"]), "file")[0])
    assert alone.tpot_s.mean and many.tpot_s.mean and few.tpot_s.mean
    assert alone.tpot_s.mean < many.tpot_s.mean < few.tpot_s.mean
    assert few.requests.completed == many.requests.completed == alone.requests.completed


def test_more_instances_than_cores_do_not_compute_more() -> None:
    """Of compute there is no more; memory there is."""
    load = {"rows": [[0.0, 20, 60]] * 24}
    two, six = (shared(instances=n, workload=load, variants=["recompute"])[0] for n in (2, 6))
    assert six.output_tokens_per_s < 1.2 * two.output_tokens_per_s


def test_what_steps_take_while_serving_counts() -> None:
    """With cores to spare a calm request's tokens come as much later as its steps take longer."""
    calm = {"workload": {"rows": [[0.0, 20, 60]]}, "variants": ["recompute"]}
    enough = HostCosts(num_cores=16, core_speeds=(1.0,) * 16)
    usual, slower, shaped = (
        shared(costs, **calm)[0]
        for costs in (enough, replace(enough, step_factor=1.5), replace(enough, step_shape=((1, 1.5), (64, 0.9))))
    )
    assert usual.tpot_s.mean and slower.tpot_s.mean
    assert slower.tpot_s.mean / usual.tpot_s.mean == pytest.approx(1.5, rel=0.02)
    assert shaped.tpot_s.mean == slower.tpot_s.mean, "steps of one token"


@pytest.mark.parametrize(
    ("cost", "later_s"), [("worker_stage_s", 2e-3), ("controller_stage_s", 0.5e-3)], ids=lambda value: str(value)
)
def test_stages_of_a_pipeline_take_more_of_workers_and_controller(cost: str, later_s: float) -> None:
    """Two stages beside their steps; of the controller only the half that is a later command is waited for."""
    calm = {"workload": {"rows": [[0.0, 20, 60]]}, "variants": ["pipeline", "recompute"]}
    enough = HostCosts(num_cores=16, core_speeds=(1.0,) * 16)
    usual, more = (shared(costs, **calm) for costs in (enough, replace(enough, **{cost: 1e-3})))
    (piped, alone), (slower, as_before) = ([run.tpot_s.mean or 0.0 for run in runs] for runs in (usual, more))
    assert slower - piped == pytest.approx(later_s, rel=0.05) and as_before == alone


def test_who_hears_something_after_a_rest_hears_it_later() -> None:
    calm = {"workload": {"rows": [[0.0, 20, 60]]}, "variants": ["recompute"]}
    enough = HostCosts(num_cores=16, core_speeds=(1.0,) * 16)
    usual, late = (shared(replace(enough, client_wake_s=wake_s), **calm)[0] for wake_s in (0.0, 3e-4))
    assert usual.ttft_s.mean and late.ttft_s.mean
    assert late.ttft_s.mean - usual.ttft_s.mean == pytest.approx(3e-4, rel=0.01)


def test_costs_of_nothing_on_cores_enough_change_next_to_nothing() -> None:
    free = HostCosts(num_cores=16, core_speeds=(1.0,) * 16, hop_s=50e-6)
    (with_cores,) = shared(free, variants=["recompute"])
    alone = run_case(cases_of(spec(variants=["recompute"]), "file")[0])
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        for which in ("mean", "p50", "p99"):
            one, other = getattr(getattr(with_cores, name), which), getattr(getattr(alone, name), which)
            assert one == pytest.approx(other, rel=0.02), (name, which)


def test_workers_that_die_while_they_share_leave_nobody_behind() -> None:
    faults = [{"kind": "crash", "at_s": 0.25, "worker": 1, "restart_after_s": 0.3}]
    for one in shared(faults=faults):
        assert one.requests.completed == one.requests.submitted
        assert one.events["worker_losses"] == 1


SPECS = sorted((Path(__file__).parents[2] / "benchmarks" / "validation").glob("*.yaml"))


def test_the_specs_of_the_benchmark_are_the_same_on_both_sides() -> None:
    assert len(SPECS) == 6
    for path in SPECS:
        for point in expand_sweep(read_yaml_mapping(path, "the spec")):
            check_both_sides(parse_spec(point.raw, path.stem))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("faults", [{"kind": "crash", "at_s": 1, "worker": 0}]),
        ("faults", {"number": 1, "span_s": 3}),
        ("run.until_s", 10),
        ("run.observe_interval_s", 0.1),
        ("timing.noise", 0.1),
        ("timing.command_s", 0.001),
        ("cluster.link.gbps", 10),
        ("cluster.link.latency_us", 3),
    ],
)
def test_what_would_act_on_one_side_only_is_refused(place: str, value: object, tmp_path: Path) -> None:
    raw: dict[str, Any] = read_yaml_mapping(SPECS[0], "the spec")
    for swept in (False, True):
        changed = dict(raw, cluster=dict(raw["cluster"]), **({"sweep": {place: [value]}} if swept else {}))
        if not swept:
            set_at(changed, place, value)
        with pytest.raises(ConfigError, match="acts on simulated runs only") as told:
            validate_command(changed, "x", tmp_path)
        assert place.startswith(str(told.value).split()[0])
    assert not list(tmp_path.iterdir()), "nothing is made or measured first"
