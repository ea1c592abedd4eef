"""What a reproduced figure is: workloads (a spec and systems), a table of claims for each, and plots.

Data alone: ``engine`` runs it. What it means, and why ours differs, is told in ``papers/setup.md``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from matplotlib.figure import Figure as Picture

from papers.specs import Results
from papers.variants import Variant

Found = Sequence[Results]
"""Of one part: the runs at each point of its sweep; one point where nothing is swept, none where nothing is served."""

Stated = float | tuple[float | None, float | None] | None
"""A number, a range (None does not bound), or nothing."""

REFERENCE = "reference.md 11"
OWN_RANGE = "the paper's own range"


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


@dataclass(frozen=True, slots=True)
class Claim:
    """One row before its number is known: what the paper states, and how ours is measured. ``claims`` makes them."""

    metric: str
    system: str
    numbers: Callable[[Found], Sequence[float | None]]
    """One for each seed, or for each point of a sweep; None where it could not be had."""
    baseline: str = ""
    """What the system is compared with; empty for a number of its own."""
    unit: str = ""
    """``x`` for ratios, ``%`` for shares in percent, else a unit."""
    middle: Callable[[Sequence[float]], float] = statistics.median
    """Of the numbers."""
    paper: Band | None = None
    """What the paper states; None: it states nothing of the kind."""
    band: Band | None = None
    """What counts as a reproduction; None: not judged."""
    band_source: str = ""
    """Whose band it is."""
    is_proof: bool = False
    """A count: where it is 0, the run says nothing of what is counted, and the row says so."""

    def stated(self, paper: Stated, band: Stated = None, source: str = REFERENCE) -> Claim:
        """With what the paper states, and what counts as a reproduction of it."""
        judged = _band(band)
        return replace(self, paper=_band(paper), band=judged, band_source=source if judged else "")


def _band(stated: Stated) -> Band | None:
    if stated is None:
        return None
    low, high = stated if isinstance(stated, tuple) else (stated, stated)
    return Band(None if low is None else float(low), None if high is None else float(high))


@dataclass(frozen=True, slots=True)
class Part:
    """One workload of a figure: what is served, by which systems, and what is claimed of it."""

    workload: str
    claims: tuple[Claim, ...]
    spec: str | None = None
    """In the tree; None where nothing is served."""
    systems: tuple[Variant | str, ...] = ()
    """Text: the policy of that name, as it is."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the spec, as ``Spec.changed`` has them."""
    sweep: tuple[Mapping[str, Any], ...] = ({},)
    """More of them, for each point."""
    load: Mapping[str, Any] | None = None
    """A rule of ``harvest_load``, where that decides how many users there are."""
    conditions: str = ""
    """The system whose run they are taken of; empty: there are none to tell, or none that another part has not told."""

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The systems."""
        return tuple(Variant(system, system) if isinstance(system, str) else system for system in self.systems)


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture of a figure. ``pictures`` makes them."""

    name: str
    """What it shows, for file names: ``ttft``."""
    draw: Callable[[Mapping[str, Found]], Picture]
    """Of what was found, by workload."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a paper."""

    name: str
    title: str
    source: str
    """Paper and section."""
    parts: tuple[Part, ...]
    plots: tuple[Plot, ...] = ()
    is_long: bool = False
    """It takes half an hour or more, and is run only where it is asked for by name."""

    @property
    def specs(self) -> tuple[str, ...]:
        """Those that are run, each once."""
        return tuple(dict.fromkeys(part.spec for part in self.parts if part.spec is not None))
