"""``quant_method: gguf``: matrices whose rows are blocks of a GGUF file, as ``jettison model import`` leaves them.

A matrix ``X.weight`` is stored as ``X.q4_0``, ``X.q4_1`` or ``X.q8_0``, bytes [rows, columns / 32 * bytes of a block],
where ``ggml``'s blocks of 32 weights begin with a float16 scale (Q4_1: and a minimum). Of four bits the low halves of
bytes are the first sixteen weights, the high halves the others. Widened, they are to the bit what the ``gguf`` library
makes of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jettison.device.model.integers import Integers
from jettison.device.model.quantized.block_kinds import BLOCK_WEIGHTS, KINDS, block_bytes, stored_name
from jettison.device.model.quantized.parts import AsIntegers, Headers, Part, Recipe, Stored
from jettison.device.model.quantized.scaling import finite
from jettison.device.model.shards import TensorSource

_BYTES = frozenset({"U8"})
_CENTER = 8


def recipe(source: TensorSource, headers: Headers) -> Recipe | None:
    """The recipe of a matrix; None: it is not stored in blocks."""
    kind = next((kind for kind in KINDS if stored_name(source.name, kind) in headers), None)
    if kind is None or source.shape[-1] % BLOCK_WEIGHTS:
        return None
    form, (rows, columns) = KINDS[kind], source.shape
    shape = (rows, columns // BLOCK_WEIGHTS * block_bytes(kind))
    parts = {"blocks": Part(stored_name(source.name, kind), shape, _BYTES)}

    def read(stored: Stored, start: int, end: int) -> Integers:
        blocks = stored["blocks"][start:end].contiguous().unflatten(1, (-1, block_bytes(kind)))
        num_bytes = BLOCK_WEIGHTS * form.bits // 8
        numbers = finite(stored, "blocks", blocks[..., :-num_bytes].contiguous().view(torch.float16))
        integers = blocks[..., -num_bytes:]
        values = integers.view(torch.int8) if form.bits == 8 else _halves(integers)
        return Integers(values.flatten(1), numbers[..., 0], numbers[..., 1] if form.offset == "min" else None)

    def widen(stored: Stored, start: int, end: int) -> Tensor:
        values, scales, minima = read(stored, start, end)
        wide = values.unflatten(1, (-1, BLOCK_WEIGHTS)).float()
        if minima is None:
            return (wide * scales.float().unsqueeze(2)).flatten(1)
        return ((wide + _CENTER) * scales.float().unsqueeze(2) + minima.float().unsqueeze(2)).flatten(1)

    return Recipe(parts, widen, integers=AsIntegers(form, read))


def _halves(integers: Tensor) -> Tensor:
    """Signed integers of four bits: [..., 16] bytes to [..., 32]."""
    return torch.cat((integers & 0xF, integers >> 4), -1).to(torch.int8) - _CENTER
