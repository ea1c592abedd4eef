"""One self-contained HTML page for one or more runs: a sentence, two pictures, eight rows, and the rest folded away.

No script, no network. ``report.opening`` computes the sentence; markup and style are in ``report.page``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from jettison.report import plots
from jettison.report.explain import format_plan
from jettison.report.failures import failure_lines
from jettison.report.offlineplots import draw_harvest, draw_latencies, draw_offline_requests
from jettison.report.offlinework import class_rows, given_up_rows, has_offline_work, objectives_told
from jettison.report.opening import key_rows, opening_sentence
from jettison.report.output import write_whole
from jettison.report.page import PAGE
from jettison.report.results import METRIC_DEFINITIONS, RunResult
from jettison.report.summary import comparison_headers, comparison_rows, fairness_rows, format_value, zero_counts
from jettison.report.variants import Variant, loads_of, variants_of

MAX_DETAILED_RUNS = 8
"""Most runs in the folded part; the sentence and the eight rows cover all runs."""

MAX_COLUMNS = 24
"""Most variants side by side in the eight rows."""

MAX_PANELS = 6
"""Most runs in the two pictures."""

_LOG_LINES = 200

_LONG = ("metric_definitions", "deployment", "spec")
"""Parts of a run's configuration that are for programs only."""


@dataclass(frozen=True, slots=True)
class PageTable:
    """A caller's own table: cells as shown, and lines below it. It comes below the sentence, or is folded away."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    is_folded: bool = False


@dataclass(frozen=True, slots=True)
class PagePicture:
    """A caller's own picture, drawn for a width in inches; it comes before the page's own pictures."""

    caption: str
    alt: str
    draw: Callable[[float], Figure | None]


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture as data URIs: for a wide window and, unless it is folded away, for a narrow one."""

    caption: str
    alt: str
    wide: str
    narrow: str | None


