"""Fit a workload to the machine at hand: how fast must it be replayed for memory, and not compute, to bind?

An overload experiment with fixed arrivals fails on a machine half as fast: the burst is compute-bound there,
or drowns even the merged group. Nothing in the experiment depends on seconds, only on how many decode steps
pass between arrivals, so the cure is to stretch or squeeze the whole workload's time (``shaping.scale_time``).
The rule for choosing the factor (found in a simulated probe of two instances): P99 TTFT falls at least five times
in nearly all settings whose *peak KV demand, queue included*, is 0.6 to 0.8 of the merged capacity and
above the undropped one; in a third of those at 0.8 to 0.9, and in none beyond.

Here are that rule and ``predict``, a small step simulation of instances with a given capacity, good enough to choose a
setting and to say beforehand what to expect. It is no substitute for the simulator that runs the real policies.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jettison.errors import ConfigError
from jettison.report.results import percentile
from jettison.workload.shaping import scale_time
from jettison.workload.traces import Workload

TARGET_SHARES = (0.6, 0.8)
"""Peak demand over merged capacity between which dropping pays robustly."""

_SEARCH_DECADES = 4.0
_SEARCH_STEPS = 24
_CLOSE_ENOUGH = 0.01


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Measured speed of one instance: a step takes base + per-request * decodes + prefill tokens / rate."""

    prefill_tokens_per_s: float
    decode_base_s: float
    decode_per_request_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.prefill_tokens_per_s > 0 and self.decode_base_s > 0 and self.decode_per_request_s >= 0):
            raise ConfigError("machine speed needs a prefill rate and a decode step above 0")

    @classmethod
    def from_points(cls, prefill_tokens_per_s: float, decode_steps: Sequence[tuple[int, float]]) -> MachineSpeed:
        """From decode steps measured at some batch sizes: (requests, seconds), a least-squares line through them."""
        if not decode_steps:
            raise ConfigError("at least one measured decode step is needed")
        batches = np.array([batch for batch, _ in decode_steps], dtype=np.float64)
        seconds = np.array([step_s for _, step_s in decode_steps], dtype=np.float64)
        if len(set(batches.tolist())) == 1:
            return cls(prefill_tokens_per_s, float(seconds.mean()), 0.0)
        slope, base = (float(value) for value in np.polyfit(batches, seconds, 1))
        if slope < 0 or base <= 0:  # noise, or a line through the origin: a flat or a proportional step
            slope = max(slope, 0.0)
            base = float(max((seconds - slope * batches).mean(), seconds.min() * 0.1))
        return cls(prefill_tokens_per_s, base, slope)

    def step_s(self, num_decodes: float, num_prefill_tokens: float) -> float:
        """Seconds of one step of one instance."""
        return (
            self.decode_base_s
            + self.decode_per_request_s * num_decodes
            + num_prefill_tokens / self.prefill_tokens_per_s
        )


@dataclass(frozen=True, slots=True)
class Deployment:
    """How the devices are arranged: ``num_groups`` groups of ``stages`` instances, each group with its own KV."""

    capacity_tokens: float
    """KV tokens of one group."""
    num_groups: int = 1
    stages: int = 1
    pipeline_efficiency: float = 0.9
    """Throughput of a group of several stages against as many separate instances (0.85 to 1.02 seen on CPUs)."""
    token_budget: int = 256
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the step simulation says of one deployment."""

    p50_ttft_s: float
    p99_ttft_s: float
    p50_tpot_s: float
    peak_demand_tokens: float
    """Most KV tokens that all requests present held or waited for, over all groups."""
    mean_demand_tokens: float
    num_preemptions: int
    num_refused: int
    """Requests that no group could ever hold."""
    end_s: float


@dataclass(slots=True, eq=False)
class _Sim:
    """One simulated request."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    made: int = 0
    computed: int = 0
    """Prompt (and, after a preemption, earlier output) tokens in the cache."""
    first_s: float | None = None

    @property
    def context(self) -> int:
        return self.input_tokens + self.made


