"""One TCP connection of a link: signed frames out of queues, signed frames in.

Each frame is a fixed header, aux, payload. The header carries a sequence number and is signed, together with aux, with
the connection's session key, so a frame cannot be injected, repeated or redirected. Payload bytes have TCP's checksum,
and between hosts TLS below (``transport.tls``).

Not here: which frames go where, and what a link promises (``transport.tcp``).
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from jettison.transport.handshake import Handshake
from jettison.transport.link import EMPTY, MAX_AUX_BYTES, Bytes, FrameKind
from jettison.transport.pacing import Pacer
from jettison.transport.tls import TlsSocket, Wire

_HEADER = struct.Struct("<I B x H I q Q")
"""Magic, kind, length of aux, sequence number, tag, payload bytes; then MAC, aux, payload."""
_MAGIC = 0x4A545443
_ATTACH = 254
_MAC_BYTES = 16
_MAX_PAYLOAD_BYTES = 1 << 30


class WireFrame(NamedTuple):
    """A frame as it goes over the wire."""

    kind: FrameKind
    tag: int
    aux: bytes
    payload: Bytes


class _Part(Enum):
    """The part of a frame that is being received; the first part has the lengths of the later ones."""

    PREFIX = "header and MAC"
    AUX = "aux"
    PAYLOAD = "payload"


class FrameStream:
    """Both directions of one connection. After a ``failure`` no frame is sent or received any more."""

    def __init__(
        self, sock: Wire, handshake: Handshake, queues: Sequence[deque[WireFrame]], pacer: Pacer | None = None
    ) -> None:
        """``queues``: frames to send; the first that is not empty goes first, at each frame boundary. ``pacer``: limits
        how much may be sent."""
        self.sock = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self.is_paced = False
        """Bytes wait for the pacer, and not for the socket."""
        self._pacer = pacer
        self.failure: str | None = None
        self.attached = False
        """The peer uses this connection."""
        self._queues = tuple(queues)
        self._key = handshake.session_key
        self._role, self._their_role = (b"i", b"a") if handshake.is_initiator else (b"a", b"i")
        self._half_out: deque[memoryview] = deque()
        """The unsent rest of the frame that is being sent."""
        self._num_sent = self._num_received = 0
        self._prefix = bytearray(_HEADER.size + _MAC_BYTES)
        self._head = (0, 0, 0)
        """Kind, tag and payload bytes of the frame being received."""
        self._aux = bytearray()
        self._payload: Bytes = EMPTY
        self._expect(_Part.PREFIX, memoryview(self._prefix))
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._half_out.append(memoryview(self.sign(_ATTACH, 0, b"", 0)))
        self.pump()

    # --- sending

    @property
    def wants_write(self) -> bool:
        """Whether bytes wait for room in the socket."""
        if self.failure is not None:
            return False
        is_behind = self._tls is not None and self._tls.has_unsent
        return is_behind or (not self.is_paced and (bool(self._half_out) or any(self._queues)))

    @property
    def has_unread(self) -> bool:
        """Whether bytes may wait that the socket does not tell of."""
        return self.failure is None and self._tls is not None and self._tls.has_unread

    def pump(self) -> None:
        """Give the kernel as many bytes as it takes and the pacer allows."""
        self.is_paced = False
        while self.failure is None:
            if not self._half_out:
                queue = next(filter(None, self._queues), None)
                if queue is None:
                    self._flush()
                    return
                kind, tag, aux, payload = queue.popleft()
                self._half_out.append(memoryview(self.sign(kind, tag, aux, len(payload))))
                if len(payload):
                    self._half_out.append(payload.data)
            try:
                if self._pacer is None:
                    num_sent = self.sock.sendmsg(list(self._half_out))
                else:
                    num_sent = self._send_some(self._pacer)
            except BlockingIOError:
                return
            except OSError as error:
                self.failure = f"send: {error}"
                return
            if not num_sent:
                self.is_paced = True
                return
            while self._half_out and num_sent >= len(self._half_out[0]):
                num_sent -= len(self._half_out.popleft())
            if self._half_out:
                self._half_out[0] = self._half_out[0][num_sent:]

    def _flush(self) -> None:
        """Nothing is left to say; what has been said may wait, encrypted."""
        if self._tls is not None and self._tls.has_unsent:
            try:
                self._tls.flush()
            except OSError as error:
                self.failure = f"send: {error}"

    def _send_some(self, pacer: Pacer) -> int:
        """Send as much of the frame as may go now; returns the bytes sent; 0: none may. Raises OSError."""
        left = pacer.left()
        if not left:
            return 0
        num_sent = self.sock.send(self._half_out[0][:left])
        pacer.spend(num_sent)
        return num_sent

    def sign(self, kind: int, tag: int, aux: bytes, nbytes: int) -> bytes:
        """The signed part of the next frame that goes before its payload."""
        header = _HEADER.pack(_MAGIC, kind, len(aux), self._num_sent & 0xFFFFFFFF, tag, nbytes)
        self._num_sent += 1
        return header + self._mac(self._role, header, aux) + aux

    def _mac(self, role: bytes, header: bytes, aux: bytes) -> bytes:
        return hashlib.blake2b(header + aux, key=self._key, digest_size=_MAC_BYTES, person=role).digest()

    # --- receiving

    def next_frame(self) -> WireFrame | None:
        """The next whole frame that has arrived; None if there is none now, or never again (``failure``)."""
        while self.failure is None and self._fill_target():
            frame = self._advance()
            if frame is not None:
                return frame
        return None

    def await_attach(self) -> None:
        """Read up to the frame which shows that the peer uses this connection, and nothing after it."""
        while self.failure is None and not self.attached and self._fill_target():
            self._advance()

    def _fill_target(self) -> bool:
        """Read until the target is full; returns whether it is."""
        while self._filled < len(self._target):
            try:
                num_bytes = self.sock.recv_into(self._target[self._filled :])
            except BlockingIOError:
                return False
            except OSError as error:
                self.failure = f"receive: {error}"
                return False
            if num_bytes == 0:
                self.failure = "the peer closed the link"
                return False
            self._filled += num_bytes
        return True

    def _advance(self) -> WireFrame | None:
        """The target is full: go on to the next part. Returns the frame, if that was its last part."""
        try:
            if self._part is _Part.PREFIX:
                self._begin_frame()
            elif self._part is _Part.AUX:
                self._begin_payload()
            else:
                return self._end_frame()
        except ValueError as error:
            self.failure = str(error)
        return None

    def _expect(self, part: _Part, target: memoryview) -> None:
        self._part, self._target, self._filled = part, target, 0

    def _begin_frame(self) -> None:
        magic, kind, aux_len, sequence, tag, nbytes = _HEADER.unpack_from(self._prefix)
        if magic != _MAGIC or aux_len > MAX_AUX_BYTES:
            raise ValueError("bytes that are no frame header")
        if sequence != self._num_received & 0xFFFFFFFF:
            raise ValueError(f"frame {sequence} where {self._num_received} was due")
        if (kind != _ATTACH and kind >= len(FrameKind)) or nbytes > _MAX_PAYLOAD_BYTES:
            raise ValueError(f"a frame of kind {kind} with {nbytes} bytes")
        self._head = (kind, tag, nbytes)
        self._aux = bytearray(aux_len)
        self._expect(_Part.AUX, memoryview(self._aux))

    def _begin_payload(self) -> None:
        header, proof = bytes(self._prefix[: _HEADER.size]), bytes(self._prefix[_HEADER.size :])
        if not hmac.compare_digest(proof, self._mac(self._their_role, header, bytes(self._aux))):
            raise ValueError("a frame that the peer did not sign")
        self._num_received += 1
        # The length is trusted only now that its signature is checked.
        self._payload = np.empty(self._head[2], dtype=np.uint8)
        self._expect(_Part.PAYLOAD, memoryview(self._payload.data))

    def _end_frame(self) -> WireFrame | None:
        kind, tag, _ = self._head
        payload = self._payload
        self._expect(_Part.PREFIX, memoryview(self._prefix))
        if kind == _ATTACH:
            self.attached = True
            return None
        payload.flags.writeable = False
        return WireFrame(FrameKind(kind), tag, bytes(self._aux), payload)
