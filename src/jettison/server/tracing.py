"""Requests as OpenTelemetry traces: queue, prefill and decode as spans, moves of memory as spans and events.

They are made of what the console's "a request's way" is made of: the journal's rows and the event log's records. A
request that ends costs one append. Once a second the event loop reads the log for all that have ended, and a thread
makes the spans; the library's own thread sends them. Needs the extra ``otel``. Names and attributes of a request's span
are vLLM's (``llm_request``, ``gen_ai.*``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jettison.core.ports import Record
from jettison.errors import ConfigError
from jettison.server.console.journal import Row, Rows
from jettison.server.console.settings import RecentRecords
from jettison.server.console.way import MOST_EVENTS, is_about
from jettison.server.console.words import KINDS, Told, told_all
from jettison.types import NANOSECONDS

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
MOST_WAITING = 20_000
"""Requests that ended and are no spans yet; more are left out, and counted."""
MOST_RECORDS = 500
"""Records that are read for the requests of one period: as many as for one request's way."""
TIMEOUT_S = 3.0
"""A collector that does not take a batch of spans in this time, retries included, loses it: the server's end waits for
the last batch."""
PATH = "/v1/traces"
"""Where a collector takes traces over HTTP, if the endpoint names no path."""

NO_OTEL = "--otlp-traces-endpoint needs OpenTelemetry, which is not installed: pip install 'jettison[otel]'"

LASTED = {
    "drop": "decision_to_serving_ms", "migrated": "ms", "restore_done": "ms", "asleep": "ms", "woken": "ms",
}  # fmt: skip
"""Kinds of records that tell how long a move took, and the field that does: these become spans."""


class Traces:
    """Of one server. ``start`` and ``close`` once."""

    def __init__(self, exporter: SpanExporter, records: RecentRecords, model_name: str) -> None:
        """``exporter`` is called in a thread. Raises ConfigError where OpenTelemetry is not installed."""
        self._provider = _provider(exporter)
        self._tracer = self._provider.get_tracer("jettison")
        self._records = records
        self._model_name = model_name
        self._waiting: list[Rows] = []
        self._num_left_out = 0
        self._task: asyncio.Task[None] | None = None

    def note(self, rows: Rows) -> None:
        """A request has ended."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(rows)
        else:
            self._num_left_out += 1

    def start(self) -> None:
        """Make spans from now on, in the running event loop."""
        self._task = asyncio.create_task(self._run(), name="jettison-traces")

    async def close(self) -> None:
        """Send what is left."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self.flush()
        await asyncio.to_thread(self._provider.shutdown)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.flush()

    async def flush(self) -> None:
        """Make the spans of all requests that have ended."""
        if self._num_left_out:
            logger.warning("%d requests have no trace: too many ended in a second", self._num_left_out)
            self._num_left_out = 0
        if not self._waiting:
            return
        ended, self._waiting = self._waiting, []
        first_ns = min(row.arrival_ns for rows in ended for row in rows)
        part = self._records(first_ns - 1, MOST_RECORDS, KINDS)
        wall_ns = time.time_ns() - time.monotonic_ns()
        await asyncio.to_thread(self._make_all, ended, told_all(part.records), wall_ns)

    def _make_all(self, ended: Sequence[Rows], told: Sequence[tuple[Record, Told]], wall_ns: int) -> None:
        for rows in ended:
            for row in rows:
                _Maker(self._tracer, row, wall_ns).make(told, self._model_name)


