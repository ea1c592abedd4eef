"""Carrying out a page plan over mapped address ranges: remapping that can be undone, and copies of blocks.

Knows arenas and pages, not the layers or shards that they serve. ``memory.pages`` makes the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from jettison.device.pages import Arena, PagePool
from jettison.errors import MappingError, WorkerLostError
from jettison.memory.extents import Extents, clip
from jettison.memory.pagemap import Owner, PageMap
from jettison.memory.pages import PageMapping, PagePlan, PageRange

BlockCopy = tuple[int, int]
"""``(from, to)`` block ids."""


def remap(arenas: Mapping[Owner, Arena], page_map: PageMap, plan: PagePlan) -> None:
    """Carry out all unmaps, then all maps. ``page_map`` is the state before, and is not changed.

    Raises MappingError after every call, the failed one included, has been undone in reverse; WorkerLostError if that
    fails too, with the mappings in an unknown state.
    """
    unmapped: list[PageRange] = []
    mapped: list[PageMapping] = []
    try:
        for gone in plan.unmaps:
            unmapped.append(gone)
            arenas[gone.owner].unmap(gone.position, gone.num_pages)
        for new in plan.maps:
            mapped.append(new)
            arenas[new.owner].map(new.position, new.page, new.num_pages)
    except MappingError:
        try:
            for new in reversed(mapped):
                arenas[new.owner].unmap(new.position, new.num_pages)
            for gone in reversed(unmapped):
                _map_again(arenas, page_map, gone)
        except MappingError as error:
            raise WorkerLostError(f"a failed remapping could not be undone: {error}") from error
        raise


def _map_again(arenas: Mapping[Owner, Arena], page_map: PageMap, gone: PageRange) -> None:
    for extent in clip(page_map.of(gone.owner), gone.position, gone.position + gone.num_pages):
        arenas[gone.owner].map(*extent)


class BlockCopier:
    """Copies blocks of the old layout to their places in the new layout, after the remapping.

    An unmapped page keeps its bytes until its new owner writes, so the old bytes are read from the page itself. So
    copying can come last, when no failure can require a rollback any more.
    """

    def __init__(self, pool: PagePool, block_bytes: int, copies: Sequence[BlockCopy]) -> None:
        self._pool = pool
        self._block_bytes = block_bytes
        self._runs = list(_neighbours(copies))

    def copy(self, before: Extents, arena: Arena, *, was_whole: bool) -> None:
        """Copy the blocks of one layer. ``before``: its extents in the old layout; blocks that it did not have are
        skipped.

        An arena that was whole is written at once: the pages below the line of evacuation have stayed in place, so no
        other layer's old bytes can be there. An arena with holes has got pages from other owners: its bytes are read
        now and written by ``finish``. Raises WorkerLostError where a page has no memory.
        """
        size, put = self._block_bytes, arena.copy if was_whole else arena.hold
        try:
            for src, dst, count in self._runs:
                for page, offset, start, end in self._pieces(before, src * size, (src + count) * size):
                    put(page, offset, start + (dst - src) * size, end - start)
        except MappingError as error:
            raise _copies_failed(error) from error

    def finish(self) -> None:
        """Write the bytes that were only read so far, and finish all copies. Raises WorkerLostError."""
        try:
            self._pool.finish_copies()
        except MappingError as error:
            raise _copies_failed(error) from error

    def _pieces(self, before: Extents, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """``(page, offset in the page, start, end)`` of bytes ``start`` to ``end`` of an arena, where mapped."""
        page_bytes = self._pool.page_bytes
        for position, page, count in clip(before, start // page_bytes, -(-end // page_bytes)):
            lo, hi = max(start, position * page_bytes), min(end, (position + count) * page_bytes)
            yield page, lo - position * page_bytes, lo, hi


def _copies_failed(error: MappingError) -> WorkerLostError:
    return WorkerLostError(f"blocks could not be copied after remapping: {error}")


def _neighbours(copies: Sequence[BlockCopy]) -> Iterator[tuple[int, int, int]]:
    """``(from, to, count)`` of runs of adjacent blocks that stay adjacent."""
    ordered = sorted(copies)
    for _, group in groupby(enumerate(ordered), key=lambda item: (item[1][0] - item[0], item[1][1] - item[0])):
        members = [pair for _, pair in group]
        yield members[0][0], members[0][1], len(members)
