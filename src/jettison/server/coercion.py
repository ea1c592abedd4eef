"""Coercion of JSON values to the types of number and boolean fields: 5.0 and "5" to 5, 1 and "true" to true.

The rules are those of pydantic without strictness, which vLLM's request models use; clients in languages that have one
kind of number send such values. Ambiguous values stay as they are, and are refused for their type.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

MAX_DIGITS = 40
"""Most digits of a number in quotes: no field takes more."""

MAX_FLOAT_INT = 2.0**63
"""Largest float that is taken for an integer: a larger one is no count."""

_WHOLE = re.compile(r"\s*([+-]?[0-9]+)(\.0+)?\s*", re.ASCII)
_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*", re.ASCII)
_TRUTH = {
    **dict.fromkeys(("1", "t", "true", "y", "yes", "on"), True),
    **dict.fromkeys(("0", "f", "false", "n", "no", "off"), False),
}


def loosened(document: Mapping[str, Any], fields: type[msgspec.Struct]) -> dict[str, Any]:
    """The same document, with the values of the struct's fields coerced to the fields' types."""
    kinds = _kinds(fields)
    return {name: as_kind(value, kinds[name]) if name in kinds else value for name, value in document.items()}


@functools.lru_cache(maxsize=64)
def _kinds(fields: type[msgspec.Struct]) -> Mapping[str, type]:
    """Fields with coerced values: ``int``, ``float``, ``bool``, ``list`` (of ints), ``dict`` (of floats) or a struct of
    such."""
    found: dict[str, type] = {}
    for name, hint in get_type_hints(fields).items():
        kinds = [kind for kind in _alternatives(hint) if kind is not types.NoneType]
        if len(kinds) != 1:
            continue
        (kind,) = kinds
        if kind in (int, float, bool) or (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            found[name] = kind
        elif get_origin(kind) is list and get_args(kind) == (int,):
            found[name] = list
        elif get_origin(kind) is dict and get_args(kind) == (str, float):
            found[name] = dict
    return found


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def as_kind(value: Any, kind: type) -> Any:
    """``value`` as ``kind`` where the meaning is clear; else unchanged."""
    if kind is int:
        return as_whole(value)
    if kind is float:
        return _as_number(value)
    if kind is bool:
        return _as_truth(value)
    if kind is list:
        return _ids(value)
    if kind is dict:
        return {name: _as_number(item) for name, item in value.items()} if isinstance(value, dict) else value
    return loosened(value, kind) if isinstance(value, dict) and issubclass(kind, msgspec.Struct) else value


def as_whole(value: Any) -> Any:
    """An integer for 5.0, "5" and true."""
    if isinstance(value, bool):
        return int(value)
    if _is_whole(value):
        return int(value)
    if isinstance(value, str) and len(value) <= MAX_DIGITS and (found := _WHOLE.fullmatch(value)):
        return int(found[1])
    return value


def _ids(value: Any) -> Any:
    """A list's items as integers; even a list of a whole vocabulary is scanned only once."""
    if isinstance(value, list) and any(type(item) is not int for item in value):
        return [as_whole(item) for item in value]
    return value


def whole_numbers(value: Any) -> Any:
    """A list of numbers with the ones without a fraction as integers. Anything else is unchanged, numbers in quotes
    too: in a prompt they are text.
    """
    if isinstance(value, list) and any(type(item) is float for item in value):
        return [int(item) if _is_whole(item) else item for item in value]
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer() and abs(value) < MAX_FLOAT_INT


def _as_number(value: Any) -> Any:
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and len(value) <= MAX_DIGITS and _NUMBER.fullmatch(value):
        return float(value)
    return value


def _as_truth(value: Any) -> Any:
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        return _TRUTH.get(value.lower(), value)
    return value
