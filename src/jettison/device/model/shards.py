"""The layout of a decoder's parameters in memory: one slab of bytes for each shard, with tensors at aligned
offsets.

Projections that read the same input are fused: one matrix for query, key and value, one for gate and up. Each part has
its source in a Hugging Face checkpoint beside it. Pure arithmetic, without torch.

The final norm belongs to no shard: every stage keeps it (see ``workspace``), so that it is never dropped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jettison.device.dtypes import ITEM_BYTES, StoredDtype, dtype_of_sums, torch_dtype
from jettison.device.model.arithmetic import Experts
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.model.integers import IntegerForm
from jettison.device.model.tensor_names import ExpertNames
from jettison.types import EMBED_SHARD, HEAD_SHARD, ModelShape, ShardId, layer_shard

if TYPE_CHECKING:
    from torch import Tensor

    from jettison.device.kernels.base import Kernels

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
        halves = rotated[:, ::2].clone(), rotated[:, 1::2].clone()
        for half, to in zip(halves, rotated.chunk(2, dim=1), strict=True):
            to.copy_(half)


class Slice(NamedTuple):
    """One matrix, or one vector, of a tensor that stacks several."""

    at: int
    num_stacked: int
    is_transposed: bool = False
    """Whether its rows are the tensor's columns."""


class TensorSource(NamedTuple):
    """A tensor of the checkpoint, or a slice of one."""

    name: str
    shape: tuple[int, ...]
    order: HeadOrder | None = None
    """In which its rows are kept; None: their own."""
    slice: Slice | None = None
    """None: all of the tensor."""

    @property
    def key(self) -> str:
        """Which tells it from all others."""
        return self.name if self.slice is None else f"{self.name}[{self.slice.at}]"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the tensor in the checkpoint."""
        if self.slice is None:
            return self.shape
        return (self.slice.num_stacked, *(reversed(self.shape) if self.slice.is_transposed else self.shape))


class TensorSlot(NamedTuple):
    """A tensor's place in its slab."""

    name: str
    offset: int
    """Bytes from the start of the slab."""
    shape: tuple[int, ...]
    sources: tuple[TensorSource, ...]
    """The tensors of the checkpoint that, stacked by rows, make this one."""
    dtype: StoredDtype
    is_multiplied: bool = False
    """Whether it is a weight matrix of products, or a stack of such."""
    form: IntegerForm | None = None
    """In which it is kept as integers, each matrix of a stack by itself; ``dtype`` is uint8 then."""

    @property
    def num_bytes(self) -> int:
        """Without the gap behind it."""
        if self.form is not None:
            return math.prod(self.shape[:-2]) * self.form.num_bytes(*self.shape[-2:])
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def view(self, slab: Tensor) -> Tensor:
        """Of its shape, not in the order of its elements where it lies packed; of integers the bytes, [bytes], or in a
        stack [matrices, bytes]."""
        part = slab[self.offset : self.offset + self.num_bytes].view(torch_dtype(self.dtype))
        return part.view(self.shape) if self.form is None else part.view(*self.shape[:-2], -1)

    def lies_packed(self, kernels: Kernels | None) -> bool:
        """Whether it is stored in the packed form of these kernels (in as many bytes), each matrix of a stack by
        itself; False for None."""
        is_plain_matrix = self.is_multiplied and self.form is None
        return is_plain_matrix and kernels is not None and kernels.packs(self.shape[-2:], torch_dtype(self.dtype))


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The tensors of one shard."""

    shard: ShardId
    slots: tuple[TensorSlot, ...]
    num_bytes: int
    """Length of the slab, a multiple of ``ALIGNMENT``."""

    def views(self, slab: Tensor) -> dict[str, Tensor]:
        """The tensors by name, as views of ``slab`` (flat uint8, at least ``num_bytes`` long): ``TensorSlot.view``."""
        return {slot.name: slot.view(slab) for slot in self.slots}


@functools.lru_cache(maxsize=4)
def shard_layouts(
    config: DecoderConfig, dtype: StoredDtype, *, is_stacked: bool = False
) -> Mapping[ShardId, ShardLayout]:
    """The layout of every shard of one full copy; layers of one kind have the same. ``is_stacked``: whether the
    checkpoint has all experts of a layer in one tensor: it decides sources, not places.

    Kept: a start asks several times, and hundreds of experts a layer take half a second.
    """
    table = (config.vocab_size, config.hidden_size)
    tensors = {EMBED_SHARD: [_plain("embed", "model.embed_tokens.weight", *table)]}
    tensors |= {layer_shard(i): _layer_tensors(config, i, is_stacked) for i in range(config.num_layers)}
    if not config.tied_embeddings:
        tensors[HEAD_SHARD] = [_plain("head", "lm_head.weight", *table)]
    kept: dict[ShardId, dict[str, IntegerForm]] = {shard: {} for shard in tensors}
    for shard, slot, form in config.kept:
        kept[shard][slot] = form
    return {
        shard: _layout(shard, each, dtype, kept[shard], is_multiplied=shard != EMBED_SHARD or config.tied_embeddings)
        for shard, each in tensors.items()
    }


def model_shape(config: DecoderConfig, dtype: StoredDtype) -> ModelShape:
    """Sizes for the cost model, the ledgers and the planner."""
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        dtype_bytes=ITEM_BYTES[dtype],
        tied_embeddings=config.tied_embeddings,
        shard_bytes={shard: layout.num_bytes for shard, layout in shard_layouts(config, dtype).items()},
    )


def align(num_bytes: int) -> int:
    """Round up to ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def final_norm_sources(config: DecoderConfig) -> list[TensorSource]:
    """What ``Workspace.final_norm`` is filled with, one after the other."""
    names = [FINAL_NORM, *([FINAL_NORM.replace("weight", "bias")] if config.has_norm_bias else [])]
    return [TensorSource(name, (config.hidden_size,)) for name in names]


