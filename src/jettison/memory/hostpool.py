"""The book of one worker's host pool: which slot holds a copy of which request's KV. Pure.

One bounded pool a worker. A slot has room for one block in every layer, whatever range the worker's stage runs. Slots
are held under names: a request's own id for its KV, and names of their own for copies that are being written.

    free ----hold, extend----> held ----the last holder releases----> free
                                | ^
                                '-'--extend (same content), adopt: one holder more

Blocks with the same content are kept once: ``extend`` shares the slot that has the content, or is being written with
it. Whether a slot's bytes are there is noted (``note_written``): a request's copy is good as far as its leading written
slots reach. Bytes are moved by ``device.hostpool``.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain

from jettison.errors import OutOfBlocksError
from jettison.types import ModelShape


def num_host_slots(host_bytes: int, shape: ModelShape, block_size: int) -> int:
    """Slots in ``host_bytes`` bytes; controller and worker both count with this."""
    return host_bytes // (shape.num_layers * shape.block_bytes_per_layer(block_size))


class HostPool:
    """Slots ``0 .. num_slots - 1``, each free or held under one name or several."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 0:
            raise ValueError(f"{num_slots} slots")
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        """A heap: lowest first, so that no more of the pool is ever touched than was needed at once."""
        self._taken: set[int] = set()
        """Slots that are not free: a pool has so many that no call may search the free ones."""
        self._held: dict[str, list[int]] = {}
        self._more_holders: dict[int, int] = {}
        """Holders beyond the first, of slots that have some."""
        self._slot_of: dict[Hashable, int] = {}
        self._content_of: dict[int, Hashable] = {}
        self._written: set[int] = set()

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Slots that no name holds."""
        return len(self._free)

    def holders(self) -> tuple[str, ...]:
        """Names that hold slots, in order of arrival."""
        return tuple(self._held)

    def num_blocks_of(self, holder: str) -> int:
        """How many slots a name holds; 0 for an unknown one."""
        return len(self._held.get(holder, ()))

    def slots(self, holder: str) -> tuple[int, ...]:
        """The slots under a name, in the order of the blocks they copy. Raises KeyError."""
        return tuple(self._held[holder])

    def num_known(self, contents: Sequence[Hashable | None]) -> int:
        """How many of these contents, from the first on, have a slot already."""
        known = 0
        for content in contents:
            if content is None or content not in self._slot_of:
                break
            known += 1
        return known

    def num_written(self, holder: str, num_known: int = 0) -> int:
        """How many leading slots under a name have their bytes; the first ``num_known`` are known to."""
        slots = self._held.get(holder, ())
        num = num_known
        while num < len(slots) and slots[num] in self._written:
            num += 1
        return num

    # --- holding ----------------------------------------------------------------------------------------------

    def hold(self, holder: str, num_slots: int) -> tuple[int, ...]:
        """Take slots under a name. All or nothing: raises OutOfBlocksError; ValueError if the name holds some."""
        if holder in self._held:
            raise ValueError(f"{holder} holds slots already")
        if num_slots < 0:
            raise ValueError(f"cannot hold {num_slots} slots")
        self.extend(holder, [None] * num_slots)
        return self.slots(holder)

    def extend(self, holder: str, contents: Sequence[Hashable | None]) -> tuple[int, ...]:
        """Take a slot for each further block of a name (made if need be): the one that has this content already, or a
        free one (always, for None). All or nothing: raises OutOfBlocksError.

        Returns which of the name's blocks, by position, have a new slot, which the caller has to have written.
        """
        num_missing = sum(content is None or content not in self._slot_of for content in contents)
        if num_missing > len(self._free):
            raise OutOfBlocksError(f"{holder}: {num_missing} host slots wanted, {len(self._free)} free")
        slots, new = self._held.setdefault(holder, []), list[int]()
        for content in contents:
            slot = None if content is None else self._slot_of.get(content)
            if slot is None:
                slot = heapq.heappop(self._free)
                self._taken.add(slot)
                if content is not None:
                    self._slot_of[content], self._content_of[slot] = slot, content
                new.append(len(slots))
            else:
                self._more_holders[slot] = self._more_holders.get(slot, 0) + 1
            slots.append(slot)
        return tuple(new)

    def adopt(self, holder: str, slots: Iterable[int]) -> None:
        """Hold slots that others hold as well, under a new name. Raises ValueError if the name is known, or a slot is
        free."""
        if holder in self._held:
            raise ValueError(f"{holder} holds slots already")
        slots = list(slots)
        if free := set(slots) - self._taken:
            raise ValueError(f"slots {sorted(free)} are free")
        for slot in slots:
            self._more_holders[slot] = self._more_holders.get(slot, 0) + 1
        self._held[holder] = slots

    def note_written(self, slots: Iterable[int]) -> None:
        """The bytes of these held slots are there."""
        self._written.update(slots)

    def forget_contents(self) -> None:
        """The bytes are gone: held slots have to be written before they can be shared."""
        self._slot_of.clear()
        self._content_of.clear()
        self._written.clear()

    def truncate(self, holder: str, num_slots: int) -> None:
        """Give back a name's slots beyond the first ``num_slots``. Raises KeyError for an unknown name."""
        slots = self._held[holder]
        for slot in reversed(slots[num_slots:]):
            self._let_go(slot)
        del slots[num_slots:]

    def release(self, holder: str) -> None:
        """Give a name's slots back; a name that holds none is ignored."""
        for slot in self._held.pop(holder, ()):
            self._let_go(slot)

    def _let_go(self, slot: int) -> None:
        others = self._more_holders.pop(slot, 0)
        if others > 1:
            self._more_holders[slot] = others - 1
        if others:
            return
        self._written.discard(slot)
        if slot in self._content_of:
            del self._slot_of[self._content_of.pop(slot)]
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError on any broken invariant."""
        if not self._held:
            assert not (self._taken or self._more_holders or self._slot_of or self._content_of or self._written)
            assert len(self._free) == len(set(self._free)) == self.num_slots, "an empty pool lacks a free slot"
            return
        holders = Counter(chain.from_iterable(self._held.values()))
        assert sorted([*holders, *self._free]) == list(range(self.num_slots)), "free + held slots are not the pool"
        assert self._taken == holders.keys(), "slots that are taken are not those that are held"
        shared = {slot: num - 1 for slot, num in holders.items() if num > 1}
        assert shared == self._more_holders, "numbers of holders differ"
        assert self._slot_of == {content: slot for slot, content in self._content_of.items()}
        assert len(self._slot_of) == len(self._content_of), "two slots have the same content"
        assert self._written | self._content_of.keys() <= holders.keys(), "a free slot has content"
