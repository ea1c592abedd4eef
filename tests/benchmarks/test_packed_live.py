"""Packing live on four instances: which gaps are too long, who was there during moves, which pieces go together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.packing.live import ARMS, judge, tpot_ratio
from benchmarks.packing.token_times import Answer, Request, TimeLine, during, long_gaps
from benchmarks.shared import read_pieces

STEP_S, STOP_S = 0.1, 0.05
MOVED = (10.30, "migrated", {"request": "a", "source": 0, "destination": 1, "ms": 200.0, "stop_ms": 1e3 * STOP_S})
LINE = TimeLine(
    {0: [(10.0, 10.0 + STEP_S)], 1: [(10.3, 10.3 + STEP_S)], 2: [(10.0, 12.0)]}, [MOVED],
    [Request("a", 10.0, (7, 2), 0, 1), Request("b", 10.0, (7, 2), 0, 1)],
)
"""Group 0 steps until a request leaves it, group 1 from then on; group 2 has one long step."""


def answer(name: str, *at_s: float) -> Answer:
    return Answer(at_s[0], 7, name, list(range(len(at_s))), list(at_s))


CALM = answer("calm", *(20.0 + 0.001 * i for i in range(200)))
"""Says what a token takes while nobody moves: a millisecond."""


@given(begin_s=st.floats(9.9, 10.29), over_s=st.floats(-0.2, 0.2))
def test_a_gap_may_have_two_steps_of_its_own_instances_and_its_own_stop(begin_s: float, over_s: float) -> None:
    end_s = begin_s + 2.0 * STEP_S + STOP_S + over_s
    result = long_gaps([answer("a", begin_s, end_s), CALM], LINE)
    found = result["long_gaps"]
    is_in_the_stop, has_step = end_s > 10.25, begin_s < 10.0 + STEP_S or end_s > 10.30
    assume(abs(over_s) > 1e-6 and is_in_the_stop and has_step)
    assert (len(found), result["other_long_gaps"]) == (over_s > 0, 0)
    assert not found or any("migrated" in told for told in found[0]["told"])


def seen(line: TimeLine, *answers: Answer) -> tuple[int, int, int]:
    """Numbers of long gaps: during moves, at other times, of who was evicted."""
    result = long_gaps([*answers, CALM], line)
    return len(result["long_gaps"]), result["other_long_gaps"], result["evicted_gaps"]


def test_the_stop_of_another_request_excuses_no_gap_and_a_gap_without_moves_is_only_counted() -> None:
    known = replace(LINE, records=[MOVED, (10.0, "pack", {"request": "b", "source": 0, "destination": 1})])
    gap = answer("b", 10.08, 10.08 + 2.0 * STEP_S + 0.9 * STOP_S)
    assert seen(known, gap) == (1, 0, 0)
    assert seen(LINE, answer("a", *gap.at_s)) == (0, 0, 0)
    assert seen(known, answer("b", 15.0, 15.5)) == (0, 1, 0)


def test_an_eviction_accounts_for_one_gap_the_longest_and_not_for_a_move_of_its_own() -> None:
    def evicted(name: str, num: int) -> TimeLine:
        return replace(LINE, steps={}, requests=[Request(name, 10.0, (7, 4), num, 1)])

    gaps = 10.0, 10.5, 10.9, 11.2
    assert seen(evicted("c", 0), answer("c", *gaps)) == (1, 2, 0)
    assert seen(evicted("c", 1), answer("c", *gaps)) == (0, 2, 1)
    assert seen(evicted("a", 1), answer("a", 10.0, 11.0)) == (1, 0, 0)


def test_nobody_tells_where_one_that_was_evicted_was_queued() -> None:
    told = replace(LINE, requests=[Request("c", 10.0, (7, 2), 0, 1), Request("d", 10.0, (7, 2), 1, 1)])
    assert told.groups_of("c") == {1}
    assert told.groups_of("d") == {0, 1, 2}


def test_a_token_that_takes_longer_than_its_step_everywhere_is_no_moves_fault() -> None:
    slow = answer("slow", *(20.0 + 0.15 * i for i in range(200)))
    gap = answer("a", 10.02, 10.31)
    assert len(long_gaps([gap, CALM], LINE)["long_gaps"]) == 1
    assert long_gaps([gap, slow], LINE)["long_gaps"] == []


def test_answers_are_named_by_their_lengths_in_the_order_in_which_they_came() -> None:
    later, sooner, other = answer("", 12.0, 12.1), answer("", 10.0, 10.1), answer("", 9.0, 9.1, 9.2)
    came = {"later": (12.1, 2), "other": (9.1, 3), "sooner": (10.4, 2)}
    told = [Request(name, came_s, (7, num), 0, 1) for name, (came_s, num) in came.items()]
    replace(LINE, requests=told).name([later, sooner, other])
    assert [each.request_id for each in (later, sooner, other)] == ["later", "sooner", "other"]
    with pytest.raises(ValueError, match="no request of 7 and 2"):
        replace(LINE, requests=told[:2]).name([later, sooner])


def test_who_got_tokens_while_somebody_was_on_the_way() -> None:
    answers = [answer("before", 9.0, 10.05), answer("within", 10.2, 10.25), answer("after", 10.31, 11.0)]
    assert during(answers, LINE) == [1]
    assert during([answer("all", 9.0, 11.0)], LINE) == [0]


def test_the_same_requests_are_compared() -> None:
    base = {"tpot_ms": [10.0, 500.0, 20.0]}
    assert tpot_ratio({"during_moves": [0, 0], "tpot_ms": [30.0, 1.0, 1.0]}, base) == pytest.approx(3.0)
    assert tpot_ratio({"during_moves": [], "tpot_ms": [30.0, 1.0, 1.0]}, base) is None
    assert tpot_ratio({"during_moves": [0], "tpot_ms": [30.0]}, {}) is None


def row(arm: str, number: int = 0, **more: Any) -> dict[str, Any]:
    return {"arm": arm, "round": number, "requests": 3, "failed": 0, "mismatches": 0, "tokens": 30, "busy": 0.5} | more


def test_each_miss_is_said() -> None:
    slow = row("mell", during_moves=[0], tpot_ms=[31.0], long_gaps=[{}])
    verdicts = judge([row("none", busy=0.7, tpot_ms=[20.0], long_gaps=[]), slow | {"failed": 1, "mismatches": 1}])
    assert [is_met for is_met, _ in verdicts] == [False, False, False, False, False]
    assert all(is_met for is_met, _ in judge([row("none", tpot_ms=[21.0], long_gaps=[]), slow | {"long_gaps": []}]))


def piece(path: Path, rows: list[dict[str, Any]], plan: str = "one", sources: str = "same") -> Path:
    path.write_text(json.dumps({"plan": plan, "rows": rows, "evidence": {"rooms": sources}}), encoding="utf-8")
    return path


def test_pieces_are_put_together_where_load_and_sources_are_the_same(tmp_path: Path) -> None:
    def together(*files: Path) -> dict[str, Any]:
        return read_pieces(files, lambda row: (row["round"], list(ARMS).index(row["arm"])), ("plan",))

    first = piece(tmp_path / "1", [row("mell", 1), row("none", 1)])
    document = together(first, piece(tmp_path / "2", [row("none")]))
    assert [(each["round"], each["arm"]) for each in document["rows"]] == [(0, "none"), (1, "none"), (1, "mell")]
    for other in ({"plan": "another"}, {"sources": "others"}):
        with pytest.raises(ValueError, match="differ"):
            together(first, piece(tmp_path / "3", [row("still", 1)], **other))
    with pytest.raises(ValueError, match="twice"):
        together(first, first)


def test_a_time_line_with_gaps_of_its_own_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "line.json"
    step = {"cat": "step", "ts": 5e5, "dur": 2e4, "args": {"group": 3}}
    told = {"cat": "decision", "name": "pack", "ts": 1e6, "args": {"request": "a", "source": 3, "destination": 4}}
    lengths = {"prompt_tokens": 7, "output_tokens": 3}
    ended = {"cat": "request", "name": "a", "ts": 0.0, "ph": "b", "args": lengths | {"preemptions": 2, "group": 5}}
    document = {"traceEvents": [step, told, ended], "otherData": {"first_ns": 7_000_000_000, "forgotten_events": 0}}
    path.write_text(json.dumps(document), encoding="utf-8")
    read = TimeLine.read(path)
    assert read.steps == {3: [(7.5, pytest.approx(7.52))]}
    assert read.requests == [Request("a", 7.0, (7, 3), 2, 5)]
    assert read.records == [(8.0, "pack", told["args"])]
    path.write_text(json.dumps(document | {"otherData": {"first_ns": 0, "forgotten_events": 2}}), encoding="utf-8")
    with pytest.raises(ValueError, match="forgotten"):
        TimeLine.read(path)
