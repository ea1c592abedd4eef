"""The book of one worker's host pool: which slot holds a copy of whose KV. Pure.

One bounded pool a worker. A slot has room for one block in every layer, whatever range the worker's stage runs. The
swap baseline holds a request's slots under its request id; other users (checkpoints, staging of migrations) hold theirs
under names of their own. Bytes are moved by ``device.hostpool``.
"""

from __future__ import annotations

import heapq

from jettison.errors import OutOfBlocksError
from jettison.types import ModelShape


def num_host_slots(host_bytes: int, shape: ModelShape, block_size: int) -> int:
    """Slots in ``host_bytes`` bytes; controller and worker both count with this."""
    return host_bytes // (shape.num_layers * shape.block_bytes_per_layer(block_size))


class HostPool:
    """Slots ``0 .. num_slots - 1``, each free or held under one name."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"{num_slots} slots")
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        """A heap: lowest first, so that no more of the pool is ever touched than was needed at once."""
        self._held: dict[str, tuple[int, ...]] = {}

    @property
    def num_free(self) -> int:
        """Slots that no request holds."""
        return len(self._free)

    def holders(self) -> tuple[str, ...]:
        """Names that hold slots, in order of arrival."""
        return tuple(self._held)

    def hold(self, holder: str, num_slots: int) -> tuple[int, ...]:
        """Take slots under a name. All or nothing: raises OutOfBlocksError; ValueError if the name holds some."""
        if holder in self._held:
            raise ValueError(f"{holder} holds slots already")
        if num_slots < 0:
            raise ValueError(f"cannot hold {num_slots} slots")
        if num_slots > len(self._free):
            raise OutOfBlocksError(f"{holder}: {num_slots} host slots wanted, {len(self._free)} free")
        slots = tuple(heapq.heappop(self._free) for _ in range(num_slots))
        self._held[holder] = slots
        return slots

    def num_blocks_of(self, holder: str) -> int:
        """How many slots a name holds; 0 for an unknown one."""
        return len(self._held.get(holder, ()))

    def slots(self, holder: str) -> tuple[int, ...]:
        """The slots under a name, in the order of the blocks they copy. Raises KeyError."""
        return self._held[holder]

    def release(self, holder: str) -> None:
        """Give a name's slots back; a name that holds none is ignored."""
        for slot in self._held.pop(holder, ()):
            heapq.heappush(self._free, slot)

    def check(self) -> None:
        """Raise AssertionError on any broken invariant."""
        held = [slot for slots in self._held.values() for slot in slots]
        assert sorted(held + self._free) == list(range(self.num_slots)), "free + held slots are not the pool"
