"""Reserved addresses, and the driver's mappings at them, in a book that stays correct after failed calls.

It knows handles and positions; ``device.cuda.pages`` knows which span owns a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from jettison.device.cuda.driver import Driver
from jettison.errors import MappingError

NONE = -1
"""No page."""
UNSURE = -2
"""A call has failed: a page may be mapped there, readable or not."""

Numbers = npt.NDArray[np.int32]


class Span:
    """``num_pages`` positions of ``page_bytes`` from ``address`` on, with nothing there. Raises MappingError."""

    def __init__(self, driver: Driver, num_pages: int, page_bytes: int) -> None:
        self.num_pages = num_pages
        self._driver = driver
        self._page_bytes = page_bytes
        self.address = driver.reserve(num_pages * page_bytes)
        self.there: Numbers = np.full(num_pages, NONE, dtype=np.int32)
        """By position: the page that is mapped and readable; NONE, or UNSURE."""

    def close(self) -> None:
        """Give the addresses back. What the driver refuses is left to the end of the process."""
        with suppress(MappingError):
            self.clear(0, self.num_pages)
        with suppress(MappingError):
            self._driver.free(self.address, self.num_pages * self._page_bytes)

    def put(self, position: int, page: int, handles: Sequence[int]) -> None:
        """Map pages from ``page`` on, with these handles, in place of the present mappings at a run of positions.

        Raises MappingError; then nothing is mapped there, or positions are UNSURE where unmapping failed, too.
        """
        size, count = self._page_bytes, len(handles)
        self.clear(position, count)
        try:
            for at, handle in enumerate(handles, position):
                self._driver.map(self.address + at * size, size, handle)
                self.there[at] = UNSURE  # mapped, not readable yet
            self._driver.allow(self.address + position * size, count * size)
        except MappingError:
            with suppress(MappingError):
                self.clear(position, count)
            raise
        self.there[position : position + count] = numbers(page, count)

    def clear(self, position: int, num_pages: int) -> None:
        """Unmap a run of positions. Raises MappingError."""
        size = self._page_bytes
        for lo, count in runs(self.there[position : position + num_pages] != NONE):
            at = slice(position + lo, position + lo + count)
            self.there[at] = UNSURE
            self._driver.unmap(self.address + at.start * size, count * size)
            self.there[at] = NONE


def numbers(first: int, count: int) -> Numbers:
    """``first, first + 1, ...``"""
    return np.arange(first, first + count, dtype=np.int32)


def runs(mask: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """``(first, count)`` of each run of True in the mask as it is now, ascending."""
    if not np.count_nonzero(mask):  # nothing to do, mostly
        return iter(())
    edges = (np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()
    edges = [0] * bool(mask[0]) + edges + [len(mask)] * bool(mask[-1])
    return ((lo, hi - lo) for lo, hi in zip(edges[::2], edges[1::2]))
