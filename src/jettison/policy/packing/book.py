"""The books of a packing: which request is on which device, devices by the room that they have, and what a batch has
changed.

It decides nothing. All look-ups are by sorted indices: O(log n) in devices and requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from sortedcontainers import SortedList

from jettison.policy.packing.bins import Bin, Entry, Item, Prefix
from jettison.policy.packing.types import (
    Arrive,
    Depart,
    Grip,
    Operation,
    PackMove,
    Placement,
    Plan,
    Resize,
    SizeClass,
    Work,
    num_multi_items,
    size_class,
)  # fmt: skip
from jettison.types import GroupId, RequestId

Index: TypeAlias = "SortedList[tuple[int, ...]]"


class BookChanges(NamedTuple):
    """A batch by kind."""

    departs: list[Item]
    resizes: list[tuple[Item, Resize]]
    arrivals: list[Arrive]


class PackingBook:
    """Items, bins in use, idle devices, and what has changed since ``begin``."""

    def __init__(
        self, capacity: int, entries: Callable[[Bin], tuple[Entry, ...]], devices: Iterable[GroupId] | None
    ) -> None:
        self.capacity = capacity
        self.work: Work | None = None
        """What a device's steps have time for; None: for anything."""
        self.items: dict[RequestId, Item] = {}
        self.bins: dict[GroupId, Bin] = {}
        """In the order in which they were opened."""
        self.away: set[GroupId] = set()
        """Devices that are not packed."""
        self.over: set[GroupId] = set()
        """Devices that hold more than their capacity."""
        self.indices: defaultdict[str, Index] = defaultdict(SortedList)
        self.by_key: defaultdict[Prefix, dict[GroupId, None]] = defaultdict(dict)
        self.by_order: dict[int, Item] = {}
        self._entries = entries
        self._is_unbounded = devices is None
        # The device closed last is opened first: it may still be warm.
        self._idle = dict.fromkeys(reversed(list(devices or ())))
        self.left_at: defaultdict[GroupId, dict[RequestId, Item]] = defaultdict(dict)
        """By device: requests whose KV it holds, and that should live elsewhere."""
        self._leaving: defaultdict[GroupId, int] = defaultdict(int)
        """By device: the blocks of these requests."""
        self._next_device = self._next_order = 0
        self._origins: dict[RequestId, GroupId | None] = {}
        self._opened: dict[GroupId, None] = {}
        self._closed: dict[GroupId, None] = {}

    def can_open(self) -> bool:
        """Whether another device can be opened."""
        return self._is_unbounded or bool(self._idle)

    def open(self) -> Bin | None:
        """The bin of another device; None where there is none."""
        if not self._idle and not self._is_unbounded:
            return None
        if self._idle:
            return self.bin_of(next(reversed(self._idle)))
        while self._next_device in self.bins or self._next_device in self.away:
            self._next_device += 1
        return self.bin_of(self._next_device)

    def bin_of(self, device: GroupId) -> Bin:
        """A device's bin, which is opened where it has none."""
        if device not in self.bins:
            self._idle.pop(device, None)
            is_taking, leaving = device not in self.away, self._leaving.get(device, 0)
            self.bins[device] = Bin(device, self.capacity, is_taking, self.work, leaving=leaving)
            if device in self._closed:
                del self._closed[device]
            else:
                self._opened[device] = None
        return self.bins[device]

    def bound_work(self, work: Work | None) -> None:
        """What a device's steps have time for from now on."""
        self.work = work
        for bin_ in self.bins.values():
            bin_.work = work
            self.reindex(bin_)

    def closing(self) -> list[GroupId]:
        """Devices that no request should live on and that hold KV of some, the fullest first."""
        some = [device for device in self._leaving if device in self._idle]
        return sorted(some, key=lambda device: (-self._leaving[device], device))

    def live_at(self, request_id: RequestId, device: GroupId) -> None:
        """A request's KV is on this device from now on."""
        item = self.items[request_id]
        self._count_left(item, 0)
        item.here = device
        self._note_left(item)

    def _note_left(self, item: Item) -> None:
        """Count what a device holds for an item that should live elsewhere, and no more what it has given up."""
        if item.here is not None:
            is_home = item.bin is not None and item.bin.device == item.here
            self._count_left(item, 0 if is_home else item.own_blocks)

    def _count_left(self, item: Item, num_blocks: int) -> None:
        if item.here is None or item.left_blocks == num_blocks:
            return
        device = item.here
        self._leaving[device] += num_blocks - item.left_blocks
        item.left_blocks = num_blocks
        if num_blocks:
            self.left_at[device][item.request_id] = item
        else:
            self.left_at[device].pop(item.request_id, None)
        if not self.left_at[device]:
            del self.left_at[device], self._leaving[device]
        if device in self.bins:
            self.bins[device].leaving = self._leaving.get(device, 0)
            self.reindex(self.bins[device])

    def set_taking(self, device: GroupId, is_taking: bool) -> None:
        """A device is packed from now on, or is not; one that was not known is idle."""
        if is_taking:
            self.away.discard(device)
            if device not in self.bins:
                self._idle.setdefault(device)
        else:
            self.away.add(device)
            self._idle.pop(device, None)
        if device in self.bins:
            self.bins[device].is_taking = is_taking
            self.reindex(self.bins[device])

    def make(self, operation: Arrive) -> Item:
        """An arrival's item, on no device yet."""
        request_id, num_blocks, _, key, shared, grip, here, growth = operation
        item = Item(
            request_id, num_blocks, self._next_order, size_class(num_blocks, self.capacity), grip=grip, here=here,
            growth_blocks=growth,
        )
        if key is not None and shared:
            item.share_key, item.shared_blocks = (key, shared), shared
        self._next_order += 1
        self.items[request_id] = self.by_order[item.order] = item
        self._origins[request_id] = operation.device
        return item

    def forget(self, items: Iterable[Item]) -> None:
        """Drop requests that are over. The indices are updated once a device, however many leave it."""
        left: set[GroupId] = set()
        for item in items:
            del self.items[item.request_id], self.by_order[item.order]
            self._origins.pop(item.request_id, None)
            if (bin_ := item.bin) is not None:
                self._take(item, bin_)
                left.add(bin_.device)
                if not bin_.num_requests:
                    self._close(bin_)
            self._count_left(item, 0)
        self._reindex_all(left)

    def put(self, item: Item, bin_: Bin) -> None:
        """Place the item in the bin."""
        bin_.put(item)
        if item.share_key is not None:
            self.by_key[item.share_key][bin_.device] = None
        self._note_left(item)
        self.reindex(bin_)

    def take(self, item: Item) -> Bin:
        """Take the item off its bin; the bin is closed where nothing is left. Returns the bin."""
        bin_ = item.bin
        assert bin_ is not None
        self._origins.setdefault(item.request_id, bin_.device)
        self._take(item, bin_)
        self._note_left(item)
        if bin_.num_requests:
            self.reindex(bin_)
        else:
            self._close(bin_)
        return bin_

    def _take(self, item: Item, bin_: Bin) -> None:
        bin_.take(item)
        if item.share_key is not None and item.share_key not in bin_.sharers:
            devices = self.by_key[item.share_key]
            del devices[bin_.device]
            if not devices:
                del self.by_key[item.share_key]

    def resize(self, resizes: Iterable[tuple[Item, Resize]]) -> set[GroupId]:
        """Resize items where they are; returns their devices. The indices are updated once a device."""
        touched: set[GroupId] = set()
        for item, (_, num_blocks, growth_blocks) in resizes:
            assert item.bin is not None
            item.bin.resize(item, num_blocks, growth_blocks)
            self._note_left(item)
            touched.add(item.bin.device)
        self._reindex_all(touched)
        return touched

    def _reindex_all(self, devices: Iterable[GroupId]) -> None:
        for device in devices:
            if device in self.bins:
                self.reindex(self.bins[device])

    def pin(self, item: Item, grip: Grip) -> Bin:
        """Say whether the item may be moved; returns its bin."""
        assert item.bin is not None
        bin_ = item.bin
        bin_.take(item)
        item.grip = grip
        bin_.put(item)
        self.reindex(bin_)
        return bin_

    def reindex(self, bin_: Bin) -> None:
        """Bring the indices up to date with the bin's present state."""
        entries = self._entries(bin_) if bin_.is_taking and bin_.num_requests else ()
        if entries != bin_.entries:
            for entry in bin_.entries:
                if entry not in entries:
                    self.indices[entry[0]].remove(entry[1])
            for entry in entries:
                if entry not in bin_.entries:
                    self.indices[entry[0]].add(entry[1])
            bin_.entries = entries
        if bin_.used > self.capacity:
            self.over.add(bin_.device)
        else:
            self.over.discard(bin_.device)

    def _close(self, bin_: Bin) -> None:
        device = bin_.device
        self.reindex(bin_)
        del self.bins[device]
        if bin_.is_taking:
            self._idle[device] = None
        if device in self._opened:
            del self._opened[device]
        else:
            self._closed[device] = None

    def check(self, batch: Sequence[Operation]) -> BookChanges:
        """The operations by kind; raises KeyError and ValueError as ``Packer.apply`` says, having changed nothing."""
        departs: list[Item] = []
        resizes: list[tuple[Item, Resize]] = []
        arrivals: list[Arrive] = []
        gone: set[RequestId] = set()
        coming: set[RequestId] = set()
        for operation in batch:
            if isinstance(operation, Resize):
                item = self.items[operation.request_id]
                self._check_size(operation.num_blocks, item.shared_blocks)
                resizes.append((item, operation))
            elif isinstance(operation, Depart):
                departs.append(self.items[operation.request_id])
                gone.add(operation.request_id)
            else:
                self._check_size(operation.num_blocks, operation.shared_blocks)
                arrivals.append(operation)
                coming.add(operation.request_id)
        if len(gone) < len(departs):
            raise ValueError("a request departs twice")
        twice = len(coming) < len(arrivals)
        if twice or any(request_id in self.items and request_id not in gone for request_id in coming):
            raise ValueError("a request arrives that is there already")
        return BookChanges(departs, [row for row in resizes if row[0].request_id not in gone], arrivals)

    def _check_size(self, num_blocks: int, shared: int) -> None:
        if not 0 <= shared <= num_blocks <= self.capacity or num_blocks < 1:
            raise ValueError(f"{num_blocks} blocks, {shared} of them shared, on devices of {self.capacity}")

    def plan(self, unplaced: Sequence[RequestId] = (), recomputed: Iterable[RequestId] = ()) -> Plan:
        """The net changes since the last plan."""
        placed: list[Placement] = []
        moves: list[PackMove] = []
        for request_id, origin in self._origins.items():
            item = self.items[request_id]
            assert item.bin is not None
            if origin is None:
                placed.append(Placement(request_id, item.bin.device))
            elif item.bin.device != origin:
                moves.append(PackMove(request_id, origin, item.bin.device, item.num_blocks))
        again = set(recomputed)
        kept = tuple(move for move in moves if move.request_id not in again)
        plan = Plan(
            placed=tuple(placed), moves=kept, recomputed=tuple(move for move in moves if move.request_id in again),
            opened=tuple(self._opened), closed=tuple(self._closed), unplaced=tuple(unplaced),
            overfull=tuple(sorted(self.over)), num_item_moves=self._num_items(kept),
        )  # fmt: skip
        self._origins.clear()
        self._opened.clear()
        self._closed.clear()
        return plan

    def _num_items(self, moves: Iterable[PackMove]) -> int:
        """Moves of items in the paper's sense: the small requests of each pair of devices travel in multi-items."""
        count = 0
        small: defaultdict[tuple[GroupId, GroupId], list[int]] = defaultdict(list)
        for move in moves:
            if size_class(move.num_blocks, self.capacity) is SizeClass.SMALL:
                small[move.source, move.destination].append(move.num_blocks)
            else:
                count += 1
        return count + sum(num_multi_items(sizes, self.capacity) for sizes in small.values())


class OnBook:
    """The queries that every ``Packer`` with a book answers from it."""

    book: PackingBook

    def live_at(self, request_id: RequestId, device: GroupId) -> None:
        self.book.live_at(request_id, device)

    @property
    def active(self) -> tuple[GroupId, ...]:
        return tuple(self.book.bins)

    @property
    def outgrown(self) -> tuple[GroupId, ...]:
        over = [] if self.book.can_open() else sorted(self.book.over)
        return tuple(device for device in over if self.book.bins[device].is_taking)

    def device_of(self, request_id: RequestId) -> GroupId:
        bin_ = self.book.items[request_id].bin
        assert bin_ is not None
        return bin_.device

    def requests_on(self, device: GroupId) -> dict[RequestId, int]:
        bin_ = self.book.bins.get(device)
        on_it = [] if bin_ is None else [*bin_.bigs, *bin_.fillers.values()]
        return {item.request_id: item.num_blocks for item in on_it}
