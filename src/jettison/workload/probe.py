"""A small step simulation of serving instances with a given KV capacity, to foresee a setting's outcome.

First come first served, chunked prefill behind decodes, newest preempted by recompute: enough to tell a queue that
waits for memory from one that waits for compute. It is no substitute for the simulator that runs the real
policies, and it decides nothing: ``calibrate`` does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jettison.errors import ConfigError
from jettison.report.results import percentile
from jettison.workload.traces import Workload


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
    demand_tokens: int = 0
    """KV tokens that the waiting and running requests hold or wait for; kept up to date, read every step."""

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.deployment.block_size)

    @property
    def num_blocks(self) -> float:
        capacity = self.deployment.capacity_tokens  # inf // 16 would be no number
        return math.inf if math.isinf(capacity) else capacity // self.deployment.block_size

    def used_blocks(self) -> float:
        return sum(self.blocks(item.context) for item in self.running) if self.num_blocks < math.inf else 0

    def freeness(self) -> float:
        free = min(self.deployment.capacity_tokens, 1e12) - self.demand_tokens
        return free / (len(self.running) + len(self.waiting) + 1)

    def add(self, item: _Sim) -> None:
        self.waiting.append(item)
        self.demand_tokens += item.context
        if self.ready_s == math.inf:
            self.ready_s = item.arrival_s

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
            self.demand_tokens += 1
            item.computed = item.context - 1  # the newest token has no KV yet
            if item.first_s is None:
                item.first_s = end_s
            if item.made >= item.output_tokens:
                ended.append(item)
        for item in ended:
            self.running.remove(item)
            self.demand_tokens -= item.context
        self.ready_s = end_s
        return ended

    def _decodes(self) -> list[_Sim]:
        """Requests that decode in this step; the newest make room where blocks run out."""
        while True:
            if len(self.running) <= 1 or self.used_blocks() <= self.num_blocks:
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
        free = self.num_blocks - self.used_blocks() if self.waiting else 0
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
            max(groups, key=_Group.freeness).add(item)
            continue
        now_s = group.ready_s
        demand = sum(one.demand_tokens for one in groups)
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
