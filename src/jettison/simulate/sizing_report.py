"""What a sizing found, for people and programs: the table, what has to be said below it, a page, a document.

The search is in ``sizing``, the command in ``sizing_command``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from jettison.report.brief import brief_conditions
from jettison.report.html import PageTable, write_html
from jettison.report.results import RunResult
from jettison.report.summary import fairness_rows, format_value
from jettison.report.terminal import print_fitted, print_whole
from jettison.simulate.sizing import Objective, Sizing, Trial
from jettison.simulate.table import cluster_lines

HOURS_A_DAY = 24.0

OTHER_SIZES = "The figures below are of these clusters: ratios there compare clusters of different sizes."

Value = TypeVar("Value")


def cost_per_day(trial: Trial, price_per_gpu_hour: float | None) -> float | None:
    """In the price's own currency; of instances, where they have no GPUs."""
    if price_per_gpu_hour is None:
        return None
    return (trial.num_gpus or trial.num_instances) * price_per_gpu_hour * HOURS_A_DAY


def sizing_table(sizings: Sequence[Sizing]) -> PageTable:
    """A row a variant and point, with what it saves against the first variant of its point. Columns in which nothing
    stands are left out."""
    objective = _common(sizing.wanted.objective for sizing in sizings)
    asked = "its point's objective" if objective is None else objective.describe()
    headers = ["", "variant", "instances", "GPUs", "P99 TTFT", "P99 TPOT", "cost a day", "against the first"]
    rows = [_row(sizing, _first(sizings, sizing)) for sizing in sizings]
    shown = [i for i in range(len(headers)) if any(row[i] not in ("", "-") for row in rows)]
    return PageTable(
        f"smallest cluster with {asked}, every seed, every request served",
        [headers[i] for i in shown], [[row[i] for i in shown] for row in rows], _told(sizings),
    )  # fmt: skip


def trials_table(sizings: Sequence[Sizing]) -> PageTable:
    """A row a cluster that was tried."""
    headers = ["variant", "instances", "GPUs", "holds", "P99 TTFT", "P99 TPOT", "requests served", "faults left out"]
    rows = [
        [
            _label(sizing), str(trial.num_instances), "-" if trial.num_gpus is None else str(trial.num_gpus),
            "yes" if trial.holds else "no", format_value(trial.ttft_p99_s, "s"), format_value(trial.tpot_p99_s, "s"),
            f"{trial.completed:,} of {trial.submitted:,}", str(trial.num_faults_left_out or "-"),
        ]
        for sizing in sizings
        for _, trial in sorted(sizing.trials.items())
    ]  # fmt: skip
    shown = [i for i in range(len(headers)) if any(row[i] != "-" for row in rows)]
    return PageTable(
        "clusters tried", [headers[i] for i in shown], [[row[i] for i in shown] for row in rows], is_folded=True
    )


def print_sizings(sizings: Sequence[Sizing], console: Console) -> None:
    """The table, below it what is odd about single rows, and the conditions of the first point's clusters."""
    found = sizing_table(sizings)
    console.print(found.title, style="bold")
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for header in found.headers:
        is_name = header in ("", "variant")
        table.add_column(header, justify="left" if is_name else "right", no_wrap=not is_name)
    for row in found.rows:
        table.add_row(*row)
    print_whole(table, console)
    for line in found.notes:
        console.print(line, style="yellow", highlight=False)
    _print_conditions(sizings, console)


def _print_conditions(sizings: Sequence[Sizing], console: Console) -> None:
    """Of the clusters of the first point; what is said once is the first one's."""
    shown = [run for sizing in sizings if sizing.point == sizings[0].point and (run := sizing.shown_run)]
    lines = [line for line in brief_conditions([(run, run) for run in shown]) if not line.startswith("client lag")]
    lines = [*dict.fromkeys(line for run in shown for line in cluster_lines(run)), *lines]
    if lines:
        print_fitted(f"conditions, first seed; memory is that of {shown[0].name}:", console, "dim")
    for line in lines:
        print_fitted(line, console, "dim")


def write_sizing_page(path: Path, sizings: Sequence[Sizing], runs: Sequence[RunResult], *, title: str) -> None:
    """The usual report of ``runs``, with what was found and what was tried above it."""
    found = sizing_table(sizings)
    if len({sizing.found.smallest for sizing in sizings} - {None}) > 1:
        found = replace(found, notes=[*found.notes, OTHER_SIZES])
    write_html(path, runs, title=title, tables=(found, trials_table(sizings)), opening=sizing_sentence(sizings))


def sizing_sentence(sizings: Sequence[Sizing]) -> str:
    """What was found, in one sentence: each variant of the only point, or at how many points each needed fewer."""
    objective = _common(sizing.wanted.objective for sizing in sizings)
    asked = "its point's objective" if objective is None else objective.describe()
    if all(sizing.found.smallest is None for sizing in sizings):
        return f"No cluster that was tried holds {asked}, not even one of {max(s.best.num_instances for s in sizings)}."
    if all(sizing.point == sizings[0].point for sizing in sizings):
        needs = [_need(sizing, _first(sizings, sizing)) for sizing in sizings]
        return f"To hold {asked}, {'; '.join(needs)}."
    return f"To hold {asked}, {'; '.join(_need_at_points(sizings)) or 'each point has its own cluster below'}."


def _need(sizing: Sizing, first: Sizing) -> str:
    if sizing.found.smallest is None:
        return f"{sizing.variant} needs more than {sizing.best.num_instances} instances"
    needed = f"{sizing.variant} needs {_instances(sizing.found.smallest)}"
    if sizing is first or first.found.smallest is None:
        return needed
    change = sizing.found.smallest / first.found.smallest - 1.0
    against = "as many" if not change else f"{abs(change):.0%} {'fewer' if change < 0 else 'more'}"
    return f"{needed}, {against}{' as' if not change else ' than'} {first.variant}"


