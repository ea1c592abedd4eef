"""The engine requests behind one HTTP request, from submission to the last event.

In every case (a client leaves, a choice fails, a shutdown) every engine request ends or is cancelled before ``run``
returns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.types import Receive

from jettison.errors import JettisonError
from jettison.live.engine.api import OFTEN_LOST, EngineClient, PendingEvents, RequestTimings, TokenEvent
from jettison.server.attainment import Verdict
from jettison.server.choice import ChoiceText, Delta
from jettison.server.console.journal import Journal, Row
from jettison.server.errors import ApiError
from jettison.server.metrics import NANOSECONDS, ServerMetrics
from jettison.server.prompts import Prompt
from jettison.types import FinishReason, Request

Sink = Callable[["Job", TokenEvent, Delta], Awaitable[None] | None]
"""Takes the addition of an event to a choice; its result is awaited before the choice's next event. Called in order for
each choice; choices interleave."""

RecordRequest = Callable[[int, int, int, int, bool, str], None]
"""``ServerSettings.record_request``."""


CutOff = Callable[[], None]
CUT_OFF = "jettison.cut_off"
"""Key of a ``CutOff`` in the scope of a request, where the HTTP protocol has one."""


@dataclass(slots=True, eq=False)
class Job:
    """One choice of the answer."""

    index: int
    prompt: Prompt
    is_first_sample: bool
    """Whether it is its prompt's first choice, which alone counts the prompt tokens."""
    request: Request
    text: ChoiceText
    events: AsyncIterator[TokenEvent] | None = None
    is_offline: bool = False
    """Whether it is served as an offline request."""
    num_cached_tokens: int = 0
    num_events: int = 0
    is_started: bool = False
    """Whether the engine has produced a token."""
    is_over: bool = False
    """Whether the engine has sent its last event."""
    first_ns: int | None = None
    """When the front end got its first token; None: not yet."""
    verdict: Verdict | None = None
    """Judgement of its latencies; None before its first token, and for an offline request."""
    row: Row | None = None
    """For the console, once it is over."""


