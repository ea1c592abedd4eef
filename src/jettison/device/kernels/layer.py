"""The two halves of a decoder layer as compositions of single kernels.

A back end that can do a half in one call does the same operations in the same order, with the same roundings, so the
choice changes no bit. The arguments are in ``operands``.
"""

from __future__ import annotations

from jettison.device.kernels.base import Kernels
from jettison.device.kernels.operands import Activations, Int32Array, LayerConstants, LayerWeights


def attend_layer(
    kernels: Kernels, weights: LayerWeights, buffers: Activations, constants: LayerConstants, block_tables: Int32Array,
    query_lens: Int32Array, context_lens: Int32Array, positions: Int32Array,
) -> None:
    """From the norm in ``buffers.x`` through attention to the output projection in ``buffers.x``."""
    kernels.linear(buffers.x, weights.qkv_weight, weights.qkv_bias, buffers.qkv)
    prepare_heads(kernels, weights, buffers, constants, positions)
    rows = (block_tables, query_lens, context_lens)
    kernels.write_kv(buffers.k, buffers.v, weights.arena, *rows)
    kernels.attention(
        buffers.q, weights.arena, *rows, buffers.attention, constants.scale, window=constants.window,
        softcap=constants.softcap,
    )  # fmt: skip
    kernels.linear(buffers.attention_flat, weights.o_weight, weights.o_bias, buffers.x)


def prepare_heads(
    kernels: Kernels, weights: LayerWeights, buffers: Activations, constants: LayerConstants, positions: Int32Array
) -> None:
    """Norm of heads, where the model has one, and rotation; in place."""
    if weights.q_norm is not None and weights.k_norm is not None:
        kernels.head_rms_norm(buffers.q, weights.q_norm, constants.eps, constants.norm)
        kernels.head_rms_norm(buffers.k, weights.k_norm, constants.eps, constants.norm)
    kernels.rotary(buffers.q, buffers.k, constants.cos, constants.sin, positions)


def feed_forward(
    kernels: Kernels, weights: LayerWeights, buffers: Activations, constants: LayerConstants
) -> None:
    """Add ``buffers.x`` to the residual, and leave the MLP of the residual's norm in ``buffers.x``."""
    kernels.add_rms_norm(buffers.x, buffers.residual, weights.post_norm, constants.eps, buffers.x)
    kernels.linear(buffers.x, weights.gate_up_weight, weights.gate_up_bias, buffers.gate_up)
    kernels.silu_mul(buffers.gate_up, buffers.activated)
    kernels.linear(buffers.activated, weights.down_weight, weights.down_bias, buffers.x)
