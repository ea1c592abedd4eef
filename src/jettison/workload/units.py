"""In which unit a trace's time stamps are, where they are bare numbers: what may be said, and when a unit is doubted.

A trace whose seconds are taken for milliseconds is replayed a thousand times too fast, and everything that is measured
with it is about another load. Nothing in a number tells its unit, but the rate does: what serves people has arrivals
within a few orders of magnitude, and a wrong unit moves the rate by three.
"""

from __future__ import annotations

from dataclasses import dataclass

from jettison.errors import ConfigError
from jettison.workload.rows import Floats

PER_S = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Units of time stamps -> how many make a second."""

LEAST_REQUESTS = 10
"""Fewer tell no rate: such a trace is read as its format says, and a line says how long it is then."""

MOST_PER_S = 50.0
SHORT_S = 3600.0
"""More requests a second than ``MOST_PER_S`` for less than ``SHORT_S``: public traces have 0.01 to 45 a second (a week
of Azure's conversations has most) and last for an hour and more. Seconds taken for milliseconds have 10 to 45,000."""

MOST_PER_S_EVER = 250.0
"""However long it lasts: five times the most of a public trace."""

LONGEST_GAP_S = 20.0
LONG_S = 2 * 86_400.0
"""A request every ``LONGEST_GAP_S`` and more, for longer than ``LONG_S``: public traces of days have one every 4 s
and less. Milliseconds taken for seconds make eleven days of 16 minutes."""

LONGEST_GAP_EVER_S = 250.0
"""However short it is, where a format's own traces are not quieter: those of clouds have hundreds of requests in that
time, and the smallest one has five."""

NIGHTLY_GAP_S = 2000.0
"""For BurstGPT, which begins with a few users: in its first night a request came every 300 to 1,400 s for hours on
end."""

LATEST_START_S = 1e8
"""Three years: where arrivals count from a workload's start, what begins later has dates in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a person says of a trace file that its first line does not; None where nothing was said."""

    format: str | None = None
    unit: str | None = None

    def check(self) -> None:
        """Raises ConfigError for a unit that there is not."""
        if self.unit is not None and self.unit not in PER_S:
            raise ConfigError(f"a unit of time stamps is one of {', '.join(PER_S)}, not {self.unit!r}")


def is_fast(num_requests: int, span_s: float) -> bool:
    """More requests than arrive anywhere in so short a time. All at one instant says nothing."""
    per_s = num_requests / span_s if span_s > 0 else 0.0
    return per_s > (MOST_PER_S if span_s < SHORT_S else MOST_PER_S_EVER)


def is_slow(num_requests: int, span_s: float, longest_gap_s: float = LONGEST_GAP_EVER_S) -> bool:
    """Fewer requests than a trace of so long a time has."""
    return span_s / num_requests > (LONGEST_GAP_S if span_s > LONG_S else longest_gap_s)


def doubt(arrival_s: Floats, unit: str, longest_gap_s: float = LONGEST_GAP_EVER_S) -> str | None:
    """Why this unit, in which the stamps have been read, may be the wrong one: what the trace is by it, and what it
    would be by others. None where it is plausible, and where no longer unit would make a fast trace slower."""
    num_requests, span_s = len(arrival_s), float(arrival_s.max() - arrival_s.min())
    if not is_slow(num_requests, span_s, longest_gap_s) and (unit == "s" or not is_fast(num_requests, span_s)):
        return None
    others = []
    for other, per_s in PER_S.items():
        other_s = span_s * PER_S[unit] / per_s
        is_likely = not is_fast(num_requests, other_s) and not is_slow(num_requests, other_s, longest_gap_s)
        if other != unit and (is_likely or other in ("s", "ms")):
            others.append(f"in {other} they would in {_shown(num_requests, other_s)}")
    return f"read in {unit}, {num_requests:,} requests arrive in {_shown(num_requests, span_s)}; {'; '.join(others)}"


def _shown(num_requests: int, span_s: float) -> str:
    shown_s = f"{span_s:.4g}" if span_s < 1000 else f"{span_s:,.0f}"
    days = f", {span_s / 86_400:,.1f} days" if span_s > LONG_S else ""
    per_s = num_requests / span_s
    return f"{shown_s} s{days} ({f'{per_s:.3g}' if per_s < 1000 else f'{per_s:,.0f}'} a second)"
