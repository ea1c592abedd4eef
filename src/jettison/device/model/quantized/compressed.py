"""``quant_method: compressed-tensors``: integers that are packed (``weight_packed``) or one a byte (``weight``), and
floats of eight bits, with scales for the whole, a row, a group of columns or a block.

``(value - zero) * scale`` is computed in float32 and rounded once, to the serving dtype. In bfloat16 this is what the
library makes of bfloat16 scales, in float32 what it makes for ``transformers``, which widens scales to the model's
dtype first. It would round products with float16 scales to float16 before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jettison.device.model.integers import Integers, Offset
from jettison.device.model.quantized.bits import num_words, unpack, words_of
from jettison.device.model.quantized.columns import INT32
from jettison.device.model.quantized.fp8 import E4M3, e4m3_values, grid_rows, grid_shape
from jettison.device.model.quantized.parts import AsIntegers, DamagedPart, Headers, Part, Recipe, Stored, part_of
from jettison.device.model.quantized.scaling import finite, form_of, groups_of_columns, offsets_of, scaled
from jettison.device.model.quantized.schemes import Compressed, CompressedGroup
from jettison.device.model.shards import TensorSource
from jettison.device.model.stored import Lazy

_LEFT_OUT = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
_SHAPE_TYPES = frozenset({"I32", "I64"})
_BYTES = frozenset({"I8"})


def recipe(scheme: Compressed, source: TensorSource, headers: Headers) -> Recipe | None:
    """The recipe of a matrix, by the first group that the stored tensors fit (by the first of all where none does);
    None: the folder quantizes nothing."""
    recipes = [_recipe(group, source, headers) for group in scheme.groups]
    return next((each for each in recipes if each.fits(headers)), recipes[0] if recipes else None)


def _recipe(group: CompressedGroup, source: TensorSource, headers: Headers) -> Recipe:
    module, (_, columns) = source.name.removesuffix(".weight"), source.shape
    block_rows, block_columns = _block(group, source)
    grid = grid_shape(source.shape, (block_rows, block_columns))
    others = ((), (1,)) if group.strategy == "tensor" else ((source.shape[0],),) if group.strategy == "channel" else ()
    parts = {"scale": part_of(headers, f"{module}.weight_scale", grid, *others)}
    if group.is_packed:
        packed = (source.shape[0], num_words(columns, group.bits))
        parts["packed"] = Part(f"{module}.weight_packed", packed, INT32)
        parts["shape"] = Part(f"{module}.weight_shape", (2,), _SHAPE_TYPES)
    else:
        parts["weight"] = Part(source.name, source.shape, E4M3 if group.is_float else _BYTES)
    name = f"{module}.weight_zero_point"
    if not group.is_symmetric or (name in headers and not group.is_float):  # as older folders have, full of zeros
        if _has_packed_zeros(group):
            parts["zero"] = Part(name, (num_words(source.shape[0], group.bits), grid[1]), INT32)
        else:
            parts["zero"] = part_of(headers, name, grid, *others, dtypes=_BYTES)
    if group.is_ordered or f"{module}.weight_g_idx" in headers:
        parts["g_idx"] = Part(f"{module}.weight_g_idx", (columns,), INT32)

    def widen(stored: Stored, start: int, end: int) -> Tensor:
        _check_shape(stored, source)
        scales = finite(stored, "scale", grid_rows(stored["scale"], block_rows, start, end).float())
        values, zeros = _values(group, stored, start, end, columns), None
        if "zero" in stored:
            zeros = _zeros(group, stored["zero"], block_rows, start, end)
        return scaled(values, scales, zeros, _groups(stored, block_columns, grid[1]))

    left_out = tuple(f"{module}.{name}" for name in _LEFT_OUT)
    offset: Offset = "none" if group.is_symmetric else "zero"
    form = form_of(headers, parts["scale"], group.bits if group.is_packed else 8, block_columns, offset)
    if form is None or group.is_float or ("g_idx" in parts and grid[1] > 1):
        return Recipe(parts, widen, left_out)

    def read(stored: Stored, start: int, end: int) -> Integers:
        _check_shape(stored, source)
        _groups(stored, block_columns, grid[1])  # there is one at most where they are named
        scales = finite(stored, "scale", grid_rows(stored["scale"], block_rows, start, end))
        zeros = _zeros(group, stored["zero"], block_rows, start, end) if "zero" in stored else None
        offsets = offsets_of(form, "zero", zeros, 0, scales)
        return Integers(_values(group, stored, start, end, columns).to(torch.int8), scales, offsets)

    return Recipe(parts, widen, left_out, AsIntegers(form, read))


def _check_shape(stored: Stored, source: TensorSource) -> None:
    if "shape" in stored and (said := tuple(stored["shape"][...].tolist())) != source.shape:
        raise DamagedPart("shape", f"says {said}, expected {source.shape}")


def _block(group: CompressedGroup, source: TensorSource) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    rows, columns = source.shape
    group_size = group.group_size or columns
    return {"tensor": (rows, columns), "channel": (1, columns), "group": (1, group_size), "block": group.block}[
        group.strategy
    ]


def _has_packed_zeros(group: CompressedGroup) -> bool:
    return group.is_packed and not group.is_symmetric and group.strategy in ("channel", "group")


def _values(group: CompressedGroup, stored: Stored, start: int, end: int, columns: int) -> Tensor:
    if group.is_packed:
        return unpack(stored["packed"][start:end], group.bits, 0, columns) - (1 << group.bits - 1)
    values = stored["weight"][start:end]
    return e4m3_values(values) if group.is_float else values.to(torch.int32)


def _zeros(group: CompressedGroup, zeros: Lazy, block_rows: int, start: int, end: int) -> Tensor:
    """[rows, groups]."""
    if _has_packed_zeros(group):
        first_word, last_word, first = words_of(group.bits, start, end)
        words = zeros[first_word:last_word].t()
        return unpack(words, group.bits, start - first, end - first).t() - (1 << group.bits - 1)
    return grid_rows(zeros, block_rows, start, end).to(torch.int32)


def _groups(stored: Stored, block_columns: int, num_groups: int) -> int | Tensor:
    """As ``scaled`` takes them. A -1 among a module's groups says that its columns are in their order."""
    if "g_idx" not in stored or bool((stored["g_idx"][...] == -1).any()):
        return block_columns
    return groups_of_columns(stored, "g_idx", block_columns, num_groups)
