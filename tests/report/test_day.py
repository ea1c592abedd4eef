"""A day in figures, in words and in a picture."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.report.classes import build_by_class
from jettison.report.day import (
    DayFigures,
    PhaseSpan,
    day_figures,
    day_opening,
    day_rows,
    missed_goals,
    story_rows,
    told,
)
from jettison.report.html import PagePicture, render_html
from jettison.report.memory import instance_memory, worker_memory
from jettison.report.plots import NARROW_IN, draw_day, to_svg
from jettison.report.results import RequestRecord, RunResult
from jettison.workload.client import ReplayOptions

MIB = 2.0**20
SPANS = [PhaseSpan("night", 0.0, 10.0), PhaseSpan("morning", 10.0, 20.0)]
LOG: list[dict[str, Any]] = [
    {"t": 2.0, "kind": "asleep", "worker": 1, "ms": 3.0},
    {"t": 11.0, "kind": "woken", "worker": 1, "ms": 5.0},
    {"t": 12.0, "kind": "migrated", "request": "r", "ms": 1.0},
    {"t": 13.0, "kind": "drop", "workers": [0, 1], "group": 2},
    {"t": 23.0, "kind": "restore_done", "workers": [0, 1]},
]


def run_of(name: str = "day", log: list[dict[str, Any]] = LOG, series: Any = None) -> RunResult:
    """Two online requests and two lines of a batch, one of which failed, on two instances."""
    records = [
        RequestRecord(0, 1.0, 8, 2, "completed", 1.0, 1.5, 2.0, 2, [0.5]),
        RequestRecord(1, 15.0, 8, 2, "completed", 15.0, 15.1, 15.6, 2, [0.5]),
        RequestRecord(2, 0.0, 8, 2, "completed", 0.0, 3.0, 24.0, 2, [21.0], is_offline=True),
        RequestRecord(3, 0.0, 8, 2, "failed", 0.0, is_offline=True),
    ]
    return build_by_class(
        name, records, window_s=20.0, objectives=ReplayOptions(), events={"log": log}, series=series or {},
        config={"cluster": {"instances": 2}},
    )


def test_a_day_is_billed_until_its_last_answer() -> None:
    figures = day_figures(run_of(), 20.0)
    assert figures.device_s == pytest.approx(2 * 24.0 - 9.0)  # one of two slept from 2 to 11
    assert (figures.num_done, figures.num_lines, figures.batch_end_s) == (1, 2, None)
    assert figures.p99_ttft_s == pytest.approx(0.1 + 0.99 * 0.4)
    assert day_figures(run_of(log=[]), 30.0).device_s == pytest.approx(60.0)
    with pytest.raises(ValueError, match="how many instances"):
        day_figures(RunResult("r"), 1.0)


@st.composite
def sleeps(draw: st.DrawFn) -> list[tuple[int, float, float]]:
    """(worker, from, to) of naps inside 20 s, of one worker after the other."""
    naps = []
    for worker in (0, 1):
        at_s = 0.0
        for gap_s, nap_s in draw(st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.1, 3.0)), max_size=3)):
            naps.append((worker, at_s + gap_s, at_s + gap_s + nap_s))
            at_s += gap_s + nap_s
    return naps


@given(sleeps())
def test_device_seconds_are_all_instances_less_their_sleep(naps: list[tuple[int, float, float]]) -> None:
    log = [
        {"t": t, "kind": kind, "worker": worker}
        for worker, start_s, end_s in naps
        for t, kind in ((start_s, "asleep"), (end_s, "woken"))
    ]
    figures = day_figures(run_of(log=sorted(log, key=lambda event: event["t"])), 24.0)
    assert figures.device_s == pytest.approx(48.0 - sum(end_s - start_s for _, start_s, end_s in naps))


POSITIVE = st.floats(0.001, 1000.0)
FIGURES = st.builds(
    lambda tail, done, lost, device_s: DayFigures(tail, done, done + lost, None if lost else 5.0, device_s),
    POSITIVE, st.integers(0, 50), st.integers(0, 3), POSITIVE,
)


@given(FIGURES, FIGURES)
def test_goals_are_missed_where_the_table_says_so(baseline: DayFigures, day: DayFigures) -> None:
    missed = missed_goals(baseline, day)
    assert any("device-seconds" in line for line in missed) == (day.device_s / baseline.device_s > 0.7)
    assert any("first tokens" in line for line in missed) == (day.p99_ttft_s > baseline.p99_ttft_s)
    assert any("lines" in line for line in missed) == (day.num_done < day.num_lines)
    rows = {row[0]: row for row in day_rows(baseline, day)}
    assert float(rows["device-seconds"][3]) == pytest.approx(day.device_s / baseline.device_s, abs=0.006)
    assert rows["batch lines done"][2] == f"{day.num_done} of {day.num_lines}"
    assert f"{day.device_s:.0f} instead of {baseline.device_s:.0f} device-seconds" in day_opening(baseline, day)


def test_each_phase_tells_what_happened_in_it() -> None:
    night, morning = story_rows([run_of()], SPANS)
    assert night == ["night, 0 to 10 s", "day", "1", "500 ms", "2.0 s: instance 1 fell asleep"]
    assert morning[4] == (
        "11.0 s: instance 1 woke; 13.0 s: instances 0 and 1 dropped layers; 23.0 s: instances 0 and 1 had them back; "
        "1 request moved to pack them"
    )
    assert told([]) == "nothing"


# --- memory -----------------------------------------------------------------------------------------------------------


def series_of(kv: float, blocks: tuple[int, int, int, int]) -> dict[str, list[tuple[float, float]]]:
    """Two instances that merge at 5 s; at 8 s the second is asleep. ``blocks``: all, held, offline's, cached."""
    total, used, offline, cached = map(float, blocks)
    found: dict[str, list[tuple[float, float]]] = {}
    for worker in ("0", "1"):
        found |= {
            f"worker_memory_bytes/parameters/{worker}": [(0.0, 60 * MIB), (5.0, 30 * MIB)],
            f"worker_memory_bytes/kv/{worker}": [(0.0, kv * MIB), (5.0, (kv + 30) * MIB)],
            f"worker_memory_bytes/workspace/{worker}": [(0.0, 4 * MIB)],
            f"worker_memory_bytes/free/{worker}": [(0.0, 0.0)],
            f"worker_group/{worker}": [(0.0, float(worker)), (5.0, 2.0)],
        }
    found["worker_group/1"].append((8.0, -1.0))
    for use in ("parameters", "kv"):
        found[f"worker_memory_bytes/{use}/1"].append((8.0, 0.0))
    found["worker_memory_bytes/free/1"].append((8.0, (90 + kv) * MIB))
    for group in "012":
        start_s = 5.0 if group == "2" else 0.0
        for name, value in (("total", total), ("used", used), ("cached", cached)):
            found[f"kv_blocks_{name}/{group}"] = [(start_s, value)]
        found[f"offline_blocks/{group}"] = [(start_s, offline)]
    return found


