"""What ``jettison validate`` does with a spec: run it live and simulated, interleaved over the seeds, and compare."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jettison.config import EngineConfig
from jettison.cost.deployment import costs_to_plain
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
from jettison.live.step_process import Sample
from jettison.live.yardstick import Reading, Yardstick
from jettison.report.output import check_writable, write_whole
from jettison.report.results import RequestCounts, RunResult, Summary
from jettison.report.summary import format_value
from jettison.report.terminal import phase, print_whole, spinner
from jettison.simulate.cases import Case, cases_of, run_case
from jettison.simulate.local import local_config
from jettison.simulate.machines import Machine, found_file, resolve_config, resolve_machine
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


@dataclass(frozen=True, slots=True)
class _Served:
    """A case that was run live."""

    case: Case
    run: RunResult
    began_s: float
    """Of the monotonic clock."""


@dataclass(frozen=True, slots=True)
class MachineThen:
    """What a machine was during a live run, over what its constants say."""

    speed: SpeedLine = ()
    """Of its cores."""
    controller_factor: float = 1.0
    """What the controller took beyond what slower cores make of it."""


def run_pairs(
    cases: Sequence[Case], raw: Mapping[str, Any], name: str, base_dir: Path, console: Console
) -> list[Pair]:
    """The cases live, with a yardstick laid before and after each, then simulated on cores as fast as it said.

    Variants of a seed follow each other, so that the machine's drift meets both.
    """
    specs = {str(sorted(point.values.items())): parse_spec(point.raw, name) for point in expand_sweep(raw)}
    pairs: list[Pair] = []
    for key, same in groupby(cases, lambda case: str(sorted(case.point.items()))):
        lived = _serve_all(list(same), specs[key], base_dir, console)
        with phase("simulating the same", console) as status:
            for served, then in lived:
                status.update(f"simulating {served.case.name}")
                served.run.client |= asdict(then)
                simulated = run_case(served.case, drift=then.speed, controller_factor=then.controller_factor)
                label = served.case.name.replace(f" seed={served.case.seed}", "")
                pairs.append(Pair(specs[key].name, label, served.case.seed, served.run, simulated, served.case.factor))
    return pairs


def _serve_all(
    cases: Sequence[Case], spec: ExperimentSpec, base_dir: Path, console: Console
) -> list[tuple[_Served, MachineThen]]:
    """The cases of one point of the sweep, and how fast the machine was meanwhile."""
    here = local_config(spec.cluster, spec.settings, base_dir)
    machine = resolve_machine(spec.cluster, spec.settings, base_dir)
    served = []
    with (
        tempfile.TemporaryDirectory(prefix="jettison-validate-") as folder,
        SpeedWatch(here) as watch,
        Yardstick(here, machine.num_instances, machine.costs, machine.profile) as yardstick,
    ):
        with phase("laying the yardstick", console):
            yardstick.lay()
        for number, case in enumerate(cases, 1):
            workload = build_workload(spec.workload, case.seed, base_dir, factor=case.factor)
            about = f"{number} of {len(cases)}: {case.name}, live, about {workload.duration_s:.0f} s"
            with phase(about, console) as status:
                live = run_config(
                    _keys(case, spec, machine, here, base_dir), workload, Path(folder), name=case.name,
                    seed=case.seed, slo_ttft_s=spec.slo.ttft_s, slo_tpot_s=spec.slo.tpot_s,
                )  # fmt: skip
                served.append(_Served(case, live, live.client.pop("began_monotonic_s")))
                status.update("laying the yardstick")
                yardstick.lay()
        probes = watch.end()
    speed = machine.costs.core_speeds[-1] if machine.costs.core_speeds else 1.0
    readings = yardstick.readings()
    return [
        (one, _machine_then(one, probes, (before, after), speed))
        for one, (before, after) in zip(served, pairwise(readings), strict=True)
    ]


def _keys(case: Case, spec: ExperimentSpec, machine: Machine, here: EngineConfig, base_dir: Path) -> dict[str, object]:
    """What the live server of a case is told."""
    variant = next(v for v in spec.variants if v.name == case.variant)
    config = resolve_config(machine, spec, variant)
    keys: dict[str, object] = {**config.flat(), "model": here.model.model}
    if spec.cluster.profile != AUTO and config.profile == AUTO:
        keys["profile"] = str(found_file(spec.cluster.profile, base_dir, "cluster.profile"))
    return keys


def _machine_then(
    served: _Served, probes: Sequence[Sample], around: tuple[Reading, Reading], busy_speed: float
) -> MachineThen:
    """How fast the machine was during a run, over what the constants say (``busy_speed``: the last core speed).

    The readings around it say how fast while everybody serves, the probes how that went up and down in between. The
    probing process is not over when a run is and counts as somebody else's there: what it took is taken out.
    """
    run, end_s = served.run, served.began_s + served.run.duration_s
    within = [probe for probe in probes if served.began_s <= probe.at_s < end_s]
    beside = [p.took_s for p in probes if any(r.begin_s <= p.at_s < r.end_s for r in around)]
    run.client["foreign_cores"] = max(0.0, run.client["foreign_cores"] - cores_taken(within))
    speed = statistics.mean(reading.speed for reading in around)
    line = speed_line(within, statistics.median(beside or [0.0]), served.began_s, speed=speed / busy_speed)
    return MachineThen(line, speed * statistics.mean(reading.controller_factor for reading in around))


def simulate_again(raw: Mapping[str, Any], name: str, base_dir: Path, document: Mapping[str, Any]) -> list[Pair]:
    """The simulated side anew, of live runs that a document keeps: the same requests, cores as fast as they were.

    Raises ConfigError as ``validate_command`` does, and where the constants are not those of the document; KeyError
    where the document is of other cases.
    """
    kept = {run["scenario"]: run for run in document["runs"]}
    specs = {str(sorted(point.values.items())): parse_spec(point.raw, name) for point in expand_sweep(raw)}
    pairs = []
    for case in cases_of(raw, name, base_dir):
        spec = specs[str(sorted(case.point.items()))]
        if costs_to_plain(resolve_machine(spec.cluster, spec.settings, base_dir).costs) != document["host_costs"]:
            raise ConfigError(f"{name}: constants were measured anew since: its live runs cannot be simulated again")
        variant = case.name.replace(f" seed={case.seed}", "")
        run = kept[f"{spec.name}, {variant}, seed {case.seed}"]
        then = MachineThen(tuple((at_s, speed) for at_s, speed in run["machine_speed"]), run["controller_factor"])
        simulated = run_case(
            replace(case, factor=run["factor"]), drift=then.speed, controller_factor=then.controller_factor
        )
        pairs.append(Pair(spec.name, variant, case.seed, _kept_run(run, then, case), simulated, run["factor"]))
    return pairs


def _kept_run(run: Mapping[str, Any], then: MachineThen, case: Case) -> RunResult:
    """What a document keeps of a live run, and what it is compared with."""
    live = run["live"]
    client = {"foreign_cores": run["foreign_cores"], **asdict(then)}
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
    if again or not load_costs(model_dir, mark).is_shared:
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
                "machine_speed": [list(point) for point in pair.live.client["speed"]],
                "controller_factor": pair.live.client["controller_factor"],
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

