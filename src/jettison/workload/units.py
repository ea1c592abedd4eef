"""The unit of time stamps that are bare numbers: the known units, and the tests of plausibility.

A trace in seconds that is read as milliseconds is replayed a thousand times too fast, and every measurement with it is
of another load. A number does not tell its unit, but the rate does: services for people have rates within a few orders
of magnitude, and a wrong unit moves the rate by three.
"""

from __future__ import annotations

from dataclasses import dataclass

from jettison.errors import ConfigError
from jettison.workload.rows import Floats

PER_S = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Units of time stamps -> how many make a second."""

LEAST_REQUESTS = 10
"""Fewer requests give no reliable rate: such a trace is read in its format's unit, and a line tells its resulting
length."""

MOST_PER_S = 50.0
SHORT_S = 3600.0
"""A trace is too fast with more than ``MOST_PER_S`` requests a second for less than ``SHORT_S``. Public traces have
0.01 to 45 a second (a week of Azure's conversations has most) and last for an hour and more; seconds read as
milliseconds have 10 to 45,000."""

MOST_PER_S_EVER = 250.0
"""A trace of any length is too fast with more requests a second than this: five times the most of a public trace."""

LONGEST_GAP_S = 20.0
LONG_S = 2 * 86_400.0
"""A trace is too slow with a mean gap of ``LONGEST_GAP_S`` and more for longer than ``LONG_S``: public traces of days
have a request every 4 s and less. Milliseconds read as seconds turn 16 minutes into eleven days."""

LONGEST_GAP_EVER_S = 250.0
"""A trace of any length is too slow with a longer mean gap than this, unless its format's own traces are quieter:
clouds' traces have hundreds of requests in that time, and the smallest one has five."""

NIGHTLY_GAP_S = 2000.0
"""The longest plausible mean gap for BurstGPT, which begins with a few users: in its first night a request came every
300 to 1,400 s for hours."""

LATEST_START_S = 1e8
"""Latest plausible first arrival, three years, where arrivals count from a workload's start: later ones are dates in
seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The user's options for reading a trace file; None where not given."""

    format: str | None = None
    unit: str | None = None

    def check(self) -> None:
        """Raises ConfigError for an unknown unit."""
        if self.unit is not None and self.unit not in PER_S:
            raise ConfigError(f"a unit of time stamps is one of {', '.join(PER_S)}, not {self.unit!r}")


def is_fast(num_requests: int, span_s: float) -> bool:
    """Whether the requests are too many for so short a time. A time of 0 decides nothing."""
    per_s = num_requests / span_s if span_s > 0 else 0.0
    return per_s > (MOST_PER_S if span_s < SHORT_S else MOST_PER_S_EVER)


def is_slow(num_requests: int, span_s: float, longest_gap_s: float = LONGEST_GAP_EVER_S) -> bool:
    """Whether the requests are too few for so long a time."""
    return span_s / num_requests > (LONGEST_GAP_S if span_s > LONG_S else longest_gap_s)


def doubt(arrival_s: Floats, unit: str, longest_gap_s: float = LONGEST_GAP_EVER_S) -> str | None:
    """Why the unit in which the stamps were read may be wrong: the trace's rate and length in it, and in other units.
    None where the unit is plausible, or where a fast trace has no longer unit to be read in."""
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
