"""Small products and gates with known results: they guard against a variant of the C kernels that was miscompiled.

Not here: which variants there are (``native``).
"""

from __future__ import annotations

import torch

from jettison.device.kernels.base import Kernels
from jettison.device.kernels.operands import IntegerMatrix, PackedMatrix
from jettison.device.model.integers import IntegerForm


def passes_self_check(kernels: Kernels) -> bool:
    """Whether all of them have these results."""
    # Sizes that go through every tile: 13 rows = 6 + 7 (or 3 and 2), 9 outputs = 2 * 4 + 1, 70 = whole chunks + rest.
    x = torch.arange(-70, 12 * 70, dtype=torch.float32).remainder(7).reshape(13, 70)
    w = torch.arange(9 * 70, dtype=torch.float32).remainder(5).reshape(9, 70)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        out, gated = torch.empty(13, 9, dtype=dtype), torch.empty(13, 70, dtype=dtype)
        kernels.linear(x.to(dtype), w.to(dtype), None, out)
        kernels.silu_mul(torch.cat((x, x), dim=1).to(dtype), gated)
        expected = x.double() * torch.nn.functional.silu(x.double())
        for actual, wanted in ((out, x.double() @ w.double().t()), (gated, expected)):
            if not torch.allclose(actual.double(), wanted, rtol=tolerance, atol=tolerance):
                return False
        if not _multiplies_packed(kernels, dtype, tolerance) or not _multiplies_integers(kernels, dtype, tolerance):
            return False
    return True


def _multiplies_packed(kernels: Kernels, dtype: torch.dtype, tolerance: float) -> bool:
    """49 rows = 32 + 16 + 1 of tiles (or 5 x 10 of registers), 75 outputs = 2 groups + 11 plain rows."""
    w = torch.arange(75 * 64, dtype=torch.float32).remainder(5).reshape(75, 64).to(dtype)
    if not kernels.packs(tuple(w.shape), dtype):
        return True
    x = torch.arange(49 * 64, dtype=torch.float32).remainder(7).reshape(49, 64).to(dtype)
    matrix, out = PackedMatrix(torch.empty_like(w)), torch.empty(49, 75, dtype=dtype)
    kernels.pack_rows(w, 0, matrix)
    kernels.linear(x, matrix, None, out)
    return torch.allclose(out.double(), x.double() @ w.double().t(), rtol=tolerance, atol=tolerance)


def _multiplies_integers(kernels: Kernels, dtype: torch.dtype, tolerance: float) -> bool:
    """By 1 row and by 49, whose widening differs."""
    whole = torch.arange(64 * 64, dtype=torch.int32).remainder(15).sub(7).to(torch.int8).reshape(64, 64)
    scales, offsets = torch.full((2, 64, 2), 0.5, dtype=torch.float16)
    x = torch.arange(49 * 64, dtype=torch.float32).remainder(7).reshape(49, 64).to(dtype)
    for form in (IntegerForm(4, 32, "float16", "min"), IntegerForm(8, 32, "float16", "none")):
        if not kernels.keeps(form, (64, 64), dtype):
            continue
        matrix = IntegerMatrix(torch.empty(form.num_bytes(64, 64), dtype=torch.uint8), 64, 64, form)
        kernels.pack_integers(whole, scales, offsets if form.offset == "min" else None, 0, matrix)
        weights = whole.double() / 2 + (4.5 if form.offset == "min" else 0)
        for rows in (x[:1], x):
            out = torch.empty(len(rows), 64, dtype=dtype)
            kernels.linear(rows, matrix, None, out)
            if not torch.allclose(out.double(), rows.double() @ weights.t(), rtol=tolerance, atol=tolerance):
                return False
    return True
