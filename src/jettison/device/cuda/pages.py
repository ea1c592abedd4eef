"""A card's physical pages: one handle for each page, and mappings that stay until their addresses are needed.

    PagePool.start    cuMemCreate for each page      the budget; each page is mapped for good in the pool's own view
    PagePool.reserve  cuMemAddressReserve            addresses, no memory
    Arena.map         nothing, where the page is there already; else cuMemMap and cuMemSetAccess
    Arena.unmap       nothing
    Arena.prepare     what ``map`` would call, ahead of need and beside running kernels
    PagePool.discard  cuMemUnmap at every address, cuMemRelease: the card has the memory back

A page costs tens of microseconds to map, whatever its size, and may be mapped at many addresses at no cost of memory or
speed (``docs/gpu.md``). So there are two books: ``there`` (the driver's mapping at a position) and ``owned``
(the caller's page at a position). ``map`` and ``unmap`` change the second, and call the driver only where the first has
another page. A prepared change of layout makes no calls, nor does a return to an earlier layout.

Invariants, which ``check`` tests: a position has at most one page in each book; where it owns a page, that page is
there; a page is owned by one position at most, though it may be there at several; a page that is there has a handle. A
mapping is removed only at positions that own nothing. Kernels in flight read owned positions only, and none is in
flight while ownership changes (``DeviceMemory.apply`` waits for the card first), so no kernel can read a removed
mapping.

The price: an access to an address that owns nothing does not end the process. Tests run the same code over a driver
that poisons such addresses.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import numpy as np
import torch

from jettison.device.cuda.driver import Driver
from jettison.device.cuda.handles import PageHandles
from jettison.device.cuda.spans import NONE, UNSURE, Numbers, Span, numbers, runs
from jettison.device.cuda.tensors import span_tensor
from jettison.errors import BudgetError, ConfigError, MappingError


class PagePool:
    """A ``device.pages.PagePool`` on one card. ``page_bytes`` must be a multiple of the driver's granularity.

    Each page has its own handle, because the driver cannot map a part of a handle.
    """

    prepares = True
    """Mappings that nothing owns stay, and cost nothing."""

    def __init__(self, budget_bytes: int, page_bytes: int, driver: Driver | None = None) -> None:
        if page_bytes < 1:
            raise ValueError(f"pages of {page_bytes} bytes")
        self.page_bytes = page_bytes
        self.num_pages = budget_bytes // page_bytes
        self.num_calls_saved = 0
        self._driver = Driver() if driver is None else driver
        self._handles = PageHandles(self._driver, self.num_pages, page_bytes)
        self._owner: Numbers = np.full(self.num_pages, NONE, dtype=np.int32)
        """By page: the arena that owns it."""
        self._arenas: list[Arena] = []
        self._held: list[tuple[int, bytearray]] = []

    def start(self) -> None:
        """Allocate all memory. Raises ConfigError (no card, an invalid page size), BudgetError where the card has too
        little, and MappingError; nothing is held then."""
        if self._handles.view is not None:
            return
        self._driver.start()
        try:
            self._handles.start()
        except (ConfigError, BudgetError, MappingError):
            self.close()
            raise

    def close(self) -> None:
        """Release all addresses and all memory. Calls that the driver refuses are left to the end of the process."""
        self._held.clear()
        if self._handles.view is not None:
            with suppress(MappingError):  # there is no wait for a failed card
                self._driver.wait()
        while self._arenas:
            self._arenas.pop().span.close()
        self._owner.fill(NONE)
        self._handles.close()
        self._driver.close()

    def reserve(self, num_pages: int) -> Arena:
        """Reserve a span of addresses without memory."""
        assert self._handles.view is not None, "the pool is not started"
        span = Span(self._driver, max(num_pages, 1), self.page_bytes)
        arena = Arena(self, len(self._arenas), span)
        self._arenas.append(arena)
        return arena

    @property
    def num_calls(self) -> int:
        """Number of the driver's map, access and unmap calls."""
        return self._driver.num_calls

    @property
    def held_bytes(self) -> int:
        """Bytes of all pages with a handle."""
        return self._handles.held_bytes

    def discard(self, page: int, num_pages: int) -> None:
        """Unmap pages everywhere and release them, which returns their memory to the card.

        Raises ValueError for an owned page, and MappingError; the pages released until then stay released.
        """
        self._handles.check_pages(page, num_pages)
        if (self._owner[page : page + num_pages] != NONE).any():
            raise ValueError(f"one of the pages {page} to {page + num_pages} is owned")
        for arena in self._arenas:
            there = arena.span.there
            for lo, count in runs((there >= page) & (there < page + num_pages) | (there == UNSURE)):
                arena.span.clear(lo, count)
        self._handles.release(page, num_pages)

    def read(self, page: int, offset: int, view: memoryview) -> None:
        """Read bytes of a page through the pool's own view."""
        self._driver.read(view, self._handles.address_of(page, offset, len(view)))

    def finish_copies(self) -> None:
        """Write the copies that arenas hold, and wait for the card."""
        for address, old in self._held:
            self._driver.write(address, memoryview(old))
        self._held.clear()
        self._driver.wait()

    def wait_idle(self) -> None:
        """Wait until no kernel and no copy of this process is under way on the card."""
        self._driver.wait()

    def check(self) -> None:
        """Raise AssertionError on any broken invariant of the two books."""
        self._handles.check()
        view, num_owned = self._handles.view, 0
        assert view is not None
        for arena in self._arenas:
            at = np.flatnonzero(arena.owned != NONE)
            pages = arena.owned[at]
            num_owned += len(at)
            there = arena.span.there
            assert (there[at] == pages).all(), "a position owns a page that is not there"
            assert (self._owner[pages] == arena.number).all(), "a page is owned twice"
            assert len(np.unique(pages)) == len(pages), "a page is owned twice"
            assert (view.there[there[there >= 0]] >= 0).all(), "a page without memory is mapped"
        assert num_owned == (self._owner != NONE).sum(), "a page is owned by no position"


