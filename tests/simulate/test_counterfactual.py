"""What recorded arrivals would have met under other policies."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from specs import deployment, spec

from jettison.cost.deployment import deployment_to_document
from jettison.errors import ConfigError, UserError
from jettison.report.decisions import incidents_of
from jettison.report.results import RunResult
from jettison.simulate.cases import cases_of, run_case
from jettison.simulate.counterfactual import counterfactual_runs, parse_policies, recorded_rows


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


def test_a_live_run_is_simulated_under_its_own_policy_as_well(drop_and_recompute: tuple[RunResult, RunResult]) -> None:
    drop, _ = drop_and_recompute
    live = replace(drop, config={"policy": "drop", "deployment": deployment_to_document(deployment())})
    others = counterfactual_runs(live, ["recompute"], num_processes=1)
    assert list(others) == ["recompute (simulated)", "drop (this run, simulated)"]
    assert all(run.requests.completed == drop.requests.completed for run in others.values())


def test_runs_that_do_not_say_enough(drop_and_recompute: tuple[RunResult, RunResult]) -> None:
    drop, _ = drop_and_recompute
    for bare, message in (
        (replace(drop, config={"simulated": True}), "does not carry its spec"),
        (replace(drop, config={"policy": "drop"}), "does not say on which cluster it ran"),
        (replace(drop, requests_detail=None), "keeps no row a request"),
        (
            replace(drop, config={"deployment": deployment_to_document(replace(deployment(), profile=None))}),
            "no profile of little",
        ),
    ):
        with pytest.raises(UserError, match=message):
            counterfactual_runs(bare, ["recompute"])


def test_recorded_lengths_are_those_that_were_produced(drop_and_recompute: tuple[RunResult, RunResult]) -> None:
    drop, _ = drop_and_recompute
    assert drop.requests_detail is not None
    rows = [dict(row) for row in drop.requests_detail]
    rows[0] |= {"output_tokens": 3}
    rows[1] |= {"output_tokens": 2, "status": "failed"}
    changed = recorded_rows(replace(drop, requests_detail=rows))
    assert changed[0][2] == 3 and changed[1][2] == rows[1]["wanted_tokens"]


def test_policies_by_name() -> None:
    assert parse_policies("recompute, swap,recompute") == ("recompute", "swap")
    with pytest.raises(ConfigError, match="'vllm' is no policy; known: drop, recompute"):
        parse_policies("vllm")
