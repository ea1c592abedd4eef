"""The JSON values in a text that is read in pieces, whatever its lines.

For files with an array, or with indented values. A file may have any size; one value at a time is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jettison.errors import UserError

MAX_VALUE_CHARS = 64 << 20
"""Most characters of one value: far beyond any request, and small enough for memory."""
_PIECE_CHARS = 1 << 20
_LONGEST_TOKEN = 64
"""Longest token but for texts: a value cut inside such a token fails to parse at most so far from its end."""


def json_values(path: Path, text: IO[str], *, is_array: bool) -> Iterator[str]:
    """The texts of the JSON values in a text: those of an array, or consecutive ones with or without commas.

    Raises UserError with the line of the file at a syntax error.
    """
    source = _Source(path, text)
    if is_array:
        source.skip("\ufeff")
        source.take("[")
    while True:
        source.skip("," if is_array or source.num_values else ",\ufeff")
        if not source.peek():
            if is_array:
                raise UserError(f"{path}: the JSON array has no end: the file is cut off")
            return
        if is_array and source.peek() == "]":
            source.take("]")
            source.skip("\0")
            if source.peek():
                raise source.error("something follows the JSON array")
            return
        if not is_array and source.peek() == "\0":
            return  # zeros of space that was reserved for a file and never written
        yield source.value()


class _Source:
    """A text read in pieces, with one value at a time in memory."""

    def __init__(self, path: Path, text: IO[str]) -> None:
        self._path, self._text = path, text
        self._buffer, self._at, self._num_lines = "", 0, 1
        self._is_all = False
        self._decoder = json.JSONDecoder()
        self.num_values = 0

    def peek(self) -> str:
        """The next character; empty at the end."""
        while self._at >= len(self._buffer) and not self._is_all:
            self._more()
        return self._buffer[self._at : self._at + 1]

    def skip(self, chars: str) -> None:
        """Skip white space and these characters."""
        while (char := self.peek()) and (char.isspace() or char in chars):
            self._at += 1

    def take(self, char: str) -> None:
        """Skip white space and the character that has to follow it."""
        self.skip("")
        if self.peek() != char:
            raise self.error(f"{char} is expected")
        self._at += 1

    def value(self) -> str:
        """The text of the next value."""
        while True:
            try:
                _, end = self._decoder.raw_decode(self._buffer, self._at)
            except (ValueError, RecursionError) as error:
                if not self._needs_more(error):
                    raise self.error(self._told(error)) from None
                self._more()
                continue
            if end == len(self._buffer) and not self._is_all:
                self._more()  # a number may go on
                continue
            text = self._buffer[self._at : end]
            self._at = end
            self.num_values += 1
            return text

    def _needs_more(self, error: Exception) -> bool:
        """Whether a parse error may only mean that the end of the value has not been read."""
        if self._is_all or isinstance(error, RecursionError) or len(self._buffer) - self._at > MAX_VALUE_CHARS:
            return False
        is_far = isinstance(error, json.JSONDecodeError) and error.pos < len(self._buffer) - _LONGEST_TOKEN
        return not is_far or _is_unterminated(error)

    def _told(self, error: Exception) -> str:
        if not isinstance(error, json.JSONDecodeError):
            return "nested too deeply"
        if self._is_all and (_is_unterminated(error) or not self._buffer[error.pos :].strip()):
            return "it has no end: the file is cut off"
        return f"not JSON: {error.msg}"

    def _more(self) -> None:
        self._num_lines += self._buffer.count("\n", 0, self._at)
        self._buffer = self._buffer[self._at :]
        self._at = 0
        piece = self._text.read(max(_PIECE_CHARS, len(self._buffer)))
        self._is_all = not piece
        self._buffer += piece

    def error(self, what: str) -> UserError:
        """An error about the present position."""
        line = self._num_lines + self._buffer.count("\n", 0, self._at)
        return UserError(f"{self._path}: in the value that begins in line {line}: {what}"[:500])


def _is_unterminated(error: Exception) -> bool:
    """Whether the error is of an unterminated text, which the parser reports at its begin."""
    return isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated")
