"""Paged attention of every back end against dense attention written out, and the promises around it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attention_batch import VARIANTS, Batch, batches
from hypothesis import given, settings

from jettison.device.kernels.base import Kernels
from jettison.device.kernels.loading import load_kernels

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_matches_dense_attention(name: str, dtype: torch.dtype) -> None:
    check_dense(load_kernels(name), dtype)


def test_tiles_match_dense_attention(emulated: Kernels) -> None:
    check_dense(emulated, torch.bfloat16)


def check_dense(kernels: Kernels, dtype: torch.dtype) -> None:
    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(batches())
    def check(shape: dict[str, object]) -> None:
        batch = Batch(dtype=dtype, **shape)  # type: ignore[arg-type]
        batch.write(kernels)
        actual = batch.attend(kernels).double()
        # NaN anywhere beyond the written length would show: the arena is full of it.
        torch.testing.assert_close(actual, batch.expected(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    check()


def test_write_kv_touches_only_its_slots(kernels: Kernels) -> None:
    batch = Batch([(5, 7), (0, 1), (16, 3)])
    before = batch.arena.clone()
    batch.write(kernels)
    start = 0
    for row, (context, query) in enumerate(batch.lens):
        for i in range(query):
            block, offset = batch.block_tables[row, (context + i) // 8], (context + i) % 8
            assert torch.equal(batch.arena[block, 0, :, offset], batch.k[start + i])
            assert torch.equal(batch.arena[block, 1, :, offset], batch.v[start + i])
            before[block, :, :, offset] = batch.arena[block, :, :, offset]
        start += query
    assert torch.equal(batch.arena.nan_to_num(9e9), before.nan_to_num(9e9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_does_not_depend_on_the_batch(kernels: Kernels, dtype: torch.dtype) -> None:
    lens = [(100, 1), (0, 30), (64, 1), (37, 20), (0, 1), (129, 3)]
    batch = Batch(lens, dtype=dtype, heads=6, head_dim=64, block_size=16)
    batch.write(kernels)
    together = batch.attend(kernels)
    ends = np.cumsum(batch.query_lens)
    for order in ([3], [5, 0], [4, 3, 2, 1, 0], [1, 1, 1]):
        q = torch.cat([batch.q[ends[r] - batch.query_lens[r] : ends[r]] for r in order])
        out = torch.empty_like(q)
        kernels.attention(
            q, batch.arena, batch.block_tables[order], batch.query_lens[order], batch.context_lens[order], out,
            batch.scale,
        )  # fmt: skip
        wanted = torch.cat([together[ends[r] - batch.query_lens[r] : ends[r]] for r in order])
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "torch"])
def test_token_does_not_depend_on_chunking(name: str, dtype: torch.dtype) -> None:
    check_chunks(load_kernels(name), dtype)


def test_token_does_not_depend_on_chunking_with_tiles(emulated: Kernels) -> None:
    check_chunks(emulated, torch.bfloat16)


def check_chunks(kernels: Kernels, dtype: torch.dtype) -> None:
    batch = Batch([(0, 131)], dtype=dtype, heads=4, head_dim=32, block_size=16)
    batch.write(kernels)
    whole = batch.attend(kernels)
    for chunk in (1, 7, 64):
        for start in range(0, 131, chunk):
            q = batch.q[start : start + chunk]
            out = torch.empty_like(q)
            lens = np.array([q.shape[0]], dtype=np.int32), np.array([start], dtype=np.int32)
            kernels.attention(q, batch.arena, batch.block_tables, *lens, out, batch.scale)
            assert torch.equal(out, whole[start : start + chunk])


def test_threads_do_not_change_a_bit() -> None:
    kernels = load_kernels()
    batch = Batch([(100, 1), (3, 77), (64, 1)], dtype=torch.float32, head_dim=64)
    batch.write(kernels)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = batch.attend(kernels)
        torch.set_num_threads(2)
        two = batch.attend(kernels)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, two)


def test_torch_int32_arrays_are_accepted(kernels: Kernels) -> None:
    batch = Batch([(9, 4), (20, 1)])
    batch.write(kernels)
    out = torch.empty_like(batch.q)
    tables, queries, contexts = (
        torch.from_numpy(array) for array in (batch.block_tables, batch.query_lens, batch.context_lens)
    )
    kernels.attention(batch.q, batch.arena, tables, queries, contexts, out, batch.scale)
    assert torch.equal(out, batch.attend(kernels))


def test_output_may_be_strided(kernels: Kernels) -> None:
    batch = Batch([(9, 4), (20, 1)])
    batch.write(kernels)
    wide = torch.full((5, 7, 16), math.nan, dtype=torch.float64)
    kernels.attention(
        batch.q, batch.arena, batch.block_tables, batch.query_lens, batch.context_lens, wide[:, :4], batch.scale
    )
    assert torch.equal(wide[:, :4], batch.attend(kernels))
    assert wide[:, 4:].isnan().all()


@pytest.mark.parametrize("num_rows", [0, 2])
def test_a_step_of_no_tokens_leaves_all_as_it_is(kernels: Kernels, num_rows: int) -> None:
    arena, none = torch.ones(3, 2, 2, 8, 16), torch.empty(0, 2, 16)
    rows = np.zeros((num_rows, 1), np.int32), np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    kernels.write_kv(none, none, arena, *rows)
    kernels.attention(none, arena, *rows, torch.empty_like(none), 1.0)
    assert (arena == 1).all()


def test_bad_arguments_are_refused_before_anything_is_written(kernels: Kernels) -> None:
    batch = Batch([(9, 4), (20, 1)])
    before = batch.arena.clone().nan_to_num(9e9)
    for block_id in (-1, batch.arena.shape[0]):
        tables = batch.block_tables.copy()
        tables[1, 1] = block_id
        with pytest.raises(IndexError, match="block id"):
            kernels.write_kv(batch.k, batch.v, batch.arena, tables, batch.query_lens, batch.context_lens)
    with pytest.raises(IndexError, match="needs"):
        kernels.write_kv(
            batch.k, batch.v, batch.arena, batch.block_tables, batch.query_lens, batch.context_lens + np.int32(99)
        )
    with pytest.raises(ValueError, match="add up"):
        kernels.write_kv(
            batch.k[:4], batch.v[:4], batch.arena, batch.block_tables, batch.query_lens, batch.context_lens
        )
    with pytest.raises(ValueError, match="dtype"):
        kernels.write_kv(
            batch.k.float(), batch.v.float(), batch.arena, batch.block_tables, batch.query_lens, batch.context_lens
        )
    with pytest.raises(ValueError, match="int32"):
        kernels.attention(
            batch.q, batch.arena, batch.block_tables.astype(np.int64), batch.query_lens, batch.context_lens,
            torch.empty_like(batch.q), batch.scale,
        )  # fmt: skip
    assert torch.equal(batch.arena.nan_to_num(9e9), before)
