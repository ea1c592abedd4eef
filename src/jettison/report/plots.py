"""Pictures of runs as SVG: memory map, queue, time to first token. matplotlib without pyplot or a display.

Each ``draw_*`` returns a figure, or None where the runs hold nothing to draw; :func:`to_svg` and
:func:`to_png` turn it into bytes. The same runs give the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from jettison.report.results import RunResult, SeriesPoint

MEMORY_SERIES = "worker_memory_bytes"
"""Series ``worker_memory_bytes/<use>/<worker>``: bytes of each use on each worker."""

KV_BLOCKS, KV_CAPACITY = "kv_blocks_used", "kv_blocks_total"
"""Series ``<name>/<group>``: KV blocks that requests hold, and all that the group has."""

MEMORY_USES = {
    "parameters": ("parameters", "#4c6a92"),
    "kv": ("KV cache", "#e08e45"),
    "workspace": ("workspace", "#9aa5b1"),
    "free": ("free", "#e9ecef"),
}
RUN_COLORS = ("#c0392b", "#1f77b4", "#2a9d5c", "#8e5ea2", "#b8860b", "#444444", "#17a2b8", "#d46ab0", "#8a9a1f")
EVENT_COLORS = {"drop": "#b3261e", "restore_done": "#1b7f4b"}
EVENT_LINES = {"drop": ("dashed", "drop"), "restore_done": ("dotted", "restore")}
"""Line and name of each kind that is marked: the line tells them apart where the colour is the run's."""

_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "jettison",
    "svg.fonttype": "none",
}
_PLAIN = FuncFormatter(lambda value, _position: f"{value:g}")
_MIB = 1024.0**2
_WIDTH_IN = 9.0
_LEGEND_COLUMNS = 4


def run_color(index: int) -> str:
    """The colour of the ``index``-th run in every picture."""
    return RUN_COLORS[index % len(RUN_COLORS)]


def memory_workers(run: RunResult) -> list[str]:
    """Workers whose memory the run recorded, in numeric order where names are numbers."""
    parts = [name.split("/") for name in run.series if name.startswith(f"{MEMORY_SERIES}/")]
    names = {part[2] for part in parts if len(part) == 3}
    return sorted(names, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))


def draw_memory(run: RunResult) -> Figure | None:
    """What each worker's memory held over time, stacked: parameters, KV, workspace, free."""
    workers = memory_workers(run)
    if not workers:
        return None
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 0.7 + 1.55 * len(workers)), layout="constrained")
        axes: list[Axes] = list(figure.subplots(len(workers), 1, sharex=True, squeeze=False)[:, 0])
        for axis, worker in zip(axes, workers, strict=True):
            _stack_memory(axis, run, worker)
            mark_events(axis, run)
            axis.set_ylabel(f"worker {worker}\nMiB")
            axis.grid(visible=False)
        axes[0].set_title(f"{run.name}: memory of each worker")
        axes[-1].set_xlabel("seconds since the start")
        axes[0].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(MEMORY_USES))
        _share_span(axes, [run])
    return figure


def _stack_memory(axis: Axes, run: RunResult, worker: str) -> None:
    named = {use: run.series.get(f"{MEMORY_SERIES}/{use}/{worker}", []) for use in MEMORY_USES}
    times = np.array(sorted({t for points in named.values() for t, _ in points}))
    layers, labels, colors = [], [], []
    for use, points in named.items():
        if points:
            layers.append(_held(points, times) / _MIB)
            labels.append(MEMORY_USES[use][0])
            colors.append(MEMORY_USES[use][1])
    # Values hold until the next sample, so that a drop is an edge and not a slope.
    axis.stackplot(times, *layers, labels=labels, colors=colors, step="post", linewidth=0)
    axis.set_ylim(0, float(np.sum(layers, axis=0).max()) or 1.0)


def _held(points: Sequence[SeriesPoint], times: np.ndarray) -> np.ndarray:
    """The series' value at each time: the last one at or before it, the first one earlier than that."""
    stamps = np.array([t for t, _ in points])
    values = np.array([value for _, value in points])
    return values[np.clip(np.searchsorted(stamps, times, side="right") - 1, 0, len(values) - 1)]


def draw_queue(runs: Sequence[RunResult]) -> Figure | None:
    """Requests waiting and running, and KV use, over time, a run a colour.

    KV use is drawn in blocks against their number where the runs have both: after a drop the *share* in use
    falls while load rises.
    """
    wanted = {"queue": "waiting requests", "running": "running requests", KV_BLOCKS: "KV blocks in use"}
    shown = [name for name in wanted if any(_points(run, name) for run in runs)]
    if KV_BLOCKS not in shown and any(run.series.get("kv_usage") for run in runs):
        wanted["kv_usage"] = "KV cache in use"
        shown.append("kv_usage")
    if not shown:
        return None
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 0.8 + 1.5 * len(shown)), layout="constrained")
        axes: list[Axes] = list(figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0])
        for axis, name in zip(axes, shown, strict=True):
            for index, run in enumerate(runs):
                _draw_steps(axis, _points(run, name), run_color(index), run.name)
                if name == KV_BLOCKS:
                    _draw_steps(axis, _points(run, KV_CAPACITY), run_color(index), f"{run.name}: all blocks", "--")
                mark_events(axis, run, _mark_color(runs, index))
            axis.set_ylabel(wanted[name])
            axis.set_ylim(bottom=0)
        axes[0].set_title("queue, batch and KV usage over time")
        _legend(axes[0], runs)
        if shown[-1] == KV_BLOCKS:
            axes[-1].set_title("dashed: all blocks there are", fontsize=8, fontweight="normal", loc="right")
        axes[-1].set_xlabel("seconds since the start")
        _share_span(axes, runs)
    return figure


