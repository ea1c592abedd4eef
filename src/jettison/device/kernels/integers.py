"""Matrices that are kept as small integers: the order of their bytes in plain torch, and checks of their operations.

The order is that of ``csrc/integers.h``: a slab has the same bytes with either kernels. Rows lie in blocks of 32, one
after the other. A block has, for each group of columns: 32 scales, 32 offsets (if any), then the integers, in lines of
128 bytes. A line has four bytes of each row, so 32 / bits columns; column c is element ``c % 2 * columns / 2 + c // 2``
of them, counted from the lowest bits. Integers are two's complements.

Not here: what the integers stand for (``device.model.integers``), and products in C (``native``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jettison.device.kernels.base import check_matrix, check_vector, fail, sum_dtype
from jettison.device.kernels.onednn import WIDENED_ELEMENTS
from jettison.device.kernels.operands import IntegerMatrix
from jettison.device.model.integers import ROWS_TOGETHER, IntegerForm

SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_LINE_BYTES = 4


def pack_integers(
    integers: Tensor, scales: Tensor, offsets: Tensor | None, first: int, matrix: IntegerMatrix
) -> None:
    """``Kernels.pack_integers`` in torch."""
    check_pack_integers(integers, scales, offsets, first, matrix)
    blocks, count = _blocks(matrix), len(integers)
    row, columns = torch.arange(first, first + count), _columns_of_bytes(matrix.form)
    numbers = [scales] if offsets is None else [scales, offsets]
    lines_a_group = matrix.form.group_size // columns.numel()
    values = integers.view(torch.uint8).view(count, blocks.shape[1], lines_a_group, columns.numel())
    lines = torch.zeros(count, *values.shape[1:3], _LINE_BYTES, dtype=torch.uint8)
    for place, sources in enumerate(columns.t()):
        part = values[..., sources]
        lines |= part if matrix.form.bits == 8 else (part & 15) << (4 * place)
    block, lane = row // ROWS_TOGETHER, row % ROWS_TOGETHER
    for i, number in enumerate(numbers):
        places = i * 2 * ROWS_TOGETHER + 2 * lane.unsqueeze(1) + torch.arange(2)
        blocks[block.view(-1, 1, 1), torch.arange(blocks.shape[1]).view(1, -1, 1), places.unsqueeze(1)] = (
            number.reshape(-1).view(torch.uint8).view(count, blocks.shape[1], 2)
        )
    of_lines = blocks[:, :, len(numbers) * 2 * ROWS_TOGETHER :].view(
        *blocks.shape[:2], -1, ROWS_TOGETHER, _LINE_BYTES
    )
    of_lines[block, :, :, lane] = lines


def widened(matrix: IntegerMatrix, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Weights [end - first, K] of rows, which begin and end with a block of 32, in a type of sums."""
    form = matrix.form
    blocks = _blocks(matrix)[first // ROWS_TOGETHER : -(-end // ROWS_TOGETHER)]
    num_blocks, groups, _ = blocks.shape
    columns, numbers = _columns_of_bytes(form), 1 if form.offset == "none" else 2
    head, body = blocks.split([numbers * 2 * ROWS_TOGETHER, form.group_size * ROWS_TOGETHER * form.bits // 8], dim=2)
    lines = body.reshape(num_blocks, groups, -1, ROWS_TOGETHER, _LINE_BYTES)
    integers = torch.empty(*lines.shape[:-1], columns.numel(), dtype=torch.int8)
    for place, targets in enumerate(columns.t()):
        low = lines if form.bits == 8 else (lines >> (4 * place) & 15 ^ 8) - 8
        integers[..., targets] = low.view(torch.int8)
    weights = integers.permute(0, 3, 1, 2, 4).reshape(num_blocks, ROWS_TOGETHER, groups, form.group_size).to(dtype)
    kept = head.reshape(num_blocks, groups, numbers, -1).contiguous().view(SCALE_DTYPES[form.scale]).to(dtype)
    scale, *offsets = kept.permute(2, 0, 3, 1).unsqueeze(-1)
    if form.offset == "zero":
        weights = scale * (weights + offsets[0])
    elif form.offset == "min":
        weights = scale * (weights + 8) + offsets[0]
    else:
        weights = scale * weights
    return weights.reshape(-1, matrix.columns)


def torch_linear_integers(x: Tensor, matrix: IntegerMatrix, bias: Tensor | None, out: Tensor) -> None:
    """``Kernels.linear`` in torch. Nothing is rounded but the sums, and outputs in a narrower type."""
    check_linear_integers(x, matrix, bias, out)
    wide, sums = x.to(sum_dtype(x.dtype)), sum_dtype(x.dtype)
    for first, end in _parts(matrix):
        product = wide @ widened(matrix, first, end, sums).t()
        out[:, first:end] = product if bias is None else product + bias[first:end].to(sums)


def torch_gather_integers(matrix: IntegerMatrix, ids: Tensor, out: Tensor) -> None:
    """``Kernels.gather_rows`` in torch."""
    check_gather_integers(matrix, ids, out)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < matrix.rows:
        raise IndexError(f"a row lies outside the {matrix.rows} of the matrix")
    for i, row in enumerate(ids.tolist()):
        first = row // ROWS_TOGETHER * ROWS_TOGETHER
        out[i] = widened(matrix, first, first + ROWS_TOGETHER, sum_dtype(out.dtype))[row - first]


def check_integer_matrix(matrix: IntegerMatrix) -> None:
    """Raise ValueError unless the bytes are as many as the form says."""
    if not matrix.form.fits(matrix.rows, matrix.columns):
        fail(f"a matrix [{matrix.rows}, {matrix.columns}] cannot be kept as {matrix.form}")
    check_vector("integers", matrix.data, matrix.form.num_bytes(matrix.rows, matrix.columns), torch.uint8)


def check_linear_integers(x: Tensor, matrix: IntegerMatrix, bias: Tensor | None, out: Tensor) -> None:
    """Checks of ``linear``."""
    check_integer_matrix(matrix)
    if x.dim() != 2 or not x.is_floating_point():
        fail(f"linear: expected a matrix of numbers, got {x.dtype} {tuple(x.shape)}")
    rows = x.shape[0]
    check_matrix("x", x, rows, matrix.columns, x.dtype)
    check_matrix("out", out, rows, matrix.rows, x.dtype if out.dtype == x.dtype else sum_dtype(x.dtype))
    if bias is not None:
        check_vector("bias", bias, matrix.rows, x.dtype)


def check_gather_integers(matrix: IntegerMatrix, ids: Tensor, out: Tensor) -> None:
    """Checks of ``gather_rows``, the ids' values aside."""
    check_integer_matrix(matrix)
    check_vector("ids", ids, len(ids), torch.int64)
    check_matrix("out", out, len(ids), matrix.columns, out.dtype)


def check_pack_integers(
    integers: Tensor, scales: Tensor, offsets: Tensor | None, first: int, matrix: IntegerMatrix
) -> None:
    """Checks of ``pack_integers``, the integers' values aside."""
    check_integer_matrix(matrix)
    count, form = len(integers), matrix.form
    check_matrix("integers", integers, count, matrix.columns, torch.int8)
    if not integers.is_contiguous():
        fail("integers: must be contiguous")
    check_matrix("scales", scales, count, matrix.columns // form.group_size, SCALE_DTYPES[form.scale])
    if (offsets is None) != (form.offset == "none"):
        fail(f"offsets: {'missing' if offsets is None else 'there are none'} in a matrix kept as {form}")
    if offsets is not None:
        check_matrix("offsets", offsets, count, scales.shape[1], scales.dtype)
    if first < 0 or first + count > matrix.rows:
        fail(f"rows {first} to {first + count} are not in a matrix of {matrix.rows}")


def _blocks(matrix: IntegerMatrix) -> Tensor:
    """[blocks of rows, groups of columns, bytes]"""
    return matrix.data.view(matrix.rows // ROWS_TOGETHER, matrix.columns // matrix.form.group_size, -1)


def _columns_of_bytes(form: IntegerForm) -> Tensor:
    """[bytes, integers in a byte]: the columns of a line that lie there, the lowest bits first."""
    number = 8 * _LINE_BYTES // form.bits
    columns = torch.arange(number).view(-1, 2).t()  # even ones, then odd ones
    return columns.reshape(_LINE_BYTES, -1)


def _parts(matrix: IntegerMatrix) -> list[tuple[int, int]]:
    """Ranges of rows whose weights are few enough to be widened at a time."""
    step = max(1, WIDENED_ELEMENTS // matrix.columns // ROWS_TOGETHER) * ROWS_TOGETHER
    return [(first, min(first + step, matrix.rows)) for first in range(0, matrix.rows, step)]