class _Tensor(NamedTuple):
    name: str
    sources: tuple[TensorSource, ...]
    stack: int = 0
    """Matrices that lie one after the other; 0: it is one tensor."""
    is_wide: bool = False
    """Whether it is kept in the precision of sums, as the checkpoint may."""


def _layer_tensors(config: DecoderConfig, layer: int, is_stacked: bool) -> list[_Tensor]:
    names, prefix = config.names, f"model.layers.{layer}."
    tensors = _norm("input_norm", names.input_norm, prefix, config)
    tensors += _attention_tensors(config, prefix + "self_attn.", prefix)
    tensors += _norm("attention_out_norm", names.attention_out_norm, prefix, config)
    tensors += _norm("post_norm", names.mlp_norm, prefix, config)
    experts = config.arithmetic.experts
    is_sparse = experts is not None and config.layers[layer].is_sparse
    if experts is not None and is_sparse:
        tensors += _expert_tensors(experts, names.experts, config.hidden_size, prefix, is_stacked=is_stacked)
    if (inner := config.mlp_size(layer)) > 0:
        tensors += _mlp_tensors(config, prefix, inner, is_shared=is_sparse)
    return tensors + _norm("mlp_out_norm", names.mlp_out_norm, prefix, config)


def _mlp_tensors(config: DecoderConfig, prefix: str, inner: int, *, is_shared: bool) -> list[_Tensor]:
    names, hidden = config.names, config.hidden_size
    mlp = prefix + (names.experts.shared if is_shared else "mlp") + "."
    if names.gate_up is not None:
        up = [(prefix + names.gate_up, inner * (2 if config.arithmetic.is_gated else 1))]
    else:
        up = [(mlp + names.up, inner)]
        if config.arithmetic.is_gated:
            up = [(mlp + "gate_proj", inner), *up]
    tensors = [_fused("gate_up_weight", up, hidden)]
    if config.mlp_bias:
        tensors.append(_fused("gate_up_bias", up))
    tensors.append(_plain("down_weight", f"{mlp}{names.down}.weight", hidden, inner))
    if config.mlp_bias:
        tensors.append(_plain("down_bias", f"{mlp}{names.down}.bias", hidden))
    return tensors


def _expert_tensors(
    experts: Experts, names: ExpertNames, hidden: int, prefix: str, *, is_stacked: bool
) -> list[_Tensor]:
    """Router and experts of a sparse layer: all first products in one stack, and all second ones."""
    number, inner = experts.number, experts.intermediate_size
    router = prefix + (names.stacked_router if is_stacked else names.router)
    is_wide = experts.score == "sigmoid"
    tensors = [_plain("router_weight", f"{router}.weight", number, hidden)._replace(is_wide=is_wide)]
    if experts.has_bias:
        tensors.append(_plain("router_bias", f"{router}.bias", number))
    if is_wide:
        tensors.append(_plain("router_correction", prefix + names.correction, number)._replace(is_wide=is_wide))
    shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    if is_stacked or names.each is None:
        for part, shape in shapes.items():
            name = f"{prefix}{names.stacked}.{part}_proj"
            slices = (Slice(i, number, names.is_transposed) for i in range(number))
            sources = tuple(TensorSource(name, shape, None, each) for each in slices)
            tensors.append(_Tensor(f"experts_{part}_weight", sources, number))
            if experts.has_bias:
                tensors.append(_plain(f"experts_{part}_bias", f"{name}_bias", number, shape[0]))
        return tensors
    matrices = {"gate_up": (names.gate, names.up), "down": (names.down,)}
    for part, parts in matrices.items():
        shape = (shapes[part][0] // len(parts), shapes[part][1])
        sources = tuple(
            TensorSource(f"{prefix}{names.each}.{i}.{each}.weight", shape) for i in range(number) for each in parts
        )
        tensors.append(_Tensor(f"experts_{part}_weight", sources, number))
    return tensors


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
    if names.sinks is not None:
        tensors.append(_plain("sinks", prefix + names.sinks, config.num_heads))
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
    return _Tensor(name, (TensorSource(source, shape),))


def _fused(
    name: str, parts: list[tuple[str, int]], num_columns: int | None = None,
    orders: tuple[HeadOrder | None, ...] = (None, None, None),
) -> _Tensor:
    """Projections stacked by rows: weights of ``num_columns``, or (None) their biases."""
    kind, columns = ("bias", ()) if num_columns is None else ("weight", (num_columns,))
    return _Tensor(name, tuple(
        TensorSource(f"{part}.{kind}", (rows, *columns), order)
        for (part, rows), order in zip(parts, orders, strict=False)
    ))  # fmt: skip


def _layout(
    shard: ShardId, tensors: list[_Tensor], dtype: StoredDtype, kept: Mapping[str, IntegerForm], *, is_multiplied: bool
) -> ShardLayout:
    slots, offset = [], 0
    for name, sources, stack, is_wide in tensors:
        shape: tuple[int, ...] = (sum(source.shape[0] for source in sources), *sources[0].shape[1:])
        if stack:
            shape = (stack, shape[0] // stack, *shape[1:])
        form = kept.get(name)
        kind = "uint8" if form is not None else dtype_of_sums(dtype) if is_wide else dtype
        is_matrix = is_multiplied and len(shape) > 1 and not name.endswith("_bias")
        slot = TensorSlot(name, offset, shape, sources, kind, is_matrix, form)
        slots.append(slot)
        offset += align(slot.num_bytes)
    return ShardLayout(shard, tuple(slots), offset)