def render_html(
    runs: Sequence[RunResult], *, title: str = "Jettison report", tables: Sequence[PageTable] = (),
    pictures: Sequence[PagePicture] = (), opening: str | None = None,
) -> str:
    """The page as text. ``opening``: the caller's own sentence in place of the computed one.

    The first run is the baseline of the ratios; all outside text is escaped.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    variants = variants_of(runs)
    detailed = list(runs[:MAX_DETAILED_RUNS])
    columns = variants[:MAX_COLUMNS]
    return environment.from_string(PAGE).render(
        title=title,
        opening=opening or opening_sentence(runs),
        failures=failure_lines(runs),
        tables=tables,
        front=[*_drawn([(each.caption, each.alt, each.draw) for each in pictures]), *_front_pictures(variants)],
        offline_tables=_offline_tables(variants),
        offline_pictures=_offline_pictures(variants),
        columns=[(variant.name, plots.run_color(variant.index)) for variant in columns],
        key_rows=key_rows(columns),
        notes=_notes(variants, columns),
        num_runs=len(runs),
        headers=comparison_headers(detailed),
        rows=comparison_rows(detailed),
        zeros=zero_counts(detailed),
        fairness=[(run.name, rows) for run in detailed if (rows := fairness_rows(run))],
        pictures=_more_pictures(detailed, variants),
        definitions=METRIC_DEFINITIONS,
        runs=[_run_view(run, index) for index, run in enumerate(detailed)],
    )  # fmt: skip


def write_html(
    path: Path, runs: Sequence[RunResult], *, title: str = "Jettison report", tables: Sequence[PageTable] = (),
    pictures: Sequence[PagePicture] = (), opening: str | None = None,
) -> None:
    """Write :func:`render_html` to ``path``."""
    write_whole(path, render_html(runs, title=title, tables=tables, pictures=pictures, opening=opening))


def _notes(variants: Sequence[Variant], columns: Sequence[Variant]) -> list[str]:
    """The notes needed to read the eight rows."""
    notes = []
    if baselines := list(dict.fromkeys(variant.baseline_name for variant in columns if variant.has_baseline)):
        against = ", ".join(baselines[:3]) + (", ..." if len(baselines) > 3 else "")
        notes.append(f"The ratio beside a figure: how many times better than {against}; below 1 it is worse.")
    if (seeds := max((len(variant.runs) for variant in variants), default=0)) > 1:
        notes.append(f"Figures are medians of {seeds} seeds; requests are those of all seeds.")
    if more := len(variants) - len(columns):
        notes.append(f"{more} more variants are in the JSON file.")
    return notes


def _pictured(variants: Sequence[Variant]) -> list[list[plots.Shown]]:
    """The runs in the two pictures, by load: the first seed of each variant, up to ``MAX_PANELS``."""
    places = iter(range(MAX_PANELS))
    loads = [
        [plots.Shown(v.runs[0], v.name, v.index) for v, _ in zip(load, places, strict=False)]
        for load in islice(loads_of(variants), MAX_PANELS)
    ]
    return [load for load in loads if load]


def _front_pictures(variants: Sequence[Variant]) -> list[Picture]:
    loads = _pictured(variants)
    shown = [each for load in loads for each in load]
    names = ", ".join(each.name for each in shown)
    tails = "; ".join(
        f"{each.name}: half within {format_value(each.run.ttft_s.p50, 's')}, 99 of 100 within"
        f" {format_value(each.run.ttft_s.p99, 's')}"
        for each in shown
    )
    seed = ", the first seed of each" if any(len(variant.runs) > 1 for variant in variants) else ""
    captioned: list[tuple[str, str, Callable[[float], Figure | None]]] = [
        (f"First tokens: how long each request waited for its first, by its arrival{seed}",
         f"Scatter plot of the time to first token of each request over its arrival, logarithmic. {tails}.",
         lambda width: plots.draw_first_tokens(loads, width_in=width)),
        (f"Memory by use: what all devices together held{seed}",
         f"Stacked areas over time of what memory was used for, one panel for each of: {names}.",
         lambda width: plots.draw_memory_by_use(shown, width_in=width)),
    ]  # fmt: skip
    return _drawn(captioned)


def _drawn(captioned: Sequence[tuple[str, str, Callable[[float], Figure | None]]]) -> list[Picture]:
    return [
        Picture(caption, alt, wide, _data_uri(draw(plots.NARROW_IN)))
        for caption, alt, draw in captioned
        if (wide := _data_uri(draw(plots.WIDTH_IN))) is not None
    ]


def _with_offline_work(variants: Sequence[Variant]) -> list[plots.Shown]:
    """Runs in the section on offline work; none where no run has any."""
    shown = [each for load in _pictured(variants) for each in load]
    return [each for each in shown if has_offline_work(each.run)]


def _offline_tables(variants: Sequence[Variant]) -> list[PageTable]:
    shown = _with_offline_work(variants)
    runs, headers = [each.run for each in shown], ["", *(each.name for each in shown)]
    if not runs:
        return []
    rows, never = given_up_rows(runs)
    told = [f"In no run: {'; '.join(never)}."] if never else []
    return [
        PageTable("Both classes", headers, class_rows(runs), objectives_told(runs)),
        PageTable("What offline work gave up, and why it stood still", headers, rows, told),
    ]


def _offline_pictures(variants: Sequence[Variant]) -> list[Picture]:
    shown = _with_offline_work(variants)
    names = ", ".join(each.name for each in shown)
    captioned: list[tuple[str, str, Callable[[float], Figure | None]]] = [
        ("Online requests beside it: first token, and longest gap, with their objectives",
         f"Scatter plots over arrivals, with a line at each objective, of: {names}.",
         lambda width: draw_latencies(shown, width_in=width)),
        ("Tokens computed for the first time, by class, and when offline work gave way",
         f"Stacked areas of online and offline tokens a second over time, a panel for each of: {names}.",
         lambda width: draw_harvest(shown, width_in=width)),
        ("Offline requests by where they are",
         f"Stacked areas over time of running, hosted and waiting offline requests, a panel for each of: {names}.",
         lambda width: draw_offline_requests(shown, width_in=width)),
    ]  # fmt: skip
    return _drawn(captioned)


def _more_pictures(runs: Sequence[RunResult], variants: Sequence[Variant]) -> list[Picture]:
    """The folded pictures; first tokens of all runs only where the opening shows some of them."""
    shown = sum(map(len, _pictured(variants)))
    everyone = [[each] for each in plots.all_shown(runs)] if shown < len(runs) else []
    captioned: list[tuple[str, Figure | None]] = [
        ("Time to first token of each request over its arrival, run by run", plots.draw_first_tokens(everyone)),
        ("Queue, batch and KV usage over time", plots.draw_queue(runs)),
        *((f"Memory of each worker over time, {run.name}", plots.draw_memory(run)) for run in runs),
        ("Share of requests above each TTFT and TPOT", plots.draw_distributions(runs)),
    ]
    return [
        Picture(caption, caption, wide, None)
        for caption, figure in captioned
        if (wide := _data_uri(figure)) is not None
    ]


def _data_uri(figure: Figure | None) -> str | None:
    """A figure as an image's data URI: the ids of several inline SVGs would clash."""
    if figure is None:
        return None
    return "data:image/svg+xml;base64," + base64.b64encode(plots.to_svg(figure)).decode("ascii")


def _run_view(run: RunResult, index: int) -> dict[str, Any]:
    log = [event for event in run.log() if event["kind"] != "preempted"]  # of which there may be thousands
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
    if merges := event.get("merges"):  # a decision to drop
        fields.append(f"plan: {format_plan(merges)}")
    return f"{event['t']:.3f}", str(event["kind"]), ", ".join(fields)
