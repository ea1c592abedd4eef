"""What one streamed answer says about time: bytes and their arrival times in, token times out.

Sans-I/O, so it is tested byte by byte. The replay client shares two cores with the server it measures:
a chunk in the middle of an answer is recognised by four substring searches and is never parsed.
"""

from __future__ import annotations

import json
from typing import Any


class StreamMeter:
    """Reads one server-sent event stream of an OpenAI-compatible server.

    Feed it what the socket gives, with the time in seconds; all bytes of one read share that time.
    """

    __slots__ = (
        "_tail",
        "completion_tokens",
        "done",
        "error",
        "finish_reason",
        "first_s",
        "gaps_s",
        "last_s",
        "num_chunks",
    )

    def __init__(self) -> None:
        self._tail = b""
        self.first_s: float | None = None
        """First chunk with non-empty ``choices``, text or not."""
        self.last_s: float | None = None
        """Last chunk that carried a token."""
        self.gaps_s: list[float] = []
        """Times between neighbouring chunks that carried tokens."""
        self.num_chunks = 0
        self.completion_tokens: int | None = None
        """From the usage chunk; None when the server sent none."""
        self.finish_reason: str | None = None
        self.error: str | None = None
        """The server's message, when it failed in mid-stream or spoke something else."""
        self.done = False
        """``[DONE]`` was seen."""

    @property
    def output_tokens(self) -> int:
        """Tokens by the server's own count, else chunks."""
        return self.num_chunks if self.completion_tokens is None else self.completion_tokens

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes in any cut. Comments and other fields of the event stream are passed over."""
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_s)

    def _take(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self.done = True
        elif self.first_s is not None and _is_middle(payload):
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
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self.completion_tokens = usage["completion_tokens"]
        choices = chunk.get("choices")
        if not choices:
            return
        reason = choices[0].get("finish_reason")
        if reason is not None:
            self.finish_reason = str(reason)
        # A closing chunk without text is no token: counting it would add a gap of nearly zero.
        if self.first_s is None or reason is None or _has_text(choices[0]):
            self._token(now_s)

    def _token(self, now_s: float) -> None:
        if self.last_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s
        self.num_chunks += 1


def _is_middle(payload: bytes) -> bool:
    """Whether this is a plain token chunk. Quotes inside generated text are escaped, so text cannot fool it."""
    return (
        (b'"finish_reason":null' in payload or b'"finish_reason": null' in payload)
        and b'"error"' not in payload
        and b'"choices":[]' not in payload
        and b'"choices": []' not in payload
    )


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or choice.get("token_ids") or choice.get("logprobs"))
