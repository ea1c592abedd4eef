"""Specs in the tree, one YAML file each as ``jettison simulate`` reads it, and the runs that figures ask of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from jettison.config.files import parse_yaml
from jettison.errors import ConfigError
from jettison.report.results import RunResult
from jettison.simulate.machines import Machine, resolve_machine
from jettison.simulate.spec import ExperimentSpec, parse_spec
from jettison.simulate.workloads import missing_file
from jettison.workload.arrivals import Burst
from papers.jobs import job_text, load_text
from papers.pool import Runs
from papers.requests import SPECS
from papers.variants import Variant


@dataclass(frozen=True, slots=True)
class Spec:
    """One file."""

    name: str
    raw: Mapping[str, Any]
    parsed: ExperimentSpec
    load: Mapping[str, Any] | None = None
    """A rule of ``harvest_load`` by which the load is scaled; None: ``mean_load``, or as it is."""

    @property
    def is_scaled(self) -> bool:
        """Its load has to be looked for."""
        return self.load is not None or self.mean_load is not None

    @property
    def machine(self) -> Machine:
        """Its cluster."""
        return resolve_machine(self.parsed.cluster, self.parsed.settings)

    @property
    def mean_load(self) -> float | None:
        """What the load rule asks for."""
        return self.parsed.workload.mean_load

    @property
    def why_not_run(self) -> str | None:
        """What is missing of its requests; None where it can be run."""
        return missing_file(self.parsed.workload, SPECS)

    @property
    def bursts(self) -> tuple[Burst, ...]:
        """Of its arrivals."""
        arrivals = self.parsed.workload.arrivals
        return () if arrivals is None else arrivals.bursts

    @property
    def token_budget(self) -> int:
        """Of a step."""
        return int(self.raw["settings"]["max_num_batched_tokens"])

    def changed(self, **changes: Any) -> Spec:
        """With other values; of a section (``workload={"mean_load": 0.5}``) those that are named."""
        raw = dict(self.raw)
        for key, value in changes.items():
            raw[key] = {**raw[key], **value} if isinstance(value, Mapping) else value
        return Spec(self.name, raw, parse_spec(raw, self.name), self.load)


@cache
def read_spec(name: str) -> Spec:
    """The spec of this name. Raises ConfigError for one that is not in the tree, or makes no sense."""
    file = resources.files(__package__) / "specs" / f"{name}.yaml"
    if not file.is_file():
        raise ConfigError(f"there is no spec {name!r} in the tree")
    raw = parse_yaml(file.read_text(encoding="utf-8"), f"{name}.yaml")
    return Spec(name, raw, parse_spec(raw, name))


def burst_span_s(name: str, number: int = 0, before_s: float = 0.0, after_s: float = 0.0) -> tuple[float, float]:
    """When a spec's burst begins and ends, and so much before and after it: windows of figures follow their specs."""
    burst = read_spec(name).bursts[number]
    return burst.start_s - before_s, burst.start_s + burst.duration_s + after_s


def spec_names() -> list[str]:
    """All specs in the tree."""
    folder = resources.files(__package__) / "specs"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


class Seed(NamedTuple):
    """One seed's runs of a spec, by system."""

    spec: Spec
    runs: Mapping[str, RunResult]


@dataclass(slots=True)
class Results:
    """The runs of one spec: by system, a run for each seed."""

    spec: Spec
    factors: list[float]
    """Of each seed, what the load rule came to."""
    runs: dict[str, list[RunResult]] = field(default_factory=dict)

    def one(self, system: str) -> RunResult:
        """The first seed's."""
        return self.runs[system][0]

    def by_seed(self) -> list[Seed]:
        """All systems' runs, seed by seed."""
        return [Seed(self.spec, dict(zip(self.runs, of, strict=True))) for of in zip(*self.runs.values(), strict=True)]


def run_spec(spec: Spec, runs: Runs, systems: Sequence[Variant]) -> Results:
    """All systems for all seeds, each seed's requests scaled by the load rule."""
    return run_specs([(spec, systems)], runs)[0]


def run_specs(wanted: Sequence[tuple[Spec, Sequence[Variant]]], runs: Runs) -> list[Results]:
    """The same for several, side by side."""
    scaled = [(spec, seed) for spec, _ in wanted for seed in spec.parsed.seeds if spec.is_scaled]
    factors = iter(runs.factors([load_text(spec.raw, seed, spec.load) for spec, seed in scaled]))
    results = [
        Results(spec, [next(factors) if spec.is_scaled else 1.0 for _ in spec.parsed.seeds])
        for spec, _ in wanted
    ]
    jobs = [
        (result, variant, job_text(result.spec.raw, variant, seed, factor))
        for result, (_, systems) in zip(results, wanted, strict=True)
        for variant in systems
        for seed, factor in zip(result.spec.parsed.seeds, result.factors, strict=True)
    ]
    for (result, variant, _), run in zip(jobs, runs.all([text for *_, text in jobs]), strict=True):
        result.runs.setdefault(variant.name, []).append(run)
    return results