def _points(run: RunResult, name: str) -> list[SeriesPoint]:
    """The series ``name``, or ``name/<group>`` summed over the groups that each sample found."""
    if name in run.series:
        return run.series[name]
    total: dict[float, float] = {}
    for key, points in run.series.items():
        if key.startswith(f"{name}/"):
            for t, value in points:
                total[t] = total.get(t, 0.0) + value
    return sorted(total.items())


def _draw_steps(axis: Axes, points: Sequence[SeriesPoint], color: str, label: str, style: str = "-") -> None:
    if points:
        times, values = zip(*points, strict=True)
        axis.step(times, values, where="post", color=color, linewidth=1.3, label=label, linestyle=style)


def draw_ttft(runs: Sequence[RunResult]) -> Figure | None:
    """Each request's time to first token at its arrival, log scale, a run a colour."""
    pairs = [_detail_pairs(run, "ttft_s") for run in runs]
    if not any(pairs):
        return None
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 3.2), layout="constrained")
        axis = figure.subplots()
        for index, (run, points) in enumerate(zip(runs, pairs, strict=True)):
            if points:
                times, values = zip(*points, strict=True)
                axis.scatter(times, values, s=9, color=run_color(index), alpha=0.65, linewidths=0, label=run.name)
            mark_events(axis, run, _mark_color(runs, index))
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(_PLAIN)
        axis.set_title("time to first token of each request")
        axis.set_ylabel("TTFT, s (log)")
        axis.set_xlabel("arrival, seconds since the start")
        _legend(axis, runs)
        _share_span([axis], runs)
    return figure


def draw_distributions(runs: Sequence[RunResult]) -> Figure | None:
    """Share of requests above each TTFT and TPOT, on a logarithmic share: the tail is the story."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 2.9), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        drawn = False
        for axis, key, label in zip(axes, ("ttft_s", "tpot_s"), ("TTFT, s", "TPOT, s"), strict=True):
            for index, run in enumerate(runs):
                values = np.sort([value for _, value in _detail_pairs(run, key)])
                if len(values):
                    share = 1.0 - np.arange(len(values)) / len(values)
                    axis.step(values, share, where="post", color=run_color(index), linewidth=1.4, label=run.name)
                    drawn = True
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(_PLAIN)
            axis.set_xlabel(label)
        if not drawn:
            return None
        axes[0].set_xscale("log")  # TTFT spans decades, TPOT does not
        axes[0].xaxis.set_major_formatter(_PLAIN)
        axes[0].set_ylabel("share of requests above (log)")
        axes[0].set_title("tails")
        axes[1].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=max(len(runs), 1))
    return figure


def mark_events(axis: Axes, run: RunResult, color: str | None = None) -> None:
    """Vertical lines where the run's log tells of a drop or a restore. ``color`` None: the kind's own."""
    for event in run.events.get("log") or []:
        kind = str(event.get("kind", ""))
        if kind in EVENT_LINES:
            line, _ = EVENT_LINES[kind]
            axis.axvline(event["t"], color=color or EVENT_COLORS[kind], linewidth=0.9, linestyle=line, alpha=0.8)


def _mark_color(runs: Sequence[RunResult], index: int) -> str | None:
    """Events of one of several runs have its colour, or nobody could tell whose they are."""
    return run_color(index) if len(runs) > 1 else None


def _legend(axis: Axes, runs: Sequence[RunResult]) -> None:
    """The runs, and the lines of the events that any of them had."""
    handles, labels = axis.get_legend_handles_labels()
    marked = {str(event.get("kind", "")) for run in runs for event in run.events.get("log") or []}
    for kind, (line, label) in EVENT_LINES.items():
        if kind in marked:
            color = "#444444" if len(runs) > 1 else EVENT_COLORS[kind]
            handles.append(Line2D([], [], color=color, linewidth=0.9, linestyle=line))
            labels.append(label)
    # Two rows where one would run into the title; they are filled column by column, so the events stay together.
    num_columns = len(labels) if len(labels) <= _LEGEND_COLUMNS else -(-len(labels) // 2)
    axis.legend(handles, labels, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=max(num_columns, 1))


def _detail_pairs(run: RunResult, key: str) -> list[SeriesPoint]:
    """(arrival, value) of requests that have a value above 0, which a log scale can show."""
    rows = run.requests_detail or []
    return [(row["scheduled_s"], row[key]) for row in rows if row.get(key)]


def _share_span(axes: Sequence[Axes], runs: Sequence[RunResult]) -> None:
    end_s = max((run.duration_s for run in runs), default=0.0)
    if end_s > 0:
        for axis in axes:
            axis.set_xlim(0.0, end_s)


def to_svg(figure: Figure) -> bytes:
    """The figure as SVG, byte for byte the same each time."""
    with mpl.rc_context(_STYLE):
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()


def to_png(figure: Figure, *, dpi: int = 120) -> bytes:
    """The figure as PNG."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi)
    return out.getvalue()
