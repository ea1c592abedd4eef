"""gpt-oss's answers: messages with a channel and maybe a recipient, the thoughts among them.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

The prompt ends with ``<|start|>assistant``, and the last mark is a stop token without text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jettison.server.parsers.machine import BrokenError, Machine, Reading, num_held
from jettison.server.parsers.parts import Tool

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS)
MAX_HEADER_CHARS = 512
_RECIPIENT = re.compile(r"\bto=functions\.(\S+)")
_ANALYSIS = re.compile(r"^\s*analysis\b")


class HarmonyParser(Machine):
    """Thoughts, content and calls. Without ``tools`` a call's message is content."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self.is_thinking = False
        super().__init__(tools)

    def _read(self) -> Reading[None]:
        yield from self._before_the_first()
        while (yield from self._more()):
            header = yield from self._header()
            if header is None:
                yield from self._body("content")
                continue
            recipient = _RECIPIENT.search(header.replace("<|", " <|"))
            channel = header.partition(CHANNEL)[2]
            if recipient is not None and recipient[1] in self._names:
                yield from self._call(recipient[1])
            else:
                self.is_thinking = _ANALYSIS.match(channel) is not None
                yield from self._body("reasoning" if self.is_thinking else "content")
                self.is_thinking = False

    def _before_the_first(self) -> Reading[None]:
        """An answer may begin inside a header that the prompt has opened, or inside a message that it goes on with."""
        yield from self._skips(" ")
        if not (yield from self._follows("to=", CHANNEL, START, MESSAGE)):
            self._say("content", "".join(self._taken))
            self._taken = []
            yield from self._body("content")

    def _header(self) -> Reading[str | None]:
        """What stands before a message; None: there is no message, and what was read is content."""
        pieces: list[str] = []
        self._taken = []
        length = 0
        while not (yield from self._follows(MESSAGE)):
            if length == MAX_HEADER_CHARS or not (yield from self._more()):
                if length == MAX_HEADER_CHARS:
                    self._say("content", "".join(self._taken))
                self._taken = []
                return None
            pieces.append(self._take(1))
            length += 1
        yield from self._skips(MESSAGE)
        self._taken = []
        return "".join(pieces)

    def _body(self, kind: str) -> Reading[None]:
        """A message's text, up to a mark that ends it or begins the next one."""
        marks = (*ENDS, START, CHANNEL)
        pattern = re.compile("|".join(map(re.escape, marks)))
        while True:
            found = pattern.search(self._text, self._at)
            rest = self._text[self._at :]
            if found is not None:
                told = self._text[self._at : found.start()]
            else:
                told = rest if self._is_over else rest[: len(rest) - num_held(rest, marks)]
            self._say("reasoning" if kind == "reasoning" else "content", told)
            self._at += len(told)
            if found is not None or self._is_over:
                break
            yield
        yield from self._skips(*ENDS)
        self._taken = []

    def _call(self, name: str) -> Reading[None]:
        self._begin_call()
        self._known(name)
        try:
            yield from self._space()
            # A tool without parameters may be called with an empty body. The mark behind it mostly has no text.
            if (yield from self._follows(*ENDS)) or not (yield from self._more()):
                self._arguments = ["{}"]
            else:
                yield from self._read_arguments()
            yield from self._space()
            if not (yield from self._skips(*ENDS)) and (yield from self._more()):
                if not (yield from self._follows(START, CHANNEL)):
                    raise BrokenError
            self._end_call()
        except BrokenError:
            self._give_up()
            yield from self._body("content")
