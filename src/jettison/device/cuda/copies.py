"""Copies between a card's KV blocks and the pinned slots of a host pool, in pieces, on the stream beside steps.

Two pieces are under way, so that one is launched while the other is copied; ``run`` returns when those that it launched
are over, so nothing reads or writes a block after it. Each piece costs the interpreter's lock for some launches only,
since steps beside it need that lock, too; it is waited for without the lock.

``COPYING`` says how a piece goes, in this one place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
from torch import Tensor

from jettison.device.cuda.card import Addresses, Card, Event
from jettison.device.cuda.pieces import Piece, Pieces, in_a_row

_AHEAD = 2


class Way(Enum):
    """What moves the rows of a piece."""

    STAGED = "staged"
    """A kernel gathers them on the card, and the copy engines take what lies together in the pool; and back."""
    KERNEL = "kernel"
    """A kernel, straight between the card and the pool: its programs hold multiprocessors for as long."""
    ENGINES = "engines"
    """The copy engines alone, row by row."""


class Copying(NamedTuple):
    """How a host pool's copies go."""

    way: Way
    piece_bytes: int
    """A layout waits for two pieces. With ``STAGED`` four of them are taken on the card, outside of all budgets."""
    num_programs: int
    """Of a kernel."""


COPYING = Copying(Way.STAGED, 8 << 20, 32)


class PoolRows(NamedTuple):
    """The rows of a copy, block by block: row i is at ``card[i]`` and at ``host[i]``."""

    card: Addresses
    host: Addresses
    memory: Sequence[Tensor]
    """What ``host`` points into: held while it is copied."""


class CardCopy:
    """A ``HostCopy`` of rows.

    It copies whole rows. One thread runs it; another may stop it, and read its progress.
    """

    def __init__(
        self, card: Card, pieces: Pieces, rows: PoolRows, copying: Copying, *, row_bytes: int, to_host: bool,
        skip_bytes: int = 0,
    ) -> None:
        """``pieces``: of the thread that runs it. Made by the thread of steps: what it launched comes first, but for
        steps under way, which do not touch these blocks."""
        self._card = card
        self._pieces = pieces
        self._rows = rows
        self._copying = copying
        self._row_bytes = row_bytes
        self._to_host = to_host
        self._num_rows = len(rows.card)
        self._copied_rows = skip_bytes // row_bytes
        self._is_stopped = False
        self._before: Event = card.before_steps()
        self.num_bytes = self._num_rows * row_bytes

    @property
    def copied_bytes(self) -> int:
        """So far, with what was skipped."""
        return self._copied_rows * self._row_bytes

    @property
    def is_complete(self) -> bool:
        """All is copied."""
        return self.copied_bytes == self.num_bytes

    def stop(self) -> None:
        """Have ``run`` launch no more."""
        self._is_stopped = True

    def run(self, most_bytes: int | None = None) -> None:
        """See ``HostCopy``. It returns when no piece is under way."""
        most_rows = self._num_rows if most_bytes is None else -(-most_bytes // self._row_bytes)
        until = min(self._num_rows, self._copied_rows + most_rows)
        launched, under_way = self._copied_rows, deque[tuple[Piece, int]]()
        with self._card.beside():
            self._before.wait()
            while True:
                while launched < until and len(under_way) < _AHEAD and not self._is_stopped:
                    num_rows = min(self._pieces.num_rows(self._row_bytes), until - launched)
                    under_way.append((self._launch(launched, launched + num_rows), num_rows))
                    launched += num_rows
                if not under_way:
                    return
                piece, num_rows = under_way.popleft()
                piece.wait()
                self._pieces.give(piece)
                self._copied_rows += num_rows

    def _launch(self, first: int, end: int) -> Piece:
        piece = self._pieces.take()
        on_card, on_host = self._rows.card[first:end], self._rows.host[first:end]
        way, row_bytes = self._copying.way, self._row_bytes
        if way is Way.STAGED:
            self._launch_staged(piece, on_card, on_host)
        else:
            sources, targets = (on_card, on_host) if self._to_host else (on_host, on_card)
            if way is Way.KERNEL:
                piece.move(sources, targets, row_bytes, self._copying.num_programs)
            else:
                self._card.copy_many(sources, targets, np.full(len(sources), row_bytes, dtype=np.int64))
        piece.mark_end(sleeps=True)
        return piece

    def _launch_staged(self, piece: Piece, on_card: Addresses, on_host: Addresses) -> None:
        row_bytes, programs = self._row_bytes, self._copying.num_programs
        staged = in_a_row(self._card.address_of(piece.there), len(on_card), row_bytes)
        firsts = np.flatnonzero(np.diff(on_host, prepend=on_host[0] - row_bytes - 1) != row_bytes)
        sizes = np.diff(firsts, append=len(on_host)) * row_bytes
        if self._to_host:
            piece.move(on_card, staged, row_bytes, programs)
            self._card.copy_many(staged[firsts], on_host[firsts], sizes)
        else:
            self._card.copy_many(on_host[firsts], staged[firsts], sizes)
            piece.move(staged, on_card, row_bytes, programs)
