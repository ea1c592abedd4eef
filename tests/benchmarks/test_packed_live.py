"""Packing live on four instances: which gaps are too long, who was there during moves, which pieces go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packed_live import SLACK_S, Answer, TimeLine, during, judge, long_gaps, read_pieces, tpot_ratio

STOP_S = 0.05
MOVED = (10.30, "migrated", {"request": "a", "source": 0, "destination": 1, "ms": 200.0, "stop_ms": 1e3 * STOP_S})


def answer(name: str, *at_s: float) -> Answer:
    return Answer(at_s[0], name, list(range(len(at_s))), list(at_s))


def line(step_s: float = 0.1) -> TimeLine:
    """Group 0 steps until a request leaves it, group 1 from then on; group 2 has one long step."""
    return TimeLine({0: [(10.0, 10.0 + step_s)], 1: [(10.3, 10.3 + step_s)], 2: [(10.0, 12.0)]}, [MOVED])


@given(step_s=st.floats(0.01, 0.25), over_s=st.floats(-0.2, 0.2))
def test_a_gap_may_have_two_steps_of_its_own_instances_and_its_own_stop(step_s: float, over_s: float) -> None:
    gap_s = 2.0 * step_s + STOP_S + SLACK_S + over_s
    found = long_gaps([answer("a", 10.05, 10.05 + gap_s)], line(step_s))
    is_in_the_move = 10.05 + gap_s >= 10.30 - STOP_S
    if abs(over_s) > 1e-6 and is_in_the_move:
        assert bool(found) == (over_s > 0)
        if found:
            assert any("migrated" in told for told in found[0]["told"]) == (10.05 + gap_s >= 10.25)


def test_the_stop_of_another_request_excuses_no_gap() -> None:
    others = TimeLine(line().steps, [MOVED, (10.0, "pack", {"request": "b", "source": 0, "destination": 0})])
    gap = answer("b", 10.08, 10.08 + 0.2 + STOP_S)
    assert [found["stop_ms"] for found in long_gaps([gap], others)] == [0.0]
    assert not long_gaps([answer("a", *gap.at_s)], others)


def test_who_got_tokens_while_somebody_was_on_the_way() -> None:
    answers = [answer("before", 9.0, 10.05), answer("within", 10.2, 10.25), answer("after", 10.31, 11.0)]
    assert during(answers, line().moves()) == [1]
    assert during([answer("all", 9.0, 11.0)], line().moves()) == [0]


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
    assert [is_met for is_met, _ in verdicts] == [False, False, False, False, True, False]
    assert all(is_met for is_met, _ in judge([row("none", tpot_ms=[21.0], long_gaps=[]), slow | {"long_gaps": []}]))


def piece(path: Path, rows: list[dict[str, Any]], plan: str = "one", sources: str = "same") -> Path:
    path.write_text(json.dumps({"plan": plan, "rows": rows, "evidence": {"rooms": sources}}), encoding="utf-8")
    return path


def test_pieces_are_put_together_where_load_and_sources_are_the_same(tmp_path: Path) -> None:
    first = piece(tmp_path / "1", [row("mell", 1), row("none", 1)])
    document, _ = read_pieces([first, piece(tmp_path / "2", [row("none")])])
    assert [(each["round"], each["arm"]) for each in document["rows"]] == [(0, "none"), (1, "none"), (1, "mell")]
    for other in ({"plan": "another"}, {"sources": "others"}):
        with pytest.raises(ValueError, match="differ"):
            read_pieces([first, piece(tmp_path / "3", [row("still", 1)], **other)])
    with pytest.raises(ValueError, match="twice"):
        read_pieces([first, first])


def test_a_time_line_with_gaps_of_its_own_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "line.json"
    step = {"cat": "step", "ts": 5e5, "dur": 2e4, "args": {"group": 3}}
    told = {"cat": "decision", "name": "pack", "ts": 1e6, "args": {"request": "a", "source": 3, "destination": 4}}
    document = {"traceEvents": [step, told], "otherData": {"first_ns": 7_000_000_000, "forgotten_events": 0}}
    path.write_text(json.dumps(document), encoding="utf-8")
    read = TimeLine.read(path)
    assert read.steps == {3: [(7.5, pytest.approx(7.52))]}
    assert read.groups_of("a") == {3, 4}
    path.write_text(json.dumps(document | {"otherData": {"first_ns": 0, "forgotten_events": 2}}), encoding="utf-8")
    with pytest.raises(ValueError, match="forgotten"):
        TimeLine.read(path)
