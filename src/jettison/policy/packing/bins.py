"""One device's part of a packing (a bin): the requests on it and the blocks that they take.

Requests below C/8 are kept one by one. A multi-item (MELL, section VI.C) is cut out of them when one has to travel
(``Bin.unit``). So multi-items grow, split and merge without a move, and a rest below C/8 is a device's open multi-item.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from jettison.policy.packing.types import Grip, ShareKey, SizeClass, Work, size_class
from jettison.types import GroupId, RequestId

Entry: TypeAlias = "tuple[str, tuple[int, ...]]"
"""The name of an index, and the key under which that index has a bin or one of its requests."""

Prefix: TypeAlias = "tuple[ShareKey, int]"
"""A key and the blocks that it stands for: requests that name one key with unlike lengths share nothing."""


WHOLE = 6
"""Sixths of a device."""

_ORDER, _SIZE = attrgetter("order"), attrgetter("num_blocks")


@dataclass(slots=True, eq=False)
class Item:
    """A request as the packing sees it."""

    request_id: RequestId
    num_blocks: int
    order: int
    """Number of its arrival."""
    size_class: SizeClass
    share_key: Prefix | None = None
    shared_blocks: int = 0
    """0 without a key."""
    grip: Grip = Grip.FREE
    bin: Bin | None = None
    here: GroupId | None = None
    """The device that holds its KV; None: not told."""
    left_blocks: int = 0
    """Blocks that ``here`` holds for it although it should live elsewhere."""
    growth_blocks: int = 0
    """Blocks by which it grows in the time for which a device that gives requests away should have room."""

    @property
    def own_blocks(self) -> int:
        """Blocks that it takes on a device where another request has its prefix already."""
        return self.num_blocks - self.shared_blocks

    @property
    def is_big(self) -> bool:
        """Of class S, M or L: these classes decide a device's category."""
        return self.size_class >= SizeClass.S

    @property
    def is_free(self) -> bool:
        """It may be moved for the packing's sake."""
        return self.grip is Grip.FREE


