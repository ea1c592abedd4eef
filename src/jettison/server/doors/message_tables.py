"""The fields of Anthropic's ``/v1/messages`` and its ``count_tokens``, each with its treatment here and the reason (as
``field_table`` has those of OpenAI's)."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from jettison.server.field_table import Done, Ignored, Refused, Table

_LABEL = "a label for the provider's own books"
_CACHING = "prefixes are found by their content"

MESSAGES: Table = {
    "model": Done("checked against the served names"),
    "messages": Done("through the model's chat template"),
    "system": Done("the first message"),
    "max_tokens": Done("most tokens of the answer; cut to the room that the prompt leaves"),
    "stop_sequences": Done("strings that end the answer; as many as --max-stop-strings"),
    "temperature": Done("of the draw; 0 is greedy"),
    "top_p": Done("of the draw"),
    "top_k": Done("of the draw"),
    "stream": Done("Anthropic's events"),
    "tools": Done("functions that the model may call"),
    "tool_choice": Done("whether it may, has to, or has to call one by name; disable_parallel_tool_use"),
    "thinking": Done("given to the template as enable_thinking; without it thoughts are asked for and told by none"),
    "output_config": Done("effort, given to the template; format, as structured output"),
    "output_format": Done("structured output, as Anthropic's beta says it"),
    "service_tier": Done("flex is offline; every other is the default"),
    "metadata": Ignored(_LABEL, ({},)),
    "cache_control": Ignored(_CACHING),
    "context_management": Ignored("the history is read as it is sent"),
    "diagnostics": Ignored("no cache misses are told"),
    "betas": Ignored("what a beta adds is a field of its own", ([],)),
    "anthropic_beta": Ignored("what a beta adds is a field of its own", ([],)),
    "anthropic_version": Ignored("there is one version"),
    "inference_geo": Ignored("there is one place"),
    "speed": Ignored("there is one speed", ("standard",)),
    "user_profile_id": Ignored(_LABEL),
    "workspace_id": Ignored(_LABEL),
    "container": Refused("no code is run"),
    "mcp_servers": Refused("no servers are called", ([],)),
    "fallbacks": Refused("one model is served", ([],)),
    **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), Refused("use max_tokens")),
    "stop": Refused("use stop_sequences", ([], "")),
    "prompt": Refused("use messages"),
    "n": Refused("an answer is one message", (1,)),
}


class MessageFields(msgspec.Struct, kw_only=True):
    """``POST /v1/messages`` and ``/v1/messages/count_tokens``; ``message_input`` checks what is inside."""

    table: ClassVar[Table] = MESSAGES

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    system: Any = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    service_tier: str | None = None
