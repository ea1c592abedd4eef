"""Measures: a number of one run, by name. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jettison.report.results import RunResult, percentile
from papers.specs import burst_span_s

Measure = Callable[[RunResult], float | None]


def ratio(above: float | None, below: float | None) -> float | None:
    """None where either is missing or there is nothing to divide by."""
    return above / below if above is not None and below else None


def values(run: RunResult, key: str, start_s: float = 0.0, end_s: float = math.inf) -> list[float]:
    """What the requests that arrived in a time span have."""
    return [
        row[key] for row in run.requests_detail or [] if row[key] is not None and start_s <= row["scheduled_s"] < end_s
    ]


def within(key: str, q: float, start_s: float = 0.0, end_s: float = math.inf) -> Measure:
    """A percentile over the requests that arrived in a time span."""
    return lambda run: percentile(values(run, key, start_s, end_s), q)


def ttft(q: float) -> Measure:
    """A percentile of TTFT, in seconds."""
    return within("ttft_s", q)


def tpot(q: float) -> Measure:
    """A percentile of TPOT, in seconds."""
    return within("tpot_s", q)


def in_burst(key: str, q: float, spec: str, number: int = 0, *, before_s: float = 0.0, after_s: float = 0.0) -> Measure:
    """A percentile over the requests that arrived in a spec's burst, and so much before and after it."""
    return lambda run: percentile(values(run, key, *burst_span_s(spec, number, before_s, after_s)), q)


def over_median(q: float) -> Measure:
    """A percentile of TTFT over its median."""
    return lambda run: ratio(ttft(q)(run), ttft(50)(run))


def count(kind: str) -> Measure:
    """How often something happened: ``drops``."""
    return lambda run: float(run.events.get(kind, 0))


def throughput(run: RunResult) -> float:
    """Output tokens per second over the time in which requests arrive: a long tail of a few does not count."""
    rows = run.requests_detail or []
    end_s = max((row["scheduled_s"] for row in rows), default=0.0)
    done = sum(_tokens_until(row, end_s) for row in rows)
    return done / end_s if end_s > 0 else 0.0


def _tokens_until(row: dict[str, Any], end_s: float) -> float:
    """Tokens of one request up to a time, evenly spread from its first to its last."""
    if row["ttft_s"] is None or row["e2e_s"] is None:
        return 0.0
    first, last = row["scheduled_s"] + row["ttft_s"], row["scheduled_s"] + row["e2e_s"]
    if last <= end_s:
        return float(row["output_tokens"])
    return float(row["output_tokens"] * (end_s - first) / (last - first)) if end_s > first else 0.0


def tail_s(run: RunResult) -> float | None:
    """From the last arrival to the end of the run."""
    last = max((row["scheduled_s"] for row in run.requests_detail or []), default=None)
    return None if last is None else run.duration_s - last


def stays_s(run: RunResult) -> list[float]:
    """From first to last token, by request."""
    return [row["e2e_s"] - row["ttft_s"] for row in run.requests_detail or [] if row["e2e_s"] and row["ttft_s"]]


def mean_stay_s(run: RunResult) -> float | None:
    """Mean over requests."""
    stays = stays_s(run)
    return sum(stays) / len(stays) if stays else None


def bubble_share(run: RunResult) -> float | None:
    """Idle time of pipelines' stages over their idle and busy time, while they had steps to run."""
    busy = sum(v for k, v in run.events.items() if k.startswith("stage_busy_seconds/"))
    bubble = sum(v for k, v in run.events.items() if k.startswith("stage_bubble_seconds/"))
    return bubble / (busy + bubble) if busy + bubble > 0 else None


def stalled_share(run: RunResult) -> float | None:
    """Requests that stood still for longer than any step: swapped out and back, or computed again."""
    gaps = values(run, "max_itl_s")
    return sum(gap > 1.0 for gap in gaps) / len(gaps) if gaps else None


def mean_exchange_s(run: RunResult) -> float | None:
    """Mean time of an exchange."""
    took = [entry["ms"] / 1e3 for entry in run.events.get("log", ()) if entry["kind"] == "exchange_done"]
    return sum(took) / len(took) if took else None


def mean_load(run: RunResult) -> float:
    """Mean KV demand, queue included / undropped capacity."""
    return float(run.config["fairness"]["mean_load"])


def peak_load(run: RunResult) -> float:
    """Peak KV demand, queue included / undropped capacity."""
    return float(run.config["fairness"]["peak_over_capacity"])


def peak_kilotokens(run: RunResult) -> float:
    """Peak KV demand of an instance, in thousands of tokens."""
    return float(run.config["fairness"]["peak_demand_tokens"] / run.config["cluster"]["instances"]) / 1e3


def capacity_gained(run: RunResult) -> float:
    """Largest KV capacity over the first, less one."""
    totals = [value for _, value in run.series["kv_blocks_total"]]
    return max(totals) / totals[0] - 1.0


def least_free_share(start_s: float) -> Measure:
    """Least free part of the KV capacity from a time on."""

    def least(run: RunResult) -> float:
        total = dict(run.series["kv_blocks_total"])
        return min(1.0 - used / total[t] for t, used in run.series["kv_blocks_used"] if t >= start_s)

    return least
