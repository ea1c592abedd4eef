"""SLO violations over scale factors, and the burst window."""

from __future__ import annotations

import pytest

from jettison.report.overload import SloBase, overload_arrivals, slo_base, slo_violations, window_ttft_p99
from jettison.report.results import RequestRecord, RunResult, build_run


def run(*requests: tuple[float, float, float, int]) -> RunResult:
    """(arrival, TTFT, TPOT, output tokens) of each request."""
    records = [
        RequestRecord(
            i, arrival, 10, output, "completed", arrival, arrival + ttft, arrival + ttft + tpot * (output - 1), output,
            [tpot] * (output - 1),
        )
        for i, (arrival, ttft, tpot, output) in enumerate(requests)
    ]
    return build_run("run", records)


def test_the_base_is_the_best_of_the_baselines_metric_by_metric() -> None:
    fast, smooth = run((0, 0.1, 0.5, 3)), run((0, 0.9, 0.2, 3))
    base = slo_base([fast, smooth])
    assert (base.ttft_s, base.tpot_s) == pytest.approx((0.1, 0.2))
    with pytest.raises(ValueError, match="no baseline"):
        slo_base([run()])


def test_a_violation_is_a_late_first_token_a_slow_pace_or_no_answer() -> None:
    measured = run((0, 0.1, 0.1, 3), (1, 0.5, 0.1, 3), (2, 0.1, 0.6, 3), (3, 0.1, 0.1, 1))
    found = slo_violations(measured, SloBase(0.1, 0.1), (2, 5, 7))
    assert found == {"ttft": [0.25, 0.0, 0.0], "tpot": [0.25, 0.25, 0.0], "either": [0.5, 0.25, 0.0]}
    assert measured.requests_detail is not None
    measured.requests_detail[0]["status"] = "failed"
    assert slo_violations(measured, SloBase(0.1, 0.1), (7,))["either"] == [0.25]
    assert slo_violations(run(), SloBase(1, 1), (2,)) == {"ttft": [None], "tpot": [None], "either": [None]}


def test_the_window_is_where_the_workload_alone_wants_more_than_there_is() -> None:
    # Each wants 10 tokens at its arrival and 10 more over 10 s.
    arrivals = [(0.0, 0.1, 1.0, 10), (1.0, 0.1, 1.0, 10), (2.0, 9.0, 1.0, 10), (60.0, 0.1, 1.0, 10)]
    measured = run(*arrivals)
    base = SloBase(0.0, 1.0)
    details = measured.requests_detail or []
    assert overload_arrivals(details, base, 30.0) == {2}, "10 + 2, 10 + 1 and 10 at 2 s"
    assert overload_arrivals(details, base, 20.0) == {1, 2}
    assert overload_arrivals(details, base, 1000.0) == frozenset()
    assert window_ttft_p99(measured, frozenset({2})) == 9.0
    assert window_ttft_p99(measured, frozenset()) is None
