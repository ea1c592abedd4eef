from __future__ import annotations

import asyncio
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from jettison.cost.deployment import Deployment, deployment_to_document
from jettison.errors import ConfigError, JettisonError, TraceError
from jettison.report.failures import check_answered
from jettison.report.results import read_results
from jettison.types import ModelShape
from jettison.workload.bench import load_workload, run_bench
from jettison.workload.options import BenchOptions, LoadOptions

BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{second},ChatGPT,{20 + second},{5 + second % 3},0,Conversation log\n" for second in range(0, 60, 2)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(BURSTGPT)
    return path


@pytest.fixture
def bad_trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(BURSTGPT.replace("\n4,ChatGPT", "\nsoon,ChatGPT"))
    return path


async def test_a_bench_prints_and_writes_what_it_measured(serve, trace: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    async with serve(gap_s=0.001) as fake:
        run = await asyncio.to_thread(
            run_bench,
            fake.url,
            BenchOptions(
                trace=trace,
                rate_scale=500.0,
                num_requests=10,
                length_scale=0.5,
                name="first",
                slo_ttft_s=30.0,
                parameter_share=0.5,
                kv_capacity_tokens=1000.0,
                json_out=tmp_path / "out" / "run.json",
                html_out=tmp_path / "out" / "run.html",
            ),
            Console(file=out, width=120),
        )
    assert run.requests.completed == 10
    text = out.getvalue()
    for part in ("TTFT p99", "client lag of first", "parameters' share of memory: 0.5", "time stamps divided by 500"):
        assert part in text
    [stored] = read_results(tmp_path / "out" / "run.json")
    assert stored.requests == run.requests
    fairness = stored.config["fairness"]
    assert fairness["merged_capacity_tokens"] == pytest.approx(1500)
    assert 0 < fairness["mean_load"] < fairness["peak_over_capacity"]
    assert "<h1>jettison bench: first</h1>" in (tmp_path / "out" / "run.html").read_text()


BARE = ModelShape(2, 16, 2, 1, 8, 32, 64, 4)
SHAPE = replace(BARE, shard_bytes=dict.fromkeys(BARE.all_shards, 10_000))
"""Four shards of 10,000 bytes; 128 bytes of KV a token."""
DEPLOYMENT = Deployment("tiny", SHAPE, 3, 70_000, 4_400, 4096, 1024, None)
"""In each of three instances 17 pages: 2 of workspace, 3 a shard, and one for each layer's KV (64 tokens)."""


async def test_the_header_says_what_the_server_tells_of_itself(serve, trace: Path) -> None:
    out = io.StringIO()
    told = {"deployment": deployment_to_document(DEPLOYMENT), "metrics": ""}
    async with serve(**told) as fake:
        options, console = BenchOptions(trace=trace, rate_scale=1000.0, num_requests=4), Console(file=out, width=120)
        run = await asyncio.to_thread(run_bench, fake.url, options, console)
        more = replace(options, kv_capacity_tokens=1000.0, parameter_share=0.5, num_instances=2)
        said = await asyncio.to_thread(run_bench, fake.url, more, console)
    fairness = run.config["fairness"]
    assert fairness["parameter_share"] == pytest.approx(40 / 70)
    assert fairness["kv_capacity_tokens"] == 192, "three times one page of four blocks a layer"
    assert fairness["merged_capacity_tokens"] == 640, "a pipeline of two, one for each layer, and one alone"
    assert "undropped KV capacity, tokens: 192" in out.getvalue()
    assert said.config["fairness"]["merged_capacity_tokens"] == pytest.approx(1500), "what was said comes first"


async def test_a_finished_run_is_kept_whatever_the_server_tells(serve, trace: Path, tmp_path: Path) -> None:
    pipeline = replace(DEPLOYMENT, num_instances=2, budget_bytes=39_000, settings={"overload": "pipeline"})
    out = tmp_path / "run.json"
    async with serve(deployment=deployment_to_document(pipeline), metrics="") as fake:
        options = BenchOptions(trace=trace, rate_scale=1000.0, num_requests=4, json_out=out, quiet=True)
        await asyncio.to_thread(run_bench, fake.url, options)
    [stored] = read_results(out)
    assert stored.requests.completed == 4
    assert stored.config["fairness"]["parameter_share"] is None, "40,000 bytes in instances of 39,000"
    assert stored.config["fairness"]["kv_capacity_tokens"] == 64
    assert stored.config["fairness"]["merged_capacity_tokens"] == 64


async def test_quiet_prints_nothing(serve, trace: Path) -> None:
    out = io.StringIO()
    async with serve() as fake:
        options = BenchOptions(trace=trace, rate_scale=1000.0, endpoint="chat", quiet=True)
        await asyncio.to_thread(run_bench, fake.url, options, Console(file=out))
    assert out.getvalue() == ""
    assert isinstance(fake.bodies[0]["messages"][0]["content"], str)


def test_loads_are_shaped_in_the_stated_order(trace: Path) -> None:
    load = load_workload(LoadOptions(
        trace=trace, slice_s=20, slice_index=1, thin_every=2, rate_scale=2.0, lengths_from=trace,
        length_scale=0.5, max_model_len=16, num_requests=4, duration_s=9.0, seed=1,
    ))  # fmt: skip
    words = (
        "read as",
        "slice 1 of 3",
        "every 2th",
        "divided by 2",
        "lengths taken",
        "multiplied",
        "cut to",
        "kept arr",
    )
    assert len(load.notes) == len(words)
    assert all(word in note for word, note in zip(words, load.notes, strict=True))
    assert [row.arrival_s for row in load.rows] == [0, 2, 4, 6]
    assert load.rows[0].input_tokens == 10  # lengths of the trace's start, not of the slice


def test_without_a_source_the_built_in_burst_is_used() -> None:
    assert load_workload(LoadOptions(seed=4)) == load_workload(LoadOptions(workload="burst", seed=4))
    four, five = (load_workload(LoadOptions(thin=0.5, seed=seed)) for seed in (4, 5))
    assert four.rows != five.rows


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"workload": "burst", "trace": Path("x.csv")}, "not both"),
        ({"workload": "nothing"}, "unknown workload"),
        ({"slice_s": 10.0}, "both its length and its index"),
        ({"slice_s": 10.0, "slice_index": 8}, "has 8 slices"),
        ({"jitter": True}, "jitter"),
        ({"duration_s": 0.001}, "no request is left"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_workload(LoadOptions(**options))


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"parameter_share": 1.0}, "share of memory"), ({"json_out": Path("/proc/none/run.json")}, "cannot be written")],
)
def test_what_would_lose_a_finished_run_is_refused_before_it(trace: Path, options, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run_bench("http://127.0.0.1:9", BenchOptions(trace=trace, **options))


@pytest.mark.parametrize(
    ("name", "told"),
    [("request_timeout_s", "--request-timeout"), ("total_timeout_s", "--total-timeout"), ("slo_ttft_s", "--slo-ttft"),
     ("slo_tpot_s", "--slo-tpot"), ("rate_scale", "--rate-scale"), ("allow_failures", "--allow-failures"),
     ("kv_capacity_tokens", "--kv-capacity-tokens")],
)  # fmt: skip
@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0, 0.0])
def test_numbers_that_are_none_are_refused_before_anything_is_sent(
    trace: Path, name: str, told: str, value: float
) -> None:
    if value <= 0.0 and name in ("allow_failures", "kv_capacity_tokens", "rate_scale"):
        pytest.skip("bounded by its flag, or when the load is shaped")
    with pytest.raises(ConfigError, match=f"^{told} needs a [^\n]* not {value:g}$"):
        run_bench("http://127.0.0.1:9", BenchOptions(trace=trace, **{name: value}))


