"""A request of ``/v1/responses`` as the chat that it asks for. Pure.

Items become messages: thoughts, text and calls that follow one another are one message of an assistant's. Raises
ApiError 400 with the path of a bad value.
"""

from __future__ import annotations

from typing import Any

from jettison.server.conversation import bad_arguments
from jettison.server.doors.response_tables import SAMPLED, ResponseFields
from jettison.server.doors.response_tools import Names, chat_call, chat_choice, chat_tools
from jettison.server.doors.wire import checked_object, checked_text, kind_of, renamed, unsupported, wrong_type
from jettison.server.errors import ApiError, bad_request
from jettison.server.json_out import encode

Chat = dict[str, Any]
Item = dict[str, Any]

_RENAMED = {
    "max_completion_tokens": "max_output_tokens", "response_format.json_schema": "text.format",
    "response_format": "text.format", "reasoning_effort": "reasoning.effort", "].function": "]",
    "tool_choice.function": "tool_choice", "messages": "input",
}
"""Fields of the chat, as the request calls them."""
MAX_ITEMS = 4096
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_NO_MEDIA = "only text is read here"
_INCLUDABLE_LOGPROBS = "message.output_text.logprobs"


def items_of(raw: object) -> list[Item]:
    """The input as items, each an object, unchecked inside."""
    if raw is None:
        raise bad_request("input is missing.", "input", "missing_required_parameter")
    if isinstance(raw, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": raw}]}]
    if not isinstance(raw, list):
        raise wrong_type("input", "a string or a list of items")
    if len(raw) > MAX_ITEMS:
        raise _too_many()
    return [checked_object(item, f"input[{at}]") for at, item in enumerate(raw)]


def _too_many() -> ApiError:
    return bad_request(f"input may have at most {MAX_ITEMS} items, those of previous responses counted.", "input")


def refers(item: Item) -> bool:
    """Whether it stands for an item of an earlier response, which its id names."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and item.keys() <= {"id", "type"})


def mended(before: list[Item], items: list[Item], referred: list[bool]) -> tuple[list[Item], list[Item]]:
    """The items of previous responses and those of the request, so that a template can write them: most refuse a call
    whose arguments are no object, as those of an answer that was cut are. Such a call is left out, unless the client
    sends an output of it: then its arguments are kept as a text. A turn that was only this call is kept as an empty
    message, as many templates want the roles to alternate. ``referred``: which of the request's items are of an earlier
    response; the others are the client's own, unchecked, and stay."""
    answered = {call_id for item in (*before, *items)
                if item.get("type") in _OUTPUTS and isinstance(call_id := item.get("call_id"), str)}  # fmt: skip
    kept: list[Item] = []
    starts: list[int] = []
    for row, ours in (before, [True] * len(before)), (items, referred):
        starts.append(len(kept))
        for item, is_ours in zip(row, ours, strict=True):
            if not is_ours or not _is_broken(item):
                kept.append(item)
            elif item["call_id"] in answered:
                kept.append(item if "input" in item else item | {
                    "arguments": encode({"unread_arguments": item["arguments"]}).decode()})
            elif not kept or kept[-1].get("role", "assistant") != "assistant" or kept[-1].get("type") in _OUTPUTS:
                kept.append({"type": "message", "role": "assistant", "content": []})
    return kept[: starts[1]], kept[starts[1] :]


def _is_broken(item: Item) -> bool:
    """Whether it is a call that was cut inside its arguments, or has none that a template can read."""
    if item.get("type") == "custom_tool_call":
        return item.get("status") == "incomplete"
    return item.get("type") == "function_call" and bad_arguments([{"tool_calls": [chat_call(item, "")]}]) is not None


def in_items(error: ApiError, sent: list[Item]) -> ApiError:
    """An error of the chat that a request became, in the request's own words. ``sent``: its items."""
    path = error.param or ""
    if path.endswith(".function.arguments"):  # the place of a message, of which a chat has others than there are items
        for at, item in enumerate(sent):
            if item.get("type") == "function_call" and _is_broken(item):
                return renamed(error, {path: f"input[{at}].arguments"})
    return renamed(error, _RENAMED)


def chat_of(
    fields: ResponseFields, document: dict[str, Any], before: list[Item], items: list[Item]
) -> tuple[Chat, Names]:
    """The body of the chat, and the tools' own names. ``before``: the items of the previous responses, in order."""
    if _INCLUDABLE_LOGPROBS in (fields.include or ()):
        raise unsupported("include", _INCLUDABLE_LOGPROBS, "logprobs are told by /v1/chat/completions")
    if len(before) + len(items) > MAX_ITEMS:
        raise _too_many()
    messages = [*([{"role": "system", "content": fields.instructions}] if fields.instructions else []),
                *messages_of(before, "previous_response_id"), *messages_of(items, "input")]  # fmt: skip
    if not messages:
        raise bad_request("input must not be empty.", "input")
    tools, names = chat_tools(fields.tools)
    chat: Chat = {name: document[name] for name in SAMPLED if name in document}
    chat |= {
        "messages": messages, "max_completion_tokens": fields.max_output_tokens, "tools": tools,
        "tool_choice": chat_choice(fields.tool_choice), "response_format": _format(fields),
        "reasoning_effort": None if fields.reasoning is None else fields.reasoning.effort}
    return {name: value for name, value in chat.items() if value is not None}, names


def messages_of(items: list[Item], name: str) -> list[Chat]:
    """The items as messages. ``name``: of the list, for errors."""
    made: list[Chat] = []
    for at, item in enumerate(items):
        path = f"{name}[{at}]"
        kind = kind_of(item, path, "message")
        if kind == "message":
            _message(made, item, path)
        elif kind == "reasoning":
            thoughts = _thoughts(item, path)
            if thoughts:
                _assistant(made, "reasoning_content", "content", "tool_calls")["reasoning_content"] = thoughts
        elif kind in ("function_call", "custom_tool_call"):
            _assistant(made).setdefault("tool_calls", []).append(chat_call(item, path))
        elif kind in _OUTPUTS:
            call_id = checked_text(item.get("call_id"), f"{path}.call_id")
            text = _text(item.get("output"), f"{path}.output")
            made.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            raise unsupported(f"{path}.type", kind, "an item is a message, reasoning, or a call or its output")
    return made


def _assistant(made: list[Chat], *unless: str) -> Chat:
    """The assistant's message that the next item belongs to: the last one, unless it has one of these fields."""
    if not made or made[-1]["role"] != "assistant" or any(name in made[-1] for name in unless):
        made.append({"role": "assistant"})
    return made[-1]


def _message(made: list[Chat], item: Item, path: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise bad_request(f"{path}.role must be one of {', '.join(_ROLES)}.", f"{path}.role")
    text = _text(item.get("content"), f"{path}.content")
    if role == "assistant":
        _assistant(made, "content", "tool_calls")["content"] = text
    else:
        made.append({"role": role, "content": text})


def _text(content: object, path: str) -> str:
    """A text, or those of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(path, "a string or a list of text parts")
    texts = []
    for at, part in enumerate(content):
        where = f"{path}[{at}]"
        part = checked_object(part, where)
        kind = kind_of(part, where)
        if kind not in _TEXTS:
            raise unsupported(f"{where}.type", kind, _NO_MEDIA)
        texts.append(checked_text(part.get("refusal" if kind == "refusal" else "text"), f"{where}.text"))
    return "\n".join(texts)


def _thoughts(item: Item, path: str) -> str:
    """Thoughts, or their summary; empty where they are encrypted only."""
    for name in ("content", "summary"):
        if item.get(name):
            return _text(item[name], f"{path}.{name}")
    return ""


def _format(fields: ResponseFields) -> Chat | None:
    form = None if fields.text is None else fields.text.format
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
