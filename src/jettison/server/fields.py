"""The request bodies of the API, field by field, and the errors of bad ones.

JSON becomes a plain object first, so that fields that are refused or ignored can be told apart (``field_table``), then
a typed struct. Types are checked here; ranges in ``sampling``; prompts and messages in ``prompts``.
"""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from jettison.server import field_table
from jettison.server.coercion import loosened
from jettison.server.errors import ApiError, bad_request
from jettison.server.field_table import Ignored, Refused, Table, asks_for_nothing
from jettison.server.structured import ConstraintFields, StructuredFields

logger = logging.getLogger(__name__)

_MAX_UNKNOWN_TOLD = 200
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class RepetitionFields(msgspec.Struct, kw_only=True):
    """When an answer counts as repeating itself: ``min_count`` times the same pattern, sizes in tokens."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options for the contents of a stream besides text."""

    table: ClassVar[Table] = field_table.STREAM_OPTIONS

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(ConstraintFields, kw_only=True):
    """Fields of both generating endpoints."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_new_tokens: int | None = None
    n_predict: int | None = None
    temperature: float | None = None
    do_sample: bool | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    echo: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    repetition_detection: RepetitionFields | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None


class CompletionFields(GenerationFields, kw_only=True):
    """``POST /v1/completions``."""

    table: ClassVar[Table] = field_table.COMPLETION

    prompt: Any = None
    logprobs: int | None = None


class ReasoningFields(msgspec.Struct, kw_only=True):
    """``reasoning`` of a chat, as OpenRouter and Open WebUI say it (``chat_options.with_reasoning``: a text is the
    effort). A budget of tokens is not looked at."""

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ChatFields(GenerationFields, kw_only=True):
    """``POST /v1/chat/completions``."""

    table: ClassVar[Table] = field_table.CHAT

    messages: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None
    return_prompt_text: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Any = None
    include_reasoning: bool | None = None
    reasoning: ReasoningFields | None = None


class TokenizeFields(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: of a text, or of messages through the chat template."""

    table: ClassVar[Table] = field_table.TOKENIZE

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
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    table: ClassVar[Table] = field_table.DETOKENIZE

    model: str | None = None
    tokens: list[int] | None = None


Fields = TypeVar("Fields", bound=msgspec.Struct)


class FieldWarnings:
    """Logs a line for each ignored field at its first occurrence; the memory of unknown names is bounded."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._num_unknown = 0

    def note_ignored(self, name: str, reason: str) -> None:
        """Log a field of the tables, which are finite."""
        if name not in self._seen:
            self._seen.add(name)
            logger.warning("request field %r is ignored: %s", name, reason)

    def note(self, name: str) -> None:
        """Log any other name."""
        if name in self._seen or self._num_unknown > _MAX_UNKNOWN_TOLD:
            return
        self._num_unknown += 1
        if self._num_unknown > _MAX_UNKNOWN_TOLD:
            logger.warning("ignoring unknown request fields: more than %d of them, no more are told", _MAX_UNKNOWN_TOLD)
            return
        self._seen.add(name)
        logger.warning("ignoring unknown request field %r", name[:64])


def parse_json(body: bytes) -> dict[str, Any]:
    """One JSON object. Raises ApiError 400."""
    try:
        document = msgspec.json.decode(body.removeprefix(codecs.BOM_UTF8))  # RFC 8259 lets a reader ignore it
    except RecursionError:
        raise bad_request("The request body is nested too deeply.", code="invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        message = f"The request body is not valid JSON: {why_no_text(body) or _half_a_pair(body) or error}."
        raise bad_request(message, code="invalid_json") from None
    if not isinstance(document, dict):
        raise bad_request("The request body must be a JSON object.", code="invalid_json")
    return document


def why_no_text(body: bytes) -> str | None:
    """The place and likely encoding of bytes that are not UTF-8; None where they are."""
    if body[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or b"\0" in body[:2]:
        return "it looks like UTF-16, and JSON is UTF-8"
    try:
        body.decode()
    except UnicodeDecodeError as error:  # the JSON decoder's own position counts from the start of a string
        return f"byte {error.start} (0x{body[error.start]:02x}) is no UTF-8"
    return None


def _half_a_pair(body: bytes) -> str | None:
    """The first escape of a high surrogate without its low one, which the JSON decoder takes for a body that was cut
    off; None where there is none."""
    found = _LONE_SURROGATE.search(body)
    return None if found is None else f"{found[1].decode()} at byte {found.start(1)} is half of a surrogate pair"


_LONE_SURROGATE = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})")


def parse_fields(document: dict[str, Any], fields: type[Fields], warnings: FieldWarnings) -> Fields:
    """The typed body. Raises ApiError 400 that names the refused field, or the one of another type."""
    table: Table = fields.table  # type: ignore[attr-defined]
    _check_known(document, document, table, warnings, "")
    for name, inner in ("stream_options", StreamOptions.table), ("structured_outputs", StructuredFields.table):
        options = document.get(name)
        if isinstance(options, dict) and name in table:
            _check_known(options, options, inner, warnings, name + ".")
    try:
        return msgspec.convert(loosened(document, fields), fields)
    except msgspec.ValidationError as error:
        raise _named(error) from None


def _check_known(
    values: Mapping[str, Any], document: Mapping[str, Any], table: Table, warnings: FieldWarnings, prefix: str
) -> None:
    """Raise ApiError 400 for a refused field with an effect; log ignored fields."""
    for name, value in values.items():
        rule = table.get(name)
        if isinstance(rule, Refused):
            if not asks_for_nothing(rule, value, document):
                raise refusal(table, name, prefix)
        elif isinstance(rule, Ignored):
            if not asks_for_nothing(rule, value, document):
                warnings.note_ignored(prefix + name, rule.reason)
        elif rule is None and value is not None:
            warnings.note(prefix + name)


def refusal(table: Table, name: str, prefix: str = "") -> ApiError:
    """400 for a field that the table refuses."""
    rule = table[name]
    assert isinstance(rule, Refused)
    message = f"{prefix + name!r} is not supported by this server: {rule.reason}."
    return bad_request(message, prefix + name, "unsupported_parameter")


def _named(error: msgspec.ValidationError) -> ApiError:
    """``Expected `int`, got `str` - at `$.n``` -> a message and the name of the field."""
    text = str(error)
    found = _PATH.search(text)
    param = found.group(1).removesuffix("[...]") if found else None
    message = _PATH.sub("", text).replace("`", "")
    return bad_request(f"{param}: {message}." if param else f"{message}.", param, "invalid_type")
