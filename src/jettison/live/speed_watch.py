"""How fast this machine is while something else goes on: probes now and then, by a process of their own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from jettison.config import EngineConfig
from jettison.cost.drift import Taken
from jettison.live.step_process import Sample, StepProcess

INTERVAL_S = 0.5
"""Between probes: of some milliseconds each, so that they take one or two hundredths of a core."""


class SpeedWatch:
    """``with SpeedWatch(config) as watch: ...; watch.end()``. Raises WorkerLostError."""

    def __init__(self, config: EngineConfig, interval_s: float = INTERVAL_S) -> None:
        self._process = StepProcess(config)
        self._interval_s = interval_s

    def __enter__(self) -> SpeedWatch:
        try:
            self._process.wait_ready()
            self._process.watch(self._interval_s)
        except BaseException:
            self._process.close()
            raise
        return self

    def end(self) -> list[Sample]:
        """All probes so far; it is over then."""
        return self._process.end_watch()

    def __exit__(self, *_: object) -> None:
        self._process.close()


def taken_of(probes: Sequence[Sample]) -> list[Taken]:
    """What cores did, and what was stolen of them, from each probe to the next: long where a machine stood still."""
    return [
        (before.at_s, probe.at_s, probe.busy_cores * (probe.at_s - before.at_s),
         probe.stolen_cores * (probe.at_s - before.at_s))
        for before, probe in pairwise(probes)
    ]  # fmt: skip


def cores_taken(probes: Sequence[Sample]) -> float:
    """What of a core the probing itself has kept busy, on average; 0 of fewer than two probes."""
    if len(probes) < 2:
        return 0.0
    return sum(probe.took_s for probe in probes) / (probes[-1].at_s - probes[0].at_s)
