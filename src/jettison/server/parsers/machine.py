"""The base of the parsers: one generator that reads a text which is not there yet.

A parser is written as if its text were whole: each helper that needs a character yields until there is one. So the cuts
of the text cannot change what is read. Work is linear in the text: what has been tried and was no call becomes content,
and is not tried again.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from jettison.server.parsers.parts import Kind, Part, Tool, names_of

FLOW_CHARS = 256
"""In a stream arguments longer than this are told as they come, as a client may show them. A shorter call is told when
it is whole, so that one that breaks off can still become content."""
MAX_NAME_CHARS = 256
"""Longest name that is waited for; a request's tools have no longer ones."""
MAX_DEPTH = 128
"""Deepest nesting of arguments: readers of JSON give up at some hundreds."""

T = TypeVar("T")
Reading = Generator[None, None, T]

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_IS_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_HEX = frozenset("0123456789abcdefABCDEF")


class BrokenError(Exception):
    """What began like a call is none."""


class Machine(ABC):
    """Subclasses write ``_read``, which ends only where the text does."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._names = names_of(tools)
        self.num_calls = 0
        """Calls told so far."""
        self.flows = True
        """Whether long arguments are told before they are whole; not where the client gets its answer in one piece."""
        self.breaks_off = False
        """See ``CallParser``."""
        self._text = ""
        self._at = 0
        """The place in the text; what is before it has been read."""
        self._is_over = False
        self._parts: list[Part] = []
        self._taken: list[str] = []
        """What the present attempt at a call has read, for the case that it is none."""
        self._name: str | None = None
        """The function of the call that is being read, once it is known to be one of the tools."""
        self._arguments: list[str] | None = None
        """Its arguments so far; None: none have been read."""
        self._in_arguments = False
        """Whether what is read belongs to its arguments."""
        self._num_chars = 0
        """Characters of its arguments."""
        self._is_told = False
        """Whether the call has been told, so that its arguments flow."""
        self._steps = self._read()

    def feed(self, text: str) -> list[Part]:
        """See ``Parser``."""
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._go()

    def end(self) -> list[Part]:
        """See ``Parser``."""
        self._is_over = True
        return self._go()

    def _go(self) -> list[Part]:
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read the text to its end."""

    # --- telling

    def _say(self, kind: Kind, text: str = "") -> None:
        if text or kind in ("call", "end"):
            self._parts.append(Part(kind, text))

    def _begin_call(self) -> None:
        self._name, self._arguments = None, None
        self._in_arguments, self._num_chars, self._is_told = False, 0, False

    def _known(self, name: str) -> str:
        """The name, where it is one of the tools'. Raises BrokenError."""
        if name not in self._names:
            raise BrokenError
        self._name = name
        return name

    def _tell(self) -> None:
        """Tell the call's name, and what there is of its arguments."""
        self._say("call", self._name or "")
        self._say("arguments", "".join(self._arguments or ()))
        self.num_calls += 1
        self._is_told, self.breaks_off = True, False
        self._taken = []

    def _end_call(self, default: str | None = None) -> None:
        """The call is whole. ``default``: arguments where it has none; None: it needs some. Raises BrokenError."""
        if not self._is_told:
            if self._arguments is None and default is not None:
                self._arguments = [default]
            if self._name is None or self._arguments is None:
                raise BrokenError
            self._tell()
        self._say("end")
        self._begin_call()
        self._taken = []

    def _give_up(self) -> None:
        """What was read is no call, or a call that was told and breaks off. A long one is told as in a stream where
        its arguments are whole, or the answer's end cuts them."""
        is_cut = self._is_over and self._at == len(self._text)
        is_readable = self._name is not None and (is_cut or not self._in_arguments)
        if is_readable and not self._is_told and self._num_chars > FLOW_CHARS:
            self._tell()
        if self._is_told:
            self.breaks_off = self._in_arguments
            self._say("end")
        else:
            self._say("content", "".join(self._taken))
        self._begin_call()
        self._taken = []

    # --- reading

    def _take(self, num_chars: int, written: str | None = None) -> str:
        """``written``: how arguments have these characters; None: as they are."""
        piece = self._text[self._at : self._at + num_chars]
        told = piece if written is None else written
        self._at += num_chars
        if self._is_told:
            if self._in_arguments:
                self._say("arguments", told)
            return told
        self._taken.append(piece)
        if self._in_arguments and self._arguments is not None:
            self._arguments.append(told)
            self._num_chars += len(told)
            if self.flows and self._num_chars > FLOW_CHARS and self._name is not None:
                self._tell()
        return told

    def _more(self) -> Reading[bool]:
        """Wait for a character; False: there is none."""
        while self._at == len(self._text):
            if self._is_over:
                return False
            yield
        return True

    def _peek(self) -> Reading[str]:
        """The next character; empty at the end."""
        return self._text[self._at] if (yield from self._more()) else ""

    def _space(self) -> Reading[None]:
        while (yield from self._more()):
            found = _SPACE.match(self._text, self._at)
            if found is None:
                return
            self._take(len(found.group()))

    def _follows(self, *words: str) -> Reading[str]:
        """The one of the words that the text goes on with, which is not taken; empty: none."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, words))]
            for word in words:
                if rest.startswith(word):
                    return word
            if self._is_over or not any(word.startswith(rest) for word in words):
                return ""
            yield

    def _skips(self, *words: str) -> Reading[str]:
        """The same, taken."""
        word = yield from self._follows(*words)
        self._take(len(word))
        return word

    def _expect(self, *words: str) -> Reading[str]:
        """The same. Raises BrokenError where none follows."""
        word = yield from self._skips(*words)
        if not word:
            raise BrokenError
        return word

    def _until(self, *words: str) -> Reading[str]:
        """Take the text before one of the words. Raises BrokenError where none comes."""
        pieces = []
        pattern = re.compile("|".join(map(re.escape, words)))
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                pieces.append(self._take(found.start() - self._at))
                return "".join(pieces)
            if self._is_over:
                self._take(len(self._text) - self._at)
                raise BrokenError
            pieces.append(self._take(len(self._text) - self._at - num_held(self._text[self._at :], words)))
            yield

    def _named(self, *words: str) -> Reading[None]:
        """A tool's name before one of the words. Raises BrokenError, also where the text is too long for a name."""
        pieces: list[str] = []
        while not (yield from self._follows(*words)):
            if len(pieces) == MAX_NAME_CHARS or not (yield from self._more()):
                raise BrokenError
            pieces.append(self._take(1))
        self._known("".join(pieces).strip())

    # --- JSON

    def _string(self) -> Reading[str]:
        """A string, decoded. Raises BrokenError."""
        text: str = json.loads((yield from self._raw_string()))
        return text

    def _raw_string(self) -> Reading[str]:
        """A string as JSON has it: models write line ends and tabs as they are, where JSON wants escapes."""
        pieces = [(yield from self._expect('"'))]
        while (char := (yield from self._peek())) != '"':
            if not char:
                raise BrokenError
            if char == "\\":
                pieces.append((yield from self._escape()))
                continue
            found = _PLAIN.match(self._text, self._at)
            pieces.append(self._take(1, json.dumps(char)[1:-1]) if found is None else self._take(len(found.group())))
        pieces.append(self._take(1))
        return "".join(pieces)

    def _escape(self) -> Reading[str]:
        taken = self._take(1)
        kind = yield from self._peek()
        if not kind or kind not in '"\\/bfnrtu':
            raise BrokenError
        taken += self._take(1)
        if kind == "u":
            for _ in range(4):
                if (yield from self._peek()) not in _HEX:
                    raise BrokenError
                taken += self._take(1)
        return taken

    def _json(self) -> Reading[None]:
        """Any value. Raises BrokenError at the first character that no value can have there."""
        closers: list[str] = []
        while True:
            yield from self._space()
            char = yield from self._peek()
            if char in ("{", "["):
                self._take(1)
                if len(closers) == MAX_DEPTH:
                    raise BrokenError
                closer = "}" if char == "{" else "]"
                yield from self._space()
                if not (yield from self._skips(closer)):
                    closers.append(closer)
                    yield from self._key(closer)
                    continue
            elif char == '"':
                yield from self._raw_string()
            else:
                yield from self._scalar()
            while closers:
                yield from self._space()
                if (yield from self._expect(",", closers[-1])) == ",":
                    yield from self._key(closers[-1])
                    break
                closers.pop()
            else:
                return

    def _key(self, closer: str) -> Reading[None]:
        """In an object: a name and its colon."""
        if closer == "}":
            yield from self._space()
            yield from self._raw_string()
            yield from self._space()
            yield from self._expect(":")

    def _scalar(self) -> Reading[None]:
        pieces = []
        while (yield from self._more()):
            found = _SCALAR.match(self._text, self._at)
            if found is None:
                break
            pieces.append(self._take(len(found.group())))
        if not _IS_SCALAR.fullmatch("".join(pieces)):
            raise BrokenError

    # --- calls in JSON

    def _read_arguments(self) -> Reading[None]:
        """The object that comes next, as a call's arguments; a text that holds one counts, too, and null is an
        empty one. Raises BrokenError."""
        char = yield from self._peek()
        if char == '"':
            self._arguments = [_object_in((yield from self._string()))]
        elif char == "n":
            yield from self._expect("null")
            self._arguments = ["{}"]  # said to be none, so it is a call also where arguments are what shows one
        elif char == "{":
            self._arguments, self._in_arguments = [], True
            yield from self._json()
            self._in_arguments = False
        else:
            raise BrokenError

    def _call_object(self, default: str | None = "{}") -> Reading[None]:
        """``{"name": ..., "arguments": {...}}``, in any order. Raises BrokenError. ``default``: see ``_end_call``."""
        self._begin_call()
        yield from self._space()
        yield from self._expect("{")
        seen: set[str] = set()
        while True:
            yield from self._space()
            key = yield from self._string()
            key = "arguments" if key == "parameters" else key
            if key in seen:
                raise BrokenError
            seen.add(key)
            yield from self._space()
            yield from self._expect(":")
            yield from self._space()
            if key == "name":
                self._known((yield from self._string()))
            elif key == "arguments":
                yield from self._read_arguments()
            elif key in ("id", "type"):
                yield from self._json()
            else:
                raise BrokenError
            yield from self._space()
            if (yield from self._expect(",", "}")) == "}":
                break
        self._end_call(default)

    def _objects(self, default: str | None = "{}") -> Reading[None]:
        """One call, or a list of them. Raises BrokenError."""
        yield from self._space()
        if (yield from self._skips("[")):
            yield from self._listed(default)
        else:
            yield from self._call_object(default)

    def _listed(self, default: str | None = "{}") -> Reading[None]:
        """The rest of a list of calls. Raises BrokenError."""
        yield from self._space()
        if (yield from self._skips("]")):
            raise BrokenError  # none is called
        while True:
            yield from self._call_object(default)
            yield from self._space()
            if not (yield from self._skips(",")):
                break
        yield from self._skips("]")
        self._taken = []


def num_held(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of a text that one of the words may begin with."""
    firsts, longest = _shape(tuple(words))
    for length in range(min(len(text), longest - 1), 0, -1):
        if text[-length] in firsts:
            tail = text[-length:]
            if any(word.startswith(tail) for word in words):
                return length
    return 0


@lru_cache(maxsize=64)
def _shape(words: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """First characters, and the length of the longest: asked for each token."""
    return frozenset(word[0] for word in words), max(map(len, words))


def _object_in(text: str) -> str:
    """The text, where it is a JSON object. Raises BrokenError."""
    try:
        text.encode()
        if isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    raise BrokenError
