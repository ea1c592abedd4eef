"""Open-loop replay of a workload against any OpenAI-compatible server.

Each request is sent at its scheduled arrival whether or not earlier ones have been answered, so a slow server does not
slow the load down. The client measures itself too: the result holds how late it sent each request. Latency is counted
from the *scheduled* arrival; a late client therefore makes a server look worse, never better.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from jettison.errors import UserError
from jettison.report.classes import build_by_class
from jettison.report.results import (
    METRIC_DEFINITIONS,
    NOT_SENT,
    SENDERS_ENDED,
    TIME_WAS_UP,
    RequestRecord,
    RunResult,
    summarize,
)
from jettison.workload.observe import ServerObserver
from jettison.workload.options import Endpoint, PromptKind
from jettison.workload.pool import OfflinePool
from jettison.workload.prompts import PromptMaker
from jettison.workload.stream import StreamMeter
from jettison.workload.traces import Workload

_REJECTED = (429, 503)
_EARLY_CANCEL_WAIT_S = 0.05
_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay. Prompts of kind ``tokens`` need the completions endpoint."""

    name: str = "run"
    model: str | None = None
    """Name of the model; None: the client asks ``/v1/models``."""
    endpoint: Endpoint = "completions"
    prompt_kind: PromptKind = "tokens"
    prompts: PromptMaker = field(default_factory=PromptMaker)
    ignore_eos: bool = True
    """Ask for exactly the trace's output length (vLLM's extra field; others ignore or refuse it)."""
    api_key: str | None = None
    pool: OfflinePool | None = None
    """A batch beside the workload. Each of its senders stops after a request that is not answered."""
    offline_fields: Mapping[str, Any] = field(default_factory=lambda: {"service_tier": "flex"})
    """Request fields that mark a request as offline."""
    offline_api_key: str | None = None
    """API key of offline requests, which makes them another tenant's; None: the key of all others."""
    max_concurrency: int | None = None
    """At most so many requests at once; the wait counts as client lag. None keeps the loop open."""
    request_timeout_s: float = 600.0
    total_timeout_s: float | None = None
    """Time limit of the whole run; unfinished and unsent requests count as failed."""
    cancel_fraction: float = 0.0
    """This share of requests, by seeded draw, is closed after a uniformly drawn number of chunks."""
    seed: int = 0
    observe: bool = True
    observe_interval_s: float = 0.5
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    detail: bool = True
    on_progress: Callable[[int, int], None] | None = None
    """Called with (requests ended, requests in all) as they end."""
    on_data: Callable[[int, bytes], None] | None = None
    """Called with a request's number and each piece of its answer, server-sent events, as it is read."""


async def replay(url: str, workload: Workload, options: ReplayOptions) -> RunResult:
    """Send every request of ``workload`` at its time and measure.

    ``url`` is the server's root (with or without ``/v1``). Raises UserError when the options contradict each
    other or the server cannot be asked for its model; a failing request never raises, it is counted.
    """
    if options.prompt_kind == "tokens" and options.endpoint == "chat":
        raise UserError("the chat endpoint takes text: use prompt kind 'text'")
    root = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    # Servers close idle connections after 5 s or so; one that is reused at that moment would look like a failure.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    timeout = aiohttp.ClientTimeout(total=None)  # each request carries its own
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        model = options.model or await _first_model(session, root)
        run = _Replay(session, root, model, workload, options)
        return await run.run()


def replay_sync(url: str, workload: Workload, options: ReplayOptions) -> RunResult:
    """:func:`replay` on an event loop of its own (uvloop where it is installed)."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(replay(url, workload, options))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(replay(url, workload, options))


async def _first_model(session: aiohttp.ClientSession, root: str) -> str:
    try:
        async with session.get(f"{root}/v1/models", timeout=aiohttp.ClientTimeout(total=30)) as response:
            if response.status in (401, 403):
                raise UserError(f"{root}/v1/models answered {response.status}: give a key that it takes (--api-key)")
            if response.status != 200:
                raise UserError(f"{root}/v1/models answered {response.status}: name the model with --model")
            body = await response.json(content_type=None)
            return str(body["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UserError(f"no server answers at {root}: {error or type(error).__name__}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"{root}/v1/models names no model: name it with --model") from error


def _told(error: Exception) -> str:
    """The error message of a failed request; for an answer that was cut off, in plain words instead of the client
    library's."""
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | ConnectionResetError):
        return "the server closed the connection before its answer was complete"
    return f"{type(error).__name__}: {error}"


