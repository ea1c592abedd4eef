"""Which request owns which block of one worker's KV arenas. Pure bookkeeping: no bytes, no device.

A block is in exactly one of three states; together they always make up the capacity:

    free      no content anybody may use
    held      in the table of one request, or of several that share a prefix (reference count > 0)
    cached    nobody holds it, but its content is known by hash: counted as allocatable, evicted least recently used

Fresh blocks are handed out lowest id first, so the tail of the arenas, where a drop puts the pages of parameters,
is written last: a drop that was hardly needed is undone by mapping alone.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jettison.errors import OutOfBlocksError, StalePlanError
from jettison.types import RequestId


class BlockTable:
    """A request's blocks, in token order. ``generation`` changes when existing ids change, not when blocks join."""

    __slots__ = ("generation", "ids")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.generation = 0


class BlockLedger:
    """Blocks of one worker, shared by all groups that use it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._capacity = num_blocks
        self._version = 0
        self._free: list[int] = list(range(num_blocks))
        """Heap of free ids."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Cached ids, next to evict first."""
        self._references: dict[int, int] = {}
        self._tables: dict[RequestId, BlockTable] = {}
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._high_water = 0

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Blocks in all states."""
        return self._capacity

    @property
    def version(self) -> int:
        """Changes with every mutation."""
        return self._version

    @property
    def num_free(self) -> int:
        """Allocatable blocks: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but whose content is known."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks in some request's table."""
        return len(self._references)

    @property
    def high_water(self) -> int:
        """1 + the highest id given out since ``reset_high_water``."""
        return self._high_water

    def reset_high_water(self) -> None:
        """Start over from what is held now."""
        self._high_water = max(self._references, default=-1) + 1

    def can_allocate(self, n: int) -> bool:
        """Whether ``allocate`` of ``n`` blocks would succeed."""
        return n <= self.num_free

    def has(self, request_id: RequestId) -> bool:
        """Whether the request has a table (possibly an empty one)."""
        return request_id in self._tables

    def table(self, request_id: RequestId) -> BlockTable:
        """The request's table; read only. Raises KeyError."""
        return self._tables[request_id]

    def num_blocks_of(self, request_id: RequestId) -> int:
        """Length of the request's table. Raises KeyError."""
        return len(self._tables[request_id].ids)

    def num_exclusive_blocks(self, request_id: RequestId) -> int:
        """Blocks that nobody else holds: what releasing the request makes allocatable."""
        return sum(self._references[block] == 1 for block in self._tables[request_id].ids)

    def is_held(self, block: int) -> bool:
        """Whether some request holds the block."""
        return block in self._references

    def requests(self) -> Iterable[RequestId]:
        """Requests with a table."""
        return self._tables.keys()

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks with these contents, for as many leading hashes as are known."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    # --- giving and taking ------------------------------------------------------------------------------------

    def allocate(self, request_id: RequestId, n: int) -> list[int]:
        """Append ``n`` blocks to the request's table (made if missing) and return them.

        Raises OutOfBlocksError with nothing changed.
        """
        if n > self.num_free:
            raise OutOfBlocksError(f"{n} blocks wanted, {self.num_free} allocatable of {self._capacity}")
        self._version += 1
        given = [self._take() for _ in range(n)]
        for block in given:
            self._references[block] = 1
        self._tables.setdefault(request_id, BlockTable()).ids.extend(given)
        if given:
            self._high_water = max(self._high_water, max(given) + 1)
        return given

    def _take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        block, _ = self._cached.popitem(last=False)
        self._forget_hash(block)
        return block

    def adopt_prefix(self, request_id: RequestId, block_ids: Sequence[int]) -> None:
        """Start a new request's table with blocks that already have content. Raises ValueError for a known request."""
        if request_id in self._tables:
            raise ValueError(f"{request_id} already has a table")
        self._version += 1
        table = self._tables[request_id] = BlockTable()
        for block in block_ids:
            count = self._references.get(block, 0)
            if count == 0:
                del self._cached[block]
            self._references[block] = count + 1
            table.ids.append(block)

    def seal(self, request_id: RequestId, index: int, block_hash: bytes) -> None:
        """The request's block ``index`` is full and final: others may find it by hash. The first one stays known."""
        block = self._tables[request_id].ids[index]
        if block in self._hash_of or block_hash in self._block_of:
            return
        self._version += 1
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block

    def release(self, request_id: RequestId) -> None:
        """Give the request's blocks back. Blocks with known content become cached, deep ones evicted first.

        Raises KeyError for a request without a table.
        """
        table = self._tables.pop(request_id)
        self._version += 1
        for block in reversed(table.ids):
            count = self._references[block] - 1
            if count:
                self._references[block] = count
                continue
            del self._references[block]
            if block in self._hash_of:
                self._cached[block] = None
            else:
                heapq.heappush(self._free, block)

    def forget_cached(self) -> None:
        """No block's content may be found by hash any more: the arenas now hold other layers than when it was made."""
        self._version += 1
        for block in self._cached:
            heapq.heappush(self._free, block)
        self._cached.clear()
        self._hash_of.clear()
        self._block_of.clear()

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    # --- growing and shrinking --------------------------------------------------------------------------------

    def resize(self, capacity: int) -> None:
        """Grow at the tail, or cut it off. Raises StalePlanError if a block above the new end is held."""
        if capacity < self._capacity:
            if any(block >= capacity for block in self._references):
                raise StalePlanError(f"cannot shrink to {capacity} blocks: some above are held")
            for block in [b for b in self._cached if b >= capacity]:
                del self._cached[block]
                self._forget_hash(block)
            self._free = [b for b in self._free if b < capacity]
            heapq.heapify(self._free)
            self._high_water = min(self._high_water, capacity)
        else:
            for block in range(self._capacity, capacity):
                heapq.heappush(self._free, block)
        self._capacity = capacity
        self._version += 1

    def plan_compaction(self, line: int) -> list[tuple[int, int]] | None:
        """(from, to) for every held block at or above ``line``, or None if there is no room below it. Pure.

        Free ids below the line are used first, then cached ones, next to evict first.
        """
        above = sorted(block for block in self._references if block >= line)
        room = sorted(b for b in self._free if b < line) + [b for b in self._cached if b < line]
        if len(above) > len(room):
            return None
        return list(zip(above, room, strict=False))

    def apply_compaction(self, moves: Sequence[tuple[int, int]], line: int) -> None:
        """Rename blocks after their bytes were copied; cached blocks at or above ``line`` are lost.

        Raises StalePlanError if a source is no longer held or a destination is.
        """
        target = dict(moves)
        for src, dst in moves:
            if src not in self._references or dst in self._references:
                raise StalePlanError(f"block {src} to {dst}: the ledger has changed since the plan")
        self._version += 1
        for src, dst in moves:
            if dst in self._cached:
                del self._cached[dst]
                self._forget_hash(dst)
            self._references[dst] = self._references.pop(src)
            block_hash = self._hash_of.pop(src, None)
            if block_hash is not None:
                self._hash_of[dst] = block_hash
                self._block_of[block_hash] = dst
        for block in [b for b in self._cached if b >= line]:
            del self._cached[block]
            self._forget_hash(block)
        self._free = [b for b in range(self._capacity) if b not in self._references and b not in self._cached]
        for table in self._tables.values():
            if any(block in target for block in table.ids):
                table.ids = [target.get(block, block) for block in table.ids]
                table.generation += 1

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Free + held + cached = capacity, and nothing is in two places. Raises AssertionError."""
        free, cached, held = set(self._free), set(self._cached), set(self._references)
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & cached or free & held or cached & held), "a block is in two states"
        assert free | cached | held == set(range(self._capacity)), "blocks are missing"
        counts: dict[int, int] = {}
        for table in self._tables.values():
            assert len(set(table.ids)) == len(table.ids), "a block is twice in one table"
            for block in table.ids:
                counts[block] = counts.get(block, 0) + 1
        assert counts == self._references, "reference counts differ from the tables"
        assert {b: h for h, b in self._block_of.items()} == self._hash_of, "hash maps differ"
        assert cached <= self._hash_of.keys() <= (cached | held), "a hash without content"
