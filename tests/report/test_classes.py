"""Objectives by class: of requests, and of single gaps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from jettison.report.classes import build_by_class, requests_within
from jettison.report.results import RequestRecord


@dataclass(frozen=True)
class Limits:
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None


def record(first_s: float | None, gaps_s: list[float], longest_gap_s: float | None = None) -> RequestRecord:
    return RequestRecord(0, 0.0, 1, 1, first_s=first_s, gaps_s=gaps_s, longest_gap_s=longest_gap_s)


RECORDS = [record(1.0, [0.1, 0.1]), record(1.0, [0.1, 0.3]), record(3.0, []), record(1.0, [], 0.3), record(None, [])]


@pytest.mark.parametrize(("limits", "share"), [
    (Limits(), None), (Limits(1.0, 0.2), 0.2), (Limits(1.0, 0.3), 0.6), (Limits(1.0), 0.6), (Limits(None, 0.2), 0.4),
])  # fmt: skip
def test_a_request_keeps_the_objectives_in_every_gap_or_not_at_all(limits: Limits, share: float | None) -> None:
    assert requests_within(RECORDS, limits) == share


def test_without_requests_nothing_is_judged() -> None:
    assert requests_within([], Limits(1.0, 1.0)) is None


def test_a_run_lasts_until_the_last_end_of_both_classes() -> None:
    online = RequestRecord(0, 0.0, 1, 5, status="completed", first_s=0.1, finished_s=0.5, output_tokens=5)
    offline = RequestRecord(
        1, 0.0, 1, 95, status="completed", first_s=0.1, finished_s=20.0, output_tokens=95, is_offline=True
    )
    run = build_by_class("both", [online, offline], window_s=1.0, objectives=Limits(1.0), series={})
    assert (run.duration_s, run.output_tokens_per_s) == (20.0, 5.0)
    assert run.goodput is not None and run.goodput["requests_per_s"] == 1 / 20.0
