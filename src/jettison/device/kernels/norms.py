"""Norms of every kind, of single operations of torch: where a back end has no kernel for a kind, and in tests.

Not here: which norms a model has (``device.model.norms``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jettison.device.kernels.base import sum_dtype
from jettison.device.model.arithmetic import RmsNorm


def rms_normalized(x: Tensor, weight: Tensor, eps: float, kind: RmsNorm = "rms") -> Tensor:
    """``x`` [..., n] over its last dimension, of its type; ``weight``: [n]. See ``arithmetic.RmsNorm``."""
    scaled = rms_scaled(x.to(sum_dtype(x.dtype)), eps)
    if kind == "rms":
        return weight * scaled.to(x.dtype)
    gain = weight.to(scaled.dtype)
    return (scaled * (gain + 1.0 if kind == "rms_plus_one" else gain)).to(x.dtype)


def layer_normalized(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See ``Kernels.layer_norm``."""
    wide = x.to(sum_dtype(x.dtype))
    made = rms_scaled(wide - wide.mean(-1, keepdim=True), eps) * weight.to(wide.dtype)
    return (made if bias is None else made + bias.to(wide.dtype)).to(x.dtype)


def rms_scaled(wide: Tensor, eps: float) -> Tensor:
    """In the precision of ``wide``, before any gain."""
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
