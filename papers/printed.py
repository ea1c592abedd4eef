"""MELL's Fig. 10 as it is printed, for its counter-example: it does not keep Theorem 1, nor the 4/3 of Theorem 2. Pure.

A T never goes to an M-device, so property 5 fails (docs/policies.md: 1,500 devices where 1,100 suffice). Nothing
relieves a device that its T or M have outgrown: plans name it in ``overfull``. Small requests count as T. Operations
are taken one by one, in the order of section VI.C. The policy to use is ``policy.packing.mell``.
"""

from __future__ import annotations

from collections.abc import Sequence

from jettison.policy.packing.bins import Bin, Entry, Item
from jettison.policy.packing.mell import ENDLESS, MIDDLES, ROOMS, SINGLES, Packing, index_entries
from jettison.policy.packing.types import Operation, Plan, Resize, SizeClass


def printed_entries(bin_: Bin) -> tuple[Entry, ...]:
    """The complete table's entries, except that only L-devices are indexed as having room for a T."""
    entries = index_entries(bin_)
    if bin_.category is SizeClass.L:
        return entries
    return tuple(entry for entry in entries if entry[0] != ROOMS)


class Printed(Packing):
    """Fig. 10; a ``Packer``. It does not look at grips."""

    entries = staticmethod(printed_entries)

    def apply(self, batch: Sequence[Operation]) -> Plan:
        departs, resizes, arrivals = self.book.check(batch)
        for item in departs:
            self._depart(item)
            self.book.forget([item])
        for item, resize in resizes:
            self._update(item, resize)
        unplaced = []
        for arrival in arrivals:
            if arrival.device is not None:
                self._arrive_at(arrival, arrival.device)
            elif not self._allocate(item := self.book.make(arrival)):
                unplaced.append(arrival.request_id)
                self.book.forget([item])
        return self.book.plan(unplaced)

    # Allocate

    def _allocate(self, item: Item) -> bool:
        if not self._place([item]):
            return False
        self._place_displaced()
        if item.size_class is SizeClass.L and item.bin is not None:
            self._pull_beside(item.bin)
        return True

    def _choose_for_fillers(self, unit: list[Item], source: Bin | None) -> Bin | None:
        needed = sum(item.num_blocks for item in unit)
        latest = self._latest(SizeClass.T)
        return self._best(ROOMS, needed, source) or (latest if latest is not None and latest.free >= needed else None)

    def _choose_for_middle(self, item: Item, source: Bin | None) -> Bin | None:
        # The figure's comparison is strict.
        beside_large = self._best(SINGLES, item.num_blocks + 1, source)
        if beside_large is not None:
            return beside_large
        latest = self._latest(item.size_class)
        return latest if latest is not None and latest.free >= item.num_blocks else None

    def _choose_for_large(self, item: Item) -> Bin | None:
        return None

    def _latest(self, category: SizeClass, other_than: Bin | None = None) -> Bin | None:
        """The most recently activated device of a category."""
        bins = reversed(self.book.bins.values())
        return next((b for b in bins if b.category is category and b.is_taking and b is not other_than), None)

    # Depart

    def _depart(self, item: Item) -> None:
        bin_ = item.bin
        assert bin_ is not None
        category, is_latest = bin_.category, bin_ is next(reversed(self.book.bins.values()))
        self.book.take(item)
        if is_latest or not bin_.num_requests:
            return
        if not item.is_big:
            self._replace_filler(bin_, category)
        elif item.size_class is SizeClass.L:
            self._allocate_again([*bin_.bigs, *bin_.fillers.values()])
        elif category is SizeClass.L:
            self._pull_beside(bin_)
        else:
            self._fulfil(bin_, category)

    def _replace_filler(self, bin_: Bin, category: SizeClass) -> None:
        givers = [self._latest(SizeClass.T, bin_)]
        if category is SizeClass.T:
            givers.append(self._latest(SizeClass.M, bin_))
        for giver in givers:
            fitting = [] if giver is None else [i for i in giver.fillers.values() if i.num_blocks <= bin_.free]
            if fitting:
                self._move_to(bin_, [max(fitting, key=lambda i: (i.num_blocks, -i.order))])
                return

    def _pull_beside(self, bin_: Bin) -> None:
        """Move an S or M to an L that is alone, and another request to where that one was."""
        middles = self.book.indices[MIDDLES]
        at = middles.bisect_right((bin_.free, ENDLESS)) - 1
        if len(bin_.bigs) == 1 and at >= 0:
            item = self.book.by_order[middles[at][1]]
            giver = item.bin
            assert giver is not None
            category = giver.category
            self._move_to(bin_, [item])
            if giver.num_requests:
                self._fulfil(giver, category)

    def _fulfil(self, bin_: Bin, category: SizeClass) -> None:
        giver = self._latest(category, bin_)
        if giver is not None and bin_ in self.book.bins.values():
            item = next(item for item in giver.bigs if item.size_class is category)
            fillers = list(bin_.fillers.values())
            self._move_to(bin_, [item])
            self._allocate_again([filler for filler in fillers if filler.bin is bin_])

    def _allocate_again(self, items: Sequence[Item]) -> None:
        for item in items:
            assert item.bin is not None
            home = self.book.take(item)
            if not self._place([item], home):
                self.book.put(item, self.book.bin_of(home.device))

    # Update

    def _update(self, item: Item, resize: Resize) -> None:
        before = item.size_class
        bin_ = item.bin
        assert bin_ is not None
        self.book.resize([(item, resize)])
        if item.request_id in bin_.fillers:
            # A request that has changed is looked at last.
            bin_.fillers[item.request_id] = bin_.fillers.pop(item.request_id)
        others = [other for other in (*bin_.bigs, *bin_.fillers.values()) if other is not item]
        if item.size_class is SizeClass.L and (before >= SizeClass.M):
            if any(other.size_class is SizeClass.L for other in others):
                self._again(item)
            elif bin_.free < 0:
                self._allocate_again(others)
        elif item.size_class > max(before, SizeClass.T):
            self._again(item)

    def _again(self, item: Item) -> None:
        home = item.bin
        assert home is not None
        self._depart(item)
        if not self._allocate(item):
            self.book.put(item, self.book.bin_of(home.device))
