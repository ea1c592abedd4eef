"""Sections of a spec file: each key taken once through a parser, what is left over is an error, and errors say where.

    section = Section(raw, "workload.arrivals")
    rate = section.take("rate_per_s", above(0.0))
    section.close()                                # a key that was not taken is unknown

Every complaint is a ConfigError of one line that begins with the place: ``workload.arrivals.rate_per_s needs ...``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, cast, overload

from jettison.config.values import did_you_mean, float_from, int_from, shown, size_from
from jettison.errors import ConfigError

Value = TypeVar("Value")
Default = TypeVar("Default")


class _Required:
    """Nothing was given, and something has to be."""


REQUIRED = _Required()


class Section:
    """One mapping of a spec. ``where`` is its dotted place, empty for the whole file."""

    def __init__(self, raw: object, where: str) -> None:
        """Raises ConfigError unless ``raw`` is a mapping with texts for keys. None is an empty one."""
        self.where = where
        if raw is None:
            raw = {}
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where or 'a spec'} needs `key: value` lines, not {shown(raw)}")
        for key in raw:
            if not isinstance(key, str):
                raise ConfigError(f"{where or 'a spec'}: the key {shown(key)} is no text")
        self._raw: Mapping[str, object] = raw
        self._known: list[str] = []
        self._asked: list[str] = []

    def at(self, key: str) -> str:
        """The dotted place of a key."""
        return f"{self.where}.{key}" if self.where else key

    @property
    def written(self) -> tuple[str, ...]:
        """All keys, as they were written."""
        return tuple(self._raw)

    def has(self, key: str) -> bool:
        """Whether the key was written, and not as null."""
        self._asked.append(key)
        return self._raw.get(key) is not None

    def raw(self, key: str) -> object:
        """A value as it was written (None where it was not), which counts as taken."""
        self._known.append(key)
        return self._raw.get(key)

    @overload
    def take(self, key: str, parse: Callable[[object], Value]) -> Value: ...
    @overload
    def take(self, key: str, parse: Callable[[object], Value], default: Default) -> Value | Default: ...
    def take(self, key: str, parse: Callable[[object], Any], default: object = REQUIRED) -> Any:
        """A value through its parser; ``default`` where nothing (or null) was written."""
        raw = self.raw(key)
        if raw is None:
            if default is REQUIRED:
                near = get_close_matches(key, [other for other in self._raw if other not in self._known], 1, 0.75)
                raise ConfigError(f"{self.at(key)} is missing" + (f" (written: {near[0]})" if near else ""))
            return default
        try:
            return parse(raw)
        except ValueError as error:
            raise ConfigError(f"{self.at(key)} {error}") from None

    def section(self, key: str) -> Section:
        """The mapping under a key; an empty one where nothing was written."""
        return Section(self.raw(key), self.at(key))

    def items(self, key: str) -> Iterator[tuple[object, str]]:
        """The entries of a list under a key, each with its place."""
        raw = self.raw(key)
        if raw is None:
            return
        if not isinstance(raw, list | tuple):
            raise ConfigError(f"{self.at(key)} needs a list, not {shown(raw)}")
        for index, item in enumerate(raw):
            yield item, f"{self.at(key)}[{index}]"

    def close(self) -> None:
        """Raise ConfigError for the first key that was not taken."""
        self._refuse_others(self._known, tuple(dict.fromkeys(self._known + self._asked)))

    def only(self, *keys: str) -> None:
        """Raise ConfigError for the first key that is none of these, before any is taken."""
        self._refuse_others(keys, keys)

    def _refuse_others(self, taken: Collection[str], named: tuple[str, ...]) -> None:
        for key in self._raw:
            if key not in taken:
                hint = did_you_mean(key, named) or f" (known: {', '.join(named)})"
                raise ConfigError(f"{self.at(key)}: unknown key{hint}")

    def refuse(self, key: str, why: str) -> None:
        """Raise ConfigError where a key was written that does not go with the others."""
        if self.has(key):
            raise ConfigError(f"{self.at(key)} {why}")


def above(minimum: float, maximum: float | None = None) -> Callable[[object], float]:
    """Finite numbers above ``minimum``, up to ``maximum``."""
    at_least = float_from(minimum, maximum)
    upto = "" if maximum is None else f" and at most {maximum:.10g}"

    def parse(value: object) -> float:
        try:
            number = at_least(value)
        except ValueError:
            number = minimum
        if not isinstance(number, float) or number <= minimum:
            raise ValueError(f"needs a number above {minimum:g}{upto}, not {shown(value)}")
        return number

    return parse


def number(minimum: float, maximum: float | None = None) -> Callable[[object], float]:
    """Finite numbers from ``minimum`` up to ``maximum``."""
    parse = float_from(minimum, maximum)
    return lambda value: cast(float, parse(value))


def whole(minimum: int, maximum: int | None = None) -> Callable[[object], int]:
    """Whole numbers from ``minimum`` up to ``maximum``."""
    parse = int_from(minimum, maximum)
    return lambda value: cast(int, parse(value))


def size(value: object) -> int:
    """Bytes, at least one: ``256MiB``."""
    return cast(int, size_from(1)(value))


def word(*words: str) -> Callable[[object], str]:
    """One of these words."""

    def parse(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
        raise ValueError(f"must be {listed}, not {shown(value)}{did_you_mean(value, words)}")

    return parse
