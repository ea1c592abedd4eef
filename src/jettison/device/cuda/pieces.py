"""Pieces between a card and the host: bounded memory through which bytes of any number go.

A piece has a buffer that is pinned on the host, one on the card, and room for the addresses of rows. It is taken,
copies are launched with it, their end is marked, and it is given back; it is taken anew when they are over.

How rows of KV go is chosen here, in one place: ``POOL`` and ``LINKS``.
Not here: what is copied (``device.cuda.bytes``, ``device.cuda.copies``).
"""

from __future__ import annotations

import math
from collections import deque
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from jettison.device.cuda.card import Addresses, Card, Event

PIECE_BYTES = 4 << 20
"""A copy of so many bytes has the whole speed of the bus (docs/gpu.md), and takes 0.1 ms."""
MAX_ROWS = 4096
"""Of a piece."""
ROW_UNIT = 16
"""Bytes: rows that are copied by address begin at a multiple of it, and have a multiple of it."""


class Way(Enum):
    """What moves rows between the card and pinned memory of the host."""

    STAGED = "staged"
    """A kernel gathers them on the card, and the copy engines take what lies together on the host; and back."""
    KERNEL = "kernel"
    """A kernel, straight between the two: its programs hold multiprocessors for as long."""
    ENGINES = "engines"
    """The copy engines alone, row by row."""


class Copying(NamedTuple):
    """How rows go."""

    way: Way
    piece_bytes: int
    """With ``STAGED`` pieces of it are taken on the card, too, outside of all budgets."""
    num_programs: int
    """Of a kernel, at most."""
    bytes_per_s: float = math.inf
    """At most, beside steps: what copies take of a card's memory and bus steps lack."""


POOL = Copying(Way.STAGED, 8 << 20, 32, 25e9)
"""Copies of a host pool, on a thread beside steps, two pieces at a time: a layout waits for both. Steps beside 48 GB/s
were 7 % longer on an H200 (docs/gpu.md)."""
LINKS = Copying(Way.KERNEL, PIECE_BYTES, 16)
"""Pieces of transfers, one at a time, each waited for: one launch each. On an H200 pieces of 4 MiB went at 20 GB/s so,
and at 13 to 17 staged; beside decoding steps were 5 % longer."""


class Piece:
    """Memory is taken where it is first used."""

    def __init__(self, card: Card, num_bytes: int) -> None:
        self._card = card
        self._num_bytes = num_bytes
        self._end: Event | None = None

    @cached_property
    def host(self) -> Tensor:
        """uint8, pinned."""
        return self._card.pinned(self._num_bytes)

    @cached_property
    def there(self) -> Tensor:
        """uint8, on the card."""
        return self._card.empty(self._num_bytes)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Addresses]:
        """Two lists of addresses, pinned, and both as one array."""
        both = self._card.pinned(2 * MAX_ROWS * torch.int64.itemsize).view(torch.int64).view(2, MAX_ROWS)
        return both[0], both[1], both.numpy()

    def move(self, sources: Addresses, targets: Addresses, row_bytes: int, num_programs: int) -> None:
        """Launch a copy of at most ``MAX_ROWS`` rows. Once a piece: its room for addresses is in use until its end."""
        count = len(sources)
        from_here, to_there, array = self._places
        array[0, :count], array[1, :count] = sources, targets
        self._card.move_rows(from_here[:count], to_there[:count], row_bytes, num_programs)

    def carry(
        self, on_card: Addresses, on_host: Addresses, row_bytes: int, copying: Copying, *, to_host: bool
    ) -> None:
        """Launch a copy of rows between the card and pinned memory, like ``move``. ``STAGED`` ones fit in the piece."""
        sources, targets = (on_card, on_host) if to_host else (on_host, on_card)
        match copying.way:
            case Way.KERNEL:
                self.move(sources, targets, row_bytes, copying.num_programs)
            case Way.ENGINES:
                self._card.copy_many(sources, targets, np.full(len(sources), row_bytes, dtype=np.int64))
            case Way.STAGED:
                staged = in_a_row(self._card.address_of(self.there), len(on_card), row_bytes)
                firsts, sizes = _runs(on_host, row_bytes)
                if to_host:
                    self.move(on_card, staged, row_bytes, copying.num_programs)
                    self._card.copy_many(staged[firsts], on_host[firsts], sizes)
                else:
                    self._card.copy_many(on_host[firsts], staged[firsts], sizes)
                    self.move(staged, on_card, row_bytes, copying.num_programs)

    def mark_end(self, *, sleeps: bool = False) -> None:
        """All copies with this piece are launched, on the calling thread's stream. ``sleeps``: a thread that waits for
        them leaves its core to others, and wakes up some 50 us late."""
        self._end = self._card.record(sleeps=sleeps)

    def wait(self) -> None:
        """Let the thread wait for them."""
        end, self._end = self._end, None
        if end is not None:
            end.synchronize()


class Pieces:
    """Pieces of one thread at a time: ``num_pieces`` of them, or as many as are taken at once if those are more."""

    def __init__(self, card: Card, piece_bytes: int = PIECE_BYTES, num_pieces: int = 2) -> None:
        self.piece_bytes = piece_bytes
        self.num_pieces = num_pieces
        self._card = card
        self._free: deque[Piece] = deque()
        self._num_made = 0

    def take(self) -> Piece:
        """A piece that no copy uses."""
        if not self._free or self._num_made < self.num_pieces:
            self._num_made += 1
            return Piece(self._card, self.piece_bytes)
        piece = self._free.popleft()
        piece.wait()
        return piece

    def give(self, piece: Piece) -> None:
        """It may be taken again, when its copies are over."""
        self._free.append(piece)

    def num_rows(self, row_bytes: int) -> int:
        """Rows of one piece, at most; 0 where not even one fits."""
        return min(MAX_ROWS, self.piece_bytes // row_bytes)


def in_a_row(first: int, num_rows: int, row_bytes: int) -> Addresses:
    """Addresses of rows that lie one after the other."""
    return np.arange(first, first + num_rows * row_bytes, row_bytes, dtype=np.int64)


def _runs(addresses: Addresses, row_bytes: int) -> tuple[Addresses, Addresses]:
    """Of rows that lie one after the other: the first row's index, and bytes."""
    firsts = np.zeros(1, dtype=np.int64)
    breaks = np.flatnonzero(addresses[1:] - addresses[:-1] != row_bytes)
    if len(breaks):
        firsts = np.concatenate((firsts, breaks + 1))
    sizes = np.empty_like(firsts)
    sizes[:-1], sizes[-1] = firsts[1:] - firsts[:-1], len(addresses) - firsts[-1]
    return firsts, sizes * row_bytes
