"""Attention with a sliding window, a softcap and sinks, of every back end, against dense attention written out."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from attention_batch import VARIANTS, Batch, batches
from hypothesis import given, settings

from jettison.device.kernels.base import Kernels, apply_sinks, merge_parts, sum_dtype
from jettison.device.kernels.loading import load_kernels

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
NATIVE = [name for name in VARIANTS if name != "torch"]
WINDOWS = st.one_of(st.just(0), st.integers(1, 9), st.sampled_from([15, 16, 63, 64, 65, 127, 128, 129, 191, 500]))
"""None, less and more than a block and a tile of 64, up to more than all."""
CAPS = st.sampled_from([0.0, 0.5, 3.0, 50.0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_matches_dense_attention(name: str, dtype: torch.dtype) -> None:
    check_dense(load_kernels(name), dtype)


def test_tiles_match_dense_attention(emulated: Kernels) -> None:
    check_dense(emulated, torch.bfloat16)


def check_dense(kernels: Kernels, dtype: torch.dtype) -> None:
    @settings(max_examples=16, deadline=None, derandomize=True)
    @given(batches(), WINDOWS, CAPS)
    def check(shape: dict[str, object], window: int, softcap: float) -> None:
        batch = Batch(dtype=dtype, **shape)  # type: ignore[arg-type]
        batch.write(kernels)
        if window:
            batch.forget(window)
        actual = batch.attend(kernels, window, softcap).double()
        expected = batch.expected(window, softcap)
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    check()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", VARIANTS)
def test_scores_far_beyond_the_cap(name: str, head_dim: int) -> None:
    kernels = load_kernels(name)
    batch = Batch([(70, 2)], heads=6, head_dim=head_dim)
    batch.q *= 100
    batch.write(kernels)
    torch.testing.assert_close(batch.attend(kernels, 40, 30.0), batch.expected(40, 30.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (50, 0.0), (64, 5.0), (200, 0.0), (0, 5.0)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NATIVE)
def test_a_token_has_the_same_bits_in_any_chunk_and_batch(
    name: str, dtype: torch.dtype, window: int, softcap: float
) -> None:
    check_chunks(load_kernels(name), dtype, window, softcap)


@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (50, 5.0)])
def test_a_token_has_the_same_bits_in_any_chunk_with_tiles(emulated: Kernels, window: int, softcap: float) -> None:
    check_chunks(emulated, torch.bfloat16, window, softcap)


def check_chunks(kernels: Kernels, dtype: torch.dtype, window: int, softcap: float) -> None:
    batch = Batch([(0, 301), (77, 3)], dtype=dtype, heads=4, head_dim=32, block_size=16)
    batch.write(kernels)
    whole = batch.attend(kernels, window, softcap)
    for chunk in (1, 7, 64):
        for start in range(0, 301, chunk if chunk > 1 else 13):
            q = batch.q[start : min(start + chunk, 301)]
            size = len(q)
            # As other rows stand beside it, and alone.
            for beside in ([], [1]):
                rows = [0, *beside]
                queries = torch.cat([q, *(batch.q[301:] for _ in beside)])
                out = torch.empty_like(queries)
                lens = np.array([size, 3], np.int32)[: len(rows)], np.array([start, 77], np.int32)[: len(rows)]
                kernels.attention(
                    queries, batch.arena, batch.block_tables[rows], *lens, out, batch.scale, window=window,
                    softcap=softcap,
                )  # fmt: skip
                assert torch.equal(out[:size], whole[start : start + size]), (chunk, start)
                assert torch.equal(out[size:], whole[301:] if beside else out[:0])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_window_as_long_as_the_text_and_no_cap_change_nothing(name: str) -> None:
    kernels = load_kernels(name)
    batch = Batch([(150, 3), (0, 40)], dtype=torch.float32, head_dim=64)
    batch.write(kernels)
    assert torch.equal(batch.attend(kernels, 153), batch.attend(kernels))


@settings(max_examples=12, deadline=None)
@given(st.data())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_parts_merge_into_the_whole(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """The context's leading blocks are attended to apart, by tokens that need not follow them, then the rest."""
    kernels = load_kernels(name)
    batch = Batch(dtype=dtype, **data.draw(batches()))
    window, softcap = data.draw(WINDOWS), data.draw(CAPS)
    batch.write(kernels)
    there = np.array([data.draw(st.integers(0, int(c) // batch.block_size)) for c in batch.context_lens], np.int32)
    tables, firsts = batch.block_tables.copy(), batch.context_lens
    for row, count in enumerate(there):
        tables[row, : tables.shape[1] - count] = batch.block_tables[row, count:]
    leading = (there * batch.block_size).astype(np.int32)
    out = torch.full_like(batch.q, math.nan)
    lse = torch.full(batch.q.shape[:2], math.nan, dtype=sum_dtype(dtype))
    kernels.attention(
        batch.q, batch.arena, tables, batch.query_lens, (firsts - leading).astype(np.int32), out, batch.scale, lse,
        window=window, softcap=softcap,
    )  # fmt: skip
    mine = there > 0
    if mine.any():
        chosen = torch.from_numpy(np.flatnonzero(np.repeat(mine, batch.query_lens)))
        q = batch.q[chosen].contiguous()
        past, past_lse = torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, dtype=lse.dtype)
        kernels.attention(
            q, batch.arena, batch.block_tables[mine], batch.query_lens[mine], leading[mine], past, batch.scale,
            past_lse, True, window, softcap, firsts[mine] if window else None,
        )  # fmt: skip
        hidden = past_lse == -math.inf
        assert (past[hidden] == 0).all()
        before = out[chosen]
        out[chosen] = merge_parts(before, lse[chosen], past, past_lse)
        assert torch.equal(out[chosen][hidden], before[hidden]), "what sees nothing there stays as it is"
    expected = batch.expected(window, softcap)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_that_see_nothing_have_no_weight(name: str, dtype: torch.dtype) -> None:
    kernels = load_kernels(name)
    batch = Batch([(70, 3), (20, 2), (130, 4)], dtype=dtype)
    batch.write(kernels)
    out, lse = torch.full_like(batch.q, math.nan), torch.full(batch.q.shape[:2], math.nan, dtype=sum_dtype(dtype))
    firsts = np.array([76, 90, 140], np.int32)  # windows of 8 begin at 69 to 71, far beyond, and at 133
    rows = (batch.block_tables, batch.query_lens, batch.context_lens)
    kernels.attention(batch.q, batch.arena, *rows, out, 1.0, lse, True, 8, 0.0, firsts)
    sees = torch.tensor([True, *[False] * 8])
    assert (lse[sees] > -math.inf).all() and (lse[~sees] == -math.inf).all()
    assert (out[~sees] == 0).all() and torch.equal(out[0].view(2, 2, -1)[:, 0], batch.past[0, 1, 69])


@pytest.mark.parametrize("name", VARIANTS)
def test_sinks_take_their_share_of_the_weights(name: str) -> None:
    kernels = load_kernels(name)
    batch = Batch([(90, 5), (0, 7)], heads=4, seed=3)
    batch.write(kernels)
    sinks = torch.tensor([-2.0, 0.0, 1.5, 40.0], dtype=torch.float64)
    out, lse = torch.empty_like(batch.q), torch.empty(batch.q.shape[:2], dtype=torch.float64)
    rows = (batch.block_tables, batch.query_lens, batch.context_lens)
    kernels.attention(batch.q, batch.arena, *rows, out, batch.scale, lse, window=33)
    apply_sinks(out, lse, sinks)
    torch.testing.assert_close(out, batch.expected(33, 0.0, sinks), rtol=1e-12, atol=1e-12)


def test_sinks_keep_the_type_of_what_they_scale() -> None:
    out, lse = torch.ones(2, 3, 4, dtype=torch.bfloat16), torch.zeros(2, 3)
    apply_sinks(out, lse, torch.zeros(3, dtype=torch.bfloat16))
    assert torch.equal(out, torch.full_like(out, 0.5))


@pytest.mark.parametrize("name", VARIANTS)
def test_options_that_make_no_sense_are_refused(name: str) -> None:
    kernels = load_kernels(name)
    batch = Batch([(9, 4), (20, 1)])
    batch.write(kernels)
    rows = (batch.block_tables, batch.query_lens, batch.context_lens)

    def attend(**options: object) -> None:
        kernels.attention(batch.q, batch.arena, *rows, torch.empty_like(batch.q), 1.0, **options)  # type: ignore[arg-type]

    for message, options in (
        ("window", {"window": -1}),
        ("softcap", {"softcap": -1.0}),
        ("softcap", {"softcap": math.nan}),
        ("needed", {"window": 3, "only_context": True}),
        ("follow", {"first_positions": batch.context_lens}),
        ("expected 2", {"first_positions": batch.context_lens[:1], "only_context": True, "window": 3}),
    ):
        with pytest.raises(ValueError, match=message):
            attend(**options)
