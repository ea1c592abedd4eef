"""Packing and unpacking of integers, for each width and order, and the arithmetic behind it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantizers import awq_packed, packed

from jettison.device.model.quantized.bits import num_words, unpack
from jettison.device.model.quantized.columns import _outputs
from jettison.device.model.quantized.fp8 import grid_rows, grid_shape
from jettison.device.model.quantized.mxfp4 import widened
from jettison.device.model.quantized.scaling import scaled

quick = settings(max_examples=60, deadline=None)


def integers(seed: int, shape: tuple[int, ...], bits: int) -> torch.Tensor:
    return torch.randint(1 << bits, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


@quick
@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 80), st.integers(0, 1 << 20), st.data())
def test_any_range_of_a_stream(bits, num_rows, num_values, seed, data):
    values = integers(seed, (num_rows, num_values), bits)
    words = packed(values, bits)
    assert words.shape == (num_rows, num_words(num_values, bits))
    start = data.draw(st.integers(0, num_values - 1))
    end = data.draw(st.integers(start + 1, num_values))
    assert torch.equal(unpack(words, bits, start, end), values[:, start:end])
    turned = words.t().contiguous().t()  # as GPTQ's words lie
    assert torch.equal(unpack(turned, bits, start, end), values[:, start:end])


@quick
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 1 << 20), st.data())
def test_any_range_of_awqs_outputs(num_inputs, words_in_a_row, seed, data):
    values = integers(seed, (num_inputs, words_in_a_row * 8), 4)
    start = data.draw(st.integers(0, values.shape[1] - 1))
    end = data.draw(st.integers(start + 1, values.shape[1]))
    assert torch.equal(_outputs(awq_packed(values), start, end), values[:, start:end].t())


@quick
@given(st.integers(1, 3), st.integers(1, 20), st.integers(1, 8), st.booleans(), st.integers(0, 1 << 20))
def test_groups_side_by_side_are_groups_one_by_one(num_rows, num_columns, group_size, has_zeros, seed):
    """Also where the last group is smaller."""
    num_groups = -(-num_columns // group_size)
    values = integers(seed, (num_rows, num_columns), 4)
    scales = (integers(seed + 1, (num_rows, num_groups), 8) / 64).half()
    zeros = integers(seed + 2, (num_rows, num_groups), 4) if has_zeros else None
    group = torch.arange(num_columns) // group_size
    found = scaled(values, scales, zeros, group_size)
    assert torch.equal(found, scaled(values, scales, zeros, group))
    for row in range(num_rows):
        for column, of in enumerate(group.tolist()):
            zero = int(zeros[row, of]) if zeros is not None else 0
            exact = (int(values[row, column]) - zero) * float(scales[row, of])
            assert found[row, column] == torch.tensor(exact, dtype=torch.float64).half()


@quick
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.data())
def test_rows_of_blocks(num_rows, num_columns, block_rows, block_columns, data):
    shape = grid_shape((num_rows, num_columns), (block_rows, block_columns))
    grid = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
    start = data.draw(st.integers(0, num_rows - 1))
    end = data.draw(st.integers(start + 1, num_rows))
    found = grid_rows(grid, block_rows, start, end)
    assert found.tolist() == [grid[row // block_rows].tolist() for row in range(start, end)]


def test_all_values_of_four_bits():
    codes = torch.arange(16, dtype=torch.uint8)
    found = widened((codes << 4 | codes)[None], torch.tensor([0.5]))
    magnitudes = [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0]
    assert found[0::2].tolist() == found[1::2].tolist() == magnitudes + [-each for each in magnitudes]
    assert torch.signbit(found[16])
