"""AWQ and GPTQ: matrices that are stored with their inputs along the first dimension, and their outputs along the
second.

Integers, zeros and scales of a range of outputs are cut out of the stored columns, so a piece needs no more than
itself. Both libraries compute ``(integer - zero) * scale`` in the scales' dtype (float16 as a rule), and so does this
where weights are widened; the serving dtype is rounded from there. Kept integers are not rounded.

A GPTQ folder of the first version stores each zero less one. As AutoGPTQ does, one is added within the bits of the
field; GPTQModel adds it to the words, which differs where a field is full: zeros of which no writer is sure.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from jettison.device.model.integers import Integers
from jettison.device.model.quantized.bits import num_words, unpack, words_of
from jettison.device.model.quantized.parts import AsIntegers, DamagedPart, Headers, Part, Recipe, Stored
from jettison.device.model.quantized.scaling import finite, form_of, groups_of_columns, in_order, offsets_of, scaled
from jettison.device.model.quantized.schemes import Awq, Gptq
from jettison.device.model.shards import TensorSource
from jettison.device.model.stored import Lazy

INT32 = frozenset({"I32"})
_AWQ_BITS, _AWQ_WORD = 4, 8
_AWQ_SHIFTS = _AWQ_BITS * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], dtype=torch.int32)
"""Bits below each of a word's outputs."""


def awq_recipe(scheme: Awq, source: TensorSource, headers: Headers) -> Recipe:
    """The recipe of a matrix of an AWQ folder."""
    (rows, columns), module = source.shape, source.name.removesuffix(".weight")
    size = scheme.group_size or columns
    num_groups, words = -(-columns // size), num_words(rows, _AWQ_BITS)
    parts = {
        "qweight": Part(f"{module}.qweight", (columns, words), INT32),
        "qzeros": Part(f"{module}.qzeros", (num_groups, words), INT32),
        "scales": Part(f"{module}.scales", (num_groups, rows)),
    }

    def widen(stored: Stored, start: int, end: int) -> Tensor:
        integers, zeros = (_outputs(stored[part], start, end) for part in ("qweight", "qzeros"))
        scales = finite(stored, "scales", stored["scales"][:, start:end].t())
        return scaled(integers, scales, zeros, size)

    form = form_of(headers, parts["scales"], _AWQ_BITS, size, "none" if scheme.is_symmetric else "zero")
    if form is None:
        return Recipe(parts, widen)

    def read(stored: Stored, start: int, end: int) -> Integers:
        center = 1 << _AWQ_BITS - 1
        integers, zeros = (_outputs(stored[part], start, end) for part in ("qweight", "qzeros"))
        scales = finite(stored, "scales", stored["scales"][:, start:end].t())
        offsets = offsets_of(form, "qzeros", zeros, center, scales)
        return Integers((integers - center).to(torch.int8), scales, offsets)

    return Recipe(parts, widen, integers=AsIntegers(form, read))


def _outputs(words: Lazy, start: int, end: int) -> Tensor:
    """Outputs [start, end) of AWQ's words [n, words], as [end - start, n]."""
    first = start // _AWQ_WORD
    turned = words[:, first : -(-end // _AWQ_WORD)].t().contiguous()
    values = (turned[:, None] >> _AWQ_SHIFTS[:, None]) & ((1 << _AWQ_BITS) - 1)
    return values.flatten(0, 1)[start - first * _AWQ_WORD : end - first * _AWQ_WORD]


def gptq_recipe(scheme: Gptq, source: TensorSource, headers: Headers) -> Recipe:
    """The recipe of a matrix of a GPTQ folder."""
    (rows, columns), module, bits = source.shape, source.name.removesuffix(".weight"), scheme.bits
    size = scheme.group_size or columns
    num_groups = -(-columns // size)
    parts = {
        "qweight": Part(f"{module}.qweight", (num_words(columns, bits), rows), INT32),
        "qzeros": Part(f"{module}.qzeros", (num_groups, num_words(rows, bits)), INT32),
        "scales": Part(f"{module}.scales", (num_groups, rows)),
    }
    if scheme.is_ordered or f"{module}.g_idx" in headers:
        parts["g_idx"] = Part(f"{module}.g_idx", (columns,), INT32)

    def widen(stored: Stored, start: int, end: int) -> Tensor:
        integers = unpack(stored["qweight"][:, start:end].t().contiguous(), bits, 0, columns)
        scales = finite(stored, "scales", stored["scales"][:, start:end].t())
        group = groups_of_columns(stored, "g_idx", size, num_groups) if "g_idx" in stored else size
        return scaled(integers, scales, _gptq_zeros(scheme, stored, start, end), group)

    form = form_of(headers, parts["scales"], bits, size, "none" if scheme.is_symmetric else "zero")
    if form is None or (scheme.is_ordered and num_groups > 1):
        return Recipe(parts, widen)

    def read(stored: Stored, start: int, end: int) -> Integers:
        in_order(stored, "g_idx", size, num_groups)
        center = 1 << bits - 1
        integers = unpack(stored["qweight"][:, start:end].t().contiguous(), bits, 0, columns) - center
        scales = finite(stored, "scales", stored["scales"][:, start:end].t())
        offsets = offsets_of(form, "qzeros", _gptq_zeros(scheme, stored, start, end), center, scales)
        return Integers(integers.to(torch.int8), scales, offsets)

    return Recipe(parts, widen, integers=AsIntegers(form, read))


def beside_zeros(recipe: Recipe, name: str) -> Recipe:
    """A matrix whose file has a bias, too, which must be zero: it is not added."""
    num_outputs = recipe.parts["scales"].shape[-1]

    def check(stored: Stored, start: int, end: int) -> None:
        if stored["bias"][start:end].any():
            what = "is not zero, and by config.json there is no such bias"
            raise DamagedPart("bias", what, "it would be left out: use another copy")

    def widen(stored: Stored, start: int, end: int) -> Tensor:
        check(stored, start, end)
        return recipe.widen(stored, start, end)

    integers = recipe.integers
    if integers is not None:
        read = integers.read

        def read_checked(stored: Stored, start: int, end: int) -> Integers:
            check(stored, start, end)
            return read(stored, start, end)

        integers = integers._replace(read=read_checked)
    return replace(recipe, parts={**recipe.parts, "bias": Part(name, (num_outputs,))}, widen=widen, integers=integers)


def _gptq_zeros(scheme: Gptq, stored: Stored, start: int, end: int) -> Tensor:
    """[outputs, groups]."""
    first_word, last_word, first = words_of(scheme.bits, start, end)
    zeros = unpack(stored["qzeros"][:, first_word:last_word], scheme.bits, start - first, end - first).t()
    return zeros if scheme.is_v2 else (zeros + 1) & ((1 << scheme.bits) - 1)
