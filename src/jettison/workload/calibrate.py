"""Fit a workload to the machine at hand: how fast must it be replayed for memory, and not compute, to bind?

An overload experiment with fixed arrivals fails on a machine half as fast: the burst is compute-bound there,
or drowns even the merged group. Nothing in the experiment depends on seconds, only on how many decode steps
pass between arrivals, so the cure is to stretch or squeeze the whole workload's time (``shaping.scale_time``).
The rule for choosing the factor (found in a simulated probe of two instances): P99 TTFT falls at least five times
in nearly all settings whose *peak KV demand, queue included*, is 0.6 to 0.8 of the merged capacity and
above the undropped one; in a third of those at 0.8 to 0.9, and in none beyond.

Here is that rule; the step simulation behind it is ``probe``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jettison.errors import ConfigError
from jettison.workload.probe import Deployment, MachineSpeed, predict
from jettison.workload.shaping import scale_time
from jettison.workload.traces import Workload

TARGET_SHARES = (0.6, 0.8)
"""Peak demand over merged capacity between which dropping pays robustly."""

_SEARCH_DECADES = 2.0
_BRACKET_DECADES = 0.25
_SEARCH_STEPS = 24
_CLOSE_ENOUGH = 0.02


@dataclass(frozen=True, slots=True)
class OverloadSetting:
    """Two instances (or more) and what merging all of them would give. Tokens are of the whole cluster."""

    capacity_tokens: float
    merged_capacity_tokens: float
    num_instances: int = 2
    token_budget: int = 256
    block_size: int = 16
    pipeline_efficiency: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.capacity_tokens < self.merged_capacity_tokens:
            raise ConfigError("the merged capacity must be above the undropped one, and both above 0")

    @property
    def separate(self) -> Deployment:
        """Undropped: each instance with its own KV, recompute on pressure."""
        per_instance = self.capacity_tokens / self.num_instances
        return Deployment(per_instance, self.num_instances, 1, 1.0, self.token_budget, self.block_size)

    @property
    def merged(self) -> Deployment:
        """All instances one pipeline."""
        pool = self.merged_capacity_tokens
        return Deployment(pool, 1, self.num_instances, self.pipeline_efficiency, self.token_budget, self.block_size)

    @property
    def unlimited(self) -> Deployment:
        """Separate instances with all the memory they could ask for: what demand is measured on."""
        return Deployment(math.inf, self.num_instances, 1, 1.0, self.token_budget, self.block_size)


@dataclass(frozen=True, slots=True)
class Calibration:
    """How fast to replay, and what to expect. Shares and gains are the median over the workloads tried."""

    rate_scale: float
    """For ``shaping.scale_time``: below 1 stretches time (a slower machine)."""
    peak_over_merged: float
    peak_over_capacity: float
    predicted_p99_ttft_separate_s: float
    predicted_p99_ttft_merged_s: float
    worst_gain: float
    """Smallest P99 TTFT of the separate instances over the merged group's, over the workloads."""
    replay_s: float
    """How long the replay takes, about."""


def calibrate(
    workload: Workload, machine: MachineSpeed, setting: OverloadSetting, *, target_share: float = 0.7
) -> float:
    """The ``rate_scale`` at which peak demand is ``target_share`` of the merged capacity.

    Demand is taken with unlimited memory on separate instances, so that it counts waiting for compute but
    not the queue that the shortage itself makes. It grows with the rate, so the scale is found by bisection in
    its logarithm.
    Raises ConfigError when no speed gets there (too few requests, or single requests too large) or when the
    target lies below the undropped capacity, where there is nothing to relieve.
    """
    target = target_share * setting.merged_capacity_tokens
    if target <= setting.capacity_tokens:
        raise ConfigError(
            f"peak demand of {target_share:g} of the merged capacity ({target:.0f} tokens) would fit the undropped "
            f"{setting.capacity_tokens:.0f} tokens: nothing to relieve; use a smaller budget or a larger target"
        )

    def peak(log_scale: float) -> float:
        scaled = scale_time(workload, 10.0**log_scale)
        return predict(scaled, machine, setting.unlimited).peak_demand_tokens

    low, high = _bracket(peak, target, workload.name)
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        found = peak(middle)
        if abs(found / target - 1.0) < _CLOSE_ENOUGH:
            return float(10.0**middle)
        low, high = (middle, high) if found < target else (low, middle)
    return float(10.0**high)


