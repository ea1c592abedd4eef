"""How fast a machine was over a stretch of time, from probes: speeds for a simulation of that stretch. Pure.

A virtual machine's cores are somebody else's as well: the same step takes 7 ms now and 9 ms ten seconds later, and a
queue makes more of that. What a simulation is to be compared with has to be simulated on the machine as it was then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

BIN_S = 3.0
"""Probes of so long a time are one speed."""
SLOWEST, FASTEST = 0.2, 3.0
"""Beyond these a bin is no measurement."""

SpeedLine = tuple[tuple[float, float], ...]
"""From when on, in seconds of the run, and how fast a core is over what it was when it was measured. Sorted."""


def speed_line(
    probes: Sequence[tuple[float, float]], reference_s: float, begin_s: float, *, speed: float = 1.0
) -> SpeedLine:
    """``probes``: when (any clock) and what they took; ``reference_s``: what they take when cores are ``speed`` times
    as fast as when the constants were measured; ``begin_s``: the run's beginning on that clock. What was before it
    does not count; bins without probes go on as the one before them, and what is before the first is as fast as that.
    Without a reference (0) nothing is known of the machine: an empty line."""
    if reference_s <= 0.0:
        return ()
    bins: dict[int, list[float]] = {}
    for at_s, took_s in probes:
        if at_s >= begin_s:
            bins.setdefault(math.floor((at_s - begin_s) / BIN_S), []).append(took_s)
    return tuple(
        (
            number * BIN_S if index else 0.0,
            min(FASTEST, max(SLOWEST, speed * reference_s / statistics.median(bins[number]))),
        )
        for index, number in enumerate(sorted(bins))
    )
