"""What is said about a trace, against figures known otherwise."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from jettison.workload.describe import describe, plot_lines, print_info
from jettison.workload.rows import Columns, Workload
from jettison.workload.traces import read_trace


def small() -> Workload:
    arrivals = [*np.arange(0.0, 100.0, 1.0), *np.full(50, 40.5)]
    count = len(arrivals)
    columns = Columns(arrivals, np.arange(1, count + 1), np.full(count, 9), np.ones(count), np.arange(count) % 2)
    return Workload(columns.in_order(), "small", "here", ("a note",), 100.0)


def test_figures_of_a_small_trace() -> None:
    info = describe(small())
    assert info.num_requests == 150 and info.mean_rate_per_s == 1.5
    one = info.windows[0]
    assert (one.window_s, one.mean, one.peak, one.idle_share) == (1.0, 1.5, 51, 0.0)
    assert one.peak_over_mean == 34.0
    assert info.inputs.mean == 75.5 and info.inputs.percentiles[50] == 75.5 and info.inputs.largest == 150
    assert info.outputs.smallest == 9 and info.outputs.total == 9 * 150
    assert info.rank_correlation == 0.0, "equal outputs have no rank"
    assert info.cached_share == pytest.approx(150 / (150 * 75.5))
    assert info.offline_share == 0.5
    assert sum(info.timeline_per_s) * 100.0 / len(info.timeline_per_s) == pytest.approx(150)
    json.dumps(info.as_dict())


def test_one_request_is_a_trace_too() -> None:
    info = describe(Workload(Columns([0.0], [5], [6]), "one", "here"))
    assert info.gap_cv == 0.0 and info.windows == ()
    assert info.timeline_per_s == (), "a rate needs some time"
    assert plot_lines(info) == []


@pytest.mark.parametrize(("duration_s", "is_plotted"), [(2.0, True), (0.0, False)])
def test_a_rate_is_drawn_where_there_is_time(duration_s: float, is_plotted: bool) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    print_info(describe(Workload(Columns([0.0, 0.0], [5, 5], [6, 6]), "two", "here", (), duration_s)), console)
    shown = console.export_text()
    assert "e+" not in shown and "tokens" in shown
    assert ("requests/s" in shown) == is_plotted


def test_it_is_printed() -> None:
    for width in (80, 200):
        console = Console(width=width, record=True, file=io.StringIO())
        print_info(describe(small()), console)
        shown = console.export_text()
        for part in ("150 requests in 100.0 s: 1.5 a second", "a note", "peak/mean", "█", "50.0% of the requests"):
            assert part in shown


@pytest.mark.parametrize(
    ("name", "rate", "peak", "count_cv", "gap_cv", "idle"),
    [
        ("AzureLLMInferenceTrace_conv.csv.gz", 5.530, 1.78, 0.27, 1.09, 0.0),
        ("AzureLLMInferenceTrace_code.csv.gz", 2.567, 12.76, 1.67, 13.15, 0.56),
        ("burstgpt_1_head400.csv", 0.0103, 29.2, 3.44, 4.50, 0.91),
    ],
)
def test_real_traces(
    data_dir: Path, name: str, rate: float, peak: float, count_cv: float, gap_cv: float, idle: float
) -> None:
    info = describe(read_trace(data_dir / "arrivals" / name))
    ten = next(stats for stats in info.windows if stats.window_s == 10.0)
    assert info.mean_rate_per_s == pytest.approx(rate, rel=0.01)
    assert ten.peak_over_mean == pytest.approx(peak, rel=0.02)
    assert ten.cv == pytest.approx(count_cv, abs=0.02)
    assert info.gap_cv == pytest.approx(gap_cv, rel=0.02)
    assert ten.idle_share == pytest.approx(idle, abs=0.01)
