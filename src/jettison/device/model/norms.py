"""Norms of every kind that the table knows, in the rounding order of each.

Kernels have Llama's. On the host they make the kinds that are rounded once, too: over numbers in the precision of sums,
in which their first rounding changes nothing. Not here: which norms a layer has (``general_layer``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jettison.device.kernels import Kernels
from jettison.device.kernels.base import sum_dtype
from jettison.device.model.arithmetic import Norm


class Norms:
    """The norms of one model."""

    def __init__(self, kind: Norm, eps: float, kernels: Kernels) -> None:
        self._kind = kind
        self._eps = eps
        self._kernels = kernels

    def rows(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Over rows of ``x`` [T, n], which may be ``out``. No row depends on another."""
        if self._kind == "rms":
            self._kernels.rms_norm(x, weight, self._eps, out)
        elif self._is_composed(x):
            normalize(self._kind, x, weight, bias, self._eps, out)
        else:
            gain, wide = self._gain(weight), x.to(sum_dtype(x.dtype))
            self._kernels.rms_norm(wide, gain, self._eps, out if wide is x else wide)
            if wide is not x:
                out.copy_(wide)

    def heads(self, x: Tensor, weight: Tensor) -> None:
        """Over each head of ``x`` [T, heads, D], in place."""
        if self._kind == "rms":
            self._kernels.head_rms_norm(x, weight, self._eps)
        elif self._is_composed(x):
            normalize(self._kind, x, weight, None, self._eps, x)
        else:
            gain, wide = self._gain(weight), x.to(sum_dtype(x.dtype))
            self._kernels.head_rms_norm(wide, gain, self._eps)
            if wide is not x:
                x.copy_(wide)

    def _is_composed(self, x: Tensor) -> bool:
        """A card's kernels read a gain before they wait for the launch before them, which would be its."""
        return self._kind == "layer" or x.device.type != "cpu"

    def _gain(self, weight: Tensor) -> Tensor:
        wide = weight.to(sum_dtype(weight.dtype))
        return wide + 1.0 if self._kind == "rms_plus_one" else wide


def normalize(kind: Norm, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
    """A norm over the last dimension of ``x``, which may be ``out``: computed in the precision of sums, rounded once,
    after the gain."""
    wide = x.to(sum_dtype(x.dtype))
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    gain = weight.to(scaled.dtype)
    made = scaled * (gain + 1.0 if kind == "rms_plus_one" else gain)
    out.copy_(made if bias is None else made + bias.to(scaled.dtype))
