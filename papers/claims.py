"""Claims, by how a number is made of the runs of a seed: a system's own, or two compared."""

from __future__ import annotations

from collections.abc import Callable

from papers.figure import Claim
from papers.measures import Measure, ratio
from papers.specs import Seed


def by_seed(
    metric: str, system: str, number: Callable[[Seed], float | None], baseline: str = "", unit: str = ""
) -> Claim:
    """Any number of a seed's runs."""
    return Claim(metric, system, lambda found: [number(seed) for seed in found[0].by_seed()], baseline, unit)


def computed(metric: str, system: str, number: Callable[[], float], baseline: str = "", unit: str = "") -> Claim:
    """Any number for which nothing is served."""
    return Claim(metric, system, lambda _: [number()], baseline, unit)


def own(metric: str, measure: Measure, system: str = "recompute", unit: str = "") -> Claim:
    """One system's own number."""
    return by_seed(metric, system, lambda seed: measure(seed.runs[system]), unit=unit)


def share(metric: str, measure: Measure, system: str = "recompute") -> Claim:
    """One system's own share, in percent."""
    return own(metric, lambda run: None if (value := measure(run)) is None else 100.0 * value, system, "%")


def lower(metric: str, measure: Measure, system: str, baseline: str) -> Claim:
    """How many times lower than the baseline's."""
    return by_seed(
        metric, system, lambda seed: ratio(measure(seed.runs[baseline]), measure(seed.runs[system])), baseline, "x"
    )


def higher(metric: str, measure: Measure, system: str, baseline: str) -> Claim:
    """How many times higher than the baseline's."""
    return by_seed(
        metric, system, lambda seed: ratio(measure(seed.runs[system]), measure(seed.runs[baseline])), baseline, "x"
    )


def change(metric: str, measure: Measure, system: str, baseline: str) -> Claim:
    """By how much more (or less) it is than the baseline's, in percent."""

    def percent(seed: Seed) -> float | None:
        times = ratio(measure(seed.runs[system]), measure(seed.runs[baseline]))
        return None if times is None else 100.0 * (times - 1.0)

    return by_seed(metric, system, percent, baseline, "%")
