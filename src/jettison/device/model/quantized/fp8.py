"""``quant_method: fp8``: floats of eight bits (e4m3fn) with float scales.

``weight_scale_inv`` has a scale for each block of rows and columns (DeepSeek, Qwen3-FP8), ``weight_scale`` one for the
whole (AutoFP8) or one a row. As ``transformers`` does, value times scale is computed in float32 and rounded once, to
the serving dtype. Where the last block is cut short, ``transformers`` refuses; DeepSeek's own code is followed.
Static scales of activations are left out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jettison.device.model.quantized.parts import Headers, Part, Recipe, Stored, part_of
from jettison.device.model.quantized.scaling import finite, scaled
from jettison.device.model.quantized.schemes import Fp8
from jettison.device.model.shards import TensorSource
from jettison.device.model.stored import Lazy

E4M3 = frozenset({"F8_E4M3"})
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def recipe(scheme: Fp8, source: TensorSource, headers: Headers) -> Recipe:
    """The recipe of a matrix that is stored as ``source.name``."""
    (rows, columns), (block_rows, block_columns) = source.shape, scheme.block
    module = source.name.removesuffix(".weight")
    grid = grid_shape(source.shape, scheme.block)
    if (name := f"{module}.weight_scale") in headers:
        scale = part_of(headers, name, (), (1,), (rows, 1), (rows,))
        block_rows, block_columns = (1, columns) if scale.shape[:1] == (rows,) else (rows, columns)
    else:
        scale = part_of(headers, f"{module}.weight_scale_inv", grid, ())
        if scale.shape == ():
            block_rows, block_columns = rows, columns

    def widen(stored: Stored, start: int, end: int) -> Tensor:
        scales = grid_rows(stored["scale"], block_rows, start, end).float()
        values = e4m3_values(stored["weight"][start:end])
        return scaled(values, finite(stored, "scale", scales), None, block_columns)

    left_out = tuple(f"{module}.{name}" for name in ("input_scale", "activation_scale"))
    return Recipe({"weight": Part(source.name, source.shape, E4M3), "scale": scale}, widen, left_out)


def e4m3_values(stored: Tensor) -> Tensor:
    """Floats of eight bits in float32, by a table: several times as fast as torch converts them."""
    return _VALUES.index_select(0, stored.view(torch.uint8).int().flatten()).view(stored.shape)


def grid_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks of a matrix, the last of which may be cut short."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def grid_rows(grid: Lazy, block_rows: int, start: int, end: int) -> Tensor:
    """Rows [start, end) of a grid of blocks, one for each row of the matrix. ``grid``: [blocks of rows, blocks of
    columns], or a single element of any shape, or one a row."""
    if math.prod(grid.shape) == 1:
        return grid[...].reshape(1, 1).expand(end - start, 1)
    first = start // block_rows
    rows = grid[first : -(-end // block_rows)]
    return rows.reshape(rows.shape[0], -1)[torch.arange(start, end) // block_rows - first]
