"""A link inside one process: deterministic, without sockets or threads.

For tests and for the in-process cluster. It keeps the same promises as the shared-memory link, back-pressure
included, so code that works over it works over the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from jettison.errors import LinkDownError
from jettison.transport.link import EMPTY, Fill, Frame, FrameKind, Link, check_send
from jettison.types import WorkerId


class _Direction:
    """Frames on their way from one end to the other, and the room they take until released."""

    __slots__ = ("frames", "free_slots")

    def __init__(self, activation_slots: int, bulk_slots: int) -> None:
        self.frames: deque[Frame] = deque()
        self.free_slots = [activation_slots, bulk_slots]


class InProcessLink(Link):
    """One end; make both with ``pair``."""

    def __init__(
        self, peer: WorkerId, outgoing: _Direction, incoming: _Direction, activation_bytes: int, bulk_bytes: int
    ) -> None:
        self.peer = peer
        self._outgoing = outgoing
        self._incoming = incoming
        self._max_payload = (activation_bytes, bulk_bytes)
        self._other: InProcessLink | None = None
        self._open = True
        self.holds_bulk = False
        """There is no room for bulk frames, as if the peer had read none: for tests in which events have to meet."""
        self._failure: str | None = None

    @classmethod
    def pair(
        cls,
        a: WorkerId,
        b: WorkerId,
        *,
        activation_slots: int = 8,
        bulk_slots: int = 4,
        activation_bytes: int = 1 << 20,
        bulk_bytes: int = (1 << 20) + (1 << 16),
    ) -> tuple[InProcessLink, InProcessLink]:
        """The end held by worker ``a`` (its peer is ``b``) and the end held by ``b``."""
        forth, back = _Direction(activation_slots, bulk_slots), _Direction(activation_slots, bulk_slots)
        end_a = cls(b, forth, back, activation_bytes, bulk_bytes)
        end_b = cls(a, back, forth, activation_bytes, bulk_bytes)
        end_a._other, end_b._other = end_b, end_a
        return end_a, end_b

    def send_frame(self, kind: FrameKind, tag: int, aux: bytes, nbytes: int, fill: Fill) -> bool:
        check_send(self, kind, tag, aux, nbytes)
        if not self.is_open:
            raise LinkDownError(f"link to worker {self.peer} is down: {self._failure or 'closed'}")
        slots, room = self._outgoing.free_slots, int(kind.is_bulk)
        if slots[room] == 0 or (self.holds_bulk and kind.is_bulk):
            return False
        payload = np.empty(nbytes, dtype=np.uint8) if nbytes else EMPTY
        if nbytes:
            fill(payload)
            payload.flags.writeable = False
        slots[room] -= 1

        def give_back() -> None:
            slots[room] += 1

        self._outgoing.frames.append(Frame(kind, tag, bytes(aux), payload, give_back))
        return True

    def poll_frames(self) -> Iterator[Frame]:
        frames = self._incoming.frames
        while frames and self._open:
            yield frames.popleft()
        if self._open and self._other is not None and not self._other._open:
            self._down("the peer closed the link")

    def max_payload(self, kind: FrameKind) -> int:
        return self._max_payload[kind.is_bulk]

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def failure(self) -> str | None:
        return self._failure

    def fileno(self) -> int:
        """Nothing to wait for: the owner of both ends polls."""
        return -1

    def cut(self) -> None:
        """Break the link as a crash of both sockets would: frames on the way are lost. For tests."""
        for end in (self, self._other):
            if end is not None and end._open:
                end._incoming.frames.clear()
                end._down("cut")

    def close(self) -> None:
        self._open = False

    def _down(self, why: str) -> None:
        self._failure = why
        self._open = False
