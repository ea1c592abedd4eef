"""The times of one streamed answer: bytes and their arrival times in, token times out.

Sans-I/O, so it is tested byte by byte. The replay client shares two cores with the server it measures:
a chunk in the middle of an answer is recognised by four substring searches and is never parsed.

Two clocks start. Many servers and gateways open a chat stream with a frame that has only the role, before the prompt is
read; so the first *token* is the first chunk that carries text (content, reasoning, a tool call, a refusal) or a token,
and the first *chunk* is the first one with choices, whatever it carries, as in vLLM's bench client.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

_TEXTS = (
    "content", "reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_blocks", "refusal",
    "tool_calls", "function_call", "audio",
)  # fmt: skip
"""Keys of a delta under which servers put generated text. They are listed one by one, because the opening frame of a
stream may carry notes of a gateway, too."""


class StreamMeter:
    """Reads one server-sent event stream of an OpenAI-compatible server.

    Feed it the bytes of each read of the socket, with the time in seconds. ``close`` it at the end.
    """

    __slots__ = (
        "_closing_s",
        "_empty_s",
        "_tail",
        "completion_tokens",
        "done",
        "error",
        "finish_reason",
        "first_chunk_s",
        "first_s",
        "gaps_s",
        "last_s",
        "num_chunks",
    )

    def __init__(self) -> None:
        self._tail = b""
        self._empty_s: list[float] = []
        """Times of chunks before the first text that have no role and no finish reason: each may be a token with text
        held back."""
        self._closing_s: float | None = None
        """Time of the chunk with the finish reason, where it carries no text."""
        self.first_chunk_s: float | None = None
        """Time of the first chunk with non-empty ``choices``, with or without text."""
        self.first_s: float | None = None
        """Time of the first chunk that carried text or a token."""
        self.last_s: float | None = None
        """Time of the last chunk that carried a token."""
        self.gaps_s: list[float] = []
        """Times between neighbouring chunks that carried tokens."""
        self.num_chunks = 0
        """Chunks that carried tokens."""
        self.completion_tokens: int | None = None
        """From the usage chunk; None when the server sent none."""
        self.finish_reason: str | None = None
        self.error: str | None = None
        """The server's error message in mid-stream, or the description of an invalid stream."""
        self.done = False
        """Whether ``[DONE]`` has come."""

    @property
    def num_seen(self) -> int:
        """Chunks of the answer so far, including the ones before its first text."""
        return self.num_chunks + len(self._empty_s)

    @property
    def output_tokens(self) -> int:
        """Tokens by the server's own count, else chunks."""
        return self.completion_tokens or self.num_chunks

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes, cut anywhere. Comments and other fields of the event stream are ignored."""
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_s)

    def close(self) -> None:
        """The answer is over: decide by the server's own count which chunks were tokens.

        A token with incomplete text (a part of a character) comes in a chunk without text, like a frame that only opens
        the stream. Where the server's count equals that of all chunks, such chunks count as tokens; else they do not,
        which makes a server look later, never sooner.
        """
        num_tokens = self.completion_tokens
        if num_tokens is None:
            return
        num_unseen = num_tokens - self.num_chunks - len(self._empty_s)
        # The closing chunk of an answer cut at its length may be its last token; a stop token always is one.
        likely = (0, 1) if self.finish_reason == "length" else (1,)
        if self._empty_s and num_unseen in (likely if self._closing_s is not None else (0,)):
            seen_s = self._empty_s if self.first_s is None else [*self._empty_s, self.first_s]
            self.gaps_s[:0] = [later - sooner for sooner, later in pairwise(seen_s)]
            self.num_chunks += len(self._empty_s)
            self.first_s = seen_s[0]
            self.last_s = seen_s[-1] if self.last_s is None else self.last_s
        elif self.first_s is None and self._closing_s is not None and num_tokens > 0:
            self._token(self._closing_s)
        self._empty_s = []

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self.done = True
        elif self.first_s is not None and self.finish_reason is None and _is_middle(payload):
            self._token(now_s)
        else:
            self._parse(payload, now_s)

    def _parse(self, payload: bytes, now_s: float) -> None:
        try:
            chunk = json.loads(payload)
        except ValueError:
            self.error = self.error or "a chunk is not JSON"
            return
        if not isinstance(chunk, dict):
            self.error = self.error or "a chunk is not a JSON object"
            return
        if chunk.get("error") is not None:
            error = chunk["error"]
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        usage = chunk.get("usage")
        num_tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(num_tokens, int):
            self.completion_tokens = num_tokens
        choices = chunk.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._choice(choices[0], bool(num_tokens), now_s)

    def _choice(self, choice: dict[str, Any], counts_tokens: bool, now_s: float) -> None:
        """``counts_tokens``: the chunk itself states a number of tokens so far."""
        if self.first_chunk_s is None:
            self.first_chunk_s = now_s
        reason = choice.get("finish_reason")
        if reason is not None:
            self.finish_reason = str(reason)
        if _carries(choice):
            self._token(now_s)
        elif reason is not None:
            self._closing_s = now_s  # not a token without text: counting it would add a gap of nearly zero
        elif self.finish_reason is not None:
            pass  # a chunk after the end (usage, in some gateways with a choice) is no token either
        elif self.first_s is not None or counts_tokens:
            self._token(now_s)
        elif not _delta(choice).get("role"):
            self._empty_s.append(now_s)

    def _token(self, now_s: float) -> None:
        if self.last_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s
        self.num_chunks += 1


def _is_middle(payload: bytes) -> bool:
    """Whether this is a plain token chunk. Quotes inside generated text are escaped, so no text can imitate one."""
    return (
        (b'"finish_reason":null' in payload or b'"finish_reason": null' in payload)
        and b'"error"' not in payload
        and b'"choices":[]' not in payload
        and b'"choices": []' not in payload
    )


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    delta = choice.get("delta")
    return delta if isinstance(delta, dict) else {}


def _carries(choice: dict[str, Any]) -> bool:
    """Whether a choice carries text under any key, or names a token."""
    delta, logprobs = _delta(choice), choice.get("logprobs")
    if choice.get("text") or choice.get("token_ids") or any(delta.get(key) for key in _TEXTS):
        return True
    return isinstance(logprobs, dict) and any(logprobs.values())
