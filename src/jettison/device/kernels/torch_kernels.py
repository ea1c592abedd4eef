"""The same kernels in plain torch: the fallback where there is no compiler, and the second opinion in tests.

Attention gathers each row's blocks and calls SDPA row by row, so a row's result does not depend on the batch.
Slow with many rows, right everywhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from jettison.device.beside import bound_onednn_caches
from jettison.device.kernels.base import (
    check_arena,
    check_argmax,
    check_heads,
    check_linear,
    check_lse,
    check_matrix,
    check_norm,
    check_rotary,
    check_rotary_tables,
    check_vector,
    check_window,
    fail,
    sum_dtype,
)
from jettison.device.kernels.experts import activate, pass_experts
from jettison.device.kernels.integers import pack_integers, torch_gather_integers, torch_linear_integers
from jettison.device.kernels.layer import attend_layer, feed_forward
from jettison.device.kernels.norms import layer_normalized, rms_normalized
from jettison.device.kernels.onednn import torch_linear
from jettison.device.kernels.operands import (
    Activations,
    ExpertWeights,
    Int32Array,
    IntegerMatrix,
    LayerConstants,
    LayerWeights,
    PackedMatrix,
    RoutedBuffers,
    Weight,
)
from jettison.device.model.arithmetic import Activation, RmsNorm
from jettison.device.model.integers import IntegerForm


def load_torch(variant: str | None = None) -> TorchKernels:
    """There is one kind. Never raises."""
    return TorchKernels()


def _host(array: Int32Array | Tensor) -> npt.NDArray[np.integer]:
    return array.numpy() if isinstance(array, Tensor) else array


class TorchKernels:
    """``Kernels`` in torch; see ``base.Kernels`` for the contract."""

    name = "torch"

    def __init__(self) -> None:
        bound_onednn_caches()

    def write_kv(
        self,
        k: Tensor,
        v: Tensor,
        arena: Tensor,
        block_tables: Int32Array,
        query_lens: Int32Array,
        context_lens: Int32Array,
    ) -> None:
        """See ``Kernels.write_kv``."""
        check_arena(arena, k.dtype)
        check_heads("k", k, k.dtype)
        check_heads("v", v, k.dtype)
        if k.shape != v.shape or k.shape[1:] != (arena.shape[2], arena.shape[4]):
            fail(f"k {tuple(k.shape)}, v {tuple(v.shape)} do not go with arena {tuple(arena.shape)}")
        tables, queries, contexts = check_rows(arena, block_tables, query_lens, context_lens, k.shape[0])
        block_size = arena.shape[3]
        rows = np.repeat(np.arange(len(queries)), queries)
        starts = np.repeat(np.cumsum(queries) - queries - contexts, queries)
        positions = np.arange(k.shape[0]) - starts
        blocks = torch.from_numpy(tables[rows, positions // block_size].astype(np.int64))
        offsets = torch.from_numpy(positions % block_size)
        arena[blocks, 0, :, offsets, :] = k
        arena[blocks, 1, :, offsets, :] = v

    def attention(
        self,
        q: Tensor,
        arena: Tensor,
        block_tables: Int32Array,
        query_lens: Int32Array,
        context_lens: Int32Array,
        out: Tensor,
        scale: float,
        lse: Tensor | None = None,
        only_context: bool = False,
        window: int = 0,
        softcap: float = 0.0,
        first_positions: Int32Array | None = None,
    ) -> None:
        """See ``Kernels.attention``."""
        check_arena(arena, q.dtype)
        check_heads("q", q, q.dtype)
        check_heads("out", out, q.dtype)
        num_kv_heads, block_size, head_dim = arena.shape[2:]
        if q.shape != out.shape or q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
            fail(f"q {tuple(q.shape)}, out {tuple(out.shape)} do not go with arena {tuple(arena.shape)}")
        tables, queries, contexts = check_rows(arena, block_tables, query_lens, context_lens, q.shape[0], only_context)
        if lse is not None:
            check_lse(lse, q)
        check_window(window, softcap, only_context, first_positions, len(queries))
        firsts = contexts if first_positions is None else _host(first_positions)
        start = 0
        for table, num_queries, context, position in zip(
            tables, queries.tolist(), contexts.tolist(), firsts.tolist(), strict=True
        ):
            end, num_keys = start + num_queries, context + (0 if only_context else num_queries)
            if num_queries == 0:
                continue
            hidden = min(max(0, position + 1 - window), num_keys) if window else 0
            left_out = hidden // block_size
            ids = torch.from_numpy(table[left_out : -(-num_keys // block_size)].astype(np.int64))
            cache = arena[ids]  # [blocks, 2, kv_heads, block_size, head_dim]
            kv = cache.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)
            kv = kv[:, :, hidden - left_out * block_size : num_keys - left_out * block_size]
            mask = _mask(position, num_queries, hidden, num_keys, window, not only_context)
            query = q[start:end].transpose(0, 1)
            if softcap or (only_context and window):  # torch knows no softcap, and no query that sees nothing
                weights = _scores(query, kv[0], mask, scale, softcap).softmax(-1).masked_fill(~mask, 0)
                result = (weights @ _of_each_head(kv[1], query)).to(q.dtype)
            else:
                result = F.scaled_dot_product_attention(
                    query.unsqueeze(0), kv[0:1], kv[1:2], attn_mask=None if bool(mask.all()) else mask, scale=scale,
                    enable_gqa=q.shape[1] != num_kv_heads,
                )[0]
            out[start:end] = result.transpose(0, 1)
            if lse is not None:
                lse[start:end] = _scores(query, kv[0], mask, scale, softcap).logsumexp(-1).transpose(0, 1)
            start = end

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, kind: RmsNorm = "rms") -> None:
        """See ``Kernels.rms_norm``."""
        check_norm(x, weight, out)
        out.copy_(rms_normalized(x, weight, eps, kind))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
        """See ``Kernels.layer_norm``."""
        check_norm(x, weight, out, bias=bias)
        out.copy_(layer_normalized(x, weight, bias, eps))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See ``Kernels.add_rms_norm``."""
        check_norm(x, weight, out, residual)
        residual.add_(x)
        out.copy_(rms_normalized(residual, weight, eps))

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Int32Array) -> None:
        """See ``Kernels.rotary``."""
        check_rotary(q, k, positions)
        check_rotary_tables(cos, sin, q.dtype, q.shape[2])
        index = torch.as_tensor(positions).long()
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < cos.shape[0]:
            raise IndexError(f"a position lies outside the {cos.shape[0]} of the rotary tables")
        c, s = cos[index].unsqueeze(1), sin[index].unsqueeze(1)
        for x in (q, k):
            part = x[..., : cos.shape[1]]
            wide = part.to(cos.dtype)
            left, right = wide.chunk(2, dim=-1)
            part.copy_(wide * c + torch.cat((-right, left), dim=-1) * s)

    def head_rms_norm(self, x: Tensor, weight: Tensor, eps: float, kind: RmsNorm = "rms") -> None:
        """See ``Kernels.head_rms_norm``."""
        check_heads("x", x, x.dtype)
        check_vector("weight", weight, x.shape[2], x.dtype)
        x.copy_(rms_normalized(x, weight, eps, kind))

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See ``Kernels.silu_mul``."""
        rows, cols = out.shape
        check_matrix("out", out, rows, cols, gate_up.dtype)
        check_matrix("gate_up", gate_up, rows, 2 * cols, gate_up.dtype)
        gate, up = gate_up.to(sum_dtype(out.dtype)).chunk(2, dim=-1)
        out.copy_(F.silu(gate) * up)

    def activate(self, activation: Activation, up: Tensor, out: Tensor) -> None:
        """See ``Kernels.activate``."""
        activate(self, activation, up, out)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor) -> None:
        """See ``Kernels.linear``."""
        if isinstance(weight, IntegerMatrix):
            torch_linear_integers(x, weight, bias, out)
            return
        plain = _plain(weight)
        check_linear(x, plain, bias, out)
        torch_linear(x, plain, bias, out)

    def attend_layer(
        self, weights: LayerWeights, buffers: Activations, constants: LayerConstants, block_tables: Int32Array,
        query_lens: Int32Array, context_lens: Int32Array, positions: Int32Array,
    ) -> None:
        """See ``Kernels.attend_layer``."""
        attend_layer(self, weights, buffers, constants, block_tables, query_lens, context_lens, positions)

    def feed_forward(self, weights: LayerWeights, buffers: Activations, constants: LayerConstants) -> None:
        """See ``Kernels.feed_forward``."""
        feed_forward(self, weights, buffers, constants)

    def experts(
        self, x: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertWeights, activation: Activation,
        buffers: RoutedBuffers, out: Tensor,
    ) -> None:
        """See ``Kernels.experts``."""
        pass_experts(self, x, chosen, shares, weights, activation, buffers, out)

    def argmax(self, logits: Tensor, out: Tensor) -> None:
        """See ``Kernels.argmax``."""
        check_argmax(logits, out)
        # numpy documents that argmax returns the first of equal maxima, which is the lowest index.
        wide = (logits.float() if logits.dtype == torch.bfloat16 else logits).numpy()
        out.numpy()[:] = np.where(np.isfinite(wide).all(axis=1), wide.argmax(axis=1), -1)

    def packs(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """See ``Kernels.packs``. Never."""
        return False

    def pack_rows(self, rows: Tensor, first: int, packed: PackedMatrix) -> None:
        """See ``Kernels.pack_rows``. Raises ValueError."""
        _plain(packed)

    def keeps(self, form: IntegerForm, shape: tuple[int, int], dtype: torch.dtype) -> bool:
        """See ``Kernels.keeps``."""
        return form.fits(*shape)

    def pack_integers(
        self, integers: Tensor, scales: Tensor, offsets: Tensor | None, first: int, matrix: IntegerMatrix
    ) -> None:
        """See ``Kernels.pack_integers``."""
        pack_integers(integers, scales, offsets, first, matrix)

    def gather_rows(self, weight: Weight, ids: Tensor, out: Tensor) -> None:
        """See ``Kernels.gather_rows``."""
        if isinstance(weight, IntegerMatrix):
            torch_gather_integers(weight, ids, out)
        else:
            torch.index_select(_plain(weight), 0, ids, out=out)


def _plain(weight: Tensor | PackedMatrix) -> Tensor:
    return fail("these kernels have no packed form") if isinstance(weight, PackedMatrix) else weight


def _mask(position: int, num_queries: int, first_key: int, num_keys: int, window: int, causal: bool) -> Tensor:
    """[queries, keys]: which keys from ``first_key`` to before ``num_keys`` each query sees, the first of which is at
    ``position``."""
    queries = torch.arange(position, position + num_queries).unsqueeze(1)
    keys = torch.arange(first_key, num_keys)
    seen = keys <= queries if causal else torch.ones(num_queries, len(keys), dtype=torch.bool)
    return seen & (keys > queries - window) if window else seen


def _scores(query: Tensor, keys: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """Scores [heads, queries, keys] in the sums' precision, scaled, then capped; hidden positions are -inf."""
    scores = query.to(sum_dtype(query.dtype)) @ _of_each_head(keys, query).transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~mask, -torch.inf)


