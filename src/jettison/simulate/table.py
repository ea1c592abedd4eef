"""What runs of a spec come to on one screen: a row a variant and point, seeds together, ratios to the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from jettison.report.brief import brief_conditions
from jettison.report.classes import class_figure, total_per_s
from jettison.report.failures import print_failures
from jettison.report.results import RunResult
from jettison.report.summary import format_value, num_asked
from jettison.report.terminal import print_fitted, print_whole

Figure = Callable[[RunResult], float | None]


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a run."""

    title: str
    figure: Figure
    unit: str = "s"
    has_ratio: bool = False


COLUMNS = (
    Column("TTFT\nP50", lambda run: run.ttft_s.p50),
    Column("TTFT\nP99", lambda run: run.ttft_s.p99, has_ratio=True),
    Column("TPOT\nP50", lambda run: run.tpot_s.p50),
    Column("TPOT\nP99", lambda run: run.tpot_s.p99),
    Column("tokens\n/s", lambda run: run.output_tokens_per_s, ""),
    Column("first-time\ntokens/s", total_per_s, ""),
    Column("of them\noffline", lambda run: class_figure(run, "offline", "tokens", "total_per_s"), ""),
    Column("good", lambda run: run.goodput["share"] if run.goodput else None, "%"),
    Column("drops", lambda run: run.events.get("drops"), ""),
    Column("pre-\nempted", lambda run: run.events.get("preemptions"), ""),
    Column("not\nserved", lambda run: run.requests.submitted - run.requests.completed, ""),
)


MAY_BE_LEFT_OUT = {"drops", "pre-\nempted", "not\nserved"}
"""Columns of which nothing but zeros need not be seen."""


def grouped(runs: Sequence[RunResult]) -> dict[tuple[str, str], list[RunResult]]:
    """Runs by point and variant, in their order: one list for all seeds."""
    groups: dict[tuple[str, str], list[RunResult]] = {}
    for run in runs:
        point = " ".join(f"{place.rpartition('.')[2]}={value}" for place, value in run.config["point"].items())
        groups.setdefault((point, run.config["variant"]), []).append(run)
    return groups


def mean(runs: Sequence[RunResult], figure: Figure) -> float | None:
    """Over the seeds that have the figure."""
    known = [value for run in runs if (value := figure(run)) is not None]
    return sum(known) / len(known) if known else None


def table_rows(runs: Sequence[RunResult]) -> list[list[str]]:
    """Cells: point, variant, each column's mean over seeds; P99 TTFT with how many times better than the baseline,
    where both have begun to answer every request: of others the slowest may be missing."""
    rows = []
    baselines: dict[str, list[RunResult]] = {}
    for (point, variant), same in grouped(runs).items():
        baseline = baselines.setdefault(point, same)
        cells = [point, variant]
        for column in COLUMNS:
            value = mean(same, column.figure)
            cells.append(_cell(value, column))
            if column.has_ratio:
                theirs = mean(baseline, column.figure)
                hides = baseline is same or any(run.ttft_s.count != num_asked(run) for run in (*baseline, *same))
                cells.append("" if hides or not value or not theirs else f"{theirs / value:.2f}x")
        rows.append(cells)
    return rows


def _cell(value: float | None, column: Column) -> str:
    if value is None:
        return "-"
    if column.unit == "%":
        return f"{value:.1%}"
    if column.unit == "" and value == int(value):
        return f"{int(value):,}" if value else "0"
    return format_value(float(f"{value:.3g}"), column.unit)


def cluster_lines(run: RunResult) -> list[str]:
    """What was simulated, where its spec left something to a default; nothing of a run that does not say."""
    cluster = run.config.get("cluster") or {}
    if not cluster.get("name"):
        return []
    gpus = f", {cluster['gpus']} GPUs in all" if cluster.get("gpus") else ""
    link = f"; between them {8e-9 * cluster['link_bytes_per_s']:.4g} Gbit/s" if cluster.get("link_bytes_per_s") else ""
    return [f"cluster: {cluster['name']}{gpus}{link}"]


def print_table(runs: Sequence[RunResult], console: Console) -> None:
    """What was not answered, the table, then the conditions of the first comparison in it."""
    print_failures(runs, console)
    rows = table_rows(runs)
    headers = ["", "variant"]
    for column in COLUMNS:
        headers += [column.title, "better"] if column.has_ratio else [column.title]
    empty = {i: ("", "-", "0") if headers[i] in MAY_BE_LEFT_OUT else ("", "-") for i in range(len(headers))}
    shown = [i for i in range(len(headers)) if any(row[i] not in empty[i] for row in rows)]
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index in shown:
        table.add_column(headers[index], justify="left" if index < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    print_whole(table, console, never_folds=True)
    num_seeds = max(len(same) for same in grouped(runs).values())
    if num_seeds > 1:
        console.print(f"means over {num_seeds} seeds", style="dim")
    first = next(iter(grouped(runs).values()))[0]
    for line in [*cluster_lines(first), *brief_conditions([(first, first)])]:
        if not line.startswith("client lag"):
            print_fitted(line, console, "dim")
