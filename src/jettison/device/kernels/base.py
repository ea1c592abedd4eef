"""The contract between the model and a device's compute kernels, and the argument checks that all back ends share.

Here: the ``Kernels`` protocol (the contract) and cheap shape and dtype checks. Not here: any arithmetic, and
anything that knows about requests, layers or memory ownership.

Conventions of all methods: T tokens of R rows (one chunk of one request each) lie one after the other; row r's
token i has the absolute position ``context_lens[r] + i``. Matrices may be row-strided views (a slice of a fused
QKV buffer) as long as the elements inside a row are contiguous. dtypes are float64, float32 and bfloat16;
sums are kept in float64, float32 and float32 respectively. No method allocates memory that outlives it.
"""

from __future__ import annotations

import math
from typing import NoReturn, Protocol

import torch
from torch import Tensor

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


class Kernels(Protocol):
    """The compute of one device. Methods are thread-safe, and write only their named outputs.

    All raise ValueError for shapes, dtypes or strides that break the contract, before anything is written.
    A row's result never depends, not even in its last bit, on which other rows share the batch: ``attention`` of
    every back end (of ``cuda`` in batches of equally long chunks), and every method of the native one and of
    ``cuda-invariant``. Where ``linear`` is torch's (the back end ``torch``; in
    bfloat16 ``native+torch-linear``) the contract excludes it: torch rounds otherwise for other numbers of rows.
    """

    name: str
    """The name for logs and fingerprints: ``"native-avx2"``, ``"native-avx512bf16+torch-linear"``, ..."""

    def write_kv(
        self,
        k: Tensor,
        v: Tensor,
        arena: Tensor,
        block_tables: Int32Array,
        query_lens: Int32Array,
        context_lens: Int32Array,
    ) -> None:
        """Store this chunk's keys and values at their positions.

        ``k``, ``v``: [T, num_kv_heads, head_dim]. ``arena``: [num_blocks, 2, num_kv_heads, block_size, head_dim],
        contiguous. ``block_tables``: int32 [R, max_blocks]; ``query_lens``, ``context_lens``: int32 [R].
        Raises IndexError when a block id lies outside the arena or a row outgrows its block table.
        """
        ...

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
        """Causal grouped-query attention over the paged cache, for prefill, chunked prefill and decode rows alike.

        ``q``, ``out``: [T, num_heads, head_dim]; ``num_heads`` is a multiple of the arena's ``num_kv_heads``. A token
        at position p attends to positions 0..p; nothing beyond is read, whatever bytes lie there. ``write_kv``
        must have stored this chunk first. Raises IndexError as ``write_kv`` does.

        For attention in parts (KunServe v1 section 4.2, remote attention): ``lse`` [T, num_heads], contiguous, of
        ``sum_dtype``, gets the log of each token's and head's sum of exponentials; ``only_context`` lets every token
        see exactly positions 0..context_len-1 of its row, its own chunk not (every row with tokens needs a context).
        Parts over disjoint positions are put together by ``merge_parts``.

        ``window`` > 0: a token at position p attends to positions max(0, p - window + 1)..p alone, as the models of
        ``transformers`` with a sliding window do, and what lies before is neither read nor computed. With
        ``only_context`` this needs ``first_positions``, int32 [R]: the position of each row's first token, counted as
        its context's are. A token that sees nothing then has zeros in ``out`` and -inf in ``lse``.

        ``softcap`` > 0: a scaled score s counts as ``softcap * tanh(s / softcap)`` (Gemma 2, arXiv 2408.00118 section
        2). For attention sinks see ``apply_sinks``.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, kind: RmsNorm = "rms") -> None:
        """``out = weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, or with a gain and a rounding of
        another ``kind``.

        ``x``, ``out``: [T, H]; ``out`` may be ``x``.
        """
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
        """``out = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias`` over the last dimension, rounded once. Shapes as
        in ``rms_norm``; ``bias``: [H]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """``residual += x`` in place, then ``out = rms_norm(residual)``. All [T, H]; ``out`` may be ``x``."""
        ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Int32Array) -> None:
        """Rotate ``q`` [T, num_heads, D] and ``k`` [T, num_kv_heads, D] in place.

        Element i of a head is paired with element i + rotary_dim / 2, as Hugging Face's ``rotate_half`` does.
        ``cos``, ``sin``: [max_positions, rotary_dim] with ``rotary_dim <= D`` and even, float32 (float64 for
        float64 inputs); ``positions``: int32 or int64 [T]. Dimensions beyond ``rotary_dim`` stay as they are.
        Raises IndexError for a position outside the tables.
        """
        ...

    def head_rms_norm(self, x: Tensor, weight: Tensor, eps: float, kind: RmsNorm = "rms") -> None:
        """``rms_norm`` of each head in place (QK norm of Qwen3). ``x``: [T, heads, D]; ``weight``: [D]."""
        ...

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """``out = silu(gate) * up``. ``gate_up``: [T, 2 * I], gate first; ``out``: [T, I]."""
        ...

    def activate(self, activation: Activation, up: Tensor, out: Tensor) -> None:
        """What lies between an MLP's two products, rounded once. ``up``: [T, 2 * I], gates first, or [T, I] without
        them (pairs of neighbours for ``swiglu_clamped``); ``out``: [T, I]."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor) -> None:
        """``out = x @ weight.T + bias``.

        ``x``: [T, K]; ``weight``: plain row-major [N, K], or packed by ``pack_rows`` or ``pack_integers``; ``bias``:
        [N]; ``out``: [T, N], not overlapping ``x``: of its type, or of ``sum_dtype``, which gets the sums as they are.
        No copy of ``weight`` outlives the call: a drop gives its pages away. Weights that are kept as integers are not
        rounded: scales and offsets are applied to sums over integers, or to integers in the precision of sums.
        """
        ...

    def attend_layer(
        self, weights: LayerWeights, buffers: Activations, constants: LayerConstants, block_tables: Int32Array,
        query_lens: Int32Array, context_lens: Int32Array, positions: Int32Array,
    ) -> None:
        """The first half of a layer, with the same bits as ``layer.attend_layer``. ``positions``: int32 [T].

        Raises IndexError as ``write_kv`` and ``rotary`` do.
        """
        ...

    def feed_forward(self, weights: LayerWeights, buffers: Activations, constants: LayerConstants) -> None:
        """The second half: see ``layer.feed_forward``."""
        ...

    def experts(
        self, x: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertWeights, activation: Activation,
        buffers: RoutedBuffers, out: Tensor,
    ) -> None:
        """``out[t] = sum over j of shares[t, j] * expert chosen[t, j] of x[t]``: see ``experts.pass_experts``.

        ``x``, ``out``: [T, hidden], contiguous; ``out`` may be ``x``. ``chosen``: int64 [T, k], and ``shares``: [T, k]
        of ``sum_dtype``, both contiguous. A sum is in the order of j, in the precision of sums, and rounded once: what
        each expert makes is rounded before it, as products are. Raises IndexError for an unknown expert, where the host
        sees it.
        """
        ...

    def argmax(self, logits: Tensor, out: Tensor) -> None:
        """``out[i]`` = the lowest index of the largest of row i of ``logits`` [n, V]; -1 where one is not finite.

        ``out``: contiguous int64 [n], where ``logits`` are.
        """
        ...

    def packs(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether parameters of this shape are matrices that are packed in their slab."""
        ...

    def pack_rows(self, rows: Tensor, first: int, packed: PackedMatrix) -> None:
        """Put plain ``rows`` [n, K] where rows ``first`` to ``first + n - 1`` of the packed matrix belong."""
        ...

    def keeps(self, form: IntegerForm, shape: tuple[int, int], dtype: torch.dtype) -> bool:
        """Whether matrices of this shape can be kept in this form, and multiply activations of ``dtype``."""
        ...

    def pack_integers(
        self, integers: Tensor, scales: Tensor, offsets: Tensor | None, first: int, matrix: IntegerMatrix
    ) -> None:
        """Put rows ``first`` to ``first + n - 1`` of a matrix [N, K] where they belong; other bytes stay as they are.

        ``integers``: int8 [n, K], contiguous; ``scales``, ``offsets``: [n, K / group size] of the form's scale type,
        ``offsets`` None where it has none. Of integers of 4 bits the lower ones count.
        """
        ...

    def gather_rows(self, weight: Weight, ids: Tensor, out: Tensor) -> None:
        """``out[i] = row ids[i] of weight``: ``ids`` int64 [n], ``out`` [n, K]. Raises IndexError for unknown rows.

        Weights that are kept as integers are computed in ``sum_dtype`` and rounded once.
        """
        ...


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of sums over ``dtype``, and of log-sum-exps."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_parts(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over the union of two disjoint sets of positions from attention over each.

    ``out``, ``other``: [n, num_heads, head_dim]; ``lse``, ``other_lse``: [n, num_heads] of ``sum_dtype``. Exact up to
    rounding: softmax weights of the parts relative to their common maximum, as in online softmax. New memory.
    """
    weight = torch.sigmoid(lse - other_lse).unsqueeze(-1)
    wide, wide_other = out.to(lse.dtype), other.to(lse.dtype)
    return (wide * weight + wide_other * torch.sigmoid(other_lse - lse).unsqueeze(-1)).to(out.dtype)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let a learnt logit a head take part in the softmax, with no value: in place, once, when all parts are merged.

    ``out``: [n, num_heads, head_dim], of weights that add up to 1 without the sink; ``lse``: [n, num_heads] of
    ``sum_dtype``; ``sinks``: [num_heads]. exp(lse) / (exp(lse) + exp(sink)) of the weights remains (gpt-oss; Xiao et
    al. 2024, "Efficient streaming language models with attention sinks", whose sinks are tokens).
    """
    out.mul_(torch.sigmoid(lse - sinks.to(lse.dtype)).unsqueeze(-1))  # in the precision of sums, rounded once


