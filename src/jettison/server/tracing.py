"""Requests as OpenTelemetry traces: queue, prefill and decode as spans, moves of memory as spans and events.

They are made of what the console's "a request's way" is made of: the journal's rows and the event log's records. A
request that ends costs one append. Once a second the event loop reads the log for all that have ended, and a thread
makes the spans and sends them. Needs the extra ``otel``. Names and attributes of a request's span
are vLLM's (``llm_request``, ``gen_ai.*``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from jettison.core.ports import Record
from jettison.errors import ConfigError
from jettison.server.console.journal import Row, Rows
from jettison.server.console.settings import RecentRecords
from jettison.server.console.way import MOST_EVENTS, is_about
from jettison.server.console.words import KINDS, Told, told_all
from jettison.server.quiet_log import Seldom
from jettison.types import NANOSECONDS

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
MOST_WAITING = 5_000
"""Choices of requests that ended and are no spans yet; more are left out, and counted. Their spans take less than two
seconds, for which the server's end can wait."""
MOST_RECORDS = 500
"""Records that are read for the requests of one period: as many as for one request's way."""
SLICE_S = 0.002
"""Spans are made for so long, then the thread rests as long: it has Python's lock meanwhile, and 5,000 requests without
a rest held up the event loop by 171 ms."""
BATCH = 128
"""Spans that are sent at one time: to encode them takes milliseconds of the same lock."""
TIMEOUT_S = 3.0
"""A collector that does not take a batch of spans in this time, retries included, loses it. The server's end waits no
longer than this for all that is left."""
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
        self._outbox = _Outbox(exporter)
        self._tracer = _provider(self._outbox).get_tracer("jettison")
        self._records = records
        self._model_name = model_name
        self._waiting: list[Rows] = []
        self._num_waiting = 0
        """Choices of these requests."""
        self._num_left_out = 0
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._hurry = threading.Event()
        """Spans are to be made without rests."""
        self._seldom = Seldom(logger)

    def note(self, rows: Rows) -> None:
        """A request has ended."""
        if self._num_waiting + len(rows) <= MOST_WAITING:
            self._waiting.append(rows)
            self._num_waiting += len(rows)
        else:
            self._num_left_out += 1

    def start(self) -> None:
        """Make spans from now on, in the running event loop."""
        self._task = asyncio.create_task(self._run(), name="jettison-traces")

    async def close(self, *, waits: bool = True) -> None:
        """Send what is left, for no longer than ``TIMEOUT_S``; without ``waits`` it is given up. Never raises for what
        cannot be sent."""
        self._ending.set()
        self._hurry.set()
        try:
            async with asyncio.timeout(TIMEOUT_S if waits else 0.0):
                if self._task is not None:
                    await self._task
                await self._flush_or_tell()
                await _in_thread(self._outbox.shutdown)
        except TimeoutError:
            if waits:
                logger.warning("the last traces are lost: the collector did not take them within %g s", TIMEOUT_S)
        except Exception:
            logger.exception("the collector's connection did not close")

    async def _run(self) -> None:
        while not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), PERIOD_S)
            await self._flush_or_tell()

    async def _flush_or_tell(self) -> None:
        try:
            await self.flush()
        except Exception as error:  # noqa: BLE001  # requests are served all the same, and the next ones have traces
            self._seldom.warning("requests have no trace: %r", error)

    async def flush(self) -> None:
        """Make and send the spans of all requests that have ended."""
        if self._num_left_out:
            self._seldom.warning("%d requests have no trace: too many ended in a second", self._num_left_out)
            self._num_left_out = 0
        if not self._waiting:
            return
        ended, self._waiting, self._num_waiting = self._waiting, [], 0
        first_ns = min(row.arrival_ns for rows in ended for row in rows)
        part = self._records(first_ns - 1, MOST_RECORDS, KINDS)
        wall_ns = time.time_ns() - time.monotonic_ns()
        await _in_thread(lambda: self._make_all(ended, self._told(part.records), wall_ns))

    def _told(self, records: Sequence[Record]) -> list[tuple[Record, Told]]:
        """The records that have words, by their times. One that lacks a field is left out."""
        found: list[tuple[Record, Told]] = []
        for record in records:
            try:
                found += told_all([record])
            except Exception as error:  # noqa: BLE001  # whatever its words stumble on
                self._seldom.warning("a record of the event log is in no trace: %s, %r", record.kind, error)
        return sorted(found, key=lambda each: each[0].time_ns)

    def _make_all(self, ended: Sequence[Rows], told: Sequence[tuple[Record, Told]], wall_ns: int) -> None:
        """In a thread. It rests as often as it works, as the event loop waits for it: they share Python's lock."""
        times = [record.time_ns for record, _ in told]
        self._outbox.begin()
        began_s = time.monotonic()
        for row in (row for rows in ended for row in rows):
            if (worked_s := time.monotonic() - began_s) >= SLICE_S:
                self._hurry.wait(worked_s)
                began_s = time.monotonic()
            meanwhile = told[bisect_left(times, row.arrival_ns) : bisect_right(times, row.ended_ns or row.arrival_ns)]
            try:
                _Maker(self._tracer, row, wall_ns).make(meanwhile, self._model_name)
            except Exception as error:  # noqa: BLE001  # the others have theirs
                self._seldom.warning("a request has no trace: %r", error)
        self._outbox.send()


