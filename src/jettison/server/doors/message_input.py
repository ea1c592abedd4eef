"""A request of ``/v1/messages`` as the chat that it asks for. Pure.

Anthropic's blocks become messages of a chat: results of tools messages of their own, thoughts and calls fields of an
assistant's message. A system message in the midst, as Claude Code sends it, stays where it is: templates that take none
there get it at the front, as with every chat. Raises ApiError 400 with the path of a bad value.
"""

from __future__ import annotations

from typing import Any

from jettison.server.doors.message_tables import MessageFields
from jettison.server.doors.wire import checked_object, checked_text, kind_of, unsupported, wrong_type
from jettison.server.errors import bad_request

Chat = dict[str, Any]

RENAMED = {
    "].function.parameters": "].input_schema", "].function": "]",
    "response_format.json_schema.schema": "output_config.format.schema", "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort", "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Fields of the chat, as the request calls them."""
_BILLING = "x-anthropic-billing-header:"
"""Begins a system block that Claude Code sends for Anthropic's books, other in each request: a prompt that began with
it would share no prefix with the one before."""
_NO_MEDIA = "only text is read here"
_PIECES = ("content", "reasoning_content", "tool_calls")
_TIERS = {"auto": "auto", "standard_only": "default"}


def chat_of(fields: MessageFields, *, knows_thinking: bool) -> Chat:
    """The body of the chat. ``knows_thinking``: whether the template can switch thinking."""
    messages = [*_system(fields.system), *_messages(fields.messages)]
    wants_thoughts, shows_thoughts = _thinking(fields.thinking)
    chat: Chat = {
        "model": fields.model, "messages": messages, "max_tokens": fields.max_tokens, "stop": fields.stop_sequences,
        "temperature": fields.temperature, "top_p": fields.top_p, "top_k": fields.top_k, "stream": fields.stream,
        "tools": [_tool(tool, f"tools[{at}]") for at, tool in enumerate(fields.tools or ())] or None,
        "service_tier": None if fields.service_tier is None else _TIERS.get(fields.service_tier, fields.service_tier),
        "include_reasoning": shows_thoughts,
        **_choice(fields.tool_choice), **_output(fields),
    }
    if messages and messages[-1]["role"] == "assistant":
        chat |= {"continue_final_message": True, "add_generation_prompt": False}  # as at Anthropic
    if knows_thinking:
        chat["chat_template_kwargs"] = {"enable_thinking": wants_thoughts}
    return {name: value for name, value in chat.items() if value is not None}


def _system(system: object) -> list[Chat]:
    if system is None:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}] if system else []
    texts = [text for text in _texts(system, "system") if not text.startswith(_BILLING)]
    return [{"role": "system", "content": "\n\n".join(texts)}] if texts else []


def _texts(blocks: object, path: str) -> list[str]:
    """The texts of blocks that may be nothing else."""
    return [_text_block(block, where) for block, where in _placed(blocks, path)]


def _placed(blocks: object, path: str) -> list[tuple[object, str]]:
    """Blocks, each with its path."""
    if not isinstance(blocks, list):
        raise wrong_type(path, "a string or a list of text blocks")
    return [(block, f"{path}[{at}]") for at, block in enumerate(blocks)]


def _text_block(block: object, path: str) -> str:
    block = checked_object(block, path)
    kind = kind_of(block, path)
    if kind != "text":
        raise unsupported(f"{path}.type", kind, _NO_MEDIA)
    return checked_text(block.get("text"), f"{path}.text")


def _readable(block: object, path: str) -> str:
    """The text of a block of a user's, or of a tool's result: documents and what a search has found may be text."""
    block = checked_object(block, path)
    kind = kind_of(block, path)
    if kind == "document":
        heads, text = ("title", "context"), _source(block.get("source"), f"{path}.source")
    elif kind == "search_result":
        heads, text = ("title", "source"), "\n".join(_texts(block.get("content"), f"{path}.content"))
    else:
        return _text_block(block, path)
    return "\n".join([*(checked_text(block[name], f"{path}.{name}") for name in heads if block.get(name)), text])


def _source(source: object, path: str) -> str:
    """The text of a document."""
    source = checked_object(source, path)
    kind = kind_of(source, path)
    if kind == "text":
        return checked_text(source.get("data"), f"{path}.data")
    if kind != "content":
        raise unsupported(f"{path}.type", kind, _NO_MEDIA)
    content = source.get("content")
    return content if isinstance(content, str) else "\n".join(_texts(content, f"{path}.content"))


def _messages(messages: list[Chat] | None) -> list[Chat]:
    if messages is None:
        raise bad_request("messages is missing.", "messages", "missing_required_parameter")
    if not messages:
        raise bad_request("messages must not be empty.", "messages")
    made: list[Chat] = []
    for at, message in enumerate(messages):
        path, role, content = f"messages[{at}]", message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise bad_request(f"{path}.role must be user, assistant or system.", f"{path}.role")
        if isinstance(content, str):
            said = [{"type": "text", "text": content}]
            _add(made, _assistant(said, path) if role == "assistant" else {"role": role, "content": content})
        elif not isinstance(content, list):
            raise wrong_type(f"{path}.content", "a string or a list of blocks")
        elif role == "user":
            for turn in _user(content, f"{path}.content"):
                _add(made, turn)
        elif role == "system":
            made.append({"role": role, "content": "\n\n".join(_texts(content, f"{path}.content"))})
        else:
            _add(made, _assistant(content, f"{path}.content"))
    return [_whole(turn) for turn in made]


