"""One GGUF file: its fields with their types checked, and its tensors, through the ``gguf`` library's reader.

Every error is one line that names the file and the field. Not here: what the fields mean (``gguf_config``,
``gguf_tokenizer``) and the numbers in the tensors (``gguf_tensors``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFEndian, GGUFReader, ReaderTensor

from jettison.device.model.jsonfile import MAX_SIZE, short_repr
from jettison.errors import ModelError

_MAGIC = b"GGUF"


class _Reader(GGUFReader):
    """The library's, which takes what it reads beyond the file's end for nothing: a damaged length then keeps it busy
    for hours."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        found = super()._get(offset, dtype, count, override_order)
        if len(found) != count:
            raise ValueError("it ends early")
        return found


class GgufFile:
    """An open file. Methods that read a field raise ModelError where it is missing without a default, or of another
    kind than asked for; ``unread`` tells the fields that nothing has asked for."""

    def __init__(self, path: Path) -> None:
        """Reads fields and tensors' headers; weights stay on disk. Raises ModelError for a file that is no GGUF, or not
        whole."""
        self.path = Path(path)
        try:
            with open(path, "rb") as file:
                begin = file.read(len(_MAGIC))
        except OSError as error:
            raise self.fail(f"cannot be read ({error.strerror})") from None
        if begin != _MAGIC:
            raise self.fail("no GGUF file: it does not begin with GGUF")
        try:
            reader = _Reader(path)
        # The library checks little: on a short or broken file its arithmetic fails, in any of these ways.
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, OSError) as error:
            raise self.fail(f"no whole GGUF file ({' '.join(str(error).split())[:120]}); download it again") from None
        if reader.endianess is not GGUFEndian.LITTLE:
            raise self.fail("written for big-endian machines, which is not supported")
        self._fields = reader.fields
        self._read: set[str] = set()
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}

    def fail(self, what: str) -> ModelError:
        """The error to raise about this file; names in it may be any text, and the error is one line."""
        printable = "".join(char if char.isprintable() else "?" for char in what[:400])
        return ModelError(f"{self.path}: {printable}")

    def has(self, key: str) -> bool:
        """Whether the field is there; it counts as read."""
        self._read.add(key)
        return key in self._fields

    def integer(self, key: str, default: int | None = None, *, least: int = 0, most: int = MAX_SIZE) -> int:
        """A whole number in ``least``..``most``."""
        return self._value(key, default, f"an integer from {least} to {most}",
                           lambda value: _is_int(value) and least <= value <= most)  # fmt: skip

    def token_id(self, key: str, num_tokens: int) -> int | None:
        """The id of a token; None where the field is absent, or names none of the vocabulary's."""
        value = self._value(key, -1, "a token id", _is_int)
        return value if 0 <= value < num_tokens else None

    def number(self, key: str, default: float | None = None, *, or_zero: bool = False) -> float:
        """A positive number, as short as it reads back the same in its own precision: 1e-5, not 9.99999974e-6."""
        def is_right(value: object) -> bool:
            return isinstance(value, float | int) and (0 < value < math.inf or (or_zero and value == 0))

        value = self._value(key, default, f"a positive number{' or 0' if or_zero else ''}", is_right)
        return float(str(np.float32(value))) if np.float32(value) == value else float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return self._value(key, default, "true or false", lambda value: isinstance(value, bool))

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        return self._value(key, default, "a text", lambda value: isinstance(value, str))

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        """A list of texts."""
        return self._value(key, default, "a list of texts", lambda value: _is_list(value, str))

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers."""
        return self._value(key, None, "a list of integers", lambda value: _is_list(value, int))

    def numbers(self, key: str) -> list[float]:
        """A list of numbers."""
        return self._value(key, None, "a list of numbers", lambda value: _is_list(value, int | float))

    def expect(self, key: str, *neutral: object) -> None:
        """Raise ModelError where a field is there and says something else than ``neutral``, which changes nothing."""
        if self.has(key) and (value := self._contents(key)) not in neutral:
            raise self.fail(f"{key} is {short_repr(value)}, which is not supported")

    def named(self, begin: str) -> Iterator[str]:
        """The ends of the fields' names that begin so."""
        yield from (key.removeprefix(begin) for key in self._fields if key.startswith(begin))

    def unread(self, *begins: str) -> list[str]:
        """Fields whose names begin so, and that nothing has asked for."""
        return [key for key in self._fields if key.startswith(begins) and key not in self._read]

    def _value(self, key: str, default: Any, expected: str, is_right: Any) -> Any:
        if not self.has(key):
            if default is None:
                raise self.fail(f"{key} is missing, expected {expected}")
            return default
        value = self._contents(key)
        if not is_right(value):
            raise self.fail(f"{key} is {short_repr(value)}, expected {expected}")
        return value

    def _contents(self, key: str) -> Any:
        try:
            return self._fields[key].contents()
        except (ValueError, IndexError) as error:
            raise self.fail(f"{key} cannot be read ({' '.join(str(error).split())[:120]})") from None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object, kind: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)
