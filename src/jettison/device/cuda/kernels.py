"""``Kernels`` on a GPU: Triton's for all but products, which are cuBLAS's on plain matrices.

Two kinds. ``cuda``: the fastest. ``cuda-invariant``: a row's result never depends on the batch, not in its last bit. It
needs one size of attention's tiles, and products without split sums (cublasLt with almost no workspace), which is a
setting of the whole process; ``products`` looks at whether that suffices, and multiplies itself where it does not.

The contract takes tables and lengths from the host, which costs a copy and a wait at each call. A runner copies them
once a step, as ``StepRows``, and calls ``attend`` and ``attend_rows``. These only launch, so graphs may hold them (from
the second call on: the first call with a shape of heads allocates memory for splits).

Not here: the kernels themselves, streams, graphs, and where anything lies.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
from torch import Tensor

from jettison.device.cuda import elementwise
from jettison.device.cuda.attention import Launch, Parts, attend, early_launch
from jettison.device.cuda.experts import FEW_ROWS, MANY_ROWS, SortedPairs, add_up, multiply
from jettison.device.cuda.launching import launch
from jettison.device.cuda.products import ExaminedProducts, multiply_in_order
from jettison.device.cuda.rows import StepRows, lay_out
from jettison.device.cuda.tiles import Tile, choose_tile
from jettison.device.cuda.worklist import WorkShape
from jettison.device.kernels.base import (
    check_activation,
    check_arena,
    check_argmax,
    check_gather,
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
)
from jettison.device.kernels.experts import check_experts, check_weights
from jettison.device.kernels.layer import feed_forward
from jettison.device.kernels.onednn import torch_sums
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
from jettison.device.kernels.registry import CUDA, CUDA_INVARIANT, KernelsUnavailableError
from jettison.device.model.arithmetic import Activation, RmsNorm
from jettison.device.model.integers import IntegerForm
from jettison.errors import ConfigError

if TYPE_CHECKING:
    from jettison.device.model.batch import RowOperations

_HEADS_A_PROGRAM = 4
_ACTIVATION_BLOCK = 1024
_GATHER_BLOCK = 2048


def load_fast(variant: str | None = None) -> CudaKernels:
    """``cuda`` on the process's current device. Raises KernelsUnavailableError."""
    return CudaKernels(CUDA, _current_device(CUDA))


def load_invariant(variant: str | None = None) -> CudaKernels:
    """``cuda-invariant``, likewise."""
    return CudaKernels(CUDA_INVARIANT, _current_device(CUDA_INVARIANT))


def _current_device(name: str) -> torch.device:
    if not torch.cuda.is_available():
        raise KernelsUnavailableError(f"kernels {name} need a CUDA device, and PyTorch finds none here")
    return torch.device("cuda", torch.cuda.current_device())