def _add(made: list[Chat], turn: Chat) -> None:
    """Turns of a user's, or of an assistant's, that follow one another are one, as at Anthropic: many templates want
    the roles to alternate. Lists grow in place: a client may send very many turns."""
    role, last = turn["role"], made[-1] if made else {}
    if last.get("role") != role or role not in ("user", "assistant"):
        made.append(turn)
    elif role == "user":
        last["content"] = _parts(last["content"])
        last["content"] += _parts(turn["content"])
    else:
        for name in _PIECES:
            last[name] += turn[name]


def _whole(turn: Chat) -> Chat:
    """A turn with the texts of an assistant's, and without what it has not."""
    if turn["role"] != "assistant":
        return turn
    thoughts = {"reasoning_content": "".join(turn["reasoning_content"])} if turn["reasoning_content"] else {}
    calls = {"tool_calls": turn["tool_calls"]} if turn["tool_calls"] else {}
    return {"role": "assistant", "content": "".join(turn["content"])} | thoughts | calls


def _parts(content: str | list[Chat]) -> list[Chat]:
    """A user's content as parts."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _user(blocks: list[Any], path: str) -> list[Chat]:
    """Results of tools, and between them what the user says."""
    made: list[Chat] = []
    for at, block in enumerate(blocks):
        where = f"{path}[{at}]"
        block = checked_object(block, where)
        if block.get("type") == "tool_result":
            content = block.get("content")
            text = content if isinstance(content, str) else "\n".join(
                _readable(*each) for each in _placed(content or [], f"{where}.content"))
            call_id = checked_text(block.get("tool_use_id"), f"{where}.tool_use_id")
            made.append({"role": "tool", "tool_call_id": call_id, "content": text})
            continue
        text = _readable(block, where)
        if made and made[-1]["role"] == "user":
            made[-1]["content"].append({"type": "text", "text": text})
        else:
            made.append({"role": "user", "content": [{"type": "text", "text": text}]})
    return made or [{"role": "user", "content": ""}]


def _assistant(blocks: list[Any], path: str) -> Chat:
    """A turn whose fields are lists of their pieces."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Chat] = []
    for at, block in enumerate(blocks):
        where = f"{path}[{at}]"
        block = checked_object(block, where)
        kind = kind_of(block, where)
        if kind == "text":
            texts.append(_text_block(block, where))
        elif kind == "thinking":
            thoughts.append(checked_text(block.get("thinking"), f"{where}.thinking"))
        elif kind == "tool_use":
            function = {
                "name": checked_text(block.get("name"), f"{where}.name"),
                "arguments": checked_object(block.get("input"), f"{where}.input")}
            calls.append({
                "id": checked_text(block.get("id"), f"{where}.id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # which no model here can read
            raise unsupported(f"{where}.type", kind, "an assistant's blocks are text, thinking and tool_use")
    return {"role": "assistant", "content": texts, "reasoning_content": thoughts, "tool_calls": calls}


def _tool(tool: Chat, path: str) -> Chat:
    kind = kind_of(tool, path, "custom")
    if kind != "custom":
        raise unsupported(f"{path}.type", kind, "the server has no tools of its own")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = checked_text(tool["description"], f"{path}.description")
    if isinstance(tool.get("strict"), bool):
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _choice(choice: Chat | None) -> Chat:
    if choice is None:
        return {}
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise bad_request("tool_choice.type must be auto, any, tool or none.", "tool_choice.type")
    made: Chat = {"tool_choice": "required" if kind == "any" else kind}
    if kind == "tool":
        name = checked_text(choice.get("name"), "tool_choice.name")
        made["tool_choice"] = {"type": "function", "function": {"name": name}}
    single = choice.get("disable_parallel_tool_use")
    if not isinstance(single, bool | None):
        raise wrong_type("tool_choice.disable_parallel_tool_use", "true or false")
    return made | ({"parallel_tool_calls": False} if single else {})


def _thinking(thinking: Chat | None) -> tuple[bool, bool]:
    """Whether the model is to think, and whether its thoughts are told."""
    if thinking is None:
        return False, False
    kind = thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad_request("thinking.type must be enabled, disabled or adaptive.", "thinking.type")
    if not isinstance(thinking.get("budget_tokens"), int | None):
        raise wrong_type("thinking.budget_tokens", "a number")
    is_on = kind != "disabled"
    return is_on, is_on and thinking.get("display") != "omitted"


def _output(fields: MessageFields) -> Chat:
    """Effort and form."""
    config = fields.output_config or {}
    form, path = (config["format"], "output_config.format") if config.get("format") is not None else (
        fields.output_format, "output_format")
    made: Chat = {}
    if config.get("effort") is not None:
        made["reasoning_effort"] = config["effort"]
    if form is None:
        return made
    form = checked_object(form, path)
    if form.get("type") != "json_schema":
        raise bad_request(f"{path}.type must be json_schema.", f"{path}.type")
    schema = checked_object(form.get("schema"), f"{path}.schema")
    return made | {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
