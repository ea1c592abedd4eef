"""What serving takes of this machine's processors: a server of one instance under known loads, watched from outside.

Processor times of server and worker are the operating system's, of the load generator its own; steps and the gaps
between them are from the server's time line. What follows from the sums is ``cost.hostfit``'s. The loads are made for
this: batches of equal requests, prompts alone, nothing at all. No workload that a simulation is judged by is among
them.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from jettison.config import EngineConfig
from jettison.cost.hardware import HardwareProfile
from jettison.cost.hostcosts import HostCosts
from jettison.cost.hostfit import Phase, Scrapes, fit_host_costs
from jettison.cost.model import ChunkShape, StepShape
from jettison.errors import JettisonError
from jettison.live.assembly import assemble
from jettison.live.core_speeds import measure_core_speeds
from jettison.live.server_process import ServerProcess
from jettison.live.speed_watch import SpeedWatch
from jettison.live.step_process import Sample
from jettison.workload.client import ReplayOptions, replay_sync
from jettison.workload.prompts import PromptMaker
from jettison.workload.rows import Workload, as_columns
from jettison.workload.traces import TraceRow

Progress = Callable[[float, str], None]

PROMPT, OUTPUT = 16, 96
"""Tokens of each request of a batch."""
BATCHES = (1, 4, 12, 32)
NUM_SHORT, SHORT_GAP_S = 120, 0.02
"""Requests of one output token, and the time between them."""
NUM_PROMPTS = 10
IDLE_S = 4.0
NUM_SCRAPES = 30
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class _Load:
    """One phase's requests."""

    name: str
    rows: tuple[TraceRow, ...]


