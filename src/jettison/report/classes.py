"""Runs with offline requests: latencies are of the online requests, and each class has figures of its own.

Throughput counts prompt and output tokens computed for the first time inside the arrival window: no cache hits, no
recomputation, no abandoned steps. The counts come from the engine's counters, which a run keeps as series.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from jettison.report.results import (
    RequestCounts,
    RequestRecord,
    RunResult,
    SeriesPoint,
    build_run,
    detail_row,
    goodput,
    last_end_s,
    summarize,
)

CLASSES = ("online", "offline")
TOKEN_KINDS = ("prompt", "output")
TOKEN_SERIES = tuple(f"{name}_{kind}_tokens" for name in CLASSES for kind in TOKEN_KINDS)
"""Names of the engine's counters; series of the same names hold them over time."""


class Objectives(Protocol):
    """Latency objectives of online requests; None: not judged."""

    @property
    def slo_ttft_s(self) -> float | None: ...

    @property
    def slo_tpot_s(self) -> float | None: ...


def build_by_class(
    name: str, records: Sequence[RequestRecord], *, window_s: float, objectives: Objectives, has_batch: bool = False,
    num_unfinished: int = 0, series: Mapping[str, Sequence[SeriesPoint]], detail: bool = True, **same: Any,
) -> RunResult:
    """``build_run`` of the online requests, with the figures of each class where some request is offline.

    ``has_batch``: whether a batch was planned beside the load, even if none of it was served. ``num_unfinished``:
    unfinished requests of an endless batch at the end of the run. ``same``: further arguments of ``build_run``.
    """
    of = {
        "online": [record for record in records if not record.is_offline],
        "offline": [record for record in records if record.is_offline],
    }
    both = bool(of["offline"]) or has_batch
    shown = of["online"] if both and of["online"] else records
    run = build_run(
        name, shown, series=series, detail=detail, slo_ttft_s=objectives.slo_ttft_s, slo_tpot_s=objectives.slo_tpot_s,
        **same,
    )
    if not both:
        return run
    run.classes = {
        each: _figures(found, objectives, tokens_of(each, found, run.series, window_s)) for each, found in of.items()
    }
    run.classes["offline"]["unfinished"] = num_unfinished
    run.classes["offline"]["requests_detail"] = [detail_row(record) for record in of["offline"]] if detail else None
    run.requests = counted(records)
    run.duration_s = duration_s = last_end_s(records)
    run.output_tokens_per_s = sum(r.output_tokens for r in records) / duration_s if duration_s > 0 else 0.0
    if run.goodput is not None:
        limits = {"slo_ttft_s": objectives.slo_ttft_s, "slo_tpot_s": objectives.slo_tpot_s}
        run.goodput = goodput(shown, duration_s, **limits)
    return run


def counted(records: Sequence[RequestRecord]) -> RequestCounts:
    """Requests by how they ended."""
    ends = [record.status for record in records]
    names = ("completed", "failed", "cancelled", "rejected")
    return RequestCounts(len(ends), **{status: ends.count(status) for status in names})  # type: ignore[arg-type]


def _figures(records: Sequence[RequestRecord], limits: Objectives, tokens: dict[str, Any]) -> dict[str, Any]:
    completed = [record for record in records if record.status == "completed"]
    answered = [ttft for record in records if (ttft := record.ttft_s) is not None]
    gaps = [gap for record in records for gap in record.gaps_s]
    return {
        "requests": asdict(counted(records)),
        "ttft_s": asdict(summarize(answered)),
        "tpot_s": asdict(summarize(record.tpot_s for record in completed)),
        "itl_s": asdict(summarize(gaps)),
        "e2e_s": asdict(summarize(record.e2e_s for record in completed)),
        "ttft_within": within(answered, limits.slo_ttft_s, of=len(records)),
        "gaps_within": within(gaps, limits.slo_tpot_s),
        "requests_within": requests_within(records, limits),
        "tokens": tokens,
    }


def within(values: Sequence[float], limit_s: float | None, *, of: int | None = None) -> float | None:
    """Share of values that meet an objective. ``of``: the number of requests, including the ones without a value; None:
    as many as values."""
    total = len(values) if of is None else of
    return sum(value <= limit_s for value in values) / total if limit_s is not None and total else None


def requests_within(records: Sequence[RequestRecord], limits: Objectives) -> float | None:
    """Share of the requests with the first token and every gap within the objectives. An objective that is not set is
    met by every request that got a token."""
    if not records or (limits.slo_ttft_s is None and limits.slo_tpot_s is None):
        return None
    most_ttft_s, most_gap_s = (math.inf if s is None else s for s in (limits.slo_ttft_s, limits.slo_tpot_s))
    kept = (
        r.ttft_s is not None and r.ttft_s <= most_ttft_s and (r.max_gap_s or 0.0) <= most_gap_s for r in records
    )
    return sum(kept) / len(records)


def tokens_of(
    name: str, records: Sequence[RequestRecord], series: Mapping[str, Sequence[SeriesPoint]], window_s: float
) -> dict[str, Any]:
    """First-time tokens of a class inside the arrival window, and per second of it. For a server without such counters,
    the tokens are those that clients saw: a prompt counts at its first token, an output token at its arrival."""
    prompt, output = (grown(series.get(f"{name}_{kind}_tokens", ()), 0.0, window_s) for kind in TOKEN_KINDS)
    if prompt is None or output is None:
        seen = [record for record in records if record.first_s is not None and record.first_s <= window_s]
        prompt = float(sum(record.input_tokens for record in seen))
        output = float(sum(_tokens_until(record, window_s) for record in seen))
    rates = ((prompt + output) / window_s, output / window_s) if window_s > 0 else (None, None)
    return {
        "prompt": prompt, "output": output, "window_s": window_s, "total_per_s": rates[0], "output_per_s": rates[1],
    }  # fmt: skip


def _tokens_until(record: RequestRecord, end_s: float) -> int:
    assert record.first_s is not None
    return 1 + int(np.count_nonzero(record.first_s + np.cumsum(record.gaps_s) <= end_s))


def grown(points: Sequence[SeriesPoint], start_s: float, end_s: float) -> float | None:
    """The growth of a counter between two times, interpolated linearly between its samples; None without samples."""
    if not points:
        return None
    times, values = zip(*points, strict=True)
    first, last = np.interp([start_s, end_s], times, values)
    return float(last - first)


def class_figure(run: RunResult, name: str, *keys: str) -> float | None:
    """One figure of a class; None for a run with one class only."""
    found: Any = (run.classes or {}).get(name)
    for key in keys:
        found = None if found is None else found.get(key)
    return None if found is None else float(found)


def total_per_s(run: RunResult) -> float | None:
    """First-time tokens a second of both classes."""
    parts = [class_figure(run, name, "tokens", "total_per_s") for name in CLASSES]
    return None if None in parts else sum(part for part in parts if part is not None)
