"""A worker's host pool where its device is a card: slots in pinned memory, which grows with the slots in use.

A slot holds its block's layers one after the other, so that a copy to or from it is one, however many layers there are.
Pinned memory is taken in parts of some slots each, at the first copy that touches one of them; it is not given back.
Copies run in ``device.cuda.copies``; the controller keeps the book of the slots' contents (``memory.hostpool``).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from jettison.device.bytesview import as_tensor_uint8
from jettison.device.cuda.card import Addresses, Card
from jettison.device.cuda.copies import CardCopy, PoolRows
from jettison.device.cuda.pieces import POOL, Copying, Pieces
from jettison.device.hostpool import check_slots
from jettison.device.memory import DeviceMemory
from jettison.types import LayerRange

PART_BYTES = 64 << 20
"""Pinned at once, in some ten milliseconds."""


class PinnedPool:
    """See ``HostPool``. Blocks are multiples of 16 bytes."""

    def __init__(
        self, card: Card, num_slots: int, num_layers: int, block_bytes: int, *, copying: Copying = POOL,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.num_slots = num_slots
        self._card = card
        self._num_layers = num_layers
        self._block_bytes = block_bytes
        self._slots_a_part = max(1, min(num_slots, part_bytes // (num_layers * block_bytes)))
        self._parts: dict[int, Tensor] = {}
        self.copy_by(copying)

    def copy_by(self, copying: Copying) -> None:
        """Let copies go like this from now on; none is under way."""
        piece_bytes = max(copying.piece_bytes, self._block_bytes)  # a piece has at least one row
        self._copying = copying
        self._pieces, self._pieces_beside = Pieces(self._card, piece_bytes), Pieces(self._card, piece_bytes)

    def gather(self, layers: LayerRange, slots: Sequence[int], out: Any) -> int:
        """Copies of the host's. Raises MappingError, too, where no memory can be pinned; so do all that follow."""
        flat, rows = as_tensor_uint8(out), self._slots(layers, slots)
        num_bytes = sum(map(len, rows))
        if len(flat) < num_bytes:
            raise ValueError(f"{num_bytes} bytes of KV do not fit in {len(flat)}")
        lines = flat[:num_bytes].view(len(layers), -1, self._block_bytes)
        for i, row in enumerate(rows):
            lines[:, i] = row.view(len(layers), -1)
        return num_bytes

    def scatter(self, layers: LayerRange, slots: Sequence[int], data: Any) -> None:
        """The inverse."""
        flat, rows = as_tensor_uint8(data), self._slots(layers, slots)
        num_bytes = sum(map(len, rows))
        if len(flat) != num_bytes:
            raise ValueError(f"{num_bytes} bytes of KV expected, got {len(flat)}")
        lines = flat.view(len(layers), -1, self._block_bytes)
        for i, row in enumerate(rows):
            row.view(len(layers), -1)[:] = lines[:, i]

    def copy_out(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int]
    ) -> int:
        """See ``HostPool``."""
        return self._copy(memory, layers, blocks, slots, to_host=True)

    def copy_in(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int]
    ) -> int:
        """See ``HostPool``."""
        return self._copy(memory, layers, blocks, slots, to_host=False)

    def beside(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int], *, to_host: bool,
        skip_bytes: int = 0,
    ) -> CardCopy:
        """See ``HostPool``. Copies of one pool run one after the other."""
        return self._made(memory, layers, blocks, slots, to_host=to_host, skip_bytes=skip_bytes, is_beside=True)

    def _copy(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int], *, to_host: bool
    ) -> int:
        copy = self._made(memory, layers, blocks, slots, to_host=to_host)
        copy.run()
        return copy.num_bytes

    def _made(
        self, memory: DeviceMemory, layers: LayerRange, blocks: Sequence[int], slots: Sequence[int], *, to_host: bool,
        skip_bytes: int = 0, is_beside: bool = False,
    ) -> CardCopy:
        if len(slots) != len(blocks):
            raise ValueError(f"{len(blocks)} blocks for {len(slots)} host slots")
        ids = check_slots(layers, slots, self.num_slots, self._num_layers)
        by_layer = memory.block_addresses(layers, blocks, are_written=not to_host)
        by_block = np.ascontiguousarray(by_layer.reshape(len(layers), len(blocks)).T).reshape(-1)
        rows = PoolRows(by_block, *self._addresses(layers, ids))
        pieces = self._pieces_beside if is_beside else self._pieces
        copying = self._copying if is_beside else self._copying._replace(bytes_per_s=math.inf)
        return CardCopy(
            self._card, pieces, rows, copying, row_bytes=self._block_bytes, to_host=to_host, skip_bytes=skip_bytes
        )

    def _addresses(self, layers: LayerRange, slots: npt.NDArray[np.int64]) -> tuple[Addresses, list[Tensor]]:
        """Of each slot's rows of these layers, slot by slot; and the memory that they lie in."""
        numbers, which = np.unique(slots // self._slots_a_part, return_inverse=True)
        parts = [self._part(number) for number in numbers.tolist()]
        firsts = np.array([self._card.address_of(part) for part in parts], dtype=np.int64)
        first = firsts[which] + slots % self._slots_a_part * (self._num_layers * self._block_bytes)
        rows = np.arange(layers.lo, layers.hi, dtype=np.int64) * self._block_bytes
        return (first[:, None] + rows).reshape(-1), parts

    def _slots(self, layers: LayerRange, slots: Sequence[int]) -> list[Tensor]:
        """For each slot, uint8 of these layers."""
        ids = check_slots(layers, slots, self.num_slots, self._num_layers)
        lo, hi = layers.lo * self._block_bytes, layers.hi * self._block_bytes
        return [self._part(slot // self._slots_a_part)[slot % self._slots_a_part, lo:hi] for slot in ids.tolist()]

    def _part(self, number: int) -> Tensor:
        part = self._parts.get(number)
        if part is None:
            slot_bytes = self._num_layers * self._block_bytes
            num_slots = min(self._slots_a_part, self.num_slots - number * self._slots_a_part)
            # Torch would pin a power of two, up to twice as much. The page behind a part is between it and the next: no
            # copy may go over the end of what was pinned at one time.
            memory = mmap.mmap(-1, num_slots * slot_bytes + mmap.PAGESIZE)
            pinned = memoryview(memory)[: num_slots * slot_bytes]
            self._card.pin(pinned)
            part = as_tensor_uint8(pinned).view(-1, slot_bytes)
            self._parts[number] = part
        return part
