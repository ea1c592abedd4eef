"""Tokens to text as they come, in constant amortized time a token.

Incomplete UTF-8 is held back, so that the pieces put together are exactly the text of all tokens decoded at once.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

MAX_HELD_TOKENS = 8
"""Most tokens held back: a character has at most four bytes, so more tokens without a complete one will not make
one."""

MAX_CONTEXT_TOKENS = 8
"""Most tokens of the prompt used as the beginning of the window."""

MAX_LOOKED_AT = 256
"""Tokens at the end of the prompt that are searched for the context: special tokens that are not shown have no text."""

MAX_BROKEN_TOKENS = 3
"""Bytes that a prompt may end with before its last character is complete."""

_REPLACEMENT = "�"


class Detokenizer(Protocol):
    """One text that grows."""

    def push(self, token_id: int) -> str:
        """The text that became complete with this token; often empty, never retracted."""
        ...

    def flush(self) -> str:
        """The held-back rest at the end: broken characters become U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: the text is the concatenation of the tokens' bytes."""

    __slots__ = ("_bytes_of", "_decoder", "_skipped")

    def __init__(self, bytes_of: Mapping[int, bytes], skipped: Set[int]) -> None:
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._bytes_of[token_id])

    def flush(self) -> str:
        """See ``Detokenizer``."""
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For any other vocabulary: decode a short window twice, with and without the new token.

    ``_window[:_num_done]`` has been output already and is kept as context, because a decoder may treat the first token
    of a text specially (a leading space, for one). For the same reason the end of the prompt is the first context: the
    pieces are what the output adds to the text of prompt and output.
    """

    __slots__ = ("_decode", "_num_done", "_skipped", "_window")

    def __init__(
        self, decode: Callable[[list[int]], str], skipped: Set[int], prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window = self._end_of(prompt_token_ids)
        self._num_done = len(self._window)

    def _end_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The fewest last tokens of the prompt that decode to a text by themselves, without a character that the prompt
        breaks off."""
        num_wanted = MAX_CONTEXT_TOKENS + MAX_BROKEN_TOKENS
        last = prompt_token_ids[-MAX_LOOKED_AT:]
        shown = (token_id for token_id in reversed(last) if token_id not in self._skipped)
        ids = list(itertools.islice(shown, num_wanted))[::-1]
        is_whole = len(ids) < num_wanted and len(last) == len(prompt_token_ids)
        for end in range(len(ids), max(0, len(ids) - MAX_BROKEN_TOKENS - 1), -1):
            for start in range(end - 1, max(0, end - MAX_CONTEXT_TOKENS) - 1, -1):
                text = self._decode(ids[start:end])
                # A lone space may decode to nothing because it is the first token, which is right only at the prompt's
                # start.
                if _REPLACEMENT not in text and (text or (is_whole and start == 0)):
                    return ids[start:end]
        return []

    def push(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        before, after = self._decode(self._window[: self._num_done]), self._decode(self._window)
        num_held = len(self._window) - self._num_done
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and num_held < MAX_HELD_TOKENS):
            if num_held < MAX_HELD_TOKENS:
                return ""
        return self._advance(before, after)

    def flush(self) -> str:
        """See ``Detokenizer``."""
        if len(self._window) == self._num_done:
            return ""
        return self._advance(self._decode(self._window[: self._num_done]), self._decode(self._window))

    def _advance(self, before: str, after: str) -> str:
        # The next window starts with the tokens just output: enough context, and bounded.
        self._window = self._window[self._num_done :]
        self._num_done = len(self._window)
        return after[len(before) :]


class JoinedSpecials:
    """A detokenizer without spaces between added tokens: one that follows another is output as its bare content."""

    __slots__ = ("_added", "_follows_added", "_inner")

    def __init__(self, inner: Detokenizer, added: Mapping[int, str]) -> None:
        """``added``: contents of the added tokens."""
        self._inner = inner
        self._added = added
        self._follows_added = False

    def push(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        piece = self._inner.push(token_id)
        content = self._added.get(token_id)
        if content is not None and self._follows_added and piece:
            piece = content
        self._follows_added = content is not None
        return piece

    def flush(self) -> str:
        """See ``Detokenizer``."""
        return self._inner.flush()
