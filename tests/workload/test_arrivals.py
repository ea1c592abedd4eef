"""Arrival processes have the rates and the irregularity that they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.errors import ConfigError
from jettison.workload.arrivals import (
    LEAST_CV,
    MOST_CV,
    Burst,
    Diurnal,
    OnOff,
    Steady,
    draw_arrivals,
    draw_num_arrivals,
)
from jettison.workload.lengths import published_lengths
from jettison.workload.synthetic import synthesise


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def gap_cv(arrivals: np.ndarray) -> float:
    gaps = np.diff(arrivals)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_gamma_arrivals_have_their_rate_and_cv(cv: float) -> None:
    arrivals = draw_arrivals(Steady(50.0, cv), 4000.0, rng())
    assert len(arrivals) / 4000.0 == pytest.approx(50.0, rel=0.01 * cv + 0.01)
    assert gap_cv(arrivals) == pytest.approx(cv, rel=0.05)


def test_counts_of_poisson_arrivals_vary_as_their_mean() -> None:
    counts = np.histogram(draw_arrivals(Steady(20.0), 5000.0, rng(1)), bins=5000)[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.1)


PROCESSES = [Steady(5.0, 2.0, (Burst(3.0, 2.0, 4.0),)), OnOff(9.0, 4.0, 6.0, 1.0), Diurnal(4.0, 2.0, 50)]


@given(process=st.sampled_from(PROCESSES), seed=st.integers(0, 1000), duration=st.floats(0.1, 200.0))
def test_arrivals_are_sorted_inside_the_time_and_the_same_again(process, seed: int, duration: float) -> None:
    arrivals = draw_arrivals(process, duration, rng(seed))
    assert (np.diff(arrivals) >= 0).all()
    assert ((arrivals >= 0) & (arrivals < duration)).all()
    assert (draw_arrivals(process, duration, rng(seed)) == arrivals).all()


def test_bursts_have_sharp_edges_and_their_multiple() -> None:
    arrivals = draw_arrivals(Steady(40.0, bursts=(Burst(100.0, 50.0, 5.0),)), 300.0, rng(2))
    inside = ((arrivals >= 100) & (arrivals < 150)).sum()
    assert inside / 50 == pytest.approx(200.0, rel=0.05)
    assert (len(arrivals) - inside) / 250 == pytest.approx(40.0, rel=0.05)


def test_on_off_is_silent_while_off() -> None:
    arrivals = draw_arrivals(OnOff(30.0, 180.0, 180.0), 900.0, rng(3))
    assert (arrivals % 360 < 180).all()
    assert len(arrivals) / 540 == pytest.approx(30.0, rel=0.05)
    assert not len(draw_arrivals(OnOff(30.0, 1e-9, 180.0), 1e-9 + 100, rng(3)))


def test_a_day_has_its_mean_and_its_peak() -> None:
    arrivals = draw_arrivals(Diurnal(2.0, 1.8), 86_400.0, rng(4))
    hours = np.histogram(arrivals, bins=24, range=(0, 86_400))[0] / 3600
    assert hours.mean() == pytest.approx(2.0, rel=0.01)
    assert hours.argmax() in (13, 14)
    assert hours.max() == pytest.approx(3.6, rel=0.04)
    assert hours.min() == pytest.approx(0.4, rel=0.15)


def test_by_number_there_are_as_many_at_the_same_rate() -> None:
    arrivals, until_s = draw_num_arrivals(OnOff(10.0, 5.0, 5.0), 20_000, rng(5))
    assert len(arrivals) == 20_000
    assert arrivals[-1] < until_s
    assert until_s == pytest.approx(4000.0, rel=0.03)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Steady(0.0),
        lambda: Steady(1.0, cv=float("nan")),
        lambda: Steady(1.0, bursts=(Burst(-1.0, 1.0, 1.0),)),
        lambda: OnOff(1.0, 0.0, 1.0),
        lambda: OnOff(1.0, 1.0, 1.0, -1.0),
        lambda: Diurnal(1.0, 2.5),
        lambda: draw_arrivals(Steady(1.0), 0.0, rng()),
        lambda: draw_num_arrivals(Steady(1.0), 0, rng()),
        lambda: synthesise(Steady(1.0), published_lengths("burstgpt"), seed=0),
    ],
)
def test_what_is_no_process_is_refused(build) -> None:
    with pytest.raises(ConfigError):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Steady(1.0, cv=1e-170), "cv must be from 1e-06 to 100, got 1e-170"),
        (lambda: OnOff(1.0, 1.0, 1.0, cv=1e160), "cv must be from 1e-06 to 100, got 1e\\+160"),
        (lambda: Diurnal(1.0, cv=1e6), "cv must be from 1e-06 to 100, got 1e\\+06"),
        (lambda: draw_arrivals(OnOff(1.0, 1e-9, 1e-9), 60.0, rng()), "for .* in turn: over 60 s .* 1,000,000 pieces"),
        (lambda: draw_arrivals(OnOff(1.0, 1e-20, 1e-20), 60.0, rng()), "1,000,000 pieces"),
        (lambda: draw_arrivals(Diurnal(1.0, period_s=1e-300), 60.0, rng()), "1,000,000 pieces"),
        (lambda: draw_num_arrivals(OnOff(1e-9, 1.0, 1.0), 2, rng()), "1,000,000 pieces"),
        (lambda: draw_arrivals(Steady(1e10), 60.0, rng()), "for 60 s: more than 100,000,000 requests"),
        (lambda: draw_arrivals(Steady(1e308), 60.0, rng()), "for 60 s: more than 100,000,000 requests"),
        (lambda: draw_arrivals(Steady(1e-9), 1e12, rng()), "duration_s must be at most 1e\\+11, got 1e\\+12"),
        (lambda: draw_num_arrivals(Steady(1.0), 10**400, rng()), "more than 100,000,000 requests"),
    ],
)
def test_what_could_never_be_drawn_is_one_line(build, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        build()
    assert str(raised.value).startswith("arrivals") and "\n" not in str(raised.value)


@pytest.mark.parametrize("cv", [LEAST_CV, MOST_CV])
def test_arrivals_of_any_allowed_cv_come_to_an_end(cv: float) -> None:
    arrivals = draw_arrivals(Steady(50.0, cv), 100.0, rng(6))
    assert ((arrivals >= 0) & (arrivals < 100)).all()
    assert len(draw_num_arrivals(Steady(50.0, cv), 1000, rng(7))[0]) == 1000
    if cv == LEAST_CV:
        assert len(arrivals) == pytest.approx(5000, abs=1)
        assert np.diff(arrivals) == pytest.approx(0.02, rel=1e-4)


def test_synthetic_workloads_are_functions_of_their_seed() -> None:
    def make(seed: int):
        return synthesise(Steady(5.0, 2.0), published_lengths("longbench"), seed=seed, duration_s=60.0)

    assert make(1) == make(1)
    assert make(1).rows != make(2).rows
    assert "Gamma arrivals of CV 2" in make(1).notes[0] and "longbench" in make(1).notes[0]
    assert make(1).duration_s == 60.0
