"""The smallest cluster: the search against trying everything, and `jettison plan` on a little one."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from specs import spec

from jettison.errors import ConfigError
from jettison.report.results import RunResult
from jettison.simulate import batch
from jettison.simulate.batch import run_cases
from jettison.simulate.cases import Case, cases_of, run_case
from jettison.simulate.sizing import Found, Objective, Sizing, Wanted, point_key, search, size_all, with_instances
from jettison.simulate.sizing_command import size_command
from jettison.simulate.sizing_report import OTHER_SIZES, pictured_runs, trials_table


@pytest.fixture(autouse=True, scope="module")
def _each_case_is_simulated_once() -> Iterator[None]:
    """The same case gives the same result (test_cases has that), and these tests ask for the same ones all the time."""
    known: dict[str, RunResult] = {}

    def run_once(case: Case, *arguments: Any, **options: Any) -> RunResult:
        name = case.name.partition(" instances=")[0]
        key = json.dumps([name, case.raw, case.seed, case.factor, case.base_dir], sort_keys=True)
        if key not in known:
            known[key] = run_case(case, *arguments, **options)
        run = copy.deepcopy(known[key])
        run.name = case.name
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "run_case", run_once)
        yield


def found_by(holds: list[bool]) -> Found:
    """Run a search; ``holds[n - 1]`` answers for n."""
    running = search(len(holds))
    asked = next(running)
    while True:
        assert asked and all(1 <= n <= len(holds) for n in asked)
        try:
            asked = running.send({n: holds[n - 1] for n in asked})
        except StopIteration as end:
            found: Found = end.value
            return found


@given(smallest=st.integers(1, 70), largest=st.integers(1, 70))
def test_where_more_never_holds_less_the_search_finds_what_trying_all_finds(smallest: int, largest: int) -> None:
    found = found_by([n >= smallest for n in range(1, largest + 1)])
    assert found.smallest == (smallest if smallest <= largest else None)
    assert not found.exceptions
    assert len(found.held) <= 2 * largest.bit_length() + 3


@given(holds=st.lists(st.booleans(), min_size=1, max_size=40))
def test_whatever_holds_what_is_found_was_tried_and_its_neighbours_below_fail(holds: list[bool]) -> None:
    found = found_by(holds)
    assert all(holds[n - 1] == answer for n, answer in found.held.items())
    if found.smallest is None:
        assert not holds[-1]
        return
    assert holds[found.smallest - 1]
    assert not any(holds[n - 1] for n in range(max(1, found.smallest - 2), found.smallest))
    assert found.exceptions == [n for n in found.held if n > found.smallest and not holds[n - 1]]


def test_sizing_agrees_with_every_number_of_instances_tried() -> None:
    raw = spec(seeds=2)
    objective = Objective(ttft_p99_s=0.25)
    wanted = {point_key({}): Wanted(objective, 6)}
    sizings = size_all(cases_of(raw, "file"), wanted, lambda cases: run_cases(cases, num_processes=1))
    for index, sizing in enumerate(sizings):
        smallest = None
        for number in range(1, 7):
            tried = cases_of({**raw, "cluster": {**raw["cluster"], "instances": number}}, "file")
            if objective.holds(run_cases([c for c in tried if c.variant == sizing.variant], num_processes=1)):
                smallest = number
                break
        assert sizing.found.smallest == smallest, sizing.variant
        assert [run.config["seed"] for run in sizing.runs] == ([] if smallest is None else [0, 1])
        assert all(run.name.endswith(f" instances={smallest}") for run in sizing.runs)
        assert smallest is None or objective.holds(sizing.runs)
        assert sizing.variant == ("recompute", "drop")[index]
    recompute, drop = sizings
    assert drop.best.num_instances <= recompute.best.num_instances


def test_the_command_says_what_it_found_and_what_it_costs(tmp_path: Path) -> None:
    console = Console(record=True, width=160)
    out = tmp_path / "plan.json"
    size_command(
        spec(), "little", Path(), slo_ttft_p99_s=0.5, max_instances=6, price_per_gpu_hour=2.0, json_out=out,
        num_processes=1, console=console,
    )
    text = console.export_text()
    assert "smallest cluster with P99 TTFT 0.5 s" in text and "cost a day" in text
    assert re.search(r"mean load \(recompute instances=\d, drop instances=\d\): \d\.\d+, \d\.\d+; capacity", text)
    assert "TTFT: from the scheduled arrival" in text and "client lag" not in text
    document = json.loads(out.read_text())
    assert [row["variant"] for row in document["rows"]] == ["recompute", "drop"]
    for row in document["rows"]:
        assert row["cost_per_day"] == pytest.approx(row["instances"] * 48.0)
        assert {trial["instances"]: trial["holds"] for trial in row["trials"]}[row["instances"]]
        conditions = dict(row["conditions"])
        assert {"mean load (mean KV demand / capacity)", "peak demand / undropped capacity"} <= set(conditions)
        assert not any(value in ("", "not stated") for label, value in conditions.items() if "demand" in label)


def test_the_page_has_what_was_found_what_was_tried_and_the_runs_of_the_smallest(tmp_path: Path) -> None:
    console, page = Console(record=True, width=160), tmp_path / "new" / "plan.html"
    sizings = size_command(
        spec(seeds=2), "little", Path(), slo_ttft_p99_s=0.5, max_instances=6, html_out=page, num_processes=1,
        console=console,
    )
    text = page.read_text()
    assert "jettison plan: little" in text and "data:image/svg" in text
    places = [text.index(part) for part in ("To hold P99 TTFT 0.5 s, recompute needs", "<h2>smallest cluster with P99",
                                            "Eight figures", "clusters tried")]
    assert places == sorted(places)
    found = [s for s in sizings if s.found.smallest is not None]
    named = {f"{s.variant} seed={seed} instances={s.found.smallest}" for s in found for seed in (0, 1)}
    assert set(re.findall(r"\w+ seed=\d instances=\d+", text)) == named
    assert (OTHER_SIZES in text) == (len({s.found.smallest for s in found}) == 2)
    assert f"{page} pictures" not in console.export_text()
    tried = trials_table(sizings)
    expected = [("yes" if t.holds else "no") for s in sizings for _, t in sorted(s.trials.items())]
    assert [row[tried.headers.index("holds")] for row in tried.rows] == expected


def test_runs_are_by_seed_first_so_that_a_cut_keeps_every_variant() -> None:
    def sizing(variant: str, smallest: int | None, num_seeds: int) -> Sizing:
        runs = [RunResult(f"{variant} {seed}") for seed in range(num_seeds)]
        return Sizing(variant, "drop", {}, Wanted(Objective(1.0), 4), Found(smallest, {}), {}, runs)

    found = pictured_runs([sizing("a", 2, 3), sizing("b", None, 0), sizing("c", 1, 3)])
    assert [run.name for run in found] == ["a 0", "c 0", "a 1", "c 1", "a 2", "c 2"]
    assert pictured_runs([]) == []


def test_what_no_cluster_holds_is_one_line_after_everything_that_was_tried(tmp_path: Path) -> None:
    console, out, page = Console(record=True, width=160), tmp_path / "plan.json", tmp_path / "plan.html"
    with pytest.raises(ConfigError, match=r"^P99 TTFT 1e-06 s is not reached with 2 instances: \w+ comes to P99 TTFT"):
        size_command(
            spec(), "little", Path(), slo_ttft_p99_s=1e-6, max_instances=2, num_processes=1, json_out=out,
            html_out=page, console=console,
        )
    text = console.export_text()
    assert text.count("more than 2") == 2 and "parameters" in text
    for row in json.loads(out.read_text())["rows"]:
        assert row["instances"] is None and [trial["instances"] for trial in row["trials"]] == [1, 2]
        assert not any(trial["holds"] for trial in row["trials"])
    assert "clusters tried" in page.read_text()
    assert set(re.findall(r"\w+ instances=\d+", page.read_text())) == {"recompute instances=2", "drop instances=2"}


def test_an_objective_is_needed() -> None:
    with pytest.raises(ConfigError, match="an objective is missing"):
        size_command(spec(), "little", Path())


def planned(tmp_path: Path, raw: dict[str, Any], **flags: Any) -> tuple[dict[str, Any], str]:
    """The document of ``plan``, and what it prints."""
    console, out = Console(record=True, width=160), tmp_path / "plan.json"
    size_command(raw, "little", Path(), json_out=out, num_processes=1, console=console, **flags)
    return json.loads(out.read_text()), console.export_text()


def test_each_point_of_a_sweep_has_its_own_objective_price_and_end(tmp_path: Path) -> None:
    raw = spec(
        variants=["recompute"], plan={"slo_ttft_p99_s": 9.0, "max_instances": 6},
        sweep={"plan.slo_ttft_p99_s": [0.05, 5.0], "plan.price_per_gpu_hour": [1.0, 2.0]},
    )
    document, text = planned(tmp_path, raw)
    assert "smallest cluster with its point's objective" in text and document["objective"] is None
    rows = document["rows"]
    assert [row["objective"]["ttft_p99_s"] for row in rows] == [0.05, 0.05, 5.0, 5.0]
    assert rows[0]["instances"] is None or rows[0]["instances"] > rows[2]["instances"]
    for cheap, dear in (rows[:2], rows[2:]):
        assert cheap["instances"] == dear["instances"]
        if cheap["instances"]:
            assert dear["cost_per_day"] == pytest.approx(2 * cheap["cost_per_day"])
    for row in rows:
        limit = row["objective"]["ttft_p99_s"]
        for trial in row["trials"]:
            assert trial["holds"] == (trial["completed"] == trial["submitted"] and trial["ttft_p99_s"] <= limit)

    by_slo, _ = planned(tmp_path, spec(variants=["recompute"], sweep={"slo.ttft_s": [4.0, 5.0]}), max_instances=4)
    assert [row["objective"]["ttft_p99_s"] for row in by_slo["rows"]] == [4.0, 5.0]
    ends = spec(variants=["recompute"], sweep={"plan.max_instances": [1, 3]})
    document, _ = planned(tmp_path, ends, slo_ttft_p99_s=2.0)
    assert document["objective"] == {"ttft_p99_s": 2.0, "tpot_p99_s": None}
    for row, end in zip(document["rows"], (1, 3), strict=True):
        assert row["max_instances"] == end and max(t["instances"] for t in row["trials"]) <= end


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"sweep": {"cluster.instances": [4, 8]}}, {"slo_ttft_p99_s": 1.0}, "sweep.cluster.instances: `plan` looks"),
        ({"sweep": {"plan.slo_ttft_p99_s": [1, 2]}}, {"slo_ttft_p99_s": 1.0},
         "sweep.plan.slo_ttft_p99_s: --slo-ttft-p99 is given and beats it at every point"),
        ({"sweep": {"plan.price_per_gpu_hour": [1, 2]}}, {"slo_ttft_p99_s": 1.0, "price_per_gpu_hour": 2.0},
         "sweep.plan.price_per_gpu_hour: --price-per-gpu-hour is given"),
        ({"sweep": {"slo.tpot_s": [1, 2]}, "plan": {"slo_tpot_p99_s": 1.0}}, {},
         "sweep.slo.tpot_s: plan.slo_tpot_p99_s is given and beats it"),
        ({"sweep": {"slo.ttft_s": [None, 2]}}, {}, "an objective is missing"),
    ],
)  # fmt: skip
def test_sweeps_that_would_change_nothing_but_labels_are_refused(
    changes: dict[str, Any], flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        size_command(spec(**changes), "little", Path(), **flags)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


@pytest.mark.parametrize("said", ["settings", "variant", "description", "sweep"])
@pytest.mark.parametrize("key", ["min_instances", "max_instances"])
def test_instances_that_come_and_go_are_refused_before_the_search(said: str, key: str, tmp_path: Path) -> None:
    settings = {key: 8}
    raw = spec(timing={"start_s": 5}, cluster={**spec()["cluster"], "instances": 8})
    if said == "settings":
        raw["settings"] |= settings
    elif said == "variant":
        raw["variants"] = [{"policy": "drop", "settings": settings}]
    elif said == "sweep":
        raw["sweep"] = {f"settings.{key}": ["auto", 8]}
    else:
        description = raw["cluster"]["description"]
        raw["cluster"]["description"] = description | {"settings": description["settings"] | settings}
    with pytest.raises(ConfigError, match=f"settings.{key} 8: `plan` tries fixed numbers"):
        size_command(raw, "little", tmp_path, slo_ttft_p99_s=1.0, max_instances=2, console=Console(quiet=True))


def test_a_fault_of_a_worker_that_a_smaller_cluster_lacks_is_left_out_and_told(tmp_path: Path) -> None:
    faults = [
        {"kind": "slow", "at_s": 0.1, "worker": 0, "for_s": 0.2, "factor": 2.0},
        {"kind": "crash", "at_s": 0.2, "worker": 1, "restart_after_s": 0.1},
        {"kind": "cut", "at_s": 0.3, "a": 0, "b": 1},
    ]
    (case,) = cases_of(spec(variants=["recompute"], faults=faults), "file")
    assert with_instances(case, 1).raw["faults"] == faults[:1] and with_instances(case, 2).raw["faults"] == faults
    document, text = planned(
        tmp_path, spec(variants=["recompute"], faults=faults), slo_ttft_p99_s=60.0, max_instances=4
    )
    (row,) = document["rows"]
    assert {t["instances"]: t["faults_left_out"] for t in row["trials"]}[1] == 2
    assert row["instances"] == 1 and "found holds without 2 of these" in text
    drawn, text = planned(
        tmp_path, spec(variants=["recompute"], faults={"number": 1, "span_s": 0.5}), slo_ttft_p99_s=60.0,
        max_instances=2,
    )
    assert all(t["faults_left_out"] == 0 for t in drawn["rows"][0]["trials"]) and "fewer lack workers" not in text
