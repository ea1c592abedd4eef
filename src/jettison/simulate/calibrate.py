"""Fit a workload to the machine at hand: how fast must it be replayed for memory, and not compute, to bind?

An overload experiment with fixed arrivals fails on a machine half as fast: the burst is compute-bound there,
or overloads even the merged group. Nothing in the experiment depends on seconds, only on how many decode steps
pass between arrivals, so the cure is to stretch or squeeze the whole workload's time (``shaping.scale_time``).
The rule for choosing the factor: P99 TTFT falls at least five times in nearly all settings whose *peak KV demand,
queue included*, is 0.6 to 0.8 of the merged capacity and above the undropped one; in a third of those at 0.8 to 0.9,
and in none beyond.

What is foreseen is what the core does in virtual time, over steps that take what three numbers say
(``cost.speed.MachineSpeed``), with groups that never change: the choice owes nothing to ``drop``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from jettison.config import EngineConfig
from jettison.core.configured import cluster_params, scheduler_limits
from jettison.cost.deployment import Deployment
from jettison.cost.hardware import HardwareProfile
from jettison.cost.model import CostModel
from jettison.cost.speed import MachineSpeed
from jettison.errors import ConfigError
from jettison.report.results import RunResult
from jettison.sim.executor import StageShape, StepLoad
from jettison.sim.setup import ClusterSetup, Hops, MemorySetup, setup_from_profile
from jettison.simulate.loads import search_factor
from jettison.simulate.run import SimulationOptions, simulate_workload
from jettison.types import NANOSECONDS, WorkerId
from jettison.workload.conditions import capacities
from jettison.workload.shaping import scale_time
from jettison.workload.traces import Workload

Arrangement = Literal["unlimited", "separate", "merged"]
"""Each instance alone with all the memory that it could ask for, or with its own; or static pipelines of two."""

TARGET_SHARES = (0.6, 0.8)
"""Peak demand over merged capacity between which dropping pays robustly."""

PIPELINE_EFFICIENCY = 0.9
"""Of a pipeline's steps: what instances lose as stages, beside the bubbles of the schedule, which the core makes."""

CLOSE_ENOUGH = 0.02
"""Of the wanted peak, relative: the search ends there."""

ACCEPTED = 0.1
"""The best that it finds may be off by so much: in small workloads the peak grows by whole requests."""

_BYTES_PER_S = 1e9

_NO_MOVES = HardwareProfile(
    CostModel(1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), _BYTES_PER_S, 0.0, 0.0, 0.0, _BYTES_PER_S, _BYTES_PER_S
)
"""Static groups remap, pull and load nothing; the link is asked for activations, and steps are ``SpeedExecutor``'s."""


@dataclass(frozen=True, slots=True)
class SpeedExecutor:
    """Steps that take what three numbers say: a stage its layers' part of it, over ``pipeline_efficiency``."""

    speed: MachineSpeed
    num_layers: int
    pipeline_efficiency: float = PIPELINE_EFFICIENCY

    def stage_ns(self, worker_id: WorkerId, number: int, load: StepLoad, stage: StageShape) -> int:
        """See ``sim.executor.Executor``. What samples counts as a decode: a prompt's last token, too."""
        seconds = self.speed.step_s(load.num_samples, load.num_tokens - load.num_samples)
        if stage.num_layers < self.num_layers:
            seconds *= stage.num_layers / self.num_layers / self.pipeline_efficiency
        return round(seconds * NANOSECONDS)

    def decode_ns(
        self, worker_id: WorkerId, number: int, load: StepLoad, stage: StageShape, count: int
    ) -> npt.NDArray[np.int64]:
        """See ``sim.executor.Executor``: each takes as long, as contexts count for nothing."""
        return np.full(count, self.stage_ns(worker_id, number, load, stage), dtype=np.int64)

    def attention_ns(self, num_kv_tokens: int, num_rows: int) -> int:
        """See ``sim.executor.Executor``: the three numbers have attention in the rows, wherever the KV is."""
        return 0


