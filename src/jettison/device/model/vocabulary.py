"""The bytes of each token of a model folder, and which tokens are special: what grammars are made of.

Not here: how text becomes tokens (``tokenizer_files``), and what clients are shown of tokens (``server.tokenizer``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import tokenizers

from jettison.device.model.tokenizer_files import TokenizerFiles, byte_tokenizer_files, has_tokenizer, read_tokenizer


def _no_tokens(text: str) -> list[int]:
    """No tokenizer is known."""
    return []


Item = TypeVar("Item")
_ITEMS_AT_ONCE = 64
"""They take well under a millisecond."""


class Vocabulary(NamedTuple):
    """Tokens by id."""

    tokens: list[bytes]
    """What each adds to a text; a special token's own text; empty for an id that has no token."""
    special_ids: frozenset[int]
    """Tokens that are no text, whatever their own text is."""
    encode: Callable[[str], list[int]] = _no_tokens
    """Tokens of a text as the model knows it, where the tokenizer keeps its bytes; others do not count."""


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable characters for bytes: printable bytes are themselves, the rest are characters from U+0100
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def token_bytes(token: str, *, is_byte_level: bool) -> bytes:
    """The bytes of a token that is spelled so in the vocabulary: GPT-2's characters for bytes, or sentencepiece's
    spelling of spaces and single bytes."""
    if is_byte_level:
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token with other characters is its own text
            return token.encode()
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace("▁", " ").encode()


def read_vocabulary(model_dir: Path, byte_tokens: int | None = None) -> Vocabulary:
    """The folder's vocabulary; ``byte_tokens``: a folder without a tokenizer has so many tokens, which are bytes (None:
    it needs one). Raises ModelError."""
    if byte_tokens is None or has_tokenizer(model_dir):
        return vocabulary_of(read_tokenizer(model_dir))
    return vocabulary_of(byte_tokenizer_files(byte_tokens))


def vocabulary_of(files: TokenizerFiles) -> Vocabulary:
    """The same of files that have been read."""
    backend = files.backend
    added = backend.get_added_tokens_decoder()
    bytes_of = _reader(backend, is_byte_level=files.is_byte_level)
    size = backend.get_vocab_size(with_added_tokens=True)
    largest = max((*backend.get_vocab(with_added_tokens=True).values(), size - 1), default=-1)
    tokens: list[bytes] = []
    for token_id in gently(range(largest + 1)):
        spelled = backend.id_to_token(token_id)
        if spelled is None:
            tokens.append(b"")
        elif token_id in added and (files.is_byte_level or added[token_id].special):
            tokens.append(added[token_id].content.encode())  # its own text, whatever the others are spelled in
        else:
            tokens.append(bytes_of(token_id, spelled))
    special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    return Vocabulary(tokens, special_ids, encode)


def gently(items: Iterable[Item]) -> Iterator[Item]:
    """The items, with the interpreter's lock left to other threads now and then: a thread that computes a step takes it
    for an instant hundreds of times, and would wait for milliseconds each time."""
    for at, item in enumerate(items):
        if at % _ITEMS_AT_ONCE == 0:
            time.sleep(0)
        yield item


def _reader(backend: tokenizers.Tokenizer, *, is_byte_level: bool) -> Callable[[int, str], bytes]:
    """How a token's bytes are found out: by its spelling where that says all, else by what it adds behind another."""
    if is_byte_level or "▁" in "".join(token for token, _ in zip(backend.get_vocab(), range(4096))):
        return lambda _, spelled: token_bytes(spelled, is_byte_level=is_byte_level)
    anchor = next(iter(backend.get_vocab().values()), 0)
    before = backend.decode([anchor], skip_special_tokens=False)

    def added_text(token_id: int, spelled: str) -> bytes:
        text = backend.decode([anchor, token_id], skip_special_tokens=False)
        return text[len(before) :].encode() if text.startswith(before) else token_bytes(spelled, is_byte_level=False)

    return added_text
