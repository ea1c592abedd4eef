"""Runs as a report's opening compares them: the seeds of one variant share a column, and each variant is beside its
baseline.

Pure; nothing here writes words or draws. Figures of several seeds are medians, and a ratio is the median of the ratios
of runs with the same arrivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from jettison.report.results import RunResult
from jettison.report.summary import METRICS, Metric, baseline_of, ratio

_METRICS = {metric.label: metric for metric in METRICS}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to serve one load: a run, or a run for each seed."""

    name: str
    runs: tuple[RunResult, ...]
    baselines: tuple[RunResult, ...]
    """The baseline of each run, in order; a run without one is its own."""
    index: int
    """The index of the first run among all runs, which gives the colour."""

    @property
    def has_baseline(self) -> bool:
        """Whether it is compared with another variant."""
        return self.baselines[0] is not self.runs[0]

    @property
    def baseline_name(self) -> str:
        """The name of its baseline."""
        return name_without_seed(self.baselines[0])

    def figure(self, label: str) -> float | None:
        """The metric of ``summary.METRICS`` with this label: the median over the seeds with a value."""
        return middle([_METRICS[label].value(run) for run in self.runs])

    def ratios(self, label: str) -> list[float]:
        """The factor by which each run is better than its baseline, where both have a value."""
        metric: Metric = _METRICS[label]
        pairs = zip(self.runs, self.baselines, strict=True)
        found = [ratio(run, baseline, metric) for run, baseline in pairs if run is not baseline]
        return [times for times in found if times is not None]

    def event(self, name: str) -> float | None:
        """A count of events, the median over the seeds; None where no run has it."""
        return middle([run.events.get(name) for run in self.runs])


def middle(values: Sequence[float | None]) -> float | None:
    """The median of the values that are not None."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def variants_of(runs: Sequence[RunResult]) -> list[Variant]:
    """The variants in the order in which each first appears."""
    grouped: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        # Live runs of one name may be of different loads, so only the simulator's seeds are combined.
        key = name_without_seed(run) if run.config.get("simulated") else f"{index} {run.name}"
        grouped.setdefault(key, []).append(index)
    return [
        Variant(
            name_without_seed(runs[indices[0]]), tuple(runs[i] for i in indices),
            tuple(baseline_of(runs, runs[i]) for i in indices), indices[0],
        )
        for indices in grouped.values()
    ]  # fmt: skip


def name_without_seed(run: RunResult) -> str:
    """The run's name without its seed."""
    return run.name.replace(f" seed={run.config.get('seed')}", "")


def loads_of(variants: Sequence[Variant]) -> list[list[Variant]]:
    """Variants grouped by load: each baseline with the variants compared with it."""
    found: dict[int, list[Variant]] = {}
    for variant in variants:
        found.setdefault(id(variant.baselines[0]), []).append(variant)
    return list(found.values())
