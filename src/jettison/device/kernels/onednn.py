"""Torch's ``linear``.

oneDNN, which computes it in bfloat16, reads the weights in place: it packs a block at a time, in scratch space that the
call frees. It keeps only code, generated for each number of rows, and how much of that is bounded
(``device.beside.bound_onednn_caches``).
"""

from __future__ import annotations

import torch
from torch import Tensor

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
