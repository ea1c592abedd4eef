"""The picture of a day: each instance's memory by use over time, with the day's phases in the background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from jettison.report.day import PhaseSpan
from jettison.report.memory import MemoryByUse, instance_memory, worker_names
from jettison.report.plots import EVENT_COLORS, EVENT_LINES, NARROW_IN, STYLE, WIDTH_IN
from jettison.report.results import RunResult

USES = {
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
        _legend(figure, seen, [run for run, _ in shown], 2 if is_narrow else 5)
    return figure


def _events_of(run: RunResult, name: str) -> list[dict[str, Any]]:
    """Drops and restores of this instance."""
    return [
        event for event in run.events.get("log") or ()
        if event["kind"] in EVENT_LINES and name in map(str, event.get("workers") or ())
    ]


def _plot_instance(
    axis: Axes, memory: MemoryByUse, run: RunResult, name: str, phases: Sequence[PhaseSpan]
) -> None:
    """Stack the uses from below; values hold until the next sample."""
    bottom = np.zeros_like(memory.times_s)
    for use, values in memory.layers.items():
        label, color = USES[use]
        axis.fill_between(memory.times_s, bottom, bottom + values, step="post", color=color, linewidth=0, label=label)
        bottom = bottom + values
    for phase in phases[1:]:
        axis.axvline(phase.start_s, color="#1d2329", linewidth=0.6, alpha=0.45)
    for event in _events_of(run, name):
        kind = event["kind"]
        axis.axvline(event["t"], color=EVENT_COLORS[kind], linewidth=0.9, linestyle=EVENT_LINES[kind][0])
    axis.set_ylim(0.0, float(bottom.max(initial=0.0)) or 1.0)
    axis.grid(visible=False)


def _name_phases(axis: Axes, phases: Sequence[PhaseSpan]) -> None:
    for phase in phases:
        axis.text(
            (phase.start_s + phase.end_s) / 2, 1.02, phase.name, transform=axis.get_xaxis_transform(), ha="center",
            va="bottom", fontsize=6.5, color="#535e69",
        )  # fmt: skip


def _legend(figure: Figure, seen: set[str], runs: Sequence[RunResult], num_columns: int) -> None:
    handles: dict[str, Artist] = {}
    for use, (label, color) in USES.items():
        if use in seen:
            handles[label] = Patch(facecolor=color, edgecolor="#98a2ad", linewidth=0.4)
    marked = {str(event.get("kind")) for run in runs for event in run.events.get("log") or ()}
    for kind, (line, label) in EVENT_LINES.items():
        if kind in marked:
            handles[label] = Line2D([], [], color=EVENT_COLORS[kind], linewidth=0.9, linestyle=line)
    figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=num_columns)
