"""The small endpoints and the metrics."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine, bytes_of
from prometheus_client.parser import text_string_to_metric_families
from served import CHAT_TEMPLATE, eventually, sse_events

from jettison.core.cluster import ClusterCore, ClusterParams
from jettison.core.observing import OfflineGauges
from jettison.core.serving.group import SchedulerLimits
from jettison.core.totals import counters
from jettison.live.engine.api import RequestTimings
from jettison.live.engine.driver import Delays
from jettison.policy.slo import Objectives
from jettison.server.metrics import DESCRIBED_COUNTERS, ServerMetrics
from jettison.types import EMBED_SHARD, HEAD_SHARD, ModelShape, layer_shard

VLLM_NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket", "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:cache_config_info",
}  # fmt: skip


@pytest.mark.parametrize(
    ("state", "health", "ping"),
    [("ready", 200, 200), ("loading", 503, 200), ("draining", 503, 200), ("failed", 503, 503)],
)
async def test_probes(app_client, app_engine, state, health, ping):
    app_engine.engine_state = state
    answer = await app_client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (health, state)
    assert (await app_client.get("/ping")).status_code == ping


async def test_health_tells_what_it_is_given(serve):
    async with serve(FakeEngine(), health_details={"dtype": "float64", "token_identity": True}) as served:
        health = (await served.http.get(f"{served.url}/health")).json()
    assert health == {
        "dtype": "float64", "token_identity": True, "status": "ready", "model": "fake",
        "workers": {"alive": 2, "total": 2}, "degraded": False,
    }


async def test_health_tells_which_products_workers_compute_themselves(app_client, app_engine):
    health = (await app_client.get("/health")).json()
    assert not {"own_products", "own_products_of_some"} & health.keys()
    app_engine.own_products = (("1024 x 1024 in bfloat16", "64 x 8 in float32"), ("64 x 8 in float32",))
    health = (await app_client.get("/health")).json()
    assert health["own_products"] == ["1024 x 1024 in bfloat16", "64 x 8 in float32"]
    assert health["own_products_of_some"] == ["64 x 8 in float32"]


async def test_health_with_workers_that_are_down(app_client, app_engine):
    app_engine.dead_workers = {1}
    answer = await app_client.get("/health")
    health = answer.json()
    assert (answer.status_code, health["status"], health["degraded"]) == (200, "ready", True)
    app_engine.dead_workers = {0, 1}
    answer = await app_client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "recovering")
    assert answer.json()["workers"] == {"alive": 0, "total": 2}
    assert (await app_client.get("/ping")).status_code == 200, "a server whose workers come back is not to be ended"
    app_engine.engine_state = "failed"
    assert (await app_client.get("/health")).json()["status"] == "failed"


async def test_health_with_workers_that_cannot_be_filled(app_client, app_engine):
    """They live, and what they should serve is not to be had: one that is not, and then none."""
    app_engine.troubles = ("worker 1 could not load layer:2: the file has changed",)
    answer = await app_client.get("/health")
    health = answer.json()
    assert (answer.status_code, health["degraded"], health["reasons"]) == (200, True, list(app_engine.troubles))
    app_engine.has_groups = False
    answer = await app_client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "recovering")


async def test_health_with_a_front_end_that_is_down(app_client, app_engine):
    fronts = app_client._transport.app.state.jettison.fronts = SimpleNamespace(
        health=lambda: {"front_ends": {"alive": 1, "total": 2}}, troubles=lambda: ["one is down"])
    app_engine.troubles = ("a worker cannot load",)
    health = (await app_client.get("/health")).json()
    assert (health["status"], health["degraded"], health["front_ends"]["alive"]) == ("ready", True, 1)
    assert health["reasons"] == ["a worker cannot load", "one is down"]
    app_engine.troubles, fronts.troubles = (), list
    health = (await app_client.get("/health")).json()
    assert not health["degraded"] and "reasons" not in health


async def test_requests_without_a_group_are_waiting_ones(app_client, app_engine):
    app_engine.num_unplaced = 3
    assert (await app_client.get("/load")).json()["num_requests_waiting"] == 3
    assert 'vllm:num_requests_waiting{model_name="fake"} 3.0' in (await app_client.get("/metrics")).text


async def test_tokenizer_over_http(app_client):
    answer = (await app_client.post("/tokenize", json={"prompt": "é</s>", "return_token_strs": True})).json()
    assert answer == {"count": 3, "max_model_len": 400, "tokens": [195, 169, 257], "token_strs": ["Ã", "©", "</s>"]}
    assert (await app_client.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": "é</s>"}
    chat = (await app_client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})).json()
    assert bytes(chat["tokens"][1:]) == b"user: x\nassistant: "
    info = (await app_client.get("/tokenizer_info")).json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", "<pad>")
    assert info["chat_template"] == CHAT_TEMPLATE


async def test_tokenizer_requests_have_limits_of_their_own(serve, tokenizer, monkeypatch):
    limits = {"max_side_jobs": 2, "max_running_side_jobs": 1, "max_side_body_bytes": 1000, "thread_tokenize_chars": 0}
    go, num_running, most_running = threading.Event(), 0, 0

    def encode(self, text, add_special_tokens=True):
        nonlocal num_running, most_running
        if text == "wait":
            num_running += 1
            most_running = max(most_running, num_running)
            go.wait(10)
            num_running -= 1
        return [1]

    monkeypatch.setattr(type(tokenizer), "encode", encode)
    engine = FakeEngine()
    engine.max_waiting = 1
    async with serve(engine, **limits) as served:
        admission = served.state.admission
        jobs = [asyncio.create_task(served.post("/tokenize", {"prompt": "wait"})) for _ in range(2)]
        await eventually(lambda: admission.num_side_jobs == 2 and num_running == 1)
        assert (admission.num_active, admission.num_arriving) == (0, 0)
        assert (await served.completion(max_tokens=1)).status_code == 200, "the queue for one is still free"
        for path, document in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            answer = await served.post(path, document)
            assert (answer.status_code, "retry-after-ms" in answer.headers) == (429, True)
        go.set()
        assert [answer.status_code for answer in await asyncio.gather(*jobs)] == [200, 200]
        assert most_running == 1
        assert (await served.post("/tokenize", {"prompt": "x" * 2000})).status_code == 413
        assert (await served.post("/tokenize", {"prompt": 3})).status_code == 400
        assert (admission.num_side_jobs, admission._num_buffered_bytes) == (0, 0)
        metrics = (await served.http.get(f"{served.url}/metrics")).text
        assert 'jettison:sheds_total{model_name="fake",reason="tokenizer_busy"} 2.0' in metrics


async def test_small_answers(app_client):
    assert (await app_client.get("/version")).json()["version"]
    assert (await app_client.get("/load")).json()["server_load"] == 0
    assert (await app_client.get("/v1/models")).json()["data"][0]["max_model_len"] == 400
    assert (await app_client.get("/jettison/events")).status_code == 404


async def test_event_log(serve):
    log = {"now_s": 2.0, "events": [{"t": 1.0, "kind": "drop"}]}
    async with serve(FakeEngine(), event_log=lambda: log) as served:
        assert (await served.http.get(f"{served.url}/jettison/events")).json() == log


async def test_metrics(serve):
    async with serve(FakeEngine(tokens_per_event=2)) as served:
        await served.completion(max_tokens=5)
        await served.completion(max_tokens=5, stop="a", seed=0, prompt=["a", "b"])
        await served.completion(max_tokens=5000)
        answer = await served.http.get(f"{served.url}/metrics")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    assert {sample.name for sample in samples} >= VLLM_NAMES
    assert all(sample.labels["model_name"] == "fake" for sample in samples)
    model = ("model_name", "fake")
    values = {
        (sample.name, *(value for key, value in sorted(sample.labels.items()) if (key, value) != model)): sample.value
        for sample in samples
    }
    assert values["vllm:request_success_total", "length"] == 1
    assert values["vllm:request_success_total", "stop"] == 2
    assert values["vllm:prompt_tokens_total",] == 2 + 1 + 1
    assert values["vllm:generation_tokens_total",] == 5 + 1 + 1, "what came behind a stop string does not count"
    assert values["vllm:request_generation_tokens_sum",] == 5 + 1 + 1
    sheds = {key[1]: value for key, value in values.items() if key[0] == "jettison:sheds_total"}
    reasons = ("queue_full", "key_limit_reached", "tokenizer_busy", "loading", "draining", "failed")
    assert sheds == dict.fromkeys(reasons, 0)
    assert values["vllm:time_to_first_token_seconds_count",] == 3
    assert values["vllm:inter_token_latency_seconds_count",] == 4
    assert values["vllm:request_decode_time_seconds_count",] == 3
    assert values["vllm:cache_config_info", "16", "100"] == 1
    assert values["vllm:num_preemptions_total",] == 3
    assert values["jettison:drops_total",] == 1
    assert values["jettison:drop_seconds_total",] == 0.25
    assert values["jettison:returned_bytes_total",] == 7
    assert values["jettison:restores_total",] == 0
    assert values["jettison:worker_losses_total",] == 2
    assert values["jettison:recovery_seconds_total",] == 0.5
    assert values["jettison:worker_joins_total",] == values["jettison:recoveries_total",] == 0
    assert values["jettison:rebalanced_total",] == 0
    assert values["jettison:kv_blocks_total", "0"] == 100
    assert values["jettison:group_size", "0"] == 2
    assert values["jettison:dropped_parameter_bytes", "1"] == 100
    assert values["jettison:worker_memory_bytes", "kv", "0"] == 500


async def test_every_metric_says_what_it_is(app_client):
    families = list(text_string_to_metric_families((await app_client.get("/metrics")).text))
    assert len(families) > 50
    assert [f.name for f in families if not f.documentation.endswith(".")] == []


def test_every_counter_of_the_engine_has_a_text():
    """One without is exported all the same, under its bare name."""
    shape = ModelShape(1, 16, 2, 1, 8, 32, 64, 4, False, dict.fromkeys((EMBED_SHARD, layer_shard(0), HEAD_SHARD), 1))
    core = ClusterCore(shape, SchedulerLimits(4, 8, 2, 100), ClusterParams(), {0: 4}, b"")
    assert counters(core).keys() | Delays().totals().keys() <= DESCRIBED_COUNTERS


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_counted_as_in_usage(serve, stream):
    engine = FakeEngine(bytes_of("one two three"), tokens_per_event=3)
    async with serve(engine) as served:
        usages = []
        for fields in ({"max_tokens": 7}, {"max_tokens": 50, "stop": "two"}, {"max_tokens": 0}, {"n": 2, "stop": "n"}):
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = await served.completion(**fields, **options)
            document = json.loads(sse_events(answer.text)[-2]) if stream else answer.json()
            usages.append(document["usage"]["completion_tokens"])
        assert usages == [7, 7, 0, 4]
        assert served.state.metrics.num_generation_tokens == sum(usages)
        assert served.state.metrics.output_size.count == 5
        assert served.state.admission.num_choices == 0


async def test_histograms_count_into_the_right_bucket(app_client):
    from jettison.server.metrics import Histogram

    histogram = Histogram("h", "help", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    samples = histogram.family("m").samples
    buckets = {sample.labels["le"]: sample.value for sample in samples if "le" in sample.labels}
    assert buckets == {"1.0": 2, "2.0": 3, "+Inf": 4}
    assert histogram.count == 4


async def test_what_offline_requests_do_can_be_read(app_client, app_engine):
    app_engine.offline = OfflineGauges(5, 4, 3, 2, 1, 7)
    text = (await app_client.get("/metrics")).text
    names = ("offline_waiting", "offline_running", "offline_hosted", "offline_checkpointed", "offline_host_blocks",
             "offline_blocks")  # fmt: skip
    for name, value in zip(names, (5, 4, 3, 2, 1, 7), strict=True):
        assert f'jettison:{name}{{group="0",model_name="fake"}} {value}.0' in text
    assert 'jettison:checkpoint_lag_blocks{model_name="fake"} 6.0' in text
    assert 'jettison:offline_unplaced{model_name="fake"} 0.0' in text


async def test_what_rungs_show_can_be_read(app_client, app_engine):
    app_engine.gauges = {"devices_needed": 2.0, "own_gauge": 1.5}
    text = (await app_client.get("/metrics")).text
    assert 'jettison:devices_needed{model_name="fake"} 2.0' in text
    assert 'jettison:own_gauge{model_name="fake"} 1.5' in text


@pytest.mark.parametrize(("slo", "within", "gaps_within"), [
    (Objectives(60.0, 60.0), 2, 8), (Objectives(0.0, 60.0), 0, 8), (Objectives(60.0, 0.0), 0, 0),
    (Objectives(None, 60.0), 2, 8),
])  # fmt: skip
async def test_objectives_are_judged_by_request_and_by_gap(app_client, app_engine, slo, within, gaps_within):
    from jettison.workload.observe import parse_metrics

    async def ask(**fields):
        body = {"model": "fake", "prompt": "x", "max_tokens": 5} | fields
        assert (await app_client.post("/v1/completions", json=body)).status_code in (200, 500)

    await ask()  # no objective is known yet
    app_engine.slo = slo
    await ask()
    await ask()
    await ask(service_tier="flex")
    await ask(max_tokens=0)
    gauges, totals = parse_metrics((await app_client.get("/metrics")).text)
    judged = {name: totals[f"slo_online_{name}"] for name in ("requests", "requests_within", "gaps", "gaps_within")}
    assert judged == {"requests": 2, "requests_within": within, "gaps": 8, "gaps_within": gaps_within}
    assert gauges["slo_tpot_seconds"] == slo.tpot_s and gauges.get("slo_ttft_seconds") == slo.ttft_s
    app_engine.fail_after = 0
    await ask()
    _, totals = parse_metrics((await app_client.get("/metrics")).text)
    assert (totals["slo_online_requests"], totals["slo_online_requests_within"]) == (3, within), "it has kept nothing"


@pytest.mark.parametrize("state", ["loading", "ready", "draining", "failed"])
async def test_the_state_is_a_metric(app_client, app_engine, state):
    """A server that loads has no groups, and that is no fault."""
    app_engine.engine_state = state
    text = (await app_client.get("/metrics")).text
    told = dict(re.findall(r'^jettison:engine_state\{model_name="fake",state="(\w+)"\} (\S+)$', text, re.MULTILINE))
    assert told == {name: "1.0" if name == state else "0.0" for name in ("loading", "ready", "draining", "failed")}


async def test_the_replay_client_reads_our_metrics(app_client):
    from jettison.workload.observe import parse_metrics

    gauges, totals = parse_metrics((await app_client.get("/metrics")).text)
    assert {"running", "queue", "kv_usage"} <= set(gauges)
    assert {"worker_memory_bytes/kv/0", "worker_memory_bytes/parameters/1"} <= set(gauges)
    assert {"preemptions", "drops", "restores", "exchanged_bytes", "pulled_bytes", "recomputed_tokens"} <= set(totals)
    assert not [name for name in gauges if re.search(r"_total$", name) and name != "kv_blocks_total/0"]


def test_what_was_observed_since_is_all_but_what_was_before():
    def metrics():
        return ServerMetrics(FakeEngine(), "fake")

    def count(into, number):
        into.count_shed("draining")
        into.count_shed(f"new {number}")
        timings = RequestTimings(0, 250_000_000, 500_000_000, 1_000_000_000)  # whose sums are exact in binary
        into.count_finished("stop", 3 * number, 4 * number + 1, timings)
        into.num_prompt_tokens += 3 * number
        into.num_generation_tokens += 5 * number
        into.ttft.observe(0.5 * number)
        kept = into.attainment
        kept.num_requests, kept.num_requests_within = kept.num_requests + 2, kept.num_requests_within + 1
        kept.num_gaps, kept.num_gaps_within = kept.num_gaps + 4, kept.num_gaps_within + 3

    whole, part = metrics(), metrics()
    count(whole, 1)
    before = whole.observed()
    count(whole, 2)
    count(part, 2)
    told = whole.observed().since(before)
    assert told.sheds.pop("new 1") == 0 and told == part.observed()
