"""KunServe v3, Fig. 17: the first burst again and again until memory is full."""

from __future__ import annotations

from jettison.report.results import RunResult
from jettison.simulate.reproduce import remarks
from jettison.simulate.reproduce.conditions import conditions
from jettison.simulate.reproduce.measures import alone, mean_of, values
from jettison.simulate.reproduce.pictures import time_lines
from jettison.simulate.reproduce.pool import Runs
from jettison.simulate.reproduce.rows import Band, Outcome, Row, median_and_spread, ratio
from jettison.simulate.reproduce.specs import WITHOUT_GUARD, Results, burst_span_s, read_spec, run_spec

FIGURE, WORKLOAD = "kunserve-fig17", "BurstGPT 72B, extreme burst"
COUNTED_FROM_S = 60.0
"""The paper counts from there."""

FULL = 0.98
"""Of the KV there is, used, with requests waiting: out of memory."""

FULL_FOR_S = 5.0
"""Without a break: what a drop ends a moment later is not out of memory."""


def burst_begins_s() -> float:
    """Of the first one, before it is replayed."""
    return burst_span_s("extreme-burst")[0]


def reproduce_fig17(runs: Runs) -> Outcome:
    """How long each system stands."""
    spec = read_spec("extreme-burst")
    results = run_spec(spec, runs, [*spec.variants, WITHOUT_GUARD])
    outcome = Outcome()
    for system in ("drop", WITHOUT_GUARD.name):
        found = [
            ratio(standing_s(ours), standing_s(theirs))
            for ours, theirs in zip(results.runs[system], results.runs["recompute"], strict=True)
        ]
        middle, spread = median_and_spread(found)
        outcome.rows.append(
            Row(
                FIGURE,
                WORKLOAD,
                "standing time, from 60 s on",
                system,
                "recompute",
                Band(1.5, 1.5),
                middle,
                "x",
                spread,
                Band(1.3, 1.7),
                "reference.md 11",
            )
        )
        outcome.rows.append(
            alone(
                results,
                FIGURE,
                WORKLOAD,
                "drops",
                system,
                lambda run: float(run.events.get("drops", 0)),
                paper=Band(2, 2),
            )
        )
        outcome.rows.append(
            alone(
                results,
                FIGURE,
                WORKLOAD,
                "KV gained",
                system,
                _gained,
                paper=Band(57.0, 57.0),
                unit="%",
                scale=100.0,
            )
        )
    for system, paper in (("recompute", 120.0), ("drop", 152.0), (WITHOUT_GUARD.name, 152.0)):
        outcome.rows.append(
            alone(
                results,
                FIGURE,
                WORKLOAD,
                "memory is full at",
                system,
                full_at_s,
                paper=Band(paper, paper),
                unit="s",
            )
        )
    outcome.rows.append(_rise_row(results))
    outcome.conditions[WORKLOAD] = conditions(results, "recompute")
    outcome.pictures["time-line"] = time_lines({name: found[0] for name, found in results.runs.items()}, WORKLOAD)
    met = {WORKLOAD: results}
    outcome.remarks += [remarks.pressure(met), _times_remark(results), remarks.worth(met)]
    return outcome


def _times_remark(results: Results) -> str:
    """What the ratio of standing times is made of."""
    base_s, ours_s = (mean_of(results.runs[name], full_at_s) for name in ("recompute", "drop"))
    begins_s = burst_begins_s()
    if base_s is None or ours_s is None:
        full = [name for name, at_s in (("recompute", base_s), ("drop", ours_s)) if at_s is not None]
        return f"Of the two, only {full[0]} runs out of memory for good." if full else "Memory is never full for good."
    return (
        f"Memory is full {base_s - begins_s:.0f} s after the burst has begun with recompute (paper 75) and "
        f"{ours_s - begins_s:.0f} s with drop (paper 107): {ours_s - base_s:.0f} s gained (paper 32). Counted "
        f"from {COUNTED_FROM_S:.0f} s, as the paper does, the ratio hangs on how soon after that recompute is full; "
        f"from the burst's beginning it is {(ours_s - begins_s) / (base_s - begins_s):.2f} (paper 1.43)."
    )


def full_at_s(run: RunResult) -> float | None:
    """When memory becomes full with requests waiting, and stays so, after the burst has begun; None: never."""
    used, total, queue = (dict(run.series[name]) for name in ("kv_blocks_used", "kv_blocks_total", "queue"))
    since_s: float | None = None
    begins_s = burst_begins_s()
    for t in sorted(used):
        if t < begins_s or queue.get(t, 0.0) <= 0 or used[t] < FULL * total[t]:
            since_s = None
            continue
        since_s = t if since_s is None else since_s
        if t - since_s >= FULL_FOR_S:
            return since_s
    return None


def standing_s(run: RunResult) -> float | None:
    """From where the paper counts to full memory."""
    at_s = full_at_s(run)
    return None if at_s is None else at_s - COUNTED_FROM_S


def _gained(run: RunResult) -> float:
    """Largest KV capacity over the first, less one."""
    totals = [value for _, value in run.series["kv_blocks_total"]]
    return max(totals) / totals[0] - 1.0


def _rise_row(results: Results) -> Row:
    """Largest TTFT of recompute before the dropping system is full, over its median before the burst."""
    found: list[float | None] = []
    for theirs, ours in zip(results.runs["recompute"], results.runs[WITHOUT_GUARD.name], strict=True):
        end_s = full_at_s(ours) or ours.duration_s
        calm = sorted(values(theirs, "ttft_s", 5.0, burst_begins_s()))
        rising = values(theirs, "ttft_s", burst_begins_s(), end_s)
        found.append(max(rising) / calm[len(calm) // 2] if calm and rising else None)
    middle, spread = median_and_spread(found)
    return Row(
        FIGURE,
        WORKLOAD,
        "largest rise of TTFT until then",
        "recompute",
        "its own median before",
        Band(None, 42.0),
        middle,
        "x",
        spread,
    )
