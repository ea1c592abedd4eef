"""``DeviceBytes`` of a card: through pinned pieces, or straight to and from memory of the host that is pinned already.

Every later launch, and every later call here, finds done what a call has launched. A call waits for the card only where
the host reads the bytes, or where the card reads memory of the caller's. Bytes of shards and of KV blocks, which no
step under way touches, do not wait for it (``Card.links``); ``read`` and ``tensor`` come behind all.

Not here: copies beside steps (``device.cuda.copies``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jettison.device.bytesview import as_numpy_uint8, as_tensor_uint8
from jettison.device.cuda.card import Addresses, Card
from jettison.device.cuda.pieces import LINKS, MAX_ROWS, ROW_UNIT, Copying, Piece, Pieces, Way, in_a_row
from jettison.device.cuda.running import wait_for
from jettison.device.devicebytes import Bytes
from jettison.errors import MappingError

logger = logging.getLogger(__name__)

_AHEAD = 2
"""Pieces that are launched before the first of them is waited for."""


class CardBytes:
    """See ``DeviceBytes``, of a started card."""

    def __init__(self, card: Card, copying: Copying = LINKS) -> None:
        self._card = card
        self.copy_by(copying)

    def copy_by(self, copying: Copying) -> None:
        """Let rows go like this from now on."""
        self._copying = copying
        self._pieces = Pieces(self._card, copying.piece_bytes, _AHEAD + 1)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """A card that has failed says so wherever it is asked: the calls here raise WorkerLostError then."""
        try:
            yield
        except RuntimeError:
            wait_for(self._card)
            raise

    def read(self, source: Tensor) -> Bytes:
        """A copy."""
        out = np.empty(source.nbytes, dtype=np.uint8)
        with self._told():
            self._out(_flat(source), torch.from_numpy(out))
        return out

    def copy_out(self, source: Tensor, out: Bytes) -> None:
        """See ``DeviceBytes``."""
        with self._told(), self._card.links():
            self._out(_flat(source), as_tensor_uint8(out))

    def copy_in(self, data: Bytes, target: Tensor) -> None:
        """See ``DeviceBytes``."""
        with self._told(), self._card.links():
            self._in(as_tensor_uint8(data), _flat(target))

    @contextmanager
    def writing(self, target: Tensor) -> Iterator[Tensor]:
        """A pinned piece where that has room: the copy runs while the next one is filled."""
        flat = _flat(target)
        if len(flat) > self._pieces.piece_bytes:
            staged = torch.empty(target.shape, dtype=target.dtype)
            yield staged
            self.copy_in(as_numpy_uint8(staged), target)
            return
        with self._told():
            piece = self._pieces.take()
        try:
            host = piece.host[: len(flat)]
            yield host.view(target.dtype).view(target.shape)
            with self._told(), self._card.links():
                self._card.copy_in(host, flat)
                piece.mark_end()
        finally:
            self._pieces.give(piece)

    def tensor(self, data: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """In memory of its own."""
        with self._told():
            made = self._card.empty(len(data)).view(dtype).view(shape)
            self._in(as_tensor_uint8(data), _flat(made))
        return made

    def pin(self, memory: Bytes) -> Callable[[], None]:
        """See ``DeviceBytes``."""
        try:
            return self._card.pin(memory)
        except MappingError as error:
            logger.warning("%s; links copy through pieces of their own", error)
            return _nothing

    def gather(self, tables: Sequence[Tensor], rows: npt.NDArray[np.int64], out: Tensor) -> None:
        """See ``pieces.Way``. Where ``out`` is pinned, straight to it."""
        with self._told(), self._card.links():
            self._gather(tables, rows, out)

    def _gather(self, tables: Sequence[Tensor], rows: npt.NDArray[np.int64], out: Tensor) -> None:
        row_bytes = tables[0].shape[1]
        addresses = self._addresses(tables, rows)
        if addresses is None:
            for line, table in zip(out.view(len(tables), -1), tables, strict=True):
                self._out(_flat(table[torch.from_numpy(rows)]), line)
            return
        is_pinned, under_way = self._card.is_pinned(out), _UnderWay(self._pieces)
        for at, part in self._parts(addresses, row_bytes, is_pinned):
            here, piece = out[at : at + len(part) * row_bytes], under_way.take()
            on_host = in_a_row(self._card.address_of(here if is_pinned else piece.host), len(part), row_bytes)
            piece.carry(part, on_host, row_bytes, self._copying, to_host=True)
            under_way.add(piece, None if is_pinned else here)
        under_way.finish()

    def scatter(self, tables: Sequence[Tensor], rows: npt.NDArray[np.int64], data: Tensor) -> None:
        """Likewise."""
        with self._told(), self._card.links():
            self._scatter(tables, rows, data)

    def _scatter(self, tables: Sequence[Tensor], rows: npt.NDArray[np.int64], data: Tensor) -> None:
        row_bytes = tables[0].shape[1]
        addresses = self._addresses(tables, rows)
        if addresses is None:
            for line, table in zip(data.view(len(tables), -1), tables, strict=True):
                content = self.tensor(as_numpy_uint8(line), torch.uint8, (len(rows), row_bytes))
                table[torch.from_numpy(rows)] = content
            return
        is_pinned = self._card.is_pinned(data)
        for at, part in self._parts(addresses, row_bytes, is_pinned):
            here, piece = data[at : at + len(part) * row_bytes], self._pieces.take()
            staged = here if is_pinned else piece.host[: len(here)].copy_(here)
            on_host = in_a_row(self._card.address_of(staged), len(part), row_bytes)
            piece.carry(part, on_host, row_bytes, self._copying, to_host=False)
            piece.mark_end()
            self._pieces.give(piece)
        if is_pinned:
            self._card.synchronize()

    def _out(self, source: Tensor, out: Tensor) -> None:
        """Flat uint8 on the card to flat uint8 on the host."""
        if self._card.is_pinned(out):
            self._card.copy_out(source, out)
            self._card.synchronize()
            return
        under_way = _UnderWay(self._pieces)
        for start in range(0, len(source), self._pieces.piece_bytes):
            part, piece = source[start : start + self._pieces.piece_bytes], under_way.take()
            self._card.copy_out(part, piece.host[: len(part)])
            under_way.add(piece, out[start : start + len(part)])
        under_way.finish()

    def _in(self, data: Tensor, target: Tensor) -> None:
        """The inverse. Pinned memory is the caller's again when this returns."""
        if self._card.is_pinned(data):
            self._card.copy_in(data, target)
            self._card.synchronize()
            return
        for start in range(0, len(target), self._pieces.piece_bytes):
            part, piece = target[start : start + self._pieces.piece_bytes], self._pieces.take()
            staged = piece.host[: len(part)].copy_(data[start : start + len(part)])
            self._card.copy_in(staged, part)
            piece.mark_end()
            self._pieces.give(piece)

    def _addresses(self, tables: Sequence[Tensor], rows: npt.NDArray[np.int64]) -> Addresses | None:
        """Of rows of tables, table by table; None where rows are not such as are copied by address."""
        first = np.array([self._card.address_of(table) for table in tables], dtype=np.int64)
        row_bytes = tables[0].shape[1]
        if row_bytes % ROW_UNIT or (first % ROW_UNIT).any() or not self._pieces.num_rows(row_bytes):
            return None
        addresses: Addresses = (first[:, None] + rows * row_bytes).reshape(-1)
        return addresses

    def _parts(self, addresses: Addresses, row_bytes: int, is_pinned: bool) -> Iterator[tuple[int, Addresses]]:
        """``(first byte, addresses)`` of what goes with one piece, or through it."""
        is_straight = is_pinned and self._copying.way is not Way.STAGED
        step = MAX_ROWS if is_straight else self._pieces.num_rows(row_bytes)
        for start in range(0, len(addresses), step):
            yield start * row_bytes, addresses[start : start + step]


class _UnderWay:
    """Pieces on their way to the host, in order."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._waiting: deque[tuple[Piece, Tensor | None]] = deque()

    def take(self) -> Piece:
        """A free piece, when few enough are under way."""
        if len(self._waiting) == _AHEAD:
            self._end_first()
        return self._pieces.take()

    def add(self, piece: Piece, target: Tensor | None) -> None:
        """Its copies are launched. ``target``: where its bytes go from there; None: they are where they belong."""
        piece.mark_end()
        self._waiting.append((piece, target))

    def finish(self) -> None:
        """Wait for all of them."""
        while self._waiting:
            self._end_first()

    def _end_first(self) -> None:
        piece, target = self._waiting.popleft()
        piece.wait()
        if target is not None:
            target.copy_(piece.host[: len(target)])
        self._pieces.give(piece)


def _flat(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8)


def _nothing() -> None:
    """There is nothing to undo."""
