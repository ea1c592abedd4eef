"""The options of a request for the chat template, besides its messages: checked, also against the server's settings."""

from __future__ import annotations

from typing import Any, get_args

from jettison.server.chat_renderer import ChatRenderer, ChatRequest
from jettison.server.errors import bad_request
from jettison.server.fields import ChatFields, Effort, FieldWarnings, TokenizeFields

_NOT_VARIABLES = ("messages", "conversation", "chat_template", "tokenize", "tools")
"""Names that ``chat_template_kwargs`` must not have, because requests have fields for them, or may not set them at
all."""

_SWITCHES = ("add_generation_prompt", "continue_final_message")
"""Fields of requests that ``chat_template_kwargs`` may set where the request does not."""


def chat_options(
    fields: ChatFields | TokenizeFields, tools: list[dict[str, Any]] | None, chat: ChatRenderer, warnings: FieldWarnings
) -> ChatRequest:
    """A chat request without its messages. ``tools``: the tools that the request lists. Raises ApiError 400 that names
    the field."""
    continues, adds_prompt = bool(_switch(fields, "continue_final_message")), _switch(fields, "add_generation_prompt")
    if continues and adds_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt cannot both be true.", "continue_final_message")
    if fields.chat_template is not None and not chat.settings.trusts_requests:
        raise bad_request(
            "chat_template: this server takes templates of requests only with --trust-request-chat-template.",
            "chat_template", "unsupported_parameter")  # fmt: skip
    return ChatRequest(
        messages=(),
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        tools=tools or None,
        documents=fields.documents,
        variables=_variables(fields, chat, warnings),
        chat_template=fields.chat_template,
    )  # fmt: skip


def with_reasoning(document: dict[str, Any], warnings: FieldWarnings) -> dict[str, Any]:
    """The chat with ``reasoning`` as an object: a text that is an effort is its effort. Any other value but an object
    says nothing that is known, and is left out with a line in the log."""
    told = document.get("reasoning")
    if told is None or isinstance(told, dict):
        return document
    if isinstance(told, str) and told in get_args(Effort):
        return document | {"reasoning": {"effort": told}}
    warnings.note_ignored("reasoning", "it is neither an object nor an effort")
    return {name: value for name, value in document.items() if name != "reasoning"}


def say_reasoning(fields: ChatFields) -> None:
    """What ``reasoning`` says, said in the request's other fields. Raises ApiError 400 where they say otherwise."""
    told = fields.reasoning
    if told is None:
        return
    effort: Effort | None = "none" if told.enabled is False else told.effort
    if effort is not None:
        if fields.reasoning_effort not in (None, effort):
            raise bad_request("reasoning.effort says otherwise than reasoning_effort.", "reasoning.effort")
        fields.reasoning_effort = effort
    if told.exclude:
        fields.include_reasoning = False


def _switch(fields: ChatFields | TokenizeFields, name: str) -> bool | None:
    """One of ``_SWITCHES``, as the request or its ``chat_template_kwargs`` say; None: neither does. Raises ApiError 400
    where they say different things."""
    sent: bool | None = getattr(fields, name)
    told = (fields.chat_template_kwargs or {}).get(name)
    where = f"chat_template_kwargs.{name}"
    if not isinstance(told, bool | None):
        raise bad_request(f"{where} must be true or false.", where, "invalid_type")
    if None not in (sent, told) and sent != told:
        raise bad_request(f"{where} says otherwise than {name}, a field of the request itself.", where)
    return told if sent is None else sent


def _variables(
    fields: ChatFields | TokenizeFields, chat: ChatRenderer, warnings: FieldWarnings
) -> dict[str, Any]:
    """``chat_template_kwargs``, and the variables that follow from other fields: an effort asks for thinking, or for
    none."""
    told = fields.chat_template_kwargs or {}
    for name in _NOT_VARIABLES:
        if told.get(name) is not None:
            where = f"chat_template_kwargs.{name}"
            raise bad_request(f"{where} is not a variable of chat templates.", where, "unsupported_parameter")
    variables = {name: value for name, value in told.items() if value is not None and name not in _SWITCHES}
    for name in variables:
        if fields.chat_template is None and not chat.knows_variable(name):
            warnings.note(f"chat_template_kwargs.{name}")
    if fields.reasoning_effort is not None:
        variables["reasoning_effort"] = fields.reasoning_effort
        variables.setdefault("enable_thinking", fields.reasoning_effort != "none")
    return variables