def test_a_bad_trace_is_refused_before_the_server_is_asked(tmp_path: Path) -> None:
    bad = tmp_path / "bad.csv"
    bad.write_text(BURSTGPT + "x,ChatGPT,1,1,1,log\n")
    with pytest.raises(TraceError, match="line 32"):
        run_bench("http://127.0.0.1:9", BenchOptions(trace=bad))


async def test_failures_come_first_and_percentiles_say_of_how_many(serve, trace: Path, tmp_path: Path) -> None:
    """A server that dies leaves its fastest answers behind."""
    out = io.StringIO()
    behaviour = dict.fromkeys(range(6, 22), "fail") | {22: "reject"}
    async with serve(behaviour=behaviour) as fake:
        options = BenchOptions(
            trace=trace, rate_scale=100.0, num_requests=23, json_out=tmp_path / "run.json",
            html_out=tmp_path / "run.html",
        )  # fmt: skip
        run = await asyncio.to_thread(run_bench, fake.url, options, Console(file=out, width=160))
    lines = out.getvalue().splitlines()
    told = "run: 17 of 23 requests were not answered (16 failed, 1 rejected); the first error: HTTP 500"
    assert lines[0].startswith(told)
    rows = [line.split("│")[0].strip() for line in lines if "│" in line]
    assert rows[:4] == ["requests failed", "requests rejected", "requests completed", "requests submitted"]
    assert rows.index("TTFT, requests") < rows.index("TTFT p99")
    assert next(line for line in lines if line.startswith("TTFT, requests")).split("│")[1].strip() == "6 of 23"
    document = json.loads((tmp_path / "run.json").read_text())
    assert next(iter(document)) == "failures"
    [failed] = document["failures"]
    assert (failed["run"], failed["submitted"], failed["failed"], failed["rejected"]) == ("run", 23, 16, 1)
    assert failed["first_error"].startswith("HTTP 500")
    assert document["runs"][0]["ttft_s"]["count"] == 6
    page = (tmp_path / "run.html").read_text()
    assert page.index("17 of 23 requests were not answered") < page.index("<table")
    with pytest.raises(JettisonError, match="17 of 23"):
        check_answered([run])
    with pytest.raises(JettisonError, match="17 of 23"):
        check_answered([run], 0.7)
    check_answered([run], 0.75)


async def test_bad_rows_are_left_out_where_asked_and_named(serve, bad_trace: Path) -> None:
    trace = bad_trace
    with pytest.raises(TraceError, match="1 bad row, nothing loaded: line 4: Timestamp is 'soon'"):
        load_workload(LoadOptions(trace=trace))
    out = io.StringIO()
    async with serve() as fake:
        options = BenchOptions(trace=trace, rate_scale=1000.0, skip_bad_rows=True, lengths_from=trace)
        run = await asyncio.to_thread(run_bench, fake.url, options, Console(file=out, width=160, force_terminal=True))
    assert run.requests.submitted == 29
    told = "1 bad row of trace.csv left out: line 4: Timestamp is 'soon', a number is expected"
    assert out.getvalue().count(f"mind: {told}") == 1, "arrivals and lengths are of one file: said once"
    assert run.config["workload"]["notes"].count(told) == 2
