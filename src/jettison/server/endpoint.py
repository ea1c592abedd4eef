"""The common part of both generating endpoints: admit, read, plan, submit, and answer in one piece or as a stream.

An ``Answer`` encodes the answer; ``chat`` and ``completions`` each have one.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jettison.errors import NotReadyError, OverCapacityError
from jettison.live.engine.api import TokenEvent
from jettison.server.bad_words import word_tokens
from jettison.server.choice import ChoiceText, Delta, Finish
from jettison.server.compiling import RECEIVE, TENANT
from jettison.server.errors import ApiError, as_api_error, bad_request, refusal_code
from jettison.server.fields import parse_json
from jettison.server.gate import REQUEST_LABEL
from jettison.server.generation import CUT_OFF, Generation, Job, num_prompt_values
from jettison.server.json_out import encode
from jettison.server.limits import Arrival
from jettison.server.prompts import ITEM_CHARS, Prompt, off_loop
from jettison.server.sampling import OFFLINE_TIER, GenerationPlan, too_long, with_bad_words, with_grammar
from jettison.server.sse import COMMENT, DONE, WRITE_NOW, EventStream, WriteNow, error_event
from jettison.server.state import ServerState
from jettison.server.truncation import truncated
from jettison.types import Request, ServiceClass

_GOES_ON = b',"finish_reason":null'
_FINISH_JSON: dict[Finish, bytes] = {
    "stop": b',"finish_reason":"stop"',
    "length": b',"finish_reason":"length"',
    "repetition": b',"finish_reason":"repetition"',
    "tool_calls": b',"finish_reason":"tool_calls"',
    "function_call": b',"finish_reason":"function_call"',
}

MOST_VALUES_ON_LOOP = 2048
"""Tokens and log-probabilities of an answer in one piece that are encoded on the event loop, in about 10 ms; more of
them would keep all streams waiting."""

JSON_TYPES = (b"application/json", b"text/json")


def finish_json(job: Job, delta: Delta) -> bytes:
    """How a chunk's choice ends, as fields that begin with a comma; what stopped it is told with its end only."""
    if delta.finish_reason is None:
        return _GOES_ON
    return _FINISH_JSON[delta.finish_reason] + b',"stop_reason":' + encode(job.text.stop_reason)


