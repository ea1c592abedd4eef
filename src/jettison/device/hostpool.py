"""The bytes of one worker's host pool: slots that each hold a copy of one KV block in every layer.

Plain pageable memory, reserved at once and backed by the system only where a slot has been written; it is not part of
the device's budget. Which slot holds what is ``memory.hostpool``'s book, kept by the controller.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from jettison.device.bytesview import widened
from jettison.device.memory import DeviceMemory
from jettison.types import LayerRange


class HostBuffers:
    """``num_slots`` slots over ``[num_layers, num_slots, block_bytes]``; memory is taken at the first copy."""

    def __init__(self, num_slots: int, num_layers: int, block_bytes: int) -> None:
        self.num_slots = num_slots
        self._shape = (num_layers, num_slots, block_bytes)
        self._slots: torch.Tensor | None = None

    def copy_out(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int]
    ) -> int:
        """KV blocks to slots, in these layers; returns the bytes copied. Raises IndexError for what is not there."""
        return self._copy(memory, layers, blocks, slots, to_host=True)

    def copy_in(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int]
    ) -> int:
        """Slots to KV blocks: the inverse."""
        return self._copy(memory, layers, blocks, slots, to_host=False)

    def _copy(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int], *, to_host: bool
    ) -> int:
        ids = np.asarray(slots, dtype=np.int64)
        if len(ids) != len(blocks):
            raise ValueError(f"{len(blocks)} blocks for {len(ids)} host slots")
        if not len(ids):
            return 0
        if ids.min() < 0 or ids.max() >= self.num_slots or not 0 <= layers.lo <= layers.hi <= self._shape[0]:
            raise IndexError(f"host slots {ids.min()} to {ids.max()} of {self.num_slots}, layers {tuple(layers)}")
        if self._slots is None:
            self._slots = torch.empty(self._shape, dtype=torch.uint8)
        index = torch.from_numpy(ids)
        piece = torch.empty(len(ids), self._shape[2], dtype=torch.uint8)
        for layer in layers.layers():
            one = LayerRange(layer, layer + 1)
            if to_host:
                memory.kv_gather(one, blocks, piece)
                rows = widened(piece)
                self._slots[layer].view(rows.dtype).index_copy_(0, index, rows)
            else:
                rows = widened(piece)
                torch.index_select(self._slots[layer].view(rows.dtype), 0, index, out=rows)
                memory.kv_scatter(one, blocks, piece)
        return len(layers) * piece.numel()
