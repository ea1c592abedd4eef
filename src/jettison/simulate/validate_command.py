"""What ``jettison validate`` does with a spec: run it live, live again and simulated, seed by seed, and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jettison.errors import ConfigError
from jettison.live.engine.assembly import assemble
from jettison.live.profile.command import check_beside_model
from jettison.live.profile.measure import run_profile
from jettison.profiles import AUTO, default_path, read_profile, save_profile
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
from jettison.simulate.validation import Comparison, Trio, compare_means
from jettison.simulate.validation_file import write_document


def validate_command(
    raw: Mapping[str, Any], name: str, base_dir: Path, *, json_out: Path | None = None, calibrates: bool = False,
    console: Console | None = None,
) -> list[Trio]:
    """Run every case live, live again and simulated, and print what differs. ``calibrates``: measure the profile first,
    also where it is there. Raises ConfigError as ``check_both_sides`` does, and JettisonError, after all is written
    and printed, where requests of a live run were not answered."""
    console = console or Console()
    if json_out is not None:
        check_writable(json_out)
    specs = [parse_spec(point.raw, name) for point in expand_sweep(raw)]
    for spec in specs:
        check_both_sides(spec)
    for spec in specs:
        ensure_profiled(spec, base_dir, console, again=calibrates)
    with spinner("preparing", console) as status:
        cases = cases_of(raw, name, base_dir, on_pilot=lambda number, *_: status.update(f"mean load: pilot {number}"))
    trios = run_trios(cases, raw, name, base_dir, console)
    if json_out is not None:
        write_document(json_out, trios)
    print_comparison(trios, console)
    check_answered([run for trio in trios for run in (trio.live, trio.again)])
    return trios


def check_both_sides(spec: ExperimentSpec) -> None:
    """Raise ConfigError for a cluster that cannot be started here, and for what acts on the simulated side only."""
    if not spec.cluster.is_local:
        raise ConfigError("cluster: only a model folder can be served on this machine, no preset, no description")
    run = spec.run
    one_sided = {
        "cluster.link": spec.cluster.link != LinkChange(),
        "workload.offline": spec.workload.offline is not None,
        "workload.batches": bool(spec.workload.batches),
        "faults": bool(spec.faults),
        "timing": spec.timing != Timing(),
        "run.until_s": run.until_s is not None,
        "run.observe_interval_s": run.observe_interval_s != RunSpec().observe_interval_s,
        "settings.max_instances": any(
            settings.get("max_instances") not in (None, "auto")
            for settings in (spec.settings, *(variant.settings for variant in spec.variants))
        ),
    }
    for place, is_given in one_sided.items():
        if is_given:
            raise ConfigError(f"{place} acts on simulated runs only: the two sides would be different experiments")


def run_trios(
    cases: Sequence[Case], raw: Mapping[str, Any], name: str, base_dir: Path, console: Console
) -> list[Trio]:
    """Each case live, live once more, and simulated with the steps that the first of them recorded.

    Variants of a seed follow each other, so that the machine's drift meets both.
    """
    specs = {str(sorted(point.values.items())): parse_spec(point.raw, name) for point in expand_sweep(raw)}
    trios: list[Trio] = []
    for key, same in groupby(cases, lambda case: str(sorted(case.point.items()))):
        for case, live, again, steps in serve_all(list(same), specs[key], base_dir, console):
            with phase(f"simulating {case.name}", console):
                simulated = run_case(case, steps=steps)
            trios.append(Trio(specs[key].name, case.label, case.seed, live, again, simulated, steps, case.factor))
    return trios


# --- the profile


def ensure_profiled(spec: ExperimentSpec, base_dir: Path, console: Console, *, again: bool = False) -> None:
    """Measure the profile where it is missing, or ``again``, and keep it beside the model.

    A profile that the spec names is taken as it is. Raises ConfigError where it is not one.
    """
    if spec.cluster.profile != AUTO:
        read_profile(found_file(spec.cluster.profile, base_dir, "cluster.profile"))
        return
    config = local_config(spec.cluster, spec.settings, base_dir)
    assembly = assemble(config)
    path = default_path(Path(assembly.worker_specs[0].model_dir), assembly.fingerprint)
    if again or not path.exists():
        check_beside_model(path.parent, "make one elsewhere (`jettison profile --out FILE`), and name it: "
                           "cluster.profile: FILE")
        with phase("profiling, about a minute", console) as status:
            result = run_profile(config, progress=lambda share, text: status.update(f"profile: {text}"))
        save_profile(path, result.stored)


# --- results


def print_comparison(trios: Sequence[Trio], console: Console) -> None:
    """What was not answered; means over seeds, of the simulation and of the second live run over the first."""
    print_failures(all_runs(trios), console)
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for header in ("", "metric", "live", "live again", "simulated", "simulated / live", "live again / live"):
        table.add_column(header, justify="left" if header in ("", "metric") else "right")
    before = ""
    for row in compare_means(trios):
        table.add_row("" if row.scenario == before else row.scenario, row.metric, *_cells(row))
        before = row.scenario
    print_whole(table, console)
    console.print(
        "means over seeds; the last column is what two live runs of the same requests differ by: no simulation can be "
        "asked for less", style="dim", soft_wrap=True,
    )  # fmt: skip


def all_runs(trios: Sequence[Trio]) -> list[RunResult]:
    """Live, live again, simulated, scenario by scenario, named so."""
    return [
        replace(run, name=f"{trio.scenario}, {side}")
        for trio in trios
        for side, run in (("live", trio.live), ("live again", trio.again), ("simulated", trio.simulated))
    ]


def _cells(row: Comparison) -> list[str]:
    figures = [format_value(float(f"{value:.4g}"), row.unit) for value in (row.live, row.again, row.simulated)]
    return figures + [f"{value:+.1f}" if row.is_count else f"{value:+.1%}" for value in (row.difference, row.floor)]
