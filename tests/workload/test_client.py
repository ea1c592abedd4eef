from __future__ import annotations

from dataclasses import replace

import pytest

from jettison.errors import UserError
from jettison.report.summary import comparison_rows
from jettison.workload import client
from jettison.workload.client import ReplayOptions, replay
from jettison.workload.lengths import Lengths, LogNormalPair
from jettison.workload.observe import parse_metrics, shift_log
from jettison.workload.pool import OfflinePool
from jettison.workload.prompts import PromptMaker
from jettison.workload.traces import TraceRow, Workload

WORKLOAD = Workload(tuple(TraceRow(0.01 * index, 4 + index, 6) for index in range(8)), "eight", "made up", ("a note",))
METRICS = """# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 3.0
vllm:num_requests_running{model_name="m",engine="1"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.5
vllm:kv_cache_usage_perc{model_name="m",engine="1"} 0.7
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{model_name="m"} 5.0
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{le="+Inf",model_name="m"} 2.0
vllm:request_queue_time_seconds_sum{model_name="m"} 1.5
vllm:request_queue_time_seconds_count{model_name="m"} 2.0
vllm:time_to_first_token_seconds_bucket{le="0.1"} 9
jettison:worker_memory_bytes{model_name="m",use="kv",worker="1"} 1048576
# HELP jettison:kv_blocks_total A gauge, whatever its name.
# TYPE jettison:kv_blocks_total gauge
jettison:kv_blocks_total{model_name="m",group="0"} 99
# TYPE jettison:drops_total counter
jettison:drops_total{model_name="m"} 2
# TYPE jettison:sheds_total counter
jettison:sheds_total{model_name="m",reason="queue"} 4
# TYPE jettison:drop_seconds histogram
jettison:drop_seconds_bucket{le="1"} 2
jettison:drop_seconds_sum 0.5
process_cpu_seconds_total 9.0
"""


async def test_every_request_is_sent_and_measured(serve) -> None:
    async with serve(gap_s=0.001) as fake:
        run = await replay(fake.url, WORKLOAD, ReplayOptions(name="plain", slo_ttft_s=60, slo_tpot_s=60))
    assert (run.requests.submitted, run.requests.completed) == (8, 8)
    assert run.name == "plain" and run.config["model"] == "fake-model"
    assert run.config["workload"]["notes"] == ["a note"]
    assert run.requests_detail is not None and [row["output_tokens"] for row in run.requests_detail] == [6] * 8
    for row, body in zip(run.requests_detail, sorted(fake.bodies, key=lambda body: len(body["prompt"])), strict=True):
        assert row["sent_s"] >= row["scheduled_s"]
        assert 0 < row["ttft_s"] < row["e2e_s"]
        assert row["tpot_s"] > 0
        assert body["prompt"] == PromptMaker().token_ids(row["index"], row["input_tokens"])
        assert body["max_tokens"] == 6 and body["ignore_eos"] and body["stream_options"] == {"include_usage": True}
    assert run.itl_s.mean is not None and run.itl_s.mean > 0
    assert run.output_tokens_per_s == pytest.approx(48 / run.duration_s)
    assert run.goodput is not None and run.goodput["share"] == 1.0
    assert run.client["lag_s"]["max"] >= run.client["lag_s"]["p50"] >= 0
    assert run.client["short_answers"] == 0


async def test_what_is_overdue_waits_for_no_body_of_another(serve, monkeypatch) -> None:
    made, num_sent = client._Replay._body, []

    def counted(replayed, record):
        num_sent.append(sum(each.sent_s is not None for each in replayed._records))
        return made(replayed, record)

    monkeypatch.setattr(client._Replay, "_body", counted)
    at_once = Workload([TraceRow(0.0, 5, 2)] * 20, "at once", "made up")
    async with serve() as fake:
        run = await replay(fake.url, at_once, ReplayOptions())
    assert run.requests.completed == 20 and num_sent[-1] > 0


@pytest.mark.parametrize("opens_early", [False, True])
async def test_both_clocks_are_told_where_they_differ(serve, opens_early: bool) -> None:
    options = ReplayOptions(name="plain", endpoint="chat", prompt_kind="text")
    async with serve(gap_s=0.001, opens_early=opens_early) as fake:
        run = await replay(fake.url, WORKLOAD, options)
    assert run.requests.completed == 8 and run.opens_early is opens_early
    for row in run.requests_detail or ():
        assert row["first_chunk_s"] < row["ttft_s"] if opens_early else row["first_chunk_s"] == row["ttft_s"]
        assert row["output_tokens"] == 6
    assert run.itl_s.count == 8 * 5, "none from the frame to the first token"
    shown = [row[0] for row in comparison_rows([run]) if row[0].startswith("first chunk")]
    told = ["first chunk, requests", *(f"first chunk {which}" for which in ("mean", "p50", "p90", "p99", "max"))]
    assert shown == (told if opens_early else [])


