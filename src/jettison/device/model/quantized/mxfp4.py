"""``quant_method: mxfp4``: floats of four bits (e2m1), two in a byte, the lower bits first, and an exponent (e8m0) for
each 32 of a row.

A matrix ``X`` is stored as ``X_blocks`` [..., columns / 32, 16] and ``X_scales`` [..., columns / 32]. Every value is
exact in bfloat16, unless it is too large for it, so there is no dtype to follow. The order of rows and columns is
the stored one, where ``transformers`` turns gpt-oss' experts round. An exponent of 255 means that its block is no
number (OCP MX 1.0, 5.4.1), and is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jettison.device.model.quantized.parts import Headers, Part, Recipe, Stored
from jettison.device.model.quantized.scaling import finite
from jettison.device.model.quantized.schemes import Mxfp4
from jettison.device.model.shards import TensorSource

_PER_SCALE = 32
_BYTES = frozenset({"U8"})
_EXPONENTS = frozenset({"U8", "F8_E8M0"})
_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_VALUES = torch.tensor(_MAGNITUDES + [-magnitude for magnitude in _MAGNITUDES])


def recipe(scheme: Mxfp4, source: TensorSource, headers: Headers) -> Recipe:
    """The recipe of a matrix, or of a stack of them (``source.shape`` [..., rows, columns])."""
    module, scales = source.name.removesuffix(".weight"), (*source.shape[:-1], -(-source.shape[-1] // _PER_SCALE))
    parts = {
        "blocks": Part(f"{module}_blocks", (*scales, _PER_SCALE // 2), _BYTES),
        "scales": Part(f"{module}_scales", scales, _EXPONENTS),
    }

    def widen(stored: Stored, start: int, end: int) -> Tensor:
        exponents = stored["scales"][start:end].view(torch.float8_e8m0fnu).float()
        return widened(stored["blocks"][start:end], finite(stored, "scales", exponents))

    return Recipe(parts, widen)


def widened(blocks: Tensor, scales: Tensor) -> Tensor:
    """Float32 [..., columns] of blocks (uint8 [..., columns / 32, 16]) and scales (float32 [..., columns / 32])."""
    codes = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)
    values = _VALUES.index_select(0, codes.int().flatten()).view(codes.shape)
    return (values * scales.unsqueeze(-1)).flatten(-2)
