"""Made-up workloads from a seed: Gamma arrivals with bursts, log-normal lengths, named presets.

The same spec and seed give the same workload on every machine (numpy's PCG64 streams are stable for the
distributions used here). Real traces are in ``traces``; nothing here knows about servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from jettison.errors import ConfigError
from jettison.workload.traces import TraceRow, Workload


@dataclass(frozen=True, slots=True)
class Burst:
    """From ``start_s`` for ``duration_s`` seconds the rate is ``multiplier`` times the base rate."""

    start_s: float
    duration_s: float
    multiplier: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts: ``median``, ``sigma`` of the logarithm, clipped to [``floor``, ``cap``]."""

    median: float
    sigma: float
    cap: int
    floor: int = 1

    @classmethod
    def from_mean(cls, median: float, mean: float, cap: int) -> Lengths:
        """The log-normal with this median and mean: mean = median * exp(sigma^2 / 2)."""
        return cls(median=median, sigma=math.sqrt(2.0 * math.log(mean / median)), cap=cap)


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """A bursty workload. Arrivals form a Gamma renewal process with coefficient of variation ``cv``
    (1 = Poisson) on a clock that runs at the current rate, so bursts have sharp edges and any ``cv``."""

    name: str
    rate_per_s: float
    duration_s: float
    prompt: Lengths
    output: Lengths
    cv: float = 1.0
    bursts: tuple[Burst, ...] = ()
    source: str = "synthetic"

    def scaled(self, rate_scale: float) -> SyntheticSpec:
        """The same shape with more users: rates times ``rate_scale``, durations unchanged."""
        return replace(self, rate_per_s=self.rate_per_s * rate_scale)


def generate(spec: SyntheticSpec, seed: int) -> Workload:
    """Draw the workload. Raises ConfigError for a spec that makes no sense, naming the field."""
    _check(spec)
    arrivals_rng, prompt_rng, output_rng = (
        np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3)
    )
    arrivals = _arrivals(spec, arrivals_rng)
    prompts = _lengths(spec.prompt, prompt_rng, len(arrivals))
    outputs = _lengths(spec.output, output_rng, len(arrivals))
    rows = tuple(TraceRow(*row) for row in zip(arrivals, prompts, outputs, strict=True))
    bursts = ", ".join(f"{b.multiplier:g}x for {b.duration_s:g} s at {b.start_s:g} s" for b in spec.bursts) or "none"
    note = (
        f"Gamma arrivals at {spec.rate_per_s:g} requests/s, CV {spec.cv:g}, bursts: {bursts}; log-normal lengths: "
        f"prompt median {spec.prompt.median:g} (sigma {spec.prompt.sigma:.3g}), "
        f"output median {spec.output.median:g} (sigma {spec.output.sigma:.3g}); seed {seed}"
    )
    return Workload(rows=rows, name=spec.name, source=spec.source, notes=(note,), span_s=spec.duration_s)


def _check(spec: SyntheticSpec) -> None:
    positive = {"rate_per_s": spec.rate_per_s, "duration_s": spec.duration_s, "cv": spec.cv}
    for burst in spec.bursts:
        positive |= {"burst duration_s": burst.duration_s, "burst multiplier": burst.multiplier}
        if burst.start_s < 0:
            raise ConfigError(f"workload {spec.name}: burst start_s must be at least 0, got {burst.start_s:g}")
    for kind, lengths in (("prompt", spec.prompt), ("output", spec.output)):
        positive |= {f"{kind} median": lengths.median, f"{kind} floor": float(lengths.floor)}
        if lengths.sigma < 0 or lengths.cap < lengths.floor:
            raise ConfigError(f"workload {spec.name}: {kind} lengths need sigma >= 0 and cap >= floor")
    for name, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"workload {spec.name}: {name} must be above 0, got {value:g}")


