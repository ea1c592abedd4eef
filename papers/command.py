"""``jettison reproduce``: runs figures, prints them, writes what was asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jettison.config import usable_cores
from jettison.report.output import check_writable, write_whole
from jettison.report.terminal import print_whole
from papers import engine
from papers.figure import Figure
from papers.page import row_cells, save_pictures, write_page
from papers.pool import Runs
from papers.registry import FIGURES, figure_named
from papers.rows import Outcome

PAGE = Path("papers/pages/reproduction.md")
"""Where the page of all figures goes; `docs/reproduction.md` sums it up from the result files."""
PLOTS = Path("reproduction")
"""Where plots go that no page shows and no flag wants elsewhere."""


def list_figures(console: Console) -> None:
    """Names and titles."""
    for figure in FIGURES.values():
        by_name = "; takes long, no part of `all`" if figure.is_long else ""
        console.print(f"{figure.name:20} {figure.title} ({figure.source}{by_name})", markup=False, highlight=False)


def figures_of(names: Sequence[str]) -> list[Figure]:
    """Those that are asked for; ``all``: but for long ones. Raises ConfigError for an unknown name."""
    if list(names) == ["all"]:
        return [figure for figure in FIGURES.values() if not figure.is_long]
    return [figure_named(name) for name in names]


def reproduce(
    names: Sequence[str],
    console: Console,
    *,
    json_out: Path | None,
    plots: Path | None,
    page: Path | None,
    processes: int | None,
    keep: Path | None = None,
) -> None:
    """Reproduce figures; they are printed one after the other, and runs that several need are simulated once.

    ``json_out`` is written after each; ``keep``: a folder for finished runs, as ``pool.Runs`` has it.
    Raises ConfigError for an unknown name.
    """
    chosen = figures_of(names)
    if page is None and list(names) == ["all"]:
        page = PAGE
    if plots is None and page is None:
        plots = PLOTS
    if json_out is not None:
        check_writable(json_out)
    if plots is not None:
        check_writable(plots / "plot.png")
    started_s = time.monotonic()
    num_processes = processes or usable_cores()
    outcomes: dict[str, Outcome] = {}
    with (
        Runs(num_processes, _progress(console, started_s), keep) as runs,
        closing(_in_order(chosen, runs, num_processes)) as done,
    ):
        for figure, outcome in done:
            outcomes[figure.name] = outcome
            print_outcome(figure, outcome, console)
            if json_out is not None:
                _write_json(json_out, outcomes)
            if plots is not None:
                files = save_pictures(plots, figure.name, outcome)
                told = ", ".join(str(plots / file) for file in files)
                console.print(f"plots: {told}", soft_wrap=True, highlight=False)
            if page is not None:
                write_page(page, outcomes, told_of_effort(runs, time.monotonic() - started_s))
    console.print(told_of_effort(runs, time.monotonic() - started_s), style="dim")


def _in_order(chosen: Sequence[Figure], runs: Runs, processes: int) -> Generator[tuple[Figure, Outcome], None, None]:
    """Each figure when it and those before it are done. With several processes figures run side by side, one more than
    there are processes: while a figure looks for its load, another's runs keep the other processes busy."""
    if processes == 1:
        for figure in chosen:
            yield figure, engine.reproduce(figure, runs)
        return
    threads = ThreadPoolExecutor(processes + 1)
    try:
        for figure, outcome in [(figure, threads.submit(engine.reproduce, figure, runs)) for figure in chosen]:
            yield figure, outcome.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # those that still run get no more of ``runs`` once it ends


def told_of_effort(runs: Runs, took_s: float) -> str:
    """How many simulations it took and how long; of kept ones the time is not known, so only how many."""
    total = runs.num_done + runs.num_kept
    if runs.num_kept:
        return f"{runs.num_kept} of {total} runs were kept from before."
    took = f"{took_s:.0f} s" if took_s < 120.0 else f"{took_s / 60.0:.0f} minutes"
    return f"{total} simulations took {took} here."


def _progress(console: Console, started_s: float) -> Any:
    def note(done: int, total: int, name: str) -> None:
        console.print(f"[{time.monotonic() - started_s:6.0f} s] {done}/{total} {name}", style="dim", markup=False)

    return note


def print_outcome(figure: Figure, outcome: Outcome, console: Console) -> None:
    """Rows and conditions in a terminal."""
    console.rule(f"{figure.name}: {figure.title} ({figure.source})", align="left")
    table = Table(header_style="bold", show_edge=False, pad_edge=False)
    for header in ("workload", "metric", "system", "against", "paper", "ours", "in band"):
        table.add_column(header, overflow="fold")
    for row in outcome.rows:
        table.add_row(*row_cells(row))
    print_whole(table, console)
    for workload, rows in outcome.conditions.items():
        console.print(f"{workload}:", markup=False, style="dim")
        for label, value in rows:
            console.print(f"  {label}: {value}", markup=False, style="dim")


def _write_json(path: Path, outcomes: dict[str, Outcome]) -> None:
    rows = [row.as_dict() for outcome in outcomes.values() for row in outcome.rows]
    conditions = {name: outcome.conditions for name, outcome in outcomes.items()}
    write_whole(path, json.dumps({"rows": rows, "conditions": conditions}, indent=1) + "\n")