def foresee(
    workload: Workload, speed: MachineSpeed, deployment: Deployment, arrangement: Arrangement, *,
    pipeline_efficiency: float = PIPELINE_EFFICIENCY,
) -> RunResult:
    """What the workload would meet in virtual time; its demand is in ``config["fairness"]``.

    The deployment's profile, if it has one, is left aside. Raises ConfigError, BudgetError.
    """
    setup = _setup(deployment, "pipeline" if arrangement == "merged" else "recompute")
    if arrangement == "unlimited":
        blocks = sum(-(-(row.input_tokens + row.output_tokens) // setup.limits.block_size) + 1 for row in workload.rows)
        ample = MemorySetup.for_blocks(
            setup.shape, setup.limits.block_size, blocks, page_bytes=setup.memory.page_bytes,
            workspace_bytes=setup.memory.workspace_bytes,
        )
        setup = replace(setup, memory=max(ample, setup.memory, key=lambda memory: memory.budget_bytes))
    setup = replace(setup, executor=SpeedExecutor(speed, setup.shape.num_layers, pipeline_efficiency))
    options = SimulationOptions(name=arrangement, detail=False, observe_interval_s=max(1.0, workload.duration_s))
    return simulate_workload(workload, setup, options)


def _setup(deployment: Deployment, policy: str) -> ClusterSetup:
    """Without hops: a speed that is measured from outside has them in its steps. Nor do prompts share prefixes."""
    config = EngineConfig.resolve(needs_model=False, num_cores=1, **{
        **deployment.settings, "overload": policy, "instances": deployment.num_instances,
        "memory": deployment.budget_bytes, "enable_prefix_caching": False,
    })  # fmt: skip
    return setup_from_profile(
        deployment.shape, scheduler_limits(config, deployment.max_model_len), cluster_params(config, num_host_slots=0),
        deployment.num_instances,
        MemorySetup(deployment.budget_bytes, deployment.workspace_bytes, deployment.page_bytes),
        _NO_MOVES, hops=Hops(0.0, 0.0),
    )  # fmt: skip


def peak_demand_tokens(workload: Workload, speed: MachineSpeed, deployment: Deployment) -> float:
    """Most KV tokens that all requests together hold or wait for, with unlimited memory: what waits for compute counts,
    the queue that a shortage itself would make does not."""
    peak: float = foresee(workload, speed, deployment, "unlimited").config["fairness"]["peak_demand_tokens"]
    return peak


@dataclass(frozen=True, slots=True)
class Calibration:
    """How fast to replay, and what to expect. Shares and times are the median over the workloads tried."""

    rate_scale: float
    """For ``shaping.scale_time``: below 1 stretches time (a slower machine)."""
    peak_over_merged: float
    peak_over_capacity: float
    predicted_p99_ttft_separate_s: float
    predicted_p99_ttft_merged_s: float
    worst_gain: float
    """Smallest P99 TTFT of the separate instances over the merged group's, over the workloads."""


def calibrate(
    workload: Workload, speed: MachineSpeed, deployment: Deployment, *, target_share: float = 0.7, near: float = 1.0
) -> float:
    """The ``rate_scale`` at which peak demand is ``target_share`` of the merged capacity: it grows with the rate.

    ``near``: where the search begins.
    Raises ConfigError when no rate gets there (too few requests, or single requests too large) or when the
    target lies below the undropped capacity, where there is no overload.
    """
    capacity, merged = capacities(deployment)
    target = target_share * merged
    if target <= capacity:
        raise ConfigError(
            f"peak demand of {target_share:g} of the merged capacity ({target:.0f} tokens) would fit the undropped "
            f"{capacity} tokens: no overload; use a smaller budget or a larger target"
        )
    rate_scale, found = search_factor(
        lambda scale: peak_demand_tokens(scale_time(workload, scale), speed, deployment), target, near,
        close_enough=CLOSE_ENOUGH,
    )
    if abs(found / target - 1.0) > ACCEPTED:
        raise ConfigError(
            f"no replay speed gives a peak demand of {target:.0f} KV tokens with workload {workload.name}: "
            f"at {rate_scale:g} times its rate the peak is {found:.0f}"
        )
    return rate_scale


def safest_rate_scale(
    workloads: Sequence[Workload], speed: MachineSpeed, deployment: Deployment, *,
    shares: tuple[float, float] = TARGET_SHARES, num_candidates: int = 3,
) -> Calibration:
    """Pick the replay speed whose predicted gain is safest over several seeds of one workload.

    Speeds between those that put the (median) peak at ``shares`` of the merged capacity are tried on every
    workload; the one with the largest *worst* gain wins. The rule is stated so that the choice is not a pick:
    report it with the result. Of more than two instances the merged ones are pairs, whose capacity is smaller than
    that of one group of all, which the shares are of.
    """
    if not workloads:
        raise ConfigError("at least one workload is needed")
    capacity, merged = capacities(deployment)
    floor_share = 1.02 * capacity / merged
    found, ends = 1.0, []
    for share in shares:
        scales = []
        for workload in workloads:
            found = calibrate(workload, speed, deployment, target_share=max(share, floor_share), near=found)
            scales.append(found)
        ends.append(float(np.median(scales)))
    # Pipelines take twenty times as long to simulate as separate instances: the fastest replay goes first, as the most
    # promising, and the others are given up as soon as they cannot win.
    best: Calibration | None = None
    for rate_scale in np.geomspace(ends[-1], ends[0], num_candidates).tolist():
        loads = [scale_time(workload, rate_scale) for workload in workloads]
        to_beat = -math.inf if best is None else best.worst_gain
        best = _judged(rate_scale, loads, speed, deployment, to_beat) or best
    assert best is not None, "the first beats minus infinity"
    return best


def _judged(
    rate_scale: float, loads: Sequence[Workload], speed: MachineSpeed, deployment: Deployment, to_beat: float
) -> Calibration | None:
    """None where merged groups gain no more than ``to_beat`` with one of the loads, which have the ``rate_scale``.

    Raises ConfigError where a request fits no instance.
    """
    separate: list[tuple[float, Workload]] = []
    for load in loads:
        run = foresee(load, speed, deployment, "separate")
        if run.requests.unanswered:
            raise ConfigError(
                f"{run.requests.unanswered} requests of workload {load.name} can never fit one instance or its "
                "model's context: cap their lengths or raise the budget"
            )
        separate.append((run.ttft_s.p99 or 0.0, load))
    separate.sort(key=lambda pair: pair[0])  # the smallest gain, which decides, may well be that of the first
    merged_s: list[float] = []
    worst_gain = math.inf
    for separate_s, load in separate:
        merged_s.append(foresee(load, speed, deployment, "merged").ttft_s.p99 or 0.0)
        worst_gain = min(worst_gain, separate_s / merged_s[-1] if merged_s[-1] > 0 else math.inf)
        if worst_gain <= to_beat:
            return None
    peak = float(np.median([peak_demand_tokens(load, speed, deployment) for load in loads]))
    capacity, merged = capacities(deployment)
    return Calibration(
        rate_scale, peak / merged, peak / capacity, float(np.median([p99_s for p99_s, _ in separate])),
        float(np.median(merged_s)), worst_gain,
    )
