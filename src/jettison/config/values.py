"""Values as a person writes them: one parser for each kind, and sizes in bytes both ways.

A parser takes the value from the command line, a file or an environment variable, and returns the value of the field.
It raises ValueError without the key's name, which ``jettison.config.engine`` adds.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import get_args

Parser = Callable[[object], object]


_UNITS = {
    "": 1, "b": 1,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}


def parse_bytes(value: object) -> int:
    """Bytes from ``268435456``, ``"256MiB"`` or ``"1.5 GiB"``; KB, MB, ... are powers of ten. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)):
        number, unit = match.group(1), match.group(2).lower()
        if unit in _UNITS:
            num_bytes = Fraction(number) * _UNITS[unit]
            if num_bytes.denominator == 1:
                return int(num_bytes)
    raise ValueError(f"needs a size such as 256MiB, 1GiB or a whole number of bytes, not {value!r}")


def format_bytes(num_bytes: int) -> str:
    """The shortest exact form that ``parse_bytes`` reads back: ``1073741824`` -> ``"1GiB"``."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % scale == 0:
            return f"{num_bytes // scale}{unit}"
    return str(num_bytes)


def size_from(minimum: int, *, multiple: bool = False) -> Parser:
    """A parser of sizes as ``parse_bytes`` reads them, from ``minimum`` bytes up; with ``multiple`` in steps of it."""
    def parse(value: object) -> int:
        num_bytes = parse_bytes(value)
        if num_bytes < minimum:
            raise ValueError(f"must be at least {format_bytes(minimum)}, not {format_bytes(num_bytes)}")
        if multiple and num_bytes % minimum:
            raise ValueError(f"must be a multiple of {format_bytes(minimum)}, not {num_bytes}")
        return num_bytes

    return parse


def machine_list(value: object) -> tuple[int, ...]:
    """Numbers of machines or cards, separated by commas, as a list or as both (flags that are repeated); empty for
    ``auto``."""
    told = [value] if isinstance(value, str) else value
    if not isinstance(told, list | tuple):
        raise ValueError(f"needs a number for each instance (0,0,1,1) or auto, not {shown(value)}")
    parts = [part for item in told for part in (item.split(",") if isinstance(item, str) else [item])]
    if parts in ([""], ["auto"]):
        return ()
    numbers = (int_from(0)(part) for part in parts)
    return tuple(number for number in numbers if isinstance(number, int))


def int_from(minimum: int, maximum: int | None = None) -> Parser:
    """A parser of whole numbers from ``minimum`` up to ``maximum``."""
    wanted = f"a whole number >= {minimum}" if maximum is None else f"a whole number from {minimum} to {maximum}"

    def parse(value: object) -> int:
        number: int | None = None
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
            number = int(value)
        if number is None or number < minimum or (maximum is not None and number > maximum):
            raise ValueError(f"needs {wanted}, not {shown(value)}")
        return number

    return parse


def count_from(minimum: int) -> Parser:
    """A parser of whole numbers from ``minimum`` up that may end in k, m or g (powers of ten) or K, M or G (of two):
    ``4k`` is 4000 and ``32K`` is 32768, as for vLLM."""
    plain = int_from(minimum)

    def parse(value: object) -> int:
        number: object = value
        if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+)(\.\d+)?([kKmMgG])\s*", value)):
            whole, part, unit = match.groups()
            if part and unit.isupper():
                raise ValueError(f"takes no part of {unit}: write {whole}{part}{unit.lower()} for a power of ten")
            scale = 1000 if unit.islower() else 1024
            number = round(float(whole + (part or "")) * scale ** ("kmg".index(unit.lower()) + 1))
        try:
            return int(str(plain(number)))
        except ValueError as error:
            raise ValueError(f"{error} (4k is 4000, 32K is 32768)") from None

    return parse


def length_or_none(value: object) -> int | None:
    """A number as ``count_from`` reads it, or None for -1, which means the model's own in vLLM."""
    return None if value in (-1, "-1") else int(str(count_from(1)(value)))


def float_from(minimum: float, maximum: float | None = None) -> Parser:
    """A parser of finite numbers from ``minimum`` up to ``maximum``."""
    wanted = f"a number >= {minimum:g}" if maximum is None else f"a number from {minimum:g} to {maximum:g}"

    def parse(value: object) -> float:
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):  # OverflowError: a whole number too large for a float
            number = math.nan
        if not math.isfinite(number) or number < minimum or (maximum is not None and number > maximum):
            raise ValueError(f"needs {wanted}, not {shown(value)}")
        return number

    return parse


