"""Figures of one run, and comparisons of two over seeds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jettison.report.results import RunResult, percentile
from jettison.simulate.reproduce.rows import Band, Row, median_and_spread, ratio
from jettison.simulate.reproduce.specs import Results

Measure = Callable[[RunResult], float | None]


def ttft(q: float) -> Measure:
    """A percentile of TTFT, in seconds."""
    return lambda run: percentile(values(run, "ttft_s"), q)


def tpot(q: float) -> Measure:
    """A percentile of TPOT, in seconds."""
    return lambda run: percentile(values(run, "tpot_s"), q)


def values(run: RunResult, key: str, start_s: float = 0.0, end_s: float = float("inf")) -> list[float]:
    """What the requests that arrived in a time span have."""
    return [
        row[key] for row in run.requests_detail or [] if row[key] is not None and start_s <= row["scheduled_s"] < end_s
    ]


def within(measure: str, q: float, start_s: float, end_s: float) -> Measure:
    """A percentile over the requests that arrived in a time span."""
    return lambda run: percentile(values(run, measure, start_s, end_s), q)


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


def bubble_share(run: RunResult) -> float | None:
    """Idle time of pipelines' stages over their idle and busy time, while they had steps to run."""
    busy = sum(v for k, v in run.events.items() if k.startswith("stage_busy_seconds/"))
    bubble = sum(v for k, v in run.events.items() if k.startswith("stage_bubble_seconds/"))
    return bubble / (busy + bubble) if busy + bubble > 0 else None


def mean_load(run: RunResult) -> float:
    """Mean KV demand, queue included / undropped capacity."""
    found: float = run.config["fairness"]["mean_load"]
    return found


def over_median(q: float) -> Measure:
    """A percentile of TTFT over its median."""
    return lambda run: ratio(ttft(q)(run), ttft(50)(run))


def compared(
    results: Results,
    figure: str,
    workload: str,
    metric: str,
    system: str,
    baseline: str,
    measure: Measure,
    *,
    paper: Band | None,
    band: Band | None = None,
    band_source: str = "",
    unit: str = "x",
    inverse: bool = False,
    percent: bool = False,
) -> Row:
    """``baseline / system`` by seed (``inverse``: the other way round), its median and its range.

    ``percent``: system over baseline less one, in percent.
    """
    found: list[float | None] = []
    for ours, theirs in zip(results.runs[system], results.runs[baseline], strict=True):
        a, b = measure(ours), measure(theirs)
        found.append(ratio(a, b) if inverse or percent else ratio(b, a))
    if percent:
        found = [None if value is None else 100.0 * (value - 1.0) for value in found]
    middle, spread = median_and_spread(found)
    return Row(
        figure, workload, metric, system, baseline, paper, middle, "%" if percent else unit, spread, band, band_source,
        is_idle=never_dropped(results.runs[system]),
    )  # fmt: skip


def never_dropped(runs: Sequence[RunResult]) -> bool:
    """Whether these are runs of a policy that drops, and none did."""
    return all(run.config["policy"] == "drop" and not run.events.get("drops") for run in runs)


def alone(
    results: Results,
    figure: str,
    workload: str,
    metric: str,
    system: str,
    measure: Measure,
    *,
    paper: Band | None,
    band: Band | None = None,
    band_source: str = "",
    unit: str = "",
    scale: float = 1.0,
) -> Row:
    """One system's own number."""
    found = [None if (value := measure(run)) is None else value * scale for run in results.runs[system]]
    middle, spread = median_and_spread(found)
    return Row(
        figure, workload, metric, system, "", paper, middle, unit, spread, band, band_source,
        is_idle=never_dropped(results.runs[system]),
    )  # fmt: skip


def mean_of(runs: Sequence[RunResult], measure: Measure) -> float | None:
    """The median over runs."""
    return median_and_spread([measure(run) for run in runs])[0]
