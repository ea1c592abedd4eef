"""Pictures of runs: first tokens, memory by use, queue, tails. Drawn by matplotlib without pyplot or a display.

Each ``draw_*`` returns a figure, or None where the runs hold nothing to draw; :func:`to_svg` and :func:`to_png` turn it
into bytes. The same runs give the same bytes. Runs differ by colour and by marker, uses of memory by colour and
lightness, marked events by line: no picture of requests or memory needs colour alone. ``width_in`` is
:data:`NARROW_IN` for a telephone.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from jettison.report.memory import (
    KV_BLOCKS,
    KV_CAPACITY,
    KV_USAGE,
    MemoryByUse,
    cluster_memory,
    instance_memory,
    total_points,
    worker_memory,
    worker_names,
)
from jettison.report.results import RunResult, SeriesPoint

if TYPE_CHECKING:
    from jettison.report.bill import Bill
    from jettison.report.day import PhaseSpan

MEMORY_USES = {
    "parameters": ("parameters", "#44618a"),
    "kv": ("KV cache", "#e08e45"),
    "kv_held": ("KV cache in use", "#dd7f2c"),
    "kv_other": ("KV cache free or cached", "#f8dfc3"),
    "workspace": ("workspace", "#98a2ad"),
    "free": ("free", "#eef0f2"),
}
"""Use of memory -> its name and colour."""

RUN_COLORS = ("#d55e00", "#0072b2", "#cc79a7", "#00795a", "#9a6a00", "#56b4e9", "#333333", "#7a5195", "#7f7f7f")
"""Okabe and Ito's palette, with the light colours darkened: colour-blind readers can tell them apart."""
RUN_MARKERS = ("o", "^", "s", "D", "v", "P", "X", "<", ">")

EVENT_COLORS = {"drop": "#b3261e", "restore_done": "#1b7f4b"}
EVENT_LINES = {"drop": ("dashed", "layers dropped"), "restore_done": ("dotted", "layers restored")}
"""Line style and name of each marked kind of event: the style tells them apart where the colour is the run's."""

STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.hashsalt": "jettison",
    "svg.fonttype": "none",
}
PLAIN = FuncFormatter(lambda value, _position: f"{value:g}")
WIDTH_IN, NARROW_IN = 9.0, 4.3
_RASTER_FROM = 3000
"""From this many points on, they are drawn as an image inside the picture."""
_WIDE_SPAN = 100.0
"""Ratio of a logarithmic axis that counts as wide: two decades."""
_TICKS_IN = 0.9
"""Width that a panel's own labels take of a picture."""
_MARK_IN, _LETTER_IN = 0.55, 0.064
"""Widths in a legend: the mark before a label with the gaps around it, and a letter."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A run in pictures: its name, and the index of its colour and marker."""

    run: RunResult
    name: str
    index: int

    @property
    def color(self) -> str:
        """Its colour in every picture."""
        return run_color(self.index)

    @property
    def marker(self) -> str:
        """Its marker where requests are points."""
        return RUN_MARKERS[self.index % len(RUN_MARKERS)]


def run_color(index: int) -> str:
    """The colour of the ``index``-th run in every picture."""
    return RUN_COLORS[index % len(RUN_COLORS)]


def all_shown(runs: Sequence[RunResult]) -> list[Shown]:
    """Every run under its own name."""
    return [Shown(run, run.name, index) for index, run in enumerate(runs)]


def draw_first_tokens(loads: Sequence[Sequence[Shown]], *, width_in: float = WIDTH_IN) -> Figure | None:
    """Each request's time to first token at its arrival, log scale: a panel for the runs of each load."""
    loads = [load for load in loads if any(_detail_pairs(shown.run, "ttft_s") for shown in load)]
    if not loads:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in, 0.5 + 2.5 * len(loads)), layout="constrained")
        for axis, load in zip(figure.subplots(len(loads), 1, squeeze=False)[:, 0], loads, strict=True):
            plot_first_tokens(axis, load, width_in)
        axis.set_xlabel("arrival of the request, seconds since the start")
    return figure


