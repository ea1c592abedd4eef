"""One self-contained HTML page for one or more runs: table, conditions, pictures. No script, no network."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from jettison.report import plots
from jettison.report.explain import format_plan
from jettison.report.failures import failure_lines
from jettison.report.output import write_whole
from jettison.report.page import PAGE
from jettison.report.results import METRIC_DEFINITIONS, RunResult
from jettison.report.summary import comparison_headers, comparison_rows, fairness_rows, format_value, zero_counts

_LOG_LINES = 200

_LONG = ("metric_definitions", "deployment", "spec")
"""Parts of a run's configuration that are for programs."""


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table of somebody else's at the top of a page: cells as they are to be read, lines below it."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def render_html(
    runs: Sequence[RunResult], *, title: str = "Jettison report", tables: Sequence[PageTable] = ()
) -> str:
    """The page as text. The first run is the baseline of the ratios; everything that came from outside is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(PAGE).render(
        title=title,
        failures=failure_lines(runs),
        tables=tables,
        headers=comparison_headers(runs),
        rows=comparison_rows(runs),
        zeros=zero_counts(runs),
        fairness=[(run.name, rows) for run in runs if (rows := fairness_rows(run))],
        pictures=_pictures(runs),
        definitions=METRIC_DEFINITIONS,
        runs=[_run_view(run, index) for index, run in enumerate(runs)],
        event_lines=[(plots.EVENT_COLORS[kind], *line) for kind, line in plots.EVENT_LINES.items()],
    )


def write_html(
    path: Path, runs: Sequence[RunResult], *, title: str = "Jettison report", tables: Sequence[PageTable] = ()
) -> None:
    """Write :func:`render_html` to ``path``."""
    write_whole(path, render_html(runs, title=title, tables=tables))


def _pictures(runs: Sequence[RunResult]) -> list[tuple[str, str]]:
    """(what it shows, data URI). As images and not inline: ids inside several SVGs would clash."""
    drawn: list[tuple[str, Figure | None]] = [
        ("Time to first token of each request over its arrival", plots.draw_ttft(runs)),
        ("Queue, batch and KV usage over time", plots.draw_queue(runs)),
        *((f"Memory of each worker over time, {run.name}", plots.draw_memory(run)) for run in runs),
        ("Share of requests above each TTFT and TPOT", plots.draw_distributions(runs)),
    ]
    return [
        (caption, "data:image/svg+xml;base64," + base64.b64encode(plots.to_svg(figure)).decode("ascii"))
        for caption, figure in drawn
        if figure is not None
    ]


def _run_view(run: RunResult, index: int) -> dict[str, Any]:
    log = run.events.get("log") or []
    failures: dict[str, int] = {}
    for row in run.requests_detail or []:
        if row.get("error"):
            failures[row["error"]] = failures.get(row["error"], 0) + 1
    lag = run.client.get("lag_s") or {}
    return {
        "name": run.name,
        "color": plots.run_color(index),
        "config": json.dumps({k: v for k, v in run.config.items() if k not in _LONG}, indent=2, default=str),
        "log": [_log_line(event) for event in log[:_LOG_LINES]],
        "log_left_out": max(0, len(log) - _LOG_LINES),
        "failures": sorted(failures.items(), key=lambda item: (-item[1], item[0]))[:5],
        "lag": {name: format_value(lag.get(name), "s") for name in ("p50", "p99", "max")} if lag else None,
    }


def _log_line(event: dict[str, Any]) -> tuple[str, str, str]:
    others = {key: value for key, value in event.items() if key not in ("t", "kind", "merges")}
    fields = [f"{key} {value}" for key, value in sorted(others.items())]
    if merges := event.get("merges"):  # of a decision to drop
        fields.append(f"plan: {format_plan(merges)}")
    return f"{event['t']:.3f}", str(event["kind"]), ", ".join(fields)
