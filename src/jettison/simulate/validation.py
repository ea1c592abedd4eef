"""The error of a simulation against the live run of the same spec, beside that of a second live run.

Runs in, rows out; ``simulate.validate_command`` makes the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jettison.cost.model import CostModel
from jettison.report.results import RunResult


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a run. Differences are relative; of counts, how many more."""

    name: str
    value: Callable[[RunResult], float | None]
    is_count: bool = False
    unit: str = "s"


METRICS = (
    Metric("output tokens/s", lambda run: run.output_tokens_per_s, unit=""),
    Metric("TPOT mean", lambda run: run.tpot_s.mean),
    Metric("end to end mean", lambda run: run.e2e_s.mean),
    Metric("TTFT mean", lambda run: run.ttft_s.mean),
    Metric("TTFT P99", lambda run: run.ttft_s.p99),
    Metric("TPOT P99", lambda run: run.tpot_s.p99),
    Metric("end to end P99", lambda run: run.e2e_s.p99),
    Metric("drops", lambda run: float(run.events.get("drops", 0)), is_count=True, unit=""),
    Metric("preemptions", lambda run: float(run.events.get("preemptions", 0)), is_count=True, unit=""),
)


@dataclass(frozen=True, slots=True)
class Trio:
    """One scenario: live, live once more, and simulated."""

    spec: str
    variant: str
    seed: int
    live: RunResult
    again: RunResult
    """The same requests live, right after it."""
    simulated: RunResult
    steps: CostModel
    """What steps took in ``live``: the simulation's."""
    factor: float = 1.0
    """Of the workload: what a mean load came to."""

    @property
    def scenario(self) -> str:
        """For people."""
        return f"{self.spec}, {self.variant}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one scenario, or the mean of it over seeds."""

    scenario: str
    metric: str
    live: float
    again: float
    simulated: float
    is_count: bool
    unit: str

    @property
    def difference(self) -> float:
        """Of the simulation, over the live run."""
        return self._over_live(self.simulated)

    @property
    def floor(self) -> float:
        """Of the second live run, over the first: no simulation can be asked for less."""
        return self._over_live(self.again)

    def _over_live(self, other: float) -> float:
        if self.is_count:
            return other - self.live
        return other / self.live - 1.0 if self.live else 0.0 if not other else float("inf")

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        return {
            "scenario": self.scenario, "metric": self.metric, "live": self.live, "live_again": self.again,
            "simulated": self.simulated, "is_count": self.is_count, "unit": self.unit, "difference": self.difference,
            "floor": self.floor,
        }


def compare(trio: Trio) -> list[Comparison]:
    """Every metric that all three runs have."""
    return _rows(trio.scenario, [trio])


def compare_means(trios: Iterable[Trio]) -> list[Comparison]:
    """The same of scenarios that differ in their seeds only: means over the seeds."""
    groups: dict[tuple[str, str], list[Trio]] = {}
    for trio in trios:
        groups.setdefault((trio.spec, trio.variant), []).append(trio)
    return [row for (spec, variant), same in groups.items() for row in _rows(f"{spec}, {variant}", same)]


def _rows(scenario: str, trios: Sequence[Trio]) -> list[Comparison]:
    rows = []
    for metric in METRICS:
        sides = ("live", "again", "simulated")
        live, again, simulated = (_mean([metric.value(getattr(trio, side)) for trio in trios]) for side in sides)
        if live is not None and again is not None and simulated is not None:
            rows.append(Comparison(scenario, metric.name, live, again, simulated, metric.is_count, metric.unit))
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    """None where one run does not have it."""
    known = [value for value in values if value is not None]
    return sum(known) / len(values) if values and len(known) == len(values) else None
