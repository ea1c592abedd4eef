"""The live side of ``jettison validate``: each case on this machine, with what the machine was meanwhile."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from jettison.config import EngineConfig
from jettison.cost.drift import speed_line
from jettison.cost.hostcosts import HostCosts
from jettison.live.experiment import run_config
from jettison.live.profile_file import AUTO
from jettison.live.speed_watch import SpeedWatch, cores_taken
from jettison.live.step_process import Sample
from jettison.live.yardstick import Reading, Yardstick
from jettison.report.results import RunResult
from jettison.report.terminal import phase
from jettison.simulate.cases import Case
from jettison.simulate.local import local_config
from jettison.simulate.machines import Machine, found_file, resolve_config, resolve_machine
from jettison.simulate.spec import ExperimentSpec
from jettison.simulate.validation import MachineThen
from jettison.simulate.workloads import build_workload


class Served(NamedTuple):
    """A case that was run live."""

    case: Case
    run: RunResult
    then: MachineThen


def serve_all(cases: Sequence[Case], spec: ExperimentSpec, base_dir: Path, console: Console) -> list[Served]:
    """The cases of one point of a sweep, with a yardstick laid before the first and after each, and probes all along.

    Raises JettisonError: a server does not come up, requests of the yardstick fail.
    """
    here = local_config(spec.cluster, spec.settings, base_dir)
    machine = resolve_machine(spec.cluster, spec.settings, base_dir)
    runs: list[tuple[Case, RunResult, float]] = []
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
                run = run_config(
                    _keys(case, spec, machine, here, base_dir), workload, Path(folder), name=case.name,
                    seed=case.seed, slo_ttft_s=spec.slo.ttft_s, slo_tpot_s=spec.slo.tpot_s,
                )  # fmt: skip
                runs.append((case, run, run.client.pop("began_monotonic_s")))
                status.update("laying the yardstick")
                yardstick.lay()
        probes = watch.end()
    busy_speed = speed_while_serving(machine.costs, machine.num_instances)
    served = []
    # One reading more than runs: those before and after each.
    for (case, run, began_s), around in zip(runs, pairwise(yardstick.readings()), strict=True):
        within = [probe for probe in probes if began_s <= probe.at_s < began_s + run.duration_s]
        # The probing process is not over when a run is: it counts as somebody else's there.
        run.client["foreign_cores"] = max(0.0, run.client["foreign_cores"] - cores_taken(within))
        served.append(Served(case, run, machine_then(began_s, within, probes, around, busy_speed)))
    return served


def speed_while_serving(costs: HostCosts, num_instances: int) -> float:
    """Of a core while all of so many instances compute, as the constants have it."""
    busy = min(costs.num_cores, num_instances * costs.threads_per_worker)
    return costs.core_speeds[busy - 1] if busy else 1.0


def machine_then(
    began_s: float, within: Sequence[Sample], probes: Sequence[Sample], around: tuple[Reading, Reading],
    busy_speed: float,
) -> MachineThen:
    """What the machine was during a run, over what the constants say.

    The readings ``around`` it say how fast a core was while everybody served (``busy_speed``: the same by the
    constants), the probes ``within`` it how that went up and down in between. The controller's factor is of processor
    time; in a simulation its work is done at the speed of the cores, which is taken out for that.
    """
    speed = statistics.mean(reading.speed for reading in around)
    beside = [probe.took_s for probe in probes if any(r.begin_s <= probe.at_s < r.end_s for r in around)]
    line = speed_line(within, statistics.median(beside or [0.0]), began_s, speed=speed / busy_speed)
    factor = speed * statistics.mean(reading.controller_factor for reading in around)
    return MachineThen(line or ((0.0, speed / busy_speed),), factor)


def _keys(case: Case, spec: ExperimentSpec, machine: Machine, here: EngineConfig, base_dir: Path) -> dict[str, object]:
    """What the live server of a case is told."""
    variant = next(v for v in spec.variants if v.name == case.variant)
    config = resolve_config(machine, spec, variant)
    keys: dict[str, object] = {**config.flat(), "model": here.model.model}
    if spec.cluster.profile != AUTO and config.profile == AUTO:
        keys["profile"] = str(found_file(spec.cluster.profile, base_dir, "cluster.profile"))
    return keys
