"""Statistics of a trace: rates, burstiness, lengths; and their display.

Numbers in, numbers out; :func:`print_info` draws them on a terminal.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from jettison.report.terminal import print_whole
from jettison.workload.rows import Floats, Workload

WINDOWS_S = (1.0, 10.0, 60.0)
PERCENTILES = (5, 25, 50, 75, 90, 95, 99)
_PLOT_COLUMNS = 72
_PLOT_ROWS = 8
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MAX_BINS = 50_000_000


@dataclass(frozen=True, slots=True)
class WindowStats:
    """Arrivals counted in windows of one width."""

    window_s: float
    mean: float
    """Requests in a window."""
    peak: int
    peak_over_mean: float
    p99_over_mean: float
    cv: float
    """Coefficient of variation of the counts."""
    idle_share: float
    """Share of windows without an arrival."""


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Statistics of input tokens or of output tokens."""

    mean: float
    percentiles: dict[int, float]
    """Interpolated percentiles, by percent."""
    smallest: int
    largest: int
    total: int


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """All statistics of one trace."""

    name: str
    source: str
    notes: tuple[str, ...]
    stamps: str | None
    """Description of the time stamps in the file, before any jitter."""
    num_requests: int
    duration_s: float
    mean_rate_per_s: float
    gap_cv: float
    """Coefficient of variation of the times between neighbouring arrivals: 1 is Poisson."""
    windows: tuple[WindowStats, ...]
    inputs: LengthStats
    outputs: LengthStats
    rank_correlation: float
    """Spearman's rank correlation of input and output."""
    cached_share: float
    """Cached tokens over input tokens."""
    offline_share: float
    timeline_per_s: tuple[float, ...]
    """Mean rate in equal parts of the time; none where all requests arrive at one instant and nothing comes after."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def describe(workload: Workload) -> TraceInfo:
    """Measure a workload that has requests."""
    columns = workload.columns
    duration_s = max(workload.duration_s, 1e-9)
    gaps = np.diff(columns.arrival_s)
    parts = min(_PLOT_COLUMNS, max(1, len(columns)))
    counts = _counts(columns.arrival_s, duration_s / parts, parts)
    return TraceInfo(
        name=workload.name,
        source=workload.source,
        notes=workload.notes,
        stamps=workload.stamps,
        num_requests=len(columns),
        duration_s=workload.duration_s,
        mean_rate_per_s=workload.mean_rate_per_s,
        gap_cv=_ratio(float(gaps.std()), float(gaps.mean())) if len(gaps) else 0.0,
        windows=tuple(
            _window_stats(columns.arrival_s, duration_s, width_s)
            for width_s in WINDOWS_S
            if 2 * width_s <= duration_s <= width_s * _MAX_BINS
        ),
        inputs=_length_stats(columns.input_tokens),
        outputs=_length_stats(columns.output_tokens),
        rank_correlation=_rank_correlation(columns.input_tokens, columns.output_tokens),
        cached_share=float(columns.all_cached.sum(dtype=np.int64)) / float(columns.input_tokens.sum(dtype=np.int64)),
        offline_share=float(columns.all_offline.mean()),
        timeline_per_s=tuple((counts / (duration_s / parts)).tolist()) if workload.duration_s > 0 else (),
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 0.0


def _counts(arrival_s: Floats, width_s: float, num_bins: int) -> npt.NDArray[np.int64]:
    indices = np.minimum((arrival_s / width_s).astype(np.int64), num_bins - 1)
    return np.bincount(indices, minlength=num_bins)


def _window_stats(arrival_s: Floats, duration_s: float, width_s: float) -> WindowStats:
    # The last, shorter window would look idle: it is left out, and its arrivals with it.
    num_bins = int(duration_s / width_s)
    counts = _counts(arrival_s[arrival_s < num_bins * width_s], width_s, num_bins)
    mean = float(counts.mean())
    return WindowStats(
        window_s=width_s,
        mean=mean,
        peak=int(counts.max()),
        peak_over_mean=_ratio(float(counts.max()), mean),
        p99_over_mean=_ratio(float(np.percentile(counts, 99)), mean),
        cv=_ratio(float(counts.std()), mean),
        idle_share=float(np.mean(counts == 0)),
    )


def _length_stats(tokens: npt.NDArray[np.int32]) -> LengthStats:
    values = np.percentile(tokens, PERCENTILES)
    return LengthStats(
        mean=float(tokens.mean()),
        percentiles={p: float(value) for p, value in zip(PERCENTILES, values, strict=True)},
        smallest=int(tokens.min()),
        largest=int(tokens.max()),
        total=int(tokens.sum(dtype=np.int64)),
    )


def _rank_correlation(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> float:
    if len(first) < 2:
        return 0.0
    one, other = _mean_ranks(first), _mean_ranks(second)
    if min(float(one.std()), float(other.std())) == 0.0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _mean_ranks(values: npt.NDArray[np.int32]) -> Floats:
    """Ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Floats = (ends - (counts + 1) / 2)[inverse]
    return ranks


