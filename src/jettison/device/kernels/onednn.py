"""Torch's ``linear``, and a bound on the memory that oneDNN, which computes it in bfloat16, keeps outside of the
budget.

oneDNN reads the weights in place: it packs a block at a time, in scratch space that the call frees. It keeps only code,
generated for each number of rows.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch
from torch import Tensor

ONEDNN_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables for the number of products that oneDNN, and torch's layer above it, keep code for. Both keep the same code
alive."""

NUM_KEPT_PRODUCTS = 32
"""The five products of a step at the last six numbers of rows. The code of one has 0.4 to 0.8 MiB and takes about half
a millisecond to generate. By default both keep 1,024, which was 0.9 GiB and more for steps of 1 to 256 rows."""


def bound_onednn_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let oneDNN keep little outside of the memory budget. It has an effect only before oneDNN's first product.

    Variables that are set already stay unchanged.
    """
    for name in ONEDNN_CACHES:
        environ.setdefault(name, str(NUM_KEPT_PRODUCTS))


WIDENED_ELEMENTS = 1 << 20
"""Of a matrix, at a time: a few MiB, which stay in a cache."""


def torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = x @ weight.T + bias`` by torch, unchecked."""
    if out.dtype != x.dtype:
        torch_sums(x, weight, out)
        if bias is not None:
            out.add_(bias)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def torch_sums(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out = x @ weight.T`` for a wider ``out``, which gets the sums as they are."""
    if x.is_cuda:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
        return
    # On the host torch rounds every product to its operands' type. Widened, bfloat16 multiplies exactly.
    wide, num_rows = x.to(out.dtype), max(1, WIDENED_ELEMENTS // weight.shape[1])
    for rows, columns in zip(weight.split(num_rows), out.split(num_rows, dim=1), strict=True):
        torch.mm(wide, rows.to(out.dtype).t(), out=columns)