def _arrivals(spec: SyntheticSpec, rng: np.random.Generator) -> list[float]:
    """Arrival times in [0, duration): a unit-rate Gamma renewal process mapped through the inverse of the
    cumulative rate, which is piecewise linear because the rate is piecewise constant."""
    edges_s = sorted(
        {0.0, spec.duration_s}
        | {min(edge, spec.duration_s) for b in spec.bursts for edge in (b.start_s, b.start_s + b.duration_s)}
    )
    cumulative = [0.0]
    for lo, hi in pairwise(edges_s):
        middle = (lo + hi) / 2
        multiplier = math.prod(b.multiplier for b in spec.bursts if b.start_s <= middle < b.start_s + b.duration_s)
        cumulative.append(cumulative[-1] + spec.rate_per_s * multiplier * (hi - lo))
    shape = 1.0 / spec.cv**2
    stamps: list[float] = []
    last = 0.0
    while last < cumulative[-1]:
        gaps = rng.gamma(shape, 1.0 / shape, size=1024)
        block = last + np.cumsum(gaps)
        last = float(block[-1])
        stamps.extend(np.interp(block[block < cumulative[-1]], cumulative, edges_s).tolist())
    return stamps


def _lengths(lengths: Lengths, rng: np.random.Generator, count: int) -> list[int]:
    drawn = lengths.median * np.exp(lengths.sigma * rng.standard_normal(count))
    return [int(value) for value in np.clip(np.rint(drawn), lengths.floor, lengths.cap)]


PRESETS: dict[str, SyntheticSpec] = {
    spec.name: spec
    for spec in (
        SyntheticSpec(
            name="burst",
            rate_per_s=2.0,
            duration_s=75.0,
            prompt=Lengths(median=64, sigma=0.5, cap=512),
            output=Lengths(median=200, sigma=0.5, cap=800),
            bursts=(Burst(20.0, 3.0, 7.0), Burst(45.0, 3.0, 7.0)),
            source="synthetic: short prompts, long answers, two bursts of 7 times",
        ),
        SyntheticSpec(
            name="azure-conv-like",
            rate_per_s=5.53,
            duration_s=600.0,
            cv=1.09,
            prompt=Lengths.from_mean(median=1020, mean=1154.7, cap=14050),
            output=Lengths.from_mean(median=129, mean=211.1, cap=1000),
            source="synthetic, after the Azure 2023 conversation trace's rate, inter-arrival CV, means and medians",
        ),
        SyntheticSpec(
            name="burstgpt-like",
            rate_per_s=0.76,
            duration_s=640.0,
            cv=1.37,
            prompt=Lengths.from_mean(median=400, mean=603, cap=2048),
            output=Lengths.from_mean(median=249, mean=289, cap=2048),
            bursts=(Burst(45.0, 30.0, 2.0), Burst(440.0, 30.0, 2.0)),
            source="synthetic, after BurstGPT as KunServe describes it (v1: lengths; v2, v3: two overloads of 2 times)",
        ),
    )
}
"""Named workloads.

``burst``: the setting in which dropping layers paid on ten seeds of ten in a simulated probe of two small
instances: prompt median 64, output median 200 (sigma 0.5), 2 requests/s, two 3 s bursts of 7 times, 75 s. Where
the bursts stand (20 s and 45 s) and the caps are our choice. Calibrate it to the machine first (``calibrate``).

``azure-conv-like``: Azure 2023 conversation trace (Patel et al., Splitwise, ISCA 2024): 5.53 requests/s,
inter-arrival CV 1.09, input mean 1154.7 / median 1020 / largest 14,050, output 211.1 / 129 / 1,000. The real
inputs have two humps (a second near 4,096); a log-normal has one.

``burstgpt-like``: lengths from KunServe v1's description of BurstGPT (Wang et al., KDD 2025): input mean 603 /
median 400, output 289 / 249; rate and CV of the trace's head slice from 30,000 s on, without failures and with
time divided by 20 (0.76 requests/s, 1.37); overloads of 2 times at 45 s and 440 s of 640 s from KunServe v2 and
v3. The 30 s width of an overload and the caps are our choice.
"""


def preset(name: str) -> SyntheticSpec:
    """The preset of this name; ConfigError lists the known ones."""
    if name not in PRESETS:
        raise ConfigError(f"unknown workload {name!r}; known: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
