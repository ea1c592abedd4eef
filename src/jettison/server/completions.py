"""``POST /v1/completions``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jettison.live.engine.api import TokenEvent
from jettison.server.choice import Delta
from jettison.server.endpoint import Answer, GenerationEndpoint, finish_json
from jettison.server.errors import bad_request
from jettison.server.fields import CompletionFields, parse_fields
from jettison.server.generation import Generation, Job
from jettison.server.json_out import encode
from jettison.server.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from jettison.server.prompts import Prompt, completion_prompts, with_texts
from jettison.server.sampling import NO_SEED, GenerationPlan, plan_completion, seed_source
from jettison.server.state import ServerState
from jettison.types import TokenLogprobs


class _Part:
    """The contents of a chunk, or of a whole choice; parts add up."""

    __slots__ = ("entries", "offsets", "text", "token_ids")

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.entries: list[TokenLogprobs | None] = []
        self.offsets: list[int] = []


class CompletionAnswer(Answer):
    """``text_completion``, whole or in chunks."""

    def __init__(self, state: ServerState, plan: GenerationPlan, model: str) -> None:
        super().__init__(state, plan, model, "text_completion", "cmpl")
        self._choices: dict[int, list[_Part]] = {}
        self._names = TokenNames(state.tokenizer, as_ids=plan.tokens_as_ids)
        self._prompt_entries: dict[int, list[TokenLogprobs | None]] = {}
        """Logprobs of each choice's prompt, where they are shown apart from the answer's."""

    def chunk_header(self) -> dict[str, Any]:
        """See ``Answer``."""
        return self.header

    def choice_chunk(self, job: Job, event: TokenEvent, delta: Delta) -> bytes:
        """See ``Answer``. With echo the first chunk carries the prompt too."""
        first = job.num_events == 0
        text, logprobs = delta.text, b"null"
        if self.plan.params.logprobs is not None or (self.plan.echo and first):
            part = self._part(job, event, delta)
            text = part.text
            if self.plan.params.logprobs is not None:
                logprobs = encode(self._logprobs(part))
        parts = [
            b'{"index":%d,"text":' % job.index,
            encode(text),
            b',"logprobs":',
            logprobs,
            finish_json(job, delta),
        ]
        if self.plan.return_token_ids:
            parts += b',"token_ids":', encode(delta.token_ids)
            if first:
                parts += b',"prompt_token_ids":', encode(job.prompt.token_ids)
        parts.append(b"}")
        return b"".join(parts)

    def collect(self, job: Job, event: TokenEvent, delta: Delta) -> None:
        """See ``Answer``."""
        self._choices.setdefault(job.index, []).append(self._part(job, event, delta))
        if self.plan.prompt_logprobs is not None and event.prompt_logprobs is not None:
            self._prompt_entries[job.index] = event.prompt_logprobs

    def document(self, generation: Generation) -> dict[str, Any]:
        """See ``Answer``."""
        choices = [self._choice(job) for job in generation.jobs]
        return self.header | {"choices": choices, "usage": self.usage(generation)}

    def _choice(self, job: Job) -> dict[str, Any]:
        whole = _Part()
        texts = []
        for part in self._choices[job.index]:
            texts.append(part.text)
            whole.token_ids += part.token_ids
            whole.entries += part.entries
            whole.offsets += part.offsets
        choice: dict[str, Any] = {
            "index": job.index,
            "text": "".join(texts),
            "logprobs": None if self.plan.params.logprobs is None else self._logprobs(whole),
            "finish_reason": job.text.finish_reason,
            "stop_reason": job.text.stop_reason,
        }
        if self.plan.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self.state.tokenizer, self._prompt_entries[job.index], self.plan.prompt_logprobs)
        if self.plan.return_token_ids:
            num_echoed = len(job.prompt.token_ids) if self.plan.echo else 0
            choice["token_ids"] = whole.token_ids[num_echoed:]
            choice["prompt_token_ids"] = job.prompt.token_ids
        return choice

    def _part(self, job: Job, event: TokenEvent, delta: Delta) -> _Part:
        part = _Part()
        if self.plan.echo and job.num_events == 0:
            self._echo(job, event, part)
        part.text += delta.text
        part.token_ids += delta.token_ids
        part.entries += delta.logprobs
        part.offsets += delta.text_offsets
        return part

    def _echo(self, job: Job, event: TokenEvent, part: _Part) -> None:
        tokenizer, prompt = self.state.tokenizer, job.prompt
        part.text = prompt.text or ""
        part.token_ids += prompt.token_ids
        if self.plan.params.logprobs is None:
            return
        num_prompt = len(prompt.token_ids)
        entries = event.prompt_logprobs
        if entries is None or len(entries) != num_prompt:
            raise RuntimeError("the engine sent no logprobs of the prompt with its first event")
        num_top = self.plan.params.logprobs
        part.entries += [None if entry is None else entry._replace(top=entry.top[:num_top]) for entry in entries]
        detokenizer = tokenizer.detokenizer(self.plan.text.skip_special_tokens)
        num_chars = 0
        for token_id in prompt.token_ids:
            part.offsets.append(num_chars)
            num_chars += len(detokenizer.push(token_id))

    def _logprobs(self, part: _Part) -> dict[str, Any]:
        return completion_logprobs(self._names, part.token_ids, part.entries, part.offsets)


class CompletionEndpoint(GenerationEndpoint):
    """Prompts in, their continuations out."""

    async def prepare(self, document: dict[str, Any]) -> tuple[GenerationPlan, list[Prompt], Answer]:
        """See ``GenerationEndpoint``."""
        state, settings = self.state, self.state.settings
        fields = parse_fields(document, CompletionFields, state.warnings)
        model = state.check_model(fields.model)
        info = state.engine.info
        plan = plan_completion(fields, info, settings.request_limits, state.draw_seed)
        prompts = await completion_prompts(
            fields.prompt,
            state.tokenizer,
            add_special_tokens=fields.add_special_tokens is not False,
            vocab_size=info.vocab_size,
            max_prompts=settings.max_choices,
            thread_chars=self.thread_chars,
        )
        if len(prompts) * plan.num_samples > settings.max_choices:
            message = f"prompts times n may be at most {settings.max_choices}."
            raise bad_request(message, "n" if plan.num_samples > 1 else "prompt")
        plan = await self.with_grammar(await self.with_bad_words(plan))
        prompts = self.cut(plan, prompts)
        if plan.echo:
            prompts = await with_texts(
                prompts, state.tokenizer, skip_special_tokens=plan.text.skip_special_tokens,
                thread_chars=self.thread_chars)
        if fields.seed in (None, NO_SEED):  # else the same prompt, sent several times, would get the same answer
            draw = seed_source(plan.params.seed)
            prompts = [replace(prompt, first_sample=draw() if at else 0) for at, prompt in enumerate(prompts)]
        return plan, prompts, CompletionAnswer(state, plan, model)
