"""The other simulator's side of a comparison: one process, one run, one JSON object in (argument), one out.

Standard library only: each adapter beside this file runs in the environment of the simulator it adapts. What the
simulator prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any


def peak_mib() -> int:
    """Of this process since it was started. Unlike ``ru_maxrss``, without what its parent held when it was forked."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) >> 10


def processor_s() -> float:
    """User and system time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Timed:
    """``with Timed() as timed``: afterwards ``timed.row`` has wall and processor seconds and the peak so far."""

    row: dict[str, Any]

    def __enter__(self) -> Timed:
        self._processor_s, self._begun_s = processor_s(), time.perf_counter()
        return self

    def __exit__(self, *raised: object) -> None:
        wall_s = time.perf_counter() - self._begun_s
        self.row = {"wall_s": wall_s, "processor_s": processor_s() - self._processor_s, "peak_mib": peak_mib()}


def main(simulate: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run with the settings given; the answer is ``simulate``'s row."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    row = simulate(json.loads(sys.argv[1]))
    answer.write(json.dumps(row))
    answer.close()
