"""Paged attention in Triton against dense attention in float64, and which tokens must have equal bits.

On a GPU where there is one, in bfloat16; else in Triton's interpreter.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from attention_batch import Batch

from jettison.device.cuda import attention, tiles, worklist
from jettison.device.cuda.attention import Launch, Parts, attend
from jettison.device.cuda.kernels import CudaKernels
from jettison.device.cuda.tiles import Tile, choose_tile
from jettison.device.cuda.worklist import WorkShape, fill_work, num_words
from jettison.device.kernels.base import merge_parts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of a tile that hold no token

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
ON_GPU = torch.cuda.is_available()
DTYPES = [torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
HEADS_AND_BLOCKS = [(dim, size) for dim in (64, 80, 96, 128, 256) for size in (16, 32, 64)]
GROUPS = list(range(1, 17))
if ON_GPU:  # where each is compiled for two or three seconds
    HEADS_AND_BLOCKS, GROUPS = [(64, 16), (80, 32), (96, 64), (128, 16), (256, 64)], [1, 5, 16]
MIXED = [(40, 1), (0, 23), (200, 1), (37, 9), (64, 2)]
TILES = [Tile(16, 4, 2, 1), Tile(64, 4, 2, 1)]


@pytest.fixture(params=["cuda", "cuda-invariant"])
def kernels(request: pytest.FixtureRequest, device: torch.device) -> CudaKernels:
    return CudaKernels(request.param, device)


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several splits in few positions."""
    for module in (attention, worklist):
        monkeypatch.setattr(module, "SPLIT", 2 * tiles.POSITIONS)


def on(device: torch.device, batch: Batch) -> Batch:
    for name in ("q", "k", "v", "arena"):
        setattr(batch, name, getattr(batch, name).to(device))
    return batch


