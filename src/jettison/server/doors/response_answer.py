"""An answer of ``/v1/responses``: a response with its items, and the events that build it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from jettison.live.engine.api import TokenEvent
from jettison.server.choice import Delta
from jettison.server.doors.blocks import Block, Blocks, Step
from jettison.server.doors.response_store import item_id_of
from jettison.server.doors.response_tools import Called, Names, input_of
from jettison.server.doors.wire import named_event
from jettison.server.endpoint import WireAnswer
from jettison.server.errors import ApiError
from jettison.server.generation import Generation, Job
from jettison.server.sampling import GenerationPlan

Document = dict[str, Any]
Keep = Callable[[Document], Callable[[], None] | None]
"""Encodes the finished response, in any thread, to be kept; what it returns keeps it, and belongs to the event loop.
None: it is too large to be kept."""

_EVENTS = {
    "text": "response.output_text", "thought": "response.reasoning_text", "call": "response.function_call_arguments"}
"""Names of the events of a block's texts."""
_PREFIXES = {"text": "msg_", "thought": "rs_", "call": "fc_"}


class ResponseAnswer(WireAnswer):
    """One response."""

    stream_end = b""

    def __init__(self, plan: GenerationPlan, model: str, asked: Document, names: Names, keep: Keep | None) -> None:
        """``asked``: what the response tells of its request; ``names``: of its tools; ``keep``: None where it is not
        kept."""
        self.plan = plan
        self.id = f"resp_{secrets.token_hex(16)}"
        self._asked = asked
        self._names = names
        self._keep = keep
        self._put: Callable[[], None] | None = None
        """Keeps the response, once it is finished."""
        self._blocks = Blocks(plan.text.form, "call_")
        self._num_events = 0
        self._is_cut = False
        """Whether the answer was cut in its last block."""
        self._head: Document = {
            "id": self.id, "object": "response", "created_at": int(time.time()), "model": model}

    def collect(self, job: Job, event: TokenEvent, delta: Delta) -> None:
        """See ``WireAnswer``."""
        self._blocks.feed(delta)

    def document(self, generation: Generation) -> Document:
        """See ``WireAnswer``."""
        self._blocks.end()
        return self._finished(generation)

    async def encoded(self, generation: Generation) -> bytes:
        """See ``WireAnswer``. The response is kept before its client can ask for it."""
        body = await super().encoded(generation)
        self._put_away()
        return body

    async def ended(self, generation: Generation) -> bytes:
        """See ``WireAnswer``. The last events tell the whole response again."""
        last = await self.made(lambda: self.closing(generation), generation)
        self._put_away()
        return last

    def _put_away(self) -> None:
        if self._put is not None:
            self._put()

    def opening(self, generation: Generation) -> bytes:
        """See ``WireAnswer``."""
        return b"".join(
            self._event(f"response.{name}", response=self._response("in_progress", []))
            for name in ("created", "in_progress"))

    def chunk(self, job: Job, event: TokenEvent, delta: Delta, generation: Generation) -> bytes:
        """See ``WireAnswer``."""
        self._is_cut = delta.finish_reason == "length"
        return b"".join(map(self._events, self._blocks.feed(delta)))

    def closing(self, generation: Generation) -> bytes:
        """See ``WireAnswer``."""
        self._is_cut = _is_cut(generation)
        last = b"".join(map(self._events, self._blocks.end()))
        response = self._finished(generation)
        return last + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        """See ``WireAnswer``."""
        told = {"code": error.code or "server_error", "message": error.message}
        items = [self._item(block, "completed" if block.is_closed else "incomplete") for block in self._blocks.blocks]
        return self._event("response.failed", response=self._response("failed", items) | {"error": told})

    def _finished(self, generation: Generation) -> Document:
        is_cut = _is_cut(generation)
        status = "incomplete" if is_cut else "completed"
        blocks = self._blocks.blocks
        items = [self._item(block, status if block is blocks[-1] else "completed") for block in blocks]
        response = self._response(status, items) | {"usage": _usage(generation)}
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        if self._keep is not None:
            self._put = self._keep(response)
            response["store"] = self._put is not None
        return response

    def _response(self, status: str, items: list[Document]) -> Document:
        return self._head | {
            "status": status, "background": False, "error": None, "incomplete_details": None, "output": items,
            **self._asked, "usage": None}

    def _event(self, name: str, /, **document: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(name, {"sequence_number": number} | document)

    def _item_id(self, block: Block) -> str:
        return item_id_of("ctc_" if self._is_custom(block) else _PREFIXES[block.kind], self.id, block.index)

    def _item(self, block: Block, status: str) -> Document:
        head: Document = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            return head | self._call(block)
        content = [_part(block)] if block.texts or status != "in_progress" else []
        if block.kind == "thought":
            return head | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return head | {"type": "message", "role": "assistant", "content": content}

    def _is_custom(self, block: Block) -> bool:
        return block.kind == "call" and block.name in self._names and self._names[block.name].kind == "custom"

    def _call(self, block: Block) -> Document:
        called = self._names.get(block.name, Called("function", block.name))
        call: Document = {"call_id": block.id, "name": called.name}
        if called.namespace is not None:
            call["namespace"] = called.namespace
        if called.kind == "custom":
            return {"type": "custom_tool_call", "input": input_of(block.text) if block.is_closed else ""} | call
        return {"type": "function_call", "arguments": block.text} | call

    def _custom_events(self, step: Step, at: Document) -> bytes:
        """Its text is told when it is whole: what the model writes is JSON around it."""
        if step.kind == "more":
            return b""
        name, told = "response.custom_tool_call_input", input_of(step.block.text)
        return self._event(f"{name}.delta", **at, delta=told) + self._event(f"{name}.done", **at, input=told)

    def _events(self, step: Step) -> bytes:
        block = step.block
        at = {"item_id": self._item_id(block), "output_index": block.index}
        if step.kind == "open":
            return self._opened(block, at)
        if block.kind != "call":
            at["content_index"] = 0
        name = _EVENTS[block.kind]
        told: Document = {"logprobs": []} if block.kind == "text" else {}
        if self._is_custom(block):
            done = self._custom_events(step, at)
        elif step.kind == "more":
            return self._event(f"{name}.delta", **at, delta=step.text, **told)
        elif block.kind == "call":
            done = self._event(f"{name}.done", **at, name=self._call(block)["name"], arguments=block.text)
        else:
            done = self._event(f"{name}.done", **at, text=block.text, **told) + self._event(
                "response.content_part.done", **at, part=_part(block))
        if step.kind == "more":
            return done
        is_cut = self._is_cut and block is self._blocks.blocks[-1]
        item = self._item(block, "incomplete" if is_cut else "completed")
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def _opened(self, block: Block, at: Document) -> bytes:
        """The block has texts already, those of the same delta. Events that follow tell them, and clients add these
        to the item, so the item is that of an empty block."""
        empty = Block(block.kind, block.index, block.id, block.name)
        added = self._event(
            "response.output_item.added", output_index=block.index, item=self._item(empty, "in_progress"))
        if block.kind == "call":
            return added
        return added + self._event("response.content_part.added", **at, content_index=0, part=_part(block, ""))


def _is_cut(generation: Generation) -> bool:
    return generation.jobs[0].text.finish_reason == "length"


def _part(block: Block, text: str | None = None) -> Document:
    """The one part of a message or of thoughts. ``text``: in place of the block's."""
    text = block.text if text is None else text
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(generation: Generation) -> Document:
    num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": generation.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": generation.num_reasoning_tokens},
        "total_tokens": num_prompt + num_output,
    }