class Generation:
    """Runs the jobs of one HTTP request. ``submit`` once, then ``run`` once."""

    def __init__(
        self,
        engine: EngineClient,
        metrics: ServerMetrics,
        jobs: Sequence[Job],
        record: RecordRequest | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._engine = engine
        self._record = record
        self._metrics = metrics
        self._journal = journal
        self.jobs = jobs
        self.names: tuple[str, ...] = ()
        """Ids by which clients know it."""
        self.trace_parent = ""
        """Its header ``traceparent``, where requests are traced."""
        self.num_beside = 0
        """Other requests in the server when it came."""
        self.client_is_gone = False
        self.cut_off: CutOff | None = None
        """Ends the client's connection, where there is one."""
        self._num_open = 0
        """Jobs that were submitted and are not over."""
        self._abort_error: ApiError | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once for all its samples."""
        return sum(len(job.prompt.token_ids) for job in self.jobs if job.is_first_sample)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(job.text.num_tokens for job in self.jobs)

    @property
    def num_told_values(self) -> int:
        """Tokens and log-probabilities in an answer in one piece, about."""
        each = _values_each(self.jobs[0].request.params.logprobs)
        return self.num_output_tokens * each + sum(map(num_prompt_values, self.jobs))

    @property
    def num_unread_values(self) -> int:
        """Tokens and log-probabilities that wait here for the client to read what was told before, about."""
        each = _values_each(self.jobs[0].request.params.logprobs)
        return each * sum(self._engine.num_unread(job.request.request_id) for job in self.jobs if not job.is_over)

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of them that are thoughts."""
        return sum(job.text.num_reasoning_tokens for job in self.jobs)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return sum(job.num_cached_tokens for job in self.jobs if job.is_first_sample)

    def submit(self) -> None:
        """Submit all requests or none. Raises the engine's NotReadyError, OverCapacityError and TooLongError."""
        try:
            for job in self.jobs:
                job.events = self._engine.submit(job.request, is_further=job.index > 0)
                self._num_open += 1
        except BaseException:
            self._abandon()
            raise
        if not isinstance(self.jobs[0].events, PendingEvents):
            self._count_prompts()

    async def accepted(self) -> None:
        """Returns once the engine has accepted all of them, which one in this process has done in ``submit``. Raises
        what ``submit`` raises."""
        refusal: Exception | None = None
        for job in self.jobs:
            if not isinstance(job.events, PendingEvents):
                return
            try:
                await job.events.accepted()
            except JettisonError as error:
                refusal = refusal or error
                job.events = None  # it was never the engine's
                self._num_open -= 1
            except BaseException:
                self._abandon()
                raise
        if refusal is not None:
            self._abandon()
            raise refusal
        self._count_prompts()

    def _count_prompts(self) -> None:
        self._metrics.num_prompt_tokens += sum(len(job.request.prompt_token_ids) for job in self.jobs)

    def abort(self, error: ApiError) -> None:
        """Stop now; a waiting client gets ``error``."""
        self._abort_error = error
        self._cancel_all()

    async def run(self, receive: Receive, sink: Sink) -> None:
        """Feed every event to ``sink`` until all jobs are over. Raises ApiError when one fails.

        Returns early, with ``client_is_gone`` set, when the client disconnects. Its requests are cancelled then,
        before anything else happens.
        """
        watch = asyncio.create_task(self._watch(receive))
        try:
            if len(self.jobs) == 1:
                await self._pump(self.jobs[0], sink)
            else:
                await self._pump_all(sink)
        finally:
            watch.cancel()
            self._abandon()
            for job in self.jobs:
                if isinstance(job.events, AsyncGenerator):
                    await job.events.aclose()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.client_is_gone = True
        self._cancel_all()

    def _cancel_all(self) -> None:
        for job in self.jobs:
            if job.events is not None and not job.is_over:
                self._engine.cancel(job.request.request_id)

    def _abandon(self) -> None:
        """Cancel the jobs that are not over, and count the ones that never started."""
        self._cancel_all()
        for job in self.jobs:
            if job.events is not None and not job.is_over:
                self._finish(job, "abort", None)

    async def _pump_all(self, sink: Sink) -> None:
        pumps = [asyncio.create_task(self._pump(job, sink)) for job in self.jobs]
        try:
            await asyncio.gather(*pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, job: Job, sink: Sink) -> None:
        assert job.events is not None, "submit() comes first"
        last_ns: int | None = None
        async for event in job.events:
            if event.tokens and not job.is_started:
                self._start(job, event)
            delta = None
            if job.text.finish_reason is None and not self.client_is_gone:  # else only the end still matters
                delta = job.text.feed(event)
                if delta.token_ids:
                    last_ns = self._clock_tokens(job, len(delta.token_ids), last_ns)
            if event.finish_reason is not None:
                self._finish_with(job, event)
                if self.client_is_gone:
                    return
                if delta is not None:  # else the choice was over before, and is whole, however its request has ended
                    self._check(event)
            if delta is None:
                continue
            if delta.finish_reason is not None and event.finish_reason is None:
                self._engine.finish_early(job.request.request_id)
            if (taken := sink(job, event, delta)) is not None:
                await taken
            job.num_events += 1
        if not job.is_over and not self.client_is_gone:
            raise RuntimeError("the engine ended a request without a reason")

    def _check(self, event: TokenEvent) -> None:
        if event.finish_reason is FinishReason.ERROR:
            headers = {"x-should-retry": "false"} if event.error == OFTEN_LOST else {}  # OpenAI's SDKs heed it
            raise ApiError(500, event.error or "The request failed.", code="engine_error", headers=headers)
        if event.finish_reason is FinishReason.CANCELLED:
            raise self._abort_error or ApiError(503, "The server cancelled the request.", code="cancelled")

    def _start(self, job: Job, event: TokenEvent) -> None:
        job.is_started = True
        job.num_cached_tokens = event.num_cached_tokens
        job.first_ns = time.monotonic_ns()
        if not job.is_offline:  # the histograms cover online requests
            ttft_s = (job.first_ns - job.request.arrival_ns) / NANOSECONDS
            self._metrics.ttft.observe(ttft_s)
            if self._journal is not None:
                self._journal.note_first(job.first_ns, ttft_s)
            job.verdict = Verdict(self._metrics.attainment, self._engine.objectives(), ttft_s)

    def _clock_tokens(self, job: Job, num_new: int, last_ns: int | None) -> int:
        """Count new tokens for the client and observe the gap to the ones before, at ``last_ns``; returns the present
        time."""
        now_ns = time.monotonic_ns()
        self._metrics.num_generation_tokens += num_new
        if last_ns is None:
            num_new -= 1
            last_ns = now_ns
        if num_new and job.verdict is not None:
            gap_s = (now_ns - last_ns) / NANOSECONDS / num_new
            for _ in range(num_new):
                self._metrics.itl.observe(gap_s)
            job.verdict.note_gap(gap_s, num_new)
        return now_ns

    def _judge(self, job: Job, reason: str) -> None:
        """An online request has ended; one that failed without a token has kept nothing."""
        counts, verdict = self._metrics.attainment, job.verdict
        if (verdict is not None and verdict.is_due) or (verdict is None and reason == "error"):
            counts.num_requests += 1
            counts.num_requests_within += verdict is not None and verdict.is_within and reason != "error"

    def _finish_with(self, job: Job, event: TokenEvent) -> None:
        reason = "abort" if event.finish_reason is FinishReason.CANCELLED else str(event.finish_reason)
        self._finish(job, reason, event)

    def _finish(self, job: Job, reason: str, event: TokenEvent | None) -> None:
        job.is_over = True
        if not job.is_started and event is not None:
            job.num_cached_tokens = event.num_cached_tokens
        timings = event.timings if event is not None and not job.is_offline else None
        num_prompt, num_output = len(job.prompt.token_ids), job.text.num_tokens
        self._metrics.count_finished(reason, num_prompt, num_output, timings)
        if reason != "abort" and not job.is_offline:
            self._judge(job, reason)
        self._num_open -= 1
        if self._journal is not None:
            job.row = self._row(job, reason, None if event is None else event.timings, time.monotonic_ns())
            if not self._num_open:
                self._journal.add([job.row for job in self.jobs if job.row is not None])
        if self._record is not None:
            request = job.request
            self._record(
                request.arrival_ns, num_prompt, num_output, job.num_cached_tokens, job.is_offline, request.tenant
            )

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.jobs[0].request.tenant

    @property
    def is_offline(self) -> bool:
        """Whether it is served as an offline request."""
        return self.jobs[0].is_offline

    @property
    def arrival_ns(self) -> int:
        """When it came."""
        return self.jobs[0].request.arrival_ns

    @property
    def has_begun(self) -> bool:
        """Whether its first choice has a token."""
        return self.jobs[0].first_ns is not None

    def is_named(self, name: str) -> bool:
        """Whether this is an id of it: the answer's, the HTTP request's, or the engine's of one of its choices."""
        return name in self.names or any(name == job.request.request_id for job in self.jobs)

    def rows(self, first: int, most: int) -> list[Row]:
        """Its choices from ``first`` on, so many at most, as the console shows them while it is under way."""
        return [job.row or self._row(job, "", self._engine.timings(job.request.request_id), None)
                for job in self.jobs[first : first + most]]

    def _row(self, job: Job, reason: str, timings: RequestTimings | None, ended_ns: int | None) -> Row:
        request = job.request
        return Row(
            request_id=request.request_id, names=self.names, tenant=request.tenant, is_offline=job.is_offline,
            reason=reason, arrival_ns=request.arrival_ns,
            scheduled_ns=None if timings is None else timings.first_scheduled_ns, first_ns=job.first_ns,
            ended_ns=ended_ns, num_prompt=len(job.prompt.token_ids), num_cached=job.num_cached_tokens,
            num_output=job.text.num_tokens, num_preemptions=0 if timings is None else timings.num_preemptions,
            num_beside=self.num_beside, is_timed=timings is not None, num_choices=len(self.jobs),
            trace_parent=self.trace_parent,
        )


def num_prompt_values(job: Job) -> int:
    """Tokens and log-probabilities of its prompt that an answer tells, about."""
    each = job.request.params.prompt_logprobs
    return 0 if each is None else len(job.prompt.token_ids) * _values_each(each)


def _values_each(num_logprobs: int | None) -> int:
    """A token and its log-probabilities."""
    return 1 + (num_logprobs or 0)