def plot_first_tokens(axis: Axes, load: Sequence[Shown], width_in: float) -> None:
    """One panel of :func:`draw_first_tokens`."""
    points = [_detail_pairs(shown.run, "ttft_s") for shown in load]
    is_crowded = sum(map(len, points)) > _RASTER_FROM
    for shown, pairs in zip(load, points, strict=True):
        if pairs:
            times, values = zip(*pairs, strict=True)
            axis.scatter(
                times, values, s=6 if is_crowded else 13, color=shown.color, marker=shown.marker, alpha=0.7,
                linewidths=0, label=shown.name, rasterized=is_crowded,
            )  # fmt: skip
        mark_events(axis, shown.run, shown.color if len(load) > 1 else None)
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    # Below two decades powers of ten alone would be a label or two.
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low >= _WIDE_SPAN else (1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(PLAIN)
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylabel("time to first token, s")
    _legend_above(axis, load, width_in)
    _share_span([axis], load)


def draw_memory_by_use(shown: Sequence[Shown], *, width_in: float = WIDTH_IN) -> Figure | None:
    """Memory by use of each run's cluster over time, stacked: a panel for each run, with one scale."""
    found = [(each, memory) for each in shown if (memory := cluster_memory(each.run)) is not None]
    if not found:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in, 0.9 + 1.5 * len(found)), layout="constrained")
        axes: list[Axes] = list(figure.subplots(len(found), 1, squeeze=False)[:, 0])
        for axis, (each, memory) in zip(axes, found, strict=True):
            plot_memory(axis, each, memory)
            axis.set_title(each.name)
            _share_span([axis], [each])
        _share_height(axes, [memory for _, memory in found])
        axes[-1].set_xlabel("seconds since the start")
        _use_legend(figure, found, width_in)
    return figure


def draw_story(shown: Sequence[Shown], *, width_in: float = WIDTH_IN) -> Figure | None:
    """Memory by use over time, a panel for each run, and below it the first tokens of all runs, over the same
    seconds."""
    found = [(each, memory) for each in shown if (memory := cluster_memory(each.run)) is not None]
    if not found or not any(_detail_pairs(each.run, "ttft_s") for each in shown):
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in, 3.3 + 1.4 * len(found)), layout="constrained")
        ratios = [*[1.0] * len(found), 1.5]
        axes: list[Axes] = list(
            figure.subplots(len(ratios), 1, squeeze=False, sharex=True, height_ratios=ratios)[:, 0]
        )
        for axis, (each, memory) in zip(axes, found, strict=False):
            plot_memory(axis, each, memory)
            axis.set_title(f"memory with {each.name}")
        _share_height(axes[:-1], [memory for _, memory in found])
        plot_first_tokens(axes[-1], shown, width_in)
        axes[-1].set_xlabel("seconds since the start (of a request: its arrival)")
        _share_span(axes, shown)
        _use_legend(figure, found, width_in)
    return figure


def plot_memory(axis: Axes, shown: Shown, memory: MemoryByUse) -> None:
    """Stack the uses; values hold until the next sample, so that a drop is an edge and not a slope."""
    tops = np.cumsum(list(memory.layers.values()), axis=0)
    # From the highest down, each over the one before, so that only the visible edges need points.
    for use, top in reversed(list(zip(memory.layers, tops, strict=True))):
        is_edge = np.diff(top, prepend=np.nan) != 0
        is_edge[-1] = True
        axis.fill_between(memory.times_s[is_edge], top[is_edge], step="post", color=MEMORY_USES[use][1], linewidth=0)
    mark_events(axis, shown.run)
    axis.set_ylabel(memory.unit)
    axis.grid(visible=False)


def draw_memory(run: RunResult) -> Figure | None:
    """Each worker's memory over time, stacked: parameters, KV, workspace, free."""
    workers = worker_names(run)
    if not workers:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.9 + 1.4 * len(workers)), layout="constrained")
        axes: list[Axes] = list(figure.subplots(len(workers), 1, sharex=True, squeeze=False)[:, 0])
        found = [(Shown(run, run.name, 0), worker_memory(run, worker)) for worker in workers]
        for axis, worker, (shown, memory) in zip(axes, workers, found, strict=True):
            plot_memory(axis, shown, memory)
            axis.set_ylabel(f"worker {worker}\n{memory.unit}")
        axes[-1].set_xlabel("seconds since the start")
        _share_height(axes, [memory for _, memory in found])
        _share_span(axes, [found[0][0]])
        _use_legend(figure, found, WIDTH_IN)
    return figure