async def test_the_bytes_of_each_answer_are_given_away(serve) -> None:
    read: dict[int, bytes] = {}

    def keep(index: int, data: bytes) -> None:
        read[index] = read.get(index, b"") + data

    async with serve() as fake:
        await replay(fake.url, WORKLOAD, ReplayOptions(on_data=keep))
    assert read.keys() == set(range(8))
    assert all(data.startswith(b"data: {") and data.rstrip().endswith(b"data: [DONE]") for data in read.values())


async def test_each_ending_is_counted_once(serve) -> None:
    behaviour = {0: "reject", 1: "fail", 2: "break", 3: "error", 4: "hang"}
    async with serve(behaviour=behaviour) as fake:
        run = await replay(fake.url, WORKLOAD, ReplayOptions(request_timeout_s=0.5))
    counts = run.requests
    assert (counts.submitted, counts.completed, counts.rejected, counts.failed) == (8, 3, 1, 4)
    assert run.requests_detail is not None
    errors = " | ".join(row["error"] or "" for row in run.requests_detail)
    for part in ("HTTP 429", "HTTP 500", "the stream ended early", "device lost", "no end within 0.5 s"):
        assert part in errors
    assert sum(row["error"] is None for row in run.requests_detail) == 3


async def test_cancelled_requests_hang_up_and_are_not_failures(serve) -> None:
    async with serve(gap_s=0.01) as fake:
        run = await replay(fake.url, WORKLOAD, ReplayOptions(cancel_fraction=1.0, seed=3))
        assert run.requests.failed == run.requests.rejected == 0
        assert run.requests.cancelled >= 1  # one whose whole answer came in a single read has ended before
        assert run.requests.cancelled + run.requests.completed == 8
    assert fake.num_hung_up >= 1


async def test_the_runs_end_closes_what_is_open(serve) -> None:
    late = replace(WORKLOAD, rows=(*WORKLOAD.rows, TraceRow(3600.0, 4, 4)))
    async with serve(behaviour={0: "hang"}) as fake:
        run = await replay(fake.url, late, ReplayOptions(total_timeout_s=0.6))
    assert (run.requests.submitted, run.requests.completed, run.requests.failed) == (9, 7, 2)
    assert run.requests_detail is not None
    assert run.requests_detail[-1]["error"] == "not sent: the run's time was up"
    assert run.duration_s < 3600


async def test_chat_and_text_prompts(serve) -> None:
    async with serve() as fake:
        run = await replay(fake.url + "/v1/", WORKLOAD, ReplayOptions(endpoint="chat", prompt_kind="text"))
        await replay(fake.url, WORKLOAD, ReplayOptions(prompt_kind="text", ignore_eos=False, model="mine"))
    assert run.requests.completed == 8
    assert sorted(len(body["messages"][0]["content"]) for body in fake.bodies[:8]) == list(range(4, 12))
    assert all(isinstance(body["prompt"], str) and body["model"] == "mine" for body in fake.bodies[8:])
    assert "ignore_eos" not in fake.bodies[-1]


async def test_a_closed_loop_says_so_and_keeps_its_bound(serve) -> None:
    async with serve(gap_s=0.001) as fake:
        run = await replay(fake.url, WORKLOAD, ReplayOptions(max_concurrency=1))
    assert run.client["max_open_requests"] == 1
    assert run.config["loop"] == "at most 1 at once"


async def test_an_empty_workload_is_a_run_without_requests(serve) -> None:
    async with serve() as fake:
        run = await replay(fake.url, replace(WORKLOAD, rows=()), ReplayOptions())
    assert run.requests.submitted == 0 and run.ttft_s.p99 is None


async def test_metrics_become_series_and_counts(serve) -> None:
    events = {"now_s": 100.0, "events": [{"t": 99.99, "kind": "drop", "groups": [0, 1]}, {"t": 3.0, "kind": "drop"}]}
    async with serve(gap_s=0.01, metrics=METRICS, events=events) as fake:
        run = await replay(fake.url, WORKLOAD, ReplayOptions(observe_interval_s=0.02))
    assert {value for _, value in run.series["running"]} == {7.0}
    assert run.series["worker_memory_bytes/kv/1"][0][1] == 1048576
    assert len(run.series["running"]) >= 3
    assert run.events["preemptions"] == 0 and run.events["drops"] == 0  # what grew during the run
    [drop] = run.events["log"]
    assert drop["kind"] == "drop" and drop["groups"] == [0, 1] and 0 <= drop["t"] <= run.duration_s + 1
    assert run.client["failed_polls"] == 0


async def test_a_server_without_metrics_is_asked_once(serve) -> None:
    async with serve(gap_s=0.005) as fake:
        run = await replay(fake.url, WORKLOAD, ReplayOptions(observe_interval_s=0.01))
    assert run.series == {} and run.events == {} and run.client["failed_polls"] == 1


async def test_progress_counts_up_to_all(serve) -> None:
    seen: list[tuple[int, int]] = []
    async with serve() as fake:
        await replay(fake.url, WORKLOAD, ReplayOptions(on_progress=lambda *pair: seen.append(pair)))
    assert seen == [(count, 8) for count in range(1, 9)]


