"""Costs of steps on known processors and models without a profile: from peaks, the shares of them reached, and sizes.

A ``RooflineCostModel`` is a ``CostModel`` with computed instead of fitted coefficients. It adds three things that large
processors and models need: a rounded knee between compute and memory, weights of experts that are read only if a batch
touches them, and per-token work beside the products (all-reduce, norms). Pure arithmetic; data in ``cost.gpus`` and
``cost.models``; docs/cost-model.md gives the sources of the efficiencies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jettison.cost.gpus import GpuPreset
from jettison.cost.model import CostModel
from jettison.cost.models import BF16_BYTES, Experts, ModelPreset


def smooth_max(compute: float, memory: float, knee: float) -> float:
    """(compute^p + memory^p)^(1/p): about the larger of the two, and 2^(1/p) times it where they are equal."""
    largest, smallest = (compute, memory) if compute >= memory else (memory, compute)
    if smallest <= 0.0:
        return max(largest, 0.0)
    return float(largest * (1.0 + (smallest / largest) ** knee) ** (1.0 / knee))


@dataclass(frozen=True, slots=True)
class RooflineCostModel(CostModel):
    """``CostModel`` with a rounded knee, experts, and work per token beside the products.

    ``weight_tokens`` is the time to read the weights that every batch needs, in tokens of compute; ``expert_tokens`` is
    the same for all routed experts of a layer.
    """

    token_extra_layer_s: float = 0.0
    """Seconds of one token in one layer outside of matrix products and attention."""
    expert_tokens: float = 0.0
    experts: Experts | None = None
    knee: float = 16.0

    def __post_init__(self) -> None:
        CostModel.__post_init__(self)
        if min(self.token_extra_layer_s, self.expert_tokens) < 0.0 or self.knee < 1.0:
            raise ValueError("token_extra_layer_s and expert_tokens must be >= 0, knee >= 1")

    def _work_s(self, num_tokens: int, num_pairs: float, num_kv_tokens: int, layers: int, is_first: bool) -> float:
        extra = layers * self.token_extra_layer_s * num_tokens
        return CostModel._work_s(self, num_tokens, num_pairs, num_kv_tokens, layers, is_first) + extra

    def _layer_rows(self, num_tokens: int) -> float:
        read: float = self.weight_tokens
        if self.experts is not None:
            read += self.expert_tokens * self.experts.touched(num_tokens) / self.experts.num_experts
        return smooth_max(num_tokens, read, self.knee)

    def _head_rows(self, num_samples: int) -> float:
        return smooth_max(num_samples, self.head_tokens, self.knee)


class Split(NamedTuple):
    """The split of one instance over processors."""

    num_gpus: int = 1
    attention_ranks: int = 1
    """Processors over which one attention is split; each further set of as many holds a copy of everything but the
    routed experts."""
    kv_copies: int = 1
    """Copies of a token's KV among the attention ranks: more than one where there are more ranks than KV heads."""


