"""Thoughts before the answer, between two marks; and a parser of calls behind a parser of thoughts."""

from __future__ import annotations

from collections.abc import Sequence

from jettison.server.parsers.machine import Machine, Reading, num_held
from jettison.server.parsers.parts import Parser, Part, ThinkingParser


class MarkedThinking(Machine):
    """Thoughts between ``begin`` and ``end`` at the front of an answer; line ends beside the marks belong to none.

    ``is_open``: whether the prompt has opened them already, so that the answer begins inside. An answer that does not
    begin with ``begin`` otherwise has no thoughts.
    """

    def __init__(self, begin: str, end: str, *, is_open: bool) -> None:
        self._begin, self._end = begin, end
        self.is_thinking = is_open
        self._is_content = False
        """Whether all that comes is content: most tokens of an answer have this short way."""
        super().__init__()

    def feed(self, text: str) -> list[Part]:
        """See ``Parser``."""
        return [Part("content", text)] if self._is_content else super().feed(text)

    def _read(self) -> Reading[None]:
        yield from self._space()
        if (yield from self._skips(self._begin)):
            self._taken, self.is_thinking = [], True
        if self.is_thinking:
            if "".join(self._taken).strip("\n"):
                self._say("reasoning", "".join(self._taken).lstrip("\n"))
            self._taken = []
            yield from self._line_ends()
            yield from self._thoughts()
            yield from self._line_ends()
        self._say("content", "".join(self._taken))
        if (yield from self._more()):
            self._say("content", self._text[self._at :])
            self._at = len(self._text)
        self._is_content = True

    def _line_ends(self) -> Reading[None]:
        while (yield from self._skips("\n")):
            pass
        self._taken = []

    def _thoughts(self) -> Reading[None]:
        while True:
            at = self._text.find(self._end, self._at)
            if at >= 0:
                self._say("reasoning", self._text[self._at : at].rstrip("\n"))
                self._at = at + len(self._end)
                break
            rest = self._text[self._at :]
            if not self._is_over:
                rest = rest[: len(rest) - num_held(rest, (self._end,))]
            told = rest.rstrip("\n")
            self._say("reasoning", told)
            self._at += len(told)
            if self._is_over:
                self._at = len(self._text)
                return
            yield
        self.is_thinking = False


class Chain:
    """What one parser calls content is read by another."""

    def __init__(self, thinking: ThinkingParser, calls: Parser) -> None:
        self._thinking, self._calls = thinking, calls

    @property
    def is_thinking(self) -> bool:
        """See ``ThinkingParser``."""
        return self._thinking.is_thinking

    @property
    def breaks_off(self) -> bool:
        """See ``CallParser``."""
        return bool(getattr(self._calls, "breaks_off", False))

    def feed(self, text: str) -> list[Part]:
        """See ``Parser``."""
        return self._read(self._thinking.feed(text))

    def end(self) -> list[Part]:
        """See ``Parser``."""
        return [*self._read(self._thinking.end()), *self._calls.end()]

    def _read(self, parts: Sequence[Part]) -> list[Part]:
        read: list[Part] = []
        for part in parts:
            if part.kind == "content":
                read += self._calls.feed(part.text)
            else:
                read.append(part)
        return read
