"""How near a simulation comes to the live run of the same spec: metric by metric, with what is demanded of each.

Runs in, rows out; who runs them is ``simulate.validate_command``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jettison.cost.drift import AS_MEASURED, MachineThen
from jettison.report.results import RunResult


@dataclass(frozen=True, slots=True)
class Target:
    """One metric. Relative differences; counts by how many they may be apart."""

    name: str
    value: Callable[[RunResult], float | None]
    demanded: float
    goal: float
    is_count: bool = False
    unit: str = "s"


TARGETS = (
    Target("output tokens/s", lambda run: run.output_tokens_per_s, 0.05, 0.03, unit=""),
    Target("TPOT mean", lambda run: run.tpot_s.mean, 0.08, 0.05),
    Target("end to end mean", lambda run: run.e2e_s.mean, 0.08, 0.05),
    Target("TTFT mean", lambda run: run.ttft_s.mean, 0.12, 0.08),
    Target("TTFT P99", lambda run: run.ttft_s.p99, 0.20, 0.15),
    Target("TPOT P99", lambda run: run.tpot_s.p99, 0.20, 0.15),
    Target("end to end P99", lambda run: run.e2e_s.p99, 0.20, 0.15),
    Target("drops", lambda run: float(run.events.get("drops", 0)), 1.0, 1.0, is_count=True, unit=""),
    Target("preemptions", lambda run: float(run.events.get("preemptions", 0)), 1.0, 1.0, is_count=True, unit=""),
)
"""Of must-show 1 and its goals."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One scenario, live and simulated."""

    spec: str
    variant: str
    seed: int
    live: RunResult
    simulated: RunResult
    factor: float = 1.0
    """Of the workload: what a mean load came to."""
    then: MachineThen = AS_MEASURED

    @property
    def scenario(self) -> str:
        """For people."""
        return f"{self.spec}, {self.variant}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one scenario, or the mean of it over seeds."""

    scenario: str
    metric: str
    real: float
    simulated: float
    is_count: bool
    demanded: float
    goal: float
    unit: str
    apart: float | None = None
    """Of a mean of counts: the largest difference of a single seed."""

    @property
    def difference(self) -> float:
        """Simulated over real, less 1; of counts how many more, of the seed where that is most."""
        if self.apart is not None:
            return self.apart
        if self.is_count:
            return self.simulated - self.real
        return self.simulated / self.real - 1.0 if self.real else 0.0 if not self.simulated else float("inf")

    @property
    def is_within(self) -> bool:
        """What is demanded."""
        return abs(self.difference) <= self.demanded + 1e-12

    @property
    def is_within_goal(self) -> bool:
        """What is aimed at."""
        return abs(self.difference) <= self.goal + 1e-12

    @property
    def severity(self) -> float:
        """The difference over what is demanded: above 1 it is missed."""
        return abs(self.difference) / self.demanded

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        return {
            "scenario": self.scenario, "metric": self.metric, "real": self.real, "simulated": self.simulated,
            "difference": self.difference, "within": self.is_within, "within_goal": self.is_within_goal,
            "severity": self.severity,
        }


def compare(pair: Pair) -> list[Comparison]:
    """Every metric that both runs have."""
    return [row for target in TARGETS if (row := _row(target, pair.scenario, [pair])) is not None]


def compare_means(pairs: Sequence[Pair]) -> list[Comparison]:
    """The same of scenarios that differ in their seeds only: means of both sides."""
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.spec, pair.variant), []).append(pair)
    return [
        row for (spec, variant), same in groups.items() for target in TARGETS
        if (row := _row(target, f"{spec}, {variant}", same)) is not None
    ]


def _row(target: Target, scenario: str, pairs: Sequence[Pair]) -> Comparison | None:
    real = [target.value(pair.live) for pair in pairs]
    simulated = [target.value(pair.simulated) for pair in pairs]
    if None in real or None in simulated:
        return None
    apart = None
    if target.is_count:
        apart = max(((s or 0.0) - (r or 0.0) for r, s in zip(real, simulated, strict=True)), key=abs)
    return Comparison(
        scenario, target.name, _mean(real), _mean(simulated), target.is_count, target.demanded, target.goal,
        target.unit, apart,
    )


def _mean(values: Sequence[float | None]) -> float:
    return sum(value or 0.0 for value in values) / len(values)


def worst(rows: Sequence[Comparison]) -> Comparison:
    """The one that misses most of what is demanded of it."""
    return max(rows, key=lambda row: row.severity)
