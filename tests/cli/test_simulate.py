"""`jettison simulate`, `plan`, `validate`, `explain --counterfactual` at the command line: output, files, bad input."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent / "simulate"))

from specs import spec

from jettison.cli.main import main
from jettison.report.incidents import incidents_of
from jettison.report.results import read_results


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    return written(tmp_path, spec())


def written(folder: Path, raw: object) -> Path:
    path = folder / "spec.yaml"
    path.write_text(raw if isinstance(raw, str) else yaml.safe_dump(raw))
    return path


def test_simulate_prints_a_table_and_writes_what_was_asked_for(
    spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, page, line = tmp_path / "out" / "runs.json", tmp_path / "page.html", tmp_path / "line.json"
    code = main([
        "simulate", str(spec_file), "--json", str(results), "--html", str(page), "--timeline", str(line),
        "--processes", "1", "--set", "slo.ttft_s=0.2",
    ])  # fmt: skip
    assert code == 0
    text = capsys.readouterr().out
    assert "recompute" in text and "drop" in text and "parameters" in text
    assert "cluster: little; between them " in text and " Gbit/s" in text
    runs = read_results(results)
    assert [run.name for run in runs] == ["recompute", "drop"] and runs[0].goodput is not None
    assert "<svg" in page.read_text() or "data:image/svg" in page.read_text()
    assert json.loads((tmp_path / "line-drop.json").read_text())["traceEvents"]


@pytest.mark.parametrize(("setting", "why"), [
    ("run.until_s=0.6", "the run's time was up"), ("settings.max_model_len=60", "tokens exceed what one request may"),
])  # fmt: skip
def test_requests_that_were_not_served_are_told_before_any_figure(
    setting: str, why: str, spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(spec_file), "--processes", "1", "--set", setting]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = [number for number, line in enumerate(lines) if "requests were not answered" in line]
    header = next(number for number, line in enumerate(lines) if "variant" in line)
    assert len(told) == 2 and all(why in lines[number] for number in told) and told[-1] < header
    assert not any(re.search(r"\d\.\d\dx", line) for line in lines[header:])


def test_explain_simulates_what_other_policies_would_have_done(
    spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, explained = tmp_path / "runs.json", tmp_path / "explained.json"
    assert main(["simulate", str(spec_file), "--json", str(results), "--processes", "1"]) == 0
    capsys.readouterr()
    code = main([
        "explain", str(results), "--run", "drop", "--counterfactual", "swap", "--slo-ttft", "0.1",
        "--json", str(explained),
    ])  # fmt: skip
    assert code == 0
    text = capsys.readouterr().out
    assert "swap (simulated)" in text and "recompute:" in text
    incident = json.loads(explained.read_text())["runs"][0]["incidents"][0]
    assert {c["policy"] for c in incident["counterfactuals"]} == {"recompute", "swap (simulated)"}
    assert set(incident["saved"]) == {"recompute", "swap (simulated)"}


def test_explain_simulates_by_itself_what_the_file_has_no_run_of(
    spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results, explained = tmp_path / "runs.json", tmp_path / "explained.json"
    assert main(["simulate", str(spec_file), "--json", str(results), "--processes", "1"]) == 0
    capsys.readouterr()
    command = ["explain", str(results), "--run", "drop", "--slo-ttft", "0.1", "--processes", "1"]
    assert main([*command, "--json", str(explained)]) == 0
    text = capsys.readouterr().out
    (document,) = json.loads(explained.read_text())["runs"]
    names = {"recompute", "swap (simulated)", "migrate (simulated)", "pipeline (simulated)"}
    for incident in document["incidents"]:
        assert {c["policy"] for c in incident["counterfactuals"]} == names
        assert all(c["p99_ttft_s"] is not None for c in incident["counterfactuals"])
    # Ratios stand beside their conditions, here and in the JSON.
    assert "mean load (drop, recompute, swap (simulated), migrate (simulated), pipeline (simulated)):" in text
    assert set(document["conditions"]) == names | {"drop"}
    assert "client lag" not in text and dict(document["conditions"]["drop"])
    monkeypatch.setattr("jettison.simulate.counterfactual.MOST_UNASKED", 10)
    assert main(command) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not simulated")]
    assert told.endswith("requests to simulate take a while: ask for them with --counterfactual swap,migrate,pipeline")


def test_explain_tells_which_policies_it_left_out_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = spec(variants=["drop"], settings={"max_instances": 3}, timing={"start_s": 1.0})
    path, results = tmp_path / "run.yaml", tmp_path / "runs.json"
    path.write_text(yaml.safe_dump(raw))
    assert main(["simulate", str(path), "--json", str(results), "--processes", "1"]) == 0
    capsys.readouterr()
    assert main(["explain", str(results), "--slo-ttft", "0.05", "--processes", "1"]) == 0
    text = capsys.readouterr().out
    (told,) = [line for line in text.splitlines() if line.startswith("not simulated")]
    assert told.startswith("not simulated under other policies: pipeline: ") and "recompute (simulated)" in text


def test_explain_compares_inside_a_point_of_a_sweep_and_by_variant(tmp_path: Path) -> None:
    variants = ["recompute", "drop", {"name": "patient", "policy": "drop", "settings": {"drop_dwell_ms": 60}}]
    raw = spec(variants=variants, sweep={"cluster.instances": [2, 3]})
    results, explained = tmp_path / "runs.json", tmp_path / "explained.json"
    assert main(["simulate", str(written(tmp_path, raw)), "--json", str(results), "--processes", "1"]) == 0
    runs = {run.name: run for run in read_results(results)}
    for instances in (2, 3):
        name = f"drop instances={instances}"
        if not runs[name].events["drops"]:
            assert instances > 2
            continue
        flags = ["--slo-ttft", "0.1", "--json", str(explained), "--no-counterfactual"]
        assert main(["explain", str(results), "--run", name, *flags]) == 0
        theirs = {v: runs[f"{v} instances={instances}"] for v in ("recompute", "patient")}
        (document,) = json.loads(explained.read_text())["runs"]
        expected = incidents_of(runs[name], 0.1, theirs)
        for found, incident in zip(document["incidents"], expected, strict=True):
            assert {c["policy"]: c["num_over_slo"] for c in found["counterfactuals"]} == {
                c.policy: c.num_over_slo for c in incident.counterfactuals
            }


def test_plan_finds_a_cluster_and_writes_its_page(
    spec_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--slo-ttft-p99", "0.5", "--max-instances", "4", "--processes", "1", "--html", str(tmp_path / "plan.html"))
    assert main(["plan", str(spec_file), *flags]) == 0
    asked = "smallest cluster with P99 TTFT 0.5 s"
    assert asked in capsys.readouterr().out and asked in (tmp_path / "plan.html").read_text()


def test_explain_has_cards_for_baselines_and_for_calm_runs_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calm = spec()["workload"] | {"arrivals": {"process": "poisson", "rate_per_s": 5.0, "duration_s": 1.0}}
    explained = tmp_path / "explained.json"
    for workload, has_cards in ((spec()["workload"], True), (calm, False)):
        results = tmp_path / f"runs-{has_cards}.json"
        raw = spec(workload=workload, variants=["recompute"], slo={"ttft_s": 0.1})
        assert main(["simulate", str(written(tmp_path, raw)), "--json", str(results), "--processes", "1"]) == 0
        capsys.readouterr()
        flags = ["--counterfactual", "swap,drop", "--processes", "1", "--json", str(explained)]
        assert main(["explain", str(results), *flags]) == 0
        text = capsys.readouterr().out
        (document,) = json.loads(explained.read_text())["runs"]
        assert document["slo_ttft_s"] == 0.1 and bool(document["incidents"]) is has_cards
        compared = document["incidents"] if has_cards else [document["whole_run"]]
        for comparison in compared:
            assert set(comparison["saved"]) == {"swap (simulated)", "drop (simulated)"}
        assert ("late requests" in text) is has_cards and ("no overload" in text) is not has_cards
        assert "swap (simulated)" in text




def changed(**changes: Any) -> dict[str, Any]:
    return spec(**changes)


BAD: list[tuple[list[str], object, str]] = [
    (["simulate"], "cluster: [1", "line 1: expected ',' or ']'"),
    (["simulate"], "cluster: a\ncluster: b\n", "line 1: key 'cluster' is given twice"),
    (["simulate"], "- 1\n", "needs `key: value` lines, not a list"),
    (["simulate"], "", "cluster is missing"),
    (["simulate"], changed(clustre={}), "clustre: unknown key (did you mean 'cluster'?)"),
    (["simulate"], changed(cluster="kunserve-b2"), "unknown cluster 'kunserve-b2'"),
    (["simulate"], changed(workload={"trace": "bad.csv"}), "bad.csv: 2 bad rows, nothing loaded: line 3: "),
    (["simulate"], changed(workload={"trace": "none.csv"}), "workload.trace: there is no file none.csv"),
    (["simulate"], changed(cluster={"gpu": "rtx-4090", "model": "llama-3.1-70b", "gpus_per_instance": 4}),
     "llama-3.1-70b needs 141107412992 bytes for parameters, 4 x rtx-4090 at 0.9 have"),
    (["simulate"], changed(cluster={"preset": "kunserve-a", "memory": "20GiB"}), "bytes for parameters and workspace"),
    (["simulate", "--set", "cluster"], changed(), "--set 'cluster': needs key=value"),
    (["simulate", "--set", "seeds=none"], changed(), "seeds needs a number of seeds or a list of them, not 'none'"),
    (["simulate", "--json", "spec.yaml/x.json"], changed(), "spec.yaml/x.json: cannot be written"),
    (["plan"], changed(), "an objective is missing"),
    (["plan", "--slo-ttft-p99", "1", "--html", "spec.yaml/x.html"], changed(), "spec.yaml/x.html: cannot be written"),
    (["plan", "--slo-ttft-p99", "0"], changed(), "--slo-ttft-p99 needs a time above 0, not 0"),
    (["plan", "--slo-ttft-p99", "0.00001", "--max-instances", "2", "--processes", "1"], changed(),
     "P99 TTFT 1e-05 s is not reached with 2 instances"),
    (["plan", "--slo-ttft-p99", "1"], changed(cluster={"preset": "kunserve-a", "memory_utilisation": 0.2}),
     "cluster.memory_utilisation: qwen2.5-14b needs"),
    (["validate"], changed(), "cluster: only a model folder can be served on this machine"),
    (["validate"], changed(cluster={"model": "none"}), "cluster.model: there is no model folder none"),
    (["validate"], changed(cluster={"model": "none"}, run={"until_s": 9}), "run.until_s acts on simulated runs only"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "raw", "message"), BAD)
def test_what_the_caller_can_mend_is_one_line_and_exit_2(
    arguments: list[str], raw: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jettison.report.terminal.LINE_EVERY_S", math.inf)  # a slow machine would be told how far it is
    (tmp_path / "bad.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\nyesterday,1,2\n"
        "2023-11-16 18:15:47.0000000,3,-1\n"
    )
    code = main([arguments[0], str(written(tmp_path, raw)), *arguments[1:]])
    err = capsys.readouterr().err
    assert code == 2, err
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("jettison: "), err
    assert message in lines[0], lines[0]


def test_a_spec_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path / "none.yaml")]) == 2
    assert "cannot read the spec" in capsys.readouterr().err
