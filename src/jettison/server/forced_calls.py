"""What an answer with tools has to look like: where a call is forced (``tool_choice`` ``required``, or a function by
name), and where the client asks for a form of its answers, which may think and call all the same.

Written as a structural tag, in which special tokens may stand. A function by name: the answer is its arguments. Any of
them: the form of the model where that is JSON between marks, else a JSON list; ``answer_form`` reads both. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from jettison.server.json_schemas import loosened
from jettison.server.parsers.registry import HARMONY, CallKind, ThinkingKind
from jettison.server.structured import Constraint
from jettison.server.tools import ToolPlan

Thinks = Literal["no", "maybe", "already"]
"""Whether an answer begins with thoughts: it cannot, it may begin them itself, or the prompt has."""
Format = dict[str, Any]
"""Of a structural tag."""
Tool = dict[str, Any]

_OWN = ("hermes", "llama3_json", HARMONY)
"""Forms of calls that are written as the model writes them."""
_JOINED = ("json", "regex", "choice")
"""What a client asks for that a call may stand in place of."""
_SPACE: Format = {"type": "regex", "pattern": r"[ \n]{0,4}"}
"""Behind thoughts."""
_NEXT = "<|end|><|start|>assistant"


@dataclass(frozen=True, slots=True)
class Speech:
    """How a model calls and thinks, in one request."""

    calls: CallKind | None
    thinking: ThinkingKind | None
    thinks: Thinks

    @property
    def is_harmony(self) -> bool:
        """Whether it speaks in channels."""
        return HARMONY in [kind.name for kind in (self.calls, self.thinking) if kind is not None]


def reads_its_own(kind: CallKind | None) -> bool:
    """Whether calls that a constraint writes have the model's own form."""
    return kind is not None and kind.name in _OWN


def writes_calls(plan: ToolPlan, speech: Speech, said: Constraint | None) -> bool:
    """Whether calls of the answer have the form that is written here: where a call is forced, and beside what the
    client asks for, unless that is a form of calls, or a grammar, of its own, or the operator has no calls read."""
    if plan.mode in ("required", "named"):
        return True
    return plan.mode != "none" and speech.calls is not None and said is not None and said.kind in _JOINED


def constraint_of(
    plan: ToolPlan, speech: Speech, said: Constraint | None, note: Callable[[str], None]
) -> Constraint | None:
    """What the answer has to look like; None: anything. ``said``: what the client asks for besides; a forced call beats
    it. ``note``: told the keywords of the tools' schemas that are left out."""
    is_forced = plan.mode in ("required", "named")
    if said is None and not is_forced:
        return None
    may_call = writes_calls(plan, speech, said)
    wanted = None if said is None or is_forced else _format_of(said)
    end = speech.thinking.end if speech.thinking is not None and speech.thinks == "already" else ""
    if said is not None and not is_forced and (wanted is None or (not may_call and _is_plain(speech))):
        return replace(said, begins_after=end)  # a grammar of the client's is not put into another
    callable_tools = tuple(_followable(tool, note) for tool in plan.callable_tools) if may_call else ()
    if speech.is_harmony:
        body = _in_channels(callable_tools, wanted)
    else:
        body = _body(plan, callable_tools, speech.calls, wanted)
    if speech.thinking is not None and not speech.is_harmony:
        if end:
            body = _sequence(_SPACE, body)
        elif speech.thinks == "maybe":
            body = _sequence(_either(_thoughts(speech.thinking), _const("")), body)
    param = plan.choice_field if said is None or is_forced else said.param
    space = None if said is None or is_forced else said.whitespace_pattern
    return Constraint("structural_tag", _dump({"format": body}), param, space, end)


def _is_plain(speech: Speech) -> bool:
    """Whether an answer without calls is nothing but content."""
    return not speech.is_harmony and (speech.thinking is None or speech.thinks == "no")


def _format_of(said: Constraint) -> Format | None:
    """The client's constraint as a format; None: it has none."""
    if said.kind == "regex":
        return {"type": "regex", "pattern": said.text}
    if said.kind not in ("json", "choice", "structural_tag"):
        return None
    try:
        told = json.loads(said.text)
    except (ValueError, RecursionError):
        return None  # compiling says so
    if said.kind == "json":
        return {"type": "json_schema", "json_schema": told}
    if said.kind == "choice":
        return _either(*map(_const, told))
    return told.get("format") if isinstance(told, dict) and isinstance(told.get("format"), dict) else None


def _body(plan: ToolPlan, tools: Sequence[Tool], calls: CallKind | None, wanted: Format | None) -> Format:
    """What is behind the thoughts."""
    if plan.mode == "named":
        return _arguments(tools[0])
    forms = [_any_of(tools, calls, is_parallel=plan.is_parallel)] if tools else []
    return _either(*forms, *([] if wanted is None else [wanted]))


def _any_of(tools: Sequence[Tool], calls: CallKind | None, *, is_parallel: bool) -> Format:
    """One call, or several where they may be."""
    several = partial(_several, tools, is_parallel)
    name = calls.name if calls is not None else ""
    if name == "hermes":
        return several('<tool_call>\n{"name": %s, "arguments": ', "}\n</tool_call>", "\n")
    if name == "llama3_json":
        return several('{"name": %s, "parameters": ', "}", "; ")
    return _sequence(_const("["), several('{"name": %s, "arguments": ', "}", ", "), _const("]"))


def _several(tools: Sequence[Tool], is_parallel: bool, begin: str, end: str, separator: str) -> Format:
    """``begin`` has a place for the name."""
    tags = [
        _tag(begin % json.dumps(tool["function"]["name"], ensure_ascii=False), _arguments(tool), end)
        for tool in tools]
    return {
        "type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True,
        "stop_after_first": not is_parallel}


def _in_channels(tools: Sequence[Tool], wanted: Format | None) -> Format:
    """Messages of thoughts or to the user, then the call, or what the client asks for."""
    before = [
        _tag(f"<|channel|>{channel}<|message|>", {"type": "any_text"}, _NEXT) for channel in ("analysis", "commentary")]
    last = [
        _tag(f"<|channel|>commentary to=functions.{tool['function']['name']} <|constrain|>json<|message|>",
             _arguments(tool), "") for tool in tools]
    if wanted is not None:
        last.append(_sequence(_const("<|channel|>final<|message|>"), wanted))
    return _sequence({"type": "tags_with_separator", "tags": before, "separator": ""}, _either(*last))


def _followable(tool: Tool, note: Callable[[str], None]) -> Tool:
    """The tool with a schema that can be followed. One without ``strict`` is a description, as OpenAI reads it."""
    function = tool["function"]
    if function.get("strict") is True:
        return tool
    schema, left_out = loosened(function["parameters"])
    for keyword in left_out:
        note(keyword)
    return tool | {"function": function | {"parameters": schema}}


def _arguments(tool: Tool) -> Format:
    """A tool's arguments: an object, also where the schema does not say so."""
    schema = tool["function"]["parameters"]
    return {"type": "json_schema", "json_schema": schema if "type" in schema or "$ref" in schema else {
        "type": "object", **schema}}  # fmt: skip


def _thoughts(thinking: ThinkingKind) -> Format:
    return _sequence(_tag(thinking.begin, {"type": "any_text"}, thinking.end), _SPACE)


def _const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: Format) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
