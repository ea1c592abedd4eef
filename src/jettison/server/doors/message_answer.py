"""An answer of ``/v1/messages``: a message, and the events that build it."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from jettison.live.engine.api import TokenEvent
from jettison.server.answer_form import Form
from jettison.server.choice import Delta
from jettison.server.doors.blocks import Block, Blocks, Step
from jettison.server.doors.wire import named_event
from jettison.server.endpoint import WireAnswer
from jettison.server.errors import ApiError
from jettison.server.generation import Generation, Job
from jettison.server.json_out import encode
from jettison.server.sampling import GenerationPlan

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageAnswer(WireAnswer):
    """One message."""

    keep_alive = PING
    stream_end = b""

    def __init__(self, plan: GenerationPlan, model: str, asked_tokens: int) -> None:
        """``asked_tokens``: most tokens of the answer, as client and operator let it, whatever room the context has."""
        self.plan = plan
        self._asked_tokens = asked_tokens
        self._model = model
        self.id = f"msg_{secrets.token_hex(12)}"
        self._blocks = Blocks(plan.text.form, "toolu_")

    @property
    def _form(self) -> Form | None:
        return self.plan.text.form

    def collect(self, job: Job, event: TokenEvent, delta: Delta) -> None:
        """See ``WireAnswer``."""
        self._blocks.feed(delta)

    def document(self, generation: Generation) -> dict[str, Any]:
        """See ``WireAnswer``."""
        self._blocks.end()
        return self._message([self._told(block) for block in self._blocks.blocks]) | self._ending(generation) | {
            "usage": self._usage(generation)}

    def opening(self, generation: Generation) -> bytes:
        """See ``WireAnswer``. What of the prompt is cached is told at the end."""
        usage = self._usage(generation)
        return named_event("message_start", {"message": self._message([]) | {
            "stop_reason": None, "stop_sequence": None, "usage": usage}}) + PING

    def chunk(self, job: Job, event: TokenEvent, delta: Delta, generation: Generation) -> bytes:
        """See ``WireAnswer``."""
        return b"".join(map(self._events, self._blocks.feed(delta)))

    def closing(self, generation: Generation) -> bytes:
        """See ``WireAnswer``."""
        last = b"".join(map(self._events, self._blocks.end()))
        delta = named_event("message_delta", {
            "delta": self._ending(generation), "usage": self._usage(generation)})
        return last + delta + named_event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        """See ``WireAnswer``."""
        return b"event: error\ndata: " + error.anthropic_body + b"\n\n"

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self._model, "content": content,
            "stop_details": None}

    def _ending(self, generation: Generation) -> dict[str, Any]:
        job = generation.jobs[0]
        reason = job.text.finish_reason
        sequence = job.text.stop_string if reason == "stop" else None
        told = "stop_sequence" if sequence is not None else _STOP_REASONS.get(str(reason), "end_turn")
        if told == "max_tokens" and job.text.num_tokens < self._asked_tokens:
            told = "model_context_window_exceeded"
        return {"stop_reason": told, "stop_sequence": sequence}

    def _usage(self, generation: Generation) -> dict[str, Any]:
        cached = generation.num_cached_tokens
        usage: dict[str, Any] = {
            "input_tokens": generation.num_prompt_tokens - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": generation.num_output_tokens}
        if self._form is not None and self._form.has_thoughts:
            usage["output_tokens_details"] = {"thinking_tokens": generation.num_reasoning_tokens}
        return usage

    def _told(self, block: Block) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "thought":
            return {"type": "thinking", "thinking": block.text, "signature": self.id}
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": read_arguments(block.text)}

    def _events(self, step: Step) -> bytes:
        block = step.block
        if step.kind == "open":
            empty = {"text": {"type": "text", "text": ""}, "thought": {
                "type": "thinking", "thinking": "", "signature": ""}, "call": {
                "type": "tool_use", "id": block.id, "name": block.name, "input": {}}}[block.kind]
            return named_event("content_block_start", {"index": block.index, "content_block": empty})
        if step.kind == "more":
            return self._delta(block, {
                "text": {"type": "text_delta", "text": step.text},
                "thought": {"type": "thinking_delta", "thinking": step.text},
                "call": {"type": "input_json_delta", "partial_json": step.text}}[block.kind])
        # Clients take thoughts for complete once they are signed; this signature is never looked at again.
        signed = {"type": "signature_delta", "signature": self.id}
        return (self._delta(block, signed) if block.kind == "thought" else b"") + named_event(
            "content_block_stop", {"index": block.index})

    def _delta(self, block: Block, delta: dict[str, Any]) -> bytes:
        return named_event("content_block_delta", {"index": block.index, "delta": delta})


def read_arguments(text: str) -> dict[str, Any] | msgspec.Raw:
    """A call's arguments as an object. Where the answer was cut, or the model wrote no object, they are kept as text
    under a name of their own."""
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
        told = msgspec.Raw(encode(value))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {"unread_arguments": text}
    return told if isinstance(value, dict) else {"unread_arguments": text}
