"""The figure of a day under the whole ladder: its measures by rules, its load against its capacity, and a short day
from the spec to the rows."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.report.results import RunResult
from papers import engine
from papers.figures.ladder import (
    ALL_AWAKE,
    BY_PRIORITY,
    LADDER,
    a_day,
    batch_tokens_per_s,
    device_hours,
    devices,
    kept,
    parts_of,
    prices,
    served_for_ever,
    smaller,
    unanswered,
)
from papers.pool import Runs
from papers.registry import figure_named
from papers.requests import requests_of
from papers.specs import read_spec

HOURS = ["2:00", "6:00", "10:00", "14:00", "18:00", "22:00"]


def run(log: list[dict[str, Any]], instances: int = 4, **parts: Any) -> RunResult:
    return RunResult(name="day", config={"cluster": {"instances": instances}}, events={"log": log}, **parts)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 100.0), st.floats(0.0, 100.0)), max_size=1, min_size=1))
def test_an_instance_costs_while_it_is_not_asleep(naps: list[tuple[int, float, float]]) -> None:
    ((worker, one, other),) = naps
    begin, end = sorted((one, other))
    log = [{"t": begin, "kind": "asleep", "worker": worker}, {"t": end, "kind": "waking", "worker": worker}]
    slept = end - begin
    assert devices((0.0, 100.0))(run(log)) == pytest.approx(4.0 - slept / 100.0)
    assert device_hours((0.0, 100.0))(run(log)) == pytest.approx(24.0 * (4.0 - slept / 100.0))
    inside = max(0.0, min(end, 75.0) - max(begin, 25.0))
    assert devices((25.0, 75.0))(run(log)) == pytest.approx(4.0 - inside / 50.0)


def test_all_awake_a_day_costs_all_of_it() -> None:
    assert device_hours((0.0, 3600.0))(run([], 64)) == 24.0 * 64


def test_batch_tokens_are_counted_within_the_time() -> None:
    series = {
        "offline_prompt_tokens": [(0.0, 0.0), (10.0, 100.0), (20.0, 100.0)],
        "offline_output_tokens": [(0.0, 0.0), (10.0, 20.0), (20.0, 70.0)],
    }
    found = run([], series=series)
    assert batch_tokens_per_s((0.0, 20.0))(found) == pytest.approx(170 / 20)
    assert batch_tokens_per_s((10.0, 20.0))(found) == pytest.approx(5.0)
    assert batch_tokens_per_s((0.0, 20.0))(run([])) is None, "nobody counted"


def test_objectives_are_kept_by_requests_that_were_served() -> None:
    rows = [
        {"ttft_s": ttft_s, "tpot_s": tpot_s, "status": status}
        for ttft_s, tpot_s, status in (
            (1.0, 0.1, "completed"), (1.1, 0.1, "completed"), (1.0, 0.2, "completed"), (None, None, "failed"),
            (0.5, None, "completed"),
        )
    ]
    found = run([], requests_detail=rows, goodput={"slo_ttft_s": 1.0, "slo_tpot_s": 0.1})
    assert kept(found) == pytest.approx(2 / 5)
    assert unanswered(found) == 1.0


@pytest.mark.parametrize("name", ["ladder-day", "ladder-day-short", "ladder-day-small", "ladder-prices"])
def test_the_day_has_six_parts(name: str) -> None:
    (part,) = figure_named(name).parts
    parts = parts_of(read_spec("ladder-day").changed(**part.changes))
    assert list(parts) == HOURS
    spans = list(parts.values())
    assert spans[0][0] == 0.0 and all(a[1] == b[0] for a, b in pairwise(spans))


def test_the_peak_is_85_percent_of_what_memory_lets_the_instances_serve(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JETTISON_DATA", str(data_dir))
    spec = read_spec("ladder-day")
    load = requests_of(spec.parsed, 1.0)
    rows = [
        {"scheduled_s": row.arrival_s, "input_tokens": row.input_tokens, "wanted_tokens": row.output_tokens}
        for row in load.rows
    ]
    found = run([], 64, requests_detail=rows)
    memory = served_for_ever(spec, found, kv_tokens=spec.machine.kv_tokens)
    compute = served_for_ever(spec, found, kv_tokens=math.inf)
    assert memory is not None and compute is not None and memory < compute, "memory binds"
    start, end = parts_of(spec)["22:00"]
    arrivals = [sum(a <= row.arrival_s < b for row in load.rows) / (b - a) for a, b in parts_of(spec).values()]
    assert max(arrivals) == arrivals[-1] and end - start == 600.0
    assert arrivals[-1] / memory == pytest.approx(0.85, abs=0.01)


def test_without_the_data_rows_are_empty_and_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JETTISON_DATA", str(tmp_path))
    with Runs() as runs:
        outcome = engine.reproduce(figure_named("ladder-day"), runs)
    assert outcome.rows and all(row.ours is None and row.in_band is None for row in outcome.rows)
    assert not outcome.pictures
    ((label, why),) = outcome.conditions["a day at 64 instances"]
    assert label == "not run" and "deepseek-r1_24h_trace.csv.gz" in why


def test_a_short_day_from_the_spec_to_the_rows(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETTISON_DATA", str(data_dir))
    figure = a_day("short", "a short day", "a day", smaller(4, 2.0))
    (part,) = figure.parts
    systems = tuple(v for v in part.variants if v.name in (ALL_AWAKE, BY_PRIORITY, LADDER, "only pack and sleep"))
    names = {v.name for v in systems}
    claims = tuple(c for c in part.claims if c.system in names and c.baseline in ("", *names))
    with Runs() as runs:
        outcome = engine.reproduce(replace(figure, parts=(replace(part, systems=systems, claims=claims),)), runs)
    found = {(row.claim.metric, row.claim.system): row.ours for row in outcome.rows if not row.claim.baseline}
    assert found["device-hours a day", ALL_AWAKE] == 24.0 * 4
    assert found["online requests not served", LADDER] == found["online requests not served", ALL_AWAKE] == 0.0
    assert found["batch tokens/s", ALL_AWAKE] == 0.0, "none is sent"
    assert (found["batch tokens/s", BY_PRIORITY] or 0.0) > 0.0 and (found["batch tokens/s", LADDER] or 0.0) > 0.0
    assert set(outcome.pictures) == {"awake", "ttft", "batch"}


def test_a_curve_of_prices_from_the_spec_to_the_rows(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is worth its seconds keeps instances awake, and one that brings nothing keeps none."""
    monkeypatch.setenv("JETTISON_DATA", str(data_dir))
    with Runs() as runs:
        outcome = engine.reproduce(prices("curve", "prices", "a day", smaller(3, 5.0), (0.0, 0.002)), runs)
    found = {(row.claim.metric, row.claim.system): row.ours for row in outcome.rows if not row.claim.baseline}
    hours = [found["device-hours a day", f"a token at {price} device-seconds"] or 0.0 for price in ("0", "0.002")]
    tokens = [found["batch tokens/s", f"a token at {price} device-seconds"] or 0.0 for price in ("0", "0.002")]
    assert found["batch tokens/s", "ladder, no batch"] == 0.0 and hours[0] < hours[1] <= 24.0 * 3
    assert 0.0 < tokens[0] < tokens[1]
    assert all(value == 0.0 for (metric, _), value in found.items() if metric == "online requests not served")
    assert set(outcome.pictures) == {"curve"}
