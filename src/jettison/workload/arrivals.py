"""When requests come: a rate over time, and how irregular the arrivals are around it.

A process is a rate curve and a coefficient of variation. Arrivals form a Gamma renewal process (CV 1 is Poisson) on a
clock that runs at the current rate: bursts have sharp edges, and the irregularity is the same in quiet and busy times.
Lengths are in ``lengths``; nothing here knows about requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jettison.errors import ConfigError
from jettison.workload.rows import MAX_ARRIVAL_S, Floats, check_number

_GAPS_AT_ONCE = 1024
_DIURNAL_STEPS = 288
"""Pieces of constant rate in a period: of a day, five minutes each."""

LEAST_CV, MOST_CV = 1e-6, 100.0
"""Bounds of the coefficient of variation. Below, arrivals are as good as regular. Above, nearly all gaps are zero:
about cv^2 requests share one instant, and it takes as many draws to advance in time."""

MAX_PIECES = 10**6
"""Most pieces of a rate curve: an on-off process of a minute each has as many in two years."""


@dataclass(frozen=True, slots=True, eq=False)
class RateCurve:
    """A rate that is constant between edges: ``rates_per_s[i]`` from ``edges_s[i]`` to ``edges_s[i + 1]``."""

    edges_s: Floats
    rates_per_s: Floats

    @property
    def cumulative(self) -> Floats:
        """Expected arrivals up to each edge."""
        with np.errstate(over="ignore"):  # absurd rates overflow to infinitely many arrivals, which draws refuse
            return np.concatenate([[0.0], np.cumsum(self.rates_per_s * np.diff(self.edges_s))])

    @property
    def expected(self) -> float:
        """Expected arrivals in all."""
        return float(self.cumulative[-1])


class ArrivalProcess(Protocol):
    """A rate over time with a coefficient of variation."""

    @property
    def cv(self) -> float: ...

    def curve(self, duration_s: float) -> RateCurve:
        """The rate over [0, ``duration_s``)."""
        ...

    def describe(self) -> str:
        """One line for the workload's notes."""
        ...


def _check(**positive: float) -> None:
    for name, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"arrivals: {name} must be above 0, got {value:g}")


def _check_cv(cv: float) -> None:
    if not LEAST_CV <= cv <= MOST_CV:
        raise ConfigError(f"arrivals: cv must be from {LEAST_CV:g} to {MOST_CV:g}, got {cv:g}")


def _check_pieces(process: ArrivalProcess, num_pieces: float, duration_s: float) -> None:
    if not num_pieces <= MAX_PIECES:
        raise ConfigError(
            f"arrivals: {process.describe()}: over {duration_s:g} s the rate has more than {MAX_PIECES:,} pieces"
        )


def _named(cv: float) -> str:
    return "Poisson arrivals" if cv == 1.0 else f"Gamma arrivals of CV {cv:g}"


@dataclass(frozen=True, slots=True)
class Burst:
    """From ``start_s`` for ``duration_s`` seconds the rate is ``multiplier`` times the base rate."""

    start_s: float
    duration_s: float
    multiplier: float


@dataclass(frozen=True, slots=True)
class Steady:
    """One rate, with bursts on it: Poisson, or Gamma where ``cv`` is not 1."""

    rate_per_s: float
    cv: float = 1.0
    bursts: tuple[Burst, ...] = ()

    def __post_init__(self) -> None:
        _check(rate_per_s=self.rate_per_s)
        _check_cv(self.cv)
        for burst in self.bursts:
            _check(**{"burst duration_s": burst.duration_s, "burst multiplier": burst.multiplier})
            if burst.start_s < 0:
                raise ConfigError(f"arrivals: burst start_s must be at least 0, got {burst.start_s:g}")

    def curve(self, duration_s: float) -> RateCurve:
        ends = (edge for b in self.bursts for edge in (b.start_s, b.start_s + b.duration_s))
        edges_s = np.array(sorted({0.0, duration_s} | {min(edge, duration_s) for edge in ends}))
        middles = (edges_s[:-1] + edges_s[1:]) / 2
        rates = [
            self.rate_per_s
            * math.prod(b.multiplier for b in self.bursts if b.start_s <= middle < b.start_s + b.duration_s)
            for middle in middles
        ]
        return RateCurve(edges_s, np.array(rates))

    def describe(self) -> str:
        bursts = ", ".join(f"{b.multiplier:g}x for {b.duration_s:g} s at {b.start_s:g} s" for b in self.bursts)
        return f"{_named(self.cv)} at {self.rate_per_s:g} requests/s" + (f", bursts: {bursts}" if bursts else "")


