"""What ``jettison plan`` does with a spec: size the cluster for each variant, and say what that costs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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
from jettison.simulate.sizing import Objective, Sizing, Trial, Wanted, point_key, size_all
from jettison.simulate.spec import ExperimentSpec, parse_spec
from jettison.simulate.sweeps import expand_sweep

FORMAT = "jettison-plan-1"

LEAST_LARGEST = 16
"""How far a search goes at least, where nobody says."""

HOURS_A_DAY = 24.0

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class PlanFlags:
    """What the command line says; None: nothing. It beats the spec."""

    slo_ttft_p99_s: float | None = None
    slo_tpot_p99_s: float | None = None
    max_instances: int | None = None
    price_per_gpu_hour: float | None = None


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
    flags = PlanFlags(slo_ttft_p99_s, slo_tpot_p99_s, max_instances, price_per_gpu_hour)
    points = expand_sweep(raw)
    _check_sweep(points[0].values, parse_spec(points[0].raw, name), flags)
    wanted = {point_key(point.values): _wanted(parse_spec(point.raw, name), flags) for point in points}
    with spinner("preparing", console) as status:
        cases = cases_of(
            raw, name, base_dir, on_pilot=lambda number, factor, load: status.update(f"mean load: pilot {number}")
        )

    def run(probes: Sequence[Case]) -> list[RunResult]:
        return run_shown(probes, console, num_processes)

    sizings = size_all(cases, wanted, run)
    if all(sizing.found.smallest is None for sizing in sizings):
        raise ConfigError(_impossible(sizings))
    print_sizings(sizings, console)
    if json_out is not None:
        document = {"format": FORMAT, "name": name, **sizing_document(sizings)}
        write_whole(json_out, json.dumps(document, indent=1, sort_keys=True) + "\n")
    return sizings


def _check_sweep(values: Mapping[str, Any], first: ExperimentSpec, flags: PlanFlags) -> None:
    """Refuse places whose values would change nothing but the labels of the rows. Raises ConfigError."""
    if "cluster.instances" in values:
        raise ConfigError(
            "sweep.cluster.instances: `plan` looks for the number of instances itself; plan.max_instances says how far"
        )
    beaten_by: dict[str, str | None] = {}
    for key in PlanFlags.__slots__:
        if getattr(flags, key) is not None:
            beaten_by[f"plan.{key}"] = "--" + key.removesuffix("_s").replace("_", "-")
    for kind in ("ttft", "tpot"):
        key = f"plan.slo_{kind}_p99_s"
        beaten_by[f"slo.{kind}_s"] = beaten_by.get(key) or (
            key if getattr(first.plan, key.removeprefix("plan.")) is not None else None
        )
    for place in values:
        if beater := beaten_by.get(place):
            raise ConfigError(f"sweep.{place}: {beater} is given and beats it at every point")


def _wanted(spec: ExperimentSpec, flags: PlanFlags) -> Wanted:
    """At one point. Raises ConfigError where no objective is said."""
    plan, slo = spec.plan, spec.slo
    objective = Objective(
        flags.slo_ttft_p99_s or plan.slo_ttft_p99_s or slo.ttft_s,
        flags.slo_tpot_p99_s or plan.slo_tpot_p99_s or slo.tpot_s,
    )
    if not objective.describe():
        raise ConfigError("an objective is missing: --slo-ttft-p99 or --slo-tpot-p99, or plan.slo_ttft_p99_s")
    largest = flags.max_instances or plan.max_instances or max(LEAST_LARGEST, 4 * (spec.cluster.instances or 1))
    price = plan.price_per_gpu_hour if flags.price_per_gpu_hour is None else flags.price_per_gpu_hour
    return Wanted(objective, largest, price)


def _impossible(sizings: Sequence[Sizing]) -> str:
    """One line: what was asked, and how near the largest cluster came."""
    nearest = min(sizings, key=lambda sizing: sizing.best.ttft_p99_s or float("inf"))
    best = nearest.best
    came = f"P99 TTFT {format_value(best.ttft_p99_s, 's')}, P99 TPOT {format_value(best.tpot_p99_s, 's')}"
    served = f"{best.completed} of {best.submitted} requests served"
    asked = nearest.wanted
    wanted = f"{asked.objective.describe()} is not reached with {asked.largest} instances"
    return f"{wanted}: {nearest.variant} comes to {came}, {served}"


def cost_per_day(trial: Trial, price_per_gpu_hour: float | None) -> float | None:
    """In the price's own currency; of instances, where they have no GPUs."""
    if price_per_gpu_hour is None:
        return None
    return (trial.num_gpus or trial.num_instances) * price_per_gpu_hour * HOURS_A_DAY


def print_sizings(sizings: Sequence[Sizing], console: Console) -> None:
    """A row a variant and point, with what it saves against the first variant of its point."""
    objective = _common(sizing.wanted.objective for sizing in sizings)
    asked = "its point's objective" if objective is None else objective.describe()
    console.print(f"smallest cluster with {asked}, every seed, every request served", style="bold")
    headers = ["", "variant", "instances", "GPUs", "P99 TTFT", "P99 TPOT", "cost a day", "against the first"]
    rows = [_row(sizing, _first(sizings, sizing)) for sizing in sizings]
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
    for sizing in sizings:
        if told := _without_faults(sizing):
            console.print(told, style="yellow", highlight=False)


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
    point = " ".join(f"{place.rpartition('.')[2]}={value}" for place, value in sizing.point.items())
    return f"{sizing.variant} {point}".strip()


def _first(sizings: Sequence[Sizing], sizing: Sizing) -> Sizing:
    """The baseline of a point."""
    return next(other for other in sizings if other.point == sizing.point)


def _row(sizing: Sizing, first: Sizing) -> list[str]:
    point = " ".join(f"{place.rpartition('.')[2]}={value}" for place, value in sizing.point.items())
    best = sizing.best
    is_found = sizing.found.smallest is not None
    cost = cost_per_day(best, sizing.wanted.price_per_gpu_hour) if is_found else None
    against = ""
    if sizing is not first and is_found and first.found.smallest is not None:
        against = f"{best.num_instances / first.best.num_instances - 1.0:+.0%}"
    return [
        point, sizing.variant, str(best.num_instances) if is_found else f"more than {best.num_instances}",
        "-" if best.num_gpus is None or not is_found else str(best.num_gpus),
        format_value(best.ttft_p99_s, "s"), format_value(best.tpot_p99_s, "s"),
        "-" if cost is None else f"{cost:,.2f}", against,
    ]  # fmt: skip


def sizing_document(sizings: Sequence[Sizing]) -> dict[str, Any]:
    """The same as JSON, with every trial. At the top is what all points ask for; null where they differ."""
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
