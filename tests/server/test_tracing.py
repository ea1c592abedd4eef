"""Requests as traces: spans and events from rows and records, the caller's context, a collector over HTTP, and one that
is away."""

from __future__ import annotations

import asyncio
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event, Thread

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from fake_engine import FakeEngine
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jettison.config import EngineConfig
from jettison.core.ports import Record
from jettison.errors import ConfigError
from jettison.live.engine.api import LogPart
from jettison.server import tracing
from jettison.server.console.journal import Row
from jettison.server.console.settings import ConsoleSettings, no_records
from jettison.server.tracing import NO_OTEL, Traces, traces_to

S = 1_000_000_000
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def row(**told):
    """A request that waited from second 1 to 2, and got its first token at 3 and its last at 5."""
    usual = {
        "request_id": "r-0", "names": ("cmpl-1", "x-1"), "tenant": "", "is_offline": False, "reason": "stop",
        "arrival_ns": S, "scheduled_ns": 2 * S, "first_ns": 3 * S, "ended_ns": 5 * S, "num_prompt": 100,
        "num_cached": 10, "num_output": 11, "num_preemptions": 1, "num_beside": 7,
    }  # fmt: skip
    return Row(**(usual | told))


async def spans_of(*rows, records=()):
    """Name -> span."""
    exporter = InMemorySpanExporter()
    traces = Traces(exporter, lambda *_: LogPart(records, 0, is_kept=True), "fake")
    traces.note(rows)
    await traces.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def lasts_s(span):
    return (span.end_time - span.start_time) / S


