"""Which runs a spec has, and one of them from beginning to end.

A case is plain data: it goes to another process, and into the result file, from which it can be run again: anywhere,
but for traces, which stay files and are looked for as ``simulate.workloads`` says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jettison.cost.deployment import deployment_to_document
from jettison.cost.model import CostModel
from jettison.cost.profile_document import to_document
from jettison.errors import ConfigError
from jettison.profiles import AUTO, read_profile
from jettison.report.results import RunResult
from jettison.report.timeline import Timeline
from jettison.sim.faults import Fault, draw_faults
from jettison.simulate.loads import OnPilot, OnTime, find_factor
from jettison.simulate.machines import (
    Machine,
    cluster_setup,
    described,
    edge_of,
    found_file,
    objectives_of,
    resolve_config,
    resolve_machine,
    step_executor,
)
from jettison.simulate.run import SimulationOptions, simulate_workload
from jettison.simulate.spec import DEFAULT_POLICY, ExperimentSpec, RandomFaults, parse_spec
from jettison.simulate.sweeps import SweepPoint, expand_sweep
from jettison.simulate.workload_spec import WorkloadSpec
from jettison.simulate.workloads import build_batches, build_pool, build_workload
from jettison.workload.cautions import cautions_of
from jettison.workload.prompts import PromptMaker

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a point of the sweep, a variant, a seed."""

    name: str
    raw: Mapping[str, Any]
    """The spec with one variant and one seed, without a sweep."""
    point: Mapping[str, Any] = field(default_factory=dict)
    """Swept values by place."""
    variant: str = ""
    seed: int = 0
    factor: float = 1.0
    """Of ``build_workload``: what ``mean_load`` came to."""
    base_dir: str = "."
    timeline: str | None = None
    """Where its time line goes."""

    @property
    def label(self) -> str:
        """Its name without the seed: what the runs that are averaged have in common."""
        return self.name.replace(f" seed={self.seed}", "")


def cases_of(
    raw: Mapping[str, Any], name: str, base_dir: Path = Path(), *, on_pilot: OnPilot = lambda *_: None,
    on_time: OnTime = lambda *_: None, on_cautions: Callable[[Sequence[str]], None] = lambda _: None,
    factor: float | None = None,
) -> list[Case]:
    """All runs: by point, then by seed, then by variant, so that what is compared stands together.

    Everything is checked first: each cluster is resolved, each variant's settings are, each workload is made once. A
    mean load is that of the first point's cluster: a sweep changes the cluster under the same requests. ``factor``:
    what it came to, where that is known. ``on_pilot``, ``on_time``: told of the pilots that find it. ``on_cautions``:
    told what to mind of each workload, as the first seed draws it.
    Raises ConfigError, TraceError, BudgetError, ModelError.
    """
    points = expand_sweep(raw)
    prepared = [_prepare(point, name, base_dir) for point in points]
    factors: dict[tuple[WorkloadSpec, int], float] = {}
    cases: list[Case] = []
    for point, (spec, _, plain, cautions) in zip(points, prepared, strict=True):
        key = (spec.workload, spec.seeds[0])
        if key not in factors:
            first, machine, _, _ = prepared[0]
            same = replace(spec, cluster=first.cluster, settings=first.settings)
            factors[key] = factor or find_factor(same, machine, base_dir, on_pilot=on_pilot, on_time=on_time)
            if factors[key] != 1.0:  # other gaps than those that it was prepared with
                cautions = cautions_of(build_workload(spec.workload, spec.seeds[0], base_dir, factor=factors[key]))
            on_cautions(cautions)
        for seed in spec.seeds:
            for index, variant in enumerate(spec.variants):
                parts = [variant.name, point.label, f"seed={seed}" if len(spec.seeds) > 1 else ""]
                cases.append(Case(
                    " ".join(part for part in parts if part), _one(plain, index, seed), point.values,
                    variant.name, seed, factors[key], str(base_dir),
                ))  # fmt: skip
    return cases


Prepared = tuple[ExperimentSpec, Machine, dict[str, Any], list[str]]
"""The spec of a point, its machine, the same as plain data, and what to mind of its workload."""


def _prepare(point: SweepPoint, name: str, base_dir: Path) -> Prepared:
    """Parsed, resolved, and as plain data that needs no model folder, description or profile."""
    spec = parse_spec(point.raw, name)
    machine = resolve_machine(spec.cluster, spec.settings, base_dir)
    for variant in spec.variants:
        cluster_setup(machine, spec, variant, spec.seeds[0])
    cautions = cautions_of(build_workload(spec.workload, spec.seeds[0], base_dir))
    _faults(spec, machine)
    return spec, machine, _portable(point.raw, spec, base_dir), cautions


