"""The interface of a link between two workers: frames in, frames out, back-pressure, a doorbell.

A link carries bulk bytes (activations, KV pieces, pieces of parameter shards) and nothing else; commands and
events go over the control channel. Nothing here knows what the bytes mean, which device they come from, or
what a step is: no torch, no ``device``.

Two classes of frames never block each other: activations and remote attention have room of their own, and everything
that belongs to a transfer (pieces, its begin and its end) shares the bulk room, where order is kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from enum import IntEnum
from types import TracebackType

import numpy as np
import numpy.typing as npt

from jettison.types import WorkerId

Bytes = npt.NDArray[np.uint8]
"""A flat uint8 array."""

Fill = Callable[[Bytes], object]
"""Writes exactly the payload into the array it is given; must not keep the array. Its result is ignored."""

MAX_AUX_BYTES = 128
"""Aux is a small fixed struct of the caller's; data of variable size belongs in the payload."""


class FrameKind(IntEnum):
    """The kind of a frame. The first three are the classes of a link, most urgent first."""

    ACTIVATION = 0
    KV_PIECE = 1
    SHARD_PIECE = 2
    TRANSFER_BEGIN = 3
    TRANSFER_END = 4
    ATTEND = 5
    ATTENDED = 6
    """Remote attention, both ways: as urgent as activations, and in their room."""

    @property
    def is_bulk(self) -> bool:
        """Whether the frame belongs to a transfer and so lives in the bulk room, in order."""
        return FrameKind.KV_PIECE <= self <= FrameKind.TRANSFER_END


class Frame:
    """One received frame. ``payload`` may lie in memory shared with the sender: it is valid until ``release()``.

    ``payload`` may be read-only. Releasing gives the room back to the sender; it is idempotent, and leaving
    the frame's ``with`` block does it.
    """

    __slots__ = ("_on_release", "aux", "kind", "payload", "tag")

    def __init__(
        self, kind: FrameKind, tag: int, aux: bytes, payload: Bytes, on_release: Callable[[], None] | None = None
    ) -> None:
        self.kind = kind
        self.tag = tag
        self.aux = aux
        self.payload = payload
        self._on_release = on_release

    def release(self) -> None:
        """The payload is no longer needed here."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            self.payload = EMPTY
            on_release()

    def __enter__(self) -> Frame:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


EMPTY: Bytes = np.empty(0, dtype=np.uint8)


class Link(ABC):
    """One end of a duplex link to one peer. Used from one thread; no call blocks.

    Frames of one class arrive in the order they were sent; an activation may overtake bulk frames.
    """

    peer: WorkerId
    """The worker at the other end."""

    @abstractmethod
    def send_frame(self, kind: FrameKind, tag: int, aux: bytes, nbytes: int, fill: Fill) -> bool:
        """Send one frame whose payload ``fill`` writes straight into the link's memory.

        Returns False when there is no room now (back-pressure; ``fill`` may have been called in vain): try again
        after ``poll_frames``, when ``fileno()`` was readable, or writable while ``wants_write``. True means that
        the frame will arrive if the link lives, nothing more. When ``fill`` raises, nothing is sent and the
        error passes through. ``nbytes`` may be 0; ``fill`` is then not called.

        Raises LinkDownError when the link is not open, ValueError when ``aux`` is longer than MAX_AUX_BYTES,
        ``tag`` is no signed 64-bit integer or ``nbytes`` is above ``max_payload(kind)``.
        """

    @abstractmethod
    def poll_frames(self) -> Iterator[Frame]:
        """Frames that have arrived, in order; ends when there is none now. Never raises and never blocks.

        When the peer is gone or sent something that is not a frame, iteration ends and ``is_open`` is False;
        frames received before stay valid. A caller that holds frames unreleased sees no new ones once the
        room of their class is used up.
        """

    @abstractmethod
    def max_payload(self, kind: FrameKind) -> int:
        """Most payload bytes of one frame of this kind; longer data is cut up by the caller."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether frames can still be sent. Once False, it stays False."""

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """Why the link is down; None while it is open or after ``close()``."""

    is_opening: bool = False
    """It was made to be opened: it takes no frames and brings none until ``settled``."""
    settled: Link | None = None
    """What takes the place of a link that was being opened, once the peer uses it."""
    queues_bulk: bool = True
    """Whether accepted bulk may still be on its way when an urgent frame follows it. Then pieces have to be no longer
    than the link carries in a stage's time. Where it may not, a refusal only means that the other end is busy."""

    def limit_unsent(self, num_bytes: int) -> None:
        """Keep about this much, or less, in buffers that activations cannot overtake. Does nothing for a link without
        such buffers."""
        del num_bytes

    @property
    def wants_write(self) -> bool:
        """Whether accepted bytes wait for the socket to become writable (watch it, then poll)."""
        return False

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when a call of ``poll_frames`` or ``send_frame`` may succeed now; -1: there is
        none."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; the peer sees a dead link. Idempotent. Frames still held stay readable."""


def check_send(link: Link, kind: FrameKind, tag: int, aux: bytes, nbytes: int) -> None:
    """The arguments every ``send_frame`` refuses. Raises ValueError."""
    if len(aux) > MAX_AUX_BYTES:
        raise ValueError(f"aux has {len(aux)} bytes; at most {MAX_AUX_BYTES} fit a frame header")
    limit = link.max_payload(kind)
    if not 0 <= nbytes <= limit:
        raise ValueError(f"payload of {nbytes} bytes; at most {limit} fit a {kind.name} frame")
    if not -(1 << 63) <= tag < 1 << 63:
        raise ValueError(f"tag {tag} is not a signed 64-bit integer")
