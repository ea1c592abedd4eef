"""Tools of ``/v1/responses`` as functions of a chat, and what calls of them are called in items. Pure.

A tool of the kind ``custom`` takes a text: it becomes a function of one text, ``input``. A ``namespace`` becomes its
functions, each with the namespace before its name. Raises ApiError 400 with the path of a bad value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from jettison.server.doors.wire import checked_object, checked_text, kind_of, unsupported, wrong_type
from jettison.server.errors import bad_request
from jettison.server.json_out import encode

Chat = dict[str, Any]
Item = dict[str, Any]

_INPUT = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
    "additionalProperties": False}
_ONLY_FUNCTIONS = "the server has no tools of its own, and calls functions only"
_SWITCHES = {
    "web_search": 'web_search = "disabled"', "image_generation": "features.image_generation = false",
    "tool_search": "features.tool_search = false"}
"""What turns a tool of the server's own off in Codex, which offers it by itself."""


class Called(NamedTuple):
    """A tool by its own name."""

    kind: str
    """``function`` or ``custom``."""
    name: str
    namespace: str | None = None


Names = Mapping[str, Called]
"""By the name that the tool has in the chat."""


def full_name(namespace: object, name: str) -> str:
    """The name of a namespace's tool in the chat."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def chat_tools(tools: list[Item] | None) -> tuple[list[Chat] | None, Names]:
    """The tools as a chat's, and their own names."""
    made: list[Chat] = []
    names: dict[str, Called] = {}
    for at, tool in enumerate(tools or ()):
        path = f"tools[{at}]"
        kind = kind_of(tool, path, "function")
        if kind == "namespace":
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise wrong_type(f"{path}.tools", "a list of tools")
            namespace = checked_text(tool.get("name"), f"{path}.name")
            for number, one in enumerate(inner):
                where = f"{path}.tools[{number}]"
                _add(made, names, checked_object(one, where), where, namespace)
        elif kind != "web_search" or tool.get("external_web_access") is not False:
            # Such a search reaches nothing, and Codex sends it with every request.
            _add(made, names, tool, path, None)
    return made or None, names


def _add(made: list[Chat], names: dict[str, Called], tool: Item, path: str, namespace: str | None) -> None:
    kind = kind_of(tool, path, "function")
    if kind not in ("function", "custom"):
        switch = f" (in Codex: {_SWITCHES[kind]})" if kind in _SWITCHES else ""
        raise unsupported(f"{path}.type", kind, _ONLY_FUNCTIONS + switch)
    function = {name: tool.get(name) for name in ("name", "description", "parameters", "strict")}
    if kind == "custom":
        function |= {"parameters": _INPUT, "strict": None, "description": _told(tool, path)}
    if isinstance(function["name"], str):  # what else it is the chat says
        own = function["name"]
        function["name"] = full_name(namespace, own)
        called = Called(kind, own, namespace)
        if names.setdefault(function["name"], called) != called:  # a call of it could be either's
            raise bad_request(f"{path}.name: there is another tool of this name.", f"{path}.name")
    made.append({"type": "function", "function": {
        name: value for name, value in function.items() if value is not None}})


def _told(tool: Item, path: str) -> str:
    """What the model learns of a custom tool. Its format is told, not enforced."""
    lines = [checked_text(tool.get("description") or "", f"{path}.description")]
    form = checked_object(tool.get("format") or {}, f"{path}.format")
    if form.get("type") == "grammar":
        written = checked_text(form.get("definition"), f"{path}.format.definition")
        lines.append(f"The input follows this grammar:\n{written}")
    return "\n".join(line for line in lines if line)


def chat_choice(choice: object) -> object:
    """``tool_choice`` as a chat's."""
    if not isinstance(choice, dict):
        return choice
    kind = kind_of(choice, "tool_choice")
    if kind == "allowed_tools":
        told = choice.get("tools")
        if not isinstance(told, list):
            raise wrong_type("tool_choice.tools", "a list of tools")
        tools = [_named(checked_object(one, f"tool_choice.tools[{at}]"), f"tool_choice.tools[{at}]")
                 for at, one in enumerate(told)]  # fmt: skip
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return _named(choice, "tool_choice")


def _named(choice: Item, path: str) -> Chat:
    kind = kind_of(choice, path)
    if kind not in ("function", "custom"):
        raise unsupported(f"{path}.type", kind, "it is none, auto, required, allowed_tools, or a function by name")
    name = checked_text(choice.get("name"), f"{path}.name")
    return {"type": "function", "function": {"name": full_name(choice.get("namespace"), name)}}


def chat_call(item: Item, path: str) -> Chat:
    """A call of the history."""
    is_custom = item.get("type") == "custom_tool_call"
    field = "input" if is_custom else "arguments"
    texts = {name: checked_text(item.get(name), f"{path}.{name}") for name in ("call_id", "name", field)}
    arguments = encode({"input": texts["input"]}).decode() if is_custom else texts["arguments"]
    name = full_name(item.get("namespace"), texts["name"])
    return {"id": texts["call_id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def input_of(arguments: str) -> str:
    """The text that a custom tool is called with; a call that breaks off stays as it is."""
    try:
        told = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    value = told.get("input") if isinstance(told, dict) else None
    return value if isinstance(value, str) else arguments