def shown(value: object) -> str:
    """A value in an error message: on one line, and not too long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def nonempty(value: object) -> str:
    """A text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"needs a text that is not empty, not {value!r}")
    return value


def host_and_port(value: object) -> str:
    """``HOST:PORT``, with a port from 1 to 65535."""
    match = re.fullmatch(r"[^\s/]+:([0-9]{1,5})", value) if isinstance(value, str) else None
    if match is None or not 0 < int(match.group(1)) < 65536:
        raise ValueError(f"needs HOST:PORT, such as 10.0.0.1:6379, not {value!r}")
    return match.group()


def json_object(value: object) -> str:
    """A JSON object, given as text or as a mapping of a YAML file; returned as text in standard form."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError(f"needs a JSON object, not {shown(value)}")
    try:
        return json.dumps(parsed, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError(f"needs a JSON object of plain values, not {shown(value)}") from None


def switches(*names: str) -> Callable[[object], str]:
    """A JSON object that has booleans for some of these names; returned as text in standard form."""

    def parse(value: object) -> str:
        said = json.loads(json_object(value))
        unknown = [name for name in said if name not in names]
        if unknown:
            raise ValueError(f"takes {', '.join(names)}, not {', '.join(unknown)}")
        return json_object({name: truth(part) for name, part in said.items()})

    return parse


def truth(value: object) -> bool:
    """A boolean: true, yes or on; false, no or off."""
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    raise ValueError(f"needs true or false, not {value!r}")


class Choice:
    """A parser of one of the words of a Literal."""

    def __init__(self, literal: object) -> None:
        self.words: tuple[str, ...] = get_args(literal)

    def __call__(self, value: object) -> str:
        if isinstance(value, str) and value in self.words:
            return value
        listed = self.words[0] if len(self.words) == 1 else f"{', '.join(self.words[:-1])} or {self.words[-1]}"
        raise ValueError(f"must be {listed}, not {value!r}{did_you_mean(value, self.words)}")


class Switch(Choice):
    """A parser of ``on`` or ``off``, which YAML reads as booleans."""

    def __call__(self, value: object) -> str:
        return super().__call__({True: "on", False: "off"}[value] if isinstance(value, bool) else value)


def nonempty_list(value: object) -> tuple[str, ...]:
    """One non-blank text in ASCII, or several."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)):
        raise ValueError("needs a text or a list of texts")
    texts = tuple(nonempty(item) for item in values)
    if any(text != text.strip() or not text.isascii() for text in texts):
        raise ValueError("needs ASCII texts without spaces around them")
    return texts


def name_list(value: object) -> tuple[str, ...]:
    """One name or several, each once; none for ``auto``."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)):
        raise ValueError("needs a name or a list of names")
    named = tuple(dict.fromkeys(nonempty(name) for name in names))
    return () if named == ("auto",) else named


def text_list(value: object) -> tuple[str, ...]:
    """One text or several, each in ASCII or a JSON list of such texts, as vLLM's flags take them."""
    texts: list[object] = []
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, str) and item.lstrip().startswith("["):
            try:
                texts += json.loads(item)
            except ValueError as error:
                raise ValueError(f"needs a JSON list of texts, not {shown(item)}: {error}") from None
        elif item != "":  # an empty list, as it is shown
            texts.append(item)
    return nonempty_list(texts)


def origin_list(value: object) -> tuple[str, ...]:
    """A list of origins, as browsers name them: scheme, host and port. ``*`` is any origin, ``null`` that of a file."""
    origins = tuple(text.rstrip("/").lower() for text in text_list(value))
    for origin in origins:
        if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ValueError(f"needs origins such as https://chat.example:8443, not {shown(origin)}")
    return origins


def path_prefix(value: object) -> str:
    """A path prefix: ``api``, ``/api`` and ``/api/`` are the same; ``/`` is no prefix."""
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]*", value) or re.search("[?#%]", value):
        raise ValueError(f"needs a path such as /api, not {shown(value)}")
    parts = [part for part in value.split("/") if part]
    return "".join(f"/{part}" for part in parts)


def or_none(parse: Parser, word: str) -> Parser:
    """A parser that accepts None, and ``word`` for None, beside the values that ``parse`` accepts."""

    def parse_or_none(value: object) -> object:
        if value is None or (isinstance(value, str) and value.strip().lower() == word):
            return None
        return parse(value)

    return parse_or_none


def did_you_mean(word: object, known: tuple[str, ...]) -> str:
    """A hint at the known word that was probably meant; empty if no word is close."""
    close = difflib.get_close_matches(word, known, n=1) if isinstance(word, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""
