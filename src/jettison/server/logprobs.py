"""Log-probabilities in the two shapes of the API: parallel lists (completions), objects (chat)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jettison.server.tokenizer import Tokenizer
from jettison.types import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""Least value shown, as JSON has no infinity."""


def finite(logprob: float) -> float:
    """The value, with minus infinity and not-a-number as ``LEAST_LOGPROB``."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # also for not-a-number


class TokenNames:
    """The names of tokens in an answer: their text or, where the client wants it, ``token_id:N``."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def of(self, token_id: int) -> str:
        """The name."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        """The bytes of the token, whatever its name."""
        return list(self._tokenizer.token_bytes(token_id))


def completion_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    text_offsets: Sequence[int],
) -> dict[str, Any]:
    """``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}``; None where a position has no probability.

    A position's ``top_logprobs`` holds the likeliest tokens (or the requested ones) and the token itself.
    """
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in entry.top:
            top.setdefault(names.of(token_id), finite(logprob))  # best first: a second of a name is dropped
        top.setdefault(names.of(entry.token_id), finite(entry.logprob))
        tops.append(top)
    return {
        "text_offset": list(text_offsets),
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
        "tokens": [names.of(token_id) for token_id in token_ids],
        "top_logprobs": tops,
    }


def chat_logprobs(
    names: TokenNames, entries: Sequence[TokenLogprobs | None], num_top: int | None
) -> dict[str, Any]:
    """``{"content": [{"token", "bytes", "logprob", "top_logprobs"}], "refusal": null}``.

    ``num_top`` None: the client named the tokens; the sampled one comes before them, as in vLLM.
    """
    content = []
    for entry in entries:
        if entry is not None:
            top = list(entry.top[:num_top])
            if num_top is None:
                top = [(entry.token_id, entry.logprob), *(pair for pair in top if pair[0] != entry.token_id)]
            own = _token_object(names, entry.token_id, entry.logprob)
            content.append(own | {"top_logprobs": [_token_object(names, *pair) for pair in top]})
    return {"content": content, "refusal": None}


def _token_object(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": names.of(token_id), "logprob": finite(logprob), "bytes": names.bytes_of(token_id)}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """As in vLLM: for each position ``{token id: {"logprob", "rank", "decoded_token"}}``, None for the first.

    A position holds its own token and the ``num_top`` likeliest ones.
    """
    return [None if entry is None else _position(tokenizer, entry, num_top) for entry in entries]


def _position(tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token_id, logprob, 1 + at) for at, (token_id, logprob) in enumerate(entry.top[:num_top])]
    position: dict[str, Any] = {}
    for token_id, logprob, rank in ranked:
        named = {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        position.setdefault(str(token_id), named)
    return position
