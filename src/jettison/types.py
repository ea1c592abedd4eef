"""The words of the system as types: ids, requests' parameters, shapes of models.

Standard library only. No behaviour beyond arithmetic on the fields; nothing here
knows about time, memory ownership or torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

WorkerId = int
GroupId = int
RequestId = str
TransferId = int

ShardId = str
"""A shard, the unit of dropping and restoring parameters: ``"embed"``, ``"head"`` or ``"layer:<index>"``."""

EMBED_SHARD: ShardId = "embed"
HEAD_SHARD: ShardId = "head"

NANOSECONDS = 1_000_000_000


def layer_shard(layer: int) -> ShardId:
    """The shard that holds decoder layer ``layer``."""
    return f"layer:{layer}"


class LayerRange(NamedTuple):
    """Decoder layers ``lo <= layer < hi``."""

    lo: int
    hi: int

    def __len__(self) -> int:  # a NamedTuple's length would be 2
        return self.hi - self.lo

    def covers(self, other: LayerRange) -> bool:
        """Whether every layer of ``other`` lies in this range."""
        return self.lo <= other.lo and other.hi <= self.hi

    def layers(self) -> range:
        """The layer indices, ascending."""
        return range(self.lo, self.hi)


class FinishReason(StrEnum):
    """Why a request ended. Every accepted request ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output has to look like. Which of its tokens come next is worked out where tokens are sampled
    (``device.grammars``), from this and the output so far: nothing that a move of memory could lose."""

    text: str
    """As llguidance reads it (Lark, or its JSON). It has been compiled once already, where it came in."""
    begins_after: str = ""
    """The output is free up to and with the first place where its text has this marker, however tokens spell it; empty:
    it is bound from its beginning."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Draws are keyed by (``seed``, position), never by batch slot.

    ``max_tokens`` 0: nothing is drawn; the request ends with LENGTH as soon as its prompt is computed.
    ``temperature`` 0 means greedy. ``top_k`` None means all tokens. ``logprobs`` is the number
    of alternatives to report beside the sampled token (0 = only the token's own), None = none.
    ``prompt_logprobs`` likewise for prompt positions. ``logprob_token_ids``: these tokens' instead of the likeliest
    ones'. ``allowed_token_ids``: the only tokens that may be drawn, as ``device.step.pack_token_set`` writes them;
    empty: all. ``bad_words``: token sequences that the output may not come to have; the last token of each is not drawn
    behind the others. ``grammar``: what the output has to be; end tokens may be drawn only where it may end, and behind
    its end no other tokens. Stop *strings* are matched where text is made, in the server; here only token ids stop.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    allowed_token_ids: bytes = b""
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Argmax and nothing else: no penalties, bias, bans, logprobs or minimum length."""
        return (
            self.temperature == 0.0
            and self.logprobs is None
            and self.prompt_logprobs is None
            and not self.has_penalties
            and not self.logit_bias
            and not self.allowed_token_ids
            and not self.bad_words
            and self.grammar is None
            and self.min_tokens == 0
        )

    @property
    def needs_each_token(self) -> bool:
        """Whether the host has to see each token before the next is sampled (penalties, banned words, a grammar), or to
        describe what was sampled (logprobs)."""
        return (
            self.has_penalties or bool(self.bad_words) or self.grammar is not None
            or self.logprobs is not None or self.prompt_logprobs is not None
        )

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler must know the tokens seen so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class ServiceClass(StrEnum):
    """What a request is owed."""

    ONLINE = "online"
    """Latency: someone waits for each token."""
    OFFLINE = "offline"
    """Best effort: it takes what online requests leave, and its waiting is no reason for anything."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for, tokenized. Immutable; progress lives in ``core.requests``."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_ns: int
    priority: int = 0
    """Lower is sooner (vLLM's polarity); against whose requests it counts: ``policy.order``."""
    cache_salt: str = ""
    """Requests share prefix blocks only with requests of the same salt."""
    has_default_length: bool = False
    """No client asked for ``params.max_tokens``: it is only where the answer is cut. What memory the request needs is
    then judged by what it holds."""
    tenant: str = ""
    """Whose it is, as an opaque label: tenants share capacity. Empty where clients are not told apart."""
    service_class: ServiceClass = ServiceClass.ONLINE
    deadline_ns: int | None = None
    """When its first token is due, on the clock of ``arrival_ns``; None: as soon as its class allows."""
    resumed: tuple[int, ...] = ()
    """Tokens of its answer that its client has already, from a controller that has ended: the answer goes on behind
    them, and they are not told again."""


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities of one position, from the distribution before temperature."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    """``(token id, logprob)`` of the likeliest tokens, best first."""


FAILED_TOKEN_ID = -1
"""In place of a token: this row could not be sampled (its logits are not numbers, say). Its request alone fails."""
GRAMMAR_FAILED_TOKEN_ID = -2
"""Likewise: the row's grammar went beyond its bounds, or allows no token."""
LATER_TOKEN_ID = -3
"""In place of a token: what the row's grammar allows was not known yet. Its last token is computed again, and sampled
then; no other row waits."""


class SampledToken(NamedTuple):
    """One token that a step produced for one request."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder, in elements; bytes follow from ``dtype_bytes``."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    dtype_bytes: int
    tied_embeddings: bool = False
    shard_bytes: dict[ShardId, int] = field(default_factory=dict, hash=False)
    """Bytes of each shard as the device lays it out, before rounding to pages."""

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """KV-cache bytes of one token in one layer (K and V)."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def block_bytes_per_layer(self, block_size: int) -> int:
        """Bytes of one block of ``block_size`` tokens in one layer's arena."""
        return block_size * self.kv_bytes_per_token_layer

    @property
    def all_layers(self) -> LayerRange:
        """The whole decoder."""
        return LayerRange(0, self.num_layers)

    def shards_for(self, layers: LayerRange) -> frozenset[ShardId]:
        """Shards a stage running ``layers`` needs. With tied weights the last stage needs the embedding."""
        return _shards_of(layers.lo, layers.hi, self.num_layers, self.tied_embeddings)

    @property
    def all_shards(self) -> frozenset[ShardId]:
        """Every shard of one full copy."""
        return self.shards_for(self.all_layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one full copy, before rounding to pages."""
        return sum(self.shard_bytes.values())


@functools.lru_cache(maxsize=4096)
def _shards_of(lo: int, hi: int, num_layers: int, tied_embeddings: bool) -> frozenset[ShardId]:
    """``ModelShape.shards_for``, cached: callers ask for the same layers all the time, and share one set."""
    shards = {layer_shard(layer) for layer in range(lo, hi)}
    if lo == 0:
        shards.add(EMBED_SHARD)
    if hi == num_layers:
        shards.add(EMBED_SHARD if tied_embeddings else HEAD_SHARD)
    return frozenset(shards)