async def test_what_cannot_work_is_said_before_anything_is_sent(serve) -> None:
    async with serve() as fake:
        with pytest.raises(UserError, match="chat endpoint takes text"):
            await replay(fake.url, WORKLOAD, ReplayOptions(endpoint="chat"))
        with pytest.raises(UserError, match="cancel"):
            await replay(fake.url, WORKLOAD, ReplayOptions(cancel_fraction=2.0))
        with pytest.raises(UserError, match="name the model"):
            await replay(fake.url + "/elsewhere", WORKLOAD, ReplayOptions())
        fake.models_status = 401
        with pytest.raises(UserError, match="--api-key"):
            await replay(fake.url, WORKLOAD, ReplayOptions())
        assert not fake.bodies
        gone = fake.url
    with pytest.raises(UserError, match="no server answers"):
        await replay(gone, WORKLOAD, ReplayOptions())


def test_a_scrape_is_split_into_gauges_and_totals() -> None:
    gauges, totals = parse_metrics(METRICS)
    own = {"worker_memory_bytes/kv/1": 1048576.0, "kv_blocks_total/0": 99.0}
    assert gauges == {"running": 7.0, "kv_usage": pytest.approx(0.6), **own}
    assert totals == {"preemptions": 5.0, "queue_seconds": 1.5, "drops": 2.0, "sheds/queue": 4.0}


@pytest.mark.parametrize("body", [None, [], {}, {"now_s": "1"}, {"now_s": True}])
def test_an_answer_that_is_no_log_is_none(body: object) -> None:
    assert shift_log(body, 1.0) is None


def test_a_log_is_moved_to_the_runs_clock() -> None:
    log = shift_log({"now_s": 50.0, "events": [{"t": 42.0, "kind": "drop"}, {"kind": "x"}, 7]}, 10.0)
    assert log == [{"t": 2.0, "kind": "drop"}]


OFFLINE = LogNormalPair(Lengths(12, 0.0, 12), Lengths(3, 0.0, 3))


async def test_a_batch_beside_the_load_is_flex_and_told_apart(serve) -> None:
    load = Workload(WORKLOAD.rows, "eight", "made up", span_s=0.3)
    async with serve(gap_s=0.01) as fake:
        run = await replay(fake.url, load, ReplayOptions(pool=OfflinePool(OFFLINE, unfinished=2), slo_ttft_s=60))
    flex = [body for body in fake.bodies if body.get("service_tier") == "flex"]
    assert len(fake.bodies) - len(flex) == 8 and len(flex) > 2
    assert run.requests_detail is not None and len(run.requests_detail) == 8 == run.ttft_s.count
    assert run.classes is not None
    offline = run.classes["offline"]
    assert offline["requests"]["completed"] + offline["unfinished"] == len(flex) and offline["unfinished"] <= 2
    assert offline["tokens"]["prompt"] > 0, "of a server without our counters, as clients saw it"
    assert (run.requests.failed, run.requests.cancelled) == (0, 0)


async def test_a_batch_with_an_end_is_waited_for(serve) -> None:
    async with serve() as fake:
        run = await replay(fake.url, WORKLOAD, ReplayOptions(pool=OfflinePool(OFFLINE, num_requests=5)))
    assert run.classes is not None and run.classes["offline"]["requests"]["completed"] == 5
    assert run.requests.completed == 13


async def test_of_a_batch_with_an_end_what_is_cut_off_or_never_sent_has_failed(serve) -> None:
    pool = OfflinePool(OFFLINE, unfinished=2, num_requests=50)
    async with serve(behaviour={9: "hang", 10: "hang"}) as fake:
        run = await replay(fake.url, WORKLOAD, ReplayOptions(pool=pool, total_timeout_s=1.0))
    assert run.classes is not None and run.classes["offline"]["unfinished"] == 0
    counts = run.classes["offline"]["requests"]
    assert counts["submitted"] == 50 == counts["completed"] + counts["failed"] and counts["failed"]
    assert run.requests.submitted == 58 and run.requests.unanswered >= counts["failed"]
    async with serve(behaviour=dict.fromkeys(range(100), "reject")) as fake:
        run = await replay(fake.url, WORKLOAD, ReplayOptions(pool=pool))
    assert run.classes is not None
    rows = run.classes["offline"]["requests_detail"]
    assert len(rows) == 50 and "a request of each sender had failed" in rows[-1]["error"]


async def test_a_batch_that_is_refused_is_not_sent_again_and_again(serve) -> None:
    async with serve(behaviour=dict.fromkeys(range(100), "reject")) as fake:
        run = await replay(fake.url, WORKLOAD, ReplayOptions(pool=OfflinePool(OFFLINE, unfinished=3)))
    assert run.classes is not None and run.classes["offline"]["requests"]["rejected"] == 3
    assert len(fake.bodies) == 11


async def test_offline_requests_of_a_recording_are_flex_again(serve) -> None:
    rows = tuple(TraceRow(0.0, 4, 2, 0, index == 1) for index in range(3))
    async with serve() as fake:
        run = await replay(fake.url, Workload(rows, "mixed", "made up"), ReplayOptions())
    assert sorted(body.get("service_tier", "") for body in fake.bodies) == ["", "", "flex"]
    assert run.ttft_s.count == 2