class _Maker:
    """Makes the spans of one choice of a request. ``wall_ns``: what turns the monotonic clock into the epoch's."""

    def __init__(self, tracer: Any, row: Row, wall_ns: int) -> None:
        self._tracer = tracer
        self._row = row
        self._wall_ns = wall_ns
        self._end_ns = row.ended_ns or row.arrival_ns

    def make(self, told: Sequence[tuple[Record, Told]], model_name: str) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        row = self._row
        parent = _context(row.trace_parent)
        root = self._begin("llm_request", row.arrival_ns, parent, _attributes(row, model_name), SpanKind.SERVER)
        if row.reason == "error":
            root.set_status(Status(StatusCode.ERROR, "the request failed"))
        inside = set_span_in_context(root)
        mine = [each for each in told if row.arrival_ns <= each[0].time_ns <= self._end_ns]
        mine = sorted(mine, key=lambda each: (not is_about(each[0], row), each[0].time_ns))[:MOST_EVENTS]
        self._stages(inside, mine)
        for record, said in mine:
            self._move(inside, record, said)
        root.end(self._wall_ns + self._end_ns)

    def _begin(
        self, name: str, at_ns: int, context: Context | None, attributes: Mapping[str, Any], kind: Any = None
    ) -> Span:
        told = {} if kind is None else {"kind": kind}
        return self._tracer.start_span(
            name, context, attributes=attributes, start_time=self._wall_ns + at_ns, **told)

    def _stages(self, inside: Context, told: Sequence[tuple[Record, Told]]) -> None:
        """Queue, prefill and decode, each with what the server did meanwhile as its events."""
        row = self._row
        first_ns = row.first_ns or self._end_ns
        if row.scheduled_ns is None and not row.is_timed:
            stages = [("queue and prefill", row.arrival_ns, first_ns)]
        else:
            until_ns = min(row.scheduled_ns or first_ns, first_ns)
            stages = [("queue", row.arrival_ns, until_ns)]
            if row.scheduled_ns is not None:
                stages.append(("prefill", until_ns, first_ns))
        if row.first_ns is not None:
            stages.append(("decode", first_ns, self._end_ns))
        at = 0
        told = sorted(told, key=lambda each: each[0].time_ns)
        for name, begin_ns, end_ns in stages:
            span = self._begin(name, begin_ns, inside, {})
            while at < len(told) and (told[at][0].time_ns <= end_ns or name == stages[-1][0]):
                record, said = told[at]
                span.add_event(record.kind, self._words(record, said), self._wall_ns + record.time_ns)
                at += 1
            span.end(self._wall_ns + end_ns)

    def _move(self, inside: Context, record: Record, said: Told) -> None:
        """A span of a move that says how long it took: a migration only of this request, all else of any."""
        took_ms = record.fields.get(LASTED.get(record.kind, ""))
        if not isinstance(took_ms, int | float) or (record.kind == "migrated" and not is_about(record, self._row)):
            return
        begin_ns = max(self._row.arrival_ns, record.time_ns - round(took_ms * NANOSECONDS / 1000))
        span = self._begin(record.kind, begin_ns, inside, self._words(record, said))
        span.end(self._wall_ns + record.time_ns)

    def _words(self, record: Record, said: Told) -> dict[str, Any]:
        return {"jettison.rung": said.rung, "jettison.what": said.what, "jettison.why": said.why,
                "jettison.is_about_this_request": is_about(record, self._row)}  # fmt: skip


def _attributes(row: Row, model_name: str) -> dict[str, Any]:
    """Of the span of a request: vLLM's names, and our own."""
    end_ns = row.ended_ns or row.arrival_ns
    found: dict[str, Any] = {
        "gen_ai.response.model": model_name, "gen_ai.request.id": row.names[0] if row.names else row.request_id,
        "gen_ai.request.n": row.num_choices, "gen_ai.usage.prompt_tokens": row.num_prompt,
        "gen_ai.usage.completion_tokens": row.num_output,
        "gen_ai.latency.e2e": (end_ns - row.arrival_ns) / NANOSECONDS, "jettison.cached_tokens": row.num_cached,
        "jettison.preemptions": row.num_preemptions, "jettison.is_offline": row.is_offline,
        "jettison.finish_reason": row.reason,
    }  # fmt: skip
    if len(row.names) > 1:
        found["jettison.http_request_id"] = row.names[1]
    if row.ttft_ns is not None:
        found["gen_ai.latency.time_to_first_token"] = row.ttft_ns / NANOSECONDS
    if row.scheduled_ns is not None:
        found["gen_ai.latency.time_in_queue"] = (row.scheduled_ns - row.arrival_ns) / NANOSECONDS
    return found


def _context(trace_parent: str) -> Context | None:
    """The caller's span, of the header ``traceparent``; one that is none begins a trace of its own."""
    if not trace_parent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": trace_parent})


def _provider(exporter: SpanExporter) -> TracerProvider:
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(NO_OTEL) from None
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "jettison"}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def traces_to(endpoint: str | None, records: RecentRecords, model_name: str) -> Traces | None:
    """Traces to a collector that takes OTLP over HTTP; None without an endpoint. Raises ConfigError."""
    if endpoint is None:
        return None
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ConfigError(f"--otlp-traces-endpoint needs http://HOST:PORT or https://HOST:PORT, not {endpoint!r}: OTLP "
                          "is spoken over HTTP (collectors listen for it on 4318), not over gRPC")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(NO_OTEL) from None
    url = endpoint if rest.strip("/").count("/") else endpoint.rstrip("/") + PATH
    timeout_s = None if os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") else TIMEOUT_S  # None: as the environment says
    return Traces(OTLPSpanExporter(url, timeout=timeout_s), records, model_name)
