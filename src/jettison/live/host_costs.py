"""What serving takes of this machine's processors: a server of one instance, and a pipeline, watched from outside.

Processor times of server and worker are the operating system's, of the load generator its own; steps and the gaps
between them are from the server's time line. What follows from the sums is ``cost.hostfit``'s. The loads are made for
this: batches of equal requests, prompts alone, nothing at all. No workload that a simulation is judged by is among
them.
"""

from __future__ import annotations

import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from jettison.config import EngineConfig, usable_cores
from jettison.cost.hardware import HardwareProfile
from jettison.cost.hostcosts import HostCosts
from jettison.cost.hostfit import Phase, Scrapes, crowded_speeds, fit_host_costs, mean_shape
from jettison.cost.model import ChunkShape, StepShape
from jettison.errors import JettisonError
from jettison.live.core_speeds import measure_core_speeds
from jettison.live.host_watch import (
    Load,
    Step,
    WatchedServer,
    Window,
    processor_s,
    steps_of,
)
from jettison.live.wake_probe import wakes_pack
from jettison.live.yardstick import Reading, Yardstick
from jettison.workload.traces import TraceRow

Progress = Callable[[float, str], None]

PROMPT, OUTPUT = 16, 96
"""Tokens of each request of a batch."""
BATCHES = (1, 2, 4, 8, 16, 32)
PIPED = ("decode 1", "decode 4", "decode 16")
"""Loads that a pipeline of two is given, too."""
NUM_SHORT, SHORT_GAP_S = 120, 0.02
"""Requests of one output token, and the time between them."""
NUM_PROMPTS = 10
IDLE_S = 4.0
NUM_SCRAPES = 30
ROUNDS, YARDSTICK_ROUNDS = 3, 3


@dataclass(frozen=True, slots=True)
class HostMeasurement:
    """The constants, and what they were made from."""

    costs: HostCosts
    phases: dict[str, list[Phase]]
    step_factors: dict[int, float]
    """By tokens of a step: what it takes while serving over its prediction."""
    gaps_s: dict[int, float]
    """Medians by batch."""


def measure_host_costs(
    config: EngineConfig, profile: HardwareProfile, *, progress: Progress = lambda share, text: None
) -> HostMeasurement:
    """Two minutes. ``config``: as the cluster is to be served; one instance of it is, and a pipeline of two, then one
    and as many as there are cores for, in turn (``live.yardstick``).

    Raises ModelError, ConfigError, JettisonError (a server does not come up, requests fail, what is measured makes no
    sense).
    """
    try:
        return _measure(config, profile, progress)
    except ValueError as error:  # of HostCosts
        raise JettisonError(f"this machine was too uneven to be measured: {error}") from None


