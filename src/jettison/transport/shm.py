"""Link between two workers of one machine: payloads in shared memory, headers over a Unix socket.

Each end owns a sealed memfd, its *outgoing slots*, and hands the descriptor to the peer, which maps it
read-only. A frame is: take a free slot, write the payload into it, send its header as one SEQPACKET message.
The message is the doorbell, and its system call is the barrier that orders the payload before it. When the
receiver releases frames it returns their slots as a credit in its next header, or in a message of its own
once half of a class's slots wait.

        sender                                                       receiver
    free --fill, header message--> in flight --poll--> held (payload is a view of the slot)
      ^                                                     |
      +------------------ credit (bit mask) ----------------+--release

Headers are fixed structs; every field of a header is checked before it is used as an index or a length, and
a peer that breaks the protocol loses the link. There is no name in a file system for the memory, so nothing
is left behind when a process dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from jettison.errors import LinkDownError
from jettison.transport.handshake import Handshake
from jettison.transport.link import EMPTY, MAX_AUX_BYTES, Bytes, Fill, Frame, FrameKind, Link, check_send
from jettison.types import WorkerId

_HEADER = struct.Struct("<I B x H I q Q Q")
"""Magic, kind, length of aux, slot, tag, payload bytes, credit (slots given back, as bits); aux follows."""
_MAGIC = 0x4A53484D
_CREDIT = 255
_ATTACH = 254
_NO_SLOT = 0xFFFFFFFF
_GEOMETRY = struct.Struct("<I I Q Q")
_MAX_SLOTS = 32
"""Per class: credits of both classes are bits of one number, bulk in the upper half."""
_MAX_SLOT_BYTES = 1 << 30
_MESSAGE_BYTES = _HEADER.size + MAX_AUX_BYTES
_MIN_TAG, _MAX_TAG = -(1 << 63), (1 << 63) - 1
_KINDS = tuple(FrameKind)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


Pin = Callable[[Bytes], Callable[[], None]]
"""Makes memory of the host fast for a device to copy; what it returns undoes that, before the memory goes."""


class SlotGeometry(NamedTuple):
    """How one direction's memory is divided. Untouched slots cost no memory."""

    activation_slots: int = 8
    bulk_slots: int = 4
    activation_bytes: int = 1 << 20
    bulk_bytes: int = (1 << 20) + (1 << 16)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole mapping."""
        return self.activation_slots * self.activation_bytes + self.bulk_slots * self.bulk_bytes

    def check(self) -> None:
        """Raises ValueError for sizes out of bounds."""
        if not all(1 <= slots <= _MAX_SLOTS for slots in self[:2]):
            raise ValueError(f"{self[:2]} slots; each class has 1 to {_MAX_SLOTS}")
        if not all(1 <= size <= _MAX_SLOT_BYTES for size in self[2:]):
            raise ValueError(f"slots of {self[2:]} bytes; each has 1 to {_MAX_SLOT_BYTES}")


class _Room:
    """Slots of one class in one direction, as a bit mask; bit i set = this side may use slot i."""

    __slots__ = ("credit_at", "free", "num_pending", "num_slots", "shift", "slot_bytes", "start")

    def __init__(self, geometry: SlotGeometry, is_bulk: bool) -> None:
        self.num_slots = geometry.bulk_slots if is_bulk else geometry.activation_slots
        self.slot_bytes = geometry.bulk_bytes if is_bulk else geometry.activation_bytes
        self.start = geometry.activation_slots * geometry.activation_bytes if is_bulk else 0
        self.free = (1 << self.num_slots) - 1
        self.num_pending = 0
        """Receiver: slots released and not yet returned."""
        self.credit_at = (self.num_slots + 1) // 2
        self.shift = 32 if is_bulk else 0

    def lowest_free(self) -> int:
        """The lowest free slot, while there is one: low slots stay warm in the caches, high ones untouched."""
        return (self.free & -self.free).bit_length() - 1


class ShmLink(Link):
    """One end, over a connected SEQPACKET socket with a proven peer (``sockets``)."""

    queues_bulk = False  # an accepted piece is there at once, in slots that urgent frames do not use

    def __init__(
        self, sock: socket.socket, handshake: Handshake, geometry: SlotGeometry | None = None, pin: Pin | None = None
    ) -> None:
        """``pin``: for the slots of both directions."""
        geometry = geometry or SlotGeometry()
        geometry.check()
        self.peer: WorkerId = handshake.peer.worker_id
        self._sock = sock
        self._geometry = geometry
        self._pin = pin
        self._unpin: list[Callable[[], None]] = []
        self._failure: str | None = None
        self._open = True
        self._blocked = False
        self._pending_credit = 0
        """Slots released here and not yet returned, both classes."""
        self._credit_due = False
        """Enough slots wait to return them in a message of their own."""
        self._outgoing = (_Room(geometry, False), _Room(geometry, True))
        self._incoming: tuple[_Room, _Room] | None = None
        self._incoming_memory: Bytes = EMPTY
        self._buffer = bytearray(_MESSAGE_BYTES + 1)  # one byte longer than any message, to detect longer ones
        self._buffer_view = memoryview(self._buffer)
        self._outgoing_memory: Bytes = EMPTY
        sock.setblocking(False)
        self._outgoing_memory = self._send_memory()
        self._pin_slots(self._outgoing_memory)

    # --- sending

    def send_frame(self, kind: FrameKind, tag: int, aux: bytes, nbytes: int, fill: Fill) -> bool:
        room = self._outgoing[kind.is_bulk]
        if len(aux) > MAX_AUX_BYTES or not 0 <= nbytes <= room.slot_bytes or not _MIN_TAG <= tag <= _MAX_TAG:
            check_send(self, kind, tag, aux, nbytes)
        if not self._open:
            raise LinkDownError(f"link to worker {self.peer} is down: {self._failure or 'closed'}")
        slot = _NO_SLOT
        if nbytes:
            if not room.free:
                return False
            slot = room.lowest_free()
            start = room.start + slot * room.slot_bytes
            fill(self._outgoing_memory[start : start + nbytes])
        if not self._send(kind, tag, aux, slot, nbytes):
            return False
        if nbytes:
            room.free &= ~(1 << slot)
        return True

    def _send(self, kind: int, tag: int, aux: bytes, slot: int, nbytes: int) -> bool:
        """Send a header, and with it all credits that wait. Returns whether the kernel took it. Raises
        LinkDownError."""
        credit = self._pending_credit
        message = _HEADER.pack(_MAGIC, kind, len(aux), slot, tag, nbytes, credit) + aux
        try:
            self._sock.send(message)
        except BlockingIOError:
            self._blocked = True
            return False
        except OSError as error:
            self._fail(f"send: {error}")
            raise LinkDownError(f"link to worker {self.peer} is down: {self._failure}") from None
        self._blocked = False
        if credit:
            self._pending_credit = 0
            self._credit_due = False
            for room in self._incoming or ():
                room.num_pending = 0
        return True

    def _send_memory(self) -> Bytes:
        """Make the outgoing slots and hand them to the peer with the first message."""
        fd = os.memfd_create("jettison-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, self._geometry.total_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            memory = np.frombuffer(mmap.mmap(fd, self._geometry.total_bytes), dtype=np.uint8)
            body = _GEOMETRY.pack(*self._geometry)
            header = _HEADER.pack(_MAGIC, _ATTACH, len(body), _NO_SLOT, 0, 0, 0)
            socket.send_fds(self._sock, [header + body], [fd])
        except OSError as error:
            self._fail(f"attach: {error}")
            raise LinkDownError(f"link to worker {self.peer} is down: {self._failure}") from None
        finally:
            os.close(fd)
        return memory

    # --- receiving

    def poll_frames(self) -> Iterator[Frame]:
        if not self.attached():
            return
        if self._credit_due:
            self._flush_credits()
        while self._open:
            try:
                num_bytes = self._sock.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(f"receive: {error}")
                return
            if num_bytes == 0:
                self._fail("the peer closed the link")
                return
            frame = self._parse(num_bytes)
            if frame is not None:
                yield frame

    def wait_attached(self, timeout_s: float) -> None:
        """Block until the peer's memory is mapped, which shows that the peer uses this link. Raises LinkDownError."""
        deadline = time.monotonic() + timeout_s
        while not self.attached():
            if not self._open or time.monotonic() > deadline:
                raise LinkDownError(f"link to worker {self.peer}: {self._failure or 'the peer sent no memory'}")
            select.select([self._sock], [], [], max(0.0, deadline - time.monotonic()))

    def attached(self) -> bool:
        """Whether the peer uses this link: its memory is mapped, or its first message is here and brings it."""
        return self._incoming is not None or self._attach()

    def _attach(self) -> bool:
        """Map the peer's memory, which its first message brings."""
        if not self._open:
            return False
        try:
            message, fds, _, _ = socket.recv_fds(self._sock, _MESSAGE_BYTES, 1)
        except BlockingIOError:
            return False
        except OSError as error:
            self._fail(f"attach: {error}")
            return False
        try:
            geometry = self._parse_attach(message, fds)
            prot = mmap.PROT_READ if self._pin is None else mmap.PROT_READ | mmap.PROT_WRITE  # drivers pin no less
            memory = mmap.mmap(fds[0], geometry.total_bytes, flags=mmap.MAP_SHARED, prot=prot)
        except (ValueError, OSError, struct.error) as error:
            self._fail(f"attach: {error}")
            return False
        finally:
            for fd in fds:
                os.close(fd)
        self._incoming_memory = np.frombuffer(memory, dtype=np.uint8)
        self._pin_slots(self._incoming_memory)
        self._incoming_memory.flags.writeable = False
        self._incoming = (_Room(geometry, False), _Room(geometry, True))
        return True

    def _pin_slots(self, memory: Bytes) -> None:
        if self._pin is not None:
            self._unpin.append(self._pin(memory))

    def _parse_attach(self, message: bytes, fds: list[int]) -> SlotGeometry:
        if not message:
            raise ValueError("the peer closed the link")
        magic, kind, aux_len, _, _, _, _ = _HEADER.unpack_from(message)
        if (magic, kind) != (_MAGIC, _ATTACH) or len(fds) != 1:
            raise ValueError("the first message brings no memory")
        geometry = SlotGeometry(*_GEOMETRY.unpack(message[_HEADER.size : _HEADER.size + aux_len]))
        geometry.check()
        if os.fstat(fds[0]).st_size != geometry.total_bytes:
            raise ValueError(f"memory of {os.fstat(fds[0]).st_size} bytes for slots of {geometry.total_bytes}")
        if fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("memory that its owner could shrink under a reader")
        return geometry

    def _parse(self, num_bytes: int) -> Frame | None:
        """The frame in the buffer; None for credits, and for an invalid message, which closes the link."""
        if num_bytes < _HEADER.size:
            self._fail(f"a message of {num_bytes} bytes")
            return None
        magic, kind, aux_len, slot, tag, nbytes, credit = _HEADER.unpack_from(self._buffer)
        if (magic, num_bytes) != (_MAGIC, _HEADER.size + aux_len) or aux_len > MAX_AUX_BYTES:
            self._fail("a message that is no frame header")
            return None
        if credit and not self._take_credit(credit):
            return None
        if kind == _CREDIT:
            return None
        if kind >= len(_KINDS):
            self._fail(f"a frame of unknown kind {kind}")
            return None
        aux = self._buffer_view[_HEADER.size : num_bytes].tobytes() if aux_len else b""
        if slot == _NO_SLOT and nbytes == 0:
            return Frame(_KINDS[kind], tag, aux, EMPTY)
        return self._open_slot(_KINDS[kind], tag, aux, slot, nbytes)

    def _open_slot(self, kind: FrameKind, tag: int, aux: bytes, slot: int, nbytes: int) -> Frame | None:
        assert self._incoming is not None
        room = self._incoming[kind.is_bulk]
        if slot >= room.num_slots or not room.free >> slot & 1 or not 0 < nbytes <= room.slot_bytes:
            self._fail(f"{nbytes} bytes in slot {slot} of {room.num_slots}, which is not the sender's to use")
            return None
        room.free &= ~(1 << slot)
        start = room.start + slot * room.slot_bytes
        payload = self._incoming_memory[start : start + nbytes]

        def give_back() -> None:
            room.free |= 1 << slot
            room.num_pending += 1
            self._pending_credit |= 1 << slot << room.shift
            if room.num_pending >= room.credit_at:
                self._credit_due = True
                self._flush_credits()

        return Frame(kind, tag, aux, payload, give_back)

    # --- credits

    def _flush_credits(self) -> None:
        """Return released slots without waiting for a frame to carry them: half of the slots of a class wait.

        A sender without free slots does not wait for ever: then all slots of the class are in flight, and the release
        of half of them comes here.
        """
        try:
            if self._open:
                self._send(_CREDIT, 0, b"", _NO_SLOT, 0)
        except LinkDownError:
            return  # no end is left to use the slots

    def _take_credit(self, credit: int) -> bool:
        """Use the slots again; False when they were not in flight, which closes the link."""
        for room in self._outgoing:
            slots = credit >> room.shift & 0xFFFFFFFF
            if slots & room.free or slots >> room.num_slots:
                self._fail(f"credit {slots:#x} for slots that were not in flight")
                return False
            room.free |= slots
        return True

    # --- life

    def max_payload(self, kind: FrameKind) -> int:
        return self._geometry.bulk_bytes if kind.is_bulk else self._geometry.activation_bytes

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def wants_write(self) -> bool:
        return self._blocked and self._open

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        """Close this end. The mappings live on until the last payload of a frame is gone."""
        self._open = False
        self._sock.close()
        while self._unpin:
            self._unpin.pop()()
        self._outgoing_memory = self._incoming_memory = EMPTY

    def _fail(self, why: str) -> None:
        if self._open:
            self._failure = why
        self.close()
