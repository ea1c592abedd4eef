"""Plots of reproductions, beside what ``report.plots`` draws of single runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jettison.report.plots import run_color
from jettison.report.results import RunResult

STYLE = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 7,
    "figure.dpi": 80,
}
WINDOW_S = 5.0
"""Of means over time."""

LEGEND_SHARE = 0.97
"""Of a figure's width."""

DRAWING = threading.RLock()
"""Held by the thread that draws: matplotlib's settings are the process's, and several threads reproduce figures."""


@contextmanager
def _styled() -> Iterator[None]:
    with DRAWING, mpl.rc_context(STYLE):
        yield


def bars(groups: Mapping[str, Mapping[str, float | None]], ylabel: str, title: str, *, log: bool = False) -> Figure:
    """Groups of bars: group -> name -> height."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    with _styled():
        figure = Figure(figsize=(8.0, 2.6), layout="constrained")
        axis = figure.subplots()
        width = 0.8 / max(1, len(names))
        for index, name in enumerate(names):
            heights = [group.get(name) or 0.0 for group in groups.values()]
            at = np.arange(len(groups)) + (index - (len(names) - 1) / 2) * width
            axis.bar(at, heights, width * 0.92, color=run_color(index), label=name)
        axis.set_xticks(np.arange(len(groups)), list(groups))
        if log:
            axis.set_yscale("log")
        axis.set_ylabel(ylabel)
        axis.set_title(title)
        _name(figure, axis)
    return figure


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    title: str,
    *,
    log: bool = False,
) -> Figure:
    """Named lines."""
    with _styled():
        figure = Figure(figsize=(8.0, 2.6), layout="constrained")
        axis = figure.subplots()
        for index, (name, (xs, ys)) in enumerate(series.items()):
            axis.plot(xs, ys, color=run_color(index), linewidth=1.3, marker="o", markersize=2.5, label=name)
        if log:
            axis.set_yscale("log")
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.set_title(title)
        _name(figure, axis)
    return figure


def time_lines(runs: Mapping[str, RunResult], title: str) -> Figure:
    """KV in use against what there is, mean TTFT by arrival, output tokens per second: KunServe's Fig. 12."""
    with _styled():
        figure = Figure(figsize=(8.0, 5.0), layout="constrained")
        memory, latency, rate = figure.subplots(3, 1, sharex=True)
        for index, (name, run) in enumerate(runs.items()):
            color = run_color(index)
            _draw_memory(memory, run, color, name)
            _draw_mean_ttft(latency, run, color)
            _draw_tokens(rate, run, color)
        memory.set_ylabel("KV blocks")
        memory.set_title(title)
        _name(figure, memory)
        latency.set_yscale("log")
        latency.set_ylabel(f"mean TTFT, s\n({WINDOW_S:g} s of arrivals)")
        rate.set_ylabel("output tokens/s")
        rate.set_xlabel("seconds; dashed: all KV blocks there are")
    return figure


def _name(figure: Figure, axis: Axes) -> None:
    """A legend of what ``axis`` shows below everything, in rows as wide as the figure: one that is wider than the axes
    leaves the layout nothing but a strip for them."""
    handles, names = axis.get_legend_handles_labels()
    if not handles:
        return
    for ncols in range(len(names), 0, -1):
        legend = figure.legend(handles, names, loc="outside lower center", ncols=ncols)
        if legend.get_window_extent().width <= LEGEND_SHARE * figure.bbox.width or ncols == 1:
            return
        legend.remove()


def _draw_memory(axis: Axes, run: RunResult, color: str, name: str) -> None:
    for key, style, label in (("kv_blocks_used", "-", name), ("kv_blocks_total", "--", None)):
        points = run.series.get(key, [])
        axis.step(
            [t for t, _ in points],
            [v for _, v in points],
            where="post",
            color=color,
            linewidth=1.0,
            linestyle=style,
            label=label,
        )


def _draw_mean_ttft(axis: Axes, run: RunResult, color: str) -> None:
    sums: dict[int, list[float]] = {}
    for row in run.requests_detail or []:
        if row["ttft_s"] is not None:
            sums.setdefault(int(row["scheduled_s"] / WINDOW_S), []).append(row["ttft_s"])
    at = sorted(sums)
    axis.plot([(i + 0.5) * WINDOW_S for i in at], [float(np.mean(sums[i])) for i in at], color=color, linewidth=1.2)


def _draw_tokens(axis: Axes, run: RunResult, color: str) -> None:
    rows = [r for r in run.requests_detail or [] if r["ttft_s"] is not None and r["e2e_s"] is not None]
    if not rows:
        return
    edges = np.arange(0.0, run.duration_s + WINDOW_S, WINDOW_S)
    total = np.zeros(len(edges) - 1)
    for row in rows:
        first, last = row["scheduled_s"] + row["ttft_s"], row["scheduled_s"] + row["e2e_s"]
        share = np.clip(np.minimum(edges[1:], last) - np.maximum(edges[:-1], first), 0.0, None)
        total += row["output_tokens"] * share / max(last - first, 1e-9)
    axis.plot((edges[:-1] + edges[1:]) / 2, total / WINDOW_S, color=color, linewidth=1.2)
