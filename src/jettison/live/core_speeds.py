"""How much slower a core is while others compute, too: the same steps in one process, and in several at once."""

from __future__ import annotations

import math
import statistics
import time

from jettison.config import EngineConfig
from jettison.live.step_process import StepProcess


def measure_core_speeds(
    config: EngineConfig, num_cores: int, *, rounds: int = 9, window_s: float = 0.5
) -> list[float]:
    """Entry i: the speed of a core while i + 1 are busy, over that while one is. Raises WorkerLostError.

    A process has the threads that a worker of ``config`` has; speeds between multiples of those are interpolated.
    Many short rounds go through all numbers of processes in turn: a machine that drifts moves all of them, and what
    disturbs a second or two touches few of them, which medians leave out.
    """
    threads = config.num_threads
    most = max(1, num_cores // threads)
    processes: list[StepProcess] = []
    try:
        processes += (StepProcess(config) for _ in range(most))
        for process in processes:
            process.wait_ready()
        times: dict[int, list[dict[str, float]]] = {number: [] for number in range(1, most + 1)}
        for index in range(rounds + 1):
            for number in times:
                begin_ns = time.monotonic_ns() + 50_000_000
                for process in processes[:number]:
                    process.run(begin_ns, begin_ns + round(window_s * 1e9))
                answers = [process.answer() for process in processes[:number]]
                if index:  # the first round warms up
                    times[number] += answers
    finally:
        for process in processes:
            process.close()
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
