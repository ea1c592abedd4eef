"""What ``jettison validate`` does with a spec: run it live and simulated, interleaved over the seeds, and compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jettison.errors import ConfigError
from jettison.live.assembly import assemble
from jettison.live.host_costs import measure_host_costs
from jettison.live.profile import run_profile
from jettison.live.profile_file import (
    AUTO,
    costs_path,
    default_path,
    fingerprint,
    load_costs,
    read_profile,
    save_costs,
    save_profile,
)
from jettison.report.failures import check_answered, print_failures
from jettison.report.output import check_writable
from jettison.report.results import RunResult
from jettison.report.summary import format_value
from jettison.report.terminal import phase, print_whole, spinner
from jettison.simulate.cases import Case, cases_of, run_case
from jettison.simulate.local import local_config
from jettison.simulate.machines import found_file
from jettison.simulate.spec import ExperimentSpec, LinkChange, RunSpec, Timing, parse_spec
from jettison.simulate.sweeps import expand_sweep
from jettison.simulate.validate_live import serve_all
from jettison.simulate.validation import Comparison, Pair, compare, compare_means, worst
from jettison.simulate.validation_file import write_document

MUCH_STOLEN_CORES = 0.1
"""Withheld by a hypervisor on average of a run without a word about it."""
STEADY = 1.2
"""By how much cores may have become faster or slower since they were calibrated without a word about it."""


def validate_command(
    raw: Mapping[str, Any], name: str, base_dir: Path, *, json_out: Path | None = None, calibrates: bool = False,
    console: Console | None = None,
) -> list[Pair]:
    """Run every case live and simulated and print what differs. ``calibrates``: measure profile and host costs first,
    also where they are there. Raises ConfigError as ``check_both_sides`` does, and JettisonError, after all is written
    and printed, where requests of a live run were not answered."""
    console = console or Console()
    if json_out is not None:
        check_writable(json_out)
    specs = [parse_spec(point.raw, name) for point in expand_sweep(raw)]
    for spec in specs:
        check_both_sides(spec)
    for spec in specs:
        ensure_calibrated(spec, base_dir, console, again=calibrates)
    with spinner("preparing", console) as status:
        cases = cases_of(raw, name, base_dir, on_pilot=lambda number, *_: status.update(f"mean load: pilot {number}"))
    pairs = run_pairs(cases, raw, name, base_dir, console)
    if json_out is not None:
        write_document(json_out, pairs)
    print_comparison(pairs, console)
    check_answered([pair.live for pair in pairs])
    return pairs


def check_both_sides(spec: ExperimentSpec) -> None:
    """Raise ConfigError for a cluster that cannot be started here, and for what acts on the simulated side only."""
    if not spec.cluster.is_local:
        raise ConfigError("cluster: only a model folder can be served on this machine, no preset, no description")
    run = spec.run
    one_sided = {
        "cluster.link": spec.cluster.link != LinkChange(),
        "faults": bool(spec.faults),
        "timing": spec.timing != Timing(),
        "run.until_s": run.until_s is not None,
        "run.observe_interval_s": run.observe_interval_s != RunSpec().observe_interval_s,
    }
    for place, is_given in one_sided.items():
        if is_given:
            raise ConfigError(f"{place} acts on simulated runs only: the two sides would be different experiments")


def run_pairs(
    cases: Sequence[Case], raw: Mapping[str, Any], name: str, base_dir: Path, console: Console
) -> list[Pair]:
    """The cases live, then simulated on a machine that is as fast as it was then.

    Variants of a seed follow each other, so that the machine's drift meets both.
    """
    specs = {str(sorted(point.values.items())): parse_spec(point.raw, name) for point in expand_sweep(raw)}
    pairs: list[Pair] = []
    for key, same in groupby(cases, lambda case: str(sorted(case.point.items()))):
        lived = serve_all(list(same), specs[key], base_dir, console)
        with phase("simulating the same", console) as status:
            for case, live, then in lived:
                status.update(f"simulating {case.name}")
                simulated = run_case(case, then=then)
                pairs.append(Pair(specs[key].name, case.label, case.seed, live, simulated, case.factor, then))
    return pairs


# --- calibration


def ensure_calibrated(spec: ExperimentSpec, base_dir: Path, console: Console, *, again: bool = False) -> None:
    """Measure what is missing of the profile and the host's costs, and keep it beside the model.

    A profile that the spec names is taken as it is, ``again`` or not. Raises ConfigError where it is not one.
    """
    config = local_config(spec.cluster, spec.settings, base_dir)
    worker = assemble(config).worker_specs[0]
    model_dir = Path(worker.model_dir)
    mark = fingerprint(model_dir, worker.dtype, worker.num_threads, worker.kernels)
    is_named = spec.cluster.profile != AUTO
    path = found_file(spec.cluster.profile, base_dir, "cluster.profile") if is_named else default_path(model_dir, mark)
    if not is_named and (again or not path.exists()):
        with phase("profiling steps, about a minute", console) as status:
            result = run_profile(config, progress=lambda share, text: status.update(f"profile: {text}"))
        save_profile(path, result.stored)
    if again or not load_costs(model_dir, mark).is_shared:
        with phase("measuring what serving takes, about a minute", console) as status:
            measured = measure_host_costs(
                config, read_profile(path).profile, progress=lambda share, text: status.update(f"host: {text}")
            )
        save_costs(costs_path(model_dir, mark), mark, measured.costs)


# --- results


def print_comparison(pairs: Sequence[Pair], console: Console) -> None:
    """What was not answered; means over seeds against what is demanded, then the worst single scenario."""
    print_failures(both_sides(pairs), console)
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for header in ("", "metric", "real", "simulated", "difference", "within", ""):
        table.add_column(header, justify="left" if header in ("", "metric") else "right")
    before = ""
    for row in compare_means(pairs):
        table.add_row("" if row.scenario == before else row.scenario, *_cells(row))
        before = row.scenario
    print_whole(table, console)
    console.print("means over seeds; goal: within the goal, yes: within what is demanded, NO: beyond it", style="dim")
    single = worst([row for pair in pairs for row in compare(pair)])
    foreign = max((pair.live.client.get("foreign_cores") or 0.0) for pair in pairs)
    if foreign > 0.05:
        console.print(f"others kept up to {foreign:.2f} cores busy meanwhile: the live side is not what it could be, "
                      "and nothing is simulated of that")
    stolen = max((pair.live.client.get("stolen_cores") or 0.0) for pair in pairs)
    if stolen > MUCH_STOLEN_CORES:
        console.print(f"a hypervisor withheld up to {stolen:.2f} cores meanwhile: simulated as cores that are slower "
                      "for some seconds, which says little of single requests")
    speeds = [statistics.median(speed for _, speed in pair.then.speed) / pair.then.had_share for pair in pairs]
    if max(abs(math.log(speed)) for speed in speeds) > math.log(STEADY):
        console.print(f"cores were {min(speeds):.2f} to {max(speeds):.2f} times as fast as when they were calibrated: "
                      "the constants may be of a bad minute, and calibrating anew (--calibrate) is worth its time")
    console.print(
        f"furthest beyond what is demanded of it, of all runs: {single.scenario}: {' '.join(_cells(single))}",
        highlight=False,
    )


def both_sides(pairs: Sequence[Pair]) -> list[RunResult]:
    """All runs, the live one before the simulated one, named by scenario and side."""
    return [
        replace(run, name=f"{pair.scenario}, {side}")
        for pair in pairs
        for side, run in (("live", pair.live), ("simulated", pair.simulated))
    ]


def _cells(row: Comparison) -> list[str]:
    difference = f"{row.difference:+.1f}" if row.is_count else f"{row.difference:+.1%}"
    mark = "goal" if row.is_within_goal else "yes" if row.is_within else "NO"
    figures = [format_value(float(f"{value:.4g}"), row.unit) for value in (row.real, row.simulated)]
    demanded = f"{row.demanded:g}" if row.is_count else f"{row.demanded:.0%}"
    return [row.metric, *figures, difference, demanded, mark]