def run(
    batch: Batch, tile: Tile, rows: list[tuple[int, int, int]], programs: int = 1, only_context: bool = False,
    window: int = 0, softcap: float = 0.0, firsts: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its sums, in float32, of some (row, first token, tokens) of a batch that is written."""
    starts = np.cumsum(batch.query_lens) - batch.query_lens
    q = torch.cat([batch.q[starts[row] + first : starts[row] + first + size] for row, first, size in rows])
    queries = np.array([size for _, _, size in rows], dtype=np.int32)
    contexts = np.array([batch.context_lens[row] + first for row, first, _ in rows], dtype=np.int32)
    if only_context:
        contexts = np.array([batch.context_lens[row] for row, _, _ in rows], dtype=np.int32)
    kv_heads = batch.k.shape[1]
    shape = WorkShape(tile, q.shape[1] // kv_heads, kv_heads, programs)
    words = np.empty(num_words(shape, len(q), len(rows)), dtype=np.int32)
    fill_work(words, queries, contexts, shape, only_context, firsts)
    tables = torch.from_numpy(batch.block_tables[[row for row, _, _ in rows]]).to(q.device)
    out = torch.full(q.shape, math.nan, device=q.device)
    lse = torch.full(q.shape[:2], math.nan, device=q.device)
    parts = Parts(kv_heads, q.shape[2], q.device)
    work = torch.from_numpy(words).to(q.device)
    launch = Launch(tile, 3, only_context, lse, window=window, softcap=softcap)
    attend(q, batch.arena, tables, work, out, batch.scale, parts, launch)
    assert not parts.arrived.any(), "the next launch counts from zero"
    return out, lse


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda said: f"{what}: {said}")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mixed_batch_matches_dense_attention(
    kernels: CudaKernels, device: torch.device, dtype: torch.dtype, small_splits: None
) -> None:
    batch = on(device, Batch(MIXED, heads=6, head_dim=64, block_size=16, dtype=dtype))
    batch.write(kernels)
    # NaN anywhere beyond the written length would show: the arena is full of it.
    assert_close(batch.attend(kernels), batch.expected(), dtype)


@pytest.mark.cuda
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (40, 0.0), (64, 5.0), (130, 0.0), (500, 50.0), (0, 0.7)])
def test_windows_and_caps_match_dense_attention(
    kernels: CudaKernels, device: torch.device, window: int, softcap: float, small_splits: None
) -> None:
    batch = on(device, Batch([(40, 1), (0, 23), (300, 9)], heads=4, head_dim=64, block_size=16, dtype=DTYPES[0]))
    batch.write(kernels)
    if window:
        batch.forget(window)
    assert_close(batch.attend(kernels, window, softcap), batch.expected(window, softcap), DTYPES[0])


@pytest.mark.parametrize(("head_dim", "block_size"), HEADS_AND_BLOCKS)
def test_head_and_block_sizes(device: torch.device, head_dim: int, block_size: int) -> None:
    kernels = CudaKernels("cuda-invariant", device)
    batch = on(device, Batch([(70, 1), (3, 6)], head_dim=head_dim, block_size=block_size, dtype=torch.float16))
    batch.write(kernels)
    assert_close(batch.attend(kernels), batch.expected(), torch.float16)


@pytest.mark.parametrize("group", GROUPS)
def test_query_heads_that_share_a_kv_head(device: torch.device, group: int) -> None:
    kernels = CudaKernels("cuda", device)
    batch = on(device, Batch([(20, 1), (0, 4)], heads=group, kv_heads=1, block_size=16, dtype=DTYPES[0]))
    batch.write(kernels)
    assert_close(batch.attend(kernels), batch.expected(), DTYPES[0])


@pytest.mark.parametrize(
    ("tile", "window", "softcap"),
    [*((tile, 0, 0.0) for tile in TILES), (TILES[0], 30, 0.0), (TILES[1], 140, 5.0)],
    ids=lambda what: str(what.rows) if isinstance(what, Tile) else str(what),
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_whole_chunked_alone_and_in_any_batch(
    device: torch.device, tile: Tile, window: int, softcap: float, dtype: torch.dtype, small_splits: None
) -> None:
    local = {"window": window, "softcap": softcap}
    length = 290  # three splits
    batch = on(device, Batch([(0, length), (77, 1)], heads=3, kv_heads=1, head_dim=16, block_size=16, dtype=dtype))
    batch.write(CudaKernels("cuda", device))
    first = length - 38
    whole, whole_lse = run(batch, tile, [(0, first, 38)], **local)
    for at, size, programs, others in (
        (3, 1, 1, []), (37, 1, 1000, []), (37, 1, 1000, [(1, 0, 1)]), (31, 7, 1000, [(1, 0, 1)]), (0, 38, 1000, []),
    ):  # fmt: skip
        out, lse = run(batch, tile, [*others, (0, first + at, size)], programs, **local)
        assert_same(out[-size:], whole[at : at + size], ("out", at, size, programs))
        assert_same(lse[-size:], whole_lse[at : at + size], ("lse", at, size, programs))


def test_one_size_of_tiles_where_bits_must_be_equal() -> None:
    for head_dim in (64, 128, 256):
        for itemsize in (2, 4):
            chosen = {choose_tile(head_dim, itemsize, 7, most, is_one_size=True) for most in (1, 9, 10_000)}
            assert len(chosen) == 1


def test_the_smallest_tile_that_holds_a_chunk() -> None:
    rows = [choose_tile(128, 2, 7, most, is_one_size=False).rows for most in (1, 2, 3, 9, 10, 5000)]
    assert rows == [16, 16, 64, 64, 128, 128]
    with pytest.raises(ValueError, match="share a KV head"):
        choose_tile(128, 2, 65, 1, is_one_size=True)


@pytest.mark.parametrize("programs", [1, 1000], ids=["whole", "split"])
def test_two_parts_merge_to_attention_over_both(device: torch.device, programs: int, small_splits: None) -> None:
    batch = on(device, Batch([(200, 5), (64, 1)], heads=6, head_dim=32, block_size=16, dtype=torch.float32))
    batch.write(CudaKernels("cuda", device))
    rows = [(0, 0, 5), (1, 0, 1)]
    past, past_lse = run(batch, TILES[0], rows, programs, only_context=True)
    own = Batch([(0, 5), (0, 1)], heads=6, head_dim=32, block_size=16, dtype=torch.float32)
    own.q, own.k, own.v, own.scale = batch.q, batch.k, batch.v, batch.scale
    own = on(device, own)
    own.write(CudaKernels("cuda", device))
    new, new_lse = run(own, TILES[0], rows)
    assert_close(merge_parts(past, past_lse, new, new_lse), batch.expected(), torch.float32)


@pytest.mark.parametrize("programs", [1, 1000], ids=["whole", "split"])
@pytest.mark.parametrize("window", [40, 200])
def test_two_parts_with_a_window_merge_to_attention_over_both(
    device: torch.device, programs: int, window: int, small_splits: None
) -> None:
    batch = on(device, Batch([(256, 45), (64, 1)], heads=6, head_dim=32, block_size=16, dtype=torch.float32))
    batch.write(CudaKernels("cuda", device))
    rows = [(0, 0, 45), (1, 0, 1)]
    local = {"window": window, "softcap": 5.0}
    past, past_lse = run(batch, TILES[0], rows, programs, True, **local, firsts=batch.context_lens)
    hidden = past_lse == -math.inf
    assert (past[hidden] == 0).all() and hidden.any() == (window == 40)
    own = Batch([(0, 45), (0, 1)], heads=6, head_dim=32, block_size=16, dtype=torch.float32)
    own.q, own.k, own.v, own.scale = batch.q, batch.k, batch.v, batch.scale
    own = on(device, own)
    own.write(CudaKernels("cuda", device))
    new, new_lse = run(own, TILES[0], rows, **local)
    merged = merge_parts(new, new_lse, past, past_lse)
    assert torch.equal(merged[hidden], new[hidden])
    assert_close(merged, batch.expected(window, 5.0), torch.float32)


def test_sums_are_logarithms_to_base_e(kernels: CudaKernels, device: torch.device) -> None:
    batch = on(device, Batch([(30, 1)], heads=2, kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32))
    batch.write(kernels)
    out, lse = torch.empty_like(batch.q), torch.empty(1, 2, device=device)
    kernels.attention(
        batch.q, batch.arena, batch.block_tables, batch.query_lens, batch.context_lens, out, batch.scale, lse
    )
    keys = torch.cat((batch.past[0, 0, :30], batch.k.cpu())).double()
    expected = (torch.einsum("nhd,hd->hn", keys, batch.q[0].cpu().double()) * batch.scale).logsumexp(1)
    assert_close(lse[0], expected, torch.float32)


@pytest.mark.parametrize("num_rows", [0, 2])
def test_a_step_of_no_tokens_has_no_work(kernels: CudaKernels, device: torch.device, num_rows: int) -> None:
    arena, none = torch.ones(3, 2, 2, 16, 16, device=device), torch.empty(0, 2, 16, device=device)
    lens = np.zeros((num_rows, 1), np.int32), np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    rows = kernels.rows(2, arena, *lens, 0)
    assert (rows.work[0], len(rows.positions), len(rows.slots)) == (0, 0, 0)
    kernels.attend(none, arena, rows, torch.empty_like(none), 1.0)
    kernels.write_kv(none, none, arena, *lens)
    assert (arena == 1).all()


def test_bad_rows_are_refused(kernels: CudaKernels, device: torch.device) -> None:
    batch = on(device, Batch([(9, 4), (0, 1)], block_size=16, dtype=torch.float32))
    rows = (batch.block_tables, batch.query_lens, batch.context_lens)
    with pytest.raises(ValueError, match="need one"):
        kernels.attention(batch.q, batch.arena, *rows, torch.empty_like(batch.q), 1.0, only_context=True)
    with pytest.raises(ValueError, match="dtype"):
        kernels.attention(batch.q.half(), batch.arena, *rows, torch.empty_like(batch.q), 1.0)
    with pytest.raises(ValueError, match="first_positions"):
        kernels.attention(batch.q, batch.arena, *rows, torch.empty_like(batch.q), 1.0, None, True, 4)
    bad = batch.block_tables.copy()
    bad[0, 0] = len(batch.arena)
    with pytest.raises(IndexError, match="block id"):
        kernels.write_kv(batch.k, batch.v, batch.arena, bad, *rows[1:])


def test_bytes_of_what_waits_to_be_merged(device: torch.device) -> None:
    parts = Parts(3, 80, device)
    assert Parts.num_bytes(3, 80) == sum(each.nbytes for each in (parts.sums, parts.scales, parts.arrived))


def test_splits_are_whole_numbers_of_what_is_looked_at_together() -> None:
    assert tiles.SPLIT % tiles.POSITIONS == 0