async def test_stages_moves_and_what_happened_meanwhile():
    other = {"source": 0, "destination": 1, "stop_ms": 1.0}
    drop = {"workers": [0, 1], "group": 2, "bytes_to_kv": 1, "decision_to_serving_ms": 500.0, "because": "memory binds"}
    records = [
        Record("drop", S // 2, {**drop, "group": 9}),  # before it came
        Record("drop", int(1.2 * S), drop),
        Record("preempted", 4 * S, {"group": 2, "request_ids": ["r-0"], "tokens": 9}),
        Record("migrated", int(4.5 * S), {"request": "r-0", "ms": 250.0, **other}),
        Record("migrated", int(4.6 * S), {"request": "other", "ms": 250.0, **other}),
    ]
    spans = await spans_of(row(), records=records)
    assert set(spans) == {"llm_request", "queue", "prefill", "decode", "drop", "migrated"}
    root = spans["llm_request"]
    assert root.kind is SpanKind.SERVER and root.parent is None and lasts_s(root) == 4
    assert [lasts_s(spans[name]) for name in ("queue", "prefill", "decode")] == [1, 1, 2]
    assert all(span.parent.span_id == root.context.span_id for name, span in spans.items() if span is not root)
    assert root.attributes["gen_ai.usage.completion_tokens"] == 11
    assert root.attributes["gen_ai.latency.time_in_queue"] == 1.0
    assert root.attributes["jettison.http_request_id"] == "x-1"
    told = {name: [event.name for event in spans[name].events] for name in ("queue", "prefill", "decode")}
    assert told == {"queue": ["drop"], "prefill": [], "decode": ["preempted", "migrated", "migrated"]}
    assert "memory" in spans["drop"].attributes["jettison.why"]
    assert lasts_s(spans["drop"]) == pytest.approx(0.2), "from its arrival on"
    assert lasts_s(spans["migrated"]) == pytest.approx(0.25)
    mine = [event.attributes["jettison.is_about_this_request"] for event in spans["decode"].events]
    assert mine == [True, True, False]


async def test_stages_of_requests_that_did_not_go_the_whole_way():
    queued = await spans_of(row(scheduled_ns=None, first_ns=None, reason="abort"))
    assert set(queued) == {"llm_request", "queue"} and lasts_s(queued["queue"]) == 4
    unknown = await spans_of(row(scheduled_ns=None, is_timed=False, reason="error"))
    assert set(unknown) == {"llm_request", "queue and prefill", "decode"}
    assert unknown["llm_request"].status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(("header", "is_taken"), [
    (f"00-{TRACE}-{PARENT}-01", True), ("", False), ("nonsense", False), (f"00-{'0' * 32}-{PARENT}-01", False),
])
async def test_a_request_over_http_becomes_a_trace_of_its_caller(serve, header, is_taken):
    exporter = InMemorySpanExporter()
    traces = Traces(exporter, no_records, "fake")
    # Without a console the rows are made all the same.
    async with serve(FakeEngine(), trace_request=traces.note, console=ConsoleSettings(is_on=False)) as served:
        headers = {"traceparent": header} if header else {}
        body = {"model": "fake", "prompt": "hi", "max_tokens": 3, "n": 2}
        answer = await served.http.post(f"{served.url}/v1/completions", json=body, headers=headers)
        assert (await served.http.get(f"{served.url}/console/data")).status_code == 404
    await traces.close()
    roots = [span for span in exporter.get_finished_spans() if span.name == "llm_request"]
    assert len(roots) == 2
    assert all(span.attributes["gen_ai.request.id"] == answer.json()["id"] for span in roots)
    for span in roots:
        assert (f"{span.context.trace_id:032x}" == TRACE) is is_taken
        assert (span.parent is not None and f"{span.parent.span_id:016x}" == PARENT) is is_taken


@pytest.fixture
def collector():
    """``(url, bodies)``: takes whatever is posted."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=partial(server.serve_forever, 0.02))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
async def test_a_collector_gets_them_over_http(collector, path):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    url, bodies = collector
    traces = traces_to(url + path, no_records, "fake")
    traces.start()
    traces.note((row(),))
    await traces.close()
    (where, body), = bodies
    assert where == "/v1/traces"
    (of_server,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert {each.key: each.value.string_value for each in of_server.resource.attributes}["service.name"] == "jettison"
    assert {span.name for span in of_server.scope_spans[0].spans} == {"llm_request", "queue", "prefill", "decode"}


class Collector(SpanExporter):
    """An exporter under the test's control."""

    def __init__(self):
        self.names, self.takes, self.answers, self.began = [], True, Event(), Event()
        self.answers.set()

    def export(self, spans):
        self.began.set()
        self.answers.wait()
        if self.takes:
            self.names += [span.name for span in spans]
        return SpanExportResult.SUCCESS if self.takes else SpanExportResult.FAILURE

    def shutdown(self):
        self.names.append("the end")


def log_of(*records):
    return lambda *_: LogPart(records, 0, is_kept=True)


async def test_a_collector_that_is_away_is_told_of_once(caplog, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    traces = traces_to("http://127.0.0.1:9", no_records, "fake")
    traces.start()
    for _ in range(3):
        traces.note((row(),))
        await traces.flush()
    await traces.close()
    (said,) = caplog.messages  # of all loggers
    assert "traces are lost from now on" in said and "Failed to export" in said, "the exporter's own words"


async def test_a_collector_that_comes_back_is_told_of(caplog):
    collector = Collector()
    traces = Traces(collector, no_records, "fake")
    for collector.takes in (True, False, False, True, True):
        traces.note((row(),))
        await traces.flush()
    await traces.close()
    lost, back = caplog.messages
    assert "lost from now on" in lost and "again; 8 spans were lost" in back
    assert len(collector.names) == 3 * 4 + 1


@pytest.mark.parametrize("waits", [True, False])
async def test_the_end_does_not_wait_for_a_collector_that_hangs(waits, caplog, monkeypatch):
    monkeypatch.setattr(tracing, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(tracing, "PERIOD_S", 0.0)
    collector = Collector()
    collector.answers.clear()
    traces = Traces(collector, no_records, "fake")
    for _ in range(400):
        traces.note((row(),))
    traces.start()
    await asyncio.to_thread(collector.began.wait)
    (thread,) = [each for each in threading.enumerate() if each.name == "jettison-traces"]
    await traces.close(waits=waits)
    assert thread.is_alive() and thread.daemon, "it keeps no process alive"
    assert not collector.names and len(caplog.messages) == waits
    collector.answers.set()
    await asyncio.to_thread(thread.join)


async def test_spans_that_are_being_made_at_the_end_are_sent(monkeypatch):
    monkeypatch.setattr(tracing, "PERIOD_S", 0.0)
    monkeypatch.setattr(tracing, "TIMEOUT_S", 60.0)
    collector = Collector()
    collector.answers.clear()
    traces = Traces(collector, no_records, "fake")
    for _ in range(400):
        traces.note((row(),))
    traces.start()
    await asyncio.to_thread(collector.began.wait)
    traces.note((row(),))
    closing = asyncio.create_task(traces.close())
    await asyncio.sleep(0)
    collector.answers.set()
    await closing
    assert len(collector.names) == 401 * 4 + 1 and collector.names[-1] == "the end"


async def test_a_bad_record_costs_its_event_and_no_trace(caplog, monkeypatch):
    monkeypatch.setattr(tracing, "PERIOD_S", 0.0)
    collector, bad = Collector(), Record("drop", 2 * S, {"group": 2})
    traces = Traces(collector, log_of(bad, Record("preempted", 4 * S, {"group": 2, "request_ids": [], "tokens": 9})),
                    "fake")
    traces.start()
    traces.note((row(), row(names=object())))  # a row that no span can be made of
    await asyncio.to_thread(collector.began.wait)
    collector.began.clear()
    traces.note((row(),))
    await asyncio.to_thread(collector.began.wait)
    await traces.close()
    assert collector.names.count("decode") == 2
    assert any("record of the event log" in said for said in caplog.messages)


async def test_a_log_that_cannot_be_read_ends_neither_tracing_nor_the_end(caplog, monkeypatch):
    monkeypatch.setattr(tracing, "PERIOD_S", 0.0)
    asked = Event()

    def broken(*_):
        asked.set()
        raise OSError("no log")

    traces = Traces(Collector(), broken, "fake")
    traces.start()
    for _ in range(2):
        traces.note((row(),))
        await asyncio.to_thread(asked.wait)
        asked.clear()
    traces.note((row(),))
    await traces.close()
    assert "no log" in caplog.messages[0]


async def test_more_than_can_be_made_in_time_is_left_out_and_counted(caplog, monkeypatch):
    monkeypatch.setattr(tracing, "MOST_WAITING", 3)
    collector = Collector()
    traces = Traces(collector, no_records, "fake")
    for _ in range(3):
        traces.note((row(), row()))
    await traces.close()
    assert collector.names.count("llm_request") == 2 and "2 requests have no trace" in caplog.text


async def test_a_period_full_of_requests_lets_the_event_loop_through(monkeypatch):
    monkeypatch.setattr(tracing, "SLICE_S", 0.0)
    rests = []

    class Hurry(Event):
        def wait(self, timeout=None):
            rests.append(self.is_set())

    traces = Traces(Collector(), no_records, "fake")
    traces._hurry = Hurry()
    for _ in range(5):
        traces.note((row(),))
    await traces.flush()
    assert rests == [False] * 5
    traces.note((row(),))
    await traces.close()
    assert rests[5:] == [True], "the end does not rest"


def test_endpoints_that_cannot_be(monkeypatch):
    assert traces_to(None, no_records, "fake") is None
    for endpoint in ("grpc://host:4317", "host:4317", "http://"):
        with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint needs http://HOST:PORT .* over HTTP"):
            EngineConfig.resolve(model="m", otlp_traces_endpoint=endpoint)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError) as refused:
        traces_to("http://host:4318", no_records, "fake")
    assert str(refused.value) == NO_OTEL
