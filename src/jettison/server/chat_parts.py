"""The parts of a choice as OpenAI's API writes them: deltas of a stream, and the message that they add up to.

``reasoning_content`` and ``reasoning`` are the same: clients read the one or the other.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import Any

from jettison.server.answer_form import Form
from jettison.server.conversation import SHORT_ID_CHARS
from jettison.server.parsers.parts import Part

_LETTERS = string.ascii_letters + string.digits
ID_CHARS = 24


class ChoiceParts:
    """One choice. ``deltas`` in order, then ``message``."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []

    def deltas(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """What is new, each delta with one thing: text of one kind, the name of a call, or a piece of its arguments."""
        if len(parts) == 1 and parts[0].kind != "end":  # of most tokens
            return [self._delta(*parts[0])]
        return [self._delta(kind, text) for kind, text in _joined(parts)]

    def message(self, echoed: str) -> dict[str, Any]:
        """All of it, as the fields of a message. ``echoed``: text that the content begins with."""
        content = echoed + "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._calls and not content:
            message["content"] = None
        if self._form.has_thoughts and self._form.tells_thoughts:
            thoughts = "".join(self._thoughts) or None
            message |= {"reasoning_content": thoughts, "reasoning": thoughts}
        calls = [
            call | {"function": {"name": call["function"]["name"], "arguments": "".join(arguments)}}
            for call, arguments in zip(self._calls, self._arguments, strict=True)]
        if calls and self._form.is_old:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        return message

    def _delta(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "content":
            self._content.append(text)
            return {"content": text}
        if kind == "reasoning":
            self._thoughts.append(text)
            return {"reasoning_content": text, "reasoning": text}
        if kind == "call":
            function = {"name": text, "arguments": ""}
            self._calls.append({"id": self._new_id(), "type": "function", "function": function})
            self._arguments.append([])
            call = self._calls[-1]
        else:
            function, call = {"arguments": text}, {"function": {"arguments": text}}
            self._arguments[-1].append(text)
        if self._form.is_old:
            return {"function_call": function}
        return {"tool_calls": [{"index": len(self._calls) - 1} | call]}

    def _new_id(self) -> str:
        if self._form.has_short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(SHORT_ID_CHARS))
        return "call_" + secrets.token_hex(ID_CHARS // 2)


def _joined(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """The parts with neighbours of one kind as one, and without the ends of calls."""
    joined: list[tuple[str, str]] = []
    last = None
    for kind, text in parts:
        if kind == last and kind != "call":
            joined[-1] = kind, joined[-1][1] + text
        elif kind != "end":
            joined.append((kind, text))
        last = kind
    return joined
