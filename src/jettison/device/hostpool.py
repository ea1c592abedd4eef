"""The bytes of one worker's host pool: slots that each hold a copy of one KV block in every layer.

Plain pageable memory, reserved at once and backed by the system only where a slot has been written; it is not part of
the device's budget. Copies beside steps go by address: for devices whose memory is the host's. The controller keeps the
book of the slots' contents (``memory.hostpool``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jettison.device.bytesview import as_tensor_uint8, widened
from jettison.device.memory import DeviceMemory
from jettison.device.rowcopy import RowCopy
from jettison.types import LayerRange


class HostBuffers:
    """``num_slots`` slots over ``[num_layers, num_slots, block_bytes]``; memory is taken at the first copy."""

    def __init__(self, num_slots: int, num_layers: int, block_bytes: int) -> None:
        self.num_slots = num_slots
        self._shape = (num_layers, num_slots, block_bytes)
        self._slots: torch.Tensor | None = None

    def gather(self, layers: LayerRange, slots: Sequence[int], out: Any) -> int:
        """Copy slots to the start of ``out`` (uint8), layer by layer, slot by slot; returns the bytes written.

        Raises IndexError for a slot that is not there, ValueError where ``out`` is too small.
        """
        index = self._index(layers, slots)
        flat, num_bytes = as_tensor_uint8(out), len(layers) * len(index) * self._shape[2]
        if flat.numel() < num_bytes:
            raise ValueError(f"{num_bytes} bytes of KV do not fit in {flat.numel()}")
        if num_bytes:
            rows = widened(flat[:num_bytes].view(len(layers), len(index), self._shape[2]))
            for row, layer in zip(rows, layers.layers()):
                torch.index_select(self._opened[layer].view(rows.dtype), 0, index, out=row)
        return num_bytes

    def scatter(self, layers: LayerRange, slots: Sequence[int], data: Any) -> None:
        """Copy ``data``, which may be read-only, to slots: the inverse of ``gather``. Raises like it."""
        index = self._index(layers, slots)
        flat, num_bytes = as_tensor_uint8(data), len(layers) * len(index) * self._shape[2]
        if flat.numel() != num_bytes:
            raise ValueError(f"{num_bytes} bytes of KV expected, got {flat.numel()}")
        if num_bytes:
            rows = widened(flat.view(len(layers), len(index), self._shape[2]))
            for row, layer in zip(rows, layers.layers()):
                self._opened[layer].view(rows.dtype).index_copy_(0, index, row)

    def _index(self, layers: LayerRange, slots: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(check_slots(layers, slots, self.num_slots, self._shape[0]))

    @property
    def _opened(self) -> torch.Tensor:
        if self._slots is None:
            self._slots = torch.empty(self._shape, dtype=torch.uint8)
        return self._slots

    def copy_out(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int]
    ) -> int:
        """Copy KV blocks to slots, in these layers; returns the bytes copied. Raises IndexError for missing layers,
        blocks or slots."""
        return self._copy(memory, layers, blocks, slots, to_host=True)

    def copy_in(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int]
    ) -> int:
        """Copy slots to KV blocks: the inverse."""
        return self._copy(memory, layers, blocks, slots, to_host=False)

    def beside(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int], *, to_host: bool,
        skip_bytes: int = 0,
    ) -> RowCopy:
        """The same copies, to be run on another thread: this call only checks them, and marks the blocks to be written
        as written. The copy is stopped before a layout changes, and made anew after it. Raises like them."""
        if len(slots) != len(blocks):
            raise ValueError(f"{len(blocks)} blocks for {len(slots)} host slots")
        index = self._index(layers, slots).numpy()
        in_arenas = memory.block_addresses(layers, blocks, are_written=not to_host)
        first = np.array([self._opened[layer].data_ptr() if len(index) else 0 for layer in layers.layers()], np.int64)
        in_pool = (first[:, None] + index * self._shape[2]).reshape(-1)
        sources, targets = (in_arenas, in_pool) if to_host else (in_pool, in_arenas)
        return RowCopy(sources, targets, self._shape[2], skip_bytes=skip_bytes)

    def _copy(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int], *, to_host: bool
    ) -> int:
        if len(slots) != len(blocks):
            raise ValueError(f"{len(blocks)} blocks for {len(slots)} host slots")
        if not len(slots):
            return 0
        self._index(layers, slots)
        piece = torch.empty(len(slots), self._shape[2], dtype=torch.uint8)
        for layer in layers.layers():
            one = LayerRange(layer, layer + 1)
            if to_host:
                memory.kv_gather(one, blocks, piece)
                self.scatter(one, slots, piece)
            else:
                self.gather(one, slots, piece)
                memory.kv_scatter(one, blocks, piece)
        return len(layers) * piece.numel()


def check_slots(
    layers: LayerRange, slots: Sequence[int], num_slots: int, num_layers: int
) -> npt.NDArray[np.int64]:
    """Slots as an array. Raises IndexError for a slot or a layer that a pool does not have."""
    ids = np.asarray(slots, dtype=np.int64)
    is_inside = not len(ids) or (ids.min() >= 0 and ids.max() < num_slots)
    if not is_inside or not 0 <= layers.lo <= layers.hi <= num_layers:
        raise IndexError(f"host slots {ids.tolist()[:8]} of {num_slots}, layers {tuple(layers)} of {num_layers}")
    return ids
