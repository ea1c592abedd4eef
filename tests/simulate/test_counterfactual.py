"""What recorded arrivals would have met under other policies."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))

from scenarios import make_setup
from specs import deployment, spec

from jettison.cli.main import main
from jettison.cost.deployment import deployment_to_document
from jettison.cost.profile_document import Fingerprint, StoredProfile
from jettison.errors import ConfigError, UserError
from jettison.profiles import save_profile
from jettison.report.incidents import incidents_of
from jettison.report.results import RunResult, write_results
from jettison.simulate.cases import cases_of, run_case
from jettison.simulate.counterfactual import (
    counterfactual_runs,
    parse_policies,
    recorded_rows,
    told_if_far,
    told_of_profile,
    untold_of,
)
from jettison.simulate.run import simulate_workload
from jettison.workload.traces import TraceRow, Workload, write_trace


@pytest.fixture(scope="module")
def drop_and_recompute() -> tuple[RunResult, RunResult]:
    recompute, drop = (run_case(case) for case in cases_of(spec(), "file"))
    return drop, recompute


def test_a_simulated_run_s_counterfactual_is_the_other_run(drop_and_recompute: tuple[RunResult, RunResult]) -> None:
    drop, recompute = drop_and_recompute
    others = counterfactual_runs(drop, ["recompute"], num_processes=1)
    assert list(others) == ["recompute (simulated)"]
    assert others["recompute (simulated)"].ttft_s == recompute.ttft_s
    incident = incidents_of(drop, 0.1, others)[0]
    (counterfactual,) = incident.counterfactuals
    assert counterfactual.policy == "recompute (simulated)"
    assert incident.num_saved("recompute (simulated)") is not None


def test_a_run_is_simulated_with_its_own_seed() -> None:
    raw = spec(seeds=[3], timing={"noise": 0.3}, variants=["drop"])
    (case,) = cases_of(raw, "file")
    run = run_case(case)
    (again,) = counterfactual_runs(run, ["drop"], num_processes=1).values()
    assert again.ttft_s == run.ttft_s and again.config["seed"] == 3
    (other,) = counterfactual_runs(replace(run, config=run.config | {"seed": 0}), ["drop"], num_processes=1).values()
    assert other.ttft_s != run.ttft_s
    live = {"policy": "drop", "deployment": deployment_to_document(deployment()), "seed": 3}
    simulated = counterfactual_runs(replace(run, config=live), ["drop"], num_processes=1)
    assert [found.config["seed"] for found in simulated.values()] == [3]


def test_a_live_run_is_simulated_under_its_own_policy_as_well(drop_and_recompute: tuple[RunResult, RunResult]) -> None:
    drop, _ = drop_and_recompute
    live = replace(drop, config={"policy": "drop", "deployment": deployment_to_document(deployment())})
    others = counterfactual_runs(live, ["recompute"], num_processes=1)
    assert list(others) == ["recompute (simulated)", "drop (this run, simulated)"]
    assert all(run.requests.completed == drop.requests.completed for run in others.values())


def test_a_simulation_that_is_far_from_what_was_measured_is_told(
    drop_and_recompute: tuple[RunResult, RunResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drop, recompute = drop_and_recompute
    live = replace(drop, config={"policy": "drop", "deployment": deployment_to_document(deployment())})
    own, other = "drop (this run, simulated)", "recompute (simulated)"
    near = {own: drop, other: recompute}
    assert told_if_far(live, near) is None and untold_of(live, near, None) == {own}
    assert told_if_far(drop, near) is None and untold_of(drop, near, None) == set(), "it is a simulation itself"
    assert drop.ttft_s.p99 is not None
    for times in (0.5, 2.0):
        far = near | {own: replace(drop, ttft_s=replace(drop.ttft_s, p99=times * drop.ttft_s.p99))}
        told = told_if_far(live, far)
        assert told is not None and "\n" not in told and "P99 TTFT" in told
        assert untold_of(live, far, told) == {own, other}
    slow = replace(drop.ttft_s, p99=100 * drop.ttft_s.p99)
    write_results(tmp_path / "runs.json", [replace(live, ttft_s=slow)])
    assert main(["explain", str(tmp_path / "runs.json"), "--counterfactual", "recompute"]) == 0
    shown = capsys.readouterr().out
    assert "Warning" in shown and "saved" not in shown


def test_runs_that_do_not_say_enough(drop_and_recompute: tuple[RunResult, RunResult]) -> None:
    drop, _ = drop_and_recompute
    for bare, message in (
        (replace(drop, config={"simulated": True}), "does not carry its spec"),
        (replace(drop, config={"policy": "drop"}), "does not say on which cluster it ran"),
        (replace(drop, requests_detail=None), "keeps no row a request"),
        (
            replace(drop, config={"deployment": deployment_to_document(replace(deployment(), profile=None))}),
            "had none of the model 'little'",
        ),
    ):
        with pytest.raises(UserError, match=message):
            counterfactual_runs(bare, ["recompute"])


def test_a_profile_may_come_from_a_file(drop_and_recompute: tuple[RunResult, RunResult], tmp_path: Path) -> None:
    drop, _ = drop_and_recompute
    known = deployment()
    assert known.profile is not None
    path = tmp_path / "profile.json"
    save_profile(path, StoredProfile(Fingerprint("a machine", "c", "v", "float64", 1, "native"), known.profile))
    bare = replace(known, profile=None)
    told, untold = (
        replace(drop, config={"policy": "drop", "deployment": deployment_to_document(d)}) for d in (known, bare)
    )
    expected = counterfactual_runs(told, ["recompute"], num_processes=1)
    found = counterfactual_runs(untold, ["recompute"], profile=path, num_processes=1)
    assert {name: run.ttft_s for name, run in found.items()} == {name: run.ttft_s for name, run in expected.items()}
    with pytest.raises(UserError, match="was simulated"):
        counterfactual_runs(drop, ["recompute"], profile=path)


def test_another_s_profile_is_told_and_marked(
    drop_and_recompute: tuple[RunResult, RunResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drop, _ = drop_and_recompute
    known, path, file = deployment(), tmp_path / "profile.json", tmp_path / "runs.json"
    assert known.profile is not None
    mark = Fingerprint("a machine", "c", "v", "float64", 1, "native")
    save_profile(path, StoredProfile(mark, known.profile))

    def live(**changes: Any) -> RunResult:
        described = replace(known, profile=None, **changes)
        return replace(drop, config={"policy": "drop", "deployment": deployment_to_document(described)})

    assert told_of_profile(live(fingerprint=mark), path) is None
    assert told_of_profile(drop, path) is None, "a simulated run says with what by itself"
    for other, words in (
        (live(fingerprint=replace(mark, hardware="another", model="d")),
         ("hardware 'a machine' and not 'another'", "model 'c' and not 'd'")),
        (live(settings={**known.settings, "dtype": "float32", "kernels": "auto"}),
         ("dtype 'float64' and not 'float32'",)),
    ):  # fmt: skip
        told = told_of_profile(other, path)
        assert told is not None and "\n" not in told and all(word in told for word in words)
        found = counterfactual_runs(other, ["recompute"], profile=path, num_processes=1)
        assert list(found) == [
            "recompute (simulated with another's profile)", "drop (this run, simulated with another's profile)",
        ]
    write_results(file, [other])
    assert main(["explain", str(file), "--counterfactual", "recompute", "--profile", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("warning: the profile") == 1 and "float32" in printed.err
    assert "recompute (simulated with another's" in printed.out


def test_the_commands_that_help_are_told_in_full(drop_and_recompute: tuple[RunResult, RunResult]) -> None:
    drop, _ = drop_and_recompute
    bare = replace(drop, config={"deployment": deployment_to_document(replace(deployment(), profile=None))})
    with pytest.raises(UserError) as told:
        counterfactual_runs(bare, ["recompute", "swap"], run_file=Path("a run.json"))
    make, use = re.findall("`(.*?)`", str(told.value))
    assert make.startswith("jettison profile MODEL_DIR --instances 2 --memory ") and make.endswith("--out profile.json")
    assert "--max-num-seqs 64" in make and f"run {bare.name!r}" in str(told.value) and "--quick" in str(told.value)
    with pytest.raises(UserError, match=r"--profile out/profile\.json"):
        counterfactual_runs(bare, ["recompute"], run_file=Path("out/report.json"))
    assert use == "jettison explain 'a run.json' --counterfactual recompute,swap --profile profile.json"


def test_recorded_lengths_are_those_that_were_produced(drop_and_recompute: tuple[RunResult, RunResult]) -> None:
    drop, _ = drop_and_recompute
    assert drop.requests_detail is not None
    rows = [dict(row) for row in drop.requests_detail]
    rows[0] |= {"output_tokens": 3}
    rows[1] |= {"output_tokens": 2, "status": "failed"}
    changed = recorded_rows(replace(drop, requests_detail=rows))
    assert changed[0][2] == 3 and changed[1][2] == rows[1]["wanted_tokens"]


BATCH = {"lengths": {"input": 60, "output": 20}, "num_requests": 12, "start_s": 0.2, "tenant": "batch"}


def test_a_batch_is_simulated_beside_the_other_policies_too(tmp_path: Path) -> None:
    rows = [TraceRow(0.01 * i, 60, 20, is_offline=i % 3 == 0) for i in range(60)]
    write_trace(tmp_path / "mixed.csv", Workload(rows, "mixed", "made up", span_s=2.0))
    endless = {"lengths": {"input": 30, "output": 9}, "unfinished": 2}
    raw = spec(workload={"trace": str(tmp_path / "mixed.csv"), "offline": endless, "batches": [BATCH]})
    runs = [run_case(case) for case in cases_of(raw, "file")]
    drop = runs[1]
    assert drop.classes is not None and drop.classes["offline"]["requests"]["completed"] > 32
    found = counterfactual_runs(drop, ["recompute", "drop"], num_processes=1)
    for expected in runs:
        other = found["drop (this run, simulated)" if expected is drop else "recompute (simulated)"]
        assert other.classes == expected.classes and other.ttft_s == expected.ttft_s
    assert told_if_far(drop, found) is None


def test_of_a_live_run_beside_a_batch_nothing_is_said_to_be_saved(
    drop_and_recompute: tuple[RunResult, RunResult]
) -> None:
    drop, recompute = drop_and_recompute
    offline = {"requests": {"submitted": 5}, "unfinished": 2, "requests_detail": []}
    live = replace(drop, config={"policy": "drop"}, classes={"online": {}, "offline": offline})
    simulated = {"recompute (simulated)": recompute}
    told = told_if_far(live, simulated)
    assert told is not None and "7 requests of a batch" in told
    assert untold_of(live, simulated, told) == set(simulated)


def test_a_run_without_its_tenants_is_told() -> None:
    rows = tuple(TraceRow(0.1 * i, 30, 5, tenant=i % 2) for i in range(6))
    run = simulate_workload(Workload(rows, "two tenants", "made up"), make_setup("drop"))
    told = told_if_far(run, {"recompute (simulated)": run})
    assert told is not None and "tenants" in told


def test_a_live_queue_refuses_in_its_simulation_too(drop_and_recompute: tuple[RunResult, RunResult]) -> None:
    drop, _ = drop_and_recompute
    described = deployment()
    described = replace(described, settings={**described.settings, "max_num_queued_reqs": 3})
    live = replace(drop, config={"policy": "drop", "deployment": deployment_to_document(described)})
    found = counterfactual_runs(live, ["recompute"], num_processes=1)
    assert all(run.requests.rejected > 0 for run in found.values())
    told = told_if_far(live, found)
    assert told is not None and "refused and not 0" in told


def test_a_live_run_whose_processes_came_and_went_is_simulated_with_those_of_its_begin(
    drop_and_recompute: tuple[RunResult, RunResult]
) -> None:
    drop, _ = drop_and_recompute
    described = deployment()
    described = replace(described, settings={**described.settings, "max_instances": described.num_instances + 1})
    live = replace(drop, config={"policy": "drop", "deployment": deployment_to_document(described)})
    found = counterfactual_runs(live, ["recompute", "pipeline"], num_processes=1)
    assert len(found) == 3 and told_if_far(live, found) is None
    came = replace(live, events=live.events | {"log": [{"t": 1.0, "kind": "instance_asked", "worker": 2}]})
    told = told_if_far(came, found)
    assert told is not None and "started or given up" in told


def test_policies_that_settings_forbid_are_left_out_where_none_was_named() -> None:
    raw = spec(settings={"max_instances": 3}, timing={"start_s": 1.0}, variants=["recompute"])
    run = run_case(cases_of(raw, "file")[0])
    told = list[str]()
    found = counterfactual_runs(run, ["swap", "pipeline"], num_processes=1, note=told.append)
    assert list(found) == ["swap (simulated)"]
    assert len(told) == 1 and told[0].startswith("pipeline: ") and "keeps its instances in pairs" in told[0]
    for policies, note in ((["swap", "pipeline"], None), (["pipeline"], told.append)):
        with pytest.raises(ConfigError, match="keeps its instances in pairs"):
            counterfactual_runs(run, policies, num_processes=1, note=note)
    assert len(told) == 1


def test_a_client_that_hung_up_does_so_in_the_simulation(drop_and_recompute: tuple[RunResult, RunResult]) -> None:
    drop, _ = drop_and_recompute
    rows = [dict(row) for row in drop.requests_detail or ()]
    rows[0] |= {"output_tokens": 2, "status": "cancelled"}
    rows[1] |= {"output_tokens": 0, "status": "cancelled"}
    assert [row[2] for row in recorded_rows(replace(drop, requests_detail=rows))[:2]] == [2, 1]


def test_policies_by_name() -> None:
    assert parse_policies("recompute, swap,recompute") == ("recompute", "swap")
    with pytest.raises(ConfigError, match="'vllm' is no policy; known: drop, recompute"):
        parse_policies("vllm")
