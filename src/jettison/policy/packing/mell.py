"""MELL's packing (sections VI and VII): the fewest devices, within 4/3 of the optimum, and few moves. Pure.

Fig. 10 as printed does not keep its own Theorem 1 (``papers/printed.py``). Here the table is complete: each
request that an operation displaces is placed by its class, and the devices are then settled until the five properties
hold again (docs/policies.md has the table, the exceptions, and the bound on moves).

1. An M-device has two M, or one and two S, 2. an S-device three S, 3. a T-device is filled to 3/4: one device of each
kind may be less. 4. An L is alone only where no M or S of the M- and S-devices fits beside it. 5. There are T-devices
only where all others are filled to 3/4. T and small requests lie wherever they fit, and make room for M and S.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import islice

from jettison.policy.links import FAR, MachineDistance, one_or_another
from jettison.policy.packing.bins import Bin, Entry, Item
from jettison.policy.packing.book import OnBook, PackingBook
from jettison.policy.packing.types import Arrive, Grip, Operation, PackingParams, Plan, SizeClass, Work
from jettison.types import GroupId, RequestId

ROOMS = "rooms"
"""Devices with an S, M or L, by free blocks."""
TINY = "tiny"
"""T-devices, by free blocks."""
SINGLES = "singles"
"""L-devices without M and S, by the blocks that an M or S may take: T and small requests that may be moved give way."""
MIDDLES = "middles"
"""M and S that may be moved, on M- and S-devices, by size."""
PARTIAL = {SizeClass.M: "one M", SizeClass.S: "fewer than three S"}
"""M- and S-devices that lack a request of their class, by free blocks."""
LATER = "later"
"""Devices that still hold blocks of requests which should live elsewhere, by the blocks that are free once these have
left."""
MIXED = "one M and one S"
"""Devices with these."""
ENDLESS = 1 << 62


def index_entries(bin_: Bin) -> tuple[Entry, ...]:
    """A device's entries, and its requests', in the indices."""
    room = (bin_.room, bin_.device)
    entries: list[Entry] = [(ROOMS if bin_.bigs else TINY, room)]
    if bin_.leaving:
        entries.append((LATER, (bin_.room_later, bin_.device)))
    if not bin_.bigs:
        return tuple(entries)
    if bin_.category is SizeClass.L:
        if len(bin_.bigs) == 1:
            entries.append((SINGLES, (bin_.room_for_big, bin_.device)))
        return tuple(entries)
    if bin_.is_mixed():
        entries.append((MIXED, (bin_.device,)))
    elif not bin_.is_complete():
        entries.append((PARTIAL[bin_.category], room))
    entries += [(MIDDLES, (item.num_blocks, item.order)) for item in bin_.bigs if item.is_free]
    return tuple(entries)


class Packing(OnBook):
    """The desired placement of one pool of like devices; a ``Packer``.

    ``devices``: the devices that may be used, in the order in which they are opened; None: as many as it takes,
    numbered from 0. ``machine_of``: devices of one machine are near each other, those of others as ``distance`` says.
    """

    entries = staticmethod(index_entries)

    def __init__(
        self, params: PackingParams, devices: Iterable[GroupId] | None = None,
        machine_of: Mapping[GroupId, Hashable] | None = None, distance: MachineDistance = one_or_another,
    ) -> None:
        self.params = params
        self.book = PackingBook(params.capacity, self.entries, devices)
        self._machine_of = machine_of or {}
        self._distance = distance
        self._displaced: list[tuple[int, int, list[Item], Bin]] = []
        """Units that have to go elsewhere, and the bin where each was: a heap, the largest first."""
        self._dirty: set[GroupId] = set()
        self._reopened: set[GroupId] = set()
        """Devices that this plan has taken into use again while they were being emptied."""
        self._misfits: dict[GroupId, None] = {}
        """Devices that were given a request that does not belong there, because no other device could be opened; the
        one looked at longest ago first."""

    def pin(self, request_id: RequestId, grip: Grip) -> None:
        self._dirty.add(self.book.pin(self.book.items[request_id], grip).device)

    def set_taking(self, device: GroupId, is_taking: bool) -> None:
        self.book.set_taking(device, is_taking)
        self._dirty.add(device)

    def bound_work(self, work: Work | None) -> None:
        """Have no device take a request for which its steps have no time, from now on; None: time is no bound. A device
        that has more already keeps it."""
        self.book.bound_work(work)

    def apply(self, batch: Sequence[Operation]) -> Plan:
        """See ``Packer``. In the paper's order (section VI.C, operation batching): departures, growth, arrivals; an
        arrival takes the place of a departed request before any other request is moved there."""
        departs, resizes, arrivals = self.book.check(batch)
        self.book.forget(departs)
        self._dirty |= self.book.resize(resizes)
        settled = [self._arrive_at(a, a.device) for a in arrivals if a.device is not None]
        self._dirty.update(self.book.over, settled, self._due_misfits())
        for device in sorted(self._dirty):
            self._normalise(device)
        self._dirty.clear()
        self._place_displaced()
        new = [self.book.make(arrival) for arrival in arrivals if arrival.device is None]
        unplaced = [item for item in sorted(new, key=_largest_first) if not self._place([item])]
        self.book.forget(unplaced)
        self._settle()
        self._reopened.clear()
        return self.book.plan([item.request_id for item in unplaced])

    def _arrive_at(self, arrival: Arrive, device: GroupId) -> GroupId:
        self.book.put(self.book.make(arrival), self.book.bin_of(device))
        return device

    # What an operation displaces

    def _normalise(self, device: GroupId) -> None:
        """Take requests off a device that do not belong together, and requests that it has no room for."""
        bin_ = self.book.bins.get(device)
        if bin_ is None or not bin_.is_taking:
            return
        for item in bin_.surplus():
            if item.is_free:
                self._displace([item], self.book.take(item))
        self._make_room(bin_)

    def _make_room(self, bin_: Bin) -> None:
        while bin_.free < 0 and (victims := bin_.victims()):
            for item in victims:
                self.book.take(item)
            self._displace(victims, bin_)

    def _displace(self, unit: list[Item], home: Bin) -> None:
        heapq.heappush(self._displaced, (-_total(unit), unit[0].order, unit, home))

    def _place_displaced(self) -> None:
        """Place displaced units, the largest first. A unit that fits nowhere stays where it was, and its device is
        overfull."""
        while self._displaced:
            _, _, unit, home = heapq.heappop(self._displaced)
            if self._place(unit, home):
                continue
            for item in unit:
                if len(unit) == 1 or not self._place([item], home):
                    self.book.put(item, self.book.bin_of(home.device))

    def _place(self, unit: list[Item], source: Bin | None = None) -> bool:
        """Put a unit where its class belongs, and place the requests that give way for it. False where no device has
        room."""
        bin_ = self._choose(unit, source) or self._choose_later(unit) or self._reopen(unit, source) or self.book.open()
        if bin_ is None and (bin_ := self._anywhere(_total(unit), source)) is not None:
            self._misfits[bin_.device] = None
        if bin_ is None:
            return False
        self._move_to(bin_, unit)
        return True

    def _anywhere(self, num_blocks: int, source: Bin | None) -> Bin | None:
        """The last resort where no device can be opened: any device with room, first of all the one where the unit was.
        The properties that this breaks are owed (mended later) once there is a better place."""
        home = None if source is None else self.book.bins.get(source.device)
        if home is not None and home.is_taking and home.room >= num_blocks:
            return home
        return self._best(ROOMS, num_blocks, source) or self._tightest_tiny(num_blocks)

    def _due_misfits(self) -> list[GroupId]:
        """Misfits to look at now: all of them where a device can be opened, else a few in turn, so that an operation
        stays cheap."""
        due = list(self._misfits) if self.book.can_open() else list(islice(self._misfits, self.params.candidates))
        for device in due:
            del self._misfits[device]
        return due

    def _move_to(self, bin_: Bin, items: Sequence[Item]) -> None:
        for item in items:
            if item.bin is not None:
                self.book.take(item)
            self.book.put(item, bin_)
        if bin_.free < 0:
            self._make_room(bin_)
            self._place_displaced()

    # Where a request of a class goes

    def _choose(self, unit: list[Item], source: Bin | None) -> Bin | None:
        """A device in use that has room for the unit by the table; None: another device is needed."""
        if unit[0].size_class is SizeClass.L:
            return self._choose_for_large(unit[0])
        if unit[0].is_big:
            return self._choose_for_middle(unit[0], source)
        return self._choose_for_fillers(unit, source)

    def _choose_for_fillers(self, unit: list[Item], source: Bin | None) -> Bin | None:
        prefix = unit[0].share_key
        if self.params.shares_prefixes and len(unit) == 1 and prefix is not None:
            near = list(islice(reversed(self.book.by_key.get(prefix, {})), self.params.candidates))
            bins = [self.book.bins[device] for device in near]
            bins = [b for b in bins if b.is_taking and b.room >= b.blocks_of(unit[0])]
            if bins:
                return min(bins, key=lambda b: (b.room, b.device))
        return self._best(ROOMS, _total(unit), source) or self._tightest_tiny(_total(unit))

    def _choose_for_middle(self, item: Item, source: Bin | None) -> Bin | None:
        beside_large = self._best(SINGLES, item.num_blocks, source)
        if beside_large is not None:
            return beside_large
        partial = [bin_ for bin_ in self._partial(item.size_class) if self._room(bin_) >= item.num_blocks]
        if partial:
            return max(partial, key=lambda b: (len(b.bigs), -b.loose, -b.device))
        return self._tightest_tiny(item.num_blocks)

    def _choose_for_large(self, item: Item) -> Bin | None:
        """Beside one M or S, else on a T-device; the tightest. No request gives way to an L: where none of these has
        room, it takes an idle device."""
        partial = [b for name in PARTIAL for b in self._partial(name) if len(b.bigs) == 1 and b.room >= item.num_blocks]
        if partial:
            return min(partial, key=lambda b: (b.room, b.device))
        return self._tightest_tiny(item.num_blocks)

    def _choose_later(self, unit: list[Item]) -> Bin | None:
        """Of a few devices that will have room for the unit once requests have left that should live elsewhere already,
        the one with the least that the table lets it in to; None: none will."""
        keys = self.book.indices[LATER]
        first = keys.bisect_left((_total(unit),))
        bins = (self.book.bins[device] for _, device in keys[first : first + self.params.candidates])
        return next((bin_ for bin_ in bins if _suits(unit[0], bin_)), None)

    def _reopen(self, unit: list[Item], source: Bin | None) -> Bin | None:
        """A place for the unit once a device that is being emptied is in use again, and has those of its requests back
        that can still be called back; None: no device is being emptied, or none of them gives the unit a place."""
        for device in self.book.closing():
            if device in self._reopened:
                continue  # once in a plan: so it ends
            self._reopened.add(device)
            bin_ = self.book.bin_of(device)
            back = [i for i in self.book.left_at[device].values() if i.grip is not Grip.PINNED and i.bin is not None]
            for item in sorted(back, key=_largest_first):
                if bin_.room_later >= item.num_blocks:
                    self.book.take(item)
                    self.book.put(item, bin_)
            chosen = self._choose(unit, source)
            if chosen is not None:
                return chosen
            # An empty one is taken as ``open`` would take it; one that was left empty would count as in use for good.
            if not bin_.num_requests or (bin_.room_later >= _total(unit) and _suits(unit[0], bin_)):
                return bin_
        return None

    def _room(self, bin_: Bin) -> int:
        """Blocks for an M or S. T and small requests give way only while there is a device for them to go to."""
        return bin_.room_for_big if self.book.can_open() else bin_.room

    def _partial(self, size_class: SizeClass) -> list[Bin]:
        return [self.book.bins[device] for _, device in self.book.indices[PARTIAL[size_class]]]

    def _tightest_tiny(self, num_blocks: int) -> Bin | None:
        keys = self.book.indices[TINY]
        at = keys.bisect_left((num_blocks,))
        return self.book.bins[keys[at][1]] if at < len(keys) else None

    def _best(self, index: str, num_blocks: int, source: Bin | None) -> Bin | None:
        """The device of highest priority among a few (``candidates``) of those with room in an index."""
        keys = self.book.indices[index]
        if not keys or keys[-1][0] < num_blocks:
            return None
        first, most = keys.bisect_left((num_blocks,)), self.params.candidates
        chosen = keys[first:] if len(keys) - first <= 2 * most else keys[first : first + most] + keys[-most:]
        bins = [self.book.bins[device] for _, device in chosen]
        if index == SINGLES:
            bins = [bin_ for bin_ in bins if self._room(bin_) >= num_blocks]
        return max(bins, key=lambda b: (self._priority(b, source), -b.device), default=None)

    def _priority(self, bin_: Bin, source: Bin | None) -> float:
        """The priority of section VI.C: few requests, much memory, the same machine; beyond the paper, the nearer of
        other machines."""
        weights = self.params.priorities
        score = weights.load / (1 + bin_.num_requests) + weights.free * bin_.room / self.params.capacity
        if source is not None and bin_.device in self._machine_of:
            away = self._distance(self._machine_of.get(source.device), self._machine_of[bin_.device])
            score += weights.distance * (FAR - away)
        return score

    # What an operation leaves

    def _settle(self) -> None:
        """Move items until the five properties hold, or nothing has room. Each step moves one item, and no step undoes
        another: first fewer M and S lie apart from an L, then fewer devices have one M and one S alone, then M and S
        lie on fewer devices (the sum of the squares of their numbers rises), then fewer T lie on T-devices, then fewer
        T-devices are not filled."""
        while (
            self._pair_with_large()
            or self._part_mixed()
            or self._complete(SizeClass.M)
            or self._complete(SizeClass.S)
            or self._fill_others()
            or self._fill_tiny()
        ):
            pass

    def _pair_with_large(self) -> bool:
        """Property 4: the largest M or S that fits beside the L with most room moves there; one from a device that
        lacks a request goes before others."""
        singles, middles = self.book.indices[SINGLES], self.book.indices[MIDDLES]
        if not singles or not middles or middles[0][0] > singles[-1][0]:
            return False
        room = max((self._room(self.book.bins[device]) for _, device in singles[-self.params.candidates :]))
        at = middles.bisect_right((room, ENDLESS)) - 1
        if at < 0:
            return False
        item = self.book.by_order[middles[at][1]]
        spare = [i for cls in PARTIAL for b in self._partial(cls) for i in b.bigs if i.is_free and i.num_blocks <= room]
        item = max(spare, key=lambda i: (i.num_blocks, -i.order), default=item)
        bin_ = self._best(SINGLES, item.num_blocks, item.bin)
        if bin_ is None:
            return False
        self._move_to(bin_, [item])
        return True

    def _part_mixed(self) -> bool:
        """Properties 1 and 2: the S of a device with one M and one S goes to its like."""
        for (device,) in list(self.book.indices[MIXED]):
            bin_ = self.book.bins[device]
            free = [item for item in bin_.surplus() if item.is_free]
            for item in free:
                self._displace([item], self.book.take(item))
            self._place_displaced()
            if free and not bin_.is_mixed():
                return True
        return False

    def _complete(self, size_class: SizeClass) -> bool:
        """Properties 1 and 2: of two devices that lack a request of the class, the one with fewer gives one to the
        other."""
        if len(self.book.indices[PARTIAL[size_class]]) < 2:
            return False
        bins = sorted(self._partial(size_class), key=lambda b: (len(b.bigs), -b.loose, -b.device))
        for giver in bins:
            item = next((item for item in giver.bigs if item.is_free and item.size_class is size_class), None)
            for taker in reversed(bins if item is not None else []):
                assert item is not None
                if taker is not giver and len(taker.bigs) >= len(giver.bigs) and self._room(taker) >= item.num_blocks:
                    self._move_to(taker, [item])
                    return True
        return False

    def _fill_others(self) -> bool:
        """Property 5: devices with S, M or L that are not filled take from the T-device with least on it."""
        rooms, tiny = self.book.indices[ROOMS], self.book.indices[TINY]
        if not tiny or not rooms or rooms[-1][0] <= self.params.slack_blocks:
            return False
        for _, device in reversed(tiny[-self.params.candidates :]):
            giver = self.book.bins[device]
            taker = self._best(ROOMS, self.params.slack_blocks + 1, giver)
            assert taker is not None
            if unit := giver.unit(min(self.params.capacity // 4, taker.room)):
                self._move_to(taker, unit)
                return True
        return False

    def _fill_tiny(self) -> bool:
        """Property 3: of T-devices that are not filled, the one with least on it gives to the one with most."""
        tiny, most = self.book.indices[TINY], self.params.candidates
        first = tiny.bisect_right((self.params.slack_blocks, ENDLESS))
        if len(tiny) - first < 2:
            return False
        takers = [self.book.bins[device] for _, device in tiny[first : first + most]]
        for _, device in reversed(tiny[max(first, len(tiny) - most) :]):
            giver = self.book.bins[device]
            for taker in takers:
                if taker is giver:
                    break
                if unit := giver.unit(min(self.params.capacity // 4, taker.room)):
                    self._move_to(taker, unit)
                    return True
        return False


def _largest_first(item: Item) -> tuple[int, int]:
    return -item.num_blocks, item.order


def _suits(item: Item, bin_: Bin) -> bool:
    """Whether the table lets a request in beside those of a device, if there is room: one of class S or above beside
    fillers, beside its like where one lacks, or beside an L that is alone; an L beside one S or M, too."""
    if not item.is_big or not bin_.bigs:
        return True
    if item.size_class is SizeClass.L:
        return len(bin_.bigs) == 1 and bin_.category is not SizeClass.L
    if bin_.category is SizeClass.L:
        return len(bin_.bigs) == 1
    return bin_.category is item.size_class and not bin_.is_complete()


def _total(unit: Sequence[Item]) -> int:
    return sum(item.num_blocks for item in unit)