@dataclass(slots=True, eq=False)
class _Group:
    """One group: first come first served, chunked prefill behind decodes, newest preempted by recompute."""

    deployment: Deployment
    machine: MachineSpeed
    ready_s: float = math.inf
    waiting: deque[_Sim] = field(default_factory=deque)
    running: list[_Sim] = field(default_factory=list)
    num_preemptions: int = 0

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.deployment.block_size)

    @property
    def num_blocks(self) -> float:
        capacity = self.deployment.capacity_tokens  # inf // 16 would be no number
        return math.inf if math.isinf(capacity) else capacity // self.deployment.block_size

    def demand_tokens(self) -> int:
        return sum(item.context for item in self.running) + sum(item.context for item in self.waiting)

    def freeness(self) -> float:
        used = self.demand_tokens()
        return (min(self.deployment.capacity_tokens, 1e12) - used) / (len(self.running) + len(self.waiting) + 1)

    def step(self) -> list[_Sim]:
        """Run one step from ``ready_s``; returns the requests that ended. Idle afterwards: ``ready_s`` is infinite."""
        start_s = self.ready_s
        decodes = self._decodes()
        chunks = self._prefill_chunks(self.deployment.token_budget - len(decodes))
        if not decodes and not chunks:
            self.ready_s = math.inf
            return []
        parts = self.deployment.stages  # microbatches in flight share the requests
        num_prefill = sum(tokens for _, tokens in chunks)
        took_s = self.machine.step_s(len(decodes) / parts, num_prefill / parts)
        if parts > 1:
            took_s /= self.deployment.pipeline_efficiency
        end_s = start_s + took_s
        for item, tokens in chunks:
            item.computed += tokens
        ended = []
        for item in [*decodes, *(item for item, _ in chunks if item.computed >= item.context)]:
            item.made += 1
            item.computed = item.context - 1  # the newest token has no KV yet
            if item.first_s is None:
                item.first_s = end_s
            if item.made >= item.output_tokens:
                ended.append(item)
        for item in ended:
            self.running.remove(item)
        self.ready_s = end_s
        return ended

    def _decodes(self) -> list[_Sim]:
        """Requests that decode in this step; the newest make room where blocks run out."""
        while True:
            used = sum(self.blocks(item.context) for item in self.running)
            if used <= self.num_blocks or len(self.running) <= 1:
                break
            victim = self.running.pop()
            victim.computed = 0
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
        return [item for item in self.running if item.made and item.computed == item.context - 1]

    def _prefill_chunks(self, budget: int) -> list[tuple[_Sim, int]]:
        chunks = []
        for item in self.running:
            left = item.context - item.computed
            if budget > 0 and not (item.made and left == 1):
                chunks.append((item, min(left, budget)))
                budget -= chunks[-1][1]
        free = self.num_blocks - sum(self.blocks(item.context) for item in self.running)
        while self.waiting and budget > 0 and self.blocks(self.waiting[0].context + 1) <= free:
            item = self.waiting.popleft()
            free -= self.blocks(item.context + 1)
            self.running.append(item)
            chunks.append((item, min(item.context, budget)))
            budget -= chunks[-1][1]
        return chunks


