"""The marker behind which a grammar begins: where an output has it, and which tokens would end it with more behind it.

A marker is text, and tokens may spell it in several ways (``types.Grammar.begins_after``). Its last token may have text
behind it, which is the grammar's already: a token whose text the grammar does not take must not be drawn there, as
nothing takes a token back.

Not here: what the grammar takes (``grammars``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from jettison.device.model.vocabulary import gently

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Endings = Mapping[bytes, tuple[int, ...]]
"""Text behind the marker -> the tokens that complete the marker and have this text behind it."""
_KEPT_VOCABULARIES = 4


class Marker:
    """One output's, and how much of it the output's end has."""

    def __init__(self, tokenizer: LLTokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self._text = text.encode()
        self._before = b""
        """The output's last bytes, which may be a beginning of the marker."""

    def behind(self, token: int) -> bytes | None:
        """The output has got this token: the text behind the marker where it completes it, else None."""
        spelled = self._before + self._tokenizer.decode_bytes([token])
        at = spelled.find(self._text)
        if at >= 0:
            return spelled[at + len(self._text) :]
        self._before = spelled[max(0, len(spelled) - len(self._text) + 1) :]
        return None

    def endings(self) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """What the next token may put behind the marker, and the tokens that would. A text may come twice."""
        by_length = _endings(self._tokenizer, self._text)
        for length, endings in enumerate(by_length):
            if endings and self._before.endswith(self._text[:length]):
                yield from endings.items()


@lru_cache(_KEPT_VOCABULARIES)
def _endings(tokenizer: LLTokenizer, text: bytes) -> tuple[Endings, ...]:
    """By how many of the marker's bytes stand before the token; 0: the token has the whole marker. A token that
    completes it with nothing behind is in none of them."""
    found: list[dict[bytes, list[int]]] = [{} for _ in text]
    for token in gently(range(tokenizer.vocab_size)):
        word = tokenizer.decode_bytes([token])
        if text[-1:] not in word:
            continue
        for length, endings in enumerate(found):
            rest = text[length:]
            at = word.find(rest) if length == 0 else 0 if word.startswith(rest) else -1
            if at >= 0 and (behind := word[at + len(rest) :]):
                endings.setdefault(behind, []).append(token)
    return tuple({behind: tuple(tokens) for behind, tokens in endings.items()} for endings in found)
