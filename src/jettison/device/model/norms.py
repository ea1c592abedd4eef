"""Norms of every kind that the table knows. RMS norms are the kernels'; LayerNorm is of single operations.

Not here: which norms a layer has (``general_layer``).
"""

from __future__ import annotations

from torch import Tensor

from jettison.device.kernels import Kernels
from jettison.device.kernels.base import sum_dtype
from jettison.device.kernels.norms import rms_scaled
from jettison.device.model.arithmetic import Norm


class Norms:
    """The norms of one model."""

    def __init__(self, kind: Norm, eps: float, kernels: Kernels) -> None:
        self._kind: Norm = kind
        self._eps = eps
        self._kernels = kernels

    def rows(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Over rows of ``x`` [T, n], which may be ``out``. No row depends on another."""
        if self._kind == "layer":
            layer_norm(x, weight, bias, self._eps, out)
        else:
            self._kernels.rms_norm(x, weight, self._eps, out, self._kind)

    def heads(self, x: Tensor, weight: Tensor) -> None:
        """Over each head of ``x`` [T, heads, D], in place."""
        if self._kind == "layer":
            layer_norm(x, weight, None, self._eps, x)
        else:
            self._kernels.head_rms_norm(x, weight, self._eps, self._kind)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
    """Over the last dimension of ``x``, which may be ``out``: computed in the precision of sums, rounded once, after
    the gain."""
    wide = x.to(sum_dtype(x.dtype))
    made = rms_scaled(wide - wide.mean(-1, keepdim=True), eps) * weight.to(wide.dtype)
    out.copy_(made if bias is None else made + bias.to(wide.dtype))
