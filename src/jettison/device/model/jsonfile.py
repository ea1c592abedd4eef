"""Typed reading of a model folder's JSON files; every error becomes one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from jettison.device.model.standins import why_not_itself
from jettison.errors import ModelError

MAX_JSON_BYTES = 64 << 20
"""More than any real index file has; a larger one is refused unread."""

MAX_SIZE = 1 << 24
"""Largest plausible width, vocabulary or context. Beyond it a config is wrong, not large."""

LEAST_NUMBER, LARGEST_NUMBER = 1e-30, 1e30
"""Of what is no size. Products and quotients of a few such numbers are finite, and above 0."""


class JsonObject:
    """The object in one JSON file, with typed access. Every method raises ModelError, one line, naming file and key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def read(cls, path: Path) -> JsonObject:
        """Parse a file that has to hold an object."""
        try:
            if path.stat().st_size > MAX_JSON_BYTES:
                raise ModelError(f"{path}: larger than {MAX_JSON_BYTES} bytes, which no model's JSON file is")
            values = json.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            reason = str(error).partition("\n")[0]
            told = why_not_itself(path) or f"not valid JSON ({reason}); download the file again"
            raise ModelError(f"{path}: {told}") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path}: expected a JSON object")
        return cls(path, values)

    def fail(self, what: str) -> ModelError:
        """The error to raise about this file."""
        return ModelError(f"{self.path}: {what}")

    def wrong(self, key: str, expected: str) -> ModelError:
        """The error to raise about one key."""
        if self.values.get(key) is None:
            return self.fail(f"{key} is missing, expected {expected}")
        return self.fail(f"{key} is {short_repr(self.values[key])}, expected {expected}")

    def positive_int(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """An integer in 1..``most``; null counts as absent."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise self.wrong(key, f"an integer from 1 to {most}")
        return value

    def optional_positive_int(self, key: str) -> int | None:
        """None where the key is absent or null."""
        return None if self.values.get(key) is None else self.positive_int(key)

    def positive_float(self, key: str, default: float | None = None) -> float:
        """A number from ``LEAST_NUMBER`` to ``LARGEST_NUMBER``; null counts as absent."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not is_positive(value):
            raise self.wrong(key, f"a positive number ({LEAST_NUMBER:g} to {LARGEST_NUMBER:g})")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def optional_text(self, key: str) -> str | None:
        """A string, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def object(self, key: str) -> JsonObject | None:
        """A nested object (errors still name this file), or None where it is absent, null or empty."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return JsonObject(self.path, value) if value else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing. It is not checked whether the model has such tokens: -1 means none."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise self.wrong(key, "a token id or a list of them")
        return tuple(ids)


def is_positive(value: object) -> TypeGuard[int | float]:
    """Whether a value of a JSON file is a number above 0 that one can compute with."""
    return isinstance(value, (int, float)) and type(value) is not bool and LEAST_NUMBER <= value <= LARGEST_NUMBER


def short_repr(value: object) -> str:
    """``repr`` that fits in a one-line message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
