"""The time line: what was told becomes a trace that viewers open."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harvested_runs import harvested

from jettison.core.ports import Emit, Record, RunStep, SendKV, SendShard, StepRow, TransferEnded
from jettison.core.requests import RequestState
from jettison.memory.stages import StagePlan
from jettison.report.timeline import Timeline
from jettison.types import FinishReason, LayerRange, Request, SamplingParams, ServiceClass


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
        "step": 1, "group": 7, "requests": 2, "tokens": 4, "prompt_tokens": 3, "offline_tokens": 0,
        "pairs": 6 + 6, "kv_tokens": 3 + 6, "samples": 2, "layers": [0, 2],
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
    timeline.transfer_begun(SendKV(3, 0, 1, LayerRange(2, 4), (1, 2), (4, 5), True), 5_000_000)
    timeline.transfer_begun(SendShard(4, 1, 0, "layer:2"), 5_000_000)
    timeline.transfer_ended(TransferEnded(3, True, 4096, 2_000_000), 10_000_000)
    timeline.transfer_ended(TransferEnded(4, False, 10, 1_000_000), 12_000_000)
    timeline.transfer_ended(TransferEnded(99, True, 1, 1), 12_000_000)
    begins = events(timeline, "b")
    assert [(e["name"], e["ts"]) for e in begins] == [("urgent KV 0 > 1", 0.0), ("layer:2 1 > 0", 3000.0)]
    assert begins[0]["args"]["bytes"] == 4096 and not begins[1]["args"]["complete"]
    assert [e["ts"] for e in events(timeline, "e")] == [2000.0, 4000.0]


def test_a_transfer_that_the_core_ends_itself_has_a_bar_from_its_order():
    timeline = Timeline()
    timeline.transfer_begun(SendShard(4, 1, 0, "layer:2"), 5_000_000)
    timeline.transfer_begun(SendShard(5, 1, 0, "layer:3"), 6_000_000)
    timeline.transfers_left({4, 5}, 7_000_000)
    assert not events(timeline, "b")
    timeline.transfers_left({5}, 8_000_000)
    timeline.transfer_ended(TransferEnded(4, True, 10, 1_000_000), 9_000_000)  # what came too late counts no more
    (begin,), (end,) = events(timeline, "b"), events(timeline, "e")
    assert (begin["name"], begin["ts"], end["ts"]) == ("layer:2 1 > 0", 0.0, 3000.0)
    assert not begin["args"]["complete"]


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


def offline_step(step_id, group_id, num_offline, num_online):
    request = Request("batch", (1,) * 9, SamplingParams(max_tokens=2), 0, service_class=ServiceClass.OFFLINE)
    rows = [StepRow(state(), 0, num_online, True), StepRow(RequestState(request, 1), 0, num_offline, True)]
    return step(step_id, rows)._replace(group_id=group_id)


def test_the_offline_part_of_what_is_issued_is_a_counter_of_each_group():
    timeline = Timeline()
    gauges = {"waiting": 0, "offline_waiting": 4, "offline_running": 2, "offline_hosted": 1, "offline_host_blocks": 30}
    for now_ns in (1_000, 2_000):
        timeline.step_issued(offline_step(now_ns, 7, 3, 1))
        timeline.step_issued(offline_step(now_ns + 1, 7, 1, 1))
        timeline.step_issued(offline_step(now_ns + 2, 8, 1, 3))
        timeline.looked([(7, gauges), (8, {"offline_host_blocks": 5})], now_ns)
    timeline.looked([(7, gauges), (8, {})], 3_000)
    found = {(e["name"], e["ts"]): e["args"] for e in events(timeline, "C")}
    for at_us in (0.0, 1.0):
        assert found["group 7: offline part of the tokens", at_us] == {"offline_part": pytest.approx(4 / 6)}
        assert found["group 8: offline part of the tokens", at_us] == {"offline_part": 0.25}
        assert found["cluster: offline part of the tokens", at_us] == {"offline_part": 0.5}
    assert found["group 7: offline part of the tokens", 2.0] == {"offline_part": 0.0}, "nothing was issued"
    assert found["cluster: offline KV blocks at the host", 0.0] == {"offline_host_blocks": 35}
    assert found["group 7: offline requests", 0.0] == {"offline_waiting": 4, "offline_running": 2, "offline_hosted": 1}


def test_without_offline_work_there_is_no_chart_of_it():
    timeline = Timeline()
    timeline.step_issued(step(1, [StepRow(state(), 0, 3, True)]))
    timeline.looked([(7, {"waiting": 1, "offline_waiting": 0, "offline_host_blocks": 0})], 5)
    assert [e["name"] for e in events(timeline, "C")] == ["cluster: requests"]


def test_offline_work_in_the_time_line_of_a_run():
    """Steps that are given up are marks, and how long it stood still a span."""
    timeline = Timeline()
    run = harvested(observer=timeline)
    marks = [e["name"] for e in events(timeline, "i")]
    assert marks.count("step_abandoned") == run.events["steps_abandoned"] > 0
    assert "offline work stands still" in [e["name"] for e in events(timeline, "b")]
    issued = sum(e["args"]["offline_tokens"] for e in events(timeline, "X"))
    first_time = run.events["offline_prompt_tokens"] + run.events["offline_output_tokens"]
    assert issued >= first_time - 30, "a request's last token is in no step"
    charts = {e["name"] for e in events(timeline, "C")}
    assert {"cluster: offline requests", "cluster: offline part of the tokens"} <= charts
    blocks = [e["args"]["offline_host_blocks"] for e in events(timeline, "C") if e["name"].endswith("at the host")]
    assert max(blocks) > 0


def test_a_pause_is_a_span():
    timeline = Timeline()
    timeline.recorded(Record("offline_paused", 1_000_000, {"group": 0, "running": 2}))
    timeline.recorded(Record("offline_resumed", 3_000_000, {"group": 0, "ms": 2.0}))
    (begin,), (end,) = events(timeline, "b"), events(timeline, "e")
    assert (begin["name"], end["ts"] - begin["ts"]) == ("offline work paused", 2000.0)
