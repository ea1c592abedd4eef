"""The physical pages of one card: a handle for each, and a view in which all pages with memory can be read.

It knows pages and their memory; ``device.cuda.pages`` knows the addresses that they serve.
"""

from __future__ import annotations

from contextlib import suppress

from jettison.device.cuda.driver import CardFullError, Driver
from jettison.device.cuda.spans import NONE, Span, numbers, runs
from jettison.errors import BudgetError, ConfigError, MappingError, OutOfPagesError


class PageHandles:
    """``num_pages`` pages of ``page_bytes``; all have memory from ``start`` until ``release``."""

    def __init__(self, driver: Driver, num_pages: int, page_bytes: int) -> None:
        self._driver = driver
        self._num_pages = num_pages
        self._page_bytes = page_bytes
        self.view: Span | None = None
        """A span with page p at position p for as long as that has memory."""
        self._handles: list[int | None] = [None] * num_pages

    def start(self) -> None:
        """Allocate all memory. Raises ConfigError, BudgetError where the card has too little, MappingError."""
        driver, size = self._driver, self._page_bytes
        if size % driver.granularity:
            raise ConfigError(f"pages of {size} bytes: on {driver.device} they are multiples of {driver.granularity}")
        self.view = Span(driver, max(self._num_pages, 1), size)
        try:
            self.fill(0, self._num_pages)
        except CardFullError as error:
            raise BudgetError(self._too_little()) from error

    def close(self) -> None:
        """Release all memory, and the view. Calls that the driver refuses are left to the end of the process."""
        if self.view is not None:
            with suppress(MappingError):
                self.release(0, self._num_pages)
            self.view.close()
        self.view = None
        self._handles = [None] * self._num_pages

    def _too_little(self) -> str:
        free, total = self._driver.memory()
        wanted = self._num_pages * self._page_bytes
        if wanted > total:
            return f"a memory budget of {wanted} bytes: {self._driver.device} has {total}"
        return (
            f"a memory budget of {wanted} bytes: of {total} on {self._driver.device}, {free} are free; "
            f"other processes, or other allocations of this one, hold the rest"
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of all pages with a handle."""
        return (self._num_pages - self._handles.count(None)) * self._page_bytes

    def check_pages(self, page: int, num_pages: int) -> None:
        """Raise OutOfPagesError for pages that are not in the budget."""
        if page < 0 or page + num_pages > self._num_pages:
            raise OutOfPagesError(f"pages {page} to {page + num_pages} of {self._num_pages}")

    def address_of(self, page: int, offset: int, num_bytes: int) -> int:
        """Address in the view at which bytes of a page can be read, whichever position owns it. Raises OutOfPagesError,
        and MappingError where the page has no memory."""
        size = self._page_bytes
        start = page * size + offset
        if page < 0 or offset < 0 or start + num_bytes > self._num_pages * size:
            raise OutOfPagesError(f"{num_bytes} bytes at {start} are beyond the pool")
        if self.view is None or (self.view.there[start // size : -(-(start + num_bytes) // size)] < 0).any():
            raise MappingError(f"{num_bytes} bytes at {start} of the pool hold no memory")
        return self.view.address + start

    def of(self, page: int, num_pages: int) -> list[int]:
        """Handles of a run of pages, after giving memory to the ones without. Raises CardFullError, MappingError."""
        self.fill(page, num_pages)
        return [handle for handle in self._handles[page : page + num_pages] if handle is not None]

    def fill(self, page: int, num_pages: int) -> None:
        """Give memory to the pages of a run that have none. Raises CardFullError and MappingError; the consecutive
        pages concerned then have no memory."""
        assert self.view is not None, "the pool is not started"
        for lo, count in runs(self.view.there[page : page + num_pages] != numbers(page, num_pages)):
            first, after = page + lo, page + lo + count
            try:
                for number in range(first, after):
                    if self._handles[number] is None:
                        self._handles[number] = self._driver.create(self._page_bytes)
                self.view.put(first, first, [handle for handle in self._handles[first:after] if handle is not None])
            except MappingError:
                with suppress(MappingError):
                    self.release(first, count)
                raise

    def release(self, page: int, num_pages: int) -> None:
        """Release the memory of a run of pages, which must be mapped nowhere else.

        Raises MappingError; the pages released until then stay released.
        """
        assert self.view is not None, "the pool is not started"
        self.view.clear(page, num_pages)
        for number in range(page, page + num_pages):
            handle = self._handles[number]
            if handle is not None:
                self._driver.release(handle)
                self._handles[number] = None

    def check(self) -> None:
        """Raise AssertionError where the view has a page at another's position, or a page without a handle."""
        assert self.view is not None, "the pool is not started"
        for number in range(self._num_pages):
            assert self.view.there[number] in (number, NONE) or self.view.there[number] < 0, "the view is in disorder"
            assert self.view.there[number] < 0 or self._handles[number] is not None, "a page in view has no handle"