@given(
    st.floats(1.0, 100.0),
    st.integers(1, 50).flatmap(
        lambda total: st.tuples(st.just(total), st.integers(0, total), st.integers(0, 99), st.integers(0, total))
    ),
)
def test_an_instance_s_memory_is_divided_and_nothing_is_lost(kv: float, blocks: tuple[int, int, int, int]) -> None:
    run = RunResult("r", series=series_of(kv, blocks))
    for worker in ("0", "1"):
        memory, whole = instance_memory(run, worker), worker_memory(run, worker)
        assert sum(memory.layers.values()) == pytest.approx(
            sum(run.series[f"worker_memory_bytes/{use}/{worker}"][0][1] for use in ("parameters", "kv", "workspace"))
            / MIB * (memory.times_s < 5.0) + sum(memory.layers.values()) * (memory.times_s >= 5.0)
        )
        divided = sum(memory.layers[use] for use in ("kv_online", "kv_offline", "kv_cached", "kv_free"))
        assert divided == pytest.approx(whole.layers["kv"])
        assert all((values >= -1e-9).all() for values in memory.layers.values())
    total, used, offline, _ = blocks
    first = instance_memory(run, "0").layers
    assert first["kv_offline"][0] == pytest.approx(kv * min(offline, used) / total)
    assert first["kv_online"][0] == pytest.approx(kv * (used - min(offline, used)) / total)


def test_without_groups_an_instance_s_kv_is_one_layer() -> None:
    series = {key: points for key, points in series_of(20.0, (10, 5, 2, 1)).items() if "worker_group" not in key}
    assert "kv" in instance_memory(RunResult("r", series=series), "0").layers


def test_the_picture_has_a_panel_for_each_instance_and_stands_first_in_the_report() -> None:
    run = run_of(series=series_of(20.0, (10, 5, 2, 1)))
    wide, narrow = draw_day([run, run], SPANS), draw_day([run, run], SPANS, width_in=NARROW_IN)
    assert wide is not None and narrow is not None
    assert len(wide.axes) == len(narrow.axes) == 4
    drawn = to_svg(wide).decode()
    for text in ("night", "morning", "instance 1", "KV of the batch", "asleep: given back", "layers dropped"):
        assert text in drawn
    assert draw_day([run_of()], SPANS) is None
    page = render_html([run], pictures=[PagePicture("The day", "a day", lambda width: draw_day([run], SPANS))])
    assert page.index("The day") < page.index("First tokens: how long")
