"""Which KV blocks of one worker are free, held or cached, and which request holds which: the block ledger.

Pure bookkeeping of integers. A block id means the same slot in every resident layer's arena, so one table per request
and worker is enough. Nothing here knows bytes, pages or tensors; what a block contains is known only as the hash it was
sealed with.

    free ----allocate----> held ----release, not sealed----> free
     ^                      ^ |
     |                 adopt| |release, sealed
     '----evict------- cached <'

Every block is in exactly one of the three states: ``free + held + cached == capacity`` after every call. A call that
raises has changed nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence, Set
from itertools import chain, compress

from jettison.errors import OutOfBlocksError, StalePlanError
from jettison.memory.freeblocks import FreeBlocks, runs_of
from jettison.types import RequestId


class BlockTable:
    """The blocks of one request in token order.

    ``ids`` is the ledger's own list: read it, do not change it. It only grows at its end while ``generation`` stays;
    a new generation says that ids already there are different ones (compaction, or another life of the request).
    """

    __slots__ = ("generation", "ids")

    def __init__(self, generation: int) -> None:
        self.ids: list[int] = []
        self.generation = generation


class BlockLedger:
    """The blocks of one worker's KV arenas, shared by all groups that use the worker.

    ``allocate`` and ``release`` cost O(log capacity) a run of consecutive ids, and little for each id; compaction,
    resizing and ``check`` are O(capacity).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 0 or block_size < 1:
            raise ValueError(f"a ledger of {num_blocks} blocks of {block_size} tokens")
        self.block_size = block_size
        """Tokens a block."""
        self.version = 0
        """Grows with every mutation."""
        self.num_free = num_blocks
        """Blocks that can be allocated now: free ones and cached ones."""
        self.num_held = 0
        """Blocks that at least one request holds."""
        self._held = bytearray(num_blocks)
        # Holders beyond the first, of blocks that have some: most blocks have one holder.
        self._more_holders: dict[int, int] = {}
        # Ids without content: lowest ids first keeps live blocks low, where a shrink need not move them.
        self._free = FreeBlocks([(0, num_blocks)])
        # Ids with content that no request holds; the first is evicted first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self.tables: dict[RequestId, BlockTable] = {}
        """By request; for reading."""
        self._last_generation = 0
        self._changed: set[int] = set()
        self._name = 0

    def report_to(self, changed: set[int], name: int) -> None:
        """From now on every mutation puts ``name`` into ``changed``: the reader that empties the set learns which
        ledgers have changed."""
        self._changed, self._name = changed, name

    # --- counts -----------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """All blocks."""
        return len(self._held)

    @property
    def num_cached(self) -> int:
        """Blocks no request holds whose content can be found by its hash."""
        return len(self._cached)

    def can_allocate(self, n: int) -> bool:
        """Whether ``allocate`` of ``n`` blocks would succeed."""
        return n <= self.num_free

    def is_held(self, block_id: int) -> bool:
        """Whether a request holds this block; False for ids beyond the capacity."""
        return 0 <= block_id < len(self._held) and self._held[block_id] > 0

    def is_shared(self, block_id: int) -> bool:
        """Whether more than one request holds this block."""
        return block_id in self._more_holders

    @property
    def shared(self) -> Set[int]:
        """Blocks that more than one request holds; a view of the ledger's own."""
        return self._more_holders.keys()

    # --- tables -----------------------------------------------------------------------------------------------

    def has(self, request_id: RequestId) -> bool:
        """Whether the request has a table here (it may be empty)."""
        return request_id in self.tables

    def table(self, request_id: RequestId) -> BlockTable:
        """The request's blocks. Raises KeyError for an unknown request."""
        return self.tables[request_id]

    def num_blocks_of(self, request_id: RequestId) -> int:
        """Length of the request's table; 0 for an unknown request."""
        table = self.tables.get(request_id)
        return len(table.ids) if table is not None else 0

    def num_exclusive_blocks(self, request_id: RequestId) -> int:
        """Blocks that releasing this request would make allocatable: the blocks that it shares with no other
        request."""
        ids, shared = self.tables[request_id].ids, self._more_holders
        return len(ids) - sum(map(shared.__contains__, ids)) if shared else len(ids)

    def requests(self) -> Iterable[RequestId]:
        """All requests with a table, in order of arrival; a copy, so the ledger may change meanwhile."""
        return list(self.tables)

    # --- hold and release -------------------------------------------------------------------------------------

    def allocate(self, request_id: RequestId, n: int) -> list[int]:
        """Append ``n`` blocks to the request's table (made if need be) and return their ids.

        The lowest free ids first, then cached blocks, least recently used first, whose content is forgotten.
        All or nothing: raises OutOfBlocksError.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self.num_free:
            raise OutOfBlocksError(f"{request_id}: {n} blocks wanted, {self.num_free} of {self.capacity} allocatable")
        held = self._held
        ids = self._free.take(min(n, self._free.num))
        if ids and ids[-1] - ids[0] == len(ids) - 1:  # ascending, so one run
            held[ids[0] : ids[-1] + 1] = b"\x01" * len(ids)
        else:
            for block in ids:
                held[block] = 1
        while len(ids) < n:
            block, _ = self._cached.popitem(last=False)
            self._forget_hash(block)
            held[block] = 1
            ids.append(block)
        self.num_free -= n
        self.num_held += n
        self._table_for(request_id).ids += ids
        self._note_change()
        return ids

    def adopt_prefix(self, request_id: RequestId, block_ids: Sequence[int]) -> None:
        """Start a new request's table with blocks that hold its first tokens already, cached or held by others.

        Raises ValueError if the request has a table, or if a block is free (its content is not known) or named twice.
        """
        if request_id in self.tables:
            raise ValueError(f"{request_id} has blocks already")
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"a block is named twice: {list(block_ids)}")
        for block in block_ids:
            if not self.is_held(block) and block not in self._cached:
                raise ValueError(f"block {block} is free: it holds nothing to share")
        for block in block_ids:
            if self._held[block]:
                self._more_holders[block] = self._more_holders.get(block, 0) + 1
                continue
            del self._cached[block]
            self._held[block] = 1
            self.num_held += 1
            self.num_free -= 1
        self._table_for(request_id).ids += block_ids
        self._note_change()

    def release(self, request_id: RequestId) -> None:
        """End a request's hold on its blocks. Raises KeyError for an unknown request.

        Sealed blocks that no request holds any more stay findable as cached blocks; of one request's, the deeper are
        evicted before the shallower, since a chain is only found from its start.
        """
        ids = self.tables.pop(request_id).ids
        if self._more_holders or self._hash_of:
            ids = self._let_go(ids)
        for lo, hi in runs_of(ids):
            self._held[lo:hi] = bytes(hi - lo)
            self._free.give(lo, hi)
        self.num_held -= len(ids)
        self.num_free += len(ids)
        self._note_change()

    def _let_go(self, block_ids: Sequence[int]) -> list[int]:
        """Take one holder from each block; returns the blocks that are free now. Sealed blocks that no request holds
        are cached."""
        free: list[int] = []
        for block in reversed(block_ids):
            others = self._more_holders.pop(block, 0)
            if others > 1:
                self._more_holders[block] = others - 1
            if others:
                continue
            if block not in self._hash_of:
                free.append(block)
                continue
            self._cached[block] = None
            self._held[block] = 0
            self.num_held -= 1
            self.num_free += 1
        free.reverse()
        return free

    def rename(self, request_id: RequestId, new_id: RequestId) -> None:
        """The blocks of one owner become another's. Raises KeyError (unknown owner), ValueError (known new one)."""
        if new_id in self.tables:
            raise ValueError(f"{new_id} has blocks already")
        self.tables[new_id] = self.tables.pop(request_id)
        self._note_change()

    def clear(self, capacity: int) -> None:
        """The memory is gone with its content; the new memory has ``capacity`` free blocks."""
        self.tables.clear()
        self._cached.clear()
        self._hash_of.clear()
        self._block_of.clear()
        self._held = bytearray(capacity)
        self._more_holders.clear()
        self._free = FreeBlocks([(0, capacity)])
        self.num_free, self.num_held = capacity, 0
        self._note_change()

    # --- content ----------------------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest known run from the start of a hash chain. Changes nothing, the order of
        eviction included: adopting is what makes a block recently used."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def seal(self, request_id: RequestId, index: int, block_hash: bytes) -> None:
        """Block ``index`` of the request is full and final: make it findable by ``block_hash``.

        Where another block has the same content already, that one stays the findable one. Raises KeyError for an
        unknown request, IndexError for an unknown index, ValueError if the block was sealed with different content.
        """
        ids = self.tables[request_id].ids
        if not 0 <= index < len(ids):
            raise IndexError(f"{request_id} has {len(ids)} blocks, none with index {index}")
        block = ids[index]
        sealed_as = self._hash_of.get(block)
        if sealed_as is not None:
            if sealed_as != block_hash:
                raise ValueError(f"block {block} of {request_id} is sealed with other content")
            return
        if block_hash in self._block_of:
            return
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        self._note_change()

    def forget_cached(self) -> None:
        """Forget all content: cached blocks become free, held ones are not findable until sealed again.

        For the moment when the arenas' layers change: a block's content is then no longer complete.
        """
        for block in self._cached:
            self._free.give(block, block + 1)
        self._cached.clear()
        self._hash_of.clear()
        self._block_of.clear()
        self._note_change()

    # --- capacity ---------------------------------------------------------------------------------------------

    def resize(self, capacity: int) -> None:
        """Grow (new ids are free) or shrink (cached blocks beyond the end are evicted).

        Raises StalePlanError if a request holds a block beyond the end: compact first.
        """
        if capacity < 0:
            raise ValueError(f"capacity {capacity}")
        old = len(self._held)
        if capacity >= old:
            self._held += bytes(capacity - old)
            if capacity > old:
                self._free.give(old, capacity)
        else:
            held = [block for block in range(capacity, old) if self._held[block]]
            if held:
                raise StalePlanError(f"{len(held)} blocks from {held[0]} up are held; capacity cannot be {capacity}")
            self._evict_from(capacity)
            del self._held[capacity:]
            self._rebuild_free()
        self.num_free = capacity - self.num_held
        self._note_change()

    def plan_compaction(self, line: int) -> list[tuple[int, int]] | None:
        """``(from, to)`` copies that bring every held block below ``line``; None if they do not fit.

        Targets are free ids before cached ones, cached ones in order of eviction. Cached blocks above the line are not
        copied: they are lost when the plan is applied. Pure.
        """
        sources = [block for block in range(max(line, 0), len(self._held)) if self._held[block]]
        if not sources:
            return []
        room = [block for block in self._free.ids() if block < line]
        room += [block for block in self._cached if block < line]
        return list(zip(sources, room)) if len(sources) <= len(room) else None

    def apply_compaction(self, copies: Sequence[tuple[int, int]], line: int) -> None:
        """The blocks were copied: rename them in every table and hash. Tables that change get a new generation.

        Raises StalePlanError unless the copies take exactly the held blocks from ``line`` up to blocks below it that
        no request holds.
        """
        new_ids = dict(copies)
        targets = set(new_ids.values())
        held = {block for block in range(max(line, 0), len(self._held)) if self._held[block]}
        if held != new_ids.keys() or len(targets) != len(copies):
            raise StalePlanError(f"{len(copies)} copies for {len(held)} held blocks from {line} up")
        if any(not 0 <= block < line or block >= len(self._held) or self._held[block] for block in targets):
            raise StalePlanError(f"a block below {line} that was to be written is held")
        self._evict_from(line)
        for src, dst in copies:
            if dst in self._cached:
                self._forget_hash(dst)
                del self._cached[dst]
            self._held[dst], self._held[src] = 1, 0
            others = self._more_holders.pop(src, 0)
            if others:
                self._more_holders[dst] = others
            block_hash = self._hash_of.pop(src, None)
            if block_hash is not None:
                self._hash_of[dst] = block_hash
                self._block_of[block_hash] = dst
        for table in self.tables.values():
            if not new_ids.keys().isdisjoint(table.ids):
                table.ids[:] = [new_ids.get(block, block) for block in table.ids]
                table.generation = self._next_generation()
        self._rebuild_free()
        self._note_change()

    # --- invariants -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError on any broken invariant."""
        for request_id, table in self.tables.items():
            assert len(set(table.ids)) == len(table.ids), f"{request_id} has a block twice"
        holders = Counter(chain.from_iterable(table.ids for table in self.tables.values()))
        blocks = range(len(self._held))
        held = set(compress(blocks, self._held))
        assert held == holders.keys(), "held blocks are not the tables'"
        shared = {block: count - 1 for block, count in holders.items() if count > 1}
        assert shared == self._more_holders, "numbers of holders differ from the tables"
        self._free.check()
        free = self._free.ids()
        # So many blocks, and each of them once: none has two uses.
        assert len(free) + len(held) + len(self._cached) == len(blocks), "free + held + cached != capacity"
        assert held.union(free, self._cached) == set(blocks), "a block has two uses, or none"
        assert self._block_of == dict(zip(self._hash_of.values(), self._hash_of.keys(), strict=True))
        assert len(self._block_of) == len(self._hash_of), "two blocks are findable by one hash"
        assert self._cached.keys() <= self._hash_of.keys(), "a cached block has no hash"
        assert self._hash_of.keys() <= held | self._cached.keys(), "a free block has a hash"
        assert (self.num_held, self.num_free) == (len(held), len(free) + len(self._cached)), "counted wrongly"

    # --- private ----------------------------------------------------------------------------------------------

    def _note_change(self) -> None:
        self.version += 1
        self._changed.add(self._name)

    def _table_for(self, request_id: RequestId) -> BlockTable:
        table = self.tables.get(request_id)
        if table is None:
            table = self.tables[request_id] = BlockTable(self._next_generation())
        return table

    def _next_generation(self) -> int:
        # One sequence for all tables: a request that comes back never gets a generation that it has had.
        self._last_generation += 1
        return self._last_generation

    def _forget_hash(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]

    def _evict_from(self, line: int) -> None:
        """Drop cached blocks with ids from ``line`` up; the caller rebuilds the free ids."""
        for block in [block for block in self._cached if block >= line]:
            self._forget_hash(block)
            del self._cached[block]

    def _rebuild_free(self) -> None:
        cached = self._cached
        self._free = FreeBlocks(
            runs_of([block for block, is_held in enumerate(self._held) if not is_held and block not in cached])
        )
