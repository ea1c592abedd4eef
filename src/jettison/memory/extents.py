"""Runs of physical pages and where they lie in a span: the interval arithmetic under ``memory.pages``.

Pure functions over sorted, disjoint intervals. Pages are counted in runs and never one by one, so a plan costs what the
fragmentation costs and not what the memory costs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Physical pages ``page <= p < page + num_pages``."""

    page: int
    num_pages: int


class Extent(NamedTuple):
    """Positions from ``position`` on of a span, backed by as many physical pages from ``page`` on."""

    position: int
    page: int
    num_pages: int


Extents = tuple[Extent, ...]
"""Ascending positions, disjoint, neighbours merged where positions and pages both go on. Gaps are unmapped."""


def count_pages(extents: Iterable[Extent]) -> int:
    """Pages mapped in all."""
    return sum([count for _, _, count in extents])


def coalesce(extents: Iterable[Extent]) -> Extents:
    """Sort by position and merge neighbours."""
    merged: list[Extent] = []
    for extent in sorted(extents):
        if not extent.num_pages:
            continue
        if merged:
            last = merged[-1]
            if last.position + last.num_pages == extent.position and last.page + last.num_pages == extent.page:
                merged[-1] = Extent(last.position, last.page, last.num_pages + extent.num_pages)
                continue
        merged.append(extent)
    return tuple(merged)


def clip(extents: Extents, lo: int, hi: int) -> Extents:
    """The parts at positions ``lo <= p < hi``."""
    if extents and lo <= extents[0].position and extents[-1].position + extents[-1].num_pages <= hi:
        return extents
    clipped = []
    for position, page, count in extents:
        start, end = max(position, lo), min(position + count, hi)
        if start < end:
            clipped.append(Extent(start, page + start - position, end - start))
    return tuple(clipped)


def gaps(extents: Extents, length: int) -> Iterator[tuple[int, int]]:
    """``(position, count)`` of each unmapped stretch below position ``length``, ascending."""
    position = 0
    for extent in extents:
        if extent.position > position:
            yield position, extent.position - position
        position = extent.position + extent.num_pages
    if position < length:
        yield position, length - position


def minus(extents: Extents, other: Extents) -> Extents:
    """The parts of ``extents`` that ``other`` does not map to the very same pages."""
    if not other:
        return extents
    if extents == other:
        return ()
    left: list[Extent] = []
    index = 0
    for position, page, count in extents:
        end = position + count
        while index < len(other) and other[index].position + other[index].num_pages <= position:
            index += 1
        at = index
        while at < len(other) and other[at].position < end:
            same = other[at]
            if same.page - same.position == page - position:
                if same.position > position:
                    left.append(Extent(position, page, same.position - position))
                skip = min(same.position + same.num_pages, end) - position
                position, page = position + skip, page + skip
            at += 1
        if position < end:
            left.append(Extent(position, page, end - position))
    return tuple(left)


def place(runs: Iterable[Run], holes: Iterable[tuple[int, int]]) -> list[Extent]:
    """Put runs into holes ``(position, count)`` in order, splitting where one ends; stops when the runs are used up."""
    placed: list[Extent] = []
    spaces = iter(holes)
    position, room = 0, 0
    for page, count in runs:
        while count:
            if not room:
                position, room = next(spaces)
            n = min(count, room)
            placed.append(Extent(position, page, n))
            position, room, page, count = position + n, room - n, page + n, count - n
    return placed


