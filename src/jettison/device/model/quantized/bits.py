"""Unsigned integers of one to eight bits that lie densely in 32-bit words, the lowest bits first."""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def num_words(num_values: int, bits: int) -> int:
    """Words that ``num_values`` integers take."""
    return -(-num_values * bits // WORD_BITS)


def words_of(bits: int, start: int, end: int) -> tuple[int, int, int]:
    """The words [first, last) in which integers [start, end) of a row lie, and the number of the first integer that
    begins them: what is read has to be no more."""
    first = start // WORD_BITS * WORD_BITS
    return first // WORD_BITS * bits, num_words(end, bits), first


def unpack(words: Tensor, bits: int, start: int, end: int) -> Tensor:
    """Integers [start, end) of each row of ``words`` (int32 [n, words]), as int32 [n, end - start]."""
    mask = (1 << bits) - 1
    if WORD_BITS % bits == 0:  # no integer lies in two words
        per_word = WORD_BITS // bits
        first = start // per_word
        shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
        values = (words[:, first : num_words(end, bits), None] >> shifts) & mask
        return values.flatten(1)[:, start - first * per_word : end - first * per_word]
    at = torch.arange(start, end) * bits
    word, shift = at // WORD_BITS, at % WORD_BITS
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    following = unsigned[:, (word + 1).clamp(max=words.shape[1] - 1)]
    return ((unsigned[:, word] >> shift | following << (WORD_BITS - shift)) & mask).to(torch.int32)
