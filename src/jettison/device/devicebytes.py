"""How bytes of a device's tensors reach the host, and the host's bytes a device: the seam under all that moves shards,
KV blocks and hidden states.

Code above this port may index, view and compute with tensors of a device. It may not take their addresses, view them as
numpy arrays, or put them in one operation with tensors of the host: that is asked here. Two things are exempt, which
every device does: a copy between the two (``copy_``, ``dest[:] = source``), and an index that lies on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]
"""Flat, on the host."""
Pin = Callable[[Bytes], Callable[[], None]]


class DeviceBytes(Protocol):
    """Bytes of one device's tensors, which are contiguous in all calls. Every call is over when it returns, for all
    that is called or launched after it. What was launched on the device before it comes first; but where a step is
    under way, ``copy_out``, ``copy_in``, ``writing``, ``gather`` and ``scatter`` need not wait for it: the caller knows
    that it does not touch their memory."""

    def read(self, source: Tensor) -> Bytes:
        """The bytes of a tensor of any dtype: the memory itself where the host sees it, else a copy that is the
        caller's. Not to be written."""
        ...

    def copy_out(self, source: Tensor, out: Bytes) -> None:
        """The bytes of a tensor of any dtype into ``out``, which has their number."""
        ...

    def copy_in(self, data: Bytes, target: Tensor) -> None:
        """``data``, which may be read-only, into a tensor of any dtype that has as many bytes."""
        ...

    def writing(self, target: Tensor) -> AbstractContextManager[Tensor]:
        """A tensor on the host, of the same shape and dtype, to be filled inside: ``target`` has its contents where the
        context ends without an error. It is ``target`` itself where the host sees that. Its contents before are
        undefined."""
        ...

    def tensor(self, data: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor on the device with these bytes, and over them where that can be. Raises RuntimeError where ``shape``
        does not have their number."""
        ...

    @property
    def pin(self) -> Pin | None:
        """Makes later copies to and from memory of the host, which is writable, fast, and returns what undoes it, which
        must come before the memory goes. Where it cannot be, that is logged, and copies are as they were. None: there
        is nothing to gain."""
        ...

    def gather(self, tables: Sequence[Tensor], rows: npt.NDArray[np.int64], out: Tensor) -> None:
        """Rows of each table (uint8 ``[n, row_bytes]``), table by table, to ``out``: uint8 on the host, of
        their number.

        All rows are there: the caller has checked them, since a wrong one must not end the process.
        """
        ...

    def scatter(self, tables: Sequence[Tensor], rows: npt.NDArray[np.int64], data: Tensor) -> None:
        """The inverse of ``gather``; ``data`` may be read-only."""
        ...


def as_bytes(data: Any) -> Bytes:
    """A buffer, bytes or array of the host as ``Bytes``, without a copy."""
    array: Bytes = np.asarray(memoryview(data)).reshape(-1).view(np.uint8)
    return array