@dataclass(slots=True, eq=False)
class Bin:
    """A device in use."""

    device: GroupId
    capacity: int
    is_taking: bool = True
    work: Work | None = None
    """What its steps have time for; None: for anything."""
    used: int = 0
    leaving: int = 0
    """Blocks that it still holds for requests that should live elsewhere."""
    growth: int = 0
    """Blocks by which its requests grow together in that time."""
    loose: int = 0
    """Blocks that come free at least if all T and small requests that may be moved leave."""
    bigs: list[Item] = field(default_factory=list)
    fillers: dict[RequestId, Item] = field(default_factory=dict)
    """T and small requests: they lie where there is room, and make room for bigs."""
    sharers: dict[Prefix, int] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    """Its present entries in the book's indices."""

    @property
    def free(self) -> int:
        """Blocks that are free once all moves are made; negative where it is overfull."""
        return self.capacity - self.used

    @property
    def room(self) -> int:
        """Blocks that it takes now, while requests that should live elsewhere are still here."""
        if self.work is None:
            return self.capacity - self.used - self.leaving
        return self._room_beside(self.used + self.leaving)

    @property
    def room_for_big(self) -> int:
        """The same where T and small requests make room for an S or M. They leave for want of memory alone."""
        return self._room_beside(self.used + self.leaving, self.loose)

    @property
    def room_later(self) -> int:
        """Blocks that it takes once all moves are made."""
        return self._room_beside(self.used)

    def _room_beside(self, num_blocks: int, loose: int = 0) -> int:
        """Blocks that memory and steps leave to one more request beside so many; ``loose``: of these, blocks of
        requests that leave for it."""
        free = self.capacity - num_blocks + loose
        return free if self.work is None else self.work.room(self.num_requests, num_blocks, free)

    @property
    def category(self) -> SizeClass:
        """The class of its largest request; T where it has T and small ones only."""
        return max((item.size_class for item in self.bigs), default=SizeClass.T)

    @property
    def num_requests(self) -> int:
        """Requests on it."""
        return len(self.bigs) + len(self.fillers)

    def count(self, size_class: SizeClass) -> int:
        """How many of its requests are of this class: S, M or L."""
        return sum(item.size_class is size_class for item in self.bigs)

    def weight(self) -> int:
        """Its M and S as sixths of a device: an M is a half, an S a third (Theorem 2)."""
        return 3 * self.count(SizeClass.M) + 2 * self.count(SizeClass.S)

    def is_complete(self) -> bool:
        """An L, or M and S that weigh a device: two M, three S, or an M that has grown out of three S and still fits
        (properties 1, 2 and 4 of Theorem 1)."""
        return self.category is SizeClass.L or self.weight() >= WHOLE

    def is_mixed(self) -> bool:
        """One M and one S: less than a device, and neither belongs beside the other."""
        return self.category is SizeClass.M and self.count(SizeClass.S) > 0 and self.weight() < WHOLE

    def blocks_of(self, item: Item) -> int:
        """Blocks that the item would add."""
        return item.own_blocks if item.share_key in self.sharers else item.num_blocks

    def put(self, item: Item) -> None:
        """Add the item, whatever room there is."""
        self.used += self.blocks_of(item)
        self.growth += item.growth_blocks
        if item.share_key is not None:
            self.sharers[item.share_key] = self.sharers.get(item.share_key, 0) + 1
        if item.is_big:
            self.bigs.append(item)
        else:
            self.fillers[item.request_id] = item
            self.loose += item.own_blocks if item.is_free else 0
        item.bin = self

    def take(self, item: Item) -> None:
        """Remove the item."""
        if item.share_key is not None:
            self.sharers[item.share_key] -= 1
            if not self.sharers[item.share_key]:
                del self.sharers[item.share_key]
        self.used -= self.blocks_of(item)
        self.growth -= item.growth_blocks
        if item.is_big:
            self.bigs.remove(item)
        else:
            del self.fillers[item.request_id]
            self.loose -= item.own_blocks if item.is_free else 0
        item.bin = None

    def resize(self, item: Item, num_blocks: int, growth_blocks: int) -> None:
        """Give the item another size, the class of that size, and another growth."""
        self.growth += growth_blocks - item.growth_blocks
        item.growth_blocks = growth_blocks
        present = size_class(num_blocks, self.capacity)
        if item.is_big or present >= SizeClass.S:
            self.take(item)
            item.num_blocks, item.size_class = num_blocks, present
            self.put(item)
            return
        more = num_blocks - item.num_blocks
        item.num_blocks, item.size_class = num_blocks, present
        self.used += more
        self.loose += more if item.is_free else 0

    def unit(self, limit: int) -> list[Item]:
        """A T or a multi-item that may leave, of at most ``limit`` blocks; empty where none may."""
        return self._cut([item for item in self.fillers.values() if item.grip is Grip.FREE], limit)

    def victims(self) -> list[Item]:
        """The requests that leave an overfull bin: of the fillers the smallest that leaves room for the growth of the
        others, else the smallest that suffices, or a unit; else the smallest big, unless it is alone. Held requests
        leave after free ones of their kind; empty where no request may leave."""
        lacking = self.used - self.capacity
        # No more than a T: the device would be below 3/4 otherwise, and take requests again.
        for_growth = min(lacking + self.growth, max(lacking, self.capacity // 4))
        for grip in (Grip.FREE, Grip.HELD):
            fillers = [item for item in self.fillers.values() if item.grip is grip]
            for needed in (for_growth, lacking):
                if enough := [item for item in fillers if item.own_blocks >= needed]:
                    smallest = min(map(_SIZE, enough))
                    return [max((item for item in enough if item.num_blocks == smallest), key=_ORDER)]
            if fillers:
                return self._cut(fillers, self.capacity // 4)
        bigs = [item for item in self.bigs if item.grip is not Grip.PINNED]
        if not bigs or self.num_requests == 1:
            return []
        return [min(bigs, key=lambda item: (item.grip, item.num_blocks, -item.order))]

    def _cut(self, fillers: Iterable[Item], limit: int) -> list[Item]:
        """The largest T, else a multi-item of the largest small requests: above C/8, or all of them."""
        fitting = [item for item in fillers if item.num_blocks <= limit]
        # Two stable sorts by a number each take half the time of one by pairs.
        fitting.sort(key=_ORDER)
        fitting.sort(key=_SIZE, reverse=True)
        if fitting and fitting[0].size_class is SizeClass.T:
            return fitting[:1]
        chosen: list[Item] = []
        total = 0
        for item in fitting:
            if 8 * total > self.capacity:
                break
            if total + item.num_blocks <= limit:
                chosen.append(item)
                total += item.num_blocks
        return chosen

    def surplus(self) -> list[Item]:
        """Bigs that break the rules for one device: beside an L belongs only one M or S that fits with it, and an M and
        an S alone do not share a device."""
        if self.category is not SizeClass.L:
            return [item for item in self.bigs if item.size_class is SizeClass.S] if self.is_mixed() else []
        bigs = sorted(self.bigs, key=lambda item: (-item.grip, -item.num_blocks, item.order))
        large = next(item for item in bigs if item.size_class is SizeClass.L)
        rest = [item for item in bigs if item is not large]
        kept = next((i for i in rest if i.num_blocks + large.num_blocks <= self.capacity), None)
        return [item for item in rest if item is not kept]
