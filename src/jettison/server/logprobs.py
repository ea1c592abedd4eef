"""Log-probabilities in the two shapes that clients know: lists side by side (completions), objects (chat)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jettison.server.tokenizer import Tokenizer
from jettison.types import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


def finite(logprob: float) -> float:
    """As close as JSON gets."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # also for not-a-number


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    text_offsets: Sequence[int],
) -> dict[str, Any]:
    """``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}``; None where a position has no probability.

    A position's ``top_logprobs`` holds the likeliest tokens and the token itself.
    """
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            top.setdefault(tokenizer.token_text(token_id), finite(logprob))  # best first: a second spelling loses
        top.setdefault(tokenizer.token_text(entry.token_id), finite(entry.logprob))
        tops.append(top)
    return {
        "text_offset": list(text_offsets),
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
        "tokens": [tokenizer.token_text(token_id) for token_id in token_ids],
        "top_logprobs": tops,
    }


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], num_top: int) -> dict[str, Any]:
    """``{"content": [{"token", "bytes", "logprob", "top_logprobs"}], "refusal": null}``."""
    content = []
    for entry in entries:
        if entry is not None:
            top = [_token_object(tokenizer, token_id, logprob) for token_id, logprob in entry.top[:num_top]]
            content.append(_token_object(tokenizer, entry.token_id, entry.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _token_object(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
