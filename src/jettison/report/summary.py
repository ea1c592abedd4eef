"""Runs side by side in a terminal: figures, and each one's ratio to the first run (the baseline)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from jettison.report.classes import CLASSES, class_figure, total_per_s
from jettison.report.failures import print_failures
from jettison.report.results import (
    METRIC_DEFINITIONS,
    RunResult,
    has_other_arrivals,
    met_the_same,
    shares_conditions,
)
from jettison.report.terminal import print_line, print_whole

_WHOLE_FROM = 1000
"""Times and rates show no fractions from here on."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of a comparison. ``lower_is_better`` is None where neither direction is better."""

    label: str
    value: Callable[[RunResult], float | None]
    unit: str
    lower_is_better: bool | None


def _figure(field: str, which: str) -> Callable[[RunResult], float | None]:
    def value(run: RunResult) -> float | None:
        found: float | None = getattr(getattr(run, field), which)
        return found

    return value


def _of_class(name: str, *keys: str) -> Callable[[RunResult], float | None]:
    return lambda run: class_figure(run, name, *keys)


_OF_CLASS = (
    ("first-time tokens/s", ("tokens", "total_per_s"), False),
    ("first-time output tokens/s", ("tokens", "output_per_s"), False),
    ("requests completed", ("requests", "completed"), None),
)
"""Figures with a row for each class: label, keys, direction."""

_DISTRIBUTIONS = (
    ("TTFT", "ttft_s"), ("first chunk", "first_chunk_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"),
    ("end to end", "e2e_s"),
)  # fmt: skip

METRICS: tuple[Metric, ...] = (
    *(
        Metric(f"{name} {which}", _figure(field, which), "s", True)
        for name, field in _DISTRIBUTIONS
        for which in ("mean", "p50", "p90", "p99", "max")
    ),
    Metric("output tokens/s", lambda run: run.output_tokens_per_s, "", False),
    Metric("first-time tokens/s", total_per_s, "", False),
    *(
        Metric(f"{name} {label}", _of_class(name, *keys), "", lower_is_better)
        for name in CLASSES
        for label, keys, lower_is_better in _OF_CLASS
    ),
    Metric("online requests within TTFT objective", _of_class("online", "ttft_within"), "", False),
    Metric("online gaps within TPOT objective", _of_class("online", "gaps_within"), "", False),
    Metric("online requests within both, in every gap", _of_class("online", "requests_within"), "", False),
    Metric("goodput share", lambda run: run.goodput["share"] if run.goodput else None, "", False),
    Metric("duration", lambda run: run.duration_s, "s", True),
)


def format_value(value: float | None, unit: str) -> str:
    """A figure for people: times below a second in ms, three or four digits, '-' for None."""
    if value is None:
        return "-"
    if unit == "s":
        return f"{value * 1000:.3g} ms" if abs(value) < 0.9995 else f"{format_number(value)} s"
    return f"{format_number(value)}{' ' + unit if unit else ''}"


def format_number(value: float) -> str:
    """A number with four digits; from a thousand on whole, with thousands separated; never in powers of ten."""
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= _WHOLE_FROM else f"{value:.4g}"


def ratio(run: RunResult, baseline: RunResult, metric: Metric) -> float | None:
    """The factor by which ``run`` is better than ``baseline`` (above 1 = better); None where a figure is missing."""
    ours, theirs = metric.value(run), metric.value(baseline)
    if not ours or not theirs or metric.lower_is_better is None:
        return None
    return theirs / ours if metric.lower_is_better else ours / theirs


def comparison_rows(runs: Sequence[RunResult]) -> list[list[str]]:
    """Cells of the comparison. First requests by how they ended, unanswered ones on top. Then a row for each metric:
    label, each run's figure and, after each but the first, its ratio to its baseline (``baseline_of``); a row with the
    number of samples precedes each distribution. Counts of events come last."""
    rows = _count_rows(_ends(runs))
    baselines = [baseline_of(runs, run) for run in runs]
    samples = {f"{name} mean": field for name, field in _DISTRIBUTIONS}
    has_two_clocks = any(run.opens_early for run in runs)
    for metric in METRICS:
        if all(metric.value(run) is None for run in runs):
            continue
        if metric.label.startswith("first chunk ") and not has_two_clocks:
            continue
        if metric.label in samples:
            rows += _sample_rows(metric.label.removesuffix(" mean"), samples[metric.label], runs)
        cells = [metric.label]
        for index, run in enumerate(runs):
            cells.append(format_value(metric.value(run), metric.unit))
            if index:
                baseline = baselines[index]
                times = None if baseline is run else ratio(run, baseline, metric)
                cells.append("-" if times is None else f"{times:.2f}x")
        rows.append(cells)
    return rows + _count_rows(_events(runs))


_Counts = dict[str, list[Any]]
"""Label -> each run's count; None where a run has none."""


def _ends(runs: Sequence[RunResult]) -> _Counts:
    """Requests by how they ended."""
    ends = ("failed", "rejected", "cancelled", "completed", "submitted")
    return {f"requests {end}": [getattr(run.requests, end) for run in runs] for end in ends}


def _events(runs: Sequence[RunResult]) -> _Counts:
    names = sorted({name for run in runs for name in run.events if name != "log"})
    return {name.replace("_", " "): [run.events.get(name) for run in runs] for name in names}


def _count_rows(counts: _Counts) -> list[list[str]]:
    return [_plain_row(label, [format_count(each) for each in found]) for label, found in counts.items() if any(found)]


