"""``POST /v1/chat/completions``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jettison.live.engine.api import TokenEvent
from jettison.server.chat_options import chat_options, say_reasoning, with_reasoning
from jettison.server.chat_parts import ChoiceParts
from jettison.server.choice import Delta
from jettison.server.endpoint import Answer, GenerationEndpoint, WireAnswer, finish_json
from jettison.server.fields import ChatFields, parse_fields
from jettison.server.forced_calls import constraint_of, writes_calls
from jettison.server.generation import Generation, Job
from jettison.server.json_out import encode
from jettison.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from jettison.server.prompts import Prompt, chat_prompt
from jettison.server.sampling import GenerationPlan, plan_chat
from jettison.server.state import ServerState
from jettison.server.tools import ToolPlan, plan_tools
from jettison.types import TokenLogprobs

_NOTHING = Delta("", None, [])


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
        self._parts: dict[int, ChoiceParts] = {}
        """Of each choice, where the answers are read for calls and thoughts."""
        self._names = TokenNames(state.tokenizer, as_ids=plan.tokens_as_ids)
        self._echoed = echoed
        self._prompt_text = prompt_text
        self._prompt_entries: list[TokenLogprobs | None] = []
        self._now = b"{}"
        """The delta that the next chunk tells."""

    def chunk_header(self) -> dict[str, Any]:
        """See ``Answer``."""
        return self.header | {"object": "chat.completion.chunk"}

    def chunk(self, job: Job, event: TokenEvent, delta: Delta, generation: Generation) -> bytes:
        """See ``Answer``. An answer that is read for calls has a chunk for each thing that it says, as many clients
        look at one call of a chunk only, and none while it says nothing. What a chunk has beside is in the last one."""
        if job.text.form is None:
            return super().chunk(job, event, delta, generation)
        told = self._told(job, delta)
        has_more = self.plan.params.logprobs is not None or self.plan.return_token_ids or self.plan.continuous_usage
        if not told and (has_more or delta.finish_reason is not None):
            told = [{}]
        chunks = []
        for at, one in enumerate(told, 1):
            self._now = encode(one)
            chunks.append(super().chunk(job, event, delta if at == len(told) else _NOTHING, generation))
        return b"".join(chunks)

    def _told(self, job: Job, delta: Delta) -> list[dict[str, Any]]:
        """The deltas of an event. The first one of a choice has the role, and a content, as OpenAI's has."""
        told = self._read(job).deltas(delta.parts)
        if job.num_events == 0:
            first = {"role": "assistant", "content": self._echoed}
            if told and "content" in told[0]:
                told[0] = first | {"content": self._echoed + told[0]["content"]}
            elif told and "tool_calls" not in told[0] and "function_call" not in told[0]:
                told[0] = first | told[0]
            else:
                told.insert(0, first)
        return told

    def _read(self, job: Job) -> ChoiceParts:
        parts = self._parts.get(job.index)
        if parts is None:
            assert job.text.form is not None, "the answer is content only"
            parts = self._parts[job.index] = ChoiceParts(job.text.form)
        return parts

    def choice_chunk(self, job: Job, event: TokenEvent, delta: Delta) -> bytes:
        """See ``Answer``. The role comes with the first token, never before: clients time that chunk."""
        first = job.num_events == 0
        parts = [b'{"index":%d,"delta":' % job.index]
        if job.text.form is None:
            text = self._echoed + delta.text if first else delta.text
            parts += b'{"role":"assistant","content":' if first else b'{"content":', encode(text), b"}"
        else:
            parts.append(self._now)
        parts += [
            b',"logprobs":',
            b"null" if self.plan.params.logprobs is None else encode(self._logprobs(delta.logprobs)),
            finish_json(job, delta),
        ]
        if self.plan.return_token_ids:
            parts += b',"token_ids":', encode(delta.token_ids)
        parts.append(b"}")
        return b"".join(parts)

    def first_fields(self, job: Job) -> bytes:
        """See ``Answer``."""
        told = b',"prompt_token_ids":' + encode(job.prompt.token_ids) if self.plan.return_token_ids else b""
        return told if self._prompt_text is None else told + b',"prompt_text":' + encode(self._prompt_text)

    def collect(self, job: Job, event: TokenEvent, delta: Delta) -> None:
        """See ``Answer``."""
        if event.prompt_logprobs is not None:
            self._prompt_entries = event.prompt_logprobs
        choice = self._choices.setdefault(job.index, _Collected())
        choice.texts.append(delta.text)
        if job.text.form is not None:
            self._read(job).deltas(delta.parts)
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
        if job.text.form is None:
            content = "".join([self._echoed, *collected.texts])
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        else:
            message = self._read(job).message(self._echoed)
        choice: dict[str, Any] = {
            "index": job.index,
            "message": message,
            "logprobs": None if self.plan.params.logprobs is None else self._logprobs(collected.logprobs),
            "finish_reason": job.text.finish_reason,
            "stop_reason": job.text.stop_reason,
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
    tells_parts_apart = True
    """Whether thoughts and calls are told apart from content; if not, an answer is the text that the model writes."""

    async def prepare(self, document: dict[str, Any]) -> tuple[GenerationPlan, list[Prompt], WireAnswer]:
        """See ``GenerationEndpoint``."""
        state = self.state
        fields = parse_fields(with_reasoning(document, state.warnings), ChatFields, state.warnings)
        say_reasoning(fields)
        model = state.check_model(fields.model)
        plan = plan_chat(fields, state.engine.info, state.settings.request_limits, state.draw_seed)
        calling = plan_tools(fields)
        chat = state.tokenizer.chat
        # The template writes tools also where none may be called, as the history may have calls of them.
        leaves_out = calling.mode == "none" and chat.settings.leaves_out_unused_tools
        options = chat_options(fields, None if leaves_out else list(calling.tools), chat, state.warnings)
        prompt = await chat_prompt(
            fields.messages, state.tokenizer, options, thread_chars=self.thread_chars,
            add_special_tokens=bool(fields.add_special_tokens))
        opened = last_answer(fields.messages) if options.continue_final_message else ""
        plan = self._read_as(
            plan, calling, prompt, opened, tells_thoughts=fields.include_reasoning is not False)
        plan = await self.with_grammar(await self.with_bad_words(plan))
        answer = ChatAnswer(
            state, plan, model,
            echoed=last_answer(fields.messages) if fields.echo else "",
            prompt_text=prompt.text if fields.return_prompt_text else None,
        )
        return plan, self.cut(plan, [prompt]), answer

    def _read_as(
        self, plan: GenerationPlan, calling: ToolPlan, prompt: Prompt, opened: str, *, tells_thoughts: bool
    ) -> GenerationPlan:
        """The plan with the form of the answers, and with what they have to look like so that it can be read."""
        forms = self.state.forms
        speech = forms.speech(prompt.text or "", opened)
        constraint = constraint_of(
            calling, speech, plan.constraint,
            lambda keyword: self.state.warnings.note_ignored(
                f"tools.parameters.{keyword}", "grammars cannot follow it, and the tool is not strict"))
        form = forms.form(
            calling, speech, has_written_calls=writes_calls(calling, speech, plan.constraint),
            tells_thoughts=tells_thoughts, is_streamed=plan.stream,
        ) if self.tells_parts_apart else None  # fmt: skip
        return replace(plan, constraint=constraint, text=replace(plan.text, form=form))


def last_answer(messages: list[dict[str, Any]] | None) -> str:
    """The text of the last message, where the answer has the same role; for an echo."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        return ""
    content = last.get("content")
    if isinstance(content, list):
        return "\n".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
    return content if isinstance(content, str) else ""
