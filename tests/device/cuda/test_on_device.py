"""What only a GPU can show: bits at full size, merging by the program that ends last, products of any batch, graphs."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from attention_batch import Batch

from jettison.device.cuda.attention import Launch, Parts, attend
from jettison.device.cuda.kernels import CudaKernels
from jettison.device.cuda.tiles import ONE_SIZE, Tile, tiles_for
from jettison.device.cuda.worklist import WorkShape, fill_work, num_words

pytestmark = [
    pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]  # fmt: skip

KV_HEADS, GROUP, HEAD_DIM, LENGTH = 4, 7, 128, 2200
ONE_TILE = tiles_for(HEAD_DIM, 2)[ONE_SIZE]


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda said: f"{what}: {said}")


class Request:
    """One request's keys, values and queries at the size of a 7B model, in bfloat16."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(7)
        width = -(-LENGTH // 16)
        shape = (width, 2, KV_HEADS, 16, HEAD_DIM)
        self.arena = torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)
        self.table = torch.randperm(width, device="cuda", generator=generator).to(torch.int32)
        self.q = torch.randn(
            LENGTH, KV_HEADS * GROUP, HEAD_DIM, device="cuda", generator=generator, dtype=torch.bfloat16
        )
        self.parts = Parts(KV_HEADS, HEAD_DIM, torch.device("cuda"))

    def attend(self, first: int, size: int, *, tile: Tile = ONE_TILE, programs: int = 1, copies: int = 1):
        """Outputs and sums in float32, where bfloat16 hides nothing, of some tokens, in so many equal rows."""
        shape = WorkShape(tile, GROUP, KV_HEADS, programs)
        words = np.empty(num_words(shape, copies * size, copies), dtype=np.int32)
        lens = np.full(copies, size, dtype=np.int32), np.full(copies, first, dtype=np.int32)
        fill_work(words, *lens, shape)
        q = self.q[first : first + size].repeat(copies, 1, 1)
        out, lse = torch.full(q.shape, torch.nan, device="cuda"), torch.full(q.shape[:2], torch.nan, device="cuda")
        tables, work = self.table.repeat(copies, 1), torch.from_numpy(words).cuda()
        launch = Launch(tile, 264, lse=lse)
        attend(q, self.arena, tables, work, out, HEAD_DIM**-0.5, self.parts, launch)
        return out, lse


@pytest.fixture(scope="module")
def request_of_2200() -> Request:
    return Request()


@pytest.mark.parametrize(
    ("size", "programs", "copies"),
    [(1100, 1, 1), (40, 10_000, 1), (1, 1, 1), (1, 10_000, 1), (1, 1, 64), (1, 10_000, 8)],
)
def test_a_token_has_the_same_bits_at_full_size(
    request_of_2200: Request, size: int, programs: int, copies: int
) -> None:
    whole, whole_lse = request_of_2200.attend(0, LENGTH)
    for first in {LENGTH - size, LENGTH - size - 13, 600}:
        out, lse = request_of_2200.attend(first, size, programs=programs, copies=copies)
        for copy in range(copies):
            mine = slice(copy * size, (copy + 1) * size)
            assert_same(out[mine], whole[first : first + size], ("out", first, copy))
            assert_same(lse[mine], whole_lse[first : first + size], ("lse", first, copy))


@pytest.mark.parametrize("rows", [16, ONE_SIZE])
def test_the_split_that_ends_last_merges_alike(request_of_2200: Request, rows: int) -> None:
    tile = tiles_for(HEAD_DIM, 2)[rows]
    first = request_of_2200.attend(LENGTH - 1, 1, tile=tile, programs=10_000, copies=32)
    for _ in range(300):
        again = request_of_2200.attend(LENGTH - 1, 1, tile=tile, programs=10_000, copies=32)
        assert_same(again[0], first[0], "out")
        assert_same(again[1], first[1], "lse")
    assert not request_of_2200.parts.arrived.any()


PRODUCTS = """
import torch
from jettison.device.cuda.kernels import CudaKernels
kernels = CudaKernels("cuda-invariant", torch.device("cuda"))
layers = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (7168, 5120), (5120, 13824))
small = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (1536, 1024), (1024, 1024), (8192, 1024), (1024, 4096))
heads = ((152064, 3584), (151936, 896), (49152, 576), (256, 1024), (151936, 1024))
for n, k in (*layers, *small, *heads):
    dtype = torch.float32 if (n, k) in heads else torch.bfloat16
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / 64
    x = torch.randn(2048, k, device="cuda", dtype=torch.bfloat16)
    base = torch.empty(2048, n, device="cuda", dtype=dtype)
    kernels.linear(x, weight, None, base)
    for rows in (1, 2, 3, 7, 16, 17, 64, 100, 129, 192, 256, 1024):
        out = torch.empty(rows, n, device="cuda", dtype=dtype)
        kernels.linear(x[:rows], weight, None, out)
        assert torch.equal(out, base[:rows]), (n, k, rows)
print(kernels.own_products)
assert not {f"{n} x {k} in bfloat16" for n, k in layers} & set(kernels.own_products), "large ones were equal"
"""


def test_rows_of_invariant_products_do_not_depend_on_the_batch() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", PRODUCTS], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


def test_a_captured_launch_goes_with_a_later_list_of_work() -> None:
    """Tables, places and items are read from memory: one graph serves every step of as many rows."""
    device = torch.device("cuda")
    kernels = CudaKernels("cuda", device)
    steps = [
        Batch([(context, 1) for context in contexts], heads=28, kv_heads=4, head_dim=128, block_size=16,
              dtype=torch.bfloat16, seed=9)
        for contexts in ([900, 1100, 20], [3, 1100, 640])
    ]  # fmt: skip
    arena = torch.randn(240, 2, 4, 16, 128, device=device, dtype=torch.bfloat16)
    q = steps[0].q.to(device)
    tables = torch.arange(240, dtype=torch.int32, device=device).view(3, 80)

    def plan(batch: Batch):
        return kernels.rows(28, arena, tables.cpu().numpy(), batch.query_lens, batch.context_lens, 3)

    def attended(rows) -> torch.Tensor:
        out = torch.empty_like(q)
        kernels.attend(q, arena, rows, out, 0.1)
        return out

    plans = [plan(batch) for batch in steps]
    expected = [attended(rows) for rows in plans]
    staged = plans[0]._replace(work=torch.zeros_like(plans[0].work))
    staged.work.copy_(plans[0].work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attended(staged)
    for rows, wanted in zip(plans, expected):
        staged.work.copy_(rows.work)
        graph.replay()
        assert_same(captured, wanted, "captured")
