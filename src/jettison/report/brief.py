"""The short form of a comparison for a terminal: one table of pairs of runs, and its conditions in a few lines.

The report has all figures, conditions and definitions (``report.summary``, ``report.html``); this form shows whether
the change was worth it, and under which conditions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jettison.report.results import RunResult
from jettison.report.summary import METRICS, format_count, format_value, ratio
from jettison.report.terminal import print_fitted, print_whole

SHOWN = {"TTFT p50": "P50 TTFT", "TTFT p99": "P99 TTFT", "TPOT p50": "P50 TPOT", "output tokens/s": "output tokens/s"}
"""Metrics of ``report.summary`` with a row, and the label of the row."""

EVENTS = ("drops", "restores", "preemptions")

CONDITIONS_LINES = 7
"""Most lines of the conditions."""


def brief_rows(pairs: Sequence[tuple[RunResult, RunResult]]) -> list[list[str]]:
    """Cells of the table: label, then for each pair the baseline's figure, the other's, and the factor of
    improvement."""
    rows = []
    for metric in METRICS:
        if metric.label in SHOWN:
            cells = [SHOWN[metric.label]]
            for baseline, run in pairs:
                times = ratio(run, baseline, metric)
                cells += [format_value(metric.value(r), metric.unit) for r in (baseline, run)]
                cells.append("-" if times is None else f"{times:.2f}x")
            rows.append(cells)
    for name in EVENTS:
        rows.append([name])
        for pair in pairs:
            rows[-1] += [*(format_count(run.events.get(name)) for run in pair), ""]
    rows.append(["requests"])
    for pair in pairs:
        rows[-1] += [*(f"{run.requests.completed}/{run.requests.submitted}" for run in pair), ""]
    return rows


def brief_conditions(pairs: Sequence[tuple[RunResult, RunResult]], titles: Sequence[str] = ()) -> list[str]:
    """The fairness header, shortened to ``CONDITIONS_LINES``; empty where no run states any.

    Figures are those of each pair's baseline: the demand contains the queue that the baseline's own shortage made.
    ``titles``, where given, name the pairs in their order.
    """
    headers: list[dict[str, Any]] = [baseline.config.get("fairness") or {} for baseline, _ in pairs]
    if not any(headers):
        return []
    first = next(header for header in headers if header)

    def figures(key: str, names: Sequence[str] = titles) -> str:
        values = [header.get(key) for header in headers]
        texts = ["not stated" if value is None else f"{value:.2f}" for value in values]
        return ", ".join(f"{n} {text}" for n, text in zip(names, texts, strict=True)) if names else ", ".join(texts)

    of = ", ".join(dict.fromkeys(_policy(baseline) for baseline, _ in pairs))
    lines = [
        f"memory: parameters {_share(first.get('parameter_share'))} of each instance; KV tokens"
        f" {_count(first.get('kv_capacity_tokens'))} undropped, {_count(first.get('merged_capacity_tokens'))} merged",
        f"mean load ({of}): {figures('mean_load')}; capacity / mean need: {figures('capacity_over_mean_need', ())}",
        f"peak demand ({of}): {figures('peak_over_capacity')} undropped, {figures('peak_over_merged', ())} merged",
        "demand: KV that requests hold or wait for; load: its mean over the undropped",
        f"arrivals: {'; '.join(str(note) for note in first.get('arrivals') or ['not stated'])}",
        "TTFT: from the scheduled arrival; TPOT: a request's mean gap; ratio > 1: better",
    ]
    lags = [(run.client.get("lag_s") or {}).get("p99") for pair in pairs for run in pair]
    if known := [lag for lag in lags if lag is not None]:
        lines.append(f"client lag, in TTFT: p99 {format_value(max(known), 's')} at most")
    return lines


def _share(value: float | None) -> str:
    return "not stated" if value is None else f"{value:.0%}"


def _count(value: float | None) -> str:
    return "not stated" if value is None else f"{value:,.0f}"


def missed_aim(baseline: RunResult, run: RunResult, aimed_over_merged: float) -> str | None:
    """A line for a pair in which the peak demand measured by ``run`` makes it another experiment than the intended one.

    ``baseline``: the run without dropping, with the same arrivals. ``aimed_over_merged``: the intended peak demand over
    the merged capacity; above 1 the intended demand is more than dropping can carry. None where the pair is as
    intended, or lacks the figures.
    """
    header = run.config.get("fairness") or {}
    over_merged, over_capacity = header.get("peak_over_merged"), header.get("peak_over_capacity")
    if aimed_over_merged > 1.0:
        if over_merged is None or over_merged > 1.0:
            return None
        found = f"{over_merged:.2f} of it, which dropping can carry"
    elif over_merged is not None and over_merged > 1.0:
        found = f"{over_merged:.2f} of the merged capacity, more than dropping can carry"
    elif over_capacity is not None and over_capacity < 1.0:
        found = f"{over_capacity:.2f} of the undropped capacity, {_shortage(baseline, run)}"
    else:
        return None
    return (
        f"the calibration missed its aim in run {run.name}: peak demand was to be {aimed_over_merged:.2f} of the merged"
        f" capacity and came to {found}. The machine was not as fast as when it was measured, or others were busy on"
        " it; one more run may do"
    )


def _shortage(*runs: RunResult) -> str:
    """A text on whether memory ran short in a pair: a cluster below its total capacity may still lack memory in one
    instance."""
    counts = {
        name: [f"{format_count(run.events[name])} in {run.name}" for run in runs if run.events.get(name)]
        for name in ("drops", "preemptions")
    }
    known = [f"{name} {', '.join(found)}" for name, found in counts.items() if found]
    if known:
        return f"so memory ran short only now and then ({'; '.join(known)})"
    if all("drops" in run.events and "preemptions" in run.events for run in runs):
        return "so memory never ran short"
    return "less than was meant to make memory short"


def print_brief(
    pairs: Sequence[tuple[RunResult, RunResult]], titles: Mapping[str, str], console: Console
) -> None:
    """Print the table with three columns for each pair under its title, then the meaning of the titles, and the
    conditions.

    ``titles``: the titles of the pairs, in their order, each with its meaning.
    """
    table = Table(header_style="bold", show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for title, (baseline, run) in zip(titles, pairs, strict=True):
        for header in (f"{title}\n{_policy(baseline)}", f"\n{_policy(run)}", "\nratio"):
            table.add_column(header, justify="right", no_wrap=True)
    for row in brief_rows(pairs):
        table.add_row(*row)
    print_whole(table, console)
    for title, meaning in titles.items():
        print_fitted(f"{title}: {meaning}", console)
    for line in brief_conditions(pairs, list(titles)):
        print_fitted(line, console, "dim")


def _policy(run: RunResult) -> str:
    """``burst: drop`` -> ``drop``."""
    return run.name.rpartition(": ")[2]
