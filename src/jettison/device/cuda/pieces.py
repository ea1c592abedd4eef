"""Pieces of staging between a card and the host: bounded memory through which bytes of any number go.

A piece has a buffer that is pinned on the host, one on the card, and room for the addresses of rows. It is taken,
copies are launched with it, their end is marked, and it is given back; it is taken anew when they are over.

Not here: what is copied (``device.cuda.bytes``, ``device.cuda.copies``).
"""

from __future__ import annotations

from collections import deque
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jettison.device.cuda.card import Card, Event

PIECE_BYTES = 4 << 20
"""A copy of so many bytes has the whole speed of the bus (docs/performance.md), and takes 0.1 ms."""
MAX_ROWS = 4096
"""Of a piece."""
ROW_UNIT = 16
"""Bytes: rows that are copied by address begin at a multiple of it, and have a multiple of it."""

Addresses = npt.NDArray[np.int64]


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
    def _addresses(self) -> tuple[Tensor, Tensor]:
        num_bytes = MAX_ROWS * torch.int64.itemsize
        return self._card.pinned(num_bytes).view(torch.int64), self._card.empty(num_bytes).view(torch.int64)

    def gather(self, addresses: Addresses, row_bytes: int) -> Tensor:
        """Launch a copy of rows of the card to ``there``; returns the part of it that has them."""
        rows = self.there[: len(addresses) * row_bytes]
        self._card.gather_rows(self._on_card(addresses), rows)
        return rows

    def scatter(self, addresses: Addresses, row_bytes: int) -> None:
        """Launch the inverse."""
        self._card.scatter_rows(self._on_card(addresses), self.there[: len(addresses) * row_bytes])

    def _on_card(self, addresses: Addresses) -> Tensor:
        host, there = self._addresses
        host[: len(addresses)] = torch.from_numpy(addresses)
        self._card.copy_in(host[: len(addresses)], there[: len(addresses)])
        return there[: len(addresses)]

    def mark_end(self) -> None:
        """All copies with this piece are launched, on the calling thread's stream."""
        self._end = self._card.record(sleeps=True)

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
