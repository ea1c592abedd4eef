"""Native kernels with torch's ``linear`` in bfloat16, for processors with AMX that the native products cannot use."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from jettison.device.beside import bound_onednn_caches
from jettison.device.kernels.base import check_linear
from jettison.device.kernels.layer import attend_layer, feed_forward
from jettison.device.kernels.library import open_library, working_variant
from jettison.device.kernels.native import NativeKernels
from jettison.device.kernels.onednn import torch_linear
from jettison.device.kernels.operands import (
    Activations,
    Int32Array,
    IntegerMatrix,
    LayerConstants,
    LayerWeights,
    PackedMatrix,
    Weight,
)
from jettison.device.kernels.processor import TORCH_LINEAR


def load_torch_linear(variant: str | None = None) -> TorchLinearKernels:
    """See ``native.load_native``."""
    return TorchLinearKernels(open_library(), working_variant(variant))


class TorchLinearKernels(NativeKernels):
    """``Kernels`` in C except for ``linear`` of bfloat16, which may depend on the batch in its last bits."""

    def __init__(self, library: ctypes.CDLL, variant: str) -> None:
        super().__init__(library, variant)
        self.name = f"native-{variant}{TORCH_LINEAR.removeprefix('native')}"
        bound_onednn_caches()

    def packs(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """See ``Kernels.packs``. Torch reads plain matrices."""
        return dtype != torch.bfloat16 and super().packs(shape, dtype)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor) -> None:
        """See ``Kernels.linear``. Torch's for every number of rows: two kernels would round differently."""
        if x.dtype != torch.bfloat16 or isinstance(weight, (PackedMatrix, IntegerMatrix)):
            super().linear(x, weight, bias, out)
            return
        check_linear(x, weight, bias, out)
        torch_linear(x, weight, bias, out)

    def attend_layer(
        self, weights: LayerWeights, buffers: Activations, constants: LayerConstants, block_tables: Int32Array,
        query_lens: Int32Array, context_lens: Int32Array, positions: Int32Array,
    ) -> None:
        """See ``Kernels.attend_layer``."""
        if buffers.x.dtype == torch.bfloat16:
            attend_layer(self, weights, buffers, constants, block_tables, query_lens, context_lens, positions)
        else:
            super().attend_layer(weights, buffers, constants, block_tables, query_lens, context_lens, positions)

    def feed_forward(self, weights: LayerWeights, buffers: Activations, constants: LayerConstants) -> None:
        """See ``Kernels.feed_forward``."""
        if buffers.x.dtype == torch.bfloat16:
            feed_forward(self, weights, buffers, constants)
        else:
            super().feed_forward(weights, buffers, constants)
