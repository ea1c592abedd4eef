"""Published models as data: sizes from their configuration files, and what follows from them by counting.

Counting only (parameters, bytes, FLOPs of one token); times are ``cost.roofline``'s. Embedding and head are lending
units like the layers. Sources and checks against published parameter counts: docs/cost-model.md.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jettison.cost.profile_document import PLAIN_WEIGHTS
from jettison.types import EMBED_SHARD, HEAD_SHARD, ModelShape, ShardId, layer_shard

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed part of a mixture-of-experts layer."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Intermediate size of one expert."""
    num_shared: int = 0
    """Experts of the same size that every token passes."""
    num_dense_layers: int = 0
    """Leading layers without experts."""

    def touched(self, num_tokens: float) -> float:
        """Expected number of routed experts that a batch reads under even routing: E (1 - (1 - k/E)^T)."""
        missed: float = (1.0 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1.0 - missed)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, V3): the cache holds one compressed vector for K and V together."""

    kv_rank: int
    q_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    @property
    def cached_dim(self) -> int:
        """Elements of one token in one layer's cache."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class SmallWeights:
    """Weights that are kept as integers of a few bits, in groups of columns that share a scale of 16 bits."""

    bits: int
    group_size: int
    offset: str = "none"
    """``zero`` or ``min``: each group has another number of 16 bits."""

    @classmethod
    def parse(cls, name: str) -> SmallWeights:
        """By its name: ``int4-g128``, ``int8-g32-zero``. Raises ValueError."""
        found = re.fullmatch(r"int([48])-g([1-9]\d{0,5})(?:-(zero|min))?", name)
        if found is None or int(found[2]) % 32 or (found[1] == "8" and found[3] == "min"):
            raise ValueError(
                f"needs int4 or int8 in groups of 32 columns or a multiple, as int4-g128, not {name!r}"
            )
        return cls(int(found[1]), int(found[2]), found[3] or "none")

    @property
    def name(self) -> str:
        """As ``parse`` takes it."""
        return f"int{self.bits}-g{self.group_size}" + ("" if self.offset == "none" else f"-{self.offset}")

    @property
    def bytes_a_weight(self) -> float:
        """Scales included."""
        return (self.bits + 16 * (1 if self.offset == "none" else 2) / self.group_size) / 8


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """One decoder, in elements, with untied embeddings, bf16 KV, and bf16 weights unless ``weights`` says other."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Intermediate size of a dense layer."""
    vocab_size: int
    source: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    idle_layer_parameters: int = 0
    """Parameters per layer that lie in memory but take no part in the computation (cross-attention to images, for
    requests without images)."""
    table_weight_bytes: int | None = None
    """Bytes of the weights in KunServe's Table 1, where that is not the bf16 size."""
    weights: SmallWeights | None = None
    """How projections and experts lie in memory; None: in bf16, as all else."""

    # --- counting ---------------------------------------------------------------------------------------------

    @property
    def attention_parameters(self) -> int:
        """Projections, biases and norms of one layer's attention, and both layer norms."""
        norms = 2 * self.hidden_size
        if self.latent is not None:
            return norms + self._latent_parameters(self.latent)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights = self.hidden_size * (queries + 2 * keys) + queries * self.hidden_size
        biases = queries + 2 * keys if self.qkv_bias else 0
        return norms + weights + biases + (2 * self.head_dim if self.qk_norm else 0)

    def _latent_parameters(self, latent: Latent) -> int:
        queries = self.hidden_size * latent.q_rank + latent.q_rank
        queries += latent.q_rank * self.num_heads * (latent.nope_dim + latent.rope_dim)
        keys = self.hidden_size * latent.cached_dim + latent.kv_rank
        keys += latent.kv_rank * self.num_heads * (latent.nope_dim + latent.value_dim)
        return queries + keys + self.num_heads * latent.value_dim * self.hidden_size

    def _plain_parameters(self, layer: int) -> int:
        """Parameters of a layer's norms, biases and router: never kept as integers."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        if self.latent is not None:
            norms += self.latent.q_rank + self.latent.kv_rank
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        return norms + biases + self._router_parameters(layer)

    def _router_parameters(self, layer: int) -> int:
        """0 in a layer without experts."""
        if self.experts is None or layer < self.experts.num_dense_layers:
            return 0
        balance = 0 if self.latent is None else 1  # the bias that balances DeepSeek-V3's experts
        return (self.hidden_size + balance) * self.experts.num_experts

    @property
    def weights_name(self) -> str:
        """Of how they lie in memory, as a profile's fingerprint says it."""
        return PLAIN_WEIGHTS if self.weights is None else self.weights.name

    @property
    def projection_bytes(self) -> float:
        """Of one weight of a projection or an expert."""
        return BF16_BYTES if self.weights is None else self.weights.bytes_a_weight

    def dense_bytes(self, layer: int, *, with_idle: bool = True) -> float:
        """Of a layer without its routed experts. ``with_idle``: also of parameters that take no part."""
        num_parameters = self.dense_parameters(layer) - (0 if with_idle else self.idle_layer_parameters)
        plain = self._plain_parameters(layer)
        return BF16_BYTES * plain + self.projection_bytes * (num_parameters - plain)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert; 0 without experts."""
        return 0 if self.experts is None else 3 * self.hidden_size * self.experts.intermediate_size

    def dense_parameters(self, layer: int) -> int:
        """Parameters of layer ``layer`` without its routed experts: the ones that every token passes, and the idle
        ones."""
        common = self.attention_parameters + self.idle_layer_parameters
        if self.experts is None or layer < self.experts.num_dense_layers:
            return common + 3 * self.hidden_size * self.intermediate_size
        return common + self._router_parameters(layer) + self.experts.num_shared * self.expert_parameters

    def routed_parameters(self, layer: int) -> int:
        """Parameters of all routed experts of layer ``layer``."""
        if self.experts is None or layer < self.experts.num_dense_layers:
            return 0
        return self.experts.num_experts * self.expert_parameters

    @property
    def embedding_parameters(self) -> int:
        """The embedding; the head has as many, and the final norm ``hidden_size`` more."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters, idle ones included."""
        layers = sum(self.dense_parameters(i) + self.routed_parameters(i) for i in range(self.num_layers))
        return layers + 2 * self.embedding_parameters + self.hidden_size

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes, embedding and head included."""
        if self.experts is None:
            return self.num_parameters
        unused = self.experts.num_experts - self.experts.experts_per_token
        return self.num_parameters - self._num_expert_layers * unused * self.expert_parameters

    @property
    def layer_active_parameters(self) -> float:
        """Parameters that one token is multiplied with in one layer, the mean over layers."""
        dense = sum(self.dense_parameters(i) for i in range(self.num_layers)) / self.num_layers
        routed = 0 if self.experts is None else self.experts.experts_per_token * self.expert_parameters
        return dense - self.idle_layer_parameters + routed * self._num_expert_layers / self.num_layers

    @property
    def _num_expert_layers(self) -> int:
        return 0 if self.experts is None else self.num_layers - self.experts.num_dense_layers

    @property
    def kv_elements_per_token_layer(self) -> int:
        """Elements that one token leaves in one layer's cache."""
        if self.latent is not None:
            return self.latent.cached_dim
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def pair_flops(self) -> float:
        """FLOPs of one query-key pair of one layer, scores and weighted sum, over all heads (a prefill's form)."""
        if self.latent is not None:
            return 2.0 * self.num_heads * (self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim)
        return 4.0 * self.num_heads * self.head_dim

    @property
    def decode_pair_flops(self) -> float:
        """The same where one query reads the cache: latent attention then works on the compressed vectors."""
        if self.latent is not None:
            return 2.0 * self.num_heads * (self.latent.cached_dim + self.latent.kv_rank)
        return self.pair_flops

    # --- shape ------------------------------------------------------------------------------------------------

    def shape(self, *, dense_copies: int = 1, routed_scale: float = 1.0, kv_copies: int = 1) -> ModelShape:
        """The decoder as the engine knows it: one copy, or what an instance holds where parts of it are replicated.

        ``dense_copies`` of everything but routed experts, ``routed_scale`` times the routed experts, ``kv_copies`` of
        each token's KV. Latent attention caches one vector: it stands as one KV head of half its size.
        """

        def table_bytes(parameters: int) -> int:
            return BF16_BYTES * parameters * dense_copies

        shards: dict[ShardId, int] = {EMBED_SHARD: table_bytes(self.embedding_parameters)}
        for layer in range(self.num_layers):
            dense = self.dense_bytes(layer) * dense_copies
            routed = self.projection_bytes * round(self.routed_parameters(layer) * routed_scale)
            shards[layer_shard(layer)] = math.ceil(dense + routed)
        shards[HEAD_SHARD] = table_bytes(self.embedding_parameters + self.hidden_size)
        kv_heads, head_dim = self.num_kv_heads, self.head_dim
        if self.latent is not None:
            kv_heads, head_dim = 1, self.latent.cached_dim // 2
        return ModelShape(
            num_layers=self.num_layers, hidden_size=self.hidden_size, num_heads=self.num_heads,
            num_kv_heads=kv_heads * kv_copies, head_dim=head_dim, intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size, dtype_bytes=BF16_BYTES, shard_bytes=shards,
        )  # fmt: skip


