"""Figures of an overload comparison that need the requests of several runs at once: SLO violations, the burst window.

Pure functions over stored runs (``requests_detail``); ``report.results`` has the figures of a single run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jettison.report.results import RunResult, percentile

SLO_SCALES = tuple(range(2, 11))
"""Scale factors of KunServe's Fig. 13; it marks 5 for chat and 10 for summaries."""

Detail = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SloBase:
    """The latencies that scale factors multiply: P50 of the best baseline in a comparison (KunServe v3 section 5.2)."""

    ttft_s: float
    tpot_s: float


def slo_base(baselines: Sequence[RunResult]) -> SloBase:
    """The lowest P50 TTFT and the lowest P50 TPOT among the baselines. Raises ValueError if none produced tokens."""
    ttft = [run.ttft_s.p50 for run in baselines if run.ttft_s.p50 is not None]
    tpot = [run.tpot_s.p50 for run in baselines if run.tpot_s.p50 is not None]
    if not ttft or not tpot:
        raise ValueError("no baseline produced tokens: there is nothing to scale")
    return SloBase(min(ttft), min(tpot))


def slo_violations(
    run: RunResult, base: SloBase, scales: Sequence[int] = SLO_SCALES
) -> dict[str, list[float | None]]:
    """Share of requests over ``scale`` times the base: by ``ttft``, by ``tpot``, by ``either``, a value a scale.

    A request without an answer violates; one of a single token has no TPOT to violate. None without requests.
    """
    details = run.requests_detail or []

    def share(of: Sequence[bool]) -> float | None:
        return sum(of) / len(of) if of else None

    found: dict[str, list[float | None]] = {"ttft": [], "tpot": [], "either": []}
    for scale in scales:
        late = [_is_over(row, "ttft_s", scale * base.ttft_s) for row in details]
        slow = [_is_over(row, "tpot_s", scale * base.tpot_s) for row in details]
        found["ttft"].append(share(late))
        found["tpot"].append(share(slow))
        found["either"].append(share([a or b for a, b in zip(late, slow, strict=True)]))
    return found


def _is_over(row: Detail, name: str, limit_s: float) -> bool:
    if row["status"] != "completed":
        return True
    value = row[name]
    return value is not None and value > limit_s


def overload_arrivals(details: Sequence[Detail], base: SloBase, capacity_tokens: float) -> frozenset[int]:
    """Indices of the requests that arrive while the workload's demand exceeds the undropped KV capacity.

    The demand is that with unlimited memory: a request holds its prompt from its arrival, grows by one token each TPOT
    after its TTFT (both from ``base``), and leaves with its last. So the window is the same for every policy, and no
    policy's own queue lengthens it.
    """
    rows = [
        (row["scheduled_s"], row["scheduled_s"] + base.ttft_s, row["input_tokens"], row["wanted_tokens"], row["index"])
        for row in details
    ]
    chosen = set()
    for now, _, _, _, index in rows:
        demand = 0.0
        for arrival, first, prompt, output, _ in rows:
            if arrival <= now < first + output * base.tpot_s:
                demand += prompt + max(0.0, now - first) / base.tpot_s
        if demand > capacity_tokens:
            chosen.add(index)
    return frozenset(chosen)


def window_ttft_p99(run: RunResult, arrivals: frozenset[int]) -> float | None:
    """P99 TTFT of the requests in the window; None where none was answered."""
    ttft = [r["ttft_s"] for r in run.requests_detail or [] if r["index"] in arrivals and r["ttft_s"] is not None]
    return percentile(ttft, 99)
