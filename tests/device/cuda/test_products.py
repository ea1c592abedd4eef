"""Products that keep rows equal: what the library does not keep equal here is found, and computed in order."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from jettison.device.cuda.products import BATCHES, ExaminedProducts, Product, columns_of, multiply_in_order
from jettison.device.cuda.rows import BUCKETS

SHAPES = [(1, 96, 40), (5, 300, 64), (64, 33, 130), (70, 4100, 20)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "out_dtype"), [(torch.float32, torch.float32), (torch.float16, torch.float32),
                                                  (torch.float16, torch.float16)])  # fmt: skip
def test_in_order_it_is_the_product(shape, dtype, out_dtype, device) -> None:
    rows, n, k = shape
    torch.manual_seed(rows)
    wide = torch.randn(rows, 2 * k, device=device).to(dtype)
    x, weight = wide[:, :k], torch.randn(n, k, device=device).to(dtype)
    out = torch.full((rows + 1, n + 3), torch.nan, dtype=out_dtype, device=device)
    multiply_in_order(x, weight, out[:rows, :n], early=False)
    expected = x.double() @ weight.double().t()
    tolerance = 2e-3 if out_dtype == torch.float16 else 1e-5
    torch.testing.assert_close(out[:rows, :n].double(), expected, rtol=tolerance, atol=tolerance * k**0.5)
    assert out[rows:].isnan().all() and out[:, n:].isnan().all(), "nothing else is written"


@pytest.mark.parametrize("shape", SHAPES)
def test_in_order_a_row_is_the_same_in_every_batch(shape, device) -> None:
    rows, n, k = shape
    x, weight = torch.randn(rows, k, device=device), torch.randn(n, k, device=device)
    whole, alone = torch.empty(rows, n, device=device), torch.empty(1, n, device=device)
    multiply_in_order(x, weight, whole, early=False)
    for row in {0, rows // 2, rows - 1}:
        multiply_in_order(x[row : row + 1], weight, alone, early=False)
        assert torch.equal(alone[0], whole[row])


def test_tiles_go_with_the_outputs_alone() -> None:
    assert [columns_of(n) for n in (1, 1024, 4096, 8192, 37888)] == [32, 32, 64, 64, 128]


class Library:
    """A library whose rows are exact, but for some numbers of rows, where a sum is made in two halves."""

    def __init__(self, halves: set[int]) -> None:
        self.halves = halves
        self.batches: list[int] = []

    def __call__(self, x, weight, out) -> None:
        self.batches.append(len(x))
        k = x.shape[1] // 2
        terms = x.double()[:, None] * weight.double()[None]
        if len(x) in self.halves:
            out.copy_(terms[..., :k].sum(-1).to(out.dtype) + terms[..., k:].sum(-1).to(out.dtype))
        else:
            out.copy_(terms.sum(-1).to(out.dtype))


def by_hand(x, weight, out) -> None:
    out.fill_(7.0)


def multiplied(products: ExaminedProducts, x, weight) -> torch.Tensor:
    out = torch.empty(len(x), len(weight), dtype=x.dtype)
    products.multiply(x, weight, out)
    return out


@pytest.fixture
def few_bytes(monkeypatch) -> None:
    monkeypatch.setattr("jettison.device.cuda.products.MOST_BYTES", 4 * 24 * 300)


@pytest.mark.parametrize("halves", [set(), {1}, {48}, {300}])
def test_a_library_is_used_where_its_rows_are_equal(halves: set[int], few_bytes) -> None:
    """And looked at once for each shape, alone and at all sizes that the memory for it allows."""
    library = Library(halves)
    products = ExaminedProducts(library, by_hand)
    x, weight = torch.randn(2, 24), torch.randn(10, 24)
    for _ in range(3):
        out = multiplied(products, x, weight)
    assert (out == 7.0).all() if halves else torch.allclose(out, x @ weight.t(), atol=1e-5)
    assert products.own == (["10 x 24 in float32"] if halves else [])
    looked = library.batches[: len(library.batches) - (0 if halves else 3)]
    assert max(looked) == 300 and {size for size in BATCHES if size < 300} <= set(looked)
    assert looked.count(300) == 1, "once"


def test_weights_that_are_not_read_yet_are_filled_where_that_is_said(few_bytes) -> None:
    products = ExaminedProducts(Library({48}), by_hand)
    x, weight = torch.randn(2, 24), torch.zeros(10, 24)
    assert (multiplied(products, x, weight) == 7.0).all(), "of zeros all sums are equal, so nothing is known"
    assert not products.own and not weight.any()
    with products.filling():
        multiplied(products, x, weight)
    assert products.own == [str(Product(10, 24, torch.float32, torch.float32))] and weight.any()
    weight.zero_()
    multiplied(products, x, weight)
    assert not weight.any(), "what is known is not looked at again"


def test_sizes_of_graphs_are_looked_at() -> None:
    most = 1024
    assert {size for size in BUCKETS if size <= most} <= set(BATCHES) and sorted(set(BATCHES)) == [*BATCHES]
