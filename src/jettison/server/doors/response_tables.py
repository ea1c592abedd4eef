"""The fields of OpenAI's ``/v1/responses``, each with its treatment here and the reason."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from jettison.server import field_table
from jettison.server.field_table import Done, Ignored, Refused, Table
from jettison.server.fields import Effort

SAMPLED = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "service_tier", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens",
    "ignore_eos", "bad_words", "allowed_token_ids", "skip_special_tokens", "include_stop_str_in_output", "priority",
    "cache_salt", "chat_template_kwargs", "structured_outputs", "truncate_prompt_tokens", "repetition_detection",
)  # fmt: skip
"""Fields that are a chat's own: OpenAI's, and those that vLLM takes here, too."""

_LABEL = "a label for the provider's own books"
_CACHING = "prefixes are found by their content"
_IN_ITEMS = "say it in the input"

RESPONSES: Table = {
    **{name: field_table.CHAT[name] for name in SAMPLED},
    "input": Done("a text, or messages, calls, their results and thoughts"),
    "instructions": Done("the first message, of this request alone"),
    "max_output_tokens": Done("most tokens of the answer"),
    "tools": Done("functions that the model may call"),
    "tool_choice": Done("whether it may, has to, or has to call one by name"),
    "text": Done("format, as structured output; verbosity is ignored"),
    "reasoning": Done("effort, given to the template; thoughts are told as they are, never as a summary"),
    "previous_response_id": Done("its input and output come before the input"),
    "store": Done("false: the answer is not kept"),
    "metadata": Done("kept with the answer"),
    "include": Done("nothing more is told: thoughts are never encrypted, and there are no tools of the server's own"),
    "truncation": Ignored("a prompt that is too long is refused", ("disabled",)),
    "stream_options": Ignored("chunks are padded with nothing", ({},)),
    "max_tool_calls": Ignored("it counts calls of the server's own tools, and there are none"),
    "user": Ignored(_LABEL),
    "safety_identifier": Ignored(_LABEL),
    "client_metadata": Ignored(_LABEL, ({},)),
    "prompt_cache_key": Ignored(_CACHING),
    "prompt_cache_options": Ignored(_CACHING, ({},)),
    "prompt_cache_retention": Ignored(_CACHING),
    "background": Refused("an answer is made while its client waits; /v1/batches works in the background", (False,)),
    "background_options": Refused("an answer is made while its client waits", ({},)),
    "conversation": Refused("use previous_response_id"),
    "prompt": Refused("no templates of prompts are kept"),
    "context_management": Refused("the input is read as it is sent", ([],)),
    "moderation": Refused("nothing is moderated"),
    "access_programs": Refused("there are none", ({},)),
    "image": Refused("there are no images, sound or video", ({},)),
    "modalities": Refused("there are no images, sound or video", (["text"], [])),
    "top_logprobs": Refused("logprobs are told by /v1/chat/completions", (0,)),
    "logprobs": Refused("logprobs are told by /v1/chat/completions", (False,)),
    "n": Refused("an answer is one response", (1,)),
    "messages": Refused("they belong to /v1/chat/completions; here the field is input"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), Refused("use max_output_tokens")),
    "response_format": Refused("use text.format", ({"type": "text"},)),
    "reasoning_effort": Refused("use reasoning.effort"),
    **dict.fromkeys(("functions", "function_call"), Refused("use tools")),
    **dict.fromkeys(("echo", "continue_final_message"), Refused(_IN_ITEMS, (False,))),
    "previous_input_messages": Refused("use previous_response_id", ([],)),
    "enable_response_messages": Refused("items are told, and no tokens of messages", (False,)),
}


class ReasoningFields(msgspec.Struct, kw_only=True):
    """``reasoning``; a summary is not made, whichever is asked for."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFields(msgspec.Struct, kw_only=True):
    """``text``."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseFields(msgspec.Struct, kw_only=True):
    """``POST /v1/responses``; ``response_input`` checks what is inside, and the chat its own fields (``SAMPLED``)."""

    table: ClassVar[Table] = RESPONSES

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
