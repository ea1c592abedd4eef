"""``bad_words``: from words to the token sequences that an answer must not contain.

As in vLLM: a word is forbidden both as it begins a text and as it follows a space, where the latter is another single
token. Only the last token of a sequence is ever banned, after the others.
"""

from __future__ import annotations

from collections.abc import Callable

from jettison.server.errors import ApiError, bad_request

MAX_WORDS = 128
MAX_WORD_CHARS = 512
MAX_SEQUENCES = 128
MAX_TOKENS = 1024
"""Most tokens of all sequences together: every step checks them."""

Encode = Callable[[str], list[int]]
"""Text -> token ids, without special tokens."""


def checked_words(words: list[str] | None) -> tuple[str, ...]:
    """The words, each once. Raises ApiError 400 before any of them is tokenized."""
    distinct = tuple(dict.fromkeys(words or ()))
    if len(distinct) > MAX_WORDS:
        raise _refusal(f"bad_words may have at most {MAX_WORDS} words, got {len(distinct)}.")
    if not all(distinct):
        raise _refusal("bad_words must not be empty strings.")
    if any(len(word) > MAX_WORD_CHARS for word in distinct):
        raise _refusal(f"a bad word may have at most {MAX_WORD_CHARS} characters.")
    return distinct


def word_tokens(words: tuple[str, ...], encode: Encode, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The sequences of all words. Raises ApiError 400."""
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare = word.lstrip()
        plain, spaced = tuple(encode(bare)), tuple(encode(" " + bare))
        if not plain:
            raise _refusal("bad_words: a word has no tokens.")
        sequences.append(plain)
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
    if len(sequences) > MAX_SEQUENCES or sum(map(len, sequences)) > MAX_TOKENS:
        raise _refusal(
            f"bad_words may become at most {MAX_SEQUENCES} token sequences of {MAX_TOKENS} tokens in all.")
    if any(token >= vocab_size for sequence in sequences for token in sequence):
        raise _refusal(f"bad_words: a word has tokens beyond the model's {vocab_size}.")
    return tuple(sequences)


def _refusal(message: str) -> ApiError:
    return bad_request(message, "bad_words")
