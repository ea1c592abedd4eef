"""KunServe v3, Fig. 17: the first burst again and again until memory is full."""

from __future__ import annotations

from jettison.report.results import RunResult
from papers import measures
from papers.claims import by_seed, higher, own, share
from papers.figure import Claim, Figure, Part
from papers.measures import Measure, count, values
from papers.plots import over_time
from papers.reasons import compute_bound, pressure
from papers.specs import Seed, burst_span_s
from papers.systems import BY_PRESSURE, DROPPING

SPEC, WORKLOAD = "extreme-burst", "BurstGPT 72B, extreme burst"
COUNTED_FROM_S = 60.0
"""The paper counts from there."""

FULL, FULL_FOR_S = 0.98, 5.0
"""Of the KV there is, used, with requests waiting, without a break: what a drop ends a moment later is not full."""


def full_at_s(run: RunResult) -> float | None:
    """When memory becomes full with requests waiting, and stays so, after the burst has begun; None: never."""
    used, total, queue = (dict(run.series[name]) for name in ("kv_blocks_used", "kv_blocks_total", "queue"))
    since_s: float | None = None
    begins_s = burst_span_s(SPEC)[0]
    for t in sorted(used):
        if t < begins_s or queue.get(t, 0.0) <= 0 or used[t] < FULL * total[t]:
            since_s = None
            continue
        since_s = t if since_s is None else since_s
        if t - since_s >= FULL_FOR_S:
            return since_s
    return None


def standing(start_s: float) -> Measure:
    """From then on to full memory."""
    return lambda run: None if (at_s := full_at_s(run)) is None else at_s - start_s


def from_the_burst(run: RunResult) -> float | None:
    """From its beginning to full memory."""
    return standing(burst_span_s(SPEC)[0])(run)


def largest_rise() -> Claim:
    """Largest TTFT of recompute before the dropping system is full, over its median before the burst."""

    def number(seed: Seed) -> float | None:
        begins_s, ours, theirs = burst_span_s(SPEC)[0], seed.runs[BY_PRESSURE.name], seed.runs["recompute"]
        calm = sorted(values(theirs, "ttft_s", 5.0, begins_s))
        rising = values(theirs, "ttft_s", begins_s, full_at_s(ours) or ours.duration_s)
        return max(rising) / calm[len(calm) // 2] if calm and rising else None

    return by_seed("largest rise of TTFT until then", "recompute", number, "its own median before", "x")


def _of(system: str) -> tuple[Claim, ...]:
    return (
        higher("standing time, from 60 s on", standing(COUNTED_FROM_S), system, "recompute").stated(1.5, (1.3, 1.7)),
        higher("standing time, from the burst's beginning", from_the_burst, system, "recompute").stated(1.43),
        own("drops", count("drops"), system).stated(2),
        share("KV gained", measures.capacity_gained, system).stated(57),
        own("memory is full at", full_at_s, system, "s").stated(152),
    )


FIG17 = Figure(
    "kunserve-fig17", "an extreme burst", "v3 section 5.6",
    (
        Part(
            WORKLOAD, spec=SPEC, systems=("drop", "recompute", BY_PRESSURE), conditions="recompute",
            claims=(
                *(claim for system in DROPPING for claim in _of(system)),
                own("memory is full at", full_at_s, "recompute", "s").stated(120),
                largest_rise().stated((None, 42)),
                *(claim for claim in pressure() if claim.metric != "drops"), *compute_bound(),
            ),
        ),
    ),
    (over_time("time-line", WORKLOAD),),
)  # fmt: skip
