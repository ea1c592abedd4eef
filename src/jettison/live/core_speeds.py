"""How much slower a core is while others compute, too: the same steps in one process, and in several at once.

Both ends: ``measure_core_speeds`` here, and ``python -m jettison.live.core_speeds`` as one of the processes, which runs
steps of a few shapes over and over between two times that it is told.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from typing import Any

from jettison.config import EngineConfig
from jettison.cost.model import ChunkShape, StepShape
from jettison.errors import WorkerLostError
from jettison.live.assembly import assemble
from jettison.live.launcher import worker_environment
from jettison.live.profile import make_profile_device, shape_limits
from jettison.live.step_timer import StepTimer

START_TIMEOUT_S = 120.0
DECODES, CONTEXT = (1, 16), 128
"""Batches of decodes that are run, and their cached tokens; and one prompt of the step's budget."""


def measure_core_speeds(config: EngineConfig, num_cores: int, *, rounds: int = 3, window_s: float = 1.5) -> list[float]:
    """Entry i: the speed of a core while i + 1 are busy, over that while one is. Raises WorkerLostError.

    A process has the threads that a worker of ``config`` has; the speeds between multiples of those are interpolated.
    Rounds go through all numbers of processes in turn: a machine that drifts moves all of them.
    """
    threads = config.num_threads
    most = max(1, num_cores // threads)
    children = [_Child(config) for _ in range(most)]
    try:
        for child in children:
            child.wait_ready()
        times: dict[int, list[dict[str, float]]] = {number: [] for number in range(1, most + 1)}
        for index in range(rounds + 1):
            for number in times:
                begin_ns = time.monotonic_ns() + 50_000_000
                for child in children[:number]:
                    child.ask(begin_ns, begin_ns + round(window_s * 1e9))
                answers = [child.answer() for child in children[:number]]
                if index:  # the first round warms up
                    times[number] += answers
    finally:
        for child in children:
            child.close()
    measured = [(number * threads, _speed(times[1], answers)) for number, answers in times.items()]
    return interpolated(measured, num_cores)


def _speed(alone: list[dict[str, float]], together: list[dict[str, float]]) -> float:
    """Geometric mean over the shapes of the ratio of medians."""
    logs = [
        math.log(statistics.median(a[shape] for a in alone) / statistics.median(t[shape] for t in together))
        for shape in alone[0]
    ]
    return min(1.5, math.exp(sum(logs) / len(logs)))


def interpolated(measured: list[tuple[int, float]], num_cores: int) -> list[float]:
    """A speed for each number of busy cores: 1 with one, straight lines between what was measured, flat beyond."""
    points = [(1, 1.0)] + [(cores, speed) for cores, speed in measured if cores > 1]
    speeds = []
    for cores in range(1, num_cores + 1):
        below = max((p for p in points if p[0] <= cores), key=lambda p: p[0])
        above = min((p for p in points if p[0] >= cores), key=lambda p: p[0], default=below)
        share = (cores - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
        speeds.append(below[1] + share * (above[1] - below[1]))
    return speeds


class _Child:
    """One process with a device of its own."""

    def __init__(self, config: EngineConfig) -> None:
        told = {key: value for key, value in config.flat().items() if key not in ("api_key", "timeline")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jettison.live.core_speeds"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=worker_environment(config.num_threads),
        )  # fmt: skip
        self._tell(told)

    def _tell(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerLostError(f"a process that measures ended with code {self._process.wait()}")
        return json.loads(line)

    def wait_ready(self) -> None:
        """Until its device is loaded."""
        self._hear()

    def ask(self, begin_ns: int, end_ns: int) -> None:
        """Let it run steps between two times of the monotonic clock."""
        self._tell([begin_ns, end_ns])

    def answer(self) -> dict[str, float]:
        """Median seconds by shape."""
        answer: dict[str, float] = self._hear()
        return answer

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def main() -> None:
    """A process that measures: configuration, then pairs of times, on standard input."""
    config = EngineConfig.resolve(**json.loads(sys.stdin.readline()))
    assembly = assemble(config)
    limits = shape_limits(assembly)
    device = make_profile_device(assembly, limits)
    device.start()
    try:
        timer = StepTimer(device, limits)
        timer.prepare()
        shapes = _shapes(limits.num_layers, min(limits.max_num_tokens, limits.max_context), limits.max_num_seqs)
        for shape in shapes.values():
            timer.time_s(shape)
        _say("ready")
        for line in sys.stdin:
            begin_ns, end_ns = json.loads(line)
            _say(_run(timer, shapes, begin_ns, end_ns))
    finally:
        device.close()


def _say(message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _shapes(num_layers: int, most_tokens: int, most_seqs: int) -> dict[str, StepShape]:
    decodes = {
        f"decode {size}": StepShape((ChunkShape(CONTEXT, 1),) * size, num_layers, True, size)
        for size in DECODES if size <= most_seqs
    }
    return decodes | {"prefill": StepShape((ChunkShape(0, most_tokens),), num_layers, True, 1)}


def _run(timer: StepTimer, shapes: dict[str, StepShape], begin_ns: int, end_ns: int) -> dict[str, float]:
    time.sleep(max(0.0, (begin_ns - time.monotonic_ns()) / 1e9))
    times: dict[str, list[float]] = {name: [] for name in shapes}
    while time.monotonic_ns() < end_ns or not all(times.values()):
        for name, shape in shapes.items():
            times[name].append(timer.time_s(shape))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


if __name__ == "__main__":
    main()
