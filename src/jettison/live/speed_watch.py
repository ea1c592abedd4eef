"""How fast this machine is while something else goes on: probes now and then, by a process of their own."""

from __future__ import annotations

from jettison.config import EngineConfig
from jettison.live.step_process import Sample, StepProcess

INTERVAL_S = 0.4
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
