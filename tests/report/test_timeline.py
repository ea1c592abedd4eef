"""The time line: what was told becomes a trace that viewers open."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest

from jettison.core.ports import Emit, Record, RunStep, SendKV, SendShard, StepRow, TransferEnded
from jettison.core.requests import RequestState
from jettison.memory.stages import StagePlan
from jettison.report.timeline import Timeline
from jettison.types import FinishReason, LayerRange, Request, SamplingParams


def state(name="r1", arrival_ns=1_000_000):
    return RequestState(Request(name, (1, 2, 3), SamplingParams(max_tokens=2), arrival_ns), 0)


def step(step_id, rows):
    stages = (StagePlan(0, LayerRange(0, 2)), StagePlan(1, LayerRange(2, 4)))
    return RunStep(step_id, 7, 0, stages, tuple(rows))


def events(timeline, phase):
    return [e for e in timeline.document()["traceEvents"] if e["ph"] == phase]


def test_a_stage_is_a_slice_of_its_worker_in_microseconds():
    timeline = Timeline()
    timeline.step_issued(step(1, [StepRow(state(), 0, 3, True), StepRow(state("r2"), 5, 1, True)]))
    timeline.stage_done(0, 1, 5_000_000, 7_000_000)
    timeline.stage_done(1, 1, 7_500_000, 9_000_000)
    timeline.step_ended(1)
    first, second = events(timeline, "X")
    assert (first["tid"], first["ts"], first["dur"], first["name"]) == (0, 0.0, 2000.0, "prefill")
    assert (second["tid"], second["ts"], second["dur"]) == (1, 2500.0, 1500.0)
    assert first["args"] | {} == {
        "step": 1, "group": 7, "requests": 2, "tokens": 4, "prompt_tokens": 3, "pairs": 6 + 6, "kv_tokens": 3 + 6,
        "samples": 2, "layers": [0, 2],
    }
    assert second["args"] == first["args"] | {"layers": [2, 4]}


def test_a_step_that_nobody_issued_or_that_is_over_draws_nothing():
    timeline = Timeline()
    timeline.stage_done(0, 9, 0, 1)
    timeline.step_issued(step(1, [StepRow(state(), 5, 1, True)]))
    timeline.step_ended(1)
    timeline.stage_done(0, 1, 0, 1)
    assert not events(timeline, "X")


def test_steps_of_a_lost_workers_groups_are_forgotten():
    timeline = Timeline()
    timeline.step_issued(step(1, [StepRow(state(), 5, 1, True)]))
    timeline.recorded(Record("worker_lost", 5, {"worker": 0, "groups": [7], "requests": 1, "moves": []}))
    timeline.stage_done(0, 1, 0, 1)
    assert not events(timeline, "X")


def test_a_transfer_begins_its_duration_before_its_end():
    timeline = Timeline()
    timeline.transfer_begun(SendKV(3, 0, 1, LayerRange(2, 4), (1, 2), (4, 5), True))
    timeline.transfer_begun(SendShard(4, 1, 0, "layer:2"))
    timeline.transfer_ended(TransferEnded(3, True, 4096, 2_000_000), 10_000_000)
    timeline.transfer_ended(TransferEnded(4, False, 10, 1_000_000), 12_000_000)
    timeline.transfer_ended(TransferEnded(99, True, 1, 1), 12_000_000)
    begins = events(timeline, "b")
    assert [(e["name"], e["ts"]) for e in begins] == [("urgent KV 0 > 1", 0.0), ("layer:2 1 > 0", 3000.0)]
    assert begins[0]["args"]["bytes"] == 4096 and not begins[1]["args"]["complete"]
    assert [e["ts"] for e in events(timeline, "e")] == [2000.0, 4000.0]


def test_records_are_marks_and_the_ends_of_moves_spans():
    timeline = Timeline()
    timeline.recorded(Record("drop_decided", 1_000_000, {"group": 0, "reason": "memory"}))
    timeline.recorded(Record("drop", 9_000_000, {"workers": (0, 1), "decision_to_serving_ms": 8.0}))
    assert [e["name"] for e in events(timeline, "i")] == ["drop_decided", "drop"]
    (begin,), (end,) = events(timeline, "b"), events(timeline, "e")
    assert begin["name"].startswith("drop") and (begin["ts"], end["ts"]) == (0.0, 8000.0)


def test_a_request_shows_its_phases_and_never_its_tokens():
    timeline, request = Timeline(), state()
    timeline.emitted(Emit("r1", (), state=request))
    request.first_scheduled_ns, request.first_token_ns, request.finished_ns = 2_000_000, 4_000_000, 9_000_000
    timeline.emitted(Emit("r1", (), FinishReason.LENGTH, state=request))
    assert [(e["name"], e["ts"]) for e in events(timeline, "b")] == [
        ("r1", 0.0), ("queued", 0.0), ("prefill", 1000.0), ("decode", 3000.0),
    ]
    assert events(timeline, "b")[0]["args"]["prompt_tokens"] == 3
    assert "token_ids" not in json.dumps(timeline.document())


@pytest.mark.parametrize(("num_groups", "num_charts"), [(1, 2), (3, 8), (33, 2)])
def test_counters_are_totals_and_groups_while_there_are_few(num_groups, num_charts):
    timeline = Timeline()
    gauges = {"waiting": 1, "running": 2, "kv_blocks": 3, "kv_capacity": 4}
    timeline.looked([(g, gauges) for g in range(num_groups)], 1_000)
    charts = events(timeline, "C")
    assert len(charts) == num_charts
    assert charts[0]["args"] == {"waiting": num_groups, "running": 2 * num_groups}


def test_the_oldest_events_go_first_and_are_counted(tmp_path):
    timeline = Timeline(max_events=10)
    for at in range(25):
        timeline.recorded(Record("rebalanced", at * 1_000, {"requests": at}))
    document = timeline.document()
    assert document["otherData"]["forgotten_events"] == 15 == timeline.num_forgotten
    assert [e["args"]["requests"] for e in document["traceEvents"] if e["ph"] == "i"] == list(range(15, 25))
    plain, packed = tmp_path / "deep" / "t.json", tmp_path / "t.json.gz"
    timeline.write(plain)
    timeline.write(packed)
    assert json.loads(plain.read_text()) == json.loads(gzip.decompress(packed.read_bytes()))


def test_what_json_does_not_know_becomes_text():
    timeline = Timeline()
    timeline.recorded(Record("split", 5, {"homes": {1: (0,)}, "what": SimpleNamespace(a=1), "ms": None}))
    (mark,) = events(timeline, "i")
    assert mark["args"] == {"homes": {"1": [0]}, "what": "namespace(a=1)", "ms": None}