# --- showing


def print_info(info: TraceInfo, console: Console) -> None:
    """Print the trace's source, a small plot of the rate, and two tables."""
    console.print(f"[bold]{info.name}[/bold]  {info.source}", highlight=False)
    for note in info.notes:
        console.print(f"  {note}", highlight=False, style="dim", soft_wrap=True)
    if info.stamps is not None:
        console.print(f"time stamps: {info.stamps}", highlight=False, soft_wrap=True)
    console.print(
        f"{info.num_requests:,} requests in {info.duration_s:,.1f} s: {info.mean_rate_per_s:.4g} a second, "
        f"CV of the gaps {info.gap_cv:.2f}",
        highlight=False,
    )
    if info.cached_share or info.offline_share:
        console.print(
            f"{info.cached_share:.1%} of the input was cached, {info.offline_share:.1%} of the requests are offline",
            highlight=False,
        )
    console.print()
    if info.timeline_per_s:
        for line in plot_lines(info):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        console.print()
    if info.windows:
        print_whole(_window_table(info), console)
        console.print()
    print_whole(_length_table(info), console)


def plot_lines(info: TraceInfo) -> list[str]:
    """Requests a second over time, in characters; no line where there is no rate."""
    if not info.timeline_per_s:
        return []
    top = max(info.timeline_per_s) or 1.0
    levels = [round(rate / top * _PLOT_ROWS * 8) for rate in info.timeline_per_s]
    lines = []
    for row in reversed(range(_PLOT_ROWS)):
        cells = "".join(_EIGHTHS[min(8, max(0, level - row * 8))] for level in levels)
        label = f"{top:8.4g} ┤" if row == _PLOT_ROWS - 1 else " " * 9 + "│"
        lines.append((label + cells).rstrip())
    lines.append(f"{0:8.4g} ┴" + "─" * len(levels))
    end = f"{info.duration_s:,.0f} s"
    lines.append(" " * 10 + "0" + end.rjust(max(len(levels) - 1, len(end) + 1)) + "  requests/s")
    return lines


def _window_table(info: TraceInfo) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("arrivals per", "mean", "peak", "peak/mean", "P99/mean", "CV", "idle"):
        table.add_column(heading, justify="left" if heading == "arrivals per" else "right")
    for stats in info.windows:
        table.add_row(
            f"{stats.window_s:g} s", f"{stats.mean:.4g}", f"{stats.peak}", f"{stats.peak_over_mean:.2f}",
            f"{stats.p99_over_mean:.2f}", f"{stats.cv:.2f}", f"{stats.idle_share:.0%}",
        )  # fmt: skip
    return table


def _length_table(info: TraceInfo) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = ("tokens", "mean", *(f"P{p}" for p in PERCENTILES), "max", "total")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "tokens" else "right")
    for name, stats in (("input", info.inputs), ("output", info.outputs)):
        shown = (f"{value:.0f}" for value in stats.percentiles.values())
        table.add_row(name, f"{stats.mean:.1f}", *shown, f"{stats.largest}", f"{stats.total:,}")
    return table
