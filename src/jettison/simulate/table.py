"""What runs of a spec come to, on one screen: a row a variant and point, seeds taken together, ratios to the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from jettison.report.brief import brief_conditions
from jettison.report.results import RunResult
from jettison.report.summary import format_value

Figure = Callable[[RunResult], float | None]


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a run."""

    title: str
    figure: Figure
    unit: str = "s"
    has_ratio: bool = False


COLUMNS = (
    Column("P50 TTFT", lambda run: run.ttft_s.p50),
    Column("P99 TTFT", lambda run: run.ttft_s.p99, has_ratio=True),
    Column("P50 TPOT", lambda run: run.tpot_s.p50),
    Column("P99 TPOT", lambda run: run.tpot_s.p99),
    Column("tokens/s", lambda run: run.output_tokens_per_s, ""),
    Column("good", lambda run: run.goodput["share"] if run.goodput else None, "%"),
    Column("drops", lambda run: run.events.get("drops"), ""),
    Column("preempted", lambda run: run.events.get("preemptions"), ""),
)


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
    """Cells: point, variant, then each column's mean over seeds; P99 TTFT with how many times better than the baseline."""
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
                cells.append("" if baseline is same or not value or not theirs else f"{theirs / value:.2f}x")
        total, completed = sum(r.requests.submitted for r in same), sum(r.requests.completed for r in same)
        cells.append(f"{completed}/{total}")
        rows.append(cells)
    return rows


def _cell(value: float | None, column: Column) -> str:
    if value is None:
        return "-"
    if column.unit == "%":
        return f"{value:.1%}"
    if column.unit == "" and value == int(value):
        return f"{int(value):,}"
    return format_value(value, column.unit)


def print_table(runs: Sequence[RunResult], console: Console) -> None:
    """The table, then the conditions of the first comparison in it."""
    rows = table_rows(runs)
    headers = ["", "variant"]
    for column in COLUMNS:
        headers += [column.title, "better"] if column.has_ratio else [column.title]
    headers.append("served")
    shown = [i for i in range(len(headers)) if any(row[i] not in ("", "-") for row in rows)]
    table = Table(header_style="bold", show_edge=False, pad_edge=False)
    for index in shown:
        table.add_column(headers[index], justify="left" if index < 2 else "right", no_wrap=index >= 2)
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    console.print(table)
    num_seeds = max(len(same) for same in grouped(runs).values())
    if num_seeds > 1:
        console.print(f"means over {num_seeds} seeds", style="dim")
    first = next(iter(grouped(runs).values()))[0]
    for line in brief_conditions([(first, first)]):
        if not line.startswith("client lag"):
            console.print(line, markup=False, highlight=False, style="dim", no_wrap=True, overflow="ellipsis")
