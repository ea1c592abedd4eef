"""How a matrix of small integers stands for weights, where it is kept so in memory. Plain values: torch is
for types alone.

A form is what formats of quantized checkpoints have in common, and what kernels multiply by. Not here: those formats
(``quantized``), the order of the bytes in a slab (``kernels/csrc/integers.h``), and arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from jettison.types import ShardId

if TYPE_CHECKING:
    from torch import Tensor

ScaleType = Literal["float16", "bfloat16"]
Offset = Literal["none", "zero", "min"]

ROWS_TOGETHER = 32
"""Rows of a matrix that lie together: it has a multiple of them."""
_SCALE_BYTES = 2


class IntegerForm(NamedTuple):
    """Signed integers of a few bits, in groups of columns of a row that share a scale."""

    bits: int
    """4 or 8: integers q from -8 to 7, or from -128 to 127."""
    group_size: int
    """Columns that share a scale: a multiple of 32 that divides the columns."""
    scale: ScaleType
    """Type of scales s and offsets o, as stored in the checkpoint: none of them is rounded."""
    offset: Offset
    """A weight is s * q without an offset, s * (q + o) with a zero (a whole number), s * (q + 8) + o with a minimum
    (4 bits alone; GGUF's Q4_1)."""

    def fits(self, rows: int, columns: int) -> bool:
        """Whether a matrix can be kept in this form."""
        is_known = self.bits == 4 or (self.bits == 8 and self.offset != "min")
        return is_known and rows % ROWS_TOGETHER == 0 and self.group_size % 32 == 0 and columns % self.group_size == 0

    def num_bytes(self, rows: int, columns: int) -> int:
        """Of a matrix, scales and offsets included."""
        numbers = 1 if self.offset == "none" else 2
        return rows * (columns * self.bits // 8 + columns // self.group_size * numbers * _SCALE_BYTES)


class KeptSlot(NamedTuple):
    """A matrix, or a stack of such, that is kept as integers: one slot of a shard's layout."""

    shard: ShardId
    slot: str
    form: IntegerForm


class Integers(NamedTuple):
    """Rows of a matrix as integers, on their way into a slab."""

    values: Tensor
    """int8 [n, columns]"""
    scales: Tensor
    """[n, groups], of the form's type"""
    offsets: Tensor | None
    """[n, groups], of the same type; None where the form has none."""