@dataclass(frozen=True, slots=True)
class OnOff:
    """``on_s`` seconds at one rate, ``off_s`` at another (0 is allowed), and again."""

    on_rate_per_s: float
    on_s: float
    off_s: float
    off_rate_per_s: float = 0.0
    cv: float = 1.0

    def __post_init__(self) -> None:
        _check(on_rate_per_s=self.on_rate_per_s, on_s=self.on_s, off_s=self.off_s)
        _check_cv(self.cv)
        if not (self.off_rate_per_s >= 0 and math.isfinite(self.off_rate_per_s)):
            raise ConfigError(f"arrivals: off_rate_per_s must be at least 0, got {self.off_rate_per_s:g}")

    def curve(self, duration_s: float) -> RateCurve:
        _check_pieces(self, 2.0 * duration_s / (self.on_s + self.off_s), duration_s)
        edges, rates, at_s = [0.0], [], 0.0
        while at_s < duration_s:
            for length_s, rate in ((self.on_s, self.on_rate_per_s), (self.off_s, self.off_rate_per_s)):
                if at_s < duration_s:
                    at_s = min(at_s + length_s, duration_s)
                    edges.append(at_s)
                    rates.append(rate)
        return RateCurve(np.array(edges), np.array(rates))

    def describe(self) -> str:
        return (
            f"{_named(self.cv)}, {self.on_rate_per_s:g} requests/s for {self.on_s:g} s and "
            f"{self.off_rate_per_s:g} for {self.off_s:g} s in turn"
        )


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A rate that follows the day: a sine around the mean, ``peak_over_mean`` times it at ``peak_at_s``."""

    mean_rate_per_s: float
    peak_over_mean: float = 1.6
    period_s: float = 86_400.0
    peak_at_s: float = 50_400.0
    cv: float = 1.0

    def __post_init__(self) -> None:
        _check(mean_rate_per_s=self.mean_rate_per_s, period_s=self.period_s)
        _check_cv(self.cv)
        if not 1.0 <= self.peak_over_mean <= 2.0:
            raise ConfigError(f"arrivals: peak_over_mean of a sine must be from 1 to 2, got {self.peak_over_mean:g}")

    def curve(self, duration_s: float) -> RateCurve:
        wanted = duration_s / self.period_s * _DIURNAL_STEPS
        _check_pieces(self, wanted, duration_s)
        num_pieces = max(1, math.ceil(wanted))
        edges_s = np.linspace(0.0, duration_s, num_pieces + 1)
        turn = 2.0 * math.pi / self.period_s
        # The sine's own integral, so that the mean is exact whatever the number of pieces.
        swing = (self.peak_over_mean - 1.0) / turn * np.diff(np.sin(turn * (edges_s - self.peak_at_s)))
        return RateCurve(edges_s, self.mean_rate_per_s * (1.0 + swing / np.diff(edges_s)))

    def describe(self) -> str:
        return (
            f"{_named(self.cv)}, sine of period {self.period_s:g} s around {self.mean_rate_per_s:g} requests/s, "
            f"{self.peak_over_mean:g} times that at {self.peak_at_s:g} s"
        )


def draw_arrivals(process: ArrivalProcess, duration_s: float, rng: np.random.Generator) -> Floats:
    """Arrival times in [0, ``duration_s``), ascending: a unit-rate Gamma renewal process mapped through the inverse of
    the cumulative rate. Raises ConfigError for a duration that is not above 0 or above ``MAX_ARRIVAL_S``, for more than
    ``MAX_PIECES`` pieces of the rate, and for more than ``MAX_REQUESTS`` expected arrivals."""
    _check(duration_s=duration_s)
    if duration_s > MAX_ARRIVAL_S:
        raise ConfigError(f"arrivals: duration_s must be at most {MAX_ARRIVAL_S:g}, got {duration_s:g}")
    curve = process.curve(duration_s)
    check_number(curve.expected, f"arrivals: {process.describe()} for {duration_s:g} s")
    cumulative = curve.cumulative
    blocks = [
        np.interp(block[block < cumulative[-1]], cumulative, curve.edges_s)
        for block in _renewals(process.cv, curve.expected, rng)
    ]
    return np.concatenate(blocks) if blocks else np.zeros(0)


def draw_num_arrivals(process: ArrivalProcess, num_arrivals: int, rng: np.random.Generator) -> tuple[Floats, float]:
    """The times of the first ``num_arrivals`` arrivals, and the time of the next one."""
    if num_arrivals < 1:
        raise ConfigError(f"arrivals: their number must be at least 1, got {num_arrivals}")
    check_number(num_arrivals, "arrivals")
    unit = np.cumsum(rng.gamma(1.0 / process.cv**2, process.cv**2, size=num_arrivals + 1))
    duration_s = 1.0
    while process.curve(duration_s).expected <= unit[-1]:
        duration_s *= 2.0
        if duration_s > 1e10:
            raise ConfigError(f"{process.describe()}: no {num_arrivals} arrivals in three hundred years")
    curve = process.curve(duration_s)
    times = np.interp(unit, curve.cumulative, curve.edges_s)
    return times[:-1], float(times[-1])


def _renewals(cv: float, until: float, rng: np.random.Generator) -> Iterator[Floats]:
    """Events of a renewal process with mean gap 1, in blocks; the last block passes ``until``."""
    shape = 1.0 / cv**2
    last = 0.0
    while last < until:
        block = last + np.cumsum(rng.gamma(shape, 1.0 / shape, size=_GAPS_AT_ONCE))
        last = float(block[-1])
        yield block