class _Outbox:
    """Spans on their way to the collector: a processor of spans that sends in the thread that makes them, so that no
    more are made than are sent. It tells once that they are lost, and once that they no longer are."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._spans: list[ReadableSpan] = []
        self._is_refused = False
        """Of the requests of one period no more are tried once the collector has not taken some."""
        self._num_lost = 0

    def begin(self) -> None:
        """Spans of another period come."""
        self._is_refused = False

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """As the library's processors have it."""

    def _on_ending(self, span: Span) -> None:
        """As the library's processors have it."""

    def on_end(self, span: ReadableSpan) -> None:
        """Send it with the next batch."""
        if span.context is not None and span.context.trace_flags.sampled:
            self._spans.append(span)
            if len(self._spans) >= BATCH:
                self.send()

    def send(self) -> None:
        """Send what there is. Returns when the collector has taken it, or has not within its time."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans, self._spans = self._spans, []
        if not spans:
            return
        with _last_words() as words:
            try:
                is_taken = not self._is_refused and self._exporter.export(spans) is SpanExportResult.SUCCESS
            except Exception as error:  # noqa: BLE001  # an exporter's own
                is_taken = False
                words.append(repr(error))
        if not is_taken:
            if not self._num_lost:
                logger.warning("traces are lost from now on, as the collector does not take them: %s",
                               words[0] if words else "it does not say why")
            self._num_lost += len(spans)
            self._is_refused = True
        elif self._num_lost:
            logger.warning("the collector takes traces again; %d spans were lost", self._num_lost)
            self._num_lost = 0

    def shutdown(self) -> None:
        """Close the connection to the collector."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """As the library's processors have it."""
        return True


@contextlib.contextmanager
def _last_words() -> Iterator[list[str]]:
    """What the exporter logs meanwhile. It goes into no log, as it is three lines for each batch that is lost."""
    words: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words.append(record.getMessage())

    of_exporter, listener = logging.getLogger("opentelemetry.exporter"), Listener()
    was_passed_on = of_exporter.propagate
    of_exporter.addHandler(listener)
    of_exporter.propagate = False
    try:
        yield words
    finally:
        of_exporter.removeHandler(listener)
        of_exporter.propagate = was_passed_on


async def _in_thread(work: Callable[[], None]) -> None:
    """Wait for it. A thread that does not come to an end keeps no process alive, unlike those of the event loop."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001  # raised where it is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, error)

    threading.Thread(target=run, name="jettison-traces", daemon=True).start()
    await done


class _Maker:
    """Makes the spans of one choice of a request. ``wall_ns``: what turns the monotonic clock into the epoch's."""

    def __init__(self, tracer: Any, row: Row, wall_ns: int) -> None:
        self._tracer = tracer
        self._row = row
        self._wall_ns = wall_ns
        self._end_ns = row.ended_ns or row.arrival_ns

    def make(self, told: Sequence[tuple[Record, Told]], model_name: str) -> None:
        """``told``: what happened from its arrival to its end."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        row = self._row
        parent = _context(row.trace_parent)
        root = self._begin("llm_request", row.arrival_ns, parent, _attributes(row, model_name), SpanKind.SERVER)
        if row.reason == "error":
            root.set_status(Status(StatusCode.ERROR, "the request failed"))
        inside = set_span_in_context(root)
        mine = sorted(told, key=lambda each: (not is_about(each[0], row), each[0].time_ns))[:MOST_EVENTS]
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


def _provider(outbox: _Outbox) -> TracerProvider:
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        raise ConfigError(NO_OTEL) from None
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "jettison"}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(cast("SpanProcessor", outbox))  # the library is not there to derive from
    return provider


def traces_to(endpoint: str | None, records: RecentRecords, model_name: str) -> Traces | None:
    """Traces to a collector that takes OTLP over HTTP, at an http or https URL; None without an endpoint. Raises
    ConfigError where OpenTelemetry is not installed."""
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(NO_OTEL) from None
    has_path = endpoint.partition("://")[2].strip("/").count("/")
    url = endpoint if has_path else endpoint.rstrip("/") + PATH
    timeout_s = None if os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") else TIMEOUT_S  # None: as the environment says
    return Traces(OTLPSpanExporter(url, timeout=timeout_s), records, model_name)
