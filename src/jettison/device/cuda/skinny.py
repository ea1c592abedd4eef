"""Products of up to sixteen rows: the matrix is read once, each program some of its rows, all of their length.

Such a product is as fast as memory. Its programs ask for their first part of the matrix while the kernel before it
runs. A sum is taken in one order whatever the batch, but not in cuBLAS's, which goes on from seventeen rows: not for
equal bits.

Not here: when it is used (``kernels``), and with what sizes (``tiles``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jettison.device.cuda.attention import early_launch
from jettison.device.cuda.readahead import ask
from jettison.device.cuda.tiles import Skinny

MOST_ROWS = 16

_ASKED = tl.constexpr(1024)
"""Elements of a row of the matrix that a program asks for before it waits: 2,048 bytes."""


def fits(x: Tensor, weight: Tensor, way: Skinny) -> bool:
    """Whether ``multiply`` takes a product: sixteen-bit, and in whole parts."""
    columns, depth = weight.shape
    is_whole = columns % way.columns == 0 and depth % way.depth == 0
    return len(x) <= MOST_ROWS and x.itemsize == 2 and is_whole and weight.is_contiguous()


def multiply(x: Tensor, weight: Tensor, out: Tensor, way: Skinny, early: bool) -> None:
    """``x`` [T, K] times ``weight`` [N, K] transposed into ``out`` [T, N], for what ``fits``."""
    columns, depth = weight.shape
    skinny_kernel[(columns // way.columns,)](
        x, weight, out, len(x), depth, x.stride(0), out.stride(0), BM=MOST_ROWS, BN=way.columns, BK=way.depth,
        THREADS=32 * way.warps, PDL=early, num_warps=way.warps, num_stages=way.stages, **early_launch(early),
    )


@triton.jit(do_not_specialize=["rows"])
def skinny_kernel(
    x, weight, out, rows, depth, x_stride, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN columns of the result a program, the matrix's parts in ascending order."""
    row = tl.arange(0, BM)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.arange(0, BK)
    there = (row < rows)[:, None]
    of_weight = weight + column.to(tl.int64)[:, None] * depth + part[None, :]
    of_x = x + row[:, None] * x_stride + part[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        lanes = tl.arange(0, THREADS)
        start_of = weight.to(tl.int64) + (tl.program_id(0) * BN + lanes).to(tl.int64) * (2 * depth)
        ask(start_of, ((lanes < BN) & (depth >= _ASKED)).to(tl.int32))
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, depth, BK):
        values = tl.load(of_x + start, mask=there, other=0.0)
        sums = tl.dot(values, tl.trans(tl.load(of_weight + start)), sums)
    tl.store(out + row[:, None] * out_stride + column[None, :], sums.to(out.dtype.element_ty), mask=there)
