"""The texts of requests: random prompts of a given length, from a seed.

Prompts of different requests share no full block except where a shared prefix is asked for, so that a
prefix cache cannot help by accident: two blocks of 16 tokens drawn from 96 ids or more agree with a
probability below 1e-31.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jettison.errors import ConfigError

_TEXT_ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789    ", dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Prompt ``index`` of length n is a function of (``seed``, ``index``, n) alone.

    ``token_ids`` draws ids from [``low_token_id``, ``high_token_id``): the default suits any vocabulary of at
    least 256 and leaves the first ids, where special tokens often stand, alone. ``shared_prefix_tokens`` (or
    characters, for text) are the same in all requests of one of ``num_shared_prefixes`` families, dealt in
    turn; a prompt keeps at least one token of its own.
    """

    seed: int = 0
    low_token_id: int = 8
    high_token_id: int = 256
    shared_prefix_tokens: int = 0
    num_shared_prefixes: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.low_token_id < self.high_token_id:
            raise ConfigError(f"token ids need 0 <= low < high, got {self.low_token_id} and {self.high_token_id}")
        if self.shared_prefix_tokens < 0 or self.num_shared_prefixes < 1:
            raise ConfigError("shared prefixes need a length of at least 0 and a number of at least 1")

    def token_ids(self, index: int, num_tokens: int) -> list[int]:
        """Prompt ``index`` as ``num_tokens`` token ids."""
        shared, own = self._parts(num_tokens)
        prefix = self._ids(self._prefix_rng(index), shared)
        return prefix + self._ids(np.random.default_rng((self.seed, 0, index)), own)

    def text(self, index: int, num_chars: int) -> str:
        """Prompt ``index`` as ``num_chars`` characters: one token each for a byte-level tokenizer, else fewer."""
        shared, own = self._parts(num_chars)
        prefix = self._letters(self._prefix_rng(index), shared)
        return prefix + self._letters(np.random.default_rng((self.seed, 0, index)), own)

    def _parts(self, length: int) -> tuple[int, int]:
        shared = min(self.shared_prefix_tokens, max(length - 1, 0))
        return shared, length - shared

    def _prefix_rng(self, index: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, 1, index % self.num_shared_prefixes))

    def _ids(self, rng: np.random.Generator, count: int) -> list[int]:
        drawn: list[int] = rng.integers(self.low_token_id, self.high_token_id, size=count).tolist()
        return drawn

    @staticmethod
    def _letters(rng: np.random.Generator, count: int) -> str:
        return _TEXT_ALPHABET[rng.integers(0, len(_TEXT_ALPHABET), size=count)].tobytes().decode("ascii")