def _need_at_points(sizings: Sequence[Sizing]) -> list[str]:
    """Of each variant beside the first: at how many points it needs fewer instances, as many, or more."""
    told = []
    for variant in dict.fromkeys(s.variant for s in sizings if s is not _first(sizings, s)):
        pairs = [(s.found.smallest, _first(sizings, s).found.smallest) for s in sizings if s.variant == variant]
        known = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
        counts = {
            "fewer instances than": sum(ours < theirs for ours, theirs in known),
            "as many as": sum(ours == theirs for ours, theirs in known),
            "more than": sum(ours > theirs for ours, theirs in known),
        }
        ways = ", ".join(f"{how} {sizings[0].variant} at {count}" for how, count in counts.items() if count)
        told.append(f"{variant} needs {ways or 'what cannot be compared at any'} of {len(pairs)} points")
    return told


def _instances(number: int) -> str:
    return f"{number} instance{'s' if number != 1 else ''}"


def pictured_runs(sizings: Sequence[Sizing]) -> list[RunResult]:
    """The runs of every smallest cluster that holds, or of the largest ones where none does; the first seed's first,
    each seed's by point and variant."""
    kept = [sizing.runs for sizing in sizings]
    if not any(kept):
        kept = [sizing.largest_runs for sizing in sizings]
    return [runs[seed] for seed in range(max(map(len, kept), default=0)) for runs in kept if seed < len(runs)]


def _told(sizings: Sequence[Sizing]) -> list[str]:
    told = []
    for sizing in sizings:
        if sizing.found.exceptions:
            more = ", ".join(map(str, sizing.found.exceptions))
            told.append(f"{_label(sizing)}: not monotone, {sizing.found.smallest} instances hold and {more} do not")
    return [*told, *(line for sizing in sizings if (line := _without_faults(sizing)))]


def _without_faults(sizing: Sizing) -> str | None:
    """What was found on clusters that some of the spec's faults cannot befall; None where all could."""
    lacking = [trial for _, trial in sorted(sizing.trials.items()) if trial.num_faults_left_out]
    if not lacking:
        return None
    told = f"{_label(sizing)}: clusters of {lacking[-1].num_instances} and fewer lack workers that listed faults name"
    if sizing.found.smallest is None or not sizing.best.num_faults_left_out:
        return f"{told}, and were tried without those"
    return f"{told}; the one that was found holds without {sizing.best.num_faults_left_out} of these"


def _common(values: Iterable[Value]) -> Value | None:
    """The value that all are; None where they differ."""
    first, *rest = values
    return first if all(value == first for value in rest) else None


def _label(sizing: Sizing) -> str:
    return f"{sizing.variant} {_point(sizing)}".strip()


def _point(sizing: Sizing) -> str:
    return " ".join(f"{place.rpartition('.')[2]}={value}" for place, value in sizing.point.items())


def _first(sizings: Sequence[Sizing], sizing: Sizing) -> Sizing:
    """The baseline of a point."""
    return next(other for other in sizings if other.point == sizing.point)


def _row(sizing: Sizing, first: Sizing) -> list[str]:
    best = sizing.best
    is_found = sizing.found.smallest is not None
    cost = cost_per_day(best, sizing.wanted.price_per_gpu_hour) if is_found else None
    against = ""
    if sizing is not first and is_found and first.found.smallest is not None:
        against = f"{best.num_instances / first.best.num_instances - 1.0:+.0%}"
    return [
        _point(sizing), sizing.variant, str(best.num_instances) if is_found else f"more than {best.num_instances}",
        "-" if best.num_gpus is None or not is_found else str(best.num_gpus),
        format_value(best.ttft_p99_s, "s"), format_value(best.tpot_p99_s, "s"),
        "-" if cost is None else f"{cost:,.2f}", against,
    ]  # fmt: skip


def sizing_document(sizings: Sequence[Sizing]) -> dict[str, Any]:
    """The same as JSON, with every trial. At the top is what all points ask for; null where they differ. Conditions are
    (label, value) rows: the fairness header of the cluster that was found, first seed."""
    objective = _common(sizing.wanted.objective for sizing in sizings)
    return {
        "objective": None if objective is None else _objective(objective),
        "price_per_gpu_hour": _common(sizing.wanted.price_per_gpu_hour for sizing in sizings),
        "rows": [
            {
                "variant": sizing.variant, "policy": sizing.policy, "point": dict(sizing.point),
                "objective": _objective(sizing.wanted.objective), "max_instances": sizing.wanted.largest,
                "price_per_gpu_hour": sizing.wanted.price_per_gpu_hour,
                "instances": sizing.found.smallest,
                "gpus": sizing.best.num_gpus if sizing.found.smallest is not None else None,
                "cost_per_day": (
                    cost_per_day(sizing.best, sizing.wanted.price_per_gpu_hour) if sizing.found.smallest else None
                ),
                "is_monotone": not sizing.found.exceptions,
                "conditions": fairness_rows(sizing.runs[0]) if sizing.runs else None,
                "trials": [
                    {
                        "instances": trial.num_instances, "holds": trial.holds, "ttft_p99_s": trial.ttft_p99_s,
                        "tpot_p99_s": trial.tpot_p99_s, "completed": trial.completed, "submitted": trial.submitted,
                        "faults_left_out": trial.num_faults_left_out,
                    }
                    for _, trial in sorted(sizing.trials.items())
                ],
            }
            for sizing in sizings
        ],
    }  # fmt: skip


def _objective(objective: Objective) -> dict[str, float | None]:
    return {"ttft_p99_s": objective.ttft_p99_s, "tpot_p99_s": objective.tpot_p99_s}
