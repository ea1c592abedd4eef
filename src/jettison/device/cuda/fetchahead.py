"""Bytes of the next product's matrix, brought to a card's L2 cache while small kernels leave its memory idle.

At few rows a step is as long as reading its parameters takes; attention of a few rows, norms and SiLU read next to
nothing for a seventh of that time. Their launches have programs more than they need, which ask for the start of the
matrix that the product after them reads, and end. No value depends on it.

Compute capability 9 on: one instruction asks for kilobytes, and no register waits for them. Not here: how many bytes
pay (``tiles``), and which kernel is before which product (``kernels``).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Ahead(NamedTuple):
    """What a launch asks for besides its own work."""

    matrix: Tensor
    """Contiguous; its start is asked for."""
    num_bytes: int
    """0: nothing."""

    @classmethod
    def of(cls, matrix: Tensor, most_bytes: int) -> Ahead:
        """The start of a matrix, in multiples of 16 bytes."""
        return cls(matrix, min(most_bytes, matrix.nbytes) // 16 * 16)


FETCH_BYTES = tl.constexpr(4096)
"""That one instruction asks for."""


@triton.jit
def fetch_ahead(matrix, num_bytes, program, num_programs, LANES: tl.constexpr):
    """Ask for the first ``num_bytes`` of ``matrix``: this program's share. ``LANES``: threads of a program."""
    lane = program * LANES + tl.arange(0, LANES)
    start = matrix.to(tl.int64)
    for first in tl.range(0, num_bytes, num_programs * LANES * FETCH_BYTES):
        at = first + lane.to(tl.int64) * FETCH_BYTES
        size = tl.minimum(tl.maximum(num_bytes - at, 0), FETCH_BYTES).to(tl.int32)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, $2; }",
            "=r,l,r", [start + at, size], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
