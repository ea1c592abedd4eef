"""What a parser says of an answer, and what a parser is.

A parser of one's own (``--tool-call-parser FILE``) is a Python file with a function ``parser(tools)``, which gets the
request's tools as the client sent them, and returns an object with ``feed`` and ``end`` as below. It may define
``MARKERS``, the texts of special tokens that it needs to see. Its parts may be plain pairs, so it imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

Kind = Literal["content", "reasoning", "call", "arguments", "end"]


class Part(NamedTuple):
    """A piece of an answer. Pieces of one kind that follow one another are one text."""

    kind: Kind
    """``call`` begins a call, ``arguments`` are the next characters of its arguments, ``end`` ends it. No call begins
    inside another."""
    text: str = ""
    """Of a ``call``: the function's name; of an ``end``: nothing."""


class Parser(Protocol):
    """One answer. What it says in all does not depend on how the text is cut."""

    def feed(self, text: str) -> Sequence[Part]:
        """The parts that are decided with this text."""
        ...

    def end(self) -> Sequence[Part]:
        """The rest, at the end of the answer. Call it once, and nothing after it."""
        ...


class CallParser(Parser, Protocol):
    """A parser that says when a call that it has told is not whole."""

    breaks_off: bool
    """Whether the last call that was told ended inside its arguments, so that they are no JSON."""


class ThinkingParser(Parser, Protocol):
    """A parser that tells thoughts from the rest."""

    is_thinking: bool
    """Whether the text that comes next is a thought."""


Tool = Mapping[str, Any]
"""``{"type": "function", "function": {"name": ..., "parameters": ...}}``."""


def names_of(tools: Sequence[Tool]) -> frozenset[str]:
    """The names that may be called."""
    return frozenset(tool["function"]["name"] for tool in tools)
