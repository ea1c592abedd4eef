"""The layout of a decoder's parameters in memory: one slab of bytes for each shard, with tensors at aligned
offsets.

Projections that read the same input are fused: one matrix for query, key and value, one for gate and up. Each part has
its source in a Hugging Face checkpoint beside it. Pure arithmetic: no bytes are touched.

The final norm belongs to no shard: every stage keeps it (see ``workspace``), so that it is never dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from jettison.device.kernels import Kernels
from jettison.device.model.hf_config import DecoderConfig
from jettison.types import EMBED_SHARD, HEAD_SHARD, ModelShape, ShardId, layer_shard

ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every element size."""

FINAL_NORM = "model.norm.weight"


class HeadOrder(NamedTuple):
    """The rows of each head of a projection whose rotation pairs neighbours in the checkpoint: in a slab it pairs the
    two halves of what is rotated, as kernels do. Scores are sums over pairs, and stay what they are."""

    head_dim: int
    rotary_dim: int

    def apply(self, rows: Tensor) -> None:
        """Put whole heads of ``rows`` [heads * head_dim, ...] in order, in place."""
        rotated = rows.view(-1, self.head_dim, *rows.shape[1:])[:, : self.rotary_dim]
        rotated.copy_(torch.cat((rotated[:, ::2], rotated[:, 1::2]), dim=1))


class TensorSource(NamedTuple):
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    order: HeadOrder | None = None
    """In which its rows are kept; None: their own."""


class TensorSlot(NamedTuple):
    """A tensor's place in its slab."""

    name: str
    offset: int
    """Bytes from the start of the slab."""
    shape: tuple[int, ...]
    sources: tuple[TensorSource, ...]
    """The tensors of the checkpoint that, stacked along the first dimension, make this one."""
    is_multiplied: bool = False
    """Whether it is a weight matrix of products."""

    def lies_packed(self, kernels: Kernels | None, dtype: torch.dtype) -> bool:
        """Whether it is stored in the packed form of these kernels (in as many bytes); False for None."""
        return self.is_multiplied and kernels is not None and kernels.packs(self.shape, dtype)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The tensors of one shard."""

    shard: ShardId
    slots: tuple[TensorSlot, ...]
    num_bytes: int
    """Length of the slab, a multiple of ``ALIGNMENT``."""

    def views(self, slab: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors by name, as views of ``slab`` (flat uint8, at least ``num_bytes`` long).

        The view of a packed slot has the matrix' shape but not the order of its elements.
        """
        views = {}
        for slot in self.slots:
            num_bytes = math.prod(slot.shape) * dtype.itemsize
            views[slot.name] = slab[slot.offset : slot.offset + num_bytes].view(dtype).view(slot.shape)
        return views


def shard_layouts(config: DecoderConfig, dtype: torch.dtype) -> dict[ShardId, ShardLayout]:
    """The layout of every shard of one full copy; all layers' layouts are alike."""
    table = (config.vocab_size, config.hidden_size)
    embed = _plain("embed", "model.embed_tokens.weight", *table)
    layouts = [_layout(EMBED_SHARD, [embed], dtype, is_multiplied=config.tied_embeddings)]
    layouts += [_layout(layer_shard(i), _layer_tensors(config, f"model.layers.{i}."), dtype)
                for i in range(config.num_layers)]  # fmt: skip
    if not config.tied_embeddings:
        layouts.append(_layout(HEAD_SHARD, [_plain("head", "lm_head.weight", *table)], dtype))
    return {layout.shard: layout for layout in layouts}


def model_shape(config: DecoderConfig, dtype: torch.dtype) -> ModelShape:
    """Sizes for the cost model, the ledgers and the planner."""
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        dtype_bytes=dtype.itemsize,
        tied_embeddings=config.tied_embeddings,
        shard_bytes={shard: layout.num_bytes for shard, layout in shard_layouts(config, dtype).items()},
    )