def predict(workload: Workload, machine: MachineSpeed, deployment: Deployment) -> Prediction:
    """Simulate ``workload`` step by step. Pure; about a second per million request-steps.

    Requests go to the group with the most free KV per request. A request that one group could never hold
    is refused and counted.
    """
    groups = [_Group(deployment, machine) for _ in range(deployment.num_groups)]
    arrivals = deque(_Sim(row.arrival_s, row.input_tokens, row.output_tokens) for row in workload.rows)
    finished: list[tuple[_Sim, float]] = []
    num_refused = 0
    peak = 0
    area = last_s = end_s = 0.0
    while arrivals or any(group.ready_s < math.inf for group in groups):
        group = min(groups, key=lambda item: item.ready_s)
        if arrivals and arrivals[0].arrival_s <= group.ready_s:
            item = arrivals.popleft()
            if group.blocks(item.input_tokens + item.output_tokens) > group.num_blocks:
                num_refused += 1
                continue
            target = max(groups, key=_Group.freeness)
            target.waiting.append(item)
            if target.ready_s == math.inf:
                target.ready_s = item.arrival_s
            continue
        now_s = group.ready_s
        demand = sum(one.demand_tokens() for one in groups)
        area += demand * (now_s - last_s)
        last_s = now_s
        peak = max(peak, demand)
        for item in group.step():
            finished.append((item, group.ready_s))
            end_s = max(end_s, group.ready_s)
    ttfts_s = [item.first_s - item.arrival_s for item, _ in finished if item.first_s is not None]
    tpots_s = [
        (done_s - item.first_s) / (item.output_tokens - 1)
        for item, done_s in finished
        if item.first_s is not None and item.output_tokens > 1
    ]
    return Prediction(
        p50_ttft_s=percentile(ttfts_s, 50) or 0.0,
        p99_ttft_s=percentile(ttfts_s, 99) or 0.0,
        p50_tpot_s=percentile(tpots_s, 50) or 0.0,
        peak_demand_tokens=float(peak),
        mean_demand_tokens=area / end_s if end_s > 0 else 0.0,
        num_preemptions=sum(group.num_preemptions for group in groups),
        num_refused=num_refused,
        end_s=end_s,
    )


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
    not the queue that the shortage itself makes. It grows with the rate, so the scale is found by bisection in its logarithm.
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

    low, high = -_SEARCH_DECADES / 2, _SEARCH_DECADES / 2
    if not peak(low) < target <= peak(high):
        raise ConfigError(
            f"no replay speed gives a peak demand of {target:.0f} KV tokens with workload {workload.name}: "
            f"it reaches {peak(low):.0f} to {peak(high):.0f}"
        )
    for _ in range(_SEARCH_STEPS):
        middle = (low + high) / 2
        found = peak(middle)
        if abs(found / target - 1.0) < _CLOSE_ENOUGH:
            return float(10.0**middle)
        low, high = (middle, high) if found < target else (low, middle)
    return float(10.0**high)


def choose_setting(
    workloads: Sequence[Workload],
    machine: MachineSpeed,
    setting: OverloadSetting,
    *,
    shares: tuple[float, float] = TARGET_SHARES,
    num_candidates: int = 4,
) -> Calibration:
    """Pick the replay speed whose predicted gain is safest over several seeds of one workload.

    Speeds between those that put the first workload's peak at ``shares`` of the merged capacity are tried on
    every workload; the one with the largest *worst* gain wins. The rule is stated so that the choice is not a pick:
    report it with the result.
    """
    if not workloads:
        raise ConfigError("at least one workload is needed")
    floor_share = 1.02 * setting.capacity_tokens / setting.merged_capacity_tokens
    lowest, highest = max(shares[0], floor_share), max(shares[1], floor_share)
    edges = [calibrate(workloads[0], machine, setting, target_share=share) for share in (lowest, highest)]
    candidates = np.geomspace(min(edges), max(edges), num_candidates)
    tried = [_evaluate(workloads, machine, setting, float(rate_scale)) for rate_scale in candidates]
    return max(tried, key=lambda item: item.worst_gain)


def _evaluate(
    workloads: Sequence[Workload], machine: MachineSpeed, setting: OverloadSetting, rate_scale: float
) -> Calibration:
    peaks, separate_s, merged_s, ends_s = [], [], [], []
    for workload in workloads:
        scaled = scale_time(workload, rate_scale)
        peaks.append(predict(scaled, machine, setting.unlimited).peak_demand_tokens)
        separate_s.append(predict(scaled, machine, setting.separate).p99_ttft_s)
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
