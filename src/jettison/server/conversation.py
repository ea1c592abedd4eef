"""Messages from a client: checked, and brought into the form that a template takes.

``checked_messages`` raises with the path of a bad value; ``fitted`` follows the template's traits. No template is
rendered here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from jettison.server.errors import bad_request
from jettison.server.template_traits import Traits, content_of

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 4096
SHORT_ID_CHARS = 9
"""Letters and digits of a call's id in templates that take no other."""
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
"""Types of parts that carry a text, under ``text`` or their own name, as vLLM takes them."""
_LEADERS = ("system", "developer")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send an assistant's reasoning; templates read the first."""

Message = dict[str, Any]


def checked_messages(messages: list[Message] | None, knows: Callable[[str], bool]) -> list[Message]:
    """The messages, each checked for a known role, text content and valid tool calls.

    ``knows``: whether the template names a role or field that not all templates know. Fields without a value are left
    out, all others stay. Raises ApiError 400 with the path of the bad value.
    """
    if messages is None:
        raise bad_request("messages is missing.", "messages", "missing_required_parameter")
    if not messages:
        raise bad_request("messages must not be empty.", "messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"messages may have at most {MAX_MESSAGES} entries.", "messages")
    todays = messages if knows("function_call") else _in_todays_form(messages)
    return [_checked(message, f"messages[{at}]", knows) for at, message in enumerate(todays)]


def _in_todays_form(messages: Sequence[Message]) -> list[Message]:
    """Messages with the old ``function_call`` and role ``function`` as tool calls and tools' messages.

    What has another form than OpenAI's stays, to be judged as it is. An old call has no id: its place names it.
    """
    made = []
    call_id: str | None = None
    for at, message in enumerate(messages):
        call = message.get("function_call")
        if message.get("role") == "assistant" and isinstance(call, dict) and not message.get("tool_calls"):
            call_id = f"call{at:05d}"  # nine characters, as some templates require
            calls = [{"id": call_id, "type": "function", "function": call}]
            message = message | {"function_call": None, "tool_calls": calls}
        elif message.get("role") == "function":  # its call may have been cut from the history
            told = message.get("tool_call_id") or call_id or f"call{at:05d}"
            message, call_id = message | {"role": "tool", "tool_call_id": told}, None
        made.append(message)
    return made


def _checked(message: Message, path: str, knows: Callable[[str], bool]) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not (role in ROLES or knows(role)):
        raise bad_request(f"{path}.role must be one of {', '.join(ROLES)}.", f"{path}.role")
    for name in ("function_call", "audio"):
        if message.get(name) and not knows(name):
            raise bad_request(f"{path}.{name} is not supported.", f"{path}.{name}", "unsupported_parameter")
    checked = {name: value for name, value in message.items() if value is not None}
    for name in ("name", "tool_call_id", *_REASONING):
        if not isinstance(checked.get(name, ""), str):
            raise bad_request(f"{path}.{name} must be a string.", f"{path}.{name}", "invalid_type")
    if "content" in checked or role in ("system", "developer", "user"):
        checked["content"] = _content(message.get("content"), f"{path}.content")
    if "tool_calls" in checked:
        calls = _tool_calls(checked.pop("tool_calls"), f"{path}.tool_calls")
        if calls:
            checked["tool_calls"] = calls
    reasoning = next((checked[name] for name in _REASONING if name in checked), None)
    if reasoning is not None:
        checked = {"thinking": reasoning, **checked, "reasoning_content": reasoning}
        if knows("reasoning"):
            checked.setdefault("reasoning", reasoning)
    return checked


def _content(content: object, path: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{path} must be a string or a list of text parts.", path, "invalid_type")
    return [_part(part, f"{path}[{at}]") for at, part in enumerate(content)]


def _part(part: object, path: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in TEXT_PARTS:
        told = f"a part of type {kind[:60]!r} is" if isinstance(kind, str) else "a part without a type is"
        raise bad_request(f"{path}: {told} not supported: only text is read here.", path, "unsupported_content")
    name = "text" if "text" in part or kind not in part else str(kind)
    if not isinstance(part.get(name), str):
        raise bad_request(f"{path}.{name} must be a string.", f"{path}.{name}", "invalid_type")
    return {"type": "text", "text": part[name]} | {
        name: value for name, value in part.items() if name not in ("type", "text", kind) and value is not None}


def _tool_calls(calls: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_request(f"{path} must be a list.", path, "invalid_type")
    checked = []
    for at, call in enumerate(calls):
        where = f"{path}[{at}]"
        if not isinstance(call, dict):
            raise bad_request(f"{where} must be an object.", where, "invalid_type")
        function = call.get("function")
        if (call.get("type") or "function") != "function" or not isinstance(function, dict):
            raise bad_request(
                f"{where}: only tool calls of type 'function' are supported, with an object of that name.", where,
                "unsupported_content")
        if not isinstance(function.get("name"), str):
            raise bad_request(f"{where}.function.name must be a string.", f"{where}.function.name", "invalid_type")
        arguments = function.get("arguments")
        if not isinstance(arguments, str | dict | None):
            name = f"{where}.function.arguments"
            raise bad_request(f"{name} must be a string of JSON.", name, "invalid_type")
        checked.append({name: value for name, value in call.items() if value is not None} | {"function": function})
    return checked


def fitted(messages: Sequence[Message], traits: Traits) -> list[Message]:
    """The messages as a template with these traits takes them; ``forms_of`` then moves system messages."""
    return [_fitted(message, traits) for message in messages]


def _fitted(message: Message, traits: Traits) -> Message:
    fit = dict(message)
    if fit["role"] == "developer" and not traits.knows_developer:
        fit["role"] = "system"
        fit.pop("tools", None)
    role = "system" if fit["role"] == "developer" else fit["role"]
    form = traits.form_of("tool" if role == "function" else role)
    if traits.joins_thoughts and fit.get("tool_calls") and fit.get("content") and fit.get("thinking"):
        thoughts = f"{fit['thinking']}\n\n{text_of(fit.pop('content'))}"
        fit |= {name: thoughts for name in _REASONING if name in fit}
    if "content" not in fit and not fit.get("tool_calls"):  # templates concatenate it
        fit["content"] = content_of("", form)
    elif "content" not in fit:
        if traits.no_content != "absent":
            fit["content"] = None if traits.no_content == "null" else [] if form == "parts" else ""
    elif form == "string":
        fit["content"] = text_of(fit["content"])
    elif form == "parts" and isinstance(fit["content"], str):
        fit["content"] = content_of(fit["content"], form)
    if "tool_calls" in fit:
        fit["tool_calls"] = [_fitted_call(call, traits) for call in fit["tool_calls"]]
    if traits.wants_short_ids and isinstance(fit.get("tool_call_id"), str):
        fit["tool_call_id"] = _short_id(fit["tool_call_id"])
    return fit


def _short_id(call_id: str) -> str:
    """The id of a call, or one made from it where it has another form: other servers' calls are in histories, too."""
    if len(call_id) == SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode(errors="replace")).hexdigest()[:SHORT_ID_CHARS]


def with_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, traits: Traits
) -> list[Message]:
    """Fitted messages with the tools in the system message, where the template reads them there. One that a client has
    put there itself stays."""
    if traits.tools != "system" or not tools:
        return list(messages)
    written = json.dumps(tools, ensure_ascii=False)
    if messages[0]["role"] == "system":
        return [{"tools": written, **messages[0]}, *messages[1:]]
    return [{"role": "system", "content": content_of("", traits.form_of("system")), "tools": written}, *messages]


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """A text, or the texts of parts, one below the other."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _fitted_call(call: dict[str, Any], traits: Traits) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if traits.wants_short_ids and isinstance(call.get("id"), str):
        call = call | {"id": _short_id(call["id"])}
    if traits.wants_text_arguments:
        written = arguments or {}
        function["arguments"] = written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)
    else:
        function["arguments"] = _mapping(arguments or {})
    return call | {"function": function}


def _mapping(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """A tool call's arguments as a mapping, which templates read. A text that is no JSON object stays a text, so that
    nothing is lost."""
    if isinstance(arguments, dict):
        return arguments
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


def bad_arguments(messages: Sequence[Message]) -> str | None:
    """The path of the first tool call with arguments that are no JSON object; None where there is none."""
    for at, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls", ())):
            if isinstance(_mapping(call["function"].get("arguments") or {}), str):
                return f"messages[{at}].tool_calls[{number}].function.arguments"
    return None


def forms_of(messages: Sequence[Message], traits: Traits) -> Iterator[list[Message]]:
    """The messages in the forms that a template with these traits may take, the best first: as they are, unless it
    drops system messages where these are; else with one at the front; else with the turns of the user's that these
    parted as one, too, as a template wants that refuses roles which do not alternate."""
    places = [at for at, message in enumerate(messages) if message["role"] in _LEADERS]
    if traits.systems == "anywhere" or places in ([], [0]) or (
        traits.systems == "leading" and places == list(range(len(places)))
    ):
        yield list(messages)
    if places in ([], [0]):
        return
    yield _merged(messages, traits)
    turns = _in_turns(messages)
    if len(turns) < len(messages) - len(places):
        yield _merged([*(messages[at] for at in places), *turns], traits)


def _merged(messages: Sequence[Message], traits: Traits) -> list[Message]:
    """All system messages in one, at the front, each below the one before."""
    leaders = [message for message in messages if message["role"] in _LEADERS]
    texts = [text for leader in leaders if (text := text_of(leader.get("content") or ""))]
    form = traits.form_of("system")
    first = leaders[0] | {"content": content_of("\n\n".join(texts), form)}
    return [first, *(message for message in messages if message["role"] not in _LEADERS)]


def _in_turns(messages: Sequence[Message]) -> list[Message]:
    """Without the system messages, and with turns of the user's that only these parted, and that differ in nothing but
    their content, as one."""
    turns: list[list[Message]] = []
    is_parted = False
    for message in messages:
        if message["role"] in _LEADERS:
            is_parted = True
            continue
        if is_parted and message["role"] == "user" and turns and _beside(turns[-1][-1]) == _beside(message):
            turns[-1].append(message)
        else:
            turns.append([message])
        is_parted = False
    return [turn[0] | {"content": _joined([each["content"] for each in turn])} if len(turn) > 1 else turn[0]
            for turn in turns]  # fmt: skip


def _beside(message: Message) -> Message:
    return message | {"content": None}


def _joined(contents: Sequence[str | list[dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """The contents, one below the other."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n".join(texts)
    return [part for content in contents
            for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)]  # fmt: skip
