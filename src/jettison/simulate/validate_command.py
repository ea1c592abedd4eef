"""What ``jettison validate`` does with a spec: run it live and simulated, interleaved over the seeds, and compare."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jettison.cost.drift import SpeedLine, speed_line
from jettison.device.kernels import load_kernels
from jettison.errors import ConfigError
from jettison.live.assembly import assemble
from jettison.live.experiment import run_config
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
from jettison.live.speed_watch import SpeedWatch, cores_taken
from jettison.report.output import check_writable, write_whole
from jettison.report.results import RequestCounts, RunResult, Summary
from jettison.report.summary import format_value
from jettison.report.terminal import phase, print_whole, spinner
from jettison.simulate.cases import Case, cases_of, run_case
from jettison.simulate.local import local_config
from jettison.simulate.machines import found_file, resolve_config, resolve_machine
from jettison.simulate.spec import ExperimentSpec, LinkChange, RunSpec, Timing, parse_spec
from jettison.simulate.sweeps import expand_sweep
from jettison.simulate.validation import Comparison, Pair, compare, compare_means, worst
from jettison.simulate.workloads import build_workload

FORMAT = "jettison-validation-1"


def validate_command(
    raw: Mapping[str, Any], name: str, base_dir: Path, *, json_out: Path | None = None, calibrates: bool = False,
    console: Console | None = None,
) -> list[Pair]:
    """Run every case live and simulated and print what differs. ``calibrates``: measure profile and host costs first,
    also where they are there. Raises ConfigError as ``check_both_sides`` does."""
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
    print_comparison(pairs, console)
    if json_out is not None:
        write_whole(json_out, json.dumps(validation_document(pairs), indent=1, sort_keys=True) + "\n")
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
    """Each case live, then simulated; variants of a seed follow each other, so that the machine's drift meets both."""
    specs = {str(sorted(point.values.items())): parse_spec(point.raw, name) for point in expand_sweep(raw)}
    pairs = []
    with tempfile.TemporaryDirectory(prefix="jettison-validate-") as folder:
        for number, case in enumerate(cases, 1):
            spec = specs[str(sorted(case.point.items()))]
            workload = build_workload(spec.workload, case.seed, base_dir, factor=case.factor)
            with phase(f"{number} of {len(cases)}: {case.name}, live, about {workload.duration_s:.0f} s", console):
                machine = resolve_machine(spec.cluster, spec.settings, base_dir)
                variant = next(v for v in spec.variants if v.name == case.variant)
                config = resolve_config(machine, spec, variant)
                here = local_config(spec.cluster, spec.settings, base_dir)
                keys = {**config.flat(), "model": here.model.model}
                if spec.cluster.profile != AUTO and config.profile == AUTO:
                    keys["profile"] = str(found_file(spec.cluster.profile, base_dir, "cluster.profile"))
                with SpeedWatch(here) as watch:
                    live = run_config(
                        keys, workload, Path(folder), name=case.name, seed=case.seed,
                        slo_ttft_s=spec.slo.ttft_s, slo_tpot_s=spec.slo.tpot_s,
                    )
                    probes = watch.end()
            # The probing process is not over when a run is: it counts as somebody else's there.
            live.client["foreign_cores"] = max(0.0, live.client["foreign_cores"] - cores_taken(probes))
            drift = speed_line(probes, machine.costs.probe_s, live.client.pop("began_monotonic_s"))
            live.client["machine_speed"] = drift
            with phase(f"{number} of {len(cases)}: {case.name}, simulated", console):
                simulated = run_case(case, drift=drift)
            label = case.name.replace(f" seed={case.seed}", "")
            pairs.append(Pair(spec.name, label, case.seed, live, simulated, case.factor))
    return pairs


def simulate_again(raw: Mapping[str, Any], name: str, base_dir: Path, document: Mapping[str, Any]) -> list[Pair]:
    """The simulated side anew, of live runs that a document keeps, with the constants that are there now: the same
    requests, and cores as fast as the probes said. Raises ConfigError as ``validate_command`` does, KeyError where the
    document is of other cases."""
    kept = {run["scenario"]: run for run in document["runs"]}
    before_s = document["host_costs"]["probe_s"]
    specs = {str(sorted(point.values.items())): parse_spec(point.raw, name) for point in expand_sweep(raw)}
    pairs = []
    for case in cases_of(raw, name, base_dir):
        spec = specs[str(sorted(case.point.items()))]
        variant = case.name.replace(f" seed={case.seed}", "")
        run = kept[f"{spec.name}, {variant}, seed {case.seed}"]
        now_s = resolve_machine(spec.cluster, spec.settings, base_dir).costs.probe_s
        drift = tuple((at_s, speed * now_s / before_s) for at_s, speed in run["machine_speed"])
        simulated = run_case(replace(case, factor=run["factor"]), drift=drift)
        pairs.append(Pair(spec.name, variant, case.seed, _kept_run(run, drift, case), simulated, run["factor"]))
    return pairs


