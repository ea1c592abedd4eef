"""The demo's day as a load: whom it has when, and that it asks for as much memory as it is meant to, on any machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.cost.deployment import Deployment
from jettison.cost.speed import MachineSpeed
from jettison.demo.burst import DemoModel, make_setup
from jettison.demo.load import DAY, MOST_CORE_SHARE, core_share, fit_day
from jettison.simulate.calibrate import ACCEPTED
from jettison.workload.traces import TraceRow, Workload

ROWS = st.lists(
    st.tuples(st.floats(0.0, 9.9), st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=20
).map(lambda rows: Workload(tuple(TraceRow(*row) for row in sorted(rows)), "some", "made up", span_s=10.0))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    folder: Path = tmp_path_factory.mktemp("day")
    model = DemoModel(layers=2, hidden=64, heads=2, kv_heads=1, kv_tokens_per_instance=1200, context=1000)
    return dataclasses.replace(make_setup(folder, 0, model), instances=4).deployment()


def test_each_phase_has_the_arrivals_that_it_says() -> None:
    workload = DAY.workload(50.0, 0)
    arrivals = np.array([row.arrival_s for row in workload.rows])
    assert workload.duration_s == DAY.duration_s == 100.0
    for phase in DAY.phases:
        expected = 50.0 * np.mean(phase.rates) * (phase.end_s - phase.start_s)
        found = np.count_nonzero((arrivals >= phase.start_s) & (arrivals < phase.end_s))
        assert found == pytest.approx(expected, abs=5 * expected**0.5), phase.name
    edges = [(a.end_s, b.start_s) for a, b in zip(DAY.phases, DAY.phases[1:], strict=False)]
    assert all(end == start for end, start in edges)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_day_is_fitted_so_that_memory_binds_and_not_the_cores(deployment: Deployment, seed: int) -> None:
    speed = MachineSpeed(3500.0, 0.0014, 0.0004)
    fitted = fit_day(DAY, speed, deployment, seed)
    assert fitted.peak_over_capacity == pytest.approx(DAY.peak_share, rel=ACCEPTED)
    assert 0.0 < fitted.core_share < fitted.burst_core_share < MOST_CORE_SHARE and fitted.caution is None


def test_a_machine_of_half_the_speed_has_about_half_the_users(deployment: Deployment) -> None:
    speed = MachineSpeed(3500.0, 0.0014, 0.0004)
    fast, slow = fit_day(DAY, speed, deployment, 0), fit_day(DAY, speed.slowed(2.0), deployment, 0)
    assert slow.rate_per_s == pytest.approx(fast.rate_per_s / 2, rel=0.35)  # other users, by chance


def test_where_the_cores_would_bind_it_is_said(deployment: Deployment) -> None:
    fitted = fit_day(DAY, MachineSpeed(3500.0, 0.00001, 0.004), deployment, 0)
    assert fitted.burst_core_share > MOST_CORE_SHARE
    assert fitted.caution is not None and "the cores may bind" in fitted.caution


@given(ROWS, st.floats(1.5, 20.0), st.integers(1, 8))
def test_the_cores_share_is_work_over_time(workload: Workload, factor: float, num_instances: int) -> None:
    speed = MachineSpeed(1000.0, 0.01, 0.001)
    share = core_share(workload, speed, num_instances)
    assert share * num_instances == pytest.approx(core_share(workload, speed, 1))
    assert core_share(workload, speed.slowed(factor), num_instances) == pytest.approx(factor * share)
    halves = [core_share(workload, speed, num_instances, *span) for span in ((0.0, 5.0), (5.0, 10.0))]
    assert sum(halves) / 2 == pytest.approx(share)