class Arena:
    """A ``device.pages.Arena`` on one card, made by ``PagePool.reserve``."""

    def __init__(self, pool: PagePool, number: int, span: Span) -> None:
        self.address = span.address
        self.num_pages = span.num_pages
        self.number = number
        """Number of this arena in the pool."""
        self.span = span
        self.owned: Numbers = np.full(span.num_pages, NONE, dtype=np.int32)
        """By position: the owned page, or NONE."""
        self._pool = pool
        self._handles = pool._handles
        self._tensor = span_tensor(span.address, span.num_pages * pool.page_bytes, pool._driver.device)

    def tensor(self) -> torch.Tensor:
        """uint8 over the span. An access to a position that owns nothing is an error that may go unnoticed."""
        return self._tensor

    def map(self, position: int, page: int, num_pages: int) -> None:
        """Own pages at positions. Calls the driver only for positions where another page is there, or none.

        Raises ValueError for pages owned by other positions.
        """
        self._check_positions(position, num_pages)
        self._handles.check_pages(page, num_pages)
        pool, at, pages = self._pool, slice(position, position + num_pages), slice(page, page + num_pages)
        run, is_owned = numbers(page, num_pages), pool._owner[pages] != NONE
        if np.count_nonzero(is_owned) and (is_owned & (self.owned[at] != run)).any():
            raise ValueError(f"another position owns one of the pages {page} to {page + num_pages}")
        self._disown(at)
        pool.num_calls_saved += num_pages - self._put(position, run)
        self.owned[at] = run
        pool._owner[pages] = self.number

    def unmap(self, position: int, num_pages: int) -> None:
        """Disown positions. The mapping stays until its position or its page is needed, so no call is made."""
        self._check_positions(position, num_pages)
        self._pool.num_calls_saved += self._disown(slice(position, position + num_pages))

    def prepare(self, position: int, page: int, num_pages: int) -> int:
        """Map pages that are not there yet, at positions that own nothing; ownership does not change."""
        self._check_positions(position, num_pages)
        self._handles.check_pages(page, num_pages)
        is_free = self.owned[position : position + num_pages] == NONE
        return sum(self._put(position + lo, numbers(page + lo, count)) for lo, count in runs(is_free))

    def mapped(self, position: int, num_pages: int) -> list[tuple[int, int, int]]:
        """See ``device.pages``."""
        self._check_positions(position, num_pages)
        there = self.span.there[position : position + num_pages]
        ends = (there[1:] - there[:-1] != 1).nonzero()[0].tolist()
        edges = [0, *[end + 1 for end in ends], num_pages]
        return [(position + lo, there.item(lo), hi - lo) for lo, hi in pairwise(edges) if there[lo] >= 0]

    def copy(self, page: int, offset: int, at: int, num_bytes: int) -> None:
        """Copy on the card, from the pool's own view."""
        source = self._handles.address_of(page, offset, num_bytes)
        self._pool._driver.copy(self._target(at, num_bytes), source, num_bytes)

    def hold(self, page: int, offset: int, at: int, num_bytes: int) -> None:
        """Hold a copy in the host's memory, as no memory of the card is outside the budget."""
        target, old = self._target(at, num_bytes), bytearray(num_bytes)
        self._pool.read(page, offset, memoryview(old))
        self._pool._held.append((target, old))

    def _check_positions(self, position: int, num_pages: int) -> None:
        if position < 0 or num_pages < 1 or position + num_pages > self.num_pages:
            raise ValueError(f"positions {position} to {position + num_pages} of a span of {self.num_pages} pages")

    def _target(self, at: int, num_bytes: int) -> int:
        """The address of bytes that may be written. Raises MappingError."""
        size = self._pool.page_bytes
        lo, hi = at // size, -(-(at + num_bytes) // size)
        if at < 0 or hi > self.num_pages or (self.owned[lo:hi] == NONE).any():
            raise MappingError(f"{num_bytes} bytes at {at} of a span: not all of its positions own a page")
        return self.address + at

    def _disown(self, at: slice) -> int:
        """Let positions own nothing; returns how many owned a page."""
        pages = self.owned[at]
        pages = pages[pages != NONE]
        if len(pages):
            self._pool._owner.put(pages, NONE)
            self.owned[at] = NONE
        return len(pages)

    def _put(self, position: int, run: Numbers) -> int:
        """Have the driver map a run of pages at positions that own nothing, where it has not yet; returns how many it
        mapped."""
        num_new = 0
        for lo, count in runs(self.span.there[position : position + len(run)] != run):
            page = run.item(lo)
            self.span.put(position + lo, page, self._handles.of(page, count))
            num_new += count
        return num_new
