"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from jettison.live.engine.api import TokenEvent
from jettison.server.chat_options import chat_options
from jettison.server.choice import Delta
from jettison.server.endpoint import FINISH_JSON, Answer, GenerationEndpoint
from jettison.server.fields import ChatFields, parse_fields
from jettison.server.generation import Generation, Job
from jettison.server.json_out import encode
from jettison.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
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

    def __init__(
        self, state: ServerState, plan: GenerationPlan, model: str, *, echoed: str = "", prompt_text: str | None = None
    ) -> None:
        """``echoed``: text that every choice begins with; ``prompt_text``: text shown beside the choices."""
        super().__init__(state, plan, model, "chat.completion", "chatcmpl")
        self._choices: dict[int, _Collected] = {}
        self._names = TokenNames(state.tokenizer, as_ids=plan.tokens_as_ids)
        self._echoed = echoed
        self._prompt_text = prompt_text
        self._prompt_entries: list[TokenLogprobs | None] = []

    def chunk_header(self) -> dict[str, Any]:
        """See ``Answer``."""
        return self.header | {"object": "chat.completion.chunk"}

    def choice_chunk(self, job: Job, event: TokenEvent, delta: Delta) -> bytes:
        """See ``Answer``. The role comes with the first token, never before: clients time that chunk."""
        first = job.num_events == 0
        text = self._echoed + delta.text if first else delta.text
        parts = [
            b'{"index":%d,"delta":{' % job.index,
            b'"role":"assistant",' if first else b"",
            b'"content":',
            encode(text),
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

    def first_fields(self, job: Job) -> bytes:
        """See ``Answer``."""
        return b"" if self._prompt_text is None else b',"prompt_text":' + encode(self._prompt_text)

    def collect(self, job: Job, event: TokenEvent, delta: Delta) -> None:
        """See ``Answer``."""
        if event.prompt_logprobs is not None:
            self._prompt_entries = event.prompt_logprobs
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
        if self.plan.prompt_logprobs is not None:
            document["prompt_logprobs"] = prompt_logprobs(
                self.state.tokenizer, self._prompt_entries, self.plan.prompt_logprobs)
        if self._prompt_text is not None:
            document["prompt_text"] = self._prompt_text
        return document

    def _choice(self, job: Job) -> dict[str, Any]:
        collected = self._choices[job.index]
        choice: dict[str, Any] = {
            "index": job.index,
            "message": {"role": "assistant", "content": "".join([self._echoed, *collected.texts]), "refusal": None},
            "logprobs": None if self.plan.params.logprobs is None else self._logprobs(collected.logprobs),
            "finish_reason": job.text.finish_reason,
        }
        if self.plan.return_token_ids:
            choice["token_ids"] = collected.token_ids
        return choice

    def _logprobs(self, entries: list[TokenLogprobs | None]) -> dict[str, Any]:
        params = self.plan.params
        return chat_logprobs(self._names, entries, None if params.logprob_token_ids else params.logprobs or 0)


class ChatEndpoint(GenerationEndpoint):
    """Messages in, an assistant's message out."""

    prompt_field = "messages"

    async def prepare(self, document: dict[str, Any]) -> tuple[GenerationPlan, list[Prompt], Answer]:
        """See ``GenerationEndpoint``."""
        state = self.state
        fields = parse_fields(document, ChatFields, state.warnings)
        model = state.check_model(fields.model)
        plan = plan_chat(fields, state.engine.info, state.settings.request_limits, state.draw_seed)
        chat = state.tokenizer.chat
        # Tools reach this point only where the model may not call them; the template writes them all the same.
        tools = None if chat.settings.leaves_out_unused_tools else document.get("tools")
        options = chat_options(fields, tools, chat, state.warnings)
        prompt = await chat_prompt(
            fields.messages, state.tokenizer, options, thread_chars=self.thread_chars,
            add_special_tokens=bool(fields.add_special_tokens))
        plan = await self.with_grammar(await self.with_bad_words(plan))
        answer = ChatAnswer(
            state, plan, model,
            echoed=last_answer(fields.messages) if fields.echo else "",
            prompt_text=prompt.text if fields.return_prompt_text else None,
        )
        return plan, self.cut(plan, [prompt]), answer


def last_answer(messages: list[dict[str, Any]] | None) -> str:
    """The text of the last message, where the answer has the same role; for an echo."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        return ""
    content = last.get("content")
    if isinstance(content, list):
        return "\n".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
    return content if isinstance(content, str) else ""