class WireAnswer(ABC):
    """Encodes one HTTP answer, in one piece or as a stream. Bytes out, no I/O."""

    plan: GenerationPlan
    id: str
    """Of the answer, as its client gets it."""
    keep_alive = COMMENT
    """What a stream sends where it would be silent for long."""
    stream_end = DONE
    """The very last bytes of a stream."""

    @abstractmethod
    def chunk(self, job: Job, event: TokenEvent, delta: Delta, generation: Generation) -> bytes:
        """The events of a stream that tell a delta; may be empty."""

    @abstractmethod
    def collect(self, job: Job, event: TokenEvent, delta: Delta) -> None:
        """Keep a delta for ``document``."""

    @abstractmethod
    def document(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece."""

    async def encoded(self, generation: Generation) -> bytes:
        """``document`` as JSON."""
        return await self.made(lambda: encode(self.document(generation)), generation)

    async def ended(self, generation: Generation) -> bytes:
        """``closing``, and all that the answer's end has beside it."""
        return self.closing(generation)

    async def made(self, work: Callable[[], bytes], generation: Generation) -> bytes:
        """``work``, which tells the whole answer and reads only the answer's own state: for a long one in a thread."""
        return await off_loop(work, generation.num_told_values, MOST_VALUES_ON_LOOP)

    def opening(self, generation: Generation) -> bytes:
        """The events of a stream before its first token."""
        return b""

    @abstractmethod
    def closing(self, generation: Generation) -> bytes:
        """The events of a stream behind its last token."""

    def failure(self, error: ApiError) -> bytes:
        """The events that end a stream which has failed."""
        return error_event(error.body)


class Answer(WireAnswer):
    """Encodes an answer that has ``choices``."""

    def __init__(self, state: ServerState, plan: GenerationPlan, model: str, kind: str, id_prefix: str) -> None:
        self.state = state
        self.plan = plan
        self.id = f"{id_prefix}-{plan.request_id or secrets.token_hex(16)}"
        self.created_s = int(time.time())
        self.model = model
        tier = {} if plan.service_tier is None else {"service_tier": plan.service_tier}
        self.header = {"id": self.id, "object": kind, "created": self.created_s, "model": model, **tier}
        self._has_begun = False
        """Whether a chunk has been made."""
        # All chunks begin alike: encoded once.
        self.chunk_head = b"data: " + encode(self.chunk_header())[:-1] + b',"choices":['

    @abstractmethod
    def chunk_header(self) -> dict[str, Any]:
        """The fields of a chunk that do not change."""

    @abstractmethod
    def choice_chunk(self, job: Job, event: TokenEvent, delta: Delta) -> bytes:
        """The one entry of a chunk's ``choices``, as JSON."""

    def chunk(self, job: Job, event: TokenEvent, delta: Delta, generation: Generation) -> bytes:
        """One event of the stream."""
        choice = self.choice_chunk(job, event, delta)
        tail = b"]"
        if not self._has_begun:
            self._has_begun = True
            tail += self.first_fields(job)
        if self.plan.continuous_usage:
            tail += b',"usage":' + encode(self.usage(generation))
        return b"".join((self.chunk_head, choice, tail, b"}\n\n"))

    def first_fields(self, job: Job) -> bytes:
        """Fields of a stream's first chunk beside its choices, as JSON that begins with a comma."""
        return b""

    def closing(self, generation: Generation) -> bytes:
        """The stream's last chunk, without choices, where the client asked for it."""
        if not self.plan.include_usage:
            return b""
        return self.chunk_head + b'],"usage":' + encode(self.usage(generation)) + b"}\n\n"

    def usage(self, generation: Generation) -> dict[str, Any]:
        """OpenAI's token counts."""
        num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
        counts: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        }
        form = self.plan.text.form
        if form is not None and form.has_thoughts:
            counts["completion_tokens_details"] = {"reasoning_tokens": generation.num_reasoning_tokens}
        return counts


