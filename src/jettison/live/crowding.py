"""How fast a core is while all of them serve: as many instances as there are cores, under batches made for it.

Steps side by side (``live.core_speeds``) say what caches and memory give to several cores. Serving, workers share their
cores with controller and clients as well, and come back to cold caches: their steps take more processor time than
side by side, and a simulation without that is too fast.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jettison.config import EngineConfig
from jettison.cost.hardware import HardwareProfile
from jettison.cost.hostcosts import HostCosts
from jettison.cost.hostfit import crowded_speed
from jettison.cost.model import ChunkShape, StepShape
from jettison.live.host_watch import (
    Load,
    Step,
    probes_of,
    read_steps,
    replay,
    steps_of,
    watched,
    workers_of,
)
from jettison.live.server_process import ServerProcess
from jettison.live.speed_watch import SpeedWatch
from jettison.workload.traces import TraceRow

BATCHES = (1, 4, 12)
"""Requests of each instance."""
PROMPT, OUTPUT = 16, 96
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Crowding:
    """What was measured."""

    speed: float
    """Of a core while all serve, over that of one alone."""
    probe_s: float
    """Processor time of a probe meanwhile."""


def measure_crowding(
    config: EngineConfig, flags: Mapping[str, object], num_instances: int, costs: HostCosts, profile: HardwareProfile,
    *, progress: Callable[[float, str], None] = lambda share, text: None,
) -> Crowding:
    """A quarter of a minute. ``flags``: of a server of one instance that holds the largest batch; ``costs``: what was
    measured with it. Raises JettisonError (the server does not come up, requests fail)."""
    most = min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
    loads = [
        Load(f"crowded {size}", (TraceRow(0.0, PROMPT, OUTPUT),) * (size * num_instances))
        for size in BATCHES if size <= most
    ]
    with tempfile.TemporaryDirectory(prefix="jettison-crowd-") as folder:
        line = Path(folder) / "timeline.json.gz"
        told = {**flags, "instances": num_instances, "timeline": line}
        with (
            SpeedWatch(config) as watch,
            ServerProcess(Path(config.model.model), told, Path(folder) / "server.log") as server,
        ):
            workers = workers_of(server.pid)
            for load in loads:  # once to warm up
                replay(server.url, load, config)
            windows = []
            for index in range(ROUNDS):
                for load in loads:
                    progress(index / ROUNDS, f"all cores serving, round {index + 1} of {ROUNDS}: {load.name}")
                    windows.append(watched(server.pid, workers, load, partial(replay, server.url, load, config)))
            probes = watch.end()
        steps = read_steps(line)
    ours = [step for window in windows for step in steps_of(window, steps)]
    around_s = sum(costs.worker_step_s + step.num_requests * costs.worker_row_s for step in ours)
    predicted_s = costs.step_factor * sum(_predicted_s(step, profile) for step in ours)
    speed = crowded_speed(sum(window.worker_s for window in windows) - around_s, predicted_s, config.num_threads)
    return Crowding(speed, statistics.median(probes_of(windows, probes) or [0.0]))


def _predicted_s(step: Step, profile: HardwareProfile) -> float:
    """Prompts are whole in a step; decodes are taken for half grown."""
    prompts = step.num_prompt_tokens // PROMPT
    chunks = (ChunkShape(0, PROMPT),) * prompts
    chunks += (ChunkShape(PROMPT + OUTPUT // 2, 1),) * (step.num_requests - prompts)
    return profile.cost.step_cost_s(StepShape(chunks, profile.cost.num_layers, True, step.num_requests))