def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelPreset:
    return ModelPreset(name, layers, hidden, heads, kv_heads, 128, ffn, vocab, f"config.json of {name}")


MODELS: dict[str, ModelPreset] = {
    model.name: model
    for model in (
        ModelPreset("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064, "config.json of Qwen2.5-14B", qkv_bias=True),
        ModelPreset("qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064, "config.json of Qwen2.5-72B", qkv_bias=True),
        _llama("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256),
        _llama("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256),
        # 100 layers, of which 20 attend to images: text passes the other 80, so each of those carries a quarter of one.
        ModelPreset(
            "llama-3.2-90b", 80, 8192, 64, 8, 128, 28672, 128256,
            "config.json of Llama-3.2-90B-Vision; without the image encoder",
            idle_layer_parameters=(2 * 8192 + 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672) // 4,
        ),
        _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000),
        ModelPreset(
            "qwen3-235b", 94, 4096, 64, 4, 128, 12288, 151936, "config.json of Qwen3-235B-A22B",
            qk_norm=True, experts=Experts(128, 8, 1536, num_dense_layers=0), table_weight_bytes=479 << 30,
        ),
        ModelPreset(
            "deepseek-v3", 61, 7168, 128, 128, 128, 18432, 129280, "inference/configs/config_671B.json of DeepSeek-V3",
            experts=Experts(256, 8, 2048, num_shared=1, num_dense_layers=3), latent=Latent(512, 1536, 64, 128, 128),
            table_weight_bytes=1572 << 30,
        ),
    )
}  # fmt: skip
"""Models by name. A comment marks the values that are not in a configuration file."""
