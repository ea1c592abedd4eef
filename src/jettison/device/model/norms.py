"""Norms of every kind that the table knows, by a model's kernels.

Not here: which norms a layer has (``general_layer``).
"""

from __future__ import annotations

from torch import Tensor

from jettison.device.kernels.base import Kernels
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
            self._kernels.layer_norm(x, weight, bias, self._eps, out)
        else:
            self._kernels.rms_norm(x, weight, self._eps, out, self._kind)

    def heads(self, x: Tensor, weight: Tensor) -> None:
        """Over each head of ``x`` [T, heads, D], in place: RMS norms alone, as no model of the table has others
        there."""
        assert self._kind != "layer"
        self._kernels.head_rms_norm(x, weight, self._eps, self._kind)
