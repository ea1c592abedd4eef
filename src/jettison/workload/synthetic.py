"""Made-up workloads from a seed: an arrival process and a length model, and presets of both by name.

The same spec and seed give the same workload on every machine (numpy's PCG64 streams are stable for the
distributions used here). Real traces are in ``traces``; nothing here knows about servers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from jettison.errors import ConfigError
from jettison.workload.arrivals import ArrivalProcess, Burst, Steady, draw_arrivals, draw_num_arrivals
from jettison.workload.lengths import LengthModel, Lengths, LogNormalPair
from jettison.workload.rows import Columns, Workload

__all__ = ["PRESETS", "Burst", "Lengths", "SyntheticSpec", "generate", "preset", "synthesise"]


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
    """Draw the workload. Raises ConfigError that names the field for an invalid spec."""
    _check(spec)
    return synthesise(
        Steady(spec.rate_per_s, spec.cv, spec.bursts),
        LogNormalPair(spec.prompt, spec.output),
        seed=seed,
        duration_s=spec.duration_s,
        name=spec.name,
        source=spec.source,
    )


def synthesise(
    process: ArrivalProcess,
    lengths: LengthModel,
    *,
    seed: int,
    duration_s: float | None = None,
    num_requests: int | None = None,
    name: str = "synthetic",
    source: str = "synthetic",
) -> Workload:
    """Draw arrivals over ``duration_s`` or up to ``num_requests`` (one of the two), and a length for each. A million
    requests take about a second and 8 + 4 + 4 bytes each. Raises ConfigError for an invalid process or duration."""
    if (duration_s is None) == (num_requests is None):
        raise ConfigError(f"workload {name}: needs a duration or a number of requests, one of the two")
    arrivals_rng, prompt_rng, output_rng = (
        np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3)
    )
    if duration_s is not None:
        arrivals = draw_arrivals(process, duration_s, arrivals_rng)
    elif num_requests is not None:
        arrivals, duration_s = draw_num_arrivals(process, num_requests, arrivals_rng)
    inputs, outputs = lengths.draw(prompt_rng, output_rng, len(arrivals))
    note = f"{process.describe()}; {lengths.describe()}; seed {seed}"
    return Workload(Columns(arrivals, inputs, outputs), name, source, (note,), duration_s)


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

``burst``: the setting in which dropping layers paid on ten seeds of ten in a simulation of two small
instances: prompt median 64, output median 200 (sigma 0.5), 2 requests/s, two 3 s bursts of 7 times, 75 s. Where
the bursts stand (20 s and 45 s) and the caps are our choice. Calibrate it to the machine first
(``simulate.calibrate``).

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