def align(num_bytes: int) -> int:
    """Round up to ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


_Tensor = tuple[str, tuple[TensorSource, ...]]


def final_norm_sources(config: DecoderConfig) -> list[TensorSource]:
    """What ``Workspace.final_norm`` is filled with, one after the other."""
    names = [FINAL_NORM, *([FINAL_NORM.replace("weight", "bias")] if config.has_norm_bias else [])]
    return [TensorSource(name, (config.hidden_size,)) for name in names]


def _layer_tensors(config: DecoderConfig, prefix: str) -> list[_Tensor]:
    names, hidden = config.names, config.hidden_size
    tensors = _norm("input_norm", names.input_norm, prefix, config)
    tensors += _attention_tensors(config, prefix + "self_attn.", prefix)
    tensors += _norm("attention_out_norm", names.attention_out_norm, prefix, config)
    tensors += _norm("post_norm", names.mlp_norm, prefix, config)
    inner, mlp = config.intermediate_size, prefix + "mlp."
    if names.gate_up is not None:
        up = [(prefix + names.gate_up, config.up_size)]
    else:
        up = [(mlp + names.up, inner)]
        if config.arithmetic.is_gated:
            up = [(mlp + "gate_proj", inner), *up]
    tensors.append(_fused("gate_up_weight", up, hidden))
    if config.mlp_bias:
        tensors.append(_fused("gate_up_bias", up))
    tensors.append(_plain("down_weight", f"{mlp}{names.down}.weight", hidden, inner))
    if config.mlp_bias:
        tensors.append(_plain("down_bias", f"{mlp}{names.down}.bias", hidden))
    return tensors + _norm("mlp_out_norm", names.mlp_out_norm, prefix, config)


def _attention_tensors(config: DecoderConfig, attn: str, prefix: str) -> list[_Tensor]:
    names, hidden, q, kv = config.names, config.hidden_size, config.q_size, config.kv_size
    parts = [(attn + "q_proj", q), (attn + "k_proj", kv), (attn + "v_proj", kv)]
    if names.qkv is not None:
        parts = [(prefix + names.qkv, config.qkv_size)]
    order = HeadOrder(config.head_dim, config.rotary_dim) if config.arithmetic.is_interleaved else None
    orders = (order, order, None)
    tensors = [_fused("qkv_weight", parts, hidden, orders)]
    if config.qkv_bias:
        tensors.append(_fused("qkv_bias", parts, None, orders))
    if config.arithmetic.qk_norm != "none":
        is_wide = config.arithmetic.qk_norm == "width"
        tensors.append(_plain("q_norm", attn + "q_norm.weight", q if is_wide else config.head_dim))
        tensors.append(_plain("k_norm", attn + "k_norm.weight", kv if is_wide else config.head_dim))
    tensors.append(_plain("o_weight", attn + "o_proj.weight", hidden, q))
    if config.o_bias:
        tensors.append(_plain("o_bias", attn + "o_proj.bias", hidden))
    return tensors


def _norm(slot: str, name: str | None, prefix: str, config: DecoderConfig) -> list[_Tensor]:
    """A norm of a layer, if the architecture has it."""
    if name is None:
        return []
    tensors = [_plain(slot, f"{prefix}{name}.weight", config.hidden_size)]
    if config.has_norm_bias:
        tensors.append(_plain(f"{slot}_bias", f"{prefix}{name}.bias", config.hidden_size))
    return tensors


def _plain(name: str, source: str, *shape: int) -> _Tensor:
    return name, (TensorSource(source, shape),)


def _fused(
    name: str, parts: list[tuple[str, int]], num_columns: int | None = None,
    orders: tuple[HeadOrder | None, ...] = (None, None, None),
) -> _Tensor:
    """Projections stacked by rows: weights of ``num_columns``, or (None) their biases."""
    kind, columns = ("bias", ()) if num_columns is None else ("weight", (num_columns,))
    return name, tuple(
        TensorSource(f"{part}.{kind}", (rows, *columns), order)
        for (part, rows), order in zip(parts, orders, strict=False)
    )


def _layout(
    shard: ShardId, tensors: list[_Tensor], dtype: torch.dtype, *, is_multiplied: bool = True
) -> ShardLayout:
    slots, offset = [], 0
    for name, sources in tensors:
        shape = (sum(source.shape[0] for source in sources), *sources[0].shape[1:])
        slots.append(TensorSlot(name, offset, shape, sources, is_multiplied and len(shape) == 2))
        offset += align(math.prod(shape) * dtype.itemsize)
    return ShardLayout(shard, tuple(slots), offset)
