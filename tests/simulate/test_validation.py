"""What is compared of a live run, a second one and a simulation; what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jettison.config.files import read_yaml_mapping
from jettison.cost.model import CostModel
from jettison.errors import ConfigError
from jettison.report.results import RunResult, Summary
from jettison.simulate.spec import parse_spec
from jettison.simulate.sweeps import expand_sweep, set_at
from jettison.simulate.validate_command import check_both_sides, print_comparison, validate_command
from jettison.simulate.validation import Trio, compare, compare_means
from jettison.simulate.validation_file import read_document

STEPS = CostModel(2, 1e-9, 1e-8, 2e-6, 5e-5, 3e-4, 0.0, 0.0, 5e-5, 2e-6)


def run(tokens_per_s: float, ttft: float, **events: int) -> RunResult:
    times = Summary(ttft, ttft, ttft, 3 * ttft, 4 * ttft)
    return RunResult("r", ttft_s=times, tpot_s=times, e2e_s=times, output_tokens_per_s=tokens_per_s, events=events)


def trio(live: RunResult, again: RunResult, simulated: RunResult, variant: str = "drop", seed: int = 0) -> Trio:
    return Trio("s", variant, seed, live, again, simulated, STEPS)


def test_simulation_and_second_live_run_are_both_laid_beside_the_first() -> None:
    one = trio(
        run(100.0, 1.0, drops=2, preemptions=4), run(98.0, 1.2, drops=2, preemptions=1),
        run(104.0, 0.9, drops=3, preemptions=6),
    )  # fmt: skip
    rows = {row.metric: row for row in compare(one)}
    assert rows["output tokens/s"].difference == pytest.approx(0.04)
    assert rows["output tokens/s"].floor == pytest.approx(-0.02)
    assert rows["TTFT mean"].difference == pytest.approx(-0.1) and rows["TTFT P99"].floor == pytest.approx(0.2)
    assert (rows["preemptions"].difference, rows["preemptions"].floor) == (2.0, -3.0)
    assert rows["drops"].as_dict() == {
        "scenario": "s, drop, seed 0", "metric": "drops", "live": 2.0, "live_again": 2.0, "simulated": 3.0,
        "is_count": True, "unit": "", "difference": 1.0, "floor": 0.0,
    }


def test_means_are_over_seeds_of_the_same_scenario() -> None:
    trios = [trio(run(100.0, 1.0 + seed), run(100.0, 1.2), run(100.0, 1.5), seed=seed) for seed in (0, 1)]
    trios.append(trio(run(100.0, 1.0), run(100.0, 1.0), run(100.0, 1.0), "recompute"))
    rows = {(row.scenario, row.metric): row for row in compare_means(trios)}
    assert rows["s, drop", "TTFT mean"].difference == pytest.approx(0.0)
    assert rows["s, drop", "TTFT mean"].floor == pytest.approx(-0.2)
    assert rows["s, recompute", "TTFT mean"].live == 1.0


def test_what_one_of_the_runs_does_not_have_is_not_compared() -> None:
    whole = run(100.0, 1.0)
    lone = replace(whole, tpot_s=Summary())
    for three in ((lone, whole, whole), (whole, lone, whole), (whole, whole, lone)):
        assert "TPOT mean" not in {row.metric for row in compare(trio(*three))}


def test_a_live_run_without_any_is_no_division() -> None:
    empty, some = run(0.0, 1.0), run(5.0, 1.0)
    rows = {row.metric: row for row in compare(trio(empty, empty, some))}
    assert rows["output tokens/s"].floor == 0.0 and rows["output tokens/s"].difference == float("inf")


def test_the_table_shows_both_differences() -> None:
    console = Console(record=True, width=200)
    print_comparison([trio(run(100.0, 1.0), run(98.0, 1.2), run(104.0, 0.9))], console)
    text = console.export_text()
    first = next(line for line in text.splitlines() if "output tokens/s" in line)
    assert first.split()[-2:] == ["+4.0%", "-2.0%"] and "no simulation can be asked for less" in text


def test_a_file_of_another_version_is_no_document(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text, why in (("{}", "no result"), ("[", "no result"), ('{"format": "jettison-validation-3"}', "too little")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            read_document(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_document(tmp_path / "none.json")


# --- specs

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
        ("workload.offline", {"lengths": "sharegpt", "unfinished": 4}),
        ("workload.batches", [{"lengths": "sharegpt", "num_requests": 4}]),
        ("run.until_s", 10),
        ("run.observe_interval_s", 0.1),
        ("timing.noise", 0.1),
        ("timing.command_s", 0.001),
        ("cluster.link.gbps", 10),
        ("cluster.link.latency_us", 3),
        ("settings.max_instances", 9),
    ],
)
def test_what_would_act_on_one_side_only_is_refused(place: str, value: object, tmp_path: Path) -> None:
    raw: dict[str, Any] = read_yaml_mapping(SPECS[0], "the spec")
    for swept in (False, True):
        changed = {**raw, "cluster": dict(raw["cluster"]), "workload": dict(raw["workload"])}
        changed |= {"sweep": {place: [value]}} if swept else {}
        if not swept:
            set_at(changed, place, value)
        with pytest.raises(ConfigError, match="acts on simulated runs only") as told:
            validate_command(changed, "x", tmp_path)
        assert place.startswith(str(told.value).split()[0])
    assert not list(tmp_path.iterdir()), "nothing is made or measured first"
