"""Copying rows of bytes between two places in host memory in pieces, on any thread, without holding the GIL.

The thread that changes mappings makes a copy and checks its addresses; it stops the copy before it changes any mapping.
A piece does not use torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jettison.device.kernels.library import load_copy_rows
from jettison.device.kernels.registry import KernelsUnavailableError

PIECE_BYTES = 256 << 10
"""Most bytes that a stop waits for: 0.1 ms at memory speed, and 2 ms where the copying thread gets a thirtieth of a
core. Whole blocks are usually smaller, and a piece never crosses a row."""

Addresses = npt.NDArray[np.int64]


class RowCopy:
    """A ``HostCopy`` of ``len(sources)`` rows of ``row_bytes`` from their addresses to those of ``targets``, from byte
    ``skip_bytes`` on.

    One thread runs it; another may stop it, and read its progress.
    """

    def __init__(
        self, sources: Addresses, targets: Addresses, row_bytes: int, *, skip_bytes: int = 0,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        assert len(sources) == len(targets), "a target for each source"
        self._sources, self._targets = np.ascontiguousarray(sources), np.ascontiguousarray(targets)
        self._row_bytes = row_bytes
        self._piece_bytes = piece_bytes
        self._state = np.array([skip_bytes, 0], dtype=np.int64)
        self.num_bytes = len(sources) * row_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes copied so far, skipped ones included."""
        return int(self._state[0])

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are copied."""
        return self.copied_bytes == self.num_bytes

    def stop(self) -> None:
        """Make ``run`` return after its present piece, and copy nothing more."""
        self._state[1] = 1

    def run(self, most_bytes: int | None = None) -> None:
        """Copy until all bytes are copied, at least ``most_bytes`` more are (None: all), or it is stopped."""
        until = self.num_bytes if most_bytes is None else self.copied_bytes + most_bytes
        _copy_rows()(
            self._targets.ctypes.data, self._sources.ctypes.data, len(self._sources), self._row_bytes,
            self._piece_bytes, until, self._state.ctypes.data,
        )


@functools.cache
def _copy_rows() -> Callable[..., None]:
    try:
        function: Callable[..., None] = load_copy_rows()
    except KernelsUnavailableError:
        return _copy_rows_slowly
    return function


def _copy_rows_slowly(
    targets: int, sources: int, num_rows: int, row_bytes: int, piece_bytes: int, until: int, state: int
) -> None:
    """The fallback for csrc/copies.c where that could not be built: it takes the GIL between two pieces."""
    to, from_ = ((ctypes.c_int64 * num_rows).from_address(address) for address in (targets, sources))
    progress = (ctypes.c_int64 * 2).from_address(state)
    while progress[0] < min(until, num_rows * row_bytes) and not progress[1]:
        row, offset = divmod(progress[0], row_bytes)
        size = min(piece_bytes, row_bytes - offset)
        ctypes.memmove(to[row] + offset, from_[row] + offset, size)
        progress[0] += size
