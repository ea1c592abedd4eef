"""A layer's experts in Triton: products of sorted pairs with their experts' matrices, and each token's sum.

Pairs of a token and an expert are sorted by expert, then by token. How many an expert has is read from memory,
so a graph holds whatever is chosen. An output is one chain of sums over ascending k, and a token's sum is in the order
of its choice: with tiles of one size no bit depends on other tokens.

Not here: routing, checks of arguments, and what lies between the two products (``kernels``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, DEPTH, SUM_BLOCK = 64, 64, 1024
"""Outputs and terms of a sum that a program of a product has at once; outputs of a program that adds up."""
FEW_ROWS, MANY_ROWS = 16, 64
"""Pairs of a tile. Where bits must be equal it is always the second."""


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x, row_of, weight, bias, out, starts, num_rows, n, k, per_row,
    NUMBER: tl.constexpr, EP: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out[i] = weight[e] x[row_of[i] // per_row] + bias[e]`` for the pairs i from ``starts[e]`` to ``starts[e + 1]``.

    ``weight``: [NUMBER, n, k]; ``out``: [num_rows, n]. A program has one tile of BM pairs of one expert, the tiles of
    all experts counted through, and BN outputs; programs beyond the last tile do nothing.
    """
    tile = tl.program_id(0)
    expert = tl.arange(0, EP)
    start = tl.load(starts + expert, mask=expert < NUMBER, other=num_rows)
    end = tl.load(starts + expert + 1, mask=expert < NUMBER, other=num_rows)
    tiles = (end - start + BM - 1) // BM
    before = tl.cumsum(tiles, 0) - tiles
    is_mine = (tile >= before) & (tile < before + tiles)
    if tl.sum(is_mine.to(tl.int32), 0) > 0:
        mine = tl.sum(tl.where(is_mine, expert, 0), 0).to(tl.int64)
        first = tl.sum(tl.where(is_mine, start + (tile - before) * BM, 0), 0)
        last = tl.sum(tl.where(is_mine, end, 0), 0)
        rows = first + tl.arange(0, BM)
        is_row = rows < last
        source = tl.load(row_of + rows, mask=is_row, other=0).to(tl.int64) // per_row
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        is_column = columns < n
        depth = tl.arange(0, BK)
        left = x + source[:, None] * k + depth[None, :]
        right = weight + mine * n * k + columns[None, :].to(tl.int64) * k + depth[:, None]
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for at in range(0, k, BK):
            inside = depth + at < k
            a = tl.load(left + at, mask=is_row[:, None] & inside[None, :], other=0.0)
            b = tl.load(right + at, mask=is_column[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if HAS_BIAS:
            acc += tl.load(bias + mine * n + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        to = out + rows[:, None].to(tl.int64) * n + columns[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def sum_kernel(each, places, shares, out, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """``out[t] = sum of shares[t, j] * each[places[t, j]]``, in the order of j."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(CHOSEN):
        place = tl.load(places + token * CHOSEN + j).to(tl.int64)
        share = tl.load(shares + token * CHOSEN + j)
        made = tl.load(each + place * width + dims, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(made, share, total)
    tl.store(out + token * width + dims, total.to(out.dtype.element_ty), mask=inside)


class SortedPairs(NamedTuple):
    """The pairs of a step's tokens and their experts. All on the device."""

    order: Tensor
    """[T * k]: which pair (token * k + place in its choice) lies where."""
    places: Tensor
    """[T * k]: where a pair lies."""
    starts: Tensor
    """int32 [E + 1]: where each expert's pairs begin."""

    @classmethod
    def of(cls, chosen: Tensor, number: int) -> SortedPairs:
        """Only launches. ``chosen``: [T, k]."""
        of_pair = chosen.reshape(-1)
        of_place, order = of_pair.sort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        experts = torch.arange(number + 1, device=order.device)
        return cls(order, places, torch.searchsorted(of_place, experts, out_int32=True))


def multiply(
    x: Tensor, pairs: SortedPairs, per_row: int, weight: Tensor, bias: Tensor | None, out: Tensor, most_rows: int
) -> None:
    """One product of every pair. ``x``: a row for each token (``per_row`` pairs of a row), or (1) for each place, in
    which case ``pairs.order`` counts places. ``most_rows``: of a tile."""
    number, n, k = weight.shape
    num_rows = out.shape[0]
    num_tiles = min(number, num_rows) + num_rows // most_rows  # no choice makes more of them
    product_kernel[(num_tiles, triton.cdiv(n, COLUMNS))](
        x, pairs.order, weight, x if bias is None else bias, out, pairs.starts, num_rows, n, k, per_row,
        NUMBER=number, EP=triton.next_power_of_2(number), HAS_BIAS=bias is not None, BM=most_rows, BN=COLUMNS,
        BK=DEPTH, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4,
        num_stages=2 if x.dtype == torch.float32 else 3,
    )  # fmt: skip


def add_up(each: Tensor, pairs: SortedPairs, shares: Tensor, out: Tensor) -> None:
    """Each token's sum. ``shares``: float32 [T, k]."""
    tokens, width = out.shape
    sum_kernel[(tokens, triton.cdiv(width, SUM_BLOCK))](
        each, pairs.places, shares, out, width, CHOSEN=shares.shape[1], BLOCK=SUM_BLOCK, num_warps=4
    )
