"""Products whose rows do not depend on how many there are: cuBLAS's where this card shows it, else Triton's.

With cublasLt, a workspace of 1 KiB and no split of k, cuBLAS keeps rows equal for the shapes of large models; for few
outputs it may still choose another order of sums for another number of rows, and says so nowhere. So each shape of a
model is looked at once on the card that is to compute it: rows alone beside the same rows in batches. Where one bit
differs, the shape gets a kernel of one tile and one order of k, which is slower. More rows than were looked at are
multiplied in pieces: the other kernel's bits are not cuBLAS's.

Not here: which products a model has (``kernels`` meets them), and the settings of cuBLAS.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jettison.device.cuda.attention import early_launch
from jettison.device.cuda.card import is_capturing
from jettison.device.cuda.rows import BATCHES

logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
"""Of the results of one look, so that it fits beside a card's other memory: 3,542 rows of 7B's widest product, and 441
rows of its head, more than are sampled at once."""

WATCHED = (0, 1, 6, 15, 31, 63, 100, 127, 255, 500, 1023)
"""Rows that are compared in each batch, beside its last one."""

ROWS = 64
"""Of a tile: one for all batches, as the order of sums goes with it."""

Multiply = Callable[[Tensor, Tensor, Tensor], None]
"""(x [T, k], weight [n, k], out [T, n]): ``out = x weight^T``. ``out`` may be wider than ``x``."""


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x, weight, out, num_rows, n, k, x_stride, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out[t, j] = sum of x[t, i] * weight[j, i]``, over ascending i by BK at a time, in float32.

    A program has BM rows and BN outputs.
    """
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    is_row = rows < num_rows
    is_column = columns < n
    left = x + rows[:, None].to(tl.int64) * x_stride + depth[None, :]
    right = weight + columns[None, :].to(tl.int64) * k + depth[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for at in range(0, k, BK):
        inside = depth + at < k
        a = tl.load(left + at, mask=is_row[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + at, mask=is_column[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    to = out + rows[:, None].to(tl.int64) * out_stride + columns[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def columns_of(n: int) -> int:
    """Outputs of a tile: the fewer a product has, the fewer, so that enough programs share it. Never by the batch."""
    return 128 if n >= 16384 else 64 if n >= 4096 else 32


def multiply_in_order(x: Tensor, weight: Tensor, out: Tensor, early: bool) -> None:
    """``Multiply`` by one tile and one order of k, whatever the number of rows. ``early``: see ``early_launch``. ``x``
    and ``out`` may be strided by rows, ``weight`` is contiguous."""
    (num_rows, k), n = x.shape, weight.shape[0]
    if not num_rows:
        return
    is_float32 = x.dtype == torch.float32
    columns = columns_of(n)
    product_kernel[(triton.cdiv(n, columns), triton.cdiv(num_rows, ROWS))](
        x, weight, out, num_rows, n, k, x.stride(0), out.stride(0), BM=ROWS, BN=columns, BK=32 if is_float32 else 64,
        PRECISION="ieee" if is_float32 else "tf32", PDL=early, num_warps=4, num_stages=2 if is_float32 else 4,
        **early_launch(early),
    )


class Product(NamedTuple):
    """What cuBLAS chooses by, beside the number of rows."""

    n: int
    """Outputs."""
    k: int
    """Terms of each."""
    dtype: torch.dtype
    """Of operands."""
    out_dtype: torch.dtype

    def __str__(self) -> str:
        told = str(self.out_dtype).removeprefix("torch.")
        return f"{self.n} x {self.k} in {told}"


class _Seen(NamedTuple):
    """What a look has shown."""

    is_equal: bool
    """The library keeps rows equal."""
    most: int
    """Rows of the largest batch that was looked at."""


class ExaminedProducts:
    """The products of one process. A shape is looked at when it first comes, which waits for the card; a capture is
    preceded by a launch (``Card.capture``), so it finds each shape known, but those of weights that were 0."""

    def __init__(
        self, library: Multiply, own: Multiply, is_capturing: Callable[[], bool] = is_capturing
    ) -> None:
        """``library``: fast, and looked at. ``own``: keeps rows equal. ``is_capturing``: whether launches go into a
        graph, so that nothing can be looked at."""
        self._library = library
        self._own = own
        self._is_capturing = is_capturing
        self._seen: dict[Product, _Seen] = {}
        self._may_fill = False
        self._batches: Sequence[int] = BATCHES

    @property
    def own(self) -> list[str]:
        """Shapes that the library does not keep equal, sorted."""
        return sorted(str(product) for product, seen in self._seen.items() if not seen.is_equal)

    @contextmanager
    def filling(self, batches: Sequence[int] = BATCHES) -> Iterator[None]:
        """Inside, weights are not read yet, and a look may fill them. ``batches``: ascending numbers of rows that will
        be multiplied; looks from now on are at these."""
        self._may_fill, self._batches = True, batches
        try:
            yield
        finally:
            self._may_fill = False

    def multiply(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """See ``Multiply``. Rows do not depend on each other."""
        product = Product(weight.shape[0], weight.shape[1], x.dtype, out.dtype)
        seen = self._seen.get(product) or self._look(product, weight)
        if not seen.is_equal:
            self._own(x, weight, out)
        elif x.shape[0] <= seen.most:
            self._library(x, weight, out)
        else:
            for first in range(0, x.shape[0], seen.most):
                self._library(x[first : first + seen.most], weight, out[first : first + seen.most])

    def _look(self, product: Product, weight: Tensor) -> _Seen:
        """Whether the library keeps rows equal. Noted, but for weights that show nothing as all of them are 0. What
        cannot be looked at is taken not to, for good, as a graph keeps the kernel that it was captured with."""
        if self._is_capturing():
            logger.info("product %s was not looked at before its capture, so Triton multiplies", product)
            seen = self._seen[product] = _Seen(False, 0)
            return seen
        if self._may_fill:
            weight.normal_(0.0, product.k**-0.5, generator=torch.Generator(weight.device).manual_seed(0))
        elif not bool(weight.any()):
            return _Seen(False, 0)
        widest_bytes = max(product.n * product.out_dtype.itemsize, product.k * product.dtype.itemsize)
        most = min(self._batches[-1], max(1, MOST_BYTES // widest_bytes))
        seen = self._seen[product] = _Seen(self._keeps_rows(product, weight, most), most)
        if not seen.is_equal:
            logger.info("product %s: cuBLAS's rows depend on their number, so Triton multiplies", product)
        return seen

    def _keeps_rows(self, product: Product, weight: Tensor, most: int) -> bool:
        batches = [size for size in self._batches if size < most] + [most]
        generator = torch.Generator(weight.device).manual_seed(1)
        x = torch.empty(most, product.k, dtype=product.dtype, device=weight.device)
        x.normal_(0.0, 1.0, generator=generator)
        out = torch.empty(most, product.n, dtype=product.out_dtype, device=weight.device)
        watched = sorted({row for row in WATCHED if row < most} | {most - 1})
        alone = torch.empty(len(watched), product.n, dtype=product.out_dtype, device=weight.device)
        for place, row in enumerate(watched):
            self._library(x[row : row + 1], weight, alone[place : place + 1])
        differs = torch.zeros((), dtype=torch.bool, device=weight.device)
        there = torch.tensor(watched, device=weight.device)
        for size in batches:
            self._library(x[:size], weight, out[:size])
            num_watched = sum(row < size for row in watched)
            differs |= (out.index_select(0, there[:num_watched]) != alone[:num_watched]).any()
        return not bool(differs)
