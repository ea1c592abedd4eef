"""Sizes of attention's tiles, as measured on a card (docs/gpu.md), with notes on which may be changed freely.

``SPLIT`` and ``POSITIONS`` decide the groups of a token's sums and so their bits: each has one value for all shapes and
batches. Stages and programs change no bit. Rows and warps decide the instructions that multiply and the threads that
add, and may change the last bit of a sum.

Not here: kernels, and anything that asks a device.
"""

from __future__ import annotations

from typing import NamedTuple

SPLIT = 512
"""Positions of one split: their sums are made together, then merged with the earlier ones. Changes bits.

Decode attention of 1,024 positions on an H200, in microseconds with 512, 256 and 128: 42.4, 44.7 and 48.1 for 64 rows,
155, 159 and 177 for 256, 14.3, 10.5 and 9.9 for one.
"""

POSITIONS = 64
"""Positions that a program processes together. Changes bits; a divisor of ``SPLIT``."""

ONE_SIZE = 64
"""Rows of every tile where bits must be equal: one compiled kernel, so one way of multiplying and adding."""

PART_ROWS = 16384
"""Capacity for rows of unmerged sums, for each KV head: 2,340 splits of one token with seven heads."""

assert SPLIT % POSITIONS == 0


class Tile(NamedTuple):
    """The work of one program in a launch of attention."""

    rows: int
    """Rows of queries: tokens of one sequence, each with the query heads that share a KV head. A power of two."""
    warps: int
    stages: int
    """Loads in flight, including the one in use."""
    programs: int
    """Programs for each multiprocessor."""

    def tokens(self, group: int) -> int:
        """Tokens of one sequence that a tile holds."""
        return self.rows // group


_NARROW = {16: Tile(16, 4, 3, 2), 64: Tile(64, 4, 3, 2), 128: Tile(128, 8, 3, 1)}
_WIDE = {16: Tile(16, 4, 2, 1), 64: Tile(64, 8, 2, 1)}
_FLOAT32 = {16: Tile(16, 4, 2, 1), 64: Tile(64, 8, 1, 1)}
"""Float32 is multiplied without tensor cores: exact, for comparisons."""


def tiles_for(head_dim: int, itemsize: int) -> dict[int, Tile]:
    """Rows -> tile, ascending, for heads of this dimension and item size."""
    if itemsize > 2:
        return _FLOAT32
    return _NARROW if head_dim <= 128 else _WIDE


def choose_tile(head_dim: int, itemsize: int, group: int, most_tokens: int, *, is_one_size: bool) -> Tile:
    """The smallest tile that holds the longest chunk's ``most_tokens``, else the largest; or the one of ``ONE_SIZE``.

    ``group``: query heads of a KV head. Raises ValueError where no tile holds one token's.
    """
    tiles = tiles_for(head_dim, itemsize)
    fitting = [tile for rows, tile in tiles.items() if group <= rows and (rows == ONE_SIZE or not is_one_size)]
    if not fitting:
        raise ValueError(f"{group} query heads share a KV head of {head_dim}: at most {ONE_SIZE} do")
    return next((tile for tile in fitting if most_tokens * group <= tile.rows), fitting[-1])
