"""The packings that MELL is compared with (section VIII.B): best-fit, worst-fit, and load balancing by migration. Pure.

Each opens a device for a request that fits nowhere, and closes idle devices. From a device that its requests have
outgrown the newest requests leave: without migration they are computed again elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jettison.policy.packing.bins import Bin, Entry, Item
from jettison.policy.packing.book import OnBook, PackingBook
from jettison.policy.packing.types import Grip, Operation, PackingParams, Plan
from jettison.types import GroupId, RequestId

ROOMS = "rooms"
"""All devices in use, by free blocks."""
GAP = 0.1
"""Share of the capacity by which two devices differ before load balancing moves a request between them."""


def _by_room(bin_: Bin) -> tuple[Entry, ...]:
    return ((ROOMS, (bin_.free, bin_.device)),)


class WorstFit(OnBook):
    """An arrival goes where most memory is free; a ``Packer``. Prefixes are not shared."""

    migrates = False
    """Whether running requests keep their KV when they change devices."""
    gathers = True
    """Whether it aims at few devices."""

    def __init__(self, params: PackingParams, devices: Iterable[GroupId] | None = None) -> None:
        self.params = params
        self.book = PackingBook(params.capacity, _by_room, devices)

    def pin(self, request_id: RequestId, grip: Grip) -> None:
        self.book.pin(self.book.items[request_id], grip)

    def set_taking(self, device: GroupId, is_taking: bool) -> None:
        self.book.set_taking(device, is_taking)

    def apply(self, batch: Sequence[Operation]) -> Plan:
        departs, resizes, arrivals = self.book.check(batch)
        self.book.forget(departs)
        self.book.resize(resizes)
        for arrival in arrivals:
            if arrival.device is not None:
                self.book.put(self.book.make(arrival), self.book.bin_of(arrival.device))
        recomputed = [name for device in sorted(self.book.over) for name in self._relieve(self.book.bins[device])]
        unplaced = []
        for arrival in arrivals:
            if arrival.device is None and not self._place(item := self.book.make(arrival)):
                unplaced.append(arrival.request_id)
                self.book.forget([item])
        self._balance()
        return self.book.plan(unplaced, () if self.migrates else recomputed)

    def _relieve(self, bin_: Bin) -> Iterable[RequestId]:
        """The newest requests leave until the others fit. A request that fits nowhere stays."""
        items = sorted((*bin_.bigs, *bin_.fillers.values()), key=lambda item: -item.order)
        for item in items[:-1] if bin_.is_taking else ():
            if bin_.free < 0 and item.grip is not Grip.PINNED:
                taker = self._choose(item) or self.book.open()
                if taker is not None:
                    self.book.take(item)
                    self.book.put(item, taker)
                    yield item.request_id

    def _place(self, item: Item) -> bool:
        bin_ = self._choose(item) or self.book.open()
        if bin_ is None:
            return False
        self.book.put(item, bin_)
        return True

    def _choose(self, item: Item) -> Bin | None:
        rooms = self.book.indices[ROOMS]
        return self.book.bins[rooms[-1][1]] if rooms and rooms[-1][0] >= item.num_blocks else None

    def _balance(self) -> None:
        """No balancing here: running requests stay."""


class BestFit(WorstFit):
    """An arrival goes where the least memory that suffices is free."""

    def _choose(self, item: Item) -> Bin | None:
        rooms = self.book.indices[ROOMS]
        at = rooms.bisect_left((item.num_blocks,))
        return self.book.bins[rooms[at][1]] if at < len(rooms) else None


class LoadBalance(WorstFit):
    """Worst-fit, and requests go from the fullest devices to the emptiest (Llumnix): each plan pairs the fullest with
    the emptiest, the next with the next, and moves one request a pair, the largest that does not turn them round."""

    migrates = True
    gathers = False

    def _balance(self) -> None:
        rooms = list(self.book.indices[ROOMS])
        for (little, full), (much, empty) in zip(rooms[: len(rooms) // 2], reversed(rooms)):
            if much - little <= GAP * self.params.capacity:
                break
            source = self.book.bins[full]
            going = [item for item in (*source.bigs, *source.fillers.values())
                     if item.is_free and 2 * item.num_blocks <= much - little]  # fmt: skip
            if going:
                item = max(going, key=lambda item: (item.num_blocks, item.order))
                self.book.take(item)
                self.book.put(item, self.book.bin_of(empty))
