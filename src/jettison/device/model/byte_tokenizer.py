"""A tokenizer that needs no training: one token for each byte, so that any text can be encoded and decoded exactly.

Ids 0 to 255 are the bytes, then the special tokens; a larger vocabulary is filled with merges of common letters, so
that every id decodes to something. Written in the format of the ``tokenizers`` library, with a chat template.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, PAD, TURN_START, TURN_END = SPECIAL_TOKENS = (
    "<|startoftext|>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>",
)  # fmt: skip
BOS_ID, EOS_ID, PAD_ID, TURN_START_ID, TURN_END_ID = range(256, 261)
MIN_VOCAB_SIZE = 261

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_MERGED_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
"""Letters by frequency in English. Only letters are merged: transformers 5 puts Qwen2's own word splitting before any
Qwen2 tokenizer, which does not change merges inside of words."""


def byte_level_tokenizer(vocab_size: int) -> Tokenizer:
    """The tokenizer with exactly ``vocab_size`` tokens. Raises ValueError below ``MIN_VOCAB_SIZE``."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"a byte-level vocabulary needs at least {MIN_VOCAB_SIZE} tokens, not {vocab_size}")
    vocab = {_byte_char(byte): byte for byte in range(256)}
    vocab |= {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
    merges = []
    for text in itertools.islice(_merged_texts(), vocab_size - MIN_VOCAB_SIZE):
        vocab[text] = len(vocab)
        merges.append((text[:-1], text[-1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(model_dir: Path, vocab_size: int, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    byte_level_tokenizer(vocab_size).save(str(model_dir / "tokenizer.json"))
    text = json.dumps(tokenizer_config(max_length), indent=2, ensure_ascii=False) + "\n"
    (model_dir / "tokenizer_config.json").write_text(text, encoding="utf-8")


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """The contents of ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [TURN_START, TURN_END],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }


def _merged_texts() -> Iterator[str]:
    """Strings of two letters, then three, ...: each is one letter longer than an earlier one or a letter."""
    for length in itertools.count(2):
        yield from map("".join, itertools.product(_MERGED_LETTERS, repeat=length))


def _byte_char(byte: int) -> str:
    """The printable character for a byte in byte-level BPE: the byte itself where printable, else a character from 256
    on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in printable].index(byte))
