"""Products that keep rows equal: what the library does not keep equal here is found, and computed in order."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from jettison.device.cuda.products import ExaminedProducts, Product, columns_of, multiply_in_order
from jettison.device.cuda.rows import BATCHES, BUCKETS, batches_for, buckets_for

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
    drawn = torch.get_rng_state()
    with products.filling():
        multiplied(products, x, weight)
    assert torch.equal(torch.get_rng_state(), drawn), "from a seed of its own"
    assert products.own == [str(Product(10, 24, torch.float32, torch.float32))] and weight.any()
    first = weight.clone()
    weight.zero_()
    multiplied(products, x, weight)
    assert not weight.any(), "what is known is not looked at again"
    other = ExaminedProducts(Library({48}), by_hand)
    with other.filling():
        multiplied(other, x, weight)
    assert torch.equal(weight, first), "every process looks at the same"


def test_sizes_of_graphs_are_looked_at() -> None:
    assert set(BUCKETS) <= set(BATCHES) and sorted(set(BATCHES)) == [*BATCHES]


@pytest.mark.parametrize(
    ("parameters", "max_num_tokens", "max_num_seqs"), [(2e8, 2000, 300), (1e7, 5000, 256), (1, 7, 9)]
)
def test_all_sizes_that_are_served_are_looked_at(parameters, max_num_tokens, max_num_seqs) -> None:
    buckets = buckets_for(parameters, max_num_tokens)
    sizes = batches_for(buckets, max_num_tokens, max_num_seqs)
    assert {*buckets, *range(1, max_num_seqs + 1), max_num_tokens} <= set(sizes) and sizes == sorted(set(sizes))
    assert max(sizes) == max(max_num_tokens, max_num_seqs)


def test_told_sizes_are_looked_at(few_bytes) -> None:
    library = Library({6})
    products = ExaminedProducts(library, by_hand)
    with products.filling([1, 6, 11]):
        multiplied(products, torch.randn(2, 24), torch.randn(10, 24))
    assert set(library.batches) == {1, 6, 11} and products.own == ["10 x 24 in float32"]


def test_more_rows_than_were_looked_at_are_multiplied_in_pieces(few_bytes) -> None:
    """With the bits of the library, which has another order of sums for so many rows at a time."""
    library = Library(set(range(301, 1000)))
    products = ExaminedProducts(library, by_hand)
    x, weight = torch.randn(750, 24), torch.randn(10, 24)
    out = multiplied(products, x, weight)
    assert library.batches[-3:] == [300, 300, 150] and not products.own
    alone = torch.cat([multiplied(products, x[i : i + 1], weight) for i in range(0, 750, 50)])
    assert torch.equal(out[::50], alone)


def test_nothing_is_looked_at_while_launches_are_captured(few_bytes) -> None:
    """A weight of zeros comes unknown into its capture: what the graph has is what all later launches have."""
    is_capturing = False
    library = Library(set())
    products = ExaminedProducts(library, by_hand, lambda: is_capturing)
    x, weight = torch.randn(2, 24), torch.zeros(10, 24)
    multiplied(products, x, weight)
    is_capturing = True
    assert (multiplied(products, x, weight) == 7.0).all() and not library.batches
    is_capturing = False
    weight.normal_()
    assert (multiplied(products, x, weight) == 7.0).all() and not library.batches
    assert products.own == ["10 x 24 in float32"]
