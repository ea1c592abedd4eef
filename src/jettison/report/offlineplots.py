"""Pictures of offline work beside online requests: latencies of online requests, harvested tokens, places of offline
requests.

In the styles of ``report.plots``: each ``draw_*`` returns a figure, or None where there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jettison.report.classes import CLASSES, TOKEN_KINDS
from jettison.report.memory import Floats, held_at, total_points
from jettison.report.offlinework import abandoned_at, pauses, stood_still
from jettison.report.plots import PLAIN, STYLE, WIDTH_IN, Shown
from jettison.report.results import RunResult, SeriesPoint

COLORS = {"online": "#44618a", "offline": "#e08e45"}
PLACES = {
    "offline_running": ("running", "#dd7f2c"), "offline_hosted": ("at the host", "#f0b27a"),
    "offline_waiting": ("waiting", "#e3e6ea"),
}
"""Series of offline requests -> name and colour, from the bottom up."""
_PAUSE, _STOOD, _GIVEN_UP = "#b3261e", "#c9ced4", "#111111"
_BINS = 120
_PANEL_IN, _LEGEND_IN = 1.6, 0.9


def draw_latencies(shown: Sequence[Shown], *, width_in: float = WIDTH_IN) -> Figure | None:
    """TTFT and longest gap of each online request at its arrival, with a line at each objective."""
    panels = (("ttft_s", "slo_ttft_s", "first token, s"), ("max_itl_s", "slo_tpot_s", "longest gap, s"))
    if not any(row.get("ttft_s") for each in shown for row in each.run.requests_detail or []):
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in, _LEGEND_IN + 2 * 1.9), layout="constrained")
        axes: list[Axes] = list(figure.subplots(2, 1, sharex=True))
        for axis, (key, objective, label) in zip(axes, panels, strict=True):
            for each in shown:
                rows = [row for row in each.run.requests_detail or [] if row.get(key)]
                axis.scatter(
                    [row["scheduled_s"] for row in rows], [row[key] for row in rows], s=9, color=each.color,
                    marker=each.marker, alpha=0.65, linewidths=0, label=each.name, rasterized=len(rows) > 1500,
                )  # fmt: skip
            limits = {run.goodput[objective] for each in shown if (run := each.run).goodput is not None} - {None}
            for limit_s in sorted(limits):
                axis.axhline(limit_s, color="#333333", linewidth=1.0, linestyle="dashed")
                axis.annotate("objective", (1.0, limit_s), xycoords=("axes fraction", "data"), fontsize=8,
                              ha="right", va="bottom")  # fmt: skip
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(PLAIN)
            axis.set_ylabel(label)
        _finish(figure, axes, shown, "arrival of the request, seconds since the start")
    return figure


def draw_harvest(shown: Sequence[Shown], *, width_in: float = WIDTH_IN) -> Figure | None:
    """First-time tokens a second by class, stacked, with marks at pauses, standstills and abandoned steps."""
    return _panels(shown, "first-time\ntokens/s", _plot_tokens, width_in)


def draw_offline_requests(shown: Sequence[Shown], *, width_in: float = WIDTH_IN) -> Figure | None:
    """Offline requests running, with KV at the host, and waiting, stacked, for the runs with offline requests."""
    having = [each for each in shown if any(v for name in PLACES for _, v in total_points(each.run, name))]
    return _panels(having, "offline\nrequests", _plot_places, width_in)


def _panels(
    shown: Sequence[Shown], label: str, plot: Callable[[Axes, RunResult], bool], width_in: float
) -> Figure | None:
    if not shown:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in, _LEGEND_IN + _PANEL_IN * len(shown)), layout="constrained")
        axes: list[Axes] = list(figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0])
        drawn = [plot(axis, each.run) for axis, each in zip(axes, shown, strict=True)]
        if not any(drawn):
            return None
        for axis, each in zip(axes, shown, strict=True):
            axis.set_title(each.name)
            axis.set_ylabel(label)
            axis.set_ylim(bottom=0)
        top = max(axis.get_ylim()[1] for axis in axes)
        for axis in axes:
            axis.set_ylim(top=top)
        _finish(figure, axes, shown, "seconds since the start")
    return figure


def _plot_tokens(axis: Axes, run: RunResult) -> bool:
    rates = {name: _rates(run, name) for name in CLASSES}
    edges, below = np.linspace(0.0, run.duration_s, _BINS + 1), np.zeros(_BINS)
    for name, rate in rates.items():
        if rate is not None:
            axis.stairs(below + rate, edges, baseline=below, fill=True, color=COLORS[name], label=name)
            below = below + rate
    for stood in stood_still(run):
        if stood.request is None:
            until_s = run.duration_s if stood.end_s is None else stood.end_s
            axis.axvspan(stood.begin_s, until_s, color=_STOOD, alpha=0.45, linewidth=0, label="stands still", zorder=0)
    for begin_s, end_s in pauses(run):
        axis.axvspan(begin_s, end_s or run.duration_s, facecolor="none", edgecolor=_PAUSE, hatch="////", alpha=0.5,
                     linewidth=0, label="paused")  # fmt: skip
    if given_up := abandoned_at(run):
        axis.plot(given_up, np.full(len(given_up), 0.94), "|", color=_GIVEN_UP, markersize=8, label="step given up",
                  transform=axis.get_xaxis_transform())  # fmt: skip
    return rates["offline"] is not None


def _rates(run: RunResult, name: str) -> Floats | None:
    """Tokens of a class a second, by bins of the run's time; None where the run has no counters over time."""
    prompt, output = (run.series.get(f"{name}_{kind}_tokens") for kind in TOKEN_KINDS)
    if run.duration_s <= 0.0 or not prompt or not output:
        return None
    edges = np.linspace(0.0, run.duration_s, _BINS + 1)
    return np.diff(_between(prompt, edges) + _between(output, edges)) / np.diff(edges)


def _between(points: Sequence[SeriesPoint], times_s: Floats) -> Floats:
    """A counter's values at some times, interpolated linearly between samples."""
    return np.interp(times_s, np.array([t for t, _ in points]), np.array([value for _, value in points]))


def _plot_places(axis: Axes, run: RunResult) -> bool:
    points = {name: total_points(run, name) for name in PLACES}
    if not all(points.values()):
        return False
    times = np.array([t for t, _ in points["offline_running"]])
    values = [held_at(points[name], times) for name in PLACES]
    axis.stackplot(
        times, values, colors=[color for _, color in PLACES.values()], labels=[name for name, _ in PLACES.values()],
        step="post", linewidth=0,
    )
    return True


def _finish(figure: Figure, axes: Sequence[Axes], shown: Sequence[Shown], label: str) -> None:
    """Add one legend above all panels, and give each panel the same seconds."""
    handles = {text: handle for axis in axes for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    columns = max(1, min(len(handles), int(figure.get_figwidth() / 1.4)))
    figure.legend(list(handles.values()), list(handles), loc="outside upper left", ncols=columns)
    axes[-1].set_xlabel(label)
    if (end_s := max(each.run.duration_s for each in shown)) > 0.0:
        axes[-1].set_xlim(0.0, end_s)
