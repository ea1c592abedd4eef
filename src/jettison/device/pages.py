"""Physical pages and the addresses over them: the interface of back ends under ``device.memory``.

A **pool** has a budget in pages and reserves **arenas**: spans of addresses that never change. A position of an arena
owns a page of the pool or nothing. Back ends implement these calls in different ways (``device.pages_host``: a memory
file; ``device.cuda.pages``: handles of the driver, with mappings that are kept).

Rules of every back end, tested by ``tests/device/test_pages_contract.py``:

- A position has at most one page, and a page is *owned* by at most one position. The caller takes a page from its owner
  (``unmap``) before another gets it.
- A page keeps its bytes until it is written or discarded, through whatever addresses it is owned.
- Addresses and tensors of an arena hold from ``reserve`` to ``PagePool.close``. Only owned positions may be touched.
- No kernel may touch an arena while ``map`` or ``unmap`` is called on it: ``DeviceMemory.apply`` calls ``wait_idle``
  first. ``prepare`` may be called beside running kernels.
- One thread, one call at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
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
        """Address of the first byte."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages of the span, backed or not."""
        ...

    def tensor(self) -> torch.Tensor:
        """uint8 ``[num_pages * page_bytes]`` over the span; only owned positions may be touched."""
        ...

    def map(self, position: int, page: int, num_pages: int) -> None:
        """Let a run of positions own a run of pages, whatever they owned before. No other position may own the
        pages."""
        ...

    def unmap(self, position: int, num_pages: int) -> None:
        """Let a run of positions own nothing; positions that own nothing already do not change."""
        ...

    def prepare(self, position: int, page: int, num_pages: int) -> int:
        """Make a later ``map`` of the same run cheap, while other positions own its pages. Positions that own a page
        themselves are left out.

        Returns the number of pages mapped; 0 where nothing is left to do, or where preparing has no gain.
        """
        ...

    def mapped(self, position: int, num_pages: int) -> list[tuple[int, int, int]]:
        """``(position, page, num_pages)`` of each run of pages that a ``map`` at these positions would find there
        already, owned or not."""
        ...

    def copy(self, page: int, offset: int, at: int, num_bytes: int) -> None:
        """Copy bytes of the pool, from ``offset`` of ``page`` on, to byte ``at`` of the span. The source page need not
        be owned.

        Source and target do not overlap. The copy is over when ``PagePool.finish_copies`` returns.
        """
        ...

    def hold(self, page: int, offset: int, at: int, num_bytes: int) -> None:
        """Like ``copy``, but the source is read now and the target written by ``PagePool.finish_copies``."""
        ...


class PagePool(Protocol):
    """``budget_bytes`` of physical memory in pages of ``page_bytes``. A rest smaller than a page is not used.

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
    def prepares(self) -> bool:
        """Whether ``Arena.prepare`` has a gain: a page may be mapped at several places, and mapping it costs a call."""
        ...

    @property
    def num_calls(self) -> int:
        """Number of calls of the system or the driver so far that mapped, unmapped or gave access."""
        ...

    @property
    def num_calls_saved(self) -> int:
        """Number of pages so far that were mapped or unmapped without a call, because the mapping was there or could
        stay."""
        ...

    @property
    def held_bytes(self) -> int:
        """Physical memory behind pages of the pool, now."""
        ...

    def start(self) -> None:
        """Acquire the memory of pages. Raises MappingError, in one line, and holds nothing then."""
        ...

    def close(self) -> None:
        """Release all addresses and all memory. Tensors over arenas must not be touched afterwards."""
        ...

    def reserve(self, num_pages: int) -> Arena:
        """Reserve a span of addresses for ``num_pages`` pages (at least one), without memory. Raises MappingError."""
        ...

    def discard(self, page: int, num_pages: int) -> None:
        """Return the memory of a run of unowned pages to the system. Their bytes are lost, and undefined when the pages
        are mapped again. Raises MappingError."""
        ...

    def read(self, page: int, offset: int, view: memoryview) -> None:
        """Fill ``view``, memory of the host, with bytes of the pool from ``offset`` of ``page`` on, owned or not.

        Raises OutOfPagesError beyond the pool; MappingError, with part of ``view`` written, where memory is missing.
        """
        ...

    def finish_copies(self) -> None:
        """Write the held copies of arenas, and wait for all copies. Raises MappingError."""
        ...

    def wait_idle(self) -> None:
        """Wait until all work launched on the device before has ended. Raises MappingError where the device reports a
        failure."""
        ...

    def check(self) -> None:
        """Raise AssertionError on any broken invariant of mappings and owners."""
        ...
