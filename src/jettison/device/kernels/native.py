"""The C kernels behind the ``Kernels`` protocol, called through ctypes (which releases the GIL).

Here: checking arguments and passing pointers. Not here: the library (``library``), and any arithmetic. The contents of
block tables (bounds of block ids, lengths) are checked in C, before anything is written; shapes, strides and dtypes are
checked here.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor

from jettison.device.kernels.abi import RMS_NORM_CODES, form_struct, functions_of, int64s, raise_error
from jettison.device.kernels.addresses import StepRows, TableRows, pointer, positions_pointer
from jettison.device.kernels.base import (
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
from jettison.device.kernels.bound import DTYPE_CODES, bind_buffers, bind_constants, bind_experts, bind_layer
from jettison.device.kernels.experts import activate, check_experts, pass_experts
from jettison.device.kernels.integers import check_gather_integers, check_linear_integers, check_pack_integers
from jettison.device.kernels.library import open_library, working_variant
from jettison.device.kernels.norms import layer_normalized
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

_PACKED_DTYPES = (torch.float32, torch.bfloat16)
_PACKED_STEP = 32
"""Elements of K that are stored together in a packed matrix; a matrix with another K stays plain."""


def load_native(variant: str | None = None) -> NativeKernels:
    """The kernels of ``variant``, or of the best that works: see ``library.working_variant``. Raises
    KernelsUnavailableError."""
    return NativeKernels(open_library(), working_variant(variant))


class NativeKernels:
    """``Kernels`` in C; see ``base.Kernels`` for the contract.

    Threads follow ``torch.get_num_threads()``, of a pool that all kernels of a process share; results do not depend on
    them.
    Working space is per thread and bounded: about ``64 * K`` accumulators for ``linear``, 200 KiB for ``attention``.
    """

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        self.name = f"native-{variant}"
        self._functions = functions_of(library, variant)
        self._write_kv = self._functions["write_kv"]
        self._attention = self._functions["attention"]
        self._linear = self._functions["linear"]
        self._linear_slab = self._functions["linear_slab"]
        self._rms_norm = self._functions["rms_norm"]
        self._add_rms_norm = self._functions["add_rms_norm"]
        self._head_rms_norm = self._functions["head_rms_norm"]
        self._rotary = self._functions["rotary"]
        self._silu_mul = self._functions["silu_mul"]
        self._attend_layer = self._functions["attend_layer"]
        self._feed_forward = self._functions["feed_forward"]
        self._last_rows = threading.local()
        self._tables: tuple[Any, ...] | None = None

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
        dtype = k.dtype
        check_arena(arena, dtype)
        check_heads("k", k, dtype)
        check_heads("v", v, dtype)
        num_blocks, _, num_kv_heads, block_size, head_dim = arena.shape
        tokens = k.shape[0]
        if k.shape != (tokens, num_kv_heads, head_dim) or v.shape != k.shape:
            fail(f"k {tuple(k.shape)}, v {tuple(v.shape)} do not go with arena {tuple(arena.shape)}")
        code = self._write_kv(
            DTYPE_CODES[dtype], k.data_ptr(), k.stride()[0], v.data_ptr(), v.stride()[0],
            arena.data_ptr(), num_blocks, num_kv_heads, block_size, head_dim,
            *self._rows(block_tables, query_lens, context_lens), tokens,
        )  # fmt: skip
        if code:
            raise_error(code)

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
        dtype = q.dtype
        check_arena(arena, dtype)
        check_heads("q", q, dtype)
        check_heads("out", out, dtype)
        num_blocks, _, num_kv_heads, block_size, head_dim = arena.shape
        tokens, num_heads, query_dim = q.shape
        if out.shape != q.shape or query_dim != head_dim or num_heads % num_kv_heads:
            fail(f"q {tuple(q.shape)}, out {tuple(out.shape)} do not go with arena {tuple(arena.shape)}")
        if lse is not None:
            check_lse(lse, q)
        if window or softcap or first_positions is not None:
            check_window(window, softcap, only_context, first_positions, query_lens.shape[0])
        code = self._attention(
            DTYPE_CODES[dtype], q.data_ptr(), q.stride()[0], num_heads,
            arena.data_ptr(), num_blocks, num_kv_heads, block_size, head_dim,
            *self._rows(block_tables, query_lens, context_lens), tokens,
            out.data_ptr(), out.stride()[0], None if lse is None else lse.data_ptr(), only_context,
            None if first_positions is None else pointer(first_positions), window, softcap, scale,
            torch.get_num_threads(),
        )  # fmt: skip
        if code:
            raise_error(code)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, kind: RmsNorm = "rms") -> None:
        """See ``Kernels.rms_norm``."""
        check_norm(x, weight, out)
        rows, cols = x.shape
        self._rms_norm(
            DTYPE_CODES[x.dtype], x.data_ptr(), x.stride()[0], weight.data_ptr(), eps, out.data_ptr(), out.stride()[0],
            rows, cols, RMS_NORM_CODES[kind],
        )  # fmt: skip

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
        """See ``Kernels.layer_norm``."""
        check_norm(x, weight, out, bias=bias)
        out.copy_(layer_normalized(x, weight, bias, eps))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See ``Kernels.add_rms_norm``."""
        check_norm(x, weight, out, residual)
        rows, cols = x.shape
        self._add_rms_norm(
            DTYPE_CODES[x.dtype], x.data_ptr(), x.stride()[0], residual.data_ptr(), residual.stride()[0],
            weight.data_ptr(), eps, out.data_ptr(), out.stride()[0], rows, cols, torch.get_num_threads(),
        )  # fmt: skip

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Int32Array) -> None:
        """See ``Kernels.rotary``."""
        check_rotary(q, k, positions)
        dtype = q.dtype
        tokens, num_heads, head_dim = q.shape
        tables = self._tables
        if tables is None or tables[0] is not cos or tables[1] is not sin or tables[2] != (dtype, head_dim):
            check_rotary_tables(cos, sin, dtype, head_dim)
            tables = self._tables = (cos, sin, (dtype, head_dim), (cos.data_ptr(), sin.data_ptr()), tuple(cos.shape))
        max_positions, rotary_dim = tables[4]
        address, wide = positions_pointer(positions)
        code = self._rotary(
            DTYPE_CODES[dtype], q.data_ptr(), q.stride()[0], num_heads, k.data_ptr(), k.stride()[0], k.shape[1],
            *tables[3], address, wide, tokens, head_dim, rotary_dim, max_positions,
        )  # fmt: skip
        if code:
            raise_error(code)

    def head_rms_norm(self, x: Tensor, weight: Tensor, eps: float, kind: RmsNorm = "rms") -> None:
        """See ``Kernels.head_rms_norm``."""
        check_heads("x", x, x.dtype)
        tokens, heads, head_dim = x.shape
        check_vector("weight", weight, head_dim, x.dtype)
        self._head_rms_norm(
            DTYPE_CODES[x.dtype], x.data_ptr(), x.stride()[0], weight.data_ptr(), eps, tokens, heads, head_dim,
            RMS_NORM_CODES[kind],
        )  # fmt: skip

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See ``Kernels.silu_mul``."""
        rows, cols = out.shape
        dtype = out.dtype
        check_matrix("gate_up", gate_up, rows, 2 * cols, dtype)
        check_matrix("out", out, rows, cols, dtype)
        self._silu_mul(
            DTYPE_CODES[dtype], gate_up.data_ptr(), gate_up.stride()[0], out.data_ptr(), out.stride()[0], rows, cols
        )

    def activate(self, activation: Activation, up: Tensor, out: Tensor) -> None:
        """See ``Kernels.activate``."""
        activate(self, activation, up, out)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor) -> None:
        """See ``Kernels.linear``."""
        if not isinstance(weight, Tensor):
            self._multiply_slab(x, weight, bias, out)
            return
        check_linear(x, weight, bias, out)
        rows, inner = x.shape
        code = self._linear(
            DTYPE_CODES[x.dtype], x.data_ptr(), x.stride()[0], weight.data_ptr(), weight.stride()[0],
            None if bias is None else bias.data_ptr(), out.data_ptr(), out.stride()[0], out.dtype != x.dtype,
            rows, weight.shape[0], inner, torch.get_num_threads(),
        )  # fmt: skip
        if code:
            raise_error(code)

    def _multiply_slab(
        self, x: Tensor, weight: PackedMatrix | IntegerMatrix, bias: Tensor | None, out: Tensor
    ) -> None:
        """By a matrix whose elements lie in an order of their own."""
        form = None
        if isinstance(weight, IntegerMatrix):
            check_linear_integers(x, weight, bias, out)
            _check_keeps(x)
            form = form_struct(weight.form)
        else:
            check_linear(x, weight.data, bias, out)
        code = self._linear_slab(
            DTYPE_CODES[x.dtype], form, x.data_ptr(), x.stride()[0], weight.data.data_ptr(),
            None if bias is None else bias.data_ptr(), out.data_ptr(), out.stride()[0], out.dtype != x.dtype,
            x.shape[0], out.shape[1], x.shape[1], torch.get_num_threads(),
        )  # fmt: skip
        if code:
            raise_error(code)

    def attend_layer(
        self, weights: LayerWeights, buffers: Activations, constants: LayerConstants, block_tables: Int32Array,
        query_lens: Int32Array, context_lens: Int32Array, positions: Int32Array,
    ) -> None:
        """See ``Kernels.attend_layer``."""
        if positions.shape[0] != buffers.x.shape[0]:
            fail(f"positions: expected {buffers.x.shape[0]}, got {positions.shape[0]}")
        bound, shape = weights.bound or bind_layer(weights), buffers.bound or bind_buffers(buffers, weights)
        code = self._attend_layer(
            bound.dtype, shape, bound.addresses, constants.bound or bind_constants(constants, weights),
            self._batch(block_tables, query_lens, context_lens, positions), torch.get_num_threads(),
        )
        if code:
            raise_error(code)

    def feed_forward(self, weights: LayerWeights, buffers: Activations, constants: LayerConstants) -> None:
        """See ``Kernels.feed_forward``."""
        bound, shape = weights.bound or bind_layer(weights), buffers.bound or bind_buffers(buffers, weights)
        code = self._feed_forward(
            bound.dtype, shape, bound.addresses, constants.eps, buffers.x.shape[0], torch.get_num_threads()
        )
        if code:
            raise_error(code)

    def experts(
        self, x: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertWeights, activation: Activation,
        buffers: RoutedBuffers, out: Tensor,
    ) -> None:
        """See ``Kernels.experts``. In one call where matrices are packed, or kept as integers."""
        is_slab = all(stack.is_packed or stack.form is not None for stack in (weights.gate_up, weights.down))
        if not is_slab or activation not in ("silu", "swiglu_clamped") or chosen.shape[0] == 0:
            pass_experts(self, x, chosen, shares, weights, activation, buffers, out)
            return
        check_experts(x, chosen, shares, weights, buffers, out)
        addresses, sizes, forms = weights.bound or bind_experts(weights)
        tokens, num_chosen = chosen.shape
        space = torch.empty(sizes[0] + 1 + 5 * tokens * num_chosen, dtype=torch.int32)
        shape = int64s(
            x.data_ptr(), out.data_ptr(), buffers.gate_up.data_ptr(), buffers.activated.data_ptr(),
            buffers.each.data_ptr(), *addresses, chosen.data_ptr(), shares.data_ptr(), space.data_ptr(),
            tokens, num_chosen, *sizes, activation == "swiglu_clamped", *forms,
        )
        code = self._functions["experts"](DTYPE_CODES[x.dtype], shape, torch.get_num_threads())
        if code:
            raise_error(code)

    def argmax(self, logits: Tensor, out: Tensor) -> None:
        """See ``Kernels.argmax``."""
        check_argmax(logits, out)
        self._functions["argmax"](
            DTYPE_CODES[logits.dtype], logits.data_ptr(), logits.stride()[0], *logits.shape, out.data_ptr(),
            torch.get_num_threads(),
        )

    def packs(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """See ``Kernels.packs``."""
        return dtype in _PACKED_DTYPES and len(shape) == 2 and shape[1] % _PACKED_STEP == 0

    def pack_rows(self, rows: Tensor, first: int, packed: PackedMatrix) -> None:
        """See ``Kernels.pack_rows``."""
        num_rows, inner = packed.data.shape
        check_matrix("rows", rows, rows.shape[0], inner, packed.data.dtype)
        if first < 0 or first + rows.shape[0] > num_rows:
            fail(f"rows {first} to {first + rows.shape[0]} are not in a matrix of {num_rows}")
        code = self._functions["pack_rows"](
            DTYPE_CODES[rows.dtype], rows.data_ptr(), rows.stride()[0], first, rows.shape[0], num_rows, inner,
            packed.data.data_ptr(),
        )  # fmt: skip
        if code:
            raise_error(code)

    def keeps(self, form: IntegerForm, shape: tuple[int, int], dtype: torch.dtype) -> bool:
        """See ``Kernels.keeps``."""
        return dtype in _PACKED_DTYPES and form.fits(*shape)

    def pack_integers(
        self, integers: Tensor, scales: Tensor, offsets: Tensor | None, first: int, matrix: IntegerMatrix
    ) -> None:
        """See ``Kernels.pack_integers``."""
        check_pack_integers(integers, scales, offsets, first, matrix)
        of_offsets = (None, 0) if offsets is None else (offsets.data_ptr(), offsets.stride()[0])
        self._functions["pack_integers"](
            form_struct(matrix.form), integers.data_ptr(), scales.data_ptr(), scales.stride()[0], *of_offsets,
            first, len(integers), matrix.columns, matrix.data.data_ptr(),
        )  # fmt: skip

    def gather_rows(self, weight: Weight, ids: Tensor, out: Tensor) -> None:
        """See ``Kernels.gather_rows``."""
        if isinstance(weight, IntegerMatrix):
            check_gather_integers(weight, ids, out)
            _check_keeps(out)
            code = self._functions["gather_integers"](
                DTYPE_CODES[out.dtype], form_struct(weight.form), weight.data.data_ptr(), weight.rows, weight.columns,
                ids.data_ptr(), ids.shape[0], out.data_ptr(), out.stride()[0],
            )  # fmt: skip
            if code:
                raise_error(code)
            return
        if not isinstance(weight, PackedMatrix):
            torch.index_select(weight, 0, ids, out=out)
            return
        check_gather(weight.data, ids, out)
        code = self._functions["gather_rows"](
            DTYPE_CODES[out.dtype], weight.data.data_ptr(), *weight.data.shape, ids.data_ptr(), ids.shape[0],
            out.data_ptr(), out.stride()[0],
        )  # fmt: skip
        if code:
            raise_error(code)

    def _batch(
        self, tables: Int32Array, query_lens: Int32Array, context_lens: Int32Array, positions: Int32Array
    ) -> ctypes.Array[ctypes.c_int64]:
        """``BatchRows`` of kernels.c, kept for the step's next layer."""
        last: StepRows | None = getattr(self._last_rows, "batch", None)
        if last is not None and last.positions is positions and last.tables is tables:
            return last.addresses
        arguments = self._rows(tables, query_lens, context_lens)
        address, is_wide = positions_pointer(positions)
        if is_wide or len(positions.shape) != 1:
            fail("positions: expected an int32 vector")
        addresses = int64s(*arguments, address, positions.shape[0])
        # It keeps the arrays that it points to alive.
        self._last_rows.batch = StepRows(tables, positions, (query_lens, context_lens), addresses)
        return addresses

    def _rows(self, tables: Int32Array, query_lens: Int32Array, context_lens: Int32Array) -> tuple[int, ...]:
        """Arguments for a step's rows; kept for the next call, as every layer of a step passes the same arrays."""
        last: TableRows | None = getattr(self._last_rows, "rows", None)
        if last is not None:
            keys = last.keys
            if keys[0] is tables and keys[1] is query_lens and keys[2] is context_lens:
                return last.arguments
        rows = self._last_rows.rows = TableRows(tables, query_lens, context_lens)
        return rows.arguments


def _check_keeps(activations: Tensor) -> None:
    if activations.dtype not in _PACKED_DTYPES:
        fail(f"there are no products of {activations.dtype} with integers")
