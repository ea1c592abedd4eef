"""The live side of ``jettison validate``: each case twice on this machine, and what its steps took meanwhile."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from jettison.config import EngineConfig
from jettison.cost.model import CostModel
from jettison.cost.recorded import fitted_to
from jettison.errors import ConfigError
from jettison.live.experiments.overload import run_config
from jettison.live.profile.recorded_steps import read_steps
from jettison.profiles import AUTO
from jettison.report.results import RunResult
from jettison.report.terminal import phase
from jettison.simulate.cases import Case
from jettison.simulate.local import local_config
from jettison.simulate.machines import Machine, cluster_setup, found_file, resolve_config, resolve_machine
from jettison.simulate.spec import ExperimentSpec
from jettison.simulate.workloads import build_workload


class Served(NamedTuple):
    """A case that was run live."""

    case: Case
    run: RunResult
    again: RunResult
    """The same requests once more, right after it."""
    steps: CostModel
    """The profile's, fitted to the steps that ``run`` recorded."""


def serve_all(
    cases: Sequence[Case], spec: ExperimentSpec, base_dir: Path, console: Console
) -> Iterator[Served]:
    """The cases of one point of a sweep, one after the other. Raises JettisonError: a server does not come up."""
    here = local_config(spec.cluster, spec.settings, base_dir)
    machine = resolve_machine(spec.cluster, spec.settings, base_dir)
    for number, case in enumerate(cases, 1):
        workload = build_workload(spec.workload, case.seed, base_dir, factor=case.factor)
        if workload.columns.tenant is not None:
            raise ConfigError("workload.trace: its tenants act on simulated runs only: leave the column out")
        keys = _keys(case, spec, machine, here, base_dir)
        runs: list[RunResult] = []
        with tempfile.TemporaryDirectory(prefix="jettison-validate-") as folder:
            lines = [Path(folder) / f"{index}.json.gz" for index in range(2)]
            for line, which in zip(lines, ("live", "live once more"), strict=True):
                about = f"{number} of {len(cases)}: {case.name}, {which}, about {workload.duration_s:.0f} s"
                with phase(about, console):
                    runs.append(run_config(
                        keys, workload, Path(folder), name=case.name, seed=case.seed, slo_ttft_s=spec.slo.ttft_s,
                        slo_tpot_s=spec.slo.tpot_s, timeline=line,
                    ))  # fmt: skip
            steps = read_steps(lines[0], machine.shape.num_layers)
        yield Served(case, runs[0], runs[1], fitted_to(machine.profile.cost, steps))


def _keys(case: Case, spec: ExperimentSpec, machine: Machine, here: EngineConfig, base_dir: Path) -> dict[str, object]:
    """What the live server of a case is told."""
    variant = next(v for v in spec.variants if v.name == case.variant)
    config = resolve_config(machine, spec, variant)
    keys: dict[str, object] = {**config.flat(), "model": here.model.model}
    limit = cluster_setup(machine, spec, variant, case.seed).max_num_queued_reqs
    keys["max_num_queued_reqs"] = "none" if limit is None else limit
    if config.provenance["num_threads"] == "default":  # a description does not say how many cores there are
        keys["num_threads"] = here.num_threads
    if spec.cluster.profile != AUTO and config.profile == AUTO:
        keys["profile"] = str(found_file(spec.cluster.profile, base_dir, "cluster.profile"))
    return keys
