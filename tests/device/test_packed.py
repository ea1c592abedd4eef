"""Packed weight matrices: the same products as plain ones, rows that depend on no batch, and slabs that hold them."""

from __future__ import annotations

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from jettison.device.dtypes import name_of
from jettison.device.kernels import library
from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.operands import PackedMatrix
from jettison.device.kernels.processor import TORCH_LINEAR
from jettison.device.model.hf_config import read_config
from jettison.device.model.identity import digest_of
from jettison.device.model.weights import WeightFolder

NATIVE = [f"native-{name}" for name in library.supported_variants()]
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.skipif(not NATIVE, reason="no native kernels here")


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(kernels, plain: torch.Tensor, cuts=()) -> PackedMatrix:
    """Between NaN, so that whatever is read beside the matrix shows; ``cuts``: packed in several pieces."""
    around = torch.full((plain.numel() + 128,), math.nan, dtype=plain.dtype)
    matrix = PackedMatrix(around[64:-64].view(plain.shape))
    bounds = [0, *sorted(cuts), plain.shape[0]]
    for start, end in pairwise(bounds):
        kernels.pack_rows(plain[start:end], start, matrix)
    return matrix


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NATIVE)
def test_products(name, dtype):
    kernels = load_kernels(name)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(m=st.integers(1, 150), n=st.sampled_from([1, 31, 32, 64, 75, 160]), steps=st.sampled_from([1, 2, 8, 9, 33]),
           bias=st.booleans(), data=st.data())  # fmt: skip
    def check(m, n, steps, bias, data):
        k = 32 * steps
        plain = (randn(n, k, dtype=dtype, seed=1).double() / math.sqrt(k)).to(dtype)
        matrix = packed(kernels, plain, data.draw(st.lists(st.integers(0, n), max_size=3)))
        x = randn(m, k + 3, dtype=dtype)[:, :k]  # row-strided
        b = randn(n, dtype=dtype, seed=2) if bias else None
        buffer = torch.full((m, n + 2), math.nan, dtype=dtype)
        kernels.linear(x, matrix, b, buffer[:, :n])
        expected = x.double() @ plain.double().t() + (0 if b is None else b.double())
        torch.testing.assert_close(buffer[:, :n].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert buffer[:, n:].isnan().all()
        ids = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5)))
        rows = torch.empty(len(ids), k, dtype=dtype)
        kernels.gather_rows(matrix, ids, rows)
        assert torch.equal(rows, plain[ids])

    check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize(("n", "k"), [(70, 64), (96, 1504), (64, 1024)])
def test_rows_do_not_depend_on_the_batch(name, dtype, n, k):
    kernels = load_kernels(name)
    x, matrix = randn(300, k, dtype=dtype), packed(kernels, randn(n, k, dtype=dtype, seed=1))
    whole = torch.empty(300, n, dtype=dtype)
    kernels.linear(x, matrix, None, whole)
    threads = torch.get_num_threads()
    for size in (*range(1, 15), 16, 17, 24, 25, 48, 64, 65, 241, 299):
        out = torch.empty(size, n, dtype=dtype)
        torch.set_num_threads(1 + size % 2)
        kernels.linear(x[-size:], matrix, None, out)
        torch.set_num_threads(threads)
        assert torch.equal(out, whole[-size:]), size


@pytest.mark.parametrize("name", NATIVE[:1])
def test_what_cannot_be(name):
    kernels = load_kernels(name)
    matrix = packed(kernels, randn(64, 32, dtype=torch.float32))
    out = torch.empty(1, 32)
    with pytest.raises(IndexError):
        kernels.gather_rows(matrix, torch.tensor([64]), out)
    with pytest.raises(ValueError, match="rows 60 to 70"):
        kernels.pack_rows(torch.empty(10, 32), 60, matrix)
    with pytest.raises(ValueError, match="packed"):
        load_kernels("torch").linear(out, matrix, None, torch.empty(1, 64))
    assert not kernels.packs((64, 33), torch.float32)
    assert not kernels.packs((64,), torch.float32)
    assert not kernels.packs((64, 32), torch.float64)
    assert not load_kernels(TORCH_LINEAR, "bfloat16").packs((64, 32), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slab_holds_what_the_folder_has_and_its_digest_is_of_its_bytes(tiny_models, dtype):
    kernels, num_packed = load_kernels(NATIVE[0]), 0
    for model_dir in tiny_models.values():
        config = read_config(model_dir)
        own = model_dir, config, name_of(dtype)
        source, plain = WeightFolder(*own, kernels), WeightFolder(*own)
        for shard, layout in source.layouts.items():
            slab, plain_slab = (torch.full((layout.num_bytes,), fill, dtype=torch.uint8) for fill in (255, 0))
            assert source.load_shard(shard, slab) == digest_of(slab)
            plain.load_shard(shard, plain_slab)
            views, wanted = layout.views(slab), layout.views(plain_slab)
            for slot in layout.slots:
                found = views[slot.name]
                if slot.lies_packed(kernels):
                    num_packed += 1
                    rows = torch.empty(slot.shape, dtype=dtype)
                    kernels.gather_rows(PackedMatrix(found), torch.arange(slot.shape[0]), rows)
                    found = rows
                assert torch.equal(found, wanted[slot.name]), slot.name
    assert num_packed > 0


def test_tiles(emulated):
    dtype = torch.bfloat16
    x, plain, bias = randn(200, 544, dtype=dtype), randn(75, 544, dtype=dtype, seed=1), randn(75, dtype=dtype, seed=2)
    matrix = packed(emulated, plain)
    whole = torch.empty(200, 75, dtype=dtype)
    emulated.linear(x, matrix, bias, whole)
    wanted = x.double() @ plain.double().t() + bias.double()
    torch.testing.assert_close(whole.double(), wanted, rtol=2e-2, atol=2e-2 * 544**0.5)
    for size in (1, 15, 16, 17, 31, 32, 33, 48, 65, 199):
        out = torch.empty(size, 75, dtype=dtype)
        emulated.linear(x[-size:], matrix, bias, out)
        assert torch.equal(out, whole[-size:]), size


def test_tiles_sum_in_one_order(emulated):
    """Even and odd k in chains of their own over 32 k, then one addition."""
    dtype = torch.bfloat16
    x, plain = randn(3, 64, dtype=dtype), randn(32, 64, dtype=dtype, seed=1)
    out = torch.empty(3, 32, dtype=dtype)
    emulated.linear(x, packed(emulated, plain), None, out)
    sums = torch.zeros(3, 32)
    for step in range(0, 64, 32):
        chains = [torch.zeros(3, 32, dtype=torch.float32) for _ in range(2)]
        for k in range(step, step + 32):
            product = x[:, k : k + 1].double() * plain[:, k].double()  # exact
            chains[k % 2] = (chains[k % 2].double() + product).float()  # one rounding (53 bits hold the sum)
        sums = sums + (chains[0] + chains[1])
    assert torch.equal(out, sums.to(dtype))