def check_window(
    window: int, softcap: float, only_context: bool = False, first_positions: Int32Array | None = None, rows: int = 0
) -> None:
    """Raise ValueError unless the options of attention go with each other and with the number of rows."""
    if window < 0 or not 0 <= softcap < math.inf:
        fail(f"window {window} and softcap {softcap} must be >= 0")
    if first_positions is None:
        if only_context and window:
            fail("first_positions are needed where tokens with a window see only their context")
    elif not only_context:
        fail("first_positions are for tokens that see only their context; elsewhere they follow it")
    elif tuple(first_positions.shape) != (rows,):
        fail(f"first_positions: expected {rows}, got {tuple(first_positions.shape)}")


def check_lse(lse: Tensor, q: Tensor) -> None:
    """Raise ValueError unless ``lse`` can take one sum for each token and head of ``q``."""
    if lse.shape != q.shape[:2] or lse.dtype != sum_dtype(q.dtype) or not lse.is_contiguous():
        fail(f"lse: expected contiguous {sum_dtype(q.dtype)} {tuple(q.shape[:2])}, got {lse.dtype} {tuple(lse.shape)}")


def fail(message: str) -> NoReturn:
    """Raise the ValueError of a broken contract (out of line: keeps the checks of hot calls short)."""
    raise ValueError(message)


