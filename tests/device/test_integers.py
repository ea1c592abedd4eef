"""Matrices that are kept as small integers: products and rows as in double, rows that depend on no batch, one order of
bytes."""

from __future__ import annotations

import math
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from jettison.device.kernels import library, native
from jettison.device.kernels.base import Kernels
from jettison.device.kernels.experts import pass_experts
from jettison.device.kernels.integers import SCALE_DTYPES, widened
from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.operands import ExpertWeights, IntegerMatrix, RoutedBuffers, WeightStack
from jettison.device.model.integers import IntegerForm

NAMES = ["torch", "emulated", *library.supported_variants()]
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
FORMS = [IntegerForm(4, 32, "float16", "none"), IntegerForm(4, 32, "float16", "min"),
         IntegerForm(4, 128, "bfloat16", "zero"), IntegerForm(8, 32, "float16", "none"),
         IntegerForm(8, 512, "float16", "zero")]  # fmt: skip


def kernels_of(name: str, emulated: Kernels) -> Kernels:
    return emulated if name == "emulated" else load_kernels("torch") if name == "torch" else native.load_native(name)


class Drawn:
    """A random matrix, in parts and as weights in double."""

    def __init__(self, rows: int, columns: int, form: IntegerForm, seed: int = 0) -> None:
        random, most = np.random.default_rng(seed), 1 << (form.bits - 1)
        self.rows, self.columns, self.form = rows, columns, form
        self.integers = torch.from_numpy(random.integers(-most, most, (rows, columns), dtype=np.int8))
        numbers = (rows, columns // form.group_size)
        dtype = SCALE_DTYPES[form.scale]
        self.scales = torch.from_numpy(random.uniform(-0.1, 0.1, numbers) / most).to(dtype)
        self.offsets = None
        if form.offset != "none":
            whole, any_number = random.integers(-most, most, numbers), random.uniform(-0.1, 0.1, numbers)
            self.offsets = torch.from_numpy(whole if form.offset == "zero" else any_number).to(dtype)
        scale, whole = self._of_columns(self.scales), self.integers.double()
        offset = torch.zeros(()) if self.offsets is None else self._of_columns(self.offsets)
        is_min = form.offset == "min"
        self.weights = scale * (whole + 8) + offset if is_min else scale * (whole + offset)

    def _of_columns(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.double().repeat_interleave(self.form.group_size, dim=1)

    def packed(self, kernels: Kernels, cuts: list[int] | None = None) -> IntegerMatrix:
        """In several pieces, the last first, between bytes that must stay."""
        size = self.form.num_bytes(self.rows, self.columns)
        around = torch.full((size + 128,), 0xA5, dtype=torch.uint8)
        matrix = IntegerMatrix(around[64:-64], self.rows, self.columns, self.form)
        for start, end in reversed(list(pairwise([0, *sorted(cuts or []), self.rows]))):
            offsets = None if self.offsets is None else self.offsets[start:end]
            kernels.pack_integers(self.integers[start:end], self.scales[start:end], offsets, start, matrix)
        assert (around[:64] == 0xA5).all()
        assert (around[-64:] == 0xA5).all()
        return matrix


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def forms() -> st.SearchStrategy[tuple[IntegerForm, int]]:
    """A form, and columns that it fits."""
    def of(bits: int, group: int, scale, offset, groups: int) -> tuple[IntegerForm, int]:
        return IntegerForm(bits, group, scale, "zero" if bits == 8 and offset == "min" else offset), group * groups

    return st.builds(
        of, st.sampled_from([4, 8]), st.sampled_from([32, 64, 96, 128, 416]), st.sampled_from(["float16", "bfloat16"]),
        st.sampled_from(["none", "zero", "min"]), st.integers(1, 5),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_products_and_rows(name, dtype, emulated):
    kernels = kernels_of(name, emulated)

    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(form=forms(), rows=st.integers(1, 40), groups=st.sampled_from([1, 2, 5]), bias=st.booleans(),
           is_wide=st.booleans(), data=st.data())  # fmt: skip
    def check(form, rows, groups, bias, is_wide, data):
        form, k = form
        n = 32 * groups
        drawn = Drawn(n, k, form)
        assert kernels.keeps(form, (n, k), dtype)
        matrix = drawn.packed(kernels, data.draw(st.lists(st.integers(0, n), max_size=3)))
        assert torch.equal(matrix.data, drawn.packed(load_kernels("torch")).data), "one order of bytes"
        x = randn(rows, k + 3, dtype=dtype)[:, :k]  # row-strided
        b = randn(n, dtype=dtype, seed=2) if bias else None
        out_dtype = torch.float32 if is_wide else dtype
        buffer = torch.full((rows, n + 2), math.nan, dtype=out_dtype)
        kernels.linear(x, matrix, b, buffer[:, :n])
        expected = x.double() @ drawn.weights.t() + (0 if b is None else b.double())
        scale = max(1.0, float((x.double().abs() @ drawn.weights.abs().t()).max()) / 30)  # sums cancel
        tolerance = TOLERANCE[out_dtype]
        torch.testing.assert_close(buffer[:, :n].double(), expected, rtol=tolerance, atol=tolerance * scale)
        assert buffer[:, n:].isnan().all()
        ids = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), max_size=5)), dtype=torch.int64)
        found = torch.full((len(ids), k + 1), math.nan, dtype=dtype)
        kernels.gather_rows(matrix, ids, found[:, :k])
        torch.testing.assert_close(found[:, :k], drawn.weights[ids].float().to(dtype), rtol=1e-6, atol=1e-7)
        assert found[:, k:].isnan().all()

    check()


