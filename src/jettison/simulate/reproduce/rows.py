"""What a reproduction says: rows of a paper's figure beside ours, and the conditions under which both were found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from matplotlib.figure import Figure as Picture


@dataclass(frozen=True, slots=True)
class Band:
    """From ``low`` to ``high``, both included; None does not bound."""

    low: float | None = None
    high: float | None = None

    def holds(self, value: float) -> bool:
        """Whether the value lies in it."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.low is not None and self.high is not None:
            return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        if self.low is not None:
            return f">= {self.low:g}"
        return "any" if self.high is None else f"<= {self.high:g}"

    def as_json(self) -> list[float | None]:
        """``[low, high]``."""
        return [self.low, self.high]


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a figure: the paper's beside ours."""

    figure: str
    workload: str
    metric: str
    system: str
    baseline: str
    """What the system is compared with; empty for a number of its own."""
    paper: Band | None
    """What the paper states; None: it states nothing of the kind."""
    ours: float | None
    """Median over the seeds; None: it could not be had."""
    unit: str = ""
    """``x`` for ratios, ``%`` for shares in percent, else a unit."""
    spread: tuple[float, float] | None = None
    """Least and largest over the seeds."""
    band: Band | None = None
    """What counts as a reproduction; None: stated beside the paper's, not judged."""
    band_source: str = ""
    """Whose band it is."""
    is_idle: bool = False
    """The system was to drop and never did: that it is no worse than others shows nothing."""

    @property
    def in_band(self) -> bool | None:
        """None where there is no band, nothing was found, or it would hold because nothing happened."""
        if self.band is None or self.ours is None or not math.isfinite(self.ours):
            return None
        holds = self.band.holds(self.ours)
        return None if holds and self.is_idle else holds

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        row = asdict(self)
        row["paper"] = None if self.paper is None else self.paper.as_json()
        row["band"] = None if self.band is None else self.band.as_json()
        row["spread"] = None if self.spread is None else list(self.spread)
        row["in_band"] = self.in_band
        return row


@dataclass(slots=True)
class Outcome:
    """All that one figure's reproduction came to."""

    rows: list[Row] = field(default_factory=list)
    pictures: dict[str, Picture] = field(default_factory=dict)
    """By what they show, for file names: ``ttft``."""
    conditions: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Fairness headers by workload: (label, value)."""
    remarks: list[str] = field(default_factory=list)
    """How and why ours differs, made of what was found: one paragraph each."""


def median_and_spread(values: Sequence[float | None]) -> tuple[float | None, tuple[float, float] | None]:
    """Over seeds; what is None is left out."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None, None
    return statistics.median(known), (min(known), max(known))


def ratio(above: float | None, below: float | None) -> float | None:
    """None where either is missing or there is nothing to divide by."""
    return above / below if above is not None and below else None