def check_matrix(name: str, t: Tensor, rows: int, cols: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless ``t`` is [rows, cols] of ``dtype`` with contiguous rows."""
    if t.dtype != dtype:
        fail(f"{name}: dtype is {t.dtype}, expected {dtype}")
    if t.shape != (rows, cols):
        fail(f"{name}: shape is {tuple(t.shape)}, expected {(rows, cols)}")
    if cols > 1 and t.stride()[1] != 1:
        fail(f"{name}: the elements of a row must be contiguous")


def check_heads(name: str, t: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless ``t`` is [tokens, heads, D] of ``dtype`` with contiguous tokens (rows may be strided)."""
    if t.dim() != 3:
        fail(f"{name}: expected [tokens, heads, head_dim], got {tuple(t.shape)}")
    if t.dtype != dtype:
        fail(f"{name}: dtype is {t.dtype}, expected {dtype}")
    _, heads, head_dim = t.shape
    _, head_stride, element_stride = t.stride()
    if (head_dim > 1 and element_stride != 1) or (heads > 1 and head_stride != head_dim):
        fail(f"{name}: the heads of a token must be contiguous, strides are {t.stride()}")


def check_arena(arena: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless ``arena`` is one layer's contiguous KV tensor of ``dtype``."""
    if arena.dim() != 5 or arena.shape[1] != 2:
        fail(f"arena: expected [blocks, 2, kv_heads, block_size, head_dim], got {tuple(arena.shape)}")
    if arena.dtype != dtype:
        fail(f"arena: dtype is {arena.dtype}, expected {dtype}")
    if not arena.is_contiguous():
        fail("arena: must be contiguous")


def check_norm(
    x: Tensor, weight: Tensor, out: Tensor, residual: Tensor | None = None, bias: Tensor | None = None
) -> None:
    """Checks of ``rms_norm``, ``add_rms_norm`` and ``layer_norm``."""
    if x.dim() != 2:
        fail(f"x: expected [tokens, hidden], got {tuple(x.shape)}")
    rows, cols = x.shape
    check_matrix("x", x, rows, cols, x.dtype)
    check_matrix("out", out, rows, cols, x.dtype)
    if residual is not None:
        check_matrix("residual", residual, rows, cols, x.dtype)
    check_vector("weight", weight, cols, x.dtype)
    if bias is not None:
        check_vector("bias", bias, cols, x.dtype)


def check_activation(activation: Activation, up: Tensor, out: Tensor) -> bool:
    """Checks of ``activate``; whether there are gates."""
    rows, cols = out.shape
    is_gated = activation == "swiglu_clamped" or up.shape[1] != cols
    check_matrix("out", out, rows, cols, up.dtype)
    check_matrix("up", up, rows, 2 * cols if is_gated else cols, up.dtype)
    return is_gated


def check_vector(name: str, t: Tensor, size: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless ``t`` is a contiguous vector of ``size`` elements of ``dtype``."""
    if t.dtype != dtype or t.shape != (size,) or (size > 1 and t.stride() != (1,)):
        fail(f"{name}: expected a contiguous {dtype} vector of {size}, got {t.dtype} {tuple(t.shape)}")


def check_rotary_tables(cos: Tensor, sin: Tensor, dtype: torch.dtype, head_dim: int) -> None:
    """Raise ValueError unless the rotary tables go with each other and with heads of ``dtype``."""
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if cos.dim() != 2 or cos.shape[1] % 2 or cos.shape[1] > head_dim:
        fail(f"cos: shape {tuple(cos.shape)} does not go with a head of {head_dim}")
    for name, table in (("cos", cos), ("sin", sin)):
        check_matrix(name, table, cos.shape[0], cos.shape[1], table_dtype)
        if not table.is_contiguous():
            fail(f"{name}: must be contiguous")


def check_rotary(q: Tensor, k: Tensor, positions: Int32Array) -> None:
    """Checks of ``rotary``, tables aside."""
    check_heads("q", q, q.dtype)
    check_heads("k", k, q.dtype)
    tokens, _, head_dim = q.shape
    k_tokens, _, k_dim = k.shape
    if k_tokens != tokens or k_dim != head_dim:
        fail(f"k: shape {tuple(k.shape)} does not go with q {tuple(q.shape)}")
    if positions.shape != (tokens,):
        fail(f"positions: expected {tokens}, got {tuple(positions.shape)}")


def check_argmax(logits: Tensor, out: Tensor) -> None:
    """Checks of ``argmax``."""
    rows, cols = logits.shape
    check_matrix("logits", logits, rows, cols, logits.dtype)
    check_vector("out", out, rows, torch.int64)


def check_gather(weight: Tensor, ids: Tensor, out: Tensor) -> None:
    """Checks of ``gather_rows``, the ids' values aside."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or not ids.is_contiguous():
        fail(f"ids: expected a contiguous int64 vector, got {ids.dtype} {tuple(ids.shape)}")
    check_matrix("out", out, ids.shape[0], weight.shape[1], weight.dtype)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Checks of ``linear``."""
    if x.dim() != 2 or weight.dim() != 2:
        fail(f"linear: expected matrices, got {tuple(x.shape)} and {tuple(weight.shape)}")
    (rows, inner), cols = x.shape, weight.shape[0]
    check_matrix("x", x, rows, inner, x.dtype)
    check_matrix("weight", weight, cols, inner, x.dtype)
    check_matrix("out", out, rows, cols, x.dtype if out.dtype == x.dtype else sum_dtype(x.dtype))
    if bias is not None:
        check_vector("bias", bias, cols, x.dtype)