class Collective(NamedTuple):
    """An all-reduce over one interconnect: latency, and the reached rate per direction."""

    latency_s: float
    bytes_per_s: float

    def token_s(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds of a ring all-reduce beyond the latency: each rank sends 2 (n - 1) / n of the bytes."""
        return 2.0 * (num_ranks - 1) / num_ranks * num_bytes / self.bytes_per_s


def elementwise_bytes(hidden: int, rotated: float, activated: float) -> float:
    """Bytes that norms, rotary embedding, activation and residuals of one layer move for one token.

    Two norms and one residual read and write the hidden state (7 vectors), rotation reads and writes queries and keys
    (``rotated`` elements), the activation reads gate and up and writes one (``activated`` elements each).
    """
    return BF16_BYTES * (7.0 * hidden + 2.0 * rotated + 3.0 * activated)


def roofline_cost_model(
    gpu: GpuPreset, model: ModelPreset, split: Split, collective: Collective, *, host_step_s: float
) -> RooflineCostModel:
    """The steps of one instance of ``model`` over ``split.num_gpus`` processors, all of them in step.

    ``host_step_s``: seconds that the serving process adds to a step (scheduling, launching, sampling). Layers count as
    equal: where they differ (DeepSeek-V3's first three), each counts as the mean.
    """
    reached = gpu.efficiency
    flops_per_s = gpu.flops_per_s * reached.gemm * split.num_gpus
    read_bytes_per_s = gpu.memory_bytes_per_s * reached.memory
    token_s = 2.0 * model.layer_active_parameters / flops_per_s
    dense_bytes = _mean(model.dense_bytes(i, with_idle=False) for i in range(model.num_layers))
    dense_read_s = dense_bytes / split.attention_ranks / read_bytes_per_s
    routed = _mean(model.routed_parameters(i) for i in range(model.num_layers))
    routed_read_s = routed * model.projection_bytes / split.num_gpus / read_bytes_per_s
    head_bytes = model.embedding_parameters * BF16_BYTES / split.attention_ranks
    sample_s = 2.0 * model.embedding_parameters / flops_per_s
    pair_s, kv_s = _attention(gpu, model, split)
    return RooflineCostModel(
        num_layers=model.num_layers,
        pair_layer_s=pair_s,
        kv_token_layer_s=kv_s,
        token_layer_s=token_s,
        layer_s=reached.gemm_layer_s + reached.elementwise_layer_s + _collective_layer_s(split, collective),
        step_s=host_step_s,
        entry_s=0.0,
        entry_token_s=2.0 * BF16_BYTES * model.hidden_size / read_bytes_per_s,
        head_s=0.0,
        sample_s=sample_s,
        weight_tokens=max(1, round(dense_read_s / token_s)),
        head_tokens=max(1, round(head_bytes / read_bytes_per_s / sample_s)),
        token_extra_layer_s=_token_extra_s(gpu, model, split, collective),
        expert_tokens=routed_read_s / token_s,
        experts=model.experts,
        knee=reached.knee,
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _attention(gpu: GpuPreset, model: ModelPreset, split: Split) -> tuple[float, float]:
    """(seconds of a query-key pair, seconds of reading a cached token), each of one layer.

    Latent attention computes more in a decode than in a prefill. The extra work overlaps with reading the cached token,
    so the token counts with the longer of the two.
    """
    flops_per_s = gpu.flops_per_s * gpu.efficiency.attention * split.num_gpus
    pair_s = model.pair_flops / flops_per_s
    kv_bytes = model.kv_elements_per_token_layer * BF16_BYTES * split.kv_copies
    read_s = kv_bytes / (gpu.memory_bytes_per_s * gpu.efficiency.memory * split.num_gpus)
    more_s = (model.decode_pair_flops - model.pair_flops) / flops_per_s
    return pair_s, max(read_s, more_s)


def _collective_layer_s(split: Split, collective: Collective) -> float:
    """Seconds of latency of a layer's two collectives: after attention and after the MLP (or the experts)."""
    after_attention = collective.latency_s if split.attention_ranks > 1 else 0.0
    after_mlp = collective.latency_s if split.num_gpus > 1 else 0.0
    return after_attention + after_mlp


def _token_extra_s(gpu: GpuPreset, model: ModelPreset, split: Split, collective: Collective) -> float:
    """Seconds a token of elementwise work, and of the part of collectives that grows with tokens; each replica has its
    share of the tokens."""
    replicas = split.num_gpus // split.attention_ranks
    heads = model.num_heads + (model.num_kv_heads if model.latent is None else 0)
    width = model.intermediate_size
    if model.experts is not None:
        width = (model.experts.experts_per_token + model.experts.num_shared) * model.experts.intermediate_size
    ranks = split.attention_ranks
    moved = elementwise_bytes(model.hidden_size, heads * model.head_dim / ranks, width / ranks)
    elementwise_s = moved / (gpu.memory_bytes_per_s * gpu.efficiency.elementwise) / replicas
    hidden_bytes = model.hidden_size * BF16_BYTES
    after_attention = collective.token_s(hidden_bytes, ranks) / replicas if ranks > 1 else 0.0
    if model.experts is not None and replicas > 1:
        # Tokens go to their experts and come back (all-to-all): at most one copy to each other processor.
        copies = min(model.experts.experts_per_token, split.num_gpus - 1)
        after_mlp = 2.0 * copies * hidden_bytes / collective.bytes_per_s / split.num_gpus
    else:
        after_mlp = collective.token_s(hidden_bytes, ranks) if ranks > 1 else 0.0
    return elementwise_s + after_attention + after_mlp