def _bracket(peak: Callable[[float], float], target: float, name: str) -> tuple[float, float]:
    """Two log scales, one step apart, with the target between their peaks; searched outwards from no scaling."""
    at = 0.0
    found = peak(at)
    towards = 1.0 if found < target else -1.0
    while abs(at) < _SEARCH_DECADES:
        beyond = at + towards * _BRACKET_DECADES
        found = peak(beyond)
        if (found >= target) == (towards > 0):
            return (at, beyond) if towards > 0 else (beyond, at)
        at = beyond
    raise ConfigError(
        f"no replay speed gives a peak demand of {target:.0f} KV tokens with workload {name}: "
        f"at {10.0**at:g} times its rate the peak is {found:.0f}"
    )


def choose_setting(
    workloads: Sequence[Workload],
    machine: MachineSpeed,
    setting: OverloadSetting,
    *,
    shares: tuple[float, float] = TARGET_SHARES,
    num_candidates: int = 4,
) -> Calibration:
    """Pick the replay speed whose predicted gain is safest over several seeds of one workload.

    Speeds between those that put the (median) peak at ``shares`` of the merged capacity are tried on every
    workload; the one with the largest *worst* gain wins. The rule is stated so that the choice is not a pick:
    report it with the result. Takes some fifteen predictions a workload: seconds.
    """
    if not workloads:
        raise ConfigError("at least one workload is needed")
    floor_share = 1.02 * setting.capacity_tokens / setting.merged_capacity_tokens
    lowest, highest = max(shares[0], floor_share), max(shares[1], floor_share)
    slowest, fastest = (
        float(np.median([calibrate(workload, machine, setting, target_share=share) for workload in workloads]))
        for share in (lowest, highest)
    )
    candidates = np.geomspace(slowest, fastest, num_candidates)
    tried = [_evaluate(workloads, machine, setting, float(rate_scale)) for rate_scale in candidates]
    return max(tried, key=lambda item: item.worst_gain)


def _evaluate(
    workloads: Sequence[Workload], machine: MachineSpeed, setting: OverloadSetting, rate_scale: float
) -> Calibration:
    peaks, separate_s, merged_s, ends_s = [], [], [], []
    for workload in workloads:
        scaled = scale_time(workload, rate_scale)
        peaks.append(predict(scaled, machine, setting.unlimited).peak_demand_tokens)
        separate = predict(scaled, machine, setting.separate)
        if separate.num_refused:
            raise ConfigError(
                f"{separate.num_refused} requests of workload {workload.name} can never fit one instance: "
                "cap their lengths or raise the budget"
            )
        separate_s.append(separate.p99_ttft_s)
        merged = predict(scaled, machine, setting.merged)
        merged_s.append(merged.p99_ttft_s)
        ends_s.append(merged.end_s)
    gains = [apart / together for apart, together in zip(separate_s, merged_s, strict=True) if together > 0]
    peak = float(np.median(peaks))
    return Calibration(
        rate_scale=rate_scale,
        peak_over_merged=peak / setting.merged_capacity_tokens,
        peak_over_capacity=peak / setting.capacity_tokens,
        predicted_p99_ttft_separate_s=float(np.median(separate_s)),
        predicted_p99_ttft_merged_s=float(np.median(merged_s)),
        worst_gain=min(gains, default=0.0),
        replay_s=float(np.median(ends_s)),
    )
