"""Instances that share a machine's cores: one measured factor, constant hops, and steps as a live run recorded them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))

from scenarios import COST, PROFILE
from specs import deployment, spec

from jettison.cost.deployment import deployment_to_document
from jettison.cost.hardware import HardwareProfile
from jettison.report.results import RunResult
from jettison.simulate.cases import cases_of, run_case

CROWDED = replace(PROFILE, contention=1.5, contention_instances=2)
CALM: dict[str, Any] = {"workload": {"rows": [[0.0, 20, 60]]}, "variants": ["recompute"]}


def simulated(profile: HardwareProfile, instances: int = 2, **changes: Any) -> list[RunResult]:
    described = deployment_to_document(deployment(profile=profile, num_instances=instances))
    return [run_case(case) for case in cases_of(spec(cluster={"description": described}, **changes), "file")]


def test_everyone_is_served_and_the_same_again() -> None:
    first, again = simulated(CROWDED), simulated(CROWDED)
    for one, other in zip(first, again, strict=True):
        assert one.requests.completed == one.requests.submitted > 0
        assert one.config["event_log_hash"] == other.config["event_log_hash"]
    assert first[1].events["drops"] >= 1


def test_a_lone_request_is_not_slowed_down() -> None:
    (alone,), (usual,) = simulated(CROWDED, **CALM), simulated(PROFILE, **CALM)
    assert alone.tpot_s.mean == pytest.approx(usual.tpot_s.mean)


def test_two_that_compute_at_once_take_as_much_longer_as_was_measured() -> None:
    pair = CALM | {"workload": {"rows": [[0.0, 20, 200]] * 2}}
    (slow,), (usual,) = simulated(CROWDED, **pair), simulated(PROFILE, **pair)
    assert usual.tpot_s.mean is not None and slow.tpot_s.mean is not None
    # A step that begins while the other is between two does not feel it.
    assert 1.3 * usual.tpot_s.mean < slow.tpot_s.mean < 1.5 * usual.tpot_s.mean


def test_hops_are_the_profiles_where_it_knows_them() -> None:
    late = replace(PROFILE, hop_s=50e-6 + 1e-3)
    (usual,), (slower,) = simulated(PROFILE, **CALM), simulated(late, **CALM)
    assert usual.tpot_s.mean is not None and slower.tpot_s.mean is not None
    assert slower.tpot_s.mean - usual.tpot_s.mean == pytest.approx(2e-3, rel=0.01), "there and back"
    (said,) = simulated(late, **CALM, timing={"command_s": 50e-6, "report_s": 50e-6})
    assert said.tpot_s.mean == pytest.approx(usual.tpot_s.mean)


def test_recorded_steps_take_the_place_of_the_profiles_and_its_contention() -> None:
    described = deployment_to_document(deployment(profile=CROWDED))
    (case,) = cases_of(spec(cluster={"description": described}, variants=["recompute"]), "file")
    (plain,) = simulated(PROFILE, variants=["recompute"])
    same = run_case(case, steps=COST)
    assert same.config["event_log_hash"] == plain.config["event_log_hash"]
    slower = run_case(case, steps=replace(COST, step_s=2 * COST.step_s, layer_s=2 * COST.layer_s))
    assert slower.tpot_s.mean and same.tpot_s.mean and slower.tpot_s.mean > 1.1 * same.tpot_s.mean


def test_workers_that_die_while_they_share_leave_nobody_behind() -> None:
    faults = [{"kind": "crash", "at_s": 0.25, "worker": 1, "restart_after_s": 0.3}]
    for one in simulated(CROWDED, faults=faults):
        assert one.requests.completed == one.requests.submitted
        assert one.events["worker_losses"] == 1