def _measure(config: EngineConfig, profile: HardwareProfile, progress: Progress) -> HostMeasurement:
    num_cores = usable_cores()
    progress(0.0, "cores side by side")
    speeds = measure_core_speeds(config, num_cores)
    served = [_Served(config, 1, "recompute")]
    if profile.cost.num_layers > 1:
        served.append(_Served(config, 2, "pipeline"))
    with ExitStack() as exits:
        for each in served:
            exits.enter_context(each.server)
        idle, scrapes = _serve_phases(served, config, progress)
    phases: dict[str, list[Phase]] = {}
    for each in served:
        for window in each.windows:
            phases.setdefault(f"{each.name} {window.load.name}", []).append(_phase(window, each.server.steps))
    windows, steps = served[0].windows, served[0].server.steps
    gaps = _gaps(windows, steps)
    factors = _factors(windows, steps, profile)
    costs = fit_host_costs(
        [phase for same in phases.values() for phase in same], _phase(idle, steps), scrapes, gaps,
        tick_interval_s=config.overload.check_interval_ms / 1e3, core_speeds=speeds,
        threads_per_worker=config.num_threads,
        step_factors=factors,
    )  # fmt: skip
    with Yardstick(config, max(1, num_cores // config.num_threads), costs, profile) as yardstick:
        for index in range(YARDSTICK_ROUNDS):
            progress(0.9, f"one instance and all cores serving, {index + 1} of {YARDSTICK_ROUNDS}")
            yardstick.lay()
    costs = replace(as_laid(costs, yardstick.readings()), packs_wakes=wakes_pack())
    medians = {rows: statistics.median(values) for rows, values in gaps.items() if values}
    return HostMeasurement(costs, phases, factors, medians)


def as_laid(costs: HostCosts, readings: Sequence[Reading]) -> HostCosts:
    """The constants as the yardstick found them: its loads by one instance and by all follow each other within seconds,
    so that no drift of the machine is between them, while steps were profiled, and one instance served, minutes
    before."""
    alone = statistics.median(reading.alone for reading in readings)
    crowded = statistics.median(reading.crowded for reading in readings)
    speeds, threads = costs.core_speeds, costs.threads_per_worker
    return replace(
        costs.with_controller(statistics.median(reading.controller_factor for reading in readings) / alone),
        step_factor=costs.step_factor / alone,
        worker_step_s=costs.worker_step_s / alone, worker_row_s=costs.worker_row_s / alone,
        worker_stage_s=costs.worker_stage_s / alone,
        core_speeds=crowded_speeds(speeds, crowded / alone, len(speeds) // threads * threads),
        step_shape=mean_shape([reading.step_shape for reading in readings]),
        crowded_shape=mean_shape([reading.crowded_shape for reading in readings]),
    )  # fmt: skip


def _prompt_tokens(config: EngineConfig) -> int:
    """A prompt that one step takes whole."""
    return max(1, min(config.scheduler.max_num_batched_tokens, 512) - 1)


def _loads(config: EngineConfig) -> list[Load]:
    most = min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
    loads = [
        Load(f"decode {size}", (TraceRow(0.0, PROMPT, OUTPUT),) * size) for size in BATCHES if size <= most
    ]
    loads.append(Load("short", tuple(TraceRow(i * SHORT_GAP_S, PROMPT, 1) for i in range(NUM_SHORT))))
    gap_s = 0.15
    loads.append(Load(
        "prompts", tuple(TraceRow(i * gap_s, _prompt_tokens(config), 1) for i in range(NUM_PROMPTS))
    ))  # fmt: skip
    return loads


# --- serving


class _Served:
    """A server under these loads, and what was seen of it."""

    def __init__(self, config: EngineConfig, num_instances: int, overload: str) -> None:
        tokens = max(max(BATCHES) * (PROMPT + OUTPUT), 2 * NUM_PROMPTS * _prompt_tokens(config))
        self.name = overload
        self.server = WatchedServer(config, num_instances, tokens, overload=overload)
        self.windows: list[Window] = []


def _serve_phases(served: Sequence[_Served], config: EngineConfig, progress: Progress) -> tuple[Window, Scrapes]:
    """All loads to the first server, some of them to the others, in turn."""
    loads, lone = _loads(config), served[0]
    turns = [(lone, load) for load in loads]
    turns += [(piped, load) for piped in served[1:] for load in loads if load.name in PIPED]
    for each, load in turns:
        each.server.replay(load)  # to warm up
    for index in range(ROUNDS):
        for each, load in turns:
            progress(0.2 + 0.5 * index / ROUNDS, f"serving, round {index + 1} of {ROUNDS}: {load.name}")
            each.windows.append(each.server.watch(load))
    progress(0.75, "doing nothing, and reading metrics")
    idle, process = lone.server.watch_idle(IDLE_S), lone.server.process
    before, begin_s = processor_s(process.pid), time.process_time()
    for _ in range(NUM_SCRAPES):
        with urllib.request.urlopen(f"{process.url}/metrics", timeout=10.0) as response:
            list(text_string_to_metric_families(response.read().decode()))
    scrapes = Scrapes(NUM_SCRAPES, processor_s(process.pid) - before, time.process_time() - begin_s)
    return idle, scrapes


# --- the time line


def _phase(window: Window, steps: Sequence[Step]) -> Phase:
    ours, rows = steps_of(window, steps), window.load.rows
    firsts = [step for step in ours if step.is_first_stage]
    num_later = len(ours) - len(firsts)
    return Phase(
        wall_s=(window.end_ns - window.begin_ns) / 1e9,
        num_steps=len(firsts),
        num_rows=sum(step.num_requests for step in ours),
        num_tokens=sum(row.output_tokens for row in rows),
        num_requests=len(rows),
        num_prompt_tokens=sum(row.input_tokens for row in rows),
        controller_s=window.server_s,
        worker_s=window.worker_s,
        steps_s=sum(step.processor_ns for step in ours) / 1e9,
        client_s=window.client_s,
        num_later_stages=num_later,
        computes_in_turn=not num_later or len(rows) == 1,
    )


def _gaps(windows: Sequence[Window], steps: Sequence[Step]) -> dict[int, list[float]]:
    """Between decode steps of the whole batch that follow each other."""
    gaps: dict[int, list[float]] = {}
    for window in windows:
        size = len(window.load.rows)
        if not window.load.name.startswith("decode"):
            continue
        ours = steps_of(window, steps)
        for before, after in pairwise(ours):
            if before.num_tokens == after.num_tokens == before.num_requests == after.num_requests == size:
                gaps.setdefault(size, []).append((after.begin_ns - before.end_ns) / 1e9)
    return gaps


def _factors(windows: Sequence[Window], steps: Sequence[Step], profile: HardwareProfile) -> dict[int, float]:
    """By tokens of a step: the median of measured over predicted."""
    ratios: dict[int, list[float]] = {}
    cost, layers = profile.cost, profile.cost.num_layers
    for window in windows:
        name, size = window.load.name, len(window.load.rows)
        done = 0
        for step in steps_of(window, steps):
            if name == "prompts" and step.num_prompt_tokens > 1:
                shape = StepShape((ChunkShape(0, step.num_tokens),), layers, True, 1)
            elif name.startswith("decode") and step.num_tokens == step.num_requests == size:
                done += 1
                shape = StepShape((ChunkShape(PROMPT + done, 1),) * size, layers, True, size)
            else:
                continue
            ratios.setdefault(step.num_tokens, []).append(step.processor_ns / 1e9 / cost.step_cost_s(shape))
    return {tokens: statistics.median(values) for tokens, values in ratios.items()}