def _sample_rows(name: str, field: str, runs: Sequence[RunResult]) -> list[list[str]]:
    """The row with the number of requests (ITL: of gaps) of the figures below it; no row where no file has it."""
    counts = [getattr(run, field).count for run in runs]
    if all(count is None for count in counts):
        return []
    of = ["" if field == "itl_s" else f" of {format_count(num_asked(run))}" for run in runs]
    cells = ["-" if count is None else f"{format_count(count)}{whole}" for count, whole in zip(counts, of, strict=True)]
    return [_plain_row(f"{name}, {'gaps' if field == 'itl_s' else 'requests'}", cells)]


def num_asked(run: RunResult) -> float:
    """Requests that latencies cover, answered or not."""
    online = class_figure(run, "online", "requests", "submitted")
    return online or run.requests.submitted


def zero_counts(runs: Sequence[RunResult]) -> list[str]:
    """Labels of the counts that are 0 in every run and so have no row."""
    return [label for label, counts in {**_ends(runs), **_events(runs)}.items() if not any(counts)]


def _plain_row(label: str, cells: Sequence[str]) -> list[str]:
    row = [label]
    for index, cell in enumerate(cells):
        row += [cell, ""] if index else [cell]
    return row


def format_count(value: Any) -> str:
    """A count with thousands separated, without a fraction where it is whole; other values as they print, '-' for
    None."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value == int(value) or abs(value) >= _WHOLE_FROM else f"{value:.4g}"


def comparison_headers(runs: Sequence[RunResult]) -> list[str]:
    """Column titles of :func:`comparison_rows`."""
    headers = [""]
    for index, run in enumerate(runs):
        baseline = baseline_of(runs, run)
        against = _why_alone(runs[0], run) if baseline is run else f"against {baseline.name}"
        headers += [run.name, against] if index else [run.name]
    return headers


def baseline_of(runs: Sequence[RunResult], run: RunResult) -> RunResult:
    """The first run with the same arrivals under the same conditions; where requests were not kept one by one, the
    first under the same conditions."""
    is_known = bool(run.requests_detail) and bool(runs[0].requests_detail)
    is_equal = met_the_same if is_known else shares_conditions
    return next(other for other in runs if other is run or is_equal(other, run))


def _why_alone(first: RunResult, run: RunResult) -> str:
    """The difference between a run and the first run, where no earlier run is its baseline."""
    if (first.config.get("point") or {}) != (run.config.get("point") or {}):
        return "other point"
    return "other arrivals" if has_other_arrivals(first, run) else "other seed"


FAIRNESS_LABELS = {
    "parameter_share": "parameters' share of memory",
    "mean_load": "mean load (mean KV demand / capacity)",
    "capacity_over_mean_need": "KV capacity / mean need",
    "peak_over_capacity": "peak demand / undropped capacity",
    "peak_over_merged": "peak demand / merged capacity",
    "mean_demand_tokens": "mean KV demand while requests arrive, tokens",
    "peak_demand_tokens": "peak KV demand, tokens",
    "kv_capacity_tokens": "undropped KV capacity, tokens",
    "merged_capacity_tokens": "merged KV capacity, tokens",
    "online_load_share": "online load as a share of the maximum",
    "demand_model": "demand found by",
}
"""Keys of ``config.fairness``, in the order shown, with their labels."""


def fairness_rows(run: RunResult) -> list[tuple[str, str]]:
    """The run's fairness header as (label, value), then the lines on its arrivals."""
    header = run.config.get("fairness")
    if not isinstance(header, dict):
        return []
    rows = []
    for key, label in FAIRNESS_LABELS.items():
        value = header.get(key)
        is_number = isinstance(value, int | float)
        rows.append((label, "not stated" if value is None else format_number(value) if is_number else str(value)))
    rows.extend(("arrivals", str(note)) for note in header.get("arrivals") or [])
    return rows


def print_summary(runs: Sequence[RunResult], console: Console | None = None) -> None:
    """Print the failures, the comparison, the first run's fairness header that there is, and the client's lag."""
    console = console or Console()
    print_failures(runs, console)
    table = Table(title=None, header_style="bold", show_edge=False, pad_edge=False)
    for index, header in enumerate(comparison_headers(runs)):
        table.add_column(header, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for row in comparison_rows(runs):
        table.add_row(*row)
    print_whole(table, console)
    if zeros := zero_counts(runs):
        print_line(f"0 in {'all runs' if len(runs) > 1 else 'this run'}: {', '.join(zeros)}", console, "dim")
    for run in runs:
        lag = run.client.get("lag_s") or {}
        if lag.get("p99") is not None:
            lag_text = f"p99 {format_value(lag['p99'], 's')}, max {format_value(lag['max'], 's')}"
            console.print(f"client lag of {run.name}: {lag_text} (included in TTFT)", markup=False, style="dim")
    stated = next((run for run in runs if fairness_rows(run)), None)
    if stated is not None:
        print_fairness(stated, console)


def print_fairness(run: RunResult, console: Console) -> None:
    """Print the conditions of a comparison: the run's fairness header, then the definition of each metric."""
    for label, value in fairness_rows(run):
        print_line(f"{label}: {value}", console, "dim")
    definitions = run.config.get("fairness", {}).get("metric_definitions") or METRIC_DEFINITIONS
    for name, meaning in definitions.items():
        print_line(f"{name}: {meaning}", console, "dim")
