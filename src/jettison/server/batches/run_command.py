"""The display of ``jettison batch run``: a bar, and at the end a line with the outcome."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from jettison.config import EngineConfig
from jettison.report.terminal import PacedLines, progress_bar
from jettison.server.batches.alone import error_path, input_kind, run_alone, work_folder
from jettison.server.batches.records import Batch, Status
from jettison.server.batches.window import shown_s
from jettison.server.launch import sampling_defaults


def run_command(config: EngineConfig, path: Path, out: Path) -> int:
    """Returns the exit code: 1 where the batch failed. Failed lines are reported, but do not make the run fail."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[left]}"))  # fmt: skip
    if (sampling := sampling_defaults(config).told) is not None:
        console.print(sampling, markup=False, highlight=False, soft_wrap=True)
    lines = PacedLines(console)
    if (note := input_kind(path).note) is not None:
        console.print(f"{path}: {note}", markup=False, highlight=False, soft_wrap=True)
    with progress_bar(*columns, console=console) as bar:
        task = bar.add_task("loading", total=None, left="")

        def show(batch: Batch, seconds_left: float | None) -> None:
            left = "" if seconds_left is None else f"about {shown_s(seconds_left)} left"
            total = batch.num_lines or None
            bar.update(task, description=str(batch.status), total=total, completed=batch.num_done, left=left)
            lines.offer(lambda: f"{batch.status}: {batch.num_done} of {batch.num_lines} lines; {left}".rstrip("; "))

        batch = run_alone(config, path, out, show)
    if batch.status is not Status.COMPLETED:
        for error in batch.errors:
            where = "" if error.line is None else f"line {error.line}: "
            console.print(f"{where}{error.message}", markup=False, highlight=False)
        if batch.status is not Status.FAILED:
            told = f"the work is {batch.status}, and stays in {work_folder(out)}"
            console.print(told, markup=False, highlight=False, soft_wrap=True)
        return 1
    told = f"{batch.num_completed} of {batch.num_lines} lines: {out}"
    if batch.num_failed:
        told += f"; {batch.num_failed} without an answer: {error_path(out)}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    return 0
