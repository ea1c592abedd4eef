"""From a client's prompt or messages to token ids. Large requests are tokenized outside the event loop.

The size of the whole request counts: a thousand short prompts would stall every stream as one long prompt would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jettison.server.chat_renderer import ChatRequest
from jettison.server.coercion import whole_numbers
from jettison.server.conversation import checked_messages
from jettison.server.errors import bad_request
from jettison.server.template_limits import TemplateError
from jettison.server.tokenizer import Tokenizer

ITEM_CHARS = 16
"""Cost of a prompt or message besides its text, in characters."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, and its text where the client sent one."""

    token_ids: tuple[int, ...]
    text: str | None
    """None for token ids, unless ``with_texts`` has decoded them."""
    first_sample: int = 0
    """The number of its first sample."""


async def completion_prompts(
    raw: Any, tokenizer: Tokenizer, *, add_special_tokens: bool, vocab_size: int, max_prompts: int, thread_chars: int
) -> list[Prompt]:
    """A string, a list of strings, token ids, or a list of token-id lists. Raises ApiError 400 on ``prompt``."""
    items = split_prompts(whole_items(raw), max_prompts)
    texts = [item for item in items if isinstance(item, str)]
    num_chars = sum(len(text) + ITEM_CHARS for text in texts)
    encoded = iter(
        await off_loop(lambda: [tokenizer.encode(text, add_special_tokens) for text in texts], num_chars, thread_chars))
    prompts = []
    for item in items:
        if isinstance(item, str):
            prompts.append(Prompt(tuple(next(encoded)), item))
        else:
            if not all(type(token_id) is int for token_id in item):
                raise bad_request("prompt: token ids must be whole numbers.", "prompt", "invalid_type")
            if item and not (min(item) >= 0 and max(item) < vocab_size):
                raise bad_request(f"prompt: token ids must lie in [0, {vocab_size}).", "prompt")
            prompts.append(Prompt(tuple(item), None))
    if not all(prompt.token_ids for prompt in prompts):
        raise bad_request("prompt must not be empty.", "prompt")
    return prompts


async def with_texts(
    prompts: list[Prompt], tokenizer: Tokenizer, *, skip_special_tokens: bool, thread_chars: int
) -> list[Prompt]:
    """The same prompts with their token ids decoded, for an echo."""
    num_ids = sum(len(prompt.token_ids) for prompt in prompts if prompt.text is None)

    def decode() -> list[Prompt]:
        return [
            Prompt(prompt.token_ids, tokenizer.decode(prompt.token_ids, skip_special_tokens))
            if prompt.text is None else prompt
            for prompt in prompts
        ]

    return await off_loop(decode, num_ids, thread_chars)


def whole_items(raw: Any) -> Any:
    """Token ids as clients in languages with one kind of number write them: 5.0 for 5."""
    if isinstance(raw, list) and raw and isinstance(raw[0], list):
        return [whole_numbers(item) for item in raw]
    return whole_numbers(raw)


def split_prompts(raw: Any, max_prompts: int) -> list[str | list[int]]:
    """The single prompts, unchecked inside. Raises ApiError 400."""
    if raw is None:
        raise bad_request("prompt is missing.", "prompt", "missing_required_parameter")
    if isinstance(raw, str):
        return [raw]
    if not isinstance(raw, list):
        raise bad_request("prompt must be a string or a list.", "prompt", "invalid_type")
    if not raw:
        raise bad_request("prompt must not be empty.", "prompt")
    if type(raw[0]) is int:
        return [raw]
    if len(raw) > max_prompts:
        raise bad_request(f"prompt may have at most {max_prompts} prompts, got {len(raw)}.", "prompt")
    if all(isinstance(item, str) for item in raw) or all(isinstance(item, list) for item in raw):
        return raw
    raise bad_request(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists, not a mixture.",
        "prompt", "invalid_type")  # fmt: skip


async def chat_prompt(
    messages: list[dict[str, Any]] | None, tokenizer: Tokenizer, options: ChatRequest, *, thread_chars: int,
    add_special_tokens: bool = False,
) -> Prompt:
    """The prompt of messages, by the model's chat template with ``options`` (whose own messages are ignored).

    The template writes the special tokens itself; ``add_special_tokens``: the tokenizer adds its own to them.

    Raises ApiError 400 with the path of the bad value in ``messages``, or the field that does not suit the template.
    """
    request = replace(options, messages=checked_messages(messages, tokenizer.chat.knows))
    num_chars = ITEM_CHARS * len(request.messages) + _num_chars([request.messages, request.tools, request.documents])
    if request.chat_template is not None:
        num_chars = max(num_chars, thread_chars + 1)  # compiling a template takes long

    def render() -> tuple[str, list[int]]:
        text = tokenizer.render_chat(request)
        return text, tokenizer.encode(text, add_special_tokens)

    try:
        text, ids = await off_loop(render, num_chars, thread_chars)
    except TemplateError as error:
        raise bad_request(f"{error.param}: {error}", error.param) from None
    if not ids:
        raise bad_request("messages make an empty prompt.", "messages")
    return Prompt(tuple(ids), text)


def _num_chars(value: object) -> int:
    """Characters of all texts in a value, without names of fields."""
    num_chars, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            num_chars += len(item)
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item
    return num_chars


async def off_loop(work: Callable[[], T], num_chars: int, thread_chars: int) -> T:
    """Do short work here and long work in a thread (the tokenizer releases the interpreter lock)."""
    if num_chars <= thread_chars:
        return work()
    return await asyncio.to_thread(work)