def _kept_run(run: Mapping[str, Any], drift: SpeedLine, case: Case) -> RunResult:
    """What a document keeps of a live run, and what it is compared with."""
    live = run["live"]
    client = {"foreign_cores": run["foreign_cores"], "machine_speed": drift}
    return RunResult(
        run["scenario"], duration_s=live["duration_s"], requests=RequestCounts(**live["requests"]),
        ttft_s=Summary(**live["ttft_s"]), tpot_s=Summary(**live["tpot_s"]), e2e_s=Summary(**live["e2e_s"]),
        output_tokens_per_s=live["output_tokens_per_s"], events=live["events"], client=client,
        config={"fairness": live["fairness"], "deployment": case.raw["cluster"]["description"]},
    )  # fmt: skip


# --- calibration


def ensure_calibrated(spec: ExperimentSpec, base_dir: Path, console: Console, *, again: bool = False) -> None:
    """Measure what is missing of the profile and the host's costs, and keep it beside the model.

    A profile that the spec names is taken as it is, ``again`` or not. Raises ConfigError where it is not one.
    """
    config = local_config(spec.cluster, spec.settings, base_dir)
    worker = assemble(config).worker_specs[0]
    model_dir = Path(worker.model_dir)
    mark = fingerprint(model_dir, worker.dtype, worker.num_threads, load_kernels(str(config.model.kernels)).name)
    is_named = spec.cluster.profile != AUTO
    path = found_file(spec.cluster.profile, base_dir, "cluster.profile") if is_named else default_path(model_dir, mark)
    if not is_named and (again or not path.exists()):
        with phase("profiling steps, about a minute", console) as status:
            result = run_profile(config, progress=lambda share, text: status.update(f"profile: {text}"))
        save_profile(path, result.stored)
    if again or not load_costs(model_dir, mark).probe_s:
        with phase("measuring what serving takes, about a minute", console) as status:
            measured = measure_host_costs(
                config, read_profile(path).profile, progress=lambda share, text: status.update(f"host: {text}")
            )
        save_costs(costs_path(model_dir, mark), mark, measured.costs)


# --- results


def print_comparison(pairs: Sequence[Pair], console: Console) -> None:
    """Means over seeds against what is demanded, then the worst single scenario."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for header in ("", "metric", "real", "simulated", "difference", ""):
        table.add_column(header, justify="right" if header in ("real", "simulated", "difference") else "left")
    before = ""
    for row in compare_means(pairs):
        table.add_row("" if row.scenario == before else row.scenario, *_cells(row))
        before = row.scenario
    print_whole(table, console)
    console.print("means over seeds; goal: within the goal, yes: within what is demanded", style="dim")
    single = worst([row for pair in pairs for row in compare(pair)])
    foreign = max((pair.live.client.get("foreign_cores") or 0.0) for pair in pairs)
    if foreign > 0.05:
        console.print(f"others kept up to {foreign:.2f} cores busy meanwhile: the live side is not what it could be")
    console.print(f"worst of all: {single.scenario}: {' '.join(_cells(single))}", highlight=False)


def _cells(row: Comparison) -> list[str]:
    difference = f"{row.difference:+.1f}" if row.is_count else f"{row.difference:+.1%}"
    mark = "goal" if row.is_within_goal else "yes" if row.is_within else "NO"
    figures = [format_value(float(f"{value:.4g}"), row.unit) for value in (row.real, row.simulated)]
    return [row.metric, *figures, difference, mark]


def validation_document(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Everything that was compared, and with which constants it was simulated."""
    rows = [row for pair in pairs for row in compare(pair)]
    means = compare_means(pairs)
    deployment = pairs[0].live.config.get("deployment") or {}
    return {
        "format": FORMAT,
        "means": [row.as_dict() for row in means],
        "rows": [row.as_dict() for row in rows],
        "worst": worst(rows).as_dict(),
        "within": all(row.is_within for row in means),
        "host_costs": deployment.get("costs"),
        "profile": deployment.get("profile"),
        "runs": [
            {
                "scenario": pair.scenario, "factor": pair.factor,
                "foreign_cores": pair.live.client.get("foreign_cores"),
                "machine_speed": [list(point) for point in pair.live.client.get("machine_speed", ())],
                **{
                    side: {
                        "requests": asdict(run.requests), "ttft_s": asdict(run.ttft_s), "tpot_s": asdict(run.tpot_s),
                        "e2e_s": asdict(run.e2e_s), "output_tokens_per_s": run.output_tokens_per_s,
                        "duration_s": run.duration_s,
                        "events": {k: v for k, v in run.events.items() if k != "log"},
                        "fairness": run.config.get("fairness"),
                    }
                    for side, run in (("live", pair.live), ("simulated", pair.simulated))
                },
            }
            for pair in pairs
        ],
    }  # fmt: skip