def draw_queue(runs: Sequence[RunResult]) -> Figure | None:
    """Requests waiting and running, and KV use, over time, with a colour for each run.

    KV use is drawn in blocks, with their total, where the runs have both: after a drop the *share* in use falls while
    load rises.
    """
    wanted = {"queue": "waiting requests", "running": "running requests", KV_BLOCKS: "KV blocks in use"}
    names = [name for name in wanted if any(total_points(run, name) for run in runs)]
    if KV_BLOCKS not in names and any(run.series.get(KV_USAGE) for run in runs):
        wanted[KV_USAGE] = "KV cache in use"
        names.append(KV_USAGE)
    if not names:
        return None
    everyone = all_shown(runs)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.8 + 1.5 * len(names)), layout="constrained")
        axes: list[Axes] = list(figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0])
        for axis, name in zip(axes, names, strict=True):
            for shown in everyone:
                _draw_steps(axis, total_points(shown.run, name), shown.color, shown.name)
                if name == KV_BLOCKS:
                    capacity = total_points(shown.run, KV_CAPACITY)
                    _draw_steps(axis, capacity, shown.color, f"{shown.name}: all blocks", "--")
                mark_events(axis, shown.run, shown.color if len(runs) > 1 else None)
            axis.set_ylabel(wanted[name])
            axis.set_ylim(bottom=0)
        _legend_above(axes[0], everyone, WIDTH_IN)
        if names[-1] == KV_BLOCKS:
            axes[-1].set_title("dashed: all blocks there are", fontsize=8, fontweight="normal", loc="right")
        axes[-1].set_xlabel("seconds since the start")
        _share_span(axes, everyone)
    return figure


def _draw_steps(axis: Axes, points: Sequence[SeriesPoint], color: str, label: str, style: str = "-") -> None:
    if points:
        times, values = zip(*points, strict=True)
        axis.step(times, values, where="post", color=color, linewidth=1.3, label=label, linestyle=style)


def draw_distributions(runs: Sequence[RunResult]) -> Figure | None:
    """Share of requests above each TTFT and TPOT, with a logarithmic axis that shows the tail."""
    if not any(_detail_pairs(run, key) for run in runs for key in ("ttft_s", "tpot_s")):
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 3.1), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, key, label in zip(axes, ("ttft_s", "tpot_s"), ("TTFT, s", "TPOT, s"), strict=True):
            for index, run in enumerate(runs):
                values, share = share_above(run, key)
                if len(values):
                    axis.step(values, share, where="pre", color=run_color(index), linewidth=1.4, label=run.name)
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(PLAIN)
            axis.set_xlabel(label)
        axes[0].set_xscale("log")  # TTFT spans decades, TPOT does not
        axes[0].xaxis.set_major_formatter(PLAIN)
        axes[0].set_ylabel("share of requests above (log)")
        handles, labels = axes[0].get_legend_handles_labels()
        _legend_outside(figure, handles, labels, WIDTH_IN)
    return figure


def share_above(run: RunResult, key: str) -> tuple[list[float], list[float]]:
    """Values of a figure, and the share of requests that are above up to each: those that were not answered are above
    all. The last share is that beyond the last value, where it is not 0, which a log scale cannot show."""
    values = sorted(value for _, value in _detail_pairs(run, key))
    num_lost = sum(row["status"] in ("failed", "rejected") and not row.get(key) for row in run.requests_detail or ())
    num = len(values) + num_lost
    share = [1.0 - index / num for index in range(len(values))]
    return (values, share) if not num_lost else ([*values, *values[-1:]], [*share, num_lost / num])


def mark_events(axis: Axes, run: RunResult, color: str | None = None) -> None:
    """Draw vertical lines at the drops and restores in the run's log. ``color`` None: the kind's own."""
    for event in run.log(*EVENT_LINES):
        _mark(axis, event, color)


