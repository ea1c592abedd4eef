"""The live side of ``jettison validate``: each case on this machine, with what the machine was meanwhile."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

from rich.console import Console

from jettison.config import EngineConfig
from jettison.cost.drift import MachineThen, Taken, had_share, probes_evened, speed_line
from jettison.cost.hostcosts import HostCosts, num_busy_cores
from jettison.cost.hostfit import crowded_speeds, mean_shape
from jettison.live.experiment import run_config
from jettison.live.profile_file import AUTO
from jettison.live.speed_watch import SpeedWatch, cores_taken, taken_of
from jettison.live.yardstick import Reading, Span, Yardstick
from jettison.report.results import RunResult
from jettison.report.terminal import phase
from jettison.simulate.cases import Case
from jettison.simulate.local import local_config
from jettison.simulate.machines import Machine, found_file, resolve_config, resolve_machine
from jettison.simulate.spec import ExperimentSpec
from jettison.simulate.workloads import build_workload

_AnyProbe = TypeVar("_AnyProbe", bound=tuple[float, ...])


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
    readings = yardstick.readings()
    alone = [span for reading in readings for span in reading.alone_spans]
    crowded = [span for reading in readings for span in reading.crowded_spans]
    told = [probe[:3] for probe in probes]
    evened = probes_evened(told, _within(told, alone), _within(told, crowded))
    taken = taken_of(probes)
    served = []
    # One reading more than runs: those before and after each.
    for (case, run, began_s), around in zip(runs, pairwise(readings), strict=True):
        span = (began_s, began_s + run.duration_s)
        # The probing process is not over when a run is: it counts as somebody else's there.
        run.client["foreign_cores"] = max(0.0, run.client["foreign_cores"] - cores_taken(_within(probes, [span])))
        stolen_s = sum(some[3] for some in _within(taken, [span]))
        run.client["stolen_cores"] = stolen_s / max(run.duration_s, 1e-9)
        then = machine_then(span, evened, around, readings, machine.costs, machine.num_instances, taken)
        served.append(Served(case, run, then))
    return served


def machine_then(
    span: Span, probes: Sequence[tuple[float, float]], around: tuple[Reading, Reading], readings: Sequence[Reading],
    costs: HostCosts, num_instances: int, taken: Sequence[Taken] = (),
) -> MachineThen:
    """What the machine was during the ``span`` of a run, over what the constants say.

    The readings ``around`` it say how fast a core was alone, and while all instances served; the ``probes``
    (``probes_evened``) within it how that went up and down in between, ``taken`` what of it a hypervisor withheld.
    The controller's factor is of its work on one core alone. How steps' times hang on their tokens changes little: one
    reading tells it to some hundredths, all ``readings`` together to less.
    """
    alone = statistics.mean(reading.alone for reading in around)
    crowded = statistics.mean(reading.crowded for reading in around)
    beside = _within(probes, [some for reading in around for some in (*reading.alone_spans, *reading.crowded_spans)])
    usual = statistics.median(took for _, took in beside) if beside else 0.0
    return MachineThen(
        speed_line(_within(probes, [span]), usual, span[0], speed=alone, taken=taken) or ((0.0, alone),),
        crowded_speeds(costs.core_speeds, crowded / alone, num_busy_cores(costs, num_instances)),
        statistics.mean(reading.controller_factor for reading in around),
        mean_shape([reading.step_shape for reading in readings]),
        mean_shape([reading.crowded_shape for reading in readings]),
        had_share(taken, *span),
    )  # fmt: skip


def _within(probes: Sequence[_AnyProbe], spans: Sequence[Span]) -> list[_AnyProbe]:
    """Those that were taken in one of the spans."""
    return [probe for probe in probes if any(begin_s <= probe[0] < end_s for begin_s, end_s in spans)]


def _keys(case: Case, spec: ExperimentSpec, machine: Machine, here: EngineConfig, base_dir: Path) -> dict[str, object]:
    """What the live server of a case is told."""
    variant = next(v for v in spec.variants if v.name == case.variant)
    config = resolve_config(machine, spec, variant)
    keys: dict[str, object] = {**config.flat(), "model": here.model.model}
    if spec.cluster.profile != AUTO and config.profile == AUTO:
        keys["profile"] = str(found_file(spec.cluster.profile, base_dir, "cluster.profile"))
    return keys
