"""Calls whose arguments are written one by one between marks, not as JSON: GLM 4.5 and Qwen3-Coder.

What a value is follows from the tool's schema: a string is taken as it is, every other value is read as JSON, and an
object or an array also as Python writes it.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jettison.server.json_schemas import resolved
from jettison.server.parsers.machine import BrokenError, Reading
from jettison.server.parsers.parts import Tool
from jettison.server.parsers.tagged import MarkedMachine


class _WrittenMachine(MarkedMachine):
    """Arguments are collected by name, and told when the call is whole."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        self._values: dict[str, Any] = {}

    def _set(self, key: str, text: str) -> None:
        """Raises BrokenError where the call has the key already."""
        if key in self._values:
            raise BrokenError
        schema = self._schemas.get(self._name or "")
        self._values[key] = value_of(text, properties_of(schema).get(key), schema)

    def _tell_written(self) -> None:
        try:
            self._arguments = [json.dumps(self._values, ensure_ascii=False)]
        except RecursionError:
            raise BrokenError from None
        self._end_call()


class GlmParser(_WrittenMachine):
    """``<tool_call>name``, then ``<arg_key>key</arg_key><arg_value>value</arg_value>`` for each, ``</tool_call>``."""

    MARKS = ("<tool_call>",)
    END = "</tool_call>"

    def _calls(self, mark: str) -> Reading[None]:
        self._begin_call()
        self._values = {}
        yield from self._space()
        yield from self._named("\n", "<arg_key>", self.END)
        while True:
            yield from self._space()
            if (yield from self._expect("<arg_key>", self.END)) == self.END:
                break
            key = yield from self._until("</arg_key>")
            yield from self._skips("</arg_key>")
            yield from self._space()
            yield from self._expect("<arg_value>")
            value = yield from self._until("</arg_value>")
            yield from self._skips("</arg_value>")
            self._set(key.strip(), value)
            if not (yield from self._end_follows()):
                break
        self._tell_written()

    def _end_follows(self) -> Reading[bool]:
        """False: the answer ends here, and its last mark was its stop token."""
        yield from self._space()
        return bool((yield from self._peek()))


class QwenCoderParser(_WrittenMachine):
    """``<tool_call><function=name>``, then ``<parameter=key>value</parameter>`` for each, ``</function></tool_call>``.

    Models leave out the outer marks now and then, and forget the end of a value: a line that begins the next one, or
    ends the call, ends it too. Seed-OSS writes the same in outer marks of its own."""

    OUTER = ("<tool_call>", "<seed:tool_call>")
    OUTER_ENDS = ("</tool_call>", "</seed:tool_call>")
    MARKS = (*OUTER, "<function=")

    def _calls(self, mark: str) -> Reading[None]:
        self._begin_call()
        self._values = {}
        if mark in self.OUTER:
            yield from self._space()
            yield from self._expect("<function=")
        yield from self._named(">")
        yield from self._skips(">")
        while True:
            yield from self._space()
            if (yield from self._expect("<parameter=", "</function>")) == "</function>":
                break
            key = yield from self._until(">")
            yield from self._skips(">")
            value = yield from self._until("</parameter>", "\n<parameter=", "\n</function>")
            yield from self._skips("</parameter>")
            self._set(key.strip(), value.removeprefix("\n").removesuffix("\n"))
        self._tell_written()
        yield from self._close(*self.OUTER_ENDS)


def properties_of(schema: object) -> Mapping[str, Any]:
    """The schemas of a tool's arguments, as far as it has any."""
    told = resolved(schema, schema)
    properties = told.get("properties") if isinstance(told, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def value_of(text: str, schema: object, root: object = None) -> Any:
    """The value that a text stands for. Where the schema does not say, JSON is taken as such, all else as a string.
    ``root``: the schema whose parts it may refer to."""
    kinds = _kinds(schema, root)
    stripped = text.strip()
    if "null" in kinds and stripped in ("null", "None"):
        return None
    if "string" in kinds:
        return text
    if "boolean" in kinds and stripped in ("True", "False"):
        return stripped == "True"
    try:
        value = json.loads(stripped, parse_constant=_refused)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # an infinity, or half a character
    except (ValueError, RecursionError):
        return _python_in(stripped, text) if kinds & {"object", "array"} else text
    return value


def _python_in(stripped: str, text: str) -> Any:
    """The value of ``{'a': True}``, which models write for an object; the text, where it is no such thing."""
    if not stripped.startswith(("{", "[")):
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            value = ast.literal_eval(stripped)
        # Through JSON: keys become texts, and what it cannot hold (bytes, sets, infinities) stays text.
        return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def _refused(constant: str) -> None:
    """NaN and infinities are no JSON."""
    raise ValueError(constant)


def _kinds(schema: object, root: object) -> set[str]:
    """Names of the types that a schema allows; of an ``enum`` of strings, that."""
    found, left, seen = set[str](), [schema], set[int]()
    while left:
        one = left.pop()
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))  # references may go in a circle
        kind, choices = one.get("type"), [one["const"]] if "const" in one else one.get("enum")
        if isinstance(kind, str):
            found.add(kind)
        elif isinstance(kind, list):
            found.update(name for name in kind if isinstance(name, str))
        elif isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            found.add("string")
        if "$ref" in one:
            left.append(resolved(one, root))
        for name in ("anyOf", "oneOf", "allOf"):
            left += one[name] if isinstance(one.get(name), list) else ()
    return found
