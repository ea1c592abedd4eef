"""What ``jettison plan`` does with a spec: size the cluster for each variant, and say what that costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jettison.errors import ConfigError
from jettison.report.output import check_writable, write_whole
from jettison.report.results import RunResult
from jettison.report.summary import format_value
from jettison.report.terminal import print_whole, spinner
from jettison.simulate.cases import Case, cases_of
from jettison.simulate.command import run_shown
from jettison.simulate.sizing import Objective, Sizing, Trial, size_all
from jettison.simulate.spec import parse_spec
from jettison.simulate.sweeps import expand_sweep

FORMAT = "jettison-plan-1"

LEAST_LARGEST = 16
"""How far a search goes at least, where nobody says."""

HOURS_A_DAY = 24.0


def size_command(
    raw: Mapping[str, Any],
    name: str,
    base_dir: Path,
    *,
    slo_ttft_p99_s: float | None = None,
    slo_tpot_p99_s: float | None = None,
    max_instances: int | None = None,
    price_per_gpu_hour: float | None = None,
    json_out: Path | None = None,
    num_processes: int | None = None,
    console: Console | None = None,
) -> list[Sizing]:
    """Find the smallest cluster for each variant at each point of the sweep. What is not given comes from ``plan`` in
    the spec, the objectives also from ``slo``. Raises ConfigError (one line) where nothing holds, or nothing is asked.
    """
    console = console or Console()
    if json_out is not None:
        check_writable(json_out)
    first = parse_spec(expand_sweep(raw)[0].raw, name)
    objective = Objective(
        slo_ttft_p99_s or first.plan.slo_ttft_p99_s or first.slo.ttft_s,
        slo_tpot_p99_s or first.plan.slo_tpot_p99_s or first.slo.tpot_s,
    )
    if not objective.describe():
        raise ConfigError("an objective is missing: --slo-ttft-p99 or --slo-tpot-p99, or plan.slo_ttft_p99_s")
    with spinner("preparing", console) as status:
        cases = cases_of(
            raw, name, base_dir, on_pilot=lambda number, factor, load: status.update(f"mean load: pilot {number}")
        )
    largest = max_instances or first.plan.max_instances or max(LEAST_LARGEST, 4 * (first.cluster.instances or 1))
    price = first.plan.price_per_gpu_hour if price_per_gpu_hour is None else price_per_gpu_hour

    def run(probes: Sequence[Case]) -> list[RunResult]:
        return run_shown(probes, console, num_processes)

    sizings = size_all(cases, objective, largest, run)
    if all(sizing.found.smallest is None for sizing in sizings):
        raise ConfigError(_impossible(sizings, objective, largest))
    print_sizings(sizings, objective, price, console)
    if json_out is not None:
        document = {"format": FORMAT, "name": name, **sizing_document(sizings, objective, price)}
        write_whole(json_out, json.dumps(document, indent=1, sort_keys=True) + "\n")
    return sizings


def _impossible(sizings: Sequence[Sizing], objective: Objective, largest: int) -> str:
    """One line: what was asked, and how near the largest cluster came."""
    nearest = min(sizings, key=lambda sizing: sizing.best.ttft_p99_s or float("inf"))
    best = nearest.best
    came = f"P99 TTFT {format_value(best.ttft_p99_s, 's')}, P99 TPOT {format_value(best.tpot_p99_s, 's')}"
    served = f"{best.completed} of {best.submitted} requests served"
    wanted = f"{objective.describe()} is not reached with {largest} instances"
    return f"{wanted}: {nearest.variant} comes to {came}, {served}"


def cost_per_day(trial: Trial, price_per_gpu_hour: float | None) -> float | None:
    """In the price's own currency; of instances, where they have no GPUs."""
    if price_per_gpu_hour is None:
        return None
    return (trial.num_gpus or trial.num_instances) * price_per_gpu_hour * HOURS_A_DAY


def print_sizings(
    sizings: Sequence[Sizing], objective: Objective, price_per_gpu_hour: float | None, console: Console
) -> None:
    """A row a variant and point, with what it saves against the first variant of its point."""
    console.print(f"smallest cluster with {objective.describe()}, every seed, every request served", style="bold")
    headers = ["", "variant", "instances", "GPUs", "P99 TTFT", "P99 TPOT", "cost a day", "against the first"]
    rows = [_row(sizing, _first(sizings, sizing), price_per_gpu_hour) for sizing in sizings]
    shown = [i for i in range(len(headers)) if any(row[i] not in ("", "-") for row in rows)]
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index in shown:
        table.add_column(headers[index], justify="left" if index < 2 else "right", no_wrap=index >= 2)
    for row in rows:
        table.add_row(*(row[index] for index in shown))
    print_whole(table, console)
    for sizing in sizings:
        if sizing.found.exceptions:
            more = ", ".join(map(str, sizing.found.exceptions))
            console.print(
                f"{_label(sizing)}: not monotone, {sizing.found.smallest} instances hold and {more} do not",
                style="yellow", highlight=False,
            )


def _label(sizing: Sizing) -> str:
    point = " ".join(f"{place.rpartition('.')[2]}={value}" for place, value in sizing.point.items())
    return f"{sizing.variant} {point}".strip()


def _first(sizings: Sequence[Sizing], sizing: Sizing) -> Sizing:
    """The baseline of a point."""
    return next(other for other in sizings if other.point == sizing.point)


def _row(sizing: Sizing, first: Sizing, price_per_gpu_hour: float | None) -> list[str]:
    point = " ".join(f"{place.rpartition('.')[2]}={value}" for place, value in sizing.point.items())
    best = sizing.best
    is_found = sizing.found.smallest is not None
    cost = cost_per_day(best, price_per_gpu_hour) if is_found else None
    against = ""
    if sizing is not first and is_found and first.found.smallest is not None:
        against = f"{best.num_instances / first.best.num_instances - 1.0:+.0%}"
    return [
        point, sizing.variant, str(best.num_instances) if is_found else f"more than {best.num_instances}",
        "-" if best.num_gpus is None or not is_found else str(best.num_gpus),
        format_value(best.ttft_p99_s, "s"), format_value(best.tpot_p99_s, "s"),
        "-" if cost is None else f"{cost:,.2f}", against,
    ]  # fmt: skip


def sizing_document(
    sizings: Sequence[Sizing], objective: Objective, price_per_gpu_hour: float | None
) -> dict[str, Any]:
    """The same as JSON, with every trial."""
    return {
        "objective": {"ttft_p99_s": objective.ttft_p99_s, "tpot_p99_s": objective.tpot_p99_s},
        "price_per_gpu_hour": price_per_gpu_hour,
        "rows": [
            {
                "variant": sizing.variant, "policy": sizing.policy, "point": dict(sizing.point),
                "instances": sizing.found.smallest,
                "gpus": sizing.best.num_gpus if sizing.found.smallest is not None else None,
                "cost_per_day": cost_per_day(sizing.best, price_per_gpu_hour) if sizing.found.smallest else None,
                "is_monotone": not sizing.found.exceptions,
                "trials": [
                    {
                        "instances": trial.num_instances, "holds": trial.holds, "ttft_p99_s": trial.ttft_p99_s,
                        "tpot_p99_s": trial.tpot_p99_s, "completed": trial.completed, "submitted": trial.submitted,
                    }
                    for _, trial in sorted(sizing.trials.items())
                ],
            }
            for sizing in sizings
        ],
    }  # fmt: skip