def _of_each_head(kv: Tensor, query: Tensor) -> Tensor:
    """Keys or values of KV heads for each head of ``query``, in the sums' precision."""
    return kv.to(sum_dtype(query.dtype)).repeat_interleave(query.shape[0] // kv.shape[0], dim=0)


def check_rows(
    arena: Tensor, block_tables: Int32Array, query_lens: Int32Array, context_lens: Int32Array, num_tokens: int,
    only_context: bool = False,
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """The rows of ``write_kv`` and ``attention`` as arrays. Raises as these do."""
    tables, queries, contexts = _host(block_tables), _host(query_lens), _host(context_lens)
    if tables.ndim != 2 or queries.shape != (tables.shape[0],) or contexts.shape != queries.shape:
        fail(f"block_tables {tables.shape}, query_lens {queries.shape}, context_lens {contexts.shape} do not match")
    if any(array.dtype != np.int32 for array in (tables, queries, contexts)):
        fail("block_tables, query_lens and context_lens must be int32")
    if int(queries.sum()) != num_tokens or queries.min(initial=0) < 0 or contexts.min(initial=0) < 0:
        fail(f"query_lens must be >= 0 and add up to {num_tokens} tokens, context_lens must be >= 0")
    if only_context and bool((contexts[queries > 0] == 0).any()):
        fail("rows that see only their context need one")
    num_blocks = -(-(contexts if only_context else queries + contexts) // arena.shape[3])
    if num_blocks.max(initial=0) > tables.shape[1]:
        raise IndexError(f"a row needs {num_blocks.max()} blocks, its table has {tables.shape[1]}")
    used = tables[np.arange(tables.shape[1]) < num_blocks[:, None]]
    if used.size and not 0 <= used.min() <= used.max() < arena.shape[0]:
        raise IndexError(f"a block id lies outside the arena's {arena.shape[0]} blocks")
    return tables, queries, contexts
