"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from jettison.live.engine.api import TokenEvent
from jettison.server.chat_options import chat_options
from jettison.server.choice import Delta
from jettison.server.endpoint import FINISH_JSON, Answer, GenerationEndpoint
from jettison.server.errors import bad_request
from jettison.server.fields import ChatFields, parse_fields
from jettison.server.generation import Generation, Job
from jettison.server.json_out import encode
from jettison.server.logprobs import chat_logprobs
from jettison.server.prompts import Prompt, chat_prompt
from jettison.server.sampling import GenerationPlan, plan_chat
from jettison.server.state import ServerState
from jettison.types import TokenLogprobs


class _Collected:
    """One choice of an answer in one piece."""

    __slots__ = ("logprobs", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []


class ChatAnswer(Answer):
    """``chat.completion`` and its chunks."""

    def __init__(self, state: ServerState, plan: GenerationPlan, model: str) -> None:
        super().__init__(state, plan, model, "chat.completion", "chatcmpl")
        self._choices: dict[int, _Collected] = {}

    def chunk_header(self) -> dict[str, Any]:
        """See ``Answer``."""
        return self.header | {"object": "chat.completion.chunk"}

    def choice_chunk(self, job: Job, event: TokenEvent, delta: Delta) -> bytes:
        """See ``Answer``. The role comes with the first token, never before: clients time that chunk."""
        first = job.num_events == 0
        parts = [
            b'{"index":%d,"delta":{' % job.index,
            b'"role":"assistant",' if first else b"",
            b'"content":',
            encode(delta.text),
            b'},"logprobs":',
            b"null" if self.plan.params.logprobs is None else encode(self._logprobs(delta.logprobs)),
            FINISH_JSON[delta.finish_reason],
        ]
        if self.plan.return_token_ids:
            parts += b',"token_ids":', encode(delta.token_ids)
            if first:
                parts += b',"prompt_token_ids":', encode(job.prompt.token_ids)
        parts.append(b"}")
        return b"".join(parts)

    def collect(self, job: Job, event: TokenEvent, delta: Delta) -> None:
        """See ``Answer``."""
        choice = self._choices.setdefault(job.index, _Collected())
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs

    def document(self, generation: Generation) -> dict[str, Any]:
        """See ``Answer``."""
        choices = [self._choice(job) for job in generation.jobs]
        document = self.header | {"choices": choices, "usage": self.usage(generation)}
        if self.plan.return_token_ids:
            document["prompt_token_ids"] = generation.jobs[0].prompt.token_ids
        return document

    def _choice(self, job: Job) -> dict[str, Any]:
        collected = self._choices[job.index]
        choice: dict[str, Any] = {
            "index": job.index,
            "message": {"role": "assistant", "content": "".join(collected.texts), "refusal": None},
            "logprobs": None if self.plan.params.logprobs is None else self._logprobs(collected.logprobs),
            "finish_reason": job.text.finish_reason,
        }
        if self.plan.return_token_ids:
            choice["token_ids"] = collected.token_ids
        return choice

    def _logprobs(self, entries: list[TokenLogprobs | None]) -> dict[str, Any]:
        return chat_logprobs(self.state.tokenizer, entries, self.plan.params.logprobs or 0)


class ChatEndpoint(GenerationEndpoint):
    """Messages in, an assistant's message out."""

    prompt_field = "messages"

    async def prepare(self, document: dict[str, Any]) -> tuple[GenerationPlan, list[Prompt], Answer]:
        """See ``GenerationEndpoint``."""
        state = self.state
        fields = parse_fields(document, ChatFields, state.warnings)
        model = state.check_model(fields.model)
        settings = state.settings
        plan = plan_chat(
            fields, state.engine.info, settings.default_chat_max_tokens, state.draw_seed, settings.sampling_defaults)
        if document.get("prompt") is not None:
            raise bad_request("prompt belongs to /v1/completions; here the field is messages.", "prompt")
        chat = state.tokenizer.chat
        # Tools that get here are those that the model may not call; the template writes them all the same.
        tools = None if chat.settings.leaves_out_unused_tools else document.get("tools")
        options = chat_options(fields, tools, chat, state.warnings)
        prompt = await chat_prompt(fields.messages, state.tokenizer, options, thread_chars=self.thread_chars)
        return plan, [prompt], ChatAnswer(state, plan, model)