class GenerationEndpoint(ABC):
    """An ASGI application for one path."""

    def __init__(
        self, state: ServerState, thread_chars: int | None = None, *, is_offline: bool = False
    ) -> None:
        """``thread_chars``: the bound of characters tokenized on the event loop, in place of the settings'.
        ``is_offline``: all requests here are served as offline requests, whatever tier they name.
        """
        self.state = state
        self._is_offline = is_offline
        self.thread_chars = state.settings.thread_tokenize_chars if thread_chars is None else thread_chars

    def _most_tokens(self, plan: GenerationPlan) -> int:
        """Most tokens of prompt and answer together."""
        info = self.state.engine.info
        is_offline = self._is_offline or plan.wants_offline
        return min(info.max_model_len, info.max_offline_tokens if is_offline else info.max_request_tokens)

    async def with_bad_words(self, plan: GenerationPlan) -> GenerationPlan:
        """The plan with the tokens of its bad words. Raises ApiError 400."""
        info, encode = self.state.engine.info, self.state.tokenizer.encode
        words = plan.bad_words
        sequences = await off_loop(
            lambda: word_tokens(words, lambda text: encode(text, False), info.vocab_size),
            sum(2 * len(word) + ITEM_CHARS for word in words), self.thread_chars)
        return with_bad_words(plan, sequences, info.eos_token_ids)

    async def with_grammar(self, plan: GenerationPlan) -> GenerationPlan:
        """The plan with the compiled grammar of its constraint. Raises ApiError 400."""
        if plan.constraint is None:
            return plan
        if not self.state.engine.info.eos_token_ids:
            raise bad_request("the model has no end token, so no answer could end.", plan.constraint.param)
        return with_grammar(plan, await self.state.grammars.compiled(plan.constraint))

    def cut(self, plan: GenerationPlan, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts cut to the length that the request allows; -1 leaves room for the requested answer."""
        answer = plan.params.min_tokens if plan.wants_default_length else plan.params.max_tokens
        return truncated(prompts, plan.truncation, max(1, self._most_tokens(plan) - max(1, answer)))

    @abstractmethod
    async def prepare(self, document: dict[str, Any]) -> tuple[GenerationPlan, list[Prompt], WireAnswer]:
        """Validate, and turn text into tokens (for an echo, tokens into text too). Raises ApiError 4xx."""

    async def prepare_for(
        self, tenant: str, document: dict[str, Any]
    ) -> tuple[GenerationPlan, list[Prompt], WireAnswer]:
        """The same for a request of this tenant, where it matters whose it is."""
        return await self.prepare(document)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        arrival_ns = time.monotonic_ns()
        try:
            self.state.check_ready()
            tenant = self.state.keys.tenant(dict(scope["headers"]).get(b"authorization"))
            with self.state.admission.arrival(tenant) as arrival:
                await arrival.let_in()
                await self._answer(scope, receive, send, arrival, arrival_ns, tenant)
        except OverCapacityError as error:
            self.state.metrics.count_shed(refusal_code(error))
            raise
        except NotReadyError:
            self.state.metrics.count_shed(self.state.status)
            raise

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, arrival: Arrival, arrival_ns: int, tenant: str
    ) -> None:
        state = self.state
        check_content_type(scope)
        body = await arrival.read_body(receive)
        arrival.come()
        arrival.check_queue(is_offline=OFFLINE_TIER.encode() in body)  # maybe: else not parsed yet
        document = parse_json(body)
        arrival.check_queue(is_offline=document.get("service_tier") == OFFLINE_TIER)
        TENANT.set(tenant)
        RECEIVE.set(receive)
        plan, prompts, answer = await self.prepare_for(tenant, document)
        if plan.wants_offline:
            state.check_offline("service_tier")
        await arrival.claimed(len(prompts) * plan.num_samples, "n" if plan.num_samples > 1 else self.prompt_field)
        generation = self.generation(plan, prompts, arrival_ns, tenant)
        generation.names = (answer.id, scope.get(REQUEST_LABEL, b"").decode("latin-1"))
        if state.settings.trace_request is not None:
            generation.trace_parent = dict(scope["headers"]).get(b"traceparent", b"")[:64].decode("latin-1")
        generation.cut_off = scope.get(CUT_OFF)
        generation.num_beside = arrival.num_beside
        state.generations.add(generation)
        try:
            generation.submit()
            await generation.accepted()
            arrival.accepted()
            if plan.stream:
                await self._stream(generation, answer, receive, send, scope.get(WRITE_NOW))
            else:
                await self._whole(generation, answer, scope, receive, send)
        finally:
            state.generations.discard(generation)

    def generation(
        self, plan: GenerationPlan, prompts: Sequence[Prompt], arrival_ns: int, tenant: str,
        deadline_ns: int | None = None,
    ) -> Generation:
        """The engine requests for these prompts, not submitted yet. Raises ApiError 400 where one is too long."""
        jobs = self._jobs(plan, prompts, arrival_ns, tenant, deadline_ns)
        state = self.state
        return Generation(state.engine, state.metrics, jobs, state.settings.record_request, state.journal)

    def _jobs(
        self, plan: GenerationPlan, prompts: Sequence[Prompt], arrival_ns: int, tenant: str, deadline_ns: int | None
    ) -> list[Job]:
        jobs: list[Job] = []
        # The tenant comes first and has a fixed length, so no client's salt can reach another tenant's cache.
        cache_salt = tenant + plan.cache_salt
        base_id = secrets.token_hex(16)  # never derived from a client's values
        for prompt in prompts:
            self._check_ids(prompt)
            num_prompt_tokens = len(prompt.token_ids)
            max_tokens = self._bounded_length(plan, num_prompt_tokens)
            num_echoed_chars = len(prompt.text or "") if plan.echo else 0
            for sample in range(plan.num_samples):
                request = Request(
                    request_id=f"{base_id}-{len(jobs)}",
                    prompt_token_ids=prompt.token_ids,
                    params=plan.params_for(prompt.first_sample + sample, max_tokens),
                    arrival_ns=arrival_ns,
                    priority=plan.priority,
                    cache_salt=cache_salt,
                    has_default_length=plan.wants_default_length,
                    tenant=tenant,
                    service_class=ServiceClass.OFFLINE if plan.wants_offline else ServiceClass.ONLINE,
                    deadline_ns=deadline_ns,
                )
                text = ChoiceText(self.state.tokenizer, plan, prompt.token_ids, num_echoed_chars)
                jobs.append(Job(len(jobs), prompt, sample == 0, request, text, is_offline=plan.wants_offline))
        return jobs

    def _check_ids(self, prompt: Prompt) -> None:
        """Raise ApiError 400 for a token beyond the embedding's rows: a tokenizer may know more tokens than the
        embedding has."""
        vocab_size, largest = self.state.engine.info.vocab_size, max(prompt.token_ids)
        if largest >= vocab_size:
            (token,) = self.state.tokenizer.token_strings([largest])
            message = f"{self.prompt_field}: {token!r:.80} is token {largest}, and the model has only {vocab_size}."
            raise bad_request(message, self.prompt_field)

    def _bounded_length(self, plan: GenerationPlan, num_prompt_tokens: int) -> int:
        info = self.state.engine.info
        max_tokens = plan.params.max_tokens
        if plan.wants_default_length:
            room = self._most_tokens(plan) - num_prompt_tokens
            max_tokens = max(1, min(room, max_tokens), plan.params.min_tokens)
        error = too_long(num_prompt_tokens, max_tokens, info, self.prompt_field, plan.length_field)
        if error is not None:
            raise error
        return max_tokens

    prompt_field = "prompt"
    """The field named in the error for a too long prompt."""

    async def _whole(
        self, generation: Generation, answer: WireAnswer, scope: Scope, receive: Receive, send: Send
    ) -> None:
        def keep(job: Job, event: TokenEvent, delta: Delta) -> None:
            answer.collect(job, event, delta)

        await generation.run(receive, keep)
        if generation.client_is_gone:
            raise ApiError(499, "The client went away.", code="client_disconnected")
        body = await answer.encoded(generation)
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _stream(
        self, generation: Generation, answer: WireAnswer, receive: Receive, send: Send, write_now: WriteNow | None
    ) -> None:
        stream = EventStream(send, write_now, answer.keep_alive)

        def write(job: Job, event: TokenEvent, delta: Delta) -> Awaitable[None] | None:
            if event.prompt_logprobs is not None and num_prompt_values(job) > MOST_VALUES_ON_LOOP:
                return write_prompt(job, event, delta)
            chunk = answer.chunk(job, event, delta, generation)
            return stream.write(chunk) if chunk else None

        async def write_prompt(job: Job, event: TokenEvent, delta: Delta) -> None:
            """A long one's log-probabilities, which come with its first event, are made in a thread."""
            chunk = await asyncio.to_thread(answer.chunk, job, event, delta, generation)
            if chunk and (written := stream.write(chunk)) is not None:
                await written

        await stream.start()
        self.state.keeper.add(stream)
        try:
            if opening := answer.opening(generation):
                await stream.put(opening)
            await generation.run(receive, write)
            # A client that has left gets nothing more, and an answer that was cut off for that is not kept.
            last = b"" if generation.client_is_gone else await answer.ended(generation)
            await stream.finish(last + answer.stream_end)
        except Exception as error:  # noqa: BLE001  # logged by as_api_error; the status line is out already
            await stream.finish(answer.failure(as_api_error(error)) + answer.stream_end)
        finally:
            self.state.keeper.discard(stream)


def check_content_type(scope: Scope) -> None:
    """Raises ApiError 415 for a content type other than JSON, such as a web page's form can send to a local server. An
    absent type is accepted."""
    for name, value in scope["headers"]:
        if name == b"content-type" and value.partition(b";")[0].strip().lower() not in JSON_TYPES:
            raise ApiError(415, "The content-type must be application/json.", code="unsupported_media_type")
