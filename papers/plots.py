"""Plots of figures, by what they compare: measures, workloads, points of a sweep, or the course of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from matplotlib.figure import Figure as Picture

from jettison.report.results import RunResult
from papers import pictures
from papers.figure import Found, Plot
from papers.measures import Measure
from papers.specs import Results


def by_measure(name: str, workload: str, title: str, measures: Mapping[str, Measure]) -> Plot:
    """A group of bars a measure, in seconds: a bar a system."""

    def draw(found: Mapping[str, Found]) -> Picture:
        runs = found[workload][0].runs
        groups = {
            label: {system: middle_of(of_system, measure) for system, of_system in runs.items()}
            for label, measure in measures.items()
        }
        return pictures.bars(groups, "seconds", title, log=True)

    return Plot(name, draw)


def by_workload(name: str, title: str, workloads: Sequence[str], measure: Measure, *, log: bool) -> Plot:
    """A group of bars a workload, in seconds: a bar a system."""

    def draw(found: Mapping[str, Found]) -> Picture:
        groups = {
            workload: {system: middle_of(runs, measure) for system, runs in found[workload][0].runs.items()}
            for workload in workloads
        }
        return pictures.bars(groups, "seconds", title, log=log)

    return Plot(name, draw)


def over_sweep(name: str, workload: str, key: str, xlabel: str, ylabel: str, measure: Measure) -> Plot:
    """A line a system, over the value that ``key`` has at each point of the part's sweep."""
    return over_points(
        name, workload, lambda results: float(results.spec.raw["workload"][key]), xlabel, ylabel, measure
    )


def over_points(
    name: str, workload: str, where: Callable[[Results], float], xlabel: str, ylabel: str, measure: Measure
) -> Plot:
    """A line a system, over the value that ``where`` finds at each point of the part's sweep."""

    def draw(found: Mapping[str, Found]) -> Picture:
        points = found[workload]
        at = [where(results) for results in points]
        series = {
            system: (at, [middle_of(results.runs[system], measure) or 0.0 for results in points])
            for system in points[0].runs
        }
        return pictures.lines(series, xlabel, ylabel, workload, log=True)

    return Plot(name, draw)


def over_time(name: str, workload: str, systems: Sequence[str] = (), title: str = "") -> Plot:
    """Memory, TTFT and throughput of each system's first seed; no systems: all."""

    def draw(found: Mapping[str, Found]) -> Picture:
        runs = found[workload][0].runs
        return pictures.time_lines({system: runs[system][0] for system in systems or runs}, title or workload)

    return Plot(name, draw)


def middle_of(runs: Sequence[RunResult], measure: Measure) -> float | None:
    """Median over runs; None where none has it."""
    known = [value for run in runs if (value := measure(run)) is not None]
    return median(known) if known else None
