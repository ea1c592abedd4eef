"""The request bodies of the API, field by field, and what is wrong with a bad one.

JSON becomes a plain object first, so that unknown fields can be told apart, then a typed struct. Types are checked
here; ranges in ``sampling``; prompts and messages in ``prompts``.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Literal, TypeVar

import msgspec

from jettison.server.errors import ApiError, bad_request
from jettison.server.quiet_log import Seldom

logger = logging.getLogger(__name__)

_MAX_FIELDS_WARNED = 200
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What both generating endpoints take."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None


class CompletionFields(GenerationFields, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class ChatFields(GenerationFields, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None


class TokenizeFields(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: of a text, or of messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int] | None = None


_HARMLESS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""Known fields that are not supported -> values that ask for nothing."""

_REFUSED = frozenset(_HARMLESS) | {
    "audio", "prediction", "prompt_embeds", "structured_outputs", "web_search_options",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
}
"""Ignoring one of these would silently give something else than was asked for."""

_UNUSED_WITH = {"tools": "tool_choice", "functions": "function_call"}
"""Field -> the field whose ``none`` forbids the model to call what is listed: the list then asks for nothing."""

Fields = TypeVar("Fields", bound=msgspec.Struct)


class FieldWarnings:
    """Unknown fields are ignored with one warning each, and one a minute at most; the memory of them is bounded."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._seldom = Seldom(logger)

    def note(self, name: str) -> None:
        """Warn of a field the first time it is met."""
        if name not in self._seen and len(self._seen) < _MAX_FIELDS_WARNED:
            if self._seldom.warning("ignoring unknown request field %r", name[:64]):
                self._seen.add(name)


def parse_json(body: bytes) -> dict[str, Any]:
    """One JSON object. Raises ApiError 400."""
    try:
        document = msgspec.json.decode(body)
    except RecursionError:
        raise bad_request("The request body is nested too deeply.", code="invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise bad_request(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(document, dict):
        raise bad_request("The request body must be a JSON object.", code="invalid_json")
    return document


def parse_fields(document: dict[str, Any], fields: type[Fields], warnings: FieldWarnings) -> Fields:
    """The typed body. Raises ApiError 400 naming the field; unknown fields are ignored."""
    known = fields.__struct_fields__
    for name, value in document.items():
        if name in known:
            continue
        if name in _REFUSED:
            _check_harmless(name, value, document)
        else:
            warnings.note(name)
    try:
        return msgspec.convert(document, fields)
    except msgspec.ValidationError as error:
        raise _named(error) from None


def _check_harmless(name: str, value: Any, document: dict[str, Any]) -> None:
    """Raise ApiError 400 where a known field that is not supported asks for something."""
    if value is None or any(value == harmless for harmless in _HARMLESS.get(name, ())):
        return
    choice = _UNUSED_WITH.get(name)
    if choice is None:
        raise bad_request(f"{name!r} is not supported by this server.", name, "unsupported_parameter")
    if document.get(choice) != "none":
        raise bad_request(
            f"{name!r} is not supported by this server, unless {choice} is 'none'.", name, "unsupported_parameter")
    if not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise bad_request(f"{name} must be a list of objects.", name, "invalid_type")


def _named(error: msgspec.ValidationError) -> ApiError:
    """``Expected `int`, got `str` - at `$.n``` -> a message and the name of the field."""
    text = str(error)
    found = _PATH.search(text)
    param = found.group(1).removesuffix("[...]") if found else None
    message = _PATH.sub("", text).replace("`", "")
    return bad_request(f"{param}: {message}." if param else f"{message}.", param, "invalid_type")
