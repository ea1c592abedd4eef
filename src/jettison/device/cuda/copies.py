"""Copies between a card's KV blocks and the pinned slots of a host pool, in pieces, on the stream beside steps.

A piece is gathered on the card and copied to the slots, or copied from them and scattered. Two pieces are under way, so
that one is launched while the other is copied; ``run`` returns when those that it launched are over, so nothing reads
or writes a block after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from jettison.device.cuda.card import Card, Event
from jettison.device.cuda.pieces import Addresses, Piece, Pieces

_AHEAD = 2


class CardCopy:
    """A ``HostCopy`` of rows: those of a block lie one after the other in its slot.

    It copies whole rows. One thread runs it; another may stop it, and read its progress.
    """

    def __init__(
        self, card: Card, pieces: Pieces, addresses: Addresses, slots: Sequence[Tensor], *, row_bytes: int,
        to_host: bool, skip_bytes: int = 0,
    ) -> None:
        """``addresses``: of each block's rows, block by block. ``slots``: for each block, uint8 of its rows, pinned.
        ``pieces``: of the thread that runs it. Made by the thread of steps: what it launched comes first, but for steps
        under way, which do not touch these blocks."""
        self._card = card
        self._pieces = pieces
        self._addresses = addresses
        self._slots = slots
        self._row_bytes = row_bytes
        self._to_host = to_host
        self._copied_rows = skip_bytes // row_bytes
        self._is_stopped = False
        self._before: Event = card.before_steps()
        self.num_bytes = len(addresses) * row_bytes

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
        most_rows = len(self._addresses) if most_bytes is None else -(-most_bytes // self._row_bytes)
        until = min(len(self._addresses), self._copied_rows + most_rows)
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
        piece, addresses = self._pieces.take(), self._addresses[first:end]
        if self._to_host:
            piece.gather(addresses, self._row_bytes)
        for at, in_slot in self._parts(first, end):
            there = piece.there[at : at + len(in_slot)]
            if self._to_host:
                self._card.copy_out(there, in_slot)
            else:
                self._card.copy_in(in_slot, there)
        if not self._to_host:
            piece.scatter(addresses, self._row_bytes)
        piece.mark_end()
        return piece

    def _parts(self, first: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """``(byte of the piece, part of a slot)`` for rows ``first`` to ``end``."""
        per_slot = len(self._addresses) // len(self._slots)
        row = first
        while row < end:
            slot, within = divmod(row, per_slot)
            count = min(per_slot - within, end - row)
            lo = within * self._row_bytes
            yield (row - first) * self._row_bytes, self._slots[slot][lo : lo + count * self._row_bytes]
            row += count