class CudaKernels:
    """See ``Kernels``, for tensors of one device in float32, float16 and bfloat16. For one stream at a time: splits of
    attention wait in memory of these kernels."""

    def __init__(self, name: str, device: torch.device, *, launches_early: bool | None = None) -> None:
        """``launches_early``: whether a kernel may be launched while the one before it ends (None: if the device
        supports it). Raises ConfigError for an unknown name.
        """
        if name not in (CUDA, CUDA_INVARIANT):
            raise ConfigError(f"kernels of a GPU are {CUDA} or {CUDA_INVARIANT}, not {name!r}")
        self.name = name
        self.rows_are_independent = name == CUDA_INVARIANT
        self.device = device
        self._processors, can_launch_early = 4, False
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._processors, can_launch_early = properties.multi_processor_count, properties.major >= 9
        self.launches_early = can_launch_early if launches_early is None else launches_early
        """May be changed between launches: the bits are the same."""
        self._parts: dict[tuple[int, int], Parts] = {}
        self._products: ExaminedProducts | None = None
        if self.rows_are_independent and device.type == "cuda":
            choose_invariant_products()
            self._products = ExaminedProducts(_multiply, self._multiply_in_order)

    @property
    def own_products(self) -> list[str]:
        """Shapes of products that cuBLAS does not keep independent of the batch on this card, so that Triton makes
        them: known from the first use of each shape."""
        return [] if self._products is None else self._products.own

    def warming(self, batches: Sequence[int]) -> AbstractContextManager[None]:
        """Inside, weights are not read yet, and may be filled with anything. ``batches``: ascending numbers of rows
        that steps will have."""
        return nullcontext() if self._products is None else self._products.filling(batches)

    # ------------------------------------------------------------------------------------------------- attention

    def work_shape(self, heads: int, arena: Tensor, most_tokens: int) -> WorkShape:
        """The shape of the list of work for ``attend``. ``most_tokens``: tokens of the longest chunk."""
        kv_heads, head_dim = arena.shape[2], arena.shape[4]
        group = heads // kv_heads
        tile = choose_tile(
            head_dim, arena.itemsize, group, most_tokens, is_one_size=self.rows_are_independent
        )
        return WorkShape(tile, group, kv_heads, self._programs(tile))

    def rows(
        self, heads: int, arena: Tensor, block_tables: Int32Array, query_lens: Int32Array, context_lens: Int32Array,
        num_tokens: int, only_context: bool = False, first_positions: Int32Array | None = None,
    ) -> StepRows:
        """Check a step's rows, and copy to the device what its layers need. Raises as ``Kernels.attention`` does."""
        laid = lay_out(
            partial(self.work_shape, heads, arena), arena, block_tables, query_lens, context_lens, num_tokens,
            only_context, None if first_positions is None else np.asarray(first_positions),
        )
        # The driver puts memory that is not pinned aside before a call returns, so none has to wait for the card.
        return laid.on_card({
            name: torch.from_numpy(array).to(self.device, non_blocking=True) for name, array in laid.arrays().items()
        })

    def attend(
        self, q: Tensor, arena: Tensor, rows: StepRows, out: Tensor, scale: float, lse: Tensor | None = None,
        window: int = 0, softcap: float = 0.0,
    ) -> None:
        """``Kernels.attention`` for rows that are on the device. Only launches; ``out`` may be wider than ``q``."""
        kv_heads, head_dim = arena.shape[2], arena.shape[4]
        parts = self._parts.get((kv_heads, head_dim))
        if parts is None:
            parts = self._parts[kv_heads, head_dim] = Parts(kv_heads, head_dim, self.device)
        how = Launch(
            rows.tile, self._programs(rows.tile), rows.only_context, lse, self.launches_early, window, softcap
        )
        attend(q, arena, rows.tables, rows.work, out, scale, parts, how)

    def attention(
        self, q: Tensor, arena: Tensor, block_tables: Int32Array, query_lens: Int32Array, context_lens: Int32Array,
        out: Tensor, scale: float, lse: Tensor | None = None, only_context: bool = False, window: int = 0,
        softcap: float = 0.0, first_positions: Int32Array | None = None,
    ) -> None:
        """See ``Kernels.attention``."""
        check_arena(arena, q.dtype)
        check_heads("q", q, q.dtype)
        check_heads("out", out, q.dtype)
        if q.shape != out.shape or q.shape[2] != arena.shape[4] or q.shape[1] % arena.shape[2]:
            fail(f"q {tuple(q.shape)}, out {tuple(out.shape)} do not go with arena {tuple(arena.shape)}")
        if lse is not None:
            check_lse(lse, q)
        check_window(window, softcap, only_context, first_positions, len(query_lens))
        rows = self.rows(
            q.shape[1], arena, block_tables, query_lens, context_lens, q.shape[0], only_context, first_positions
        )
        self.attend(q, arena, rows, out, scale, lse, window, softcap)

    def write_kv(
        self, k: Tensor, v: Tensor, arena: Tensor, block_tables: Int32Array, query_lens: Int32Array,
        context_lens: Int32Array,
    ) -> None:
        """See ``Kernels.write_kv``."""
        check_arena(arena, k.dtype)
        check_heads("k", k, k.dtype)
        check_heads("v", v, k.dtype)
        tokens, kv_heads, head_dim = k.shape
        if k.shape != v.shape or (kv_heads, head_dim) != (arena.shape[2], arena.shape[4]):
            fail(f"k {tuple(k.shape)}, v {tuple(v.shape)} do not go with arena {tuple(arena.shape)}")
        self.write_rows(k, v, arena, self.rows(kv_heads, arena, block_tables, query_lens, context_lens, tokens))

    def write_rows(self, k: Tensor, v: Tensor, arena: Tensor, rows: StepRows) -> None:
        """``write_kv`` for rows that are on the device. Only launches."""
        tokens, kv_heads, head_dim = k.shape
        elementwise.write_kv_kernel[(tokens, kv_heads)](
            k, v, arena, rows.slots, k.stride(0), v.stride(0), KVH=kv_heads, D=head_dim,
            DP=triton.next_power_of_2(head_dim), BS=arena.shape[3], PDL=self.launches_early, num_warps=1,
            **self._launch(),
        )

    def row_operations(self, rows: StepRows) -> RowOperations:
        """Single operations for rows that are on the device."""
        return _CardRowOperations(self, rows)

    # ----------------------------------------------------------------------------------------------- layers

    def attend_layer(
        self, weights: LayerWeights, buffers: Activations, constants: LayerConstants, block_tables: Int32Array,
        query_lens: Int32Array, context_lens: Int32Array, positions: Int32Array,
    ) -> None:
        """See ``Kernels.attend_layer``."""
        heads, tokens = buffers.q.shape[1], buffers.q.shape[0]
        rows = self.rows(heads, weights.arena, block_tables, query_lens, context_lens, tokens)
        self.attend_rows(weights, buffers, constants, rows)

    def attend_rows(
        self, weights: LayerWeights, buffers: Activations, constants: LayerConstants, rows: StepRows
    ) -> None:
        """The first half of a layer, for rows that are on the device: four launches."""
        self.linear(buffers.x, weights.qkv_weight, None, buffers.qkv)
        self.prepare_and_write(weights, buffers, constants, rows)
        self.attend(
            buffers.q, weights.arena, rows, buffers.attention, constants.scale, None, constants.window,
            constants.softcap,
        )  # fmt: skip
        self.linear(buffers.attention_flat, weights.o_weight, weights.o_bias, buffers.x)

    def prepare_and_write(
        self, weights: LayerWeights, buffers: Activations, constants: LayerConstants, rows: StepRows
    ) -> None:
        """Bias, ``layer.prepare_heads`` and ``write_kv`` in one launch: same bits. ``buffers.qkv`` has no bias yet, and
        its keys stay as they are."""
        arena, q = weights.arena, buffers.q
        _, _, kv_heads, block_size, head_dim = arena.shape
        has_norm = weights.q_norm is not None and weights.k_norm is not None
        gains = (weights.q_norm, weights.k_norm) if has_norm else (buffers.x, buffers.x)
        bias = weights.qkv_bias
        heads = q.shape[1] + 2 * kv_heads
        arguments = (
            buffers.qkv, buffers.x if bias is None else bias, arena, *gains, constants.cos, constants.sin,
            rows.positions, rows.slots, buffers.qkv.stride(0), constants.cos.shape[0], constants.eps,
        )  # fmt: skip
        compiled_for = {
            "HQ": q.shape[1], "KVH": kv_heads, "D": head_dim, "DP": triton.next_power_of_2(head_dim),
            "R": constants.cos.shape[1], "BS": block_size, "HB": _HEADS_A_PROGRAM, "HAS_BIAS": bias is not None,
            "HAS_NORM": has_norm, "KIND": constants.norm, "ROTATES": True, "WRITES": True, "PDL": self.launches_early,
        }  # fmt: skip
        grid = q.shape[0], triton.cdiv(heads, _HEADS_A_PROGRAM)
        launch(elementwise.heads_kernel, grid, arguments, compiled_for, num_warps=2, **self._launch())

    def feed_forward(self, weights: LayerWeights, buffers: Activations, constants: LayerConstants) -> None:
        """See ``Kernels.feed_forward``: four launches."""
        feed_forward(self, weights, buffers, constants)

    def experts(
        self, x: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertWeights, activation: Activation,
        buffers: RoutedBuffers, out: Tensor,
    ) -> None:
        """See ``Kernels.experts``. Only launches: an unknown expert is not told, and adds nothing."""
        check_weights(weights)
        check_experts(x, chosen, shares, weights, buffers, out)
        (tokens, num_chosen), number = chosen.shape, weights.down.shape[0]
        if tokens == 0:
            return
        pairs = SortedPairs.of(chosen, number)
        is_few = not self.rows_are_independent and tokens * num_chosen <= FEW_ROWS * number
        rows = FEW_ROWS if is_few else MANY_ROWS
        multiply(x, pairs, num_chosen, weights.gate_up.data, weights.gate_up_bias, buffers.gate_up, rows)
        self.activate(activation, buffers.gate_up, buffers.activated)
        own = pairs._replace(order=torch.arange(tokens * num_chosen, device=x.device))
        multiply(buffers.activated, own, 1, weights.down.data, weights.down_bias, buffers.each, rows)
        add_up(buffers.each, pairs, shares, out)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor) -> None:
        """See ``Kernels.linear``. The bias is added to the product as it is in ``out``."""
        plain = _plain(weight)
        check_linear(x, plain, bias, out)
        if self._products is None:
            _multiply(x, plain, out)
        else:
            self._products.multiply(x, plain, out)
        if bias is not None:
            out.add_(bias)

    def _multiply_in_order(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        multiply_in_order(x, weight, out, self.launches_early)

    # ------------------------------------------------------------------------------------------ element by element

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, kind: RmsNorm = "rms") -> None:
        """See ``Kernels.rms_norm``."""
        check_norm(x, weight, out)
        self._norm(x, x, weight, eps, out, kind, adds=False)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See ``Kernels.add_rms_norm``."""
        check_norm(x, weight, out, residual)
        self._norm(x, residual, weight, eps, out, "rms", adds=True)

    def _norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, kind: RmsNorm, *, adds: bool
    ) -> None:
        arguments = (x, residual, weight, out, x.stride(0), residual.stride(0), out.stride(0), x.shape[1], eps)
        self._launch_rows(elementwise.norm_kernel, x, arguments, {"ADD": adds, "KIND": kind})

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
        """See ``Kernels.layer_norm``."""
        check_norm(x, weight, out, bias=bias)
        arguments = (x, weight, x if bias is None else bias, out, x.stride(0), out.stride(0), x.shape[1], eps)
        self._launch_rows(elementwise.layer_norm_kernel, x, arguments, {"HAS_BIAS": bias is not None})

    def _launch_rows(self, kernel: Any, x: Tensor, arguments: tuple[Any, ...], kind: dict[str, Any]) -> None:
        """A program for each row of ``x``, which has all of it at once."""
        block = triton.next_power_of_2(x.shape[1])
        constants = kind | {"BLOCK": block, "PDL": self.launches_early}
        warps = min(8, max(1, block // 256))
        launch(kernel, (x.shape[0],), arguments, constants, num_warps=warps, **self._launch())

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Int32Array) -> None:
        """See ``Kernels.rotary``. Positions on the device are not checked: positions outside the tables rotate
        nothing."""
        check_rotary(q, k, positions)
        check_rotary_tables(cos, sin, q.dtype, q.shape[2])
        index = torch.as_tensor(positions)
        if not index.is_cuda and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < cos.shape[0]:
            raise IndexError(f"a position lies outside the {cos.shape[0]} of the rotary tables")
        index = index.to(torch.int32).to(self.device, non_blocking=True)
        for heads in (q, k):
            self._heads(heads, cos=cos, sin=sin, positions=index)

    def head_rms_norm(self, x: Tensor, weight: Tensor, eps: float, kind: RmsNorm = "rms") -> None:
        """See ``Kernels.head_rms_norm``."""
        check_heads("x", x, x.dtype)
        check_vector("weight", weight, x.shape[2], x.dtype)
        self._heads(x, gains=weight, eps=eps, kind=kind)

    def _heads(
        self, x: Tensor, *, gains: Tensor | None = None, eps: float = 0.0, kind: RmsNorm = "rms",
        cos: Tensor | None = None, sin: Tensor | None = None, positions: Tensor | None = None,
    ) -> None:
        """Norm or rotation of heads in place."""
        tokens, heads, head_dim = x.shape
        gain = x if gains is None else gains
        num_positions, rotary_dim = (0, 0) if cos is None else cos.shape
        elementwise.heads_kernel[(tokens, triton.cdiv(heads, _HEADS_A_PROGRAM))](
            x, x, x, gain, gain, cos, sin, positions, None, x.stride(0), num_positions, eps,
            HQ=heads, KVH=0, D=head_dim, DP=triton.next_power_of_2(head_dim), R=rotary_dim, BS=1,
            HB=_HEADS_A_PROGRAM, HAS_BIAS=False, HAS_NORM=gains is not None, KIND=kind, ROTATES=cos is not None,
            WRITES=False, PDL=self.launches_early, num_warps=2, **self._launch(),
        )

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See ``Kernels.silu_mul``."""
        rows, cols = out.shape
        check_matrix("out", out, rows, cols, gate_up.dtype)
        check_matrix("gate_up", gate_up, rows, 2 * cols, gate_up.dtype)
        self._activate("silu", gate_up, out, is_gated=True)

    def activate(self, activation: Activation, up: Tensor, out: Tensor) -> None:
        """See ``Kernels.activate``."""
        self._activate(activation, up, out, is_gated=check_activation(activation, up, out))

    def _activate(self, activation: Activation, up: Tensor, out: Tensor, *, is_gated: bool) -> None:
        rows, cols = out.shape
        launch(
            elementwise.activation_kernel, (rows, triton.cdiv(cols, _ACTIVATION_BLOCK)),
            (up, out, up.stride(0), out.stride(0), cols),
            {"KIND": activation, "IS_GATED": is_gated, "BLOCK": _ACTIVATION_BLOCK, "PDL": self.launches_early},
            num_warps=4, **self._launch(),
        )

    def gather_rows(self, weight: Weight, ids: Tensor, out: Tensor) -> None:
        """See ``Kernels.gather_rows``. Ids on the device are not checked: a missing row is NaN."""
        table = _plain(weight)
        check_gather(table, ids, out)
        if not ids.is_cuda and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < table.shape[0]:
            raise IndexError(f"a row lies outside the {table.shape[0]} of the matrix")
        elementwise.gather_kernel[(len(ids), triton.cdiv(table.shape[1], _GATHER_BLOCK))](
            table, ids.to(self.device), out, table.shape[0], table.shape[1], out.stride(0), BLOCK=_GATHER_BLOCK,
            PDL=self.launches_early, num_warps=4, **self._launch(),
        )

    def argmax(self, logits: Tensor, out: Tensor) -> None:
        """See ``Kernels.argmax``. Only launches."""
        check_argmax(logits, out)
        rows, vocab = logits.shape
        num_parts = triton.cdiv(vocab, elementwise.ARGMAX_CHUNK)
        best = torch.empty(rows, num_parts, dtype=torch.float32, device=self.device)
        at_best = torch.empty(rows, num_parts, dtype=torch.int32, device=self.device)
        elementwise.argmax_parts_kernel[(rows, num_parts)](
            logits, best, at_best, logits.stride(0), vocab, num_parts, BLOCK=elementwise.ARGMAX_CHUNK,
            PDL=self.launches_early, num_warps=4, **self._launch(),
        )
        elementwise.argmax_kernel[(rows,)](
            best, at_best, out, num_parts, BLOCK=triton.next_power_of_2(num_parts), PDL=self.launches_early,
            num_warps=1, **self._launch(),
        )

    # ----------------------------------------------------------------------------------------------------- packing

    def packs(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """See ``Kernels.packs``. Never."""
        return False

    def pack_rows(self, rows: Tensor, first: int, packed: PackedMatrix) -> None:
        """See ``Kernels.pack_rows``. Raises ValueError."""
        _plain(packed)

    def keeps(self, form: IntegerForm, shape: tuple[int, int], dtype: torch.dtype) -> bool:
        """See ``Kernels.keeps``. Never."""
        return False

    def pack_integers(
        self, integers: Tensor, scales: Tensor, offsets: Tensor | None, first: int, matrix: IntegerMatrix
    ) -> None:
        """See ``Kernels.pack_integers``. Raises ValueError."""
        _plain(matrix)

    def _programs(self, tile: Tile) -> int:
        return tile.programs * self._processors

    def _launch(self) -> dict[str, bool]:
        return early_launch(self.launches_early)


class _CardRowOperations:
    """They only launch, so graphs may hold them. Rows beyond the step's compute on whatever lies there, and are not
    stored."""

    def __init__(self, kernels: CudaKernels, rows: StepRows) -> None:
        self._kernels = kernels
        self._rows = rows

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See ``RowOperations``."""
        self._kernels.rotary(q, k, cos, sin, self._rows.positions)

    def store(self, k: Tensor, v: Tensor, arena: Tensor) -> None:
        """See ``RowOperations``."""
        self._kernels.write_rows(k, v, arena, self._rows)

    def attend(
        self, q: Tensor, arena: Tensor, out: Tensor, scale: float, lse: Tensor | None, window: int, softcap: float
    ) -> None:
        """See ``RowOperations``."""
        self._kernels.attend(q, arena, self._rows, out, scale, lse, window, softcap)

    def positions(self) -> Tensor:
        """See ``RowOperations``."""
        return self._rows.positions


def choose_invariant_products() -> None:
    """Make this process's products sum every row in one order, whatever the number of rows.

    It must precede the process's first product, as cuBLAS reads its workspace's size once.
    """
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # PyTorch may share this workspace with cublasLt
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (False, False)  # and no split of k
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.preferred_blas_library("cublaslt")


def _multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """See ``products.Multiply``: cuBLAS's, on a card."""
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch_sums(x, weight, out)


def _plain(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else fail("these kernels have neither packed forms nor integers")
