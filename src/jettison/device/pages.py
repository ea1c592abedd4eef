"""Physical pages and the addresses over them, as every back end offers them: the seam under ``device.memory``.

A **pool** has a budget in pages and reserves **arenas**: spans of addresses that never change. A position of an arena
owns a page of the pool or nothing. What a back end does behind these calls is its own affair
(``device.pages_host``: a memory file; ``device.cuda.pages``: handles of the driver, with mappings that are kept).

Rules that hold on every back end, and that ``tests/device/test_pages_contract.py`` holds each of them to:

- A position has at most one page, and a page is *owned* by at most one position. The caller takes a page from its owner
  (``unmap``) before another gets it.
- A page keeps its bytes until it is written or discarded, through whatever addresses it is owned.
- Addresses and tensors of an arena hold from ``reserve`` to ``PagePool.close``. Only what is owned may be touched.
- Nothing that runs on the device may touch an arena while ``map`` or ``unmap`` is called on it: ``DeviceMemory.apply``
  calls ``wait_idle`` first. ``prepare`` may be called beside running kernels.
- One thread, one call at a time.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Arena(Protocol):
    """A reserved span of addresses, made by ``PagePool.reserve``.

    ``position``, ``page`` and ``num_pages`` of all calls count pages; ``offset``, ``at`` and ``num_bytes`` bytes.
    Calls raise ValueError for positions outside the span, OutOfPagesError for pages beyond the budget, and MappingError
    where the system or the driver refuses. After a MappingError the positions concerned are undefined: map or unmap
    them again before anything else.
    """

    @property
    def address(self) -> int:
        """Of the first byte."""
        ...

    @property
    def num_pages(self) -> int:
        """Of the span, backed or not."""
        ...

    def tensor(self) -> torch.Tensor:
        """uint8 ``[num_pages * page_bytes]`` over the span; only what is owned may be touched."""
        ...

    def map(self, position: int, page: int, num_pages: int) -> None:
        """Let a run of positions own a run of pages, whatever they owned before. No other position owns the pages."""
        ...

    def unmap(self, position: int, num_pages: int) -> None:
        """Let a run of positions own nothing; where they own nothing already nothing changes."""
        ...

    def prepare(self, position: int, page: int, num_pages: int) -> int:
        """Make a later ``map`` of the same run cheap, while other positions own its pages. Positions that own a page
        themselves are left out.

        Returns the pages that this has mapped; 0 where nothing is left to do, or where preparing gains nothing.
        """
        ...

    def copy(self, page: int, offset: int, at: int, num_bytes: int) -> None:
        """Copy bytes of the pool, from ``offset`` of ``page`` on, to byte ``at`` of the span. Nothing need own the
        source.

        Source and target do not overlap. The copy is over when ``PagePool.finish_copies`` returns.
        """
        ...

    def hold(self, page: int, offset: int, at: int, num_bytes: int) -> None:
        """Like ``copy``, but the source is read now and the target written by ``PagePool.finish_copies``."""
        ...


class PagePool(Protocol):
    """``budget_bytes`` of physical memory in pages of ``page_bytes``. What is left below one page is never used.

    ``start`` and ``close`` are idempotent; ``close`` also ends every arena.
    """

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        ...

    @property
    def num_pages(self) -> int:
        """Whole pages in the budget."""
        ...

    @property
    def num_calls(self) -> int:
        """Calls of the system or the driver, so far, that mapped, unmapped or gave access."""
        ...

    @property
    def num_calls_saved(self) -> int:
        """Pages, so far, that were mapped or unmapped without any call, since the mapping was there or may stay."""
        ...

    @property
    def held_bytes(self) -> int:
        """Physical memory behind pages of the pool, now."""
        ...

    def start(self) -> None:
        """Acquire what pages are made of. Raises MappingError, in one line, and holds nothing then."""
        ...

    def close(self) -> None:
        """Give back all addresses and all memory. Tensors over arenas must not be touched afterwards."""
        ...

    def reserve(self, num_pages: int) -> Arena:
        """A span of addresses for that many pages (at least one), with nothing behind it. Raises MappingError."""
        ...

    def discard(self, page: int, num_pages: int) -> None:
        """Give the memory of a run of pages that no position owns back. Their bytes are lost; what they hold when they
        are mapped again is undefined. Raises MappingError."""
        ...

    def read(self, page: int, offset: int, view: memoryview) -> None:
        """Fill ``view``, memory of the host, with bytes of the pool from ``offset`` of ``page`` on, owned or not.

        Raises OutOfPagesError beyond the pool; MappingError, with part of ``view`` written, where memory is missing.
        """
        ...

    def finish_copies(self) -> None:
        """Write what arenas hold, and wait for all copies. Raises MappingError."""
        ...

    def wait_idle(self) -> None:
        """Wait until nothing that was launched on the device before is running. Raises MappingError where the device
        reports that something has failed."""
        ...

    def check(self) -> None:
        """Raise AssertionError on any broken invariant of what is mapped and owned."""
        ...
