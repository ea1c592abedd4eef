"""Reserved addresses, and what the driver has mapped there: the book that survives calls that fail.

Knows handles and positions; which span owns a page is ``device.cuda.pages``'.
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
"""Something may be mapped there, readable or not: a call has failed."""

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
        """Map pages from ``page`` on, whose handles these are, in place of whatever is at a run of positions.

        Raises MappingError: nothing is mapped there then, or UNSURE says where not even that could be had.
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
        """Have nothing mapped at a run of positions. Raises MappingError."""
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
    """``(first, count)`` of each stretch of True as the mask is now, ascending."""
    if not mask.any():  # nothing to do, mostly
        return iter(())
    edges = (np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()
    edges = [0] * bool(mask[0]) + edges + [len(mask)] * bool(mask[-1])
    return ((lo, hi - lo) for lo, hi in zip(edges[::2], edges[1::2]))
