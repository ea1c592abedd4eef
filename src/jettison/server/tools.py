"""The tools of a request, and whether the model may or has to call them: checked, in today's form whatever the client's
was. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jettison.server.errors import ApiError, bad_request
from jettison.server.fields import ChatFields
from jettison.server.parsers.machine import MAX_NAME_CHARS

MAX_TOOLS = 1024

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request says of tools."""

    tools: tuple[dict[str, Any], ...] = ()
    """Each ``{"type": "function", "function": {"name": ..., "parameters": ...}}``."""
    mode: Mode = "none"
    """Whether the model may call none, any, has to call one, or has to call the one that ``name`` says."""
    name: str | None = None
    allowed: frozenset[str] | None = None
    """The names that may be called, where the request says so; the others are in the prompt all the same."""
    is_parallel: bool = True
    """Whether one answer may have several calls."""
    is_old: bool = False
    """Whether the request has ``functions``, and is answered with ``function_call``."""
    choice_field: str = "tool_choice"

    @property
    def callable_tools(self) -> tuple[dict[str, Any], ...]:
        """The tools that may be called."""
        if self.mode == "none":
            return ()
        return tuple(
            tool for tool in self.tools if self.name in (None, tool["function"]["name"])
            and (self.allowed is None or tool["function"]["name"] in self.allowed))


def plan_tools(fields: ChatFields) -> ToolPlan:
    """Raises ApiError 400 that names the field."""
    is_old = bool(fields.functions) and not fields.tools
    where = "functions" if is_old else "tools"
    told = [{"type": "function", "function": one} for one in fields.functions or ()] if is_old else fields.tools or ()
    tools = checked_tools(told, where)
    field, value = ("function_call", fields.function_call) if is_old else ("tool_choice", fields.tool_choice)
    allowed = None
    if not is_old and isinstance(value, dict) and value.get("type") == "allowed_tools":
        mode, name, allowed = *_allowed_mode(value), _allowed_names(value, tools)
    else:
        mode, name = _choice(value, field)
    if mode in ("required", "named") and not tools:
        raise bad_request(f"{field}: there are no {where} to call.", field)
    if name is not None and not any(tool["function"]["name"] == name for tool in tools):
        raise bad_request(f"{field}: no tool of this request is called {name[:MAX_NAME_CHARS]!r}.", field)
    return ToolPlan(
        tools=tools,
        mode=mode if tools else "none",
        name=name,
        allowed=allowed,
        is_parallel=not is_old and fields.parallel_tool_calls is not False,
        is_old=is_old,
        choice_field=field,
    )


def checked_tools(told: Sequence[dict[str, Any]], where: str = "tools") -> tuple[dict[str, Any], ...]:
    """The tools as templates read them. Raises ApiError 400 with the path of a bad value."""
    if len(told) > MAX_TOOLS:
        raise bad_request(f"{where} may have at most {MAX_TOOLS} entries.", where)
    return tuple(_checked(tool, f"{where}[{at}]", where == "functions") for at, tool in enumerate(told))


def _checked(tool: dict[str, Any], path: str, is_old: bool) -> dict[str, Any]:
    if (tool.get("type") or "function") != "function":
        raise bad_request(
            f"{path}.type: only tools of type 'function' are called here.", f"{path}.type", "unsupported_parameter")
    function = tool.get("function")
    where = path if is_old else f"{path}.function"
    if not isinstance(function, dict):
        raise bad_request(f"{where} must be an object.", where, "invalid_type")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 0 < len(name.strip()) <= MAX_NAME_CHARS or name != name.strip():
        raise bad_request(
            f"{where}.name must be a name of 1 to {MAX_NAME_CHARS} characters.", f"{where}.name", "invalid_type")
    if not isinstance(parameters, dict | None):
        raise bad_request(f"{where}.parameters must be a JSON schema.", f"{where}.parameters", "invalid_type")
    # Templates read the parameters of every tool, and OpenAI lets a function without any leave them out.
    schema = parameters or {"type": "object", "properties": {}}
    return {**tool, "type": "function", "function": {**function, "parameters": schema}}


def _choice(value: object, field: str) -> tuple[Mode, str | None]:
    """The mode, and the name that has to be called."""
    kind = value.get("type") if isinstance(value, dict) else value
    if kind is None and isinstance(value, dict):
        kind = "function"  # the old field's form, {"name": ...}
    if kind is None or kind == "auto":
        return "auto", None
    if kind == "none":
        return "none", None
    if kind in ("required", "any"):
        return "required", None
    if kind != "function" or not isinstance(value, dict):
        raise _bad_choice(field)
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _bad_choice(field)
    return "named", name


def _allowed_mode(value: dict[str, Any]) -> tuple[Mode, None]:
    told = value.get("allowed_tools", value)
    mode = told.get("mode") if isinstance(told, dict) else None
    if mode not in ("auto", "required"):
        raise bad_request("tool_choice.allowed_tools.mode must be 'auto' or 'required'.", "tool_choice")
    return mode, None


def _allowed_names(value: dict[str, Any], tools: Sequence[dict[str, Any]]) -> frozenset[str]:
    """The names of ``allowed_tools``, each of which is a tool of the request."""
    told = value.get("allowed_tools", value).get("tools")
    known = {tool["function"]["name"] for tool in tools}
    names = []
    for one in told if isinstance(told, list) else ():
        function = one.get("function", one) if isinstance(one, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in known:
            raise bad_request("tool_choice.allowed_tools.tools: one is no tool of this request.", "tool_choice")
        names.append(name)
    if not names:
        raise bad_request("tool_choice.allowed_tools.tools must name one tool at least.", "tool_choice")
    return frozenset(names)


def _bad_choice(field: str) -> ApiError:
    words = "'none' or 'auto', or {\"name\": ...}" if field == "function_call" else (
        "'none', 'auto' or 'required', or {\"type\": \"function\", \"function\": {\"name\": ...}}")
    return bad_request(f"{field} must be {words}.", field)
