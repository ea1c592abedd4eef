from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.errors import ConfigError
from jettison.report.fairness import (
    FairnessHeader,
    estimate_demand,
    measured_demand,
    measured_in,
    merged_capacity_factor,
)
from jettison.report.results import RequestRecord


class Row(NamedTuple):
    arrival_s: float
    input_tokens: int
    output_tokens: int


@dataclass
class Load:
    rows: list[Row]
    duration_s: float
    source: str = "made up"
    notes: tuple[str, ...] = field(default=("as it is",))


def test_one_request_by_hand() -> None:
    # 100 tokens for 2 s, then growing to 150 over 5 s: (200 + 625) token seconds in 10 s.
    mean, peak = estimate_demand(Load([Row(1.0, 100, 50)], 10.0), ttft_s=2.0, tpot_s=0.1)
    assert (mean, peak) == (pytest.approx(82.5), pytest.approx(150))


def test_what_runs_beyond_the_end_counts_for_the_peak_only() -> None:
    mean, peak = estimate_demand(Load([Row(8.0, 100, 50)], 10.0), ttft_s=2.0, tpot_s=0.1)
    assert (mean, peak) == (pytest.approx(20.0), pytest.approx(150))


def test_peaks_add_up_where_requests_overlap() -> None:
    load = Load([Row(0.0, 10, 100), Row(5.0, 1000, 100)], 20.0)
    _, peak = estimate_demand(load, ttft_s=0.0, tpot_s=0.1)
    # At 10 s the first leaves with 110 while the second, half-way, holds 1050; later that one ends with 1100.
    assert peak == pytest.approx(1160)


def test_no_requests_want_nothing() -> None:
    assert estimate_demand(Load([], 10.0), 1.0, 1.0) == (0.0, 0.0)
    with pytest.raises(ConfigError):
        estimate_demand(Load([], 10.0), -1.0, 1.0)


ROWS = st.lists(st.builds(Row, st.floats(0, 20), st.integers(1, 500), st.integers(1, 50)), min_size=1, max_size=12)


@settings(max_examples=25)
@given(rows=ROWS, ttft_s=st.floats(0, 3), tpot_s=st.floats(0.01, 0.5))
def test_the_closed_form_agrees_with_sampling(rows: list[Row], ttft_s: float, tpot_s: float) -> None:
    horizon_s = max(row.arrival_s for row in rows) + 1.0
    mean, peak = estimate_demand(Load(rows, horizon_s), ttft_s, tpot_s)

    def held(row: Row, t: float) -> float:
        first_s = row.arrival_s + ttft_s
        if not row.arrival_s <= t < first_s + row.output_tokens * tpot_s:
            return 0.0
        return row.input_tokens + max(0.0, t - first_s) / tpot_s

    count = 1500
    samples = [sum(held(row, (at + 0.5) * horizon_s / count) for row in rows) for at in range(count)]
    total = sum(row.input_tokens + row.output_tokens for row in rows)
    assert mean == pytest.approx(sum(samples) / count, abs=total * 0.006 + 1e-6)
    assert max(samples) <= peak + 1e-6 <= total + 1e-3
    assert peak >= max(row.input_tokens + row.output_tokens for row in rows) - 1e-6


def test_measured_demand_counts_the_queue() -> None:
    quick = RequestRecord(0, 0.0, 100, 10, "completed", 0.0, 1.0, 2.0, 10)
    queued = RequestRecord(1, 0.0, 100, 10, "completed", 0.0, 9.0, 10.0, 10)
    refused = RequestRecord(2, 0.0, 9999, 10, "rejected", 0.0, None, 0.1, 0)
    unanswered = RequestRecord(3, 4.0, 50, 10, "failed", 4.0, None, 6.0, 0)
    mean, peak = measured_demand([quick, queued, refused, unanswered], 10.0)
    assert peak == pytest.approx(210)
    assert mean == pytest.approx((100 * 1 + 105 + 100 * 9 + 105 + 50 * 2) / 10)


def test_merging_gives_what_a_dropped_copy_frees() -> None:
    for share, factor in ((0.34, 1.26), (0.4, 1.33), (0.5, 1.5), (0.7, 2.17), (0.75, 2.5)):
        assert merged_capacity_factor(share) == pytest.approx(factor, abs=0.005)
    assert merged_capacity_factor(0.5, num_instances=1) == 1.0
    for share, instances in ((1.0, 2), (-0.1, 2), (0.5, 0)):
        with pytest.raises(ConfigError):
            merged_capacity_factor(share, instances)


def test_the_header_holds_the_conditions_and_what_was_not_said() -> None:
    load = Load([Row(1.0, 100, 50)], 10.0)
    mean, peak = estimate_demand(load, ttft_s=2.0, tpot_s=0.1)
    told = {"mean_demand_tokens": mean, "peak_demand_tokens": peak, "demand_model": "estimated"}
    full = FairnessHeader(
        **told, parameter_share=0.5, kv_capacity_tokens=120, merged_capacity_tokens=180,
        arrivals=(load.source, *load.notes),
    ).as_dict()
    assert full["mean_load"] == pytest.approx(82.5 / 120)
    assert full["capacity_over_mean_need"] == pytest.approx(120 / 82.5)
    assert full["peak_over_capacity"] == pytest.approx(1.25)
    assert full["peak_over_merged"] == pytest.approx(150 / 180)
    assert full["arrivals"] == ("made up", "as it is")
    assert "ttft_s" in full["metric_definitions"]
    bare = FairnessHeader(**told).as_dict()
    assert bare["mean_load"] is bare["peak_over_merged"] is bare["parameter_share"] is None


def test_a_run_called_run_is_not_called_so_twice() -> None:
    assert "times in run, queue" in measured_in("run") and "times in run 2, queue" in measured_in("run 2")
    assert "times in run burst: drop, queue" in measured_in("burst: drop")