def _portable(raw: Mapping[str, Any], spec: ExperimentSpec, base_dir: Path) -> dict[str, Any]:
    """With a description in place of a model folder, and with the content of a description's files."""
    plain = copy.deepcopy(dict(raw))
    cluster = spec.cluster
    if cluster.is_local:
        from jettison.simulate.local import local_deployment  # torch, and only here

        deployment = local_deployment(cluster, spec.settings, base_dir)
        kept = {key: plain["cluster"][key] for key in ("link", "block_size") if key in plain["cluster"]}
        plain["cluster"] = {"description": deployment_to_document(deployment), **kept}
    elif cluster.description is None and cluster.profile != AUTO:
        path = found_file(cluster.profile, base_dir, "cluster.profile")
        plain["cluster"]["profile"] = to_document(read_profile(path))
    elif isinstance(cluster.description, str) or cluster.profile != AUTO:
        kept = {key: value for key, value in plain["cluster"].items() if key not in ("description", "profile")}
        plain["cluster"] = {"description": deployment_to_document(described(cluster, base_dir)), **kept}
    return plain


def _one(plain: Mapping[str, Any], index: int, seed: int) -> dict[str, Any]:
    """The spec of a single run: of the variant with this number."""
    written = (plain.get("variants") or [DEFAULT_POLICY])[index]
    chosen = {"policy": written} if isinstance(written, str) else dict(written or {})
    kept = {key: value for key, value in plain.items() if key not in ("variants", "seeds", "sweep", "plan")}
    return {**kept, "variants": [chosen], "seeds": [seed]}


def run_case(
    case: Case, on_progress: OnProgress | None = None, *, on_time: OnTime | None = None,
    steps: CostModel | None = None,
) -> RunResult:
    """Simulate one case. The same case gives the same result, in any process.

    ``steps``: what steps take, where a live run has told it: what they lose to each other is in it. None: as the
    machine's profile has it. What the core knows stays the profile.
    """
    spec = parse_spec(case.raw, case.name)
    base_dir = Path(case.base_dir)
    machine = resolve_machine(spec.cluster, spec.settings, base_dir)
    workload = build_workload(spec.workload, case.seed, base_dir, factor=case.factor)
    variant = spec.variants[0]
    config = resolve_config(machine, spec, variant)
    objectives = objectives_of(spec, config)
    timeline = None if case.timeline is None else Timeline()
    options = SimulationOptions(
        name=case.name,
        edge=edge_of(spec.timing),
        observe_interval_s=spec.run.observe_interval_s,
        until_s=spec.run.until_s,
        detail=spec.run.detail,
        gaps=spec.run.gaps,
        faults=_faults(spec, machine),
        # The prompts of `jettison bench` with this seed: what was computed before a preemption may still be cached.
        prompts=PromptMaker(seed=case.seed) if config.memory.enable_prefix_caching else None,
        pool=build_pool(spec.workload, case.seed),
        batches=build_batches(spec.workload, case.seed),
        slo_ttft_s=objectives.ttft_s,
        slo_tpot_s=objectives.tpot_s,
        parameter_share=machine.parameter_share,
        on_progress=on_progress,
        on_time=None if on_time is None else lambda now_s: on_time(now_s, workload.rows[-1].arrival_s),
        observer=timeline,
    )
    setup = cluster_setup(machine, spec, variant, case.seed)
    if steps is not None:
        told = replace(setup.profile, cost=steps, contention=1.0)
        setup = replace(setup, profile=told, executor=step_executor(told, spec.timing, case.seed))
    run = simulate_workload(workload, setup, options)
    run.config["spec"] = dict(case.raw)
    run.config["point"] = dict(case.point)
    run.config["variant"], run.config["seed"] = case.variant, case.seed
    run.config["cluster"] |= {"name": machine.name, "gpus": machine.num_gpus}
    if spec.workload.mean_load is not None:
        run.config["workload"]["mean_load"] = {"wanted": spec.workload.mean_load, "factor": case.factor}
    if timeline is not None and case.timeline is not None:
        timeline.write(Path(case.timeline))
    return run


def _faults(spec: ExperimentSpec, machine: Machine) -> tuple[Fault, ...]:
    """Listed, or drawn. Raises ConfigError for a worker that does not exist."""
    if isinstance(spec.faults, RandomFaults):
        drawn = spec.faults
        return draw_faults(drawn.seed, range(machine.num_instances), drawn.span_s, drawn.number)
    for index, fault in enumerate(spec.faults):
        highest = max(workers_of(fault))
        if highest >= machine.num_instances:
            raise ConfigError(
                f"faults[{index}] names worker {highest}: the workers are 0 to {machine.num_instances - 1}"
            )
    return spec.faults


def workers_of(fault: Fault) -> list[int]:
    """The workers that a fault names: one, or the two ends of a link."""
    return [getattr(fault, key) for key in ("worker_id", "a", "b") if hasattr(fault, key)]