def _mark(axis: Axes, event: Mapping[str, Any], color: str | None = None) -> None:
    kind = event["kind"]
    line, _ = EVENT_LINES[kind]
    axis.axvline(event["t"], color=color or EVENT_COLORS[kind], linewidth=0.9, linestyle=line, alpha=0.8)


def _event_handles(runs: Iterable[RunResult], color: str | None) -> dict[str, Artist]:
    """A legend's line for each kind of event in any of the runs; ``color`` None: the kind's own."""
    marked = {event["kind"] for run in runs for event in run.log(*EVENT_LINES)}
    return {
        label: Line2D([], [], color=color or EVENT_COLORS[kind], linewidth=0.9, linestyle=line)
        for kind, (line, label) in EVENT_LINES.items()
        if kind in marked
    }


def _legend_above(axis: Axes, load: Sequence[Shown], width_in: float) -> None:
    """Add a legend above the panel: the runs, and the lines of their events."""
    handles, labels = axis.get_legend_handles_labels()
    # Among several runs, events have the colour of their run, to tell them apart.
    events = _event_handles([shown.run for shown in load], "#444444" if len(load) > 1 else None)
    handles, labels = [*handles, *events.values()], [*labels, *events]
    if labels:
        axis.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2, borderpad=0.2,
            ncols=_columns(labels, width_in - _TICKS_IN),
        )  # fmt: skip


def _use_legend(figure: Figure, found: Sequence[tuple[Shown, MemoryByUse]], width_in: float) -> None:
    uses = [use for use in MEMORY_USES if any(use in memory.layers for _, memory in found)]
    handles: dict[str, Artist] = {MEMORY_USES[use][0]: Patch(color=MEMORY_USES[use][1]) for use in uses}
    handles |= _event_handles([shown.run for shown, _ in found], None)
    _legend_outside(figure, list(handles.values()), list(handles), width_in)


def _legend_outside(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], width_in: float) -> None:
    figure.legend(handles, labels, loc="outside upper left", ncols=_columns(labels, width_in))


def _columns(labels: Sequence[str], width_in: float) -> int:
    """The most columns of a legend that fit; they are filled one after the other."""
    for count in range(len(labels), 1, -1):
        rows = -(-len(labels) // count)
        columns = [labels[start : start + rows] for start in range(0, len(labels), rows)]
        if sum(_MARK_IN + _LETTER_IN * max(map(len, column)) for column in columns) <= width_in:
            return len(columns)
    return 1


def _detail_pairs(run: RunResult, key: str) -> list[SeriesPoint]:
    """(arrival, value) of the requests with a value above 0, as a log scale cannot show 0."""
    rows = run.requests_detail or []
    return [(row["scheduled_s"], row[key]) for row in rows if row.get(key)]


def _share_span(axes: Sequence[Axes], load: Sequence[Shown]) -> None:
    end_s = max((shown.run.duration_s for shown in load), default=0.0)
    if end_s > 0:
        for axis in axes:
            axis.set_xlim(0.0, end_s)


def _share_height(axes: Sequence[Axes], memories: Sequence[MemoryByUse]) -> None:
    """Give all panels of one unit the same scale."""
    tops = [float(np.sum(list(memory.layers.values()), axis=0).max()) or 1.0 for memory in memories]
    units = [memory.unit for memory in memories]
    for axis, unit in zip(axes, units, strict=True):
        axis.set_ylim(0.0, max(top for top, other in zip(tops, units, strict=True) if other == unit))


DAY_USES = {
    "parameters": ("the model", "#44618a"),
    "kv_online": ("KV of online requests", "#c8501e"),
    "kv_offline": ("KV of the batch", "#3f8f6b"),
    "kv_cached": ("cached", "#f3c58f"),
    "kv_free": ("free for KV", "#fbeddc"),
    "kv": ("KV cache", "#e08e45"),
    "workspace": ("workspace", "#98a2ad"),
    "free": ("asleep: given back", "#ffffff"),
}
"""Use of an instance's memory -> its name and colour."""


def draw_day(runs: Sequence[RunResult], phases: Sequence[PhaseSpan], *, width_in: float = WIDTH_IN) -> Figure | None:
    """A column of panels for each run, with a panel for each instance; in a narrow picture the runs are below each
    other. None without memory by worker."""
    shown = [(run, names) for run in runs if (names := worker_names(run))]
    if not shown:
        return None
    is_narrow = width_in <= NARROW_IN
    most = max(len(names) for _, names in shown)
    shape = (sum(len(names) for _, names in shown), 1) if is_narrow else (most, len(shown))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in, 1.3 + 1.05 * shape[0]), layout="constrained")
        axes = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False)
        end_s = max(max(run.duration_s for run, _ in shown), phases[-1].end_s if phases else 0.0)
        seen: set[str] = set()
        row = 0
        for column, (run, names) in enumerate(shown):
            for index, name in enumerate(names):
                axis = axes[row + index, 0] if is_narrow else axes[index, column]
                memory = instance_memory(run, name)
                seen |= {use for use, values in memory.layers.items() if values.any()}
                _plot_instance(axis, memory, run, name, phases)
                axis.set_xlim(0.0, end_s)
                if is_narrow or not column:
                    axis.set_ylabel(f"instance {name}\n{memory.unit}")
                if not index:
                    axis.set_title(run.name, pad=14.0)
                    _name_phases(axis, phases)
            row += len(names)
        for axis in axes[-1]:
            axis.set_xlabel("seconds since the start")
        uses = {label: Patch(facecolor=color, edgecolor="#98a2ad", linewidth=0.4)
                for use, (label, color) in DAY_USES.items() if use in seen}  # fmt: skip
        handles: dict[str, Artist] = uses | _event_handles([run for run, _ in shown], None)
        figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=2 if is_narrow else 5)
    return figure


