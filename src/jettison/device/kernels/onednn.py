"""Torch's ``linear``, and a bound on what oneDNN, which computes it in bfloat16, keeps beside the memory budget.

oneDNN reads the weights where they lie: what it packs is a block at a time, in scratch space that the call frees.
What it keeps is code, made anew for each number of rows.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch
from torch import Tensor

ONEDNN_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""How many products of different sizes oneDNN, and torch's layer above it, keep code for. Both hold on to the same."""

NUM_KEPT_PRODUCTS = 32
"""The five products of a step at the last six numbers of rows. Code of one is 0.4 to 0.8 MiB and takes about half a
millisecond to make; by themselves both keep 1,024, which was 0.9 GiB and more for steps of 1 to 256 rows."""


def bound_onednn_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let oneDNN keep little beside the memory budget. In force where nothing was multiplied by it before.

    What is set already is left as it is.
    """
    for name in ONEDNN_CACHES:
        environ.setdefault(name, str(NUM_KEPT_PRODUCTS))


def torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = x @ weight.T + bias`` by torch, unchecked."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
