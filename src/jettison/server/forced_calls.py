"""The grammar of an answer that has to call a tool (``tool_choice`` ``required``, or a function by name).

It is in Lark, as llguidance reads it, with the tools' schemas inside. A function by name: the answer is its arguments.
Any of them: the form of the model where a grammar can write that well, else a JSON list, which ``answer_form`` reads.
Thoughts come before it. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jettison.server.parsers.registry import HARMONY, CallKind, ThinkingKind
from jettison.server.structured import Constraint
from jettison.server.tools import ToolPlan

_OWN = ("hermes", "llama3_json", HARMONY)
"""Forms that a grammar writes as the model does."""


def reads_its_own(kind: CallKind | None) -> bool:
    """Whether a forced answer has the model's own form."""
    return kind is not None and kind.name in _OWN


def constraint_of(
    plan: ToolPlan, calls: CallKind | None, thinking: ThinkingKind | None, thinks: str,
    encode: Callable[[str], Sequence[int]],
) -> Constraint | None:
    """What the answer has to look like; None: anything. ``thinks``: see ``answer_form.Thinks``. ``encode``: the token
    ids of a mark."""
    if plan.mode not in ("required", "named"):
        return None
    if HARMONY in [kind.name for kind in (calls, thinking) if kind is not None]:
        return Constraint("grammar", "\n".join(_harmony(plan)), param=plan.choice_field)
    lines = _named(plan) if plan.mode == "named" else _any_of(plan, calls)
    after: tuple[int, ...] | None = None
    if thinking is not None and thinks == "already":
        after = tuple(encode(thinking.end))
    elif thinking is not None and thinks == "maybe":
        lines = _after_thoughts(lines, thinking)
    return Constraint("grammar", "\n".join(lines), param=plan.choice_field, begins_after=after)


def _schemas(plan: ToolPlan) -> list[str]:
    """A rule for each tool's arguments."""
    return [
        f"args_{at}: %json {_text(_arguments_schema(tool))}" for at, tool in enumerate(plan.callable_tools)]


def _arguments_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, also where the schema does not say so."""
    schema: dict[str, Any] = tool["function"]["parameters"]
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def _named(plan: ToolPlan) -> list[str]:
    return [r"start: space? args_0", r"space: /[ \n]{1,4}/", *_schemas(plan)]


def _any_of(plan: ToolPlan, kind: CallKind | None) -> list[str]:
    names = [json.dumps(tool["function"]["name"], ensure_ascii=False) for tool in plan.callable_tools]
    form = kind.name if kind is not None else ""
    key = "parameters" if form == "llama3_json" else "arguments"
    begin, end, between = {
        "hermes": ("<tool_call>\n", "\n</tool_call>", "\n"), "llama3_json": ("", "", "; "),
    }.get(form, ("", "", ", "))  # fmt: skip
    opens, closes = ("", "") if form in _OWN else ("[", "]")
    calls = []
    for at, name in enumerate(names):
        before = begin + '{"name": ' + name + ', "' + key + '": '
        calls.append(f"call_{at}: {_text(before)} args_{at} {_text('}' + end)}")
    several = f" ({_text(between)} call)*" if plan.is_parallel else ""
    start = " ".join(part for part in (opens and _text(opens), f"call{several}", closes and _text(closes)) if part)
    return [f"start: space? {start}", r"space: /[ \n]{1,4}/", f"call: {_one_of('call', len(names))}", *calls,
            *_schemas(plan)]


def _after_thoughts(lines: Sequence[str], thinking: ThinkingKind) -> list[str]:
    """The same, maybe with thoughts before it."""
    first, *others = lines
    body = first.removeprefix("start: ").removeprefix("space? ")
    return [
        f"start: thoughts? space? {body}", f"thoughts: {_text(thinking.begin)} thought",
        f"thought[suffix={_text(thinking.end)}]: /(?s:.*)/", *others]


def _harmony(plan: ToolPlan) -> list[str]:
    """Messages of thoughts or to the user, then the call, which ends the turn."""
    calls = []
    for at, tool in enumerate(plan.callable_tools):
        header = "commentary to=functions." + tool["function"]["name"] + " "
        calls.append(f'call_{at}: {_text(header)} <|constrain|> "json" <|message|> args_{at}')
    return [
        "start: (<|channel|> before <|end|> <|start|> \"assistant\")* <|channel|> call",
        "before: (\"analysis\" | \"commentary\") <|message|> /(?s:.*)/",
        f"call: {_one_of('call', len(calls))}", *calls, *_schemas(plan)]  # fmt: skip


def _one_of(rule: str, count: int) -> str:
    return " | ".join(f"{rule}_{at}" for at in range(count))


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
