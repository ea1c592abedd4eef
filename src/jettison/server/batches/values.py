"""JSON values of a text that is read in pieces, one after the other, whatever lines they stand in.

For files that were written as an array, or prettily. Of any size; one value at a time is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jettison.errors import UserError

MAX_VALUE_CHARS = 64 << 20
"""Of one value: far beyond what any request may have, and little enough to be in memory."""
_PIECE_CHARS = 1 << 20
_LONGEST_TOKEN = 64
"""But of texts: what is cut inside one goes wrong no further from the end."""


def json_values(path: Path, text: IO[str], *, is_array: bool) -> Iterator[str]:
    """The JSON values of a text as they stand there: of an array, or one behind another with or without commas.

    Raises UserError, with the line of the file, where it goes wrong.
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
            return  # what was reserved for a file and never written
        yield source.value()


class _Source:
    """Text read in pieces, of which one value at a time is kept."""

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
        """Pass over white space and these."""
        while (char := self.peek()) and (char.isspace() or char in chars):
            self._at += 1

    def take(self, char: str) -> None:
        """Pass over one that has to be next, behind white space."""
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
        """Whether a value that goes wrong here may only be one whose end has not been read."""
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
        """Of what stands here."""
        line = self._num_lines + self._buffer.count("\n", 0, self._at)
        return UserError(f"{self._path}: in the value that begins in line {line}: {what}"[:500])


def _is_unterminated(error: Exception) -> bool:
    """A text without its end, which is blamed on where it begins."""
    return isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated")
