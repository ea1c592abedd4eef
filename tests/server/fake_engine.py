"""An engine without a model: deterministic tokens, delays under the test's control, faults on demand.

Honours the contract of ``jettison.live.engine.api.EngineClient``: every accepted request ends with exactly one event
that has a finish reason, and what a test wants to know (cancelled ids, accepted requests) is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from jettison.core.observing import NO_OFFLINE
from jettison.core.ports import StoredWork
from jettison.errors import NotReadyError, OverCapacityError
from jettison.live.engine.api import (
    EngineInfo,
    EngineSnapshot,
    EngineState,
    GroupSnapshot,
    RequestTimings,
    TokenEvent,
    WorkerSnapshot,
)
from jettison.live.engine.stream import Stream
from jettison.policy.refusal import why_queue_full
from jettison.policy.slo import UNKNOWN_OBJECTIVES, Objectives
from jettison.types import FinishReason, Request, RequestId, SampledToken, ServiceClass, TokenLogprobs

Script = Callable[[Request], Sequence[int]]
"""The tokens that a request would get if nothing stopped it."""


def bytes_of(text: str | bytes) -> Script:
    """A script that says ``text`` over and over, a byte a token."""
    data = text.encode() if isinstance(text, str) else text
    return lambda request: [data[at % len(data)] for at in range(request.params.max_tokens)]


def alphabet(request: Request) -> Sequence[int]:
    """``abc...``, starting at the seed: samples with neighbouring seeds differ."""
    return [97 + (request.params.seed + at) % 26 for at in range(request.params.max_tokens)]


@dataclass
class _Running:
    request: Request
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ending: FinishReason | None = None
    num_made: int = 0


class FakeEngine:
    """See the module. ``delay_s`` passes before each event; None holds requests back until ``release``."""

    def __init__(
        self, script: Script = alphabet, *, delay_s: float | None = 0.0, tokens_per_event: int = 1,
        max_model_len: int = 400, max_request_tokens: int | None = None,
    ) -> None:
        self.script = script
        self.delay_s = delay_s
        self.tokens_per_event = tokens_per_event
        self.engine_state: EngineState = "ready"
        self.loading_left_s: float | None = None
        self.dead_workers: set[int] = set()
        self.waits: dict[int, str] = {}
        self.sleep = ["awake", "awake"]
        self.num_unplaced = 0
        self.own_products: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self.troubles: tuple[str, ...] = ()
        self.has_groups = True
        self.max_running: int | None = None
        self.max_waiting: int | None = None
        """The queue's limit; choices that belong to an accepted one pass."""
        self.num_waiting: int | None = None
        """None: whatever runs counts as waiting."""
        self.retry_after_ms = 1500
        self.fail_after: int | None = None
        """Tokens after which a request ends with ERROR."""
        self.failure = "a worker was lost"
        self.crash_after: int | None = None
        """Tokens after which the event iterator itself raises."""
        self.unread = 0
        """Events that wait, of each request."""
        self.slo = UNKNOWN_OBJECTIVES
        self.offline = NO_OFFLINE
        self.gauges: dict[str, float] = {}
        self.milestones: dict[RequestId, RequestTimings] = {}
        """Of requests under way."""
        self.stored: tuple[StoredWork, ...] = ()
        self.accepted: list[Request] = []
        self.cancelled: list[RequestId] = []
        self.finished_early: list[RequestId] = []
        self.running: dict[RequestId, _Running] = {}
        self._held = asyncio.Event()
        self._pumps: set[asyncio.Task[None]] = set()
        room = max_request_tokens or max(300, max_model_len - 100)
        self._info = EngineInfo(
            model_dir="nowhere", max_model_len=max_model_len, max_request_tokens=room, max_offline_tokens=room,
            vocab_size=300, eos_token_ids=(257,),
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def state(self) -> EngineState:
        return self.engine_state

    def ready_in_s(self) -> float | None:
        return self.loading_left_s

    def release(self) -> None:
        """Let held requests go on."""
        self._held.set()

    def submit(self, request: Request, *, is_further: bool = False) -> AsyncIterator[TokenEvent]:
        if self.engine_state != "ready":
            raise NotReadyError(f"the engine is {self.engine_state}")
        if self.max_running is not None and len(self.running) >= self.max_running:
            raise OverCapacityError("the queue is full", self.retry_after_ms)
        if not is_further and request.service_class is ServiceClass.ONLINE:
            self.check_queue(request.tenant)
        self.accepted.append(request)
        running = self.running[request.request_id] = _Running(request)
        return self._events(running)

    def submit_to(self, request: Request, stream: Stream, *, is_further: bool = False) -> None:
        """What a hub of front ends uses."""
        events = self.submit(request, is_further=is_further)

        async def pump() -> None:
            try:
                async for event in events:
                    stream.put(event)
            except ValueError:  # ``crash_after``
                stream.put(TokenEvent([], FinishReason.ERROR, error="the engine failed"))

        self._pumps.add(task := asyncio.create_task(pump()))
        task.add_done_callback(self._pumps.discard)

    def check_queue(self, tenant: str, num_arriving: int = 0) -> None:
        num_waiting = len(self.running) if self.num_waiting is None else self.num_waiting
        why_full = why_queue_full(num_waiting + num_arriving, self.max_waiting)
        if why_full is not None:
            raise OverCapacityError(why_full, self.retry_after_ms)

    def cancel(self, request_id: RequestId) -> None:
        if request_id in self.running:
            self.cancelled.append(request_id)
            self._end(request_id, FinishReason.CANCELLED)

    def finish_early(self, request_id: RequestId) -> None:
        if request_id in self.running:
            self.finished_early.append(request_id)
            self._end(request_id, FinishReason.STOP)

    def note_stored(self, works: Sequence[StoredWork]) -> None:
        self.stored = tuple(works)

    def num_unread(self, request_id: RequestId) -> int:
        return self.unread if request_id in self.running else 0

    def timings(self, request_id: RequestId) -> RequestTimings | None:
        return self.milestones.get(request_id) if request_id in self.running else None

    def objectives(self) -> Objectives:
        return self.slo

    def snapshot(self) -> EngineSnapshot:
        num_running = len(self.running)
        num_used = min(100, num_running)
        group = GroupSnapshot(0, (0, 1), ((0, 2), (2, 4)), num_running, 0, 0, 100, num_used, 5, self.offline)
        alive = [at not in self.dead_workers for at in range(2)]
        workers = [WorkerSnapshot(
            at, 10 + at, alive[at], 1000, 300, 100, 500, 50, 150, rss_bytes=4096, sleep=self.sleep[at]
        ) for at in range(2)]
        counters = {"num_preemptions": 3.0, "drops": 1.0, "drop_seconds": 0.25, "returned_bytes": 7.0}
        counters |= {"worker_losses": 2.0, "recovery_seconds": 0.5}
        groups = [group] if self.has_groups else []
        return EngineSnapshot(
            self.engine_state, 16, groups, workers, counters, num_unplaced=self.num_unplaced, troubles=self.troubles,
            checkpoint_lag_blocks=6, slo=self.slo, gauges=self.gauges, waits=self.waits,
            own_products=self.own_products[0], products_of_some=self.own_products[1],
        )

    def _end(self, request_id: RequestId, reason: FinishReason) -> None:
        running = self.running[request_id]
        running.ending = running.ending or reason
        running.wake.set()

    async def _events(self, running: _Running) -> AsyncIterator[TokenEvent]:
        request = running.request
        timings = RequestTimings(request.arrival_ns, first_scheduled_ns=time.monotonic_ns())
        try:
            tokens = list(self.script(request))[: request.params.max_tokens]
            for at in range(0, len(tokens), self.tokens_per_event):
                await self._pause(running)
                if running.ending is not None:
                    break
                yield self._event(running, tokens, at, timings)
                if running.num_made == -1:
                    return
            else:
                running.ending = running.ending or FinishReason.LENGTH
            timings.finished_ns = time.monotonic_ns()
            last = TokenEvent([], running.ending, timings=timings)
            if request.params.max_tokens == 0:
                last.num_cached_tokens = 2
                last.prompt_logprobs = _prompt_logprobs(request)
            yield last
        finally:
            self.running.pop(request.request_id, None)

    async def _pause(self, running: _Running) -> None:
        if self.delay_s is None:
            held = asyncio.ensure_future(self._held.wait())
            ended = asyncio.ensure_future(running.wake.wait())
            await asyncio.wait({held, ended}, return_when=asyncio.FIRST_COMPLETED)
            held.cancel()
            ended.cancel()
        elif self.delay_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running.wake.wait(), self.delay_s)
        else:
            await asyncio.sleep(0)

    def _event(self, running: _Running, tokens: list[int], at: int, timings: RequestTimings) -> TokenEvent:
        """Marks the request as over (``num_made`` -1) when the event is its last."""
        request, params = running.request, running.request.params
        if self.crash_after is not None and running.num_made >= self.crash_after:
            raise ValueError("secret internal detail")
        if self.fail_after is not None and running.num_made >= self.fail_after:
            running.num_made = -1
            return TokenEvent([], FinishReason.ERROR, error=self.failure, timings=timings)
        first = running.num_made == 0
        now_ns = time.monotonic_ns()
        timings.first_token_ns = timings.first_token_ns or now_ns
        sampled: list[SampledToken] = []
        event = TokenEvent(sampled, num_cached_tokens=2 if first else 0)
        if first:
            event.prompt_logprobs = _prompt_logprobs(request)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.info.eos_token_ids))
        for token in tokens[at : at + self.tokens_per_event]:
            running.num_made += 1
            logprobs = None if params.logprobs is None else fake_logprobs(token, params.logprobs)
            sampled.append(SampledToken(token, logprobs))
            if token in stops and running.num_made > params.min_tokens:
                event.finish_reason, event.stop_token_id = FinishReason.STOP, token
                break
            if running.num_made == params.max_tokens:
                event.finish_reason = FinishReason.LENGTH
        if event.finish_reason is not None:
            running.num_made = -1
            timings.finished_ns = now_ns
            event.timings = timings
        return event


def _prompt_logprobs(request: Request) -> list[TokenLogprobs | None] | None:
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return None
    return [None, *(fake_logprobs(token, num_top) for token in request.prompt_token_ids[1:])]


def fake_logprobs(token: int, num_top: int) -> TokenLogprobs:
    """The token itself is likeliest for even ids, second for odd ones."""
    first, second = (token, token + 1) if token % 2 == 0 else (token - 1, token)
    top = ((first, -0.5), (second, -1.5), *((40 + at, -3.0 - at) for at in range(20)))
    return TokenLogprobs(token, -0.5 if token == first else -1.5, 1 if token == first else 2, top[:num_top])
