"""Specs in the tree, one YAML file each as ``jettison simulate`` reads it, and the runs that figures ask of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from jettison.config.files import parse_yaml
from jettison.errors import ConfigError
from jettison.report.results import RunResult
from jettison.simulate.machines import Machine, resolve_machine
from jettison.simulate.reproduce.jobs import Changes, Variant, job_text, load_text
from jettison.simulate.reproduce.pool import Runs
from jettison.simulate.spec import ExperimentSpec, parse_spec

WITHOUT_GUARD = Variant("drop without compute guard", "drop", changes=Changes(compute_guard=False))
SPARE = Variant("memory to spare", "recompute", changes=Changes(kv_scale=8.0))
"""What memory alone could give: eight times of it."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One file."""

    name: str
    raw: Mapping[str, Any]
    parsed: ExperimentSpec

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Those of the file."""
        return tuple(Variant(v.name, v.policy, v.settings) for v in self.parsed.variants)

    @property
    def machine(self) -> Machine:
        """Its cluster."""
        return resolve_machine(self.parsed.cluster, self.parsed.settings)

    @property
    def mean_load(self) -> float | None:
        """What the load rule asks for."""
        return self.parsed.workload.mean_load

    def changed(self, **changes: Any) -> Spec:
        """With other values: ``mean_load`` (of the workload), ``lengths``, ``gbps`` (of the links), ``preset``
        and ``memory_utilisation`` (of the cluster), ``seeds``."""
        raw = dict(self.raw)
        workload, cluster = dict(raw["workload"]), dict(raw["cluster"])
        for key, value in changes.items():
            if key in ("mean_load", "lengths"):
                workload[key] = value
            elif key == "gbps":
                cluster["link"] = {"gbps": value}
            elif key in ("preset", "memory_utilisation"):
                cluster[key] = value
            else:
                raw[key] = value
        raw |= {"workload": workload, "cluster": cluster}
        return Spec(self.name, raw, parse_spec(raw, self.name))


@cache
def read_spec(name: str) -> Spec:
    """The spec of this name. Raises ConfigError for one that is not in the tree, or makes no sense."""
    file = resources.files(__package__) / "specs" / f"{name}.yaml"
    if not file.is_file():
        raise ConfigError(f"there is no spec {name!r} in the tree")
    raw = parse_yaml(file.read_text(encoding="utf-8"), f"{name}.yaml")
    return Spec(name, raw, parse_spec(raw, name))


def burst_span_s(name: str, number: int = 0, *, before_s: float = 0.0, after_s: float = 0.0) -> tuple[float, float]:
    """When a spec's burst begins and ends, and so much before and after it: windows of figures follow their specs."""
    arrivals = read_spec(name).parsed.workload.arrivals
    assert arrivals is not None
    burst = arrivals.bursts[number]
    return burst.start_s - before_s, burst.start_s + burst.duration_s + after_s


def spec_names() -> list[str]:
    """All specs in the tree."""
    folder = resources.files(__package__) / "specs"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


@dataclass(slots=True)
class Results:
    """The runs of one spec: by variant, a run for each seed."""

    spec: Spec
    factors: list[float]
    """Of each seed, what the load rule came to."""
    runs: dict[str, list[RunResult]] = field(default_factory=dict)

    def one(self, variant: str) -> RunResult:
        """The first seed's."""
        return self.runs[variant][0]


def run_spec(spec: Spec, runs: Runs, variants: Sequence[Variant] | None = None) -> Results:
    """All variants (None: the file's) for all seeds, each seed's requests scaled by the load rule."""
    return run_specs([spec], runs, variants)[0]


def run_specs(specs: Sequence[Spec], runs: Runs, variants: Sequence[Variant] | None = None) -> list[Results]:
    """The same for several, side by side."""
    wanted = [(spec, seed) for spec in specs for seed in spec.parsed.seeds]
    scaled = [(s, seed) for s, seed in wanted if s.mean_load is not None]
    found = runs.factors([load_text(spec.raw, seed) for spec, seed in scaled])
    factors = {(spec.name, str(spec.raw), seed): f for (spec, seed), f in zip(scaled, found, strict=True)}
    jobs, results = [], []
    for spec in specs:
        mine = [factors.get((spec.name, str(spec.raw), seed), 1.0) for seed in spec.parsed.seeds]
        results.append(Results(spec, mine))
        for variant in spec.variants if variants is None else variants:
            jobs += [
                (results[-1], variant, job_text(spec.raw, variant, seed, factor))
                for seed, factor in zip(spec.parsed.seeds, mine, strict=True)
            ]
    for (result, variant, _), run in zip(jobs, runs.all([text for *_, text in jobs]), strict=True):
        result.runs.setdefault(variant.name, []).append(run)
    return results