@dataclass(frozen=True, slots=True)
class _Window:
    """What was read around a phase."""

    load: _Load
    begin_ns: int
    end_ns: int
    server_s: float
    worker_s: float
    client_s: float


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of the time line."""

    begin_ns: int
    end_ns: int
    num_requests: int
    num_tokens: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class HostMeasurement:
    """The constants, and what they were made from."""

    costs: HostCosts
    phases: dict[str, list[Phase]]
    step_factors: dict[str, float]
    """By load: steps while serving over their prediction."""
    gaps_s: dict[int, float]
    """Medians by batch."""


def measure_host_costs(
    config: EngineConfig, profile: HardwareProfile, *, progress: Progress = lambda share, text: None
) -> HostMeasurement:
    """About a minute. ``config``: as the cluster is to be served; one instance of it is, alone.

    Raises ModelError, ConfigError, JettisonError (the server does not come up, requests fail).
    """
    num_cores = _usable_cores()
    progress(0.0, "cores side by side")
    cores = measure_core_speeds(config, num_cores)
    with tempfile.TemporaryDirectory(prefix="jettison-host-") as folder:
        line = Path(folder) / "timeline.json.gz"
        with (
            SpeedWatch(config) as watch,
            ServerProcess(Path(config.model.model), _flags(config, line), Path(folder) / "server.log") as server,
        ):
            windows, idle, scrapes = _serve_phases(server, config, progress)
            probes = watch.end()
        steps = _read_steps(line)
    phases: dict[str, list[Phase]] = {}
    for window in windows:
        phases.setdefault(window.load.name, []).append(_phase(window, steps))
    gaps = _gaps(windows, steps)
    factors = _factors(windows, steps, profile)
    costs = fit_host_costs(
        [phase for same in phases.values() for phase in same], _phase(idle, steps), scrapes, gaps,
        tick_interval_s=config.overload.check_interval_ms / 1e3, core_speeds=cores.speeds,
        threads_per_worker=config.num_threads,
        step_factor=math.exp(sum(math.log(factor) for factor in factors.values()) / len(factors)),
        probe_s=_probe_s(probes, windows) * cores.probe_factor,
    )  # fmt: skip
    medians = {rows: statistics.median(values) for rows, values in gaps.items() if values}
    return HostMeasurement(costs, phases, factors, medians)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _flags(config: EngineConfig, timeline: Path) -> dict[str, object]:
    """One instance with room for the largest load, told as the cluster's configuration has it."""
    assembly = assemble(config)
    tokens = max(max(BATCHES) * (PROMPT + OUTPUT), 2 * NUM_PROMPTS * _prompt_tokens(config))
    block_size = config.memory.block_size
    blocks = -(-tokens // block_size) + 2 * max(BATCHES) + 8
    return {
        "instances": 1, "num_threads": config.num_threads, "dtype": assembly.worker_specs[0].dtype,
        "kernels": config.model.kernels, "block_size": block_size, "page_size": config.memory.page_bytes,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "max_num_seqs": config.scheduler.max_num_seqs, "max_num_queued_reqs": "none",
        "memory": assembly.memory_for_blocks(blocks), "overload": "recompute", "profile": config.profile,
        "timeline": timeline,
    }  # fmt: skip


def _prompt_tokens(config: EngineConfig) -> int:
    """A prompt that one step takes whole."""
    return max(1, min(config.scheduler.max_num_batched_tokens, 512) - 1)


def _loads(config: EngineConfig) -> list[_Load]:
    most = min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
    loads = [
        _Load(f"decode {size}", (TraceRow(0.0, PROMPT, OUTPUT),) * size) for size in BATCHES if size <= most
    ]
    loads.append(_Load("short", tuple(TraceRow(i * SHORT_GAP_S, PROMPT, 1) for i in range(NUM_SHORT))))
    gap_s = 0.15
    loads.append(_Load(
        "prompts", tuple(TraceRow(i * gap_s, _prompt_tokens(config), 1) for i in range(NUM_PROMPTS))
    ))  # fmt: skip
    return loads


# --- serving


def _serve_phases(
    server: ServerProcess, config: EngineConfig, progress: Progress
) -> tuple[list[_Window], _Window, Scrapes]:
    loads = _loads(config)
    worker = _worker_of(server.pid)
    for load in loads:  # once to warm up
        _replay(server.url, load, config)
    windows = []
    for index in range(ROUNDS):
        for load in loads:
            progress(0.3 + 0.6 * index / ROUNDS, f"serving, round {index + 1} of {ROUNDS}: {load.name}")
            windows.append(_watched(server.pid, worker, load, partial(_replay, server.url, load, config)))
    progress(0.95, "doing nothing, and reading metrics")
    idle = _watched(server.pid, worker, _Load("idle", ()), lambda: time.sleep(IDLE_S))
    before, begin_s = _processor_s(server.pid), time.process_time()
    for _ in range(NUM_SCRAPES):
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10.0) as response:
            list(text_string_to_metric_families(response.read().decode()))
    scrapes = Scrapes(NUM_SCRAPES, _processor_s(server.pid) - before, time.process_time() - begin_s)
    return windows, idle, scrapes


def _replay(url: str, load: _Load, config: EngineConfig) -> None:
    workload = Workload(as_columns(load.rows), load.name, "calibration")
    options = ReplayOptions(
        name=load.name, model=config.model.served_model_name, observe=False, prompts=PromptMaker(seed=1), detail=False
    )
    run = replay_sync(url, workload, options)
    if run.requests.completed < run.requests.submitted:
        raise JettisonError(f"{run.requests.submitted - run.requests.completed} requests of load {load.name} failed")


def _watched(server: int, worker: int, load: _Load, act: Callable[[], None]) -> _Window:
    server_s, worker_s, client_s = _processor_s(server), _processor_s(worker), time.process_time()
    begin_ns = time.monotonic_ns()
    act()
    time.sleep(0.05)  # what is still to be done of the last answer
    end_ns = time.monotonic_ns()
    return _Window(
        load, begin_ns, end_ns, _processor_s(server) - server_s, _processor_s(worker) - worker_s,
        time.process_time() - client_s,
    )


