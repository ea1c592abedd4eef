"""The short form of a comparison for a terminal: one table of pairs of runs, and its conditions in a few lines.

All figures, every condition and all definitions are in the report (``report.summary``, ``report.html``); what is shown
here is enough to see whether it was worth it, and under which conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jettison.report.results import RunResult
from jettison.report.summary import METRICS, format_count, format_value, ratio

SHOWN = {"TTFT p50": "P50 TTFT", "TTFT p99": "P99 TTFT", "TPOT p50": "P50 TPOT", "output tokens/s": "output tokens/s"}
"""Metrics of ``report.summary`` that have a row, and its label."""

EVENTS = ("drops", "restores", "preemptions")

CONDITIONS_LINES = 6
"""Most lines of the conditions."""


def brief_rows(pairs: Sequence[tuple[RunResult, RunResult]]) -> list[list[str]]:
    """Cells of the table: label, then for each pair the baseline's figure, the other's, and how many times better."""
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


def brief_conditions(pairs: Sequence[tuple[RunResult, RunResult]]) -> list[str]:
    """The fairness header, shortened to ``CONDITIONS_LINES``; empty where no run states any."""
    headers: list[dict[str, Any]] = [run.config.get("fairness") or {} for _, run in pairs]
    if not any(headers):
        return []
    first = next(header for header in headers if header)

    def figures(key: str, form: str = "{:.2f}") -> str:
        values = [header.get(key) for header in headers]
        return ", ".join("not stated" if value is None else form.format(value) for value in values)

    lines = [
        f"memory: parameters {_share(first.get('parameter_share'))} of each instance; KV tokens"
        f" {_count(first.get('kv_capacity_tokens'))} undropped, {_count(first.get('merged_capacity_tokens'))} merged",
        f"mean load: {figures('mean_load')} of the undropped; capacity / mean need:"
        f" {figures('capacity_over_mean_need')}",
        f"peak demand: {figures('peak_over_capacity')} of the undropped, {figures('peak_over_merged')} of the merged",
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


def print_brief(pairs: Sequence[tuple[RunResult, RunResult]], titles: Sequence[str], console: Console) -> None:
    """Print the table, a group of three columns a pair under its title, then the conditions, a line each."""
    table = Table(header_style="bold", show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for title, (baseline, run) in zip(titles, pairs, strict=True):
        for header in (f"{title}\n{_policy(baseline)}", f"\n{_policy(run)}", "\nratio"):
            table.add_column(header, justify="right", no_wrap=True)
    for row in brief_rows(pairs):
        table.add_row(*row)
    console.print(table)
    for line in brief_conditions(pairs):
        console.print(line, markup=False, highlight=False, style="dim", no_wrap=True, overflow="ellipsis")


def _policy(run: RunResult) -> str:
    """``burst: drop`` -> ``drop``."""
    return run.name.rpartition(": ")[2]
