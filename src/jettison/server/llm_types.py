"""What goes into ``LLM.generate`` and ``LLM.chat``, and what comes out, with vLLM's names. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jettison.errors import RequestError

Conversation = Sequence[dict[str, Any]]
"""Messages of one chat."""


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How answers are sampled, and when they end. The defaults are neutral: the model's maker's are used only where no
    parameters are given at all. ``max_tokens`` None: as many as the context has room for."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None

    def fields(self, *, is_chat: bool) -> dict[str, Any]:
        """As fields of a request."""
        told: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        told["logit_bias"] = None if self.logit_bias is None else {str(key): v for key, v in self.logit_bias.items()}
        if is_chat and self.logprobs is not None:
            told |= {"logprobs": True, "top_logprobs": self.logprobs}
        return {name: value for name, value in told.items() if value is not None}


class Logprob(NamedTuple):
    """Natural logarithm of a token's probability, before temperature."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """With the token that stopped it."""
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token its own and the likeliest, where they were asked for."""
    finish_reason: str | None = None
    """``stop``, ``length`` or ``repetition``."""
    stop_reason: int | str | None = None
    """The stop string, or the stop token that was asked for; None for the model's own end."""


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    """Its text; of a chat what the template made. None for token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""


def listed_prompts(prompts: Any) -> list[str | list[int]]:
    """One prompt or several: texts, token ids, or mappings with ``prompt`` or ``prompt_token_ids``. Raises
    RequestError."""
    is_one = isinstance(prompts, (str, dict)) or (
        isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int))
    if not is_one and not isinstance(prompts, Sequence):
        told = type(prompts).__name__
        raise RequestError(f"prompts need a text, token ids, or a list of them, not {told}", "prompts")
    return [_prompt(each, at) for at, each in enumerate([prompts] if is_one else prompts)]


def _prompt(prompt: Any, at: int) -> str | list[int]:
    if isinstance(prompt, dict):
        if extra := [name for name in ("multi_modal_data", "prompt_embeds") if prompt.get(name) is not None]:
            raise RequestError(f"prompt {at}: {extra[0]} is not served: prompts are texts or token ids", extra[0])
        found = prompt.get("prompt_token_ids")
        prompt = found if found is not None else prompt.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    raise RequestError(f"prompt {at}: needs a text or token ids, not {type(prompt).__name__}", "prompts")


def listed_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation or several. Raises RequestError."""
    if isinstance(messages, Sequence) and messages and not isinstance(messages, str):
        if all(isinstance(each, dict) for each in messages):
            return [list(messages)]
        if all(isinstance(each, Sequence) and not isinstance(each, str) for each in messages):
            return [list(each) for each in messages]
    raise RequestError("messages need a list of messages, or a list of such lists", "messages")


def listed_params(params: Any, num_prompts: int) -> list[SamplingParams | None]:
    """Parameters for each prompt. Raises RequestError."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or any(not isinstance(each, SamplingParams) for each in params):
        raise RequestError("sampling_params need jettison.SamplingParams, or a list of them", "sampling_params")
    if len(params) != num_prompts:
        raise RequestError(f"{len(params)} sampling_params for {num_prompts} prompts", "sampling_params")
    return list(params)
