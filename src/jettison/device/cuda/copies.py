"""Copies between a card's KV blocks and the pinned slots of a host pool, in pieces, on the stream beside steps.

Two pieces are under way, so that one is launched while the other is copied; ``run`` returns when those that it launched
are over, so nothing reads or writes a block after it. Each piece costs the interpreter's lock for some launches only,
since steps beside it need that lock, too; it is waited for without the lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from jettison.device.cuda.card import Addresses, Card, Event
from jettison.device.cuda.pieces import Copying, Piece, Pieces

_AHEAD = 2


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
        first = launched = self._copied_rows
        under_way, began_ns = deque[tuple[Piece, int]](), time.perf_counter_ns()
        with self._card.beside():
            self._before.wait()
            while True:
                while launched < until and len(under_way) < _AHEAD and not self._is_stopped:
                    self._keep_pace(began_ns, launched - first)
                    num_rows = min(self._pieces.num_rows(self._row_bytes), until - launched)
                    under_way.append((self._launch(launched, launched + num_rows), num_rows))
                    launched += num_rows
                if not under_way:
                    return
                piece, num_rows = under_way.popleft()
                piece.wait()
                self._pieces.give(piece)
                self._copied_rows += num_rows

    def _keep_pace(self, began_ns: int, num_rows: int) -> None:
        """Wait until so many rows may have been launched since then."""
        due_ns = began_ns + int(num_rows * self._row_bytes / self._copying.bytes_per_s * 1e9)
        early_ns = due_ns - time.perf_counter_ns()
        if early_ns > 0:
            time.sleep(early_ns / 1e9)

    def _launch(self, first: int, end: int) -> Piece:
        piece = self._pieces.take()
        on_card, on_host = self._rows.card[first:end], self._rows.host[first:end]
        piece.carry(on_card, on_host, self._row_bytes, self._copying, to_host=self._to_host)
        piece.mark_end(sleeps=True)
        return piece