class RunSet:
    """A set of physical pages, kept as sorted disjoint runs."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for page, count in runs:
            self.add(page, count)

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def runs(self) -> list[Run]:
        """Maximal runs, ascending."""
        return [Run(start, end - start) for start, end in zip(self._starts, self._ends)]

    def add(self, page: int, count: int) -> None:
        """Add pages; AssertionError if one is in the set already."""
        if not count:
            return
        end = page + count
        at = bisect_right(self._starts, page)
        assert at == 0 or self._ends[at - 1] <= page, f"page {page} twice"
        assert at == len(self._starts) or end <= self._starts[at], f"page {self._starts[at]} twice"
        if at < len(self._starts) and self._starts[at] == end:
            end = self._ends.pop(at)
            self._starts.pop(at)
        if at and self._ends[at - 1] == page:
            self._ends[at - 1] = end
        else:
            self._starts.insert(at, page)
            self._ends.insert(at, end)

    def add_extents(self, extents: Iterable[Extent]) -> None:
        """Add the pages that extents map."""
        for _, page, count in extents:
            self.add(page, count)

    def overlap(self, page: int, count: int) -> list[Run]:
        """The pages ``page <= p < page + count`` that are in the set."""
        first, after = self._near(page, count)
        if first == after:
            return []
        starts, ends = self._starts[first:after], self._ends[first:after]
        starts[0], ends[-1] = max(starts[0], page), min(ends[-1], page + count)
        return [Run(start, stop - start) for start, stop in zip(starts, ends)]

    def meets(self, extents: Extents) -> bool:
        """Whether any page of ``extents`` is in the set."""
        return any(self.overlap(page, count) for _, page, count in extents)

    def _near(self, page: int, count: int) -> tuple[int, int]:
        """The first run with any of these pages, and the first one after it without."""
        if not count:
            return 0, 0
        return bisect_right(self._ends, page), bisect_left(self._starts, page + count)

    def take(self, page: int, count: int) -> list[Run]:
        """Remove the pages ``page <= p < page + count`` that are in the set, and return them."""
        first, after = self._near(page, count)
        if first == after:
            return []
        starts, ends, end = self._starts[first:after], self._ends[first:after], page + count
        left: list[tuple[int, int]] = []
        if starts[0] < page:
            left.append((starts[0], page))
            starts[0] = page
        if end < ends[-1]:
            left.append((end, ends[-1]))
            ends[-1] = end
        self._starts[first:after] = [start for start, _ in left]
        self._ends[first:after] = [stop for _, stop in left]
        return [Run(start, stop - start) for start, stop in zip(starts, ends)]

    def take_extents(self, extents: Extents) -> Extents:
        """Remove the pages of ``extents`` that are in the set, and return them at their positions."""
        taken: list[Extent] = []
        for position, page, count in extents:
            for start, num_taken in self.take(page, count):
                taken.append(Extent(position + start - page, start, num_taken))
        return tuple(taken)

    def take_fewest(self, count: int) -> list[Run]:
        """Remove up to ``count`` pages in few runs: the smallest run that suffices, else the largest ones."""
        taken: list[Run] = []
        while count and self._starts:
            runs = self.runs()
            enough = [run for run in runs if run.num_pages >= count]
            best = min(enough, key=lambda r: r.num_pages) if enough else max(runs, key=lambda r: r.num_pages)
            run = self.take(best.page, min(best.num_pages, count))[0]
            taken.append(run)
            count -= run.num_pages
        return taken


def deal(chunks: Sequence[Run], quotas: dict[int, int]) -> dict[int, list[Run]]:
    """Share chunks out so that each receiver gets at most its quota, in few pieces.

    Largest first; a chunk goes whole to the receiver that it fills exactly, else to the one with most room, and is
    split only where no hole has room for all of it. Chunks beyond the quotas stay undealt.
    """
    room = {receiver: quota for receiver, quota in quotas.items() if quota}
    dealt: dict[int, list[Run]] = {receiver: [] for receiver in quotas}
    for page, count in sorted(chunks, key=lambda run: (-run.num_pages, run.page)):
        while count and room:
            exact = next((r for r, left in room.items() if left == count), None)
            receiver = exact if exact is not None else max(room, key=lambda r: room[r])
            n = min(count, room[receiver])
            dealt[receiver].append(Run(page, n))
            page, count = page + n, count - n
            room[receiver] -= n
            if not room[receiver]:
                del room[receiver]
    return dealt


def level(needs: dict[int, int], total: int) -> dict[int, int]:
    """Share ``total`` out as evenly as the needs allow."""
    shares: dict[int, int] = {}
    for served, receiver in enumerate(sorted(needs, key=lambda r: (needs[r], r))):
        shares[receiver] = min(needs[receiver], total // (len(needs) - served))
        total -= shares[receiver]
    return {receiver: shares[receiver] for receiver in needs}
