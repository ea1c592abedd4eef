"""How much online load there is beside a batch: a share of what the machine does at most, or the most that it holds.

ConServe states neither its rates nor its trace; both loads follow from what it does state (section 6: 1999 of 4308
tokens/s; R is the largest rate within the objectives).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jettison.report.classes import total_per_s
from jettison.report.results import RunResult
from papers.load import search
from papers.variants import Changes, Variant

SHARE, HOLDS = "share", "holds"

Simulate = Callable[[Variant, float], RunResult]
"""Runs a system at a factor of the load."""

ONLINE_ONLY = Variant("online-only", "recompute", {"offline": "none"})
MAXIMUM = Variant("vLLM++", "swap", {"offline": "priority"}, Changes(copy_engine=False))

LEAST, MOST = 1.0 / 64, 64.0
"""Factors beyond which no load is looked for."""
BISECTIONS = 6
CLOSE_SHARE = 0.01
"""Relative distance from the wanted share: three hundredths above it chat alone may be late by seconds already."""


def share_of(share: float) -> dict[str, Any]:
    """The rule by which online-only does this part of what ``priority`` does in all, beside an endless batch."""
    return {"rule": SHARE, "of": share}


def most_held() -> dict[str, Any]:
    """The rule by which online-only is just within both objectives: P99 TTFT, and P99 of all gaps."""
    return {"rule": HOLDS}


def told(rule: Mapping[str, Any]) -> str:
    """For the conditions of a comparison."""
    if rule["rule"] == SHARE:
        return f"online-only does {rule['of']:g} of what vLLM++ does in all beside an endless batch"
    return "the most that online-only holds within both objectives, P99 TTFT and P99 of all gaps"


def find_harvest_load(rule: Mapping[str, Any], simulate: Simulate) -> float:
    """The factor of the load by a rule."""
    if rule["rule"] == SHARE:
        return search(lambda factor: online_share(simulate, factor), rule["of"], CLOSE_SHARE).factor
    return _largest(lambda factor: holds(simulate(ONLINE_ONLY, factor)))


def online_share(simulate: Simulate, factor: float) -> float:
    """Tokens/s of online-only over those of ``priority``."""
    online, most = (total_per_s(simulate(system, factor)) or 0.0 for system in (ONLINE_ONLY, MAXIMUM))
    return online / most if most else 0.0


def holds(run: RunResult) -> bool:
    """Whether a run is within the objectives that it is judged by."""
    assert run.goodput is not None
    limits = (run.goodput["slo_ttft_s"], run.goodput["slo_tpot_s"])
    measured = (run.ttft_s.p99, run.itl_s.p99)
    return all(value is not None and value <= limit for value, limit in zip(measured, limits, strict=True))


def _largest(is_held: Callable[[float], bool]) -> float:
    """The largest factor that is held, to a hundredth or so: by doubling or halving, then between the two."""
    low = 1.0
    while low > LEAST and not is_held(low):
        low /= 2.0
    high = 2.0 * low
    while high < MOST and is_held(high):
        low, high = high, 2.0 * high
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_held(middle) else (low, middle)
    return low
