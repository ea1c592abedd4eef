"""What a reproduction says: claims of a paper's figure beside ours, and the conditions under which both were found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure as Picture

from papers.figure import Band, Claim


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a figure: the paper's beside ours."""

    figure: str
    workload: str
    claim: Claim
    ours: float | None
    """The claim's middle of its numbers; None: it could not be had."""
    spread: tuple[float, float] | None = None
    """Least and largest."""
    is_idle: bool = False
    """The system was to drop and never did: that it is no worse than others shows nothing."""

    @property
    def in_band(self) -> bool | None:
        """None where there is no band, nothing was found, or it would hold because nothing happened."""
        if self.claim.band is None or self.ours is None or not math.isfinite(self.ours):
            return None
        holds = self.claim.band.holds(self.ours)
        return None if holds and self.is_idle else holds

    @property
    def proves_nothing(self) -> bool:
        """What it counts never happened."""
        return self.claim.is_proof and self.ours == 0.0

    @property
    def is_beside(self) -> bool:
        """The paper states nothing of the kind, no band judges it, and nothing is to be said of it."""
        return self.claim.paper is None and self.claim.band is None and not self.proves_nothing

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        claim = self.claim
        return {
            "figure": self.figure, "workload": self.workload, "metric": claim.metric, "system": claim.system,
            "baseline": claim.baseline, "paper": _as_json(claim.paper), "ours": self.ours, "unit": claim.unit,
            "spread": None if self.spread is None else list(self.spread), "band": _as_json(claim.band),
            "band_source": claim.band_source, "is_idle": self.is_idle, "in_band": self.in_band,
        }  # fmt: skip


def _as_json(band: Band | None) -> list[float | None] | None:
    return None if band is None else [band.low, band.high]


@dataclass(slots=True)
class Outcome:
    """All that one figure's reproduction came to."""

    rows: list[Row] = field(default_factory=list)
    pictures: dict[str, Picture] = field(default_factory=dict)
    """By what they show, for file names: ``ttft``."""
    conditions: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Fairness headers by workload: (label, value)."""
