"""The overloads of stored runs: drops, drops that were declined, and waits of runs that decide neither."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from logged_runs import LOG, declined, run

from jettison.report.incidents import SPELL_GAP_S, incidents_of, slo_ttft_of, whole_run
from jettison.report.results import RequestRecord, build_run

DROP = LOG[1:]
"""The log without the verdict before it."""


def test_an_incident_lasts_from_the_drop_to_the_last_restore() -> None:
    dropped, other = run(log=DROP, late={4}), run("recompute", [], late={4, 5, 6, 7})
    (incident,) = incidents_of(dropped, 1.0, {"recompute": other})
    assert (incident.kind, incident.begin_s, incident.end_s, incident.is_over) == ("drop", 5.0, 12.0, True)
    assert incident.bytes_freed == 1 << 20 and incident.workers == (0, 1)
    # Scheduled from 4 s on (the oldest that waited at the trigger) until 12 s.
    assert incident.num_arrivals == 8 and incident.num_over_slo == 1 and incident.most_waiting == 2
    assert incident.num_saved("recompute") == 3 and incident.num_saved("swap") is None


def test_an_incident_that_never_ended_says_so() -> None:
    (incident,) = incidents_of(run(log=LOG[1:5]), 1.0)
    assert not incident.is_over and incident.end_s == run().duration_s


def test_a_second_drop_belongs_to_the_incident_until_all_layers_are_back() -> None:
    second = [
        {**LOG[1], "t": 7.0}, {**LOG[2], "t": 7.01, "workers": [2, 3]},
        {"t": 12.0, "kind": "restore_done", "workers": [0, 1], "ms": 1.0},
        {"t": 15.0, "kind": "restore_done", "workers": [2, 3], "ms": 1.0},
        {**LOG[1], "t": 17.0}, {**LOG[2], "t": 17.01},
    ]
    first, later = incidents_of(run(log=[*LOG[1:5], *second]), 1.0)
    assert len(first.drops) == 2 and first.end_s == 15.0 and first.bytes_freed == 2 << 20
    assert later.begin_s == 17.0 and not later.is_over


def test_a_pipeline_that_splits_into_smaller_ones_is_not_back_until_those_have_split() -> None:
    deeper = [
        {**LOG[1], "t": 7.0}, {**LOG[2], "t": 7.01, "workers": [0, 1, 2, 3]},
        {"t": 9.0, "kind": "split", "homes": {"7": [0, 1], "8": [2, 3]}, "ms": 1.0},
        {"t": 9.5, "kind": "restore_done", "workers": [0, 1, 2, 3], "ms": 1.0},
        {"t": 11.0, "kind": "split", "homes": {"9": [0], "10": [1]}, "ms": 1.0},
        {"t": 11.5, "kind": "restore_done", "workers": [0, 1], "ms": 1.0},
        {"t": 13.0, "kind": "split", "homes": {"11": [2], "12": [3]}, "ms": 1.0},
        {"t": 13.5, "kind": "restore_done", "workers": [2, 3], "ms": 1.0},
    ]
    (incident,) = incidents_of(run(log=[*LOG[1:5], *deeper]), 1.0)
    assert len(incident.drops) == 2 and (incident.end_s, incident.is_over) == (13.5, True)


def test_a_member_that_a_restore_leaves_over_is_back_when_it_has_come_home() -> None:
    three = [
        {**LOG[1], "t": 7.0}, {**LOG[2], "t": 7.01, "workers": [0, 1, 2]},
        {"t": 9.0, "kind": "split", "homes": {"7": [0, 2]}, "left_over": [1], "ms": 1.0},
        {"t": 9.5, "kind": "restore_done", "workers": [0, 1, 2], "ms": 1.0},
        {"t": 11.0, "kind": "split", "homes": {"9": [0], "10": [2]}, "left_over": [], "ms": 1.0},
        {"t": 11.5, "kind": "restore_done", "workers": [0, 2], "ms": 1.0},
        {"t": 12.0, "kind": "came_home", "worker": 1, "ms": 1.0},
    ]
    (incident,) = incidents_of(run(log=[*LOG[1:5], *three]), 1.0)
    assert (incident.end_s, incident.is_over) == (12.0, True)


def test_verdicts_against_a_drop_make_one_incident_a_spell() -> None:
    log = [declined(3.5), declined(8.5, "compute binds", 1), declined(8.5 + 2 * SPELL_GAP_S)]
    held, other = run(log=log, late={2, 3, 7, 8}, num_requests=40), run("swap", [], num_requests=40)
    first, second = incidents_of(held, 1.0, {"swap": other})
    assert first.kind == second.kind == "no drop" and first.drops == ()
    assert [d.inputs["reason"] for d in first.declined] == ["a pipeline could not keep up", "compute binds"]
    # Request 8, which waited at the last verdict, had its first token at 12 s; request 2 was there before the first.
    assert (first.begin_s, first.end_s, first.is_over) == (3.5, 12.0, True)
    assert (first.num_arrivals, first.num_over_slo, first.num_saved("swap")) == (10, 4, -4)
    assert first.most_waiting == 3, "7 and 8 while 9 came"
    assert second.begin_s == second.end_s == 28.5 and len(second.declined) == 1


def test_what_is_declined_while_layers_are_dropped_belongs_to_the_drop() -> None:
    log = [declined(2.0), *DROP[:4], declined(7.0), *DROP[4:], declined(14.0)]
    before, dropped, after = incidents_of(run(log=log, late={2, 3}), 1.0)
    assert [i.kind for i in (before, dropped, after)] == ["no drop", "drop", "no drop"]
    assert before.end_s == dropped.begin_s == 5.0, "request 2 waited on; what came then is the drop's"
    assert [d.at_s for i in (before, after) for d in i.declined] == [2.0, 14.0]


def test_a_drop_that_failed_is_one_that_was_not_made() -> None:
    log = [LOG[1], {"t": 5.1, "kind": "drop_failed", "reason": "no memory", "workers": [0, 1]}]
    (incident,) = incidents_of(run(log=log, late={4}), 1.0)
    assert incident.kind == "no drop" and incident.declined[0].outcome["failed"] == "no memory"
    assert incident.end_s == 8.0


def test_late_requests_of_a_run_that_decides_neither_are_an_incident() -> None:
    log = [{"t": 5.0, "kind": "rebalanced", "requests": 2, "to": [1]}]
    series = {"queue": [(0.0, 0), (4.5, 3), (9.0, 0)], "kv_usage": [(0.0, 0.5), (4.5, 0.99), (9.0, 0.4)]}
    events = {"preemptions": 7}
    waited = run("recompute", log, {4, 5}, series=series, events=events, config={"policy": "recompute"})
    (incident,) = incidents_of(waited, 1.0, {"drop": run()})
    assert (incident.kind, incident.begin_s, incident.end_s, incident.is_over) == ("wait", 4.0, 9.0, True)
    assert incident.trigger.inputs == {"late_requests": 2, "most_in_queue": 3.0, "highest_kv_usage": 0.99}
    assert incident.trigger.outcome == {
        "policy": "recompute", "decisions": {"rebalance": 1}, "preemptions_in_the_whole_run": 7,
    }
    assert (incident.num_arrivals, incident.num_over_slo, incident.most_waiting) == (5, 2, 3)
    assert incident.num_saved("drop") == -2
    assert incidents_of(waited, 4.5) == [], "within the objective"


def test_requests_that_are_late_with_nobody_in_the_queue_are_none() -> None:
    calm = {"queue": [(0.5 * i, 0.0) for i in range(50)]}
    assert incidents_of(run("recompute", [], {4}, series=calm), 1.0) == []
    assert len(incidents_of(run("recompute", [], {4}), 1.0)) == 1, "a server that does not tell its queue"


def test_requests_without_an_answer_were_late_from_their_objective_on() -> None:
    (incident,) = incidents_of(run("recompute", [], unanswered={6, 8}), 1.5)
    assert (incident.begin_s, incident.end_s, incident.num_over_slo) == (6.0, 9.5, 2)
    given_up = [RequestRecord(0, 0.0, 10, 2, "cancelled", 0.0, None, 0.4), RequestRecord(1, 0.5, 10, 2, "completed",
                0.5, 0.6, 0.7, 2, [0.1])]  # fmt: skip
    quick = build_run("recompute", given_up, events={"log": []})
    assert incidents_of(quick, 1.0) == [], "its client did not wait for long"
    assert len(incidents_of(quick, 0.3)) == 1


def test_waits_of_a_run_that_drops_count_where_no_other_incident_touches_them() -> None:
    kinds = [(i.kind, i.begin_s) for i in incidents_of(run(log=DROP, late={1, 2, 11, 16, 17}, num_requests=30), 1.0)]
    assert kinds == [("drop", 5.0), ("wait", 16.0)], "1 and 2 waited as the drop came, 11 while it lasted"
    apart = run("recompute", [], {1, 30}, num_requests=40)
    assert [(i.begin_s, i.end_s) for i in incidents_of(apart, 1.0)] == [(1.0, 5.0), (30.0, 34.0)]


@given(st.sets(st.integers(0, 59)), st.sets(st.integers(0, 59)), st.sampled_from([0.05, 1.0, 5.0]))
def test_every_late_request_of_a_baseline_is_in_one_incident(late: set[int], failed: set[int], slo_s: float) -> None:
    found = run("recompute", [], late, unanswered=failed, num_requests=60)
    incidents = incidents_of(found, slo_s)
    assert sum(i.num_over_slo for i in incidents) == whole_run(found, slo_s, {}).num_over_slo
    for one, two in itertools.pairwise(incidents):
        assert two.begin_s - one.end_s >= SPELL_GAP_S
    assert all(i.trigger.inputs["late_requests"] == i.num_over_slo for i in incidents)


def test_a_run_without_its_requests_has_what_its_log_tells() -> None:
    found = run(detail=False)
    first, second = incidents_of(found, 1.0)
    assert (first.kind, first.begin_s, first.end_s, first.most_waiting) == ("no drop", 1.0, 1.0, None)
    assert second.kind == "drop"


def test_the_whole_run_is_compared_where_nothing_happened() -> None:
    whole = whole_run(run("calm", []), 1.0, {"swap": run("swap", [], {3}), "own": run()}, untold={"own"})
    assert (whole.begin_s, whole.end_s, whole.num_arrivals, whole.num_over_slo) == (0.0, run().duration_s, 20, 0)
    assert whole.num_saved("swap") == 1 and whole.num_saved("own") is None


@pytest.mark.parametrize(("asked", "own", "expected"), [
    (None, {"slo_ttft_s": 0.25, "slo_tpot_s": None}, 0.25), (3.0, {"slo_ttft_s": 0.25}, 3.0), (None, None, 1.0),
    (None, {"slo_ttft_s": None, "slo_tpot_s": 0.1}, 1.0), (0.0, None, 0.0),
])
def test_the_objective_is_what_is_asked_for_or_the_run_s_own(
    asked: float | None, own: dict[str, Any] | None, expected: float
) -> None:
    found = run()
    found.goodput = own
    assert slo_ttft_of(found, asked) == expected
