"""The two halves of a decoder layer: their arguments, and their composition of single kernels.

A back end that can do a half in one call does the same operations in the same order, with the same roundings, so the
choice changes no bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from jettison.device.kernels.base import Int32Array, Kernels, Weight


class LayerWeights:
    """One layer's parameters and KV: views of its slab, made once, valid whenever the slab is mapped and filled."""

    __slots__ = (
        "arena", "bound", "down_bias", "down_weight", "gate_up_bias", "gate_up_weight", "input_norm", "k_norm",
        "o_bias", "o_weight", "post_norm", "q_norm", "qkv_bias", "qkv_weight",
    )  # fmt: skip

    def __init__(self, tensors: dict[str, Any], arena: Tensor) -> None:
        self.input_norm: Tensor = tensors["input_norm"]
        self.qkv_weight: Weight = tensors["qkv_weight"]
        self.qkv_bias: Tensor | None = tensors.get("qkv_bias")
        self.q_norm: Tensor | None = tensors.get("q_norm")
        self.k_norm: Tensor | None = tensors.get("k_norm")
        self.o_weight: Weight = tensors["o_weight"]
        self.o_bias: Tensor | None = tensors.get("o_bias")
        self.post_norm: Tensor = tensors["post_norm"]
        self.gate_up_weight: Weight = tensors["gate_up_weight"]
        self.gate_up_bias: Tensor | None = tensors.get("gate_up_bias")
        self.down_weight: Weight = tensors["down_weight"]
        self.down_bias: Tensor | None = tensors.get("down_bias")
        self.arena = arena
        """[blocks, 2, kv_heads, block_size, head_dim]"""
        self.bound: Any = None
        """A back end's form of the addresses."""


class Activations(Protocol):
    """Buffers of a step of T tokens, all contiguous, none overlapping another that is alive at the same time."""

    residual: Tensor
    """[T, hidden]: the sum so far."""
    x: Tensor
    """[T, hidden]"""
    qkv: Tensor
    """[T, (num_heads + 2 * num_kv_heads) * head_dim]; ``q``, ``k``, ``v`` are views of it: [T, heads, head_dim]."""
    q: Tensor
    k: Tensor
    v: Tensor
    attention: Tensor
    """[T, num_heads, head_dim], and the same as [T, num_heads * head_dim]"""
    attention_flat: Tensor
    gate_up: Tensor
    """[T, 2 * inner]"""
    activated: Tensor
    """[T, inner]"""
    bound: Any


class LayerConstants(NamedTuple):
    """Constants of a layer besides its parameters, the same for all layers and steps."""

    cos: Tensor
    """[max_positions, rotary_dim]"""
    sin: Tensor
    eps: float
    """Epsilon of all norms."""
    scale: float
    """Scale of attention scores."""


def attend_layer(
    kernels: Kernels, weights: LayerWeights, buffers: Activations, constants: LayerConstants, block_tables: Int32Array,
    query_lens: Int32Array, context_lens: Int32Array, positions: Int32Array,
) -> None:
    """From the norm in ``buffers.x`` through attention to the output projection in ``buffers.x``."""
    kernels.linear(buffers.x, weights.qkv_weight, weights.qkv_bias, buffers.qkv)
    prepare_heads(kernels, weights, buffers, constants, positions)
    rows = (block_tables, query_lens, context_lens)
    kernels.write_kv(buffers.k, buffers.v, weights.arena, *rows)
    kernels.attention(buffers.q, weights.arena, *rows, buffers.attention, constants.scale)
    kernels.linear(buffers.attention_flat, weights.o_weight, weights.o_bias, buffers.x)


def prepare_heads(
    kernels: Kernels, weights: LayerWeights, buffers: Activations, constants: LayerConstants, positions: Int32Array
) -> None:
    """Norm of heads, where the model has one, and rotation; in place."""
    if weights.q_norm is not None and weights.k_norm is not None:
        kernels.head_rms_norm(buffers.q, weights.q_norm, constants.eps)
        kernels.head_rms_norm(buffers.k, weights.k_norm, constants.eps)
    kernels.rotary(buffers.q, buffers.k, constants.cos, constants.sin, positions)


def feed_forward(
    kernels: Kernels, weights: LayerWeights, buffers: Activations, constants: LayerConstants
) -> None:
    """Add ``buffers.x`` to the residual, and leave the MLP of the residual's norm in ``buffers.x``."""
    kernels.add_rms_norm(buffers.x, buffers.residual, weights.post_norm, constants.eps, buffers.x)
    kernels.linear(buffers.x, weights.gate_up_weight, weights.gate_up_bias, buffers.gate_up)
    kernels.silu_mul(buffers.gate_up, buffers.activated)
    kernels.linear(buffers.activated, weights.down_weight, weights.down_bias, buffers.x)
