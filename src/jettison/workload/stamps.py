"""Detects time stamps that are steps of a coarse clock, from the stamps themselves and not from a format's name.

Bursts measured on such steps are an artefact, so arrivals are spread inside the steps; exact arrivals must stay where
they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jettison.workload.rows import Floats

Ticks = npt.NDArray[np.int64]

LOOKED_FOR_S = tuple(half / 2 for half in range(2, 21))
"""Widths of steps that are tried, 1 s to 10 s by halves, beside the largest width that divides all stamps exactly. A
wider common step is a pattern of the arrivals (a batch a minute, say), and not of a clock."""

LEAST_STAMPS = 3
"""Least number of different stamps: any two are a whole number of some steps apart. Of three stamps exact to the
millisecond, one triple in a million is, with steps of a second or more."""

SLACK = 0.005
"""Tolerance as a share of a step: a clock that is read every 3 s is read some milliseconds early or late (Mooncake's:
3)."""

LEAST_SLACK_STAMPS = 10
"""With fewer different stamps than this, all must be exact multiples: a few random stamps lie near the multiples of
some step."""

LEAST_TIED_SHARE = 0.1
"""Least share of requests in the same step as an earlier one. Below it, arrivals are rarer than the steps, which then
make no bursts."""

_TICKS_PER_S = 1_000_000
"""Stamps are compared in whole microseconds, finer than any clock to be detected."""

_LOOKED_AT_FIRST = 1000
"""Stamps that are checked first: they rule out most steps before all stamps are checked."""


@dataclass(frozen=True, slots=True)
class Stamps:
    """The result for the time stamps of one file."""

    step_s: float | None
    """Width of a coarse clock's steps; None where no steps were found."""
    off_s: float
    """Largest distance of a stamp from its step; 0 without steps."""
    num_different: int
    """Steps with a request in them; without steps, different stamps."""
    num_requests: int

    def describe(self) -> str:
        """One line for people."""
        count = f"{self.num_different:,} different ones of {self.num_requests:,} requests"
        if self.step_s is None:
            return f"no steps of a coarse clock ({count})"
        off = f" within {self.off_s:.2g} s" if self.off_s else ""
        return f"steps of {self.step_s:g} s{off} ({count})"


def look_at(arrival_s: Floats) -> Stamps:
    """Find out whether a file's stamps are steps. They may have any order and any origin."""
    ticks = _ticks(arrival_s)
    if len(ticks) >= LEAST_STAMPS:
        measure_s = int(np.gcd.reduce(np.diff(ticks))) / _TICKS_PER_S
        exact = [measure_s] if LOOKED_FOR_S[0] <= measure_s <= LOOKED_FOR_S[-1] else []
        for step_s in sorted({*LOOKED_FOR_S, *exact}, reverse=True):
            off_s = _off_s(ticks, step_s)
            if off_s is None:
                continue
            steps = np.unique(np.rint((ticks - ticks[0]) / (step_s * _TICKS_PER_S)).astype(np.int64))
            is_wider = np.gcd.reduce(np.diff(steps)) > 1  # wider than any width that is tried
            is_shared = 1.0 - len(steps) / len(arrival_s) >= LEAST_TIED_SHARE
            if len(steps) >= LEAST_STAMPS and is_shared and not is_wider:
                return Stamps(step_s, off_s, len(steps), len(arrival_s))
            break
    return Stamps(None, 0.0, len(ticks), len(arrival_s))


def fit(arrival_s: Floats, step_s: float) -> bool:
    """Whether stamps, however few, could be steps of this width."""
    return _off_s(_ticks(arrival_s), step_s) is not None


def _ticks(arrival_s: Floats) -> Ticks:
    """Different stamps in whole microseconds, ascending."""
    return np.unique(np.rint(arrival_s * _TICKS_PER_S).astype(np.int64))


def _off_s(ticks: Ticks, step_s: float) -> float | None:
    """Largest distance of a stamp from a multiple of the step, with the origin where most stamps lie; None where it
    exceeds the tolerance."""
    step = round(step_s * _TICKS_PER_S)
    most = SLACK * step if len(ticks) >= LEAST_SLACK_STAMPS else 0.0
    for some in (ticks[:_LOOKED_AT_FIRST], ticks):
        phases = (some - ticks[0]) % step
        turned = np.exp(2j * math.pi / step * phases).mean()
        middle = round(float(np.angle(turned)) / (2 * math.pi) * step)
        off = int(np.abs((phases - middle + step // 2) % step - step // 2).max(initial=0))
        if off > most:
            return None
    return off / _TICKS_PER_S
