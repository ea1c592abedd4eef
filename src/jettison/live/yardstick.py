"""How fast cores are while everybody serves: batches made for it, before and after what is to be compared.

Steps side by side (``live.core_speeds``) say what caches and memory give to several cores. Serving, workers share their
cores with controller and clients as well, and come back to cold caches: their steps take more processor time than
side by side. And a virtual machine is slower now than it was a minute ago. Both are in what a known load takes of the
workers' processor time, over what the profile says that it takes.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jettison.config import EngineConfig
from jettison.cost.hardware import HardwareProfile
from jettison.cost.hostcosts import HostCosts
from jettison.cost.hostfit import crowded_speed
from jettison.cost.model import ChunkShape, StepShape
from jettison.errors import JettisonError
from jettison.live.host_watch import (
    Load,
    Step,
    Window,
    read_steps,
    replay,
    serving_flags,
    steps_of,
    watched,
    workers_of,
)
from jettison.live.server_process import ServerProcess
from jettison.workload.traces import TraceRow

PROMPT, OUTPUT = 64, 64
"""Tokens of each request."""
BATCHES = (4, 12)
"""Requests of each instance: what bursts come to as well, so that steps of these sizes stand for those."""
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Reading:
    """What one laying came to."""

    begin_s: float
    """Of the monotonic clock."""
    end_s: float
    speed: float
    """Of a core while all instances serve, over that of one alone when steps were profiled: by the workers' steps."""
    controller_factor: float
    """Processor time of the controller, over what the constants say."""


class Yardstick:
    """``with Yardstick(...) as yardstick: yardstick.lay(); ...; yardstick.lay()``; then ``readings()``.

    Between layings its server waits, which takes a thousandth of a core.
    """

    def __init__(self, config: EngineConfig, num_instances: int, costs: HostCosts, profile: HardwareProfile) -> None:
        """``config``: as the cluster is to be served; ``costs``: what workers take beside steps; ``profile``: by which
        steps are predicted."""
        self._config = config
        self._costs = costs
        self._profile = profile
        most = min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
        sizes = [size for size in BATCHES if size <= most] or [1]
        self._loads = [
            Load(f"yardstick {size}", (TraceRow(0.0, PROMPT, OUTPUT),) * (size * num_instances)) for size in sizes
        ]
        self._num_instances = num_instances
        self._kv_tokens = 2 * max(sizes) * (PROMPT + OUTPUT)
        self._exits = ExitStack()
        self._url = ""
        self._server_pid = 0
        self._workers: list[int] = []
        self._layings: list[list[Window]] = []
        self._steps: list[Step] = []

    def __enter__(self) -> Yardstick:
        """Raises JettisonError: the server does not come up."""
        with ExitStack() as exits:
            folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="jettison-yardstick-")))
            line = folder / "timeline.json.gz"
            flags = serving_flags(self._config, self._kv_tokens)
            flags |= {"instances": self._num_instances, "timeline": line}
            server = ServerProcess(Path(self._config.model.model), flags, folder / "server.log")
            exits.push(lambda kind, *_: self._read_line(line) if kind is None else None)  # after the server's end
            exits.enter_context(server)
            self._url, self._server_pid = server.url, server.pid
            self._workers = workers_of(server.pid)
            for load in self._loads:  # once to warm up
                replay(self._url, load, self._config)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.__exit__(*error)

    def _read_line(self, line: Path) -> None:
        self._steps = read_steps(line)

    def lay(self) -> None:
        """Serve all loads; some seconds. Raises JettisonError where a request fails."""
        windows = []
        for _ in range(ROUNDS):
            for load in self._loads:
                act = partial(replay, self._url, load, self._config)
                windows.append(watched(self._server_pid, self._workers, load, act))
        self._layings.append(windows)

    def readings(self) -> list[Reading]:
        """One of each laying, when the server has ended: steps are in its time line. Raises JettisonError if that
        knows of none."""
        return [self._reading(windows) for windows in self._layings]

    def _reading(self, windows: list[Window]) -> Reading:
        steps = [step for window in windows for step in steps_of(window, self._steps)]
        if not steps:
            raise JettisonError("the time line of a load for calibration has no steps")
        costs = self._costs
        around_s = sum(costs.worker_step_s + step.num_requests * costs.worker_row_s for step in steps)
        predicted_s = costs.step_factor * sum(self._predicted_s(step) for step in steps)
        workers_s = sum(window.worker_s for window in windows) - around_s
        return Reading(
            windows[0].begin_ns / 1e9, windows[-1].end_ns / 1e9,
            crowded_speed(workers_s, predicted_s, self._config.num_threads),
            self._controller_factor(windows, steps),
        )

    def _controller_factor(self, windows: list[Window], steps: list[Step]) -> float:
        """Between 0.3 and 3: beyond, it is no measurement."""
        costs, interval_s = self._costs, self._config.overload.check_interval_ms / 1e3
        wall_s = sum(window.end_ns - window.begin_ns for window in windows) / 1e9
        rows = [row for window in windows for row in window.load.rows]
        predicted_s = (
            len(steps) * costs.controller_step_s
            + sum(step.num_requests for step in steps) * costs.controller_row_s
            + sum(row.output_tokens for row in rows) * costs.controller_token_s
            + sum(row.input_tokens for row in rows) * costs.controller_prompt_token_s
            + len(rows) * (costs.controller_request_s + costs.controller_end_s)
            + wall_s / interval_s * costs.controller_tick_s
        )
        factor = sum(window.server_s for window in windows) / predicted_s if predicted_s else 1.0
        return min(3.0, max(0.3, factor))

    def _predicted_s(self, step: Step) -> float:
        """Decodes are taken for half grown, prompts for parts of equal size."""
        prompts = -(-step.num_prompt_tokens // PROMPT)
        decodes = step.num_tokens - step.num_prompt_tokens
        chunks = tuple(
            ChunkShape(0, step.num_prompt_tokens * (i + 1) // prompts - step.num_prompt_tokens * i // prompts)
            for i in range(prompts)
        ) + (ChunkShape(PROMPT + OUTPUT // 2, 1),) * decodes  # fmt: skip
        return self._profile.cost.step_cost_s(
            StepShape(chunks, self._profile.cost.num_layers, True, step.num_requests)
        )