@pytest.mark.parametrize("form", FORMS)
def test_torch_widens_exactly(form):
    drawn = Drawn(96, 512, form)
    assert torch.equal(widened(drawn.packed(load_kernels("torch")), 32, 96, torch.float64), drawn.weights[32:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("form", FORMS)
def test_rows_do_not_depend_on_the_batch(name, dtype, form, emulated):
    kernels = kernels_of(name, emulated)
    x, matrix = randn(70, 512, dtype=dtype), Drawn(96, 512, form).packed(kernels)
    whole = torch.empty(70, 96, dtype=dtype)
    kernels.linear(x, matrix, None, whole)
    threads = torch.get_num_threads()
    for size in (*range(1, 15), 16, 17, 24, 25, 40, 64, 65):
        out = torch.empty(size, 96, dtype=dtype)
        torch.set_num_threads(1 + size % 2)
        kernels.linear(x[-size:], matrix, None, out)
        torch.set_num_threads(threads)
        assert torch.equal(out, whole[-size:]), size


def stack(
    kernels: Kernels, number: int, rows: int, columns: int, form: IntegerForm
) -> tuple[WeightStack, torch.Tensor]:
    """As a slab has it, and the weights."""
    drawn = [Drawn(rows, columns, form, seed) for seed in range(number)]
    data = torch.stack([each.packed(kernels).data for each in drawn])
    return WeightStack(data, False, form, (rows, columns)), torch.stack([each.weights for each in drawn])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS[1:4])
def test_experts(name, dtype, form, emulated):
    kernels, hidden, inner, number, tokens = kernels_of(name, emulated), 128, 128, 5, 23
    (up, up_weights), (down, down_weights) = (
        stack(kernels, number, 2 * inner, hidden, form), stack(kernels, number, hidden, inner, form)
    )
    weights = ExpertWeights(torch.empty(number, hidden), None, None, up, None, down, None)
    x = randn(tokens, hidden, dtype=dtype)
    chosen = torch.stack([torch.randperm(number)[:2] for _ in range(tokens)])
    shares = torch.rand(tokens, 2)

    def run(compute, rows: slice) -> torch.Tensor:
        part, sizes = x[rows].contiguous(), (2 * inner, inner, hidden)
        buffers = RoutedBuffers(*(torch.full((2 * len(part), size), math.nan, dtype=dtype) for size in sizes))
        out = torch.full_like(part, math.nan)
        compute(part, chosen[rows].contiguous(), shares[rows].contiguous(), weights, "silu", buffers, out)
        return out

    out = run(kernels.experts, slice(None))
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for t in range(tokens):
        for expert, share in zip(chosen[t].tolist(), shares[t].tolist(), strict=True):
            gate, linear = (up_weights[expert] @ x[t].double()).chunk(2)
            expected[t] += share * (down_weights[expert] @ (torch.nn.functional.silu(gate) * linear))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    alone = run(lambda *call: pass_experts(kernels, *call), slice(None))
    torch.testing.assert_close(out, alone, rtol=tolerance, atol=tolerance)
    if name != "torch":
        assert torch.equal(run(kernels.experts, slice(3, 20)), out[3:20])


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be(name, emulated):
    kernels, form = kernels_of(name, emulated), IntegerForm(4, 32, "float16", "zero")
    drawn = Drawn(64, 64, form)
    matrix = drawn.packed(kernels)
    out, integers, scales, offsets = torch.empty(1, 64), drawn.integers, drawn.scales, drawn.offsets
    with pytest.raises(IndexError):
        kernels.gather_rows(matrix, torch.tensor([64]), out)
    with pytest.raises(ValueError, match="rows 60 to 124"):
        kernels.pack_integers(integers, scales, offsets, 60, matrix)
    with pytest.raises(ValueError, match="offsets: missing"):
        kernels.pack_integers(integers, scales, None, 0, matrix)
    with pytest.raises(ValueError, match="scales"):
        kernels.pack_integers(integers, scales.bfloat16(), offsets, 0, matrix)
    with pytest.raises(ValueError, match="integers"):
        kernels.pack_integers(integers.short(), scales, offsets, 0, matrix)
    with pytest.raises(ValueError, match="integers"):
        kernels.linear(out, matrix._replace(data=matrix.data[1:]), None, torch.empty(1, 64))
    with pytest.raises(ValueError, match="cannot be kept"):
        kernels.linear(out, matrix._replace(rows=65), None, torch.empty(1, 65))
    with pytest.raises(ValueError, match="x: shape"):
        kernels.linear(torch.empty(1, 65), matrix, None, out)
    with pytest.raises(ValueError, match="out: dtype"):
        kernels.linear(out.bfloat16(), matrix, None, torch.empty(1, 64, dtype=torch.float64))
    if name != "torch":
        with pytest.raises(ValueError, match="float64"):
            kernels.linear(out.double(), matrix, None, out.double())
    assert kernels.keeps(form, (64, 64), torch.float64) == (name == "torch")
    assert not kernels.keeps(form, (65, 64), torch.float32)
    assert not kernels.keeps(form._replace(bits=8, offset="min"), (64, 64), torch.float32)
