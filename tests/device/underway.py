"""Which memory of a pretended device the steps under way read and write, so that what meddles with it is noted.

Rule 5 of ``live.worker.loop``: pieces of transfers, and copies of a host pool, may be written and read while a step is
computed, as the core lets none of them touch what that step does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from jettison.types import LayerRange

MEDDLED: list[str] = []
"""What has been written that a step under way reads, or read that it writes, since the list was last cleared."""


class StepsUnderWay:
    """Of one device, or of all that share a process: addresses are theirs alone."""

    def __init__(self) -> None:
        self._reads: dict[int, set[int]] = {}
        """By step's number: addresses of the blocks that it reads or writes."""
        self._writes: dict[int, set[int]] = {}
        self._shards: dict[int, list[tuple[int, int]]] = {}
        self._next = 0
        self.num_checked = 0
        """Blocks and pieces of shards, while a step was under way."""

    def begin(self, step, memory, shape, address_of) -> int:
        """``address_of``: of a tensor. Returns the step's number, for ``end``."""
        number, self._next = self._next, self._next + 1
        reads, writes = self._reads.setdefault(number, set()), self._writes.setdefault(number, set())
        for layer in range(step.layer_lo, step.layer_hi):
            arena = memory.kv_arena(layer)
            first, unit, size = address_of(arena), arena[0].nbytes, arena.shape[3]
            far = {r.row: r.num_tokens // size for r in step.remote if r.layer_lo <= layer < r.layer_hi}
            for row, (query, context) in enumerate(zip(step.query_lens.tolist(), step.context_lens.tolist())):
                ids = step.block_tables[row, : -(-(query + context) // size)].tolist()
                reads.update(first + unit * block for block in ids[far.get(row, 0) :])
                writes.update(first + unit * block for block in ids[context // size :])
        slabs = [memory.shard_bytes(shard) for shard in shape.shards_for(LayerRange(step.layer_lo, step.layer_hi))]
        self._shards[number] = [(address_of(slab), address_of(slab) + slab.nbytes) for slab in slabs]
        return number

    def end(self, number: int | None = None) -> None:
        """None: the oldest, if any was begun."""
        number = min(self._reads, default=None) if number is None else number
        if number is None:
            return
        for book in (self._reads, self._writes, self._shards):
            del book[number]

    @contextmanager
    def writing(self, addresses: Iterable[int], num_bytes: int) -> Iterator[None]:
        """Memory is written inside, from these addresses on, not by a step. What stays as it was is not noted: a prefix
        that two requests share may come for each of them."""
        before = {at: ctypes.string_at(at, num_bytes) for at in addresses if self._is_read(at, at + num_bytes)}
        yield
        for at, content in before.items():
            if ctypes.string_at(at, num_bytes) != content:
                MEDDLED.append(f"{num_bytes} bytes at {at:#x} were written, which a step under way reads")

    def _is_read(self, first: int, end: int) -> bool:
        self.num_checked += len(self._reads)
        in_shards = any(lo < end and first < hi for shards in self._shards.values() for lo, hi in shards)
        return in_shards or any(first in reads for reads in self._reads.values())

    def read(self, addresses: Iterable[int]) -> None:
        """Blocks are read, not by a step."""
        for number, writes in self._writes.items():
            for address in addresses:
                self.num_checked += 1
                if address in writes:
                    MEDDLED.append(f"block at {address:#x} is read, which step {number} writes")
