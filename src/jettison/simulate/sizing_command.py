"""What ``jettison plan`` does with a spec: size the cluster for each variant, and say what that costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from jettison.config import KEYS
from jettison.errors import ConfigError
from jettison.report.output import check_writable, write_whole
from jettison.report.results import RunResult
from jettison.report.summary import format_value
from jettison.report.terminal import PacedLines
from jettison.simulate.cases import Case
from jettison.simulate.command import prepare, run_shown
from jettison.simulate.machines import described
from jettison.simulate.sizing import Objective, Sizing, Wanted, point_key, size_all
from jettison.simulate.sizing_report import pictured_runs, print_sizings, sizing_document, write_sizing_page
from jettison.simulate.spec import ExperimentSpec, parse_spec
from jettison.simulate.sweeps import expand_sweep

FORMAT = "jettison-plan-1"

LEAST_LARGEST = 16
"""How far a search goes at least, where no flag says."""


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
    html_out: Path | None = None,
    num_processes: int | None = None,
    console: Console | None = None,
) -> list[Sizing]:
    """Find the smallest cluster for each variant at each point of the sweep. What is not given comes from ``plan`` in
    the spec, the objectives also from ``slo``. Raises ConfigError (one line) where nothing is asked, and, after all has
    been written and printed, where nothing holds.
    """
    console = console or Console()
    for path in (json_out, html_out):
        if path is not None:
            check_writable(path)
    flags = PlanFlags(slo_ttft_p99_s, slo_tpot_p99_s, max_instances, price_per_gpu_hour)
    points = expand_sweep(raw)
    _check_sweep(points[0].values, parse_spec(points[0].raw, name), flags)
    specs = {point_key(point.values): parse_spec(point.raw, name) for point in points}
    wanted = {key: _wanted(spec, flags) for key, spec in specs.items()}
    for spec in specs.values():
        _check_scale(spec, base_dir)
    lines = PacedLines(console)  # one for all probes: each may take less time than two lines are apart
    cases = prepare(raw, name, base_dir, console, lines)

    def run(probes: Sequence[Case]) -> list[RunResult]:
        return run_shown(probes, console, lines, num_processes)

    sizings = size_all(cases, wanted, run)
    _write_outputs(sizings, name, json_out, html_out, console)
    print_sizings(sizings, console)
    if all(sizing.found.smallest is None for sizing in sizings):  # what was tried is told all the same
        raise ConfigError(_impossible(sizings))
    return sizings


def _write_outputs(
    sizings: Sequence[Sizing], name: str, json_out: Path | None, html_out: Path | None, console: Console
) -> None:
    """Before anything is printed: the trials may have taken hours."""
    if json_out is not None:
        document = {"format": FORMAT, "name": name, **sizing_document(sizings)}
        write_whole(json_out, json.dumps(document, indent=1, sort_keys=True) + "\n")
    if html_out is not None:
        write_sizing_page(html_out, sizings, pictured_runs(sizings), title=f"jettison plan: {name}")


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


def _check_scale(spec: ExperimentSpec, base_dir: Path) -> None:
    """Refuse instances that come and go: a trial of one could start others. Raises ConfigError."""
    told = {} if spec.cluster.description is None else described(spec.cluster, base_dir).settings
    for variant in spec.variants:
        settings = {**told, **spec.settings, **variant.settings}
        for key in ("min_instances", "max_instances"):
            if key in settings and KEYS[key].parse(settings[key]) is not None:
                raise ConfigError(
                    f"settings.{key} {settings[key]}: `plan` tries fixed numbers of instances, and none may start or "
                    "leave meanwhile; leave it out, or say auto (plan.max_instances says how far is searched)"
                )


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
