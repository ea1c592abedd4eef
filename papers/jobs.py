"""One run of a reproduction: a ``jettison simulate`` spec with one variant and one seed, and what no setting can say.

A job is text, so that it can be compared, kept and sent to another process; the same job gives the same result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jettison.cost.hardware import HardwareProfile
from jettison.report.results import RunResult
from jettison.sim.cluster import SimulatedCluster
from jettison.sim.setup import ClusterSetup
from jettison.simulate.machines import Machine, cluster_setup, objectives_of, resolve_config, resolve_machine
from jettison.simulate.run import SimulationOptions, simulate_workload
from jettison.simulate.spec import ExperimentSpec, VariantSpec, parse_spec
from jettison.simulate.workloads import build_batches, build_pool
from jettison.types import NANOSECONDS
from papers.harvest_load import find_harvest_load
from papers.load import find_load
from papers.parameter_swap import StreamedParameters
from papers.requests import requests_of
from papers.variants import Changes, Variant

MERGE_INTERVAL_S = 0.02
"""Between the times that a merge is asked for at the start; one waits while another that it needs is under way."""

MERGES_END_S = 4.0
"""Static pipelines that do not stand by then are given up: the run's reader has to look at its groups."""


def job_text(raw: Mapping[str, Any], variant: Variant, seed: int, factor: float) -> str:
    """The job. ``raw``: cluster, workload and settings of a spec; ``factor``: what its ``mean_load`` came to."""
    spec = {key: value for key, value in raw.items() if key not in ("variants", "seeds")}
    spec["variants"] = [{"name": variant.name, "policy": variant.policy, "settings": dict(variant.settings)}]
    spec["seeds"] = [seed]
    changes = {name: getattr(variant.changes, name) for name in Changes.__slots__}
    return json.dumps({"spec": spec, "factor": factor, "changes": changes}, sort_keys=True)


def load_text(raw: Mapping[str, Any], seed: int, rule: Mapping[str, Any] | None = None) -> str:
    """The job that finds the factor of ``build_workload`` at which the spec's ``mean_load`` is met, before any burst of
    it is replayed; or by a rule of ``harvest_load``."""
    spec = {key: value for key, value in raw.items() if key not in ("variants", "seeds")}
    spec["workload"] = {key: value for key, value in raw["workload"].items() if key != "replay_burst"}
    return json.dumps({"spec": {**spec, "seeds": [seed]}, "factor": None, "rule": rule}, sort_keys=True)


def job_name(text: str) -> str:
    """For progress."""
    job = json.loads(text)
    spec = job["spec"]
    what = "load" if job["factor"] is None else spec["variants"][0]["name"]
    return f"{spec['name']}: {what}, seed {spec['seeds'][0]}"


def run_job(text: str) -> RunResult | float:
    """The result of a run, or the factor where that is asked for. Raises ConfigError."""
    job = json.loads(text)
    spec = parse_spec(job["spec"])
    machine = resolve_machine(spec.cluster, spec.settings)
    if job["factor"] is None and job["rule"] is None:
        return find_load(spec, machine)
    if job["factor"] is None:
        def simulate(variant: Variant, factor: float) -> RunResult:
            one = replace(spec, variants=(VariantSpec(variant.name, variant.policy, variant.settings),))
            return _simulate(one, machine, factor, variant.changes)

        return find_harvest_load(job["rule"], simulate)
    return _simulate(spec, machine, job["factor"], Changes(**job["changes"]))


def _simulate(spec: ExperimentSpec, machine: Machine, factor: float, changes: Changes) -> RunResult:
    variant, seed = spec.variants[0], spec.seeds[0]
    setup = changed(cluster_setup(machine, spec, variant, seed), machine, changes)
    workload = requests_of(spec, factor)
    objectives = objectives_of(spec, resolve_config(machine, spec, variant))
    has_its_memory = setup.memory.budget_bytes == machine.budget_bytes
    options = SimulationOptions(
        name=variant.name,
        detail=True,
        gaps=spec.run.gaps,
        pool=build_pool(spec.workload, seed),
        batches=build_batches(spec.workload, seed),
        slo_ttft_s=objectives.ttft_s,
        slo_tpot_s=objectives.tpot_s,
        until_s=spec.run.until_s,
        observe_interval_s=spec.run.observe_interval_s,
        parameter_share=machine.parameter_share if has_its_memory else None,
        on_start=lambda cluster: _ask_for_merges(cluster, changes.num_merges),
    )
    run = simulate_workload(workload, setup, options)
    run.config["factor"] = factor
    return run


def changed(setup: ClusterSetup, machine: Machine, changes: Changes) -> ClusterSetup:
    """The cluster with what no setting can say."""
    params = setup.params
    if changes.num_merges:
        params = replace(params, auto_restore=False)
    kv_bytes = machine.kv_tokens * machine.shape.num_layers * machine.shape.kv_bytes_per_token_layer
    budget = setup.memory.budget_bytes + round(kv_bytes * (changes.kv_scale - 1.0)) + changes.streamed_bytes
    if changes.host_link != 1.0:
        host = setup.topology.host
        assert host is not None
        slower = replace(host, bytes_per_s=host.bytes_per_s * changes.host_link)
        profile = _with_host_link(setup.profile, changes.host_link)
        setup = replace(setup, topology=replace(setup.topology, host=slower), profile=profile)
        params = replace(params, profile=profile)
    if not changes.copy_engine:
        params = replace(params, swap=replace(params.swap, budget_blocks=machine.kv_tokens))
        setup = replace(setup, topology=replace(setup.topology, host=None))
    executor = setup.executor
    if changes.streamed_bytes:
        host = setup.topology.host
        assert host is not None
        executor = StreamedParameters(executor, changes.streamed_bytes / host.bytes_per_s, machine.shape.num_layers)
    return replace(setup, params=params, executor=executor, memory=replace(setup.memory, budget_bytes=budget))


def _with_host_link(profile: HardwareProfile, times: float) -> HardwareProfile:
    """As it would be measured with such a link: decisions go by it."""
    beside = profile.beside_bytes_per_s
    return replace(
        profile, host_copy_bytes_per_s=profile.host_copy_bytes_per_s * times,
        beside_bytes_per_s=None if beside is None else beside * times,
    )


def _ask_for_merges(cluster: SimulatedCluster, num_merges: int) -> None:
    """Ask until so many have come about: a merge whose requests are still moving is not merged again."""
    groups, loop = cluster.core.state.groups, cluster.loop
    num_left = len(groups) - num_merges

    def ask() -> None:
        if len(groups) > num_left and loop.now_ns < MERGES_END_S * NANOSECONDS:
            cluster.request_drop()
            loop.at(loop.now_ns + round(MERGE_INTERVAL_S * NANOSECONDS), ask)

    if num_merges:
        loop.at(round(MERGE_INTERVAL_S * NANOSECONDS), ask)