def _plot_instance(
    axis: Axes, memory: MemoryByUse, run: RunResult, name: str, phases: Sequence[PhaseSpan]
) -> None:
    """Stack the uses from below; values hold until the next sample."""
    bottom = np.zeros_like(memory.times_s)
    for use, values in memory.layers.items():
        label, color = DAY_USES[use]
        axis.fill_between(memory.times_s, bottom, bottom + values, step="post", color=color, linewidth=0, label=label)
        bottom = bottom + values
    for phase in phases[1:]:
        axis.axvline(phase.start_s, color="#1d2329", linewidth=0.6, alpha=0.45)
    for event in run.log(*EVENT_LINES):
        if name in map(str, event.get("workers") or ()):
            _mark(axis, event)
    axis.set_ylim(0.0, float(bottom.max(initial=0.0)) or 1.0)
    axis.grid(visible=False)


def _name_phases(axis: Axes, phases: Sequence[PhaseSpan]) -> None:
    for phase in phases:
        axis.text(
            (phase.start_s + phase.end_s) / 2, 1.02, phase.name, transform=axis.get_xaxis_transform(), ha="center",
            va="bottom", fontsize=6.5, color="#535e69",
        )  # fmt: skip


def draw_bill(bill: Bill) -> Figure:
    """Devices as steps; the run's own are dark, the fewest possible dashed."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 3.2), layout="constrained")
        axis = figure.subplots()
        for label, used, style in (("awake", bill.awake, "-"), ("holding KV", bill.holding, ":")):
            if used is not None:
                times = [*used.times_s, bill.duration_s]
                axis.step(times, [*used.devices, used.devices[-1]], where="post", color="#333333", linestyle=style,
                          linewidth=1.6, label=f"{bill.run}: {label}")  # fmt: skip
        for index, (name, placed) in enumerate(bill.placed.items()):
            axis.step(bill.demand.times_s, placed.devices, where="post", color=run_color(index), linewidth=1.1,
                      label=name)  # fmt: skip
        axis.step(bill.demand.times_s, bill.least, where="post", color="#777777", linewidth=1.0, linestyle="--",
                  label="least")  # fmt: skip
        axis.set_xlim(0.0, bill.duration_s)
        axis.set_ylim(bottom=0.0)
        axis.set_ylabel("devices")
        axis.set_xlabel("seconds since the start")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def to_svg(figure: Figure) -> bytes:
    """The figure as SVG; equal figures give equal bytes."""
    with mpl.rc_context(STYLE):
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()


def to_png(figure: Figure, *, dpi: int = 120) -> bytes:
    """The figure as PNG."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi)
    return out.getvalue()