class _Replay:
    """One replay: the clock, the dispatcher and the bookkeeping. Used once."""

    def __init__(
        self, session: aiohttp.ClientSession, root: str, model: str, workload: Workload, options: ReplayOptions
    ) -> None:
        self._session, self._root, self._model = session, root, model
        self._workload, self._options = workload, options
        path = "/v1/chat/completions" if options.endpoint == "chat" else "/v1/completions"
        self._target = root + path
        self._records = [
            RequestRecord(index, row.arrival_s, row.input_tokens, row.output_tokens, is_offline=row.is_offline)
            for index, row in enumerate(workload.rows)
        ]
        self._of_batch: list[RequestRecord] = []
        self._batch_lengths = iter(()) if options.pool is None else options.pool.lengths_drawn()
        self._cancel_after = _draw_cancels(workload, options)
        self._slots = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else None
        self._is_cut_off = False
        """The run's time was up before its end."""
        self._start_s = 0.0
        self._num_open = self._most_open = self._num_ended = 0

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def run(self) -> RunResult:
        options = self._options
        has_offline = options.pool is not None or self._workload.columns.is_offline is not None
        observer = ServerObserver(
            self._session, self._root, self._now_s, interval_s=options.observe_interval_s, counts_tokens=has_offline
        )
        self._start_s = time.perf_counter()
        if options.observe:
            await observer.start()
        cpu_before_s = time.process_time()
        # Time zero is set after the first poll, so that polling cannot delay the first request.
        self._shift_zero(observer)
        wall_before_s = time.perf_counter()
        await self._dispatch_all()
        cpu_share = (time.process_time() - cpu_before_s) / max(time.perf_counter() - wall_before_s, 1e-9)
        events: dict[str, Any] = {}
        if options.observe:
            await observer.close()
            events = await observer.events()
        deployment = await observer.deployment() if options.observe else None
        self._close_batch()
        ended = [record for record in self._of_batch if record.finished_s is not None or record.error is not None]
        return build_by_class(
            options.name,
            [*self._records, *ended],
            window_s=self._workload.duration_s,
            objectives=options,
            has_batch=options.pool is not None,
            num_unfinished=len(self._of_batch) - len(ended),
            config=self._config() | ({} if deployment is None else {"deployment": deployment}),
            events=events,
            series=observer.series,
            client=self._client_report(cpu_share, observer.num_failed_polls),
            detail=options.detail,
        )

    def _shift_zero(self, observer: ServerObserver) -> None:
        shift_s = self._now_s()
        self._start_s += shift_s
        for points in observer.series.values():
            points[:] = [(t - shift_s, value) for t, value in points]

    async def _dispatch_all(self) -> None:
        tasks: list[asyncio.Task[None]] = []
        batch = asyncio.create_task(self._send_batch())
        try:
            async with asyncio.timeout(self._options.total_timeout_s):
                for record in self._records:
                    body = self._body(record)  # made before the wait, so that making it is not lag
                    # Also where it is overdue: what was sent before is to go out, and its answers to be read.
                    await asyncio.sleep(max(0.0, record.scheduled_s - self._now_s()))
                    tasks.append(asyncio.create_task(self._one(record, body)))
                await asyncio.gather(*tasks)
                await batch
        except TimeoutError:
            self._is_cut_off = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._close_unfinished()
        finally:
            batch.cancel()
            await asyncio.gather(batch, return_exceptions=True)

    async def _send_batch(self) -> None:
        """Send the batch to its end. A batch without end is sent until the workload's time is over; its open requests
        are then cancelled."""
        pool = self._options.pool
        if pool is None:
            return
        await asyncio.sleep(max(0.0, pool.start_s - self._now_s()))
        num_senders = pool.unfinished or pool.num_requests or 0
        senders = asyncio.gather(*(self._send_one_by_one(self._batch_lengths) for _ in range(num_senders)))
        if pool.num_requests is not None:
            await senders
            return
        try:
            await asyncio.sleep(max(0.0, self._workload.duration_s - self._now_s()))
        finally:
            senders.cancel()
            await asyncio.gather(senders, return_exceptions=True)

    async def _send_one_by_one(self, lengths: Iterator[tuple[int, int]]) -> None:
        for num_input, num_output in lengths:
            index = len(self._records) + len(self._of_batch)
            record = RequestRecord(index, self._now_s(), num_input, num_output, is_offline=True)
            self._of_batch.append(record)
            await self._send(record, self._body(record))
            if record.status != "completed":
                return

    def _close_unfinished(self) -> None:
        for record in self._records:
            if record.finished_s is None and record.sent_s is not None:
                record.error = TIME_WAS_UP
                record.finished_s = self._now_s()
            elif record.finished_s is None:
                record.error = NOT_SENT

    def _close_batch(self) -> None:
        """Of a batch with an end, what is open or was never sent has failed."""
        pool = self._options.pool
        if pool is None or pool.num_requests is None:
            return
        for record in self._of_batch:
            if record.finished_s is None:
                record.error, record.finished_s = TIME_WAS_UP, self._now_s()
        why = NOT_SENT if self._is_cut_off else SENDERS_ENDED
        for drawn in self._batch_lengths:
            index = len(self._records) + len(self._of_batch)
            self._of_batch.append(RequestRecord(index, pool.start_s, *drawn, is_offline=True, error=why))

    def _body(self, record: RequestRecord) -> bytes:
        options = self._options
        request: dict[str, Any] = {
            "model": self._model,
            "max_tokens": record.wanted_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            request["ignore_eos"] = True
        if record.is_offline:
            request.update(options.offline_fields)
        if options.endpoint == "chat":
            text = options.prompts.text(record.index, record.input_tokens)
            request["messages"] = [{"role": "user", "content": text}]
        elif options.prompt_kind == "text":
            request["prompt"] = options.prompts.text(record.index, record.input_tokens)
        else:
            request["prompt"] = options.prompts.token_ids(record.index, record.input_tokens)
        return json.dumps(request, separators=(",", ":")).encode()

    async def _one(self, record: RequestRecord, body: bytes) -> None:
        if self._slots is None:
            await self._send(record, body)
        else:
            async with self._slots:
                await self._send(record, body)
        self._num_ended += 1
        if self._options.on_progress is not None:
            self._options.on_progress(self._num_ended, len(self._records))

    async def _send(self, record: RequestRecord, body: bytes) -> None:
        """Send one request and read its answer to the end. Every outcome but the run's own end is recorded, and none
        raises."""
        meter = StreamMeter()
        cancel_after = self._cancel_after[record.index] if record.index < len(self._records) else None
        limit_s = self._options.request_timeout_s if cancel_after != 0 else _EARLY_CANCEL_WAIT_S
        self._num_open += 1
        self._most_open = max(self._most_open, self._num_open)
        record.sent_s = self._now_s()
        try:
            async with asyncio.timeout(limit_s):
                await self._stream(record, body, meter, cancel_after)
        except TimeoutError:
            if cancel_after == 0:
                record.status = "cancelled"
            else:
                record.error = f"no end within {limit_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            record.error = _told(error)[:_ERROR_CHARS]
        finally:
            self._num_open -= 1
            meter.close()
            record.first_s, record.gaps_s, record.output_tokens = meter.first_s, meter.gaps_s, meter.output_tokens
            record.first_chunk_s = meter.first_chunk_s
        record.finished_s = self._now_s()

    async def _stream(self, record: RequestRecord, body: bytes, meter: StreamMeter, cancel_after: int | None) -> None:
        headers = {"Content-Type": "application/json"}
        if record.is_offline and self._options.offline_api_key is not None:
            headers["Authorization"] = f"Bearer {self._options.offline_api_key}"
        async with self._session.post(self._target, data=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:_ERROR_CHARS]
                record.error = f"HTTP {response.status}: {text}"
                record.status = "rejected" if response.status in _REJECTED else "failed"
                return
            async for data in response.content.iter_any():
                meter.feed(data, self._now_s())
                if self._options.on_data is not None:
                    self._options.on_data(record.index, data)
                if cancel_after is not None and 0 < cancel_after <= meter.num_seen and not meter.done:
                    record.status = "cancelled"
                    response.close()  # without reading on: the server must notice by itself
                    return
        record.error = meter.error
        if record.error is None and not meter.done and meter.finish_reason is None:
            record.error = "the stream ended early"
        record.status = "completed" if record.error is None else "failed"

    def _config(self) -> dict[str, Any]:
        options, workload = self._options, self._workload
        return {
            "url": self._root,
            "model": self._model,
            "endpoint": options.endpoint,
            "prompt_kind": options.prompt_kind,
            "ignore_eos": options.ignore_eos,
            "loop": "open" if options.max_concurrency is None else f"at most {options.max_concurrency} at once",
            "request_timeout_s": options.request_timeout_s,
            "total_timeout_s": options.total_timeout_s,
            "cancel_fraction": options.cancel_fraction,
            "seed": options.seed,
            "workload": {
                "name": workload.name,
                "source": workload.source,
                "notes": [*workload.notes, *([] if options.pool is None else [options.pool.describe()])],
                "num_requests": len(workload.rows),
                "duration_s": workload.duration_s,
                "mean_rate_per_s": workload.mean_rate_per_s,
            },
            "metric_definitions": METRIC_DEFINITIONS,
        }

    def _client_report(self, cpu_share: float, num_failed_polls: int) -> dict[str, Any]:
        lags_s = [record.sent_s - record.scheduled_s for record in self._records if record.sent_s is not None]
        lag = summarize(lags_s)
        return {
            "began_monotonic_s": time.monotonic() - self._now_s(),
            "lag_s": {"mean": lag.mean, "p50": lag.p50, "p90": lag.p90, "p99": lag.p99, "max": lag.max},
            "max_open_requests": self._most_open,
            "cpu_share_of_one_core": cpu_share,
            "threads": 1,
            "failed_polls": num_failed_polls,
            "short_answers": sum(
                record.status == "completed" and record.output_tokens != record.wanted_tokens
                for record in self._records
            ),
        }


def _draw_cancels(workload: Workload, options: ReplayOptions) -> list[int | None]:
    """For each request the chunk count after which the client hangs up (0 = while it is still waiting), or None.

    Two draws per request whatever the fraction, so that runs with other fractions stay comparable.
    """
    if not 0.0 <= options.cancel_fraction <= 1.0:
        raise UserError(f"the share of requests to cancel must be in [0, 1], got {options.cancel_fraction:g}")
    draws = np.random.default_rng(options.seed).random((len(workload.rows), 2))
    return [
        int(where * row.output_tokens) if who < options.cancel_fraction else None
        for row, (who, where) in zip(workload.rows, draws, strict=True)
    ]
