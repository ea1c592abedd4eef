"""Specs with more instances than there are at the start: how long a start takes is stated, and decides."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from specs import EAGER, spec

from jettison.errors import ConfigError
from jettison.report.bill import awake_of
from jettison.report.results import RunResult
from jettison.simulate.cases import cases_of, run_case

SETTINGS = {**EAGER, "overload_trigger": "forecast", "enable_prefix_caching": False, "max_instances": 3}


def simulated(start_s: float) -> RunResult:
    (case,) = cases_of(spec(settings=SETTINGS, variants=["drop"], timing={"start_s": start_s}), "file")
    return run_case(case)


def test_a_start_has_to_be_stated() -> None:
    with pytest.raises(ConfigError, match=r"max_instances needs timing\.start_s"):
        cases_of(spec(settings=SETTINGS, variants=["drop"]), "file")


def test_a_third_is_started_in_the_stated_time_and_serves_from_then_on() -> None:
    run = simulated(0.2)
    assert run.requests.completed == run.requests.submitted > 0
    assert (run.config["cluster"]["instances"], run.config["cluster"]["max_instances"]) == (2, 3)
    (asked,) = run.log("instance_asked")
    (joined,) = run.log("worker_joined")
    assert joined["t"] - asked["t"] == pytest.approx(0.2) and asked["predicted_s"] == 0.2
    awake = awake_of(run)
    assert awake is not None and awake.devices[0] == 2 and max(awake.devices) == 3


def test_one_that_would_come_too_late_is_not_worth_it() -> None:
    run = simulated(100.0)
    assert run.requests.completed == run.requests.submitted
    assert not run.log("worker_joined")
