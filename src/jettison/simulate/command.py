"""What ``jettison simulate`` does with a spec: run its cases, show the table, write what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from jettison.report.html import MAX_DETAILED_RUNS, write_html
from jettison.report.output import check_writable, safe_name
from jettison.report.results import RunResult, write_results
from jettison.report.terminal import PacedLines, note_phase, progress_bar, spinner
from jettison.simulate.batch import CaseProgress, run_cases
from jettison.simulate.cases import Case, cases_of
from jettison.simulate.table import print_table
from jettison.workload.cautions import print_cautions

"""Runs that a report page compares; the result file has all."""

MAX_NAMED_RUNS = 4
"""Runs of which a line says how far they are."""


def simulate_command(
    raw: Mapping[str, Any],
    name: str,
    base_dir: Path,
    *,
    json_out: Path | None = None,
    html_out: Path | None = None,
    timeline_out: Path | None = None,
    num_processes: int | None = None,
    console: Console | None = None,
) -> list[RunResult]:
    """Run every case of a spec. Raises UserError (one line) before anything runs that could have been known then."""
    console = console or Console()
    for path in (json_out, html_out, timeline_out):
        if path is not None:
            check_writable(path)
    lines = PacedLines(console)
    cases = prepare(raw, name, base_dir, console, lines)
    if timeline_out is not None:
        cases = with_timelines(cases, timeline_out)
    note_phase(f"simulating {len(cases)} runs of {name}", console)
    runs = run_shown(cases, console, lines, num_processes)
    write_outputs(runs, name, json_out, html_out, console)
    print_table(runs, console)
    if timeline_out is not None:
        console.print(f"time lines: {', '.join(str(c.timeline) for c in cases)}", soft_wrap=True)
    return runs


def prepare(
    raw: Mapping[str, Any], name: str, base_dir: Path, console: Console, lines: PacedLines
) -> list[Case]:
    """The cases of a spec, under a spinner that tells of pilots; then what to mind of their workloads."""
    cautions: list[str] = []
    with spinner("preparing", console) as status:
        cases = cases_of(
            raw, name, base_dir,
            on_pilot=lambda number, factor, load: status.update(
                f"mean load: pilot {number}, {factor:.4g} times the users make {load:.2f}"
            ),
            on_time=lambda now_s, last_s: lines.offer(lambda: f"mean load: a pilot {_how_far(now_s, last_s)}"),
            on_cautions=cautions.extend,
        )
    print_cautions(cautions, console)
    return cases


def run_shown(
    cases: Sequence[Case], console: Console, lines: PacedLines, num_processes: int | None = None
) -> list[RunResult]:
    """Run cases under a progress bar; where none is seen, ``lines`` say now and then how far virtual time is."""
    percent = TextColumn("{task.percentage:>3.0f} %")
    columns = (TextColumn("{task.description}"), BarColumn(), percent, TimeElapsedColumn())
    with progress_bar(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task(f"{len(cases)} runs" if len(cases) > 1 else cases[0].name, total=float(len(cases)))

        def note(progress: Sequence[CaseProgress]) -> None:
            bar.update(task, completed=sum(each.share for each in progress))
            lines.offer(lambda: progress_line(cases, progress))

        return run_cases(cases, num_processes=num_processes, on_progress=note)


def progress_line(cases: Sequence[Case], progress: Sequence[CaseProgress]) -> str:
    """How many runs are over, and how far virtual time is in those that are under way."""
    under_way = [
        f"{case.name} {_how_far(each.now_s, each.last_arrival_s)}, {each.share:.0%} of its requests have ended"
        for case, each in zip(cases, progress, strict=True)
        if each.now_s > 0.0 and each.share < 1.0
    ]
    num_over = sum(each.share >= 1.0 for each in progress)
    more = f"; and {len(under_way) - MAX_NAMED_RUNS} more" if len(under_way) > MAX_NAMED_RUNS else ""
    return "; ".join([f"{num_over} of {len(cases)} runs are over", *under_way[:MAX_NAMED_RUNS]]) + more


def _how_far(now_s: float, last_arrival_s: float) -> str:
    return f"is at {now_s:,.0f} s of virtual time (requests arrive until {last_arrival_s:,.0f} s)"


def write_outputs(
    runs: Sequence[RunResult], name: str, json_out: Path | None, html_out: Path | None, console: Console
) -> None:
    """The result file and the page."""
    if json_out is not None:
        write_results(json_out, runs)
    if html_out is not None:
        write_html(html_out, runs, title=f"jettison simulate: {name}")
        if len(runs) > MAX_DETAILED_RUNS:
            told = f"{html_out} compares {len(runs)} runs, and has all figures of the first {MAX_DETAILED_RUNS}"
            console.print(told, soft_wrap=True)


def with_timelines(cases: Sequence[Case], path: Path) -> list[Case]:
    """Each case with a file for its time line: the one that was named, or one a run beside it."""
    if len(cases) == 1:
        return [replace(cases[0], timeline=str(path))]
    stem, dot, suffix = path.name.partition(".")
    return [
        replace(case, timeline=str(path.with_name(f"{stem}-{safe_name(case.name)}{dot}{suffix}"))) for case in cases
    ]