def _processor_s(pid: int) -> float:
    """Processor time of all threads of a process, exactly where the kernel tells, else in its ticks."""
    total_ns = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total_ns += int((task / "schedstat").read_text().split()[0])
        return total_ns / 1e9
    except (OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _worker_of(server: int) -> int:
    """The process id of the server's one worker. Raises JettisonError."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_bytes()
            except (OSError, ValueError, IndexError):
                continue
            if parent == server and b"worker_main" in command:
                return int(folder.name)
    raise JettisonError("the server has no worker")


# --- the time line


def _read_steps(path: Path) -> list[_Step]:
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    first_ns = document["otherData"]["first_ns"]
    steps = [
        _Step(
            first_ns + round(event["ts"] * 1e3), first_ns + round((event["ts"] + event["dur"]) * 1e3),
            event["args"]["requests"], event["args"]["tokens"], event["args"]["prompt_tokens"],
        )
        for event in document["traceEvents"] if event.get("cat") == "step"
    ]  # fmt: skip
    return sorted(steps, key=lambda step: step.begin_ns)


def _of(window: _Window, steps: Sequence[_Step]) -> list[_Step]:
    return [step for step in steps if window.begin_ns <= step.begin_ns < window.end_ns]


def _phase(window: _Window, steps: Sequence[_Step]) -> Phase:
    ours, rows = _of(window, steps), window.load.rows
    return Phase(
        wall_s=(window.end_ns - window.begin_ns) / 1e9,
        num_steps=len(ours),
        num_rows=sum(step.num_requests for step in ours),
        num_tokens=sum(row.output_tokens for row in rows),
        num_requests=len(rows),
        num_prompt_tokens=sum(row.input_tokens for row in rows),
        controller_s=window.server_s,
        worker_s=window.worker_s,
        steps_s=sum(step.end_ns - step.begin_ns for step in ours) / 1e9,
        client_s=window.client_s,
    )


def _gaps(windows: Sequence[_Window], steps: Sequence[_Step]) -> dict[int, list[float]]:
    """Between decode steps of the whole batch that follow each other."""
    gaps: dict[int, list[float]] = {}
    for window in windows:
        size = len(window.load.rows)
        if not window.load.name.startswith("decode"):
            continue
        ours = _of(window, steps)
        for before, after in pairwise(ours):
            if before.num_tokens == after.num_tokens == before.num_requests == after.num_requests == size:
                gaps.setdefault(size, []).append((after.begin_ns - before.end_ns) / 1e9)
    return gaps


def _probe_s(probes: Sequence[Sample], windows: Sequence[_Window]) -> float:
    """Median of the probes while the loads were served, as steps and gaps are measured then; 0 without any."""
    during = [p.took_s for p in probes if any(w.begin_ns <= p.at_s * 1e9 < w.end_ns for w in windows)]
    return statistics.median(during or [0.0])


def _factors(windows: Sequence[_Window], steps: Sequence[_Step], profile: HardwareProfile) -> dict[str, float]:
    """By load: the median of measured over predicted."""
    ratios: dict[str, list[float]] = {}
    cost, layers = profile.cost, profile.cost.num_layers
    for window in windows:
        name, size = window.load.name, len(window.load.rows)
        done = 0
        for step in _of(window, steps):
            if name == "prompts" and step.num_prompt_tokens > 1:
                shape = StepShape((ChunkShape(0, step.num_tokens),), layers, True, 1)
            elif name.startswith("decode") and step.num_tokens == step.num_requests == size:
                done += 1
                shape = StepShape((ChunkShape(PROMPT + done, 1),) * size, layers, True, size)
            else:
                continue
            ratios.setdefault(name, []).append((step.end_ns - step.begin_ns) / 1e9 / cost.step_cost_s(shape))
    return {name: statistics.median(values) for name, values in ratios.items()}
