"""Link between workers of different machines: header and bytes over one TCP connection.

Each frame is a fixed header, aux, payload. The header carries a sequence number and the epoch and is signed,
together with aux, with the connection's session key, so a frame cannot be injected, repeated or redirected.
Payload bytes are covered by TCP's checksum only: a network on which others can rewrite packets needs a
tunnel, which it needs for confidentiality anyway.

Accepted frames wait in two queues of their own; whenever the socket takes bytes and no frame is half out,
activations go first. What the kernel holds, sent or not, nobody overtakes any more, and on a slow link it would hold
seconds' worth: its send buffer is bounded (``limit_unsent``), so that an activation waits for about a piece.
"""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from enum import Enum

import numpy as np

from jettison.errors import LinkDownError
from jettison.transport.handshake import Handshake
from jettison.transport.link import EMPTY, MAX_AUX_BYTES, Bytes, Fill, Frame, FrameKind, Link, check_send
from jettison.types import WorkerId

_HEADER = struct.Struct("<I B x H I I q Q")
"""Magic, kind, length of aux, sequence number, epoch, tag, payload bytes; then MAC, aux, payload."""
_MAGIC = 0x4A545443
_ATTACH = 254
_MAC_BYTES = 16
_MAX_PAYLOAD_BYTES = 1 << 30
_ACTIVATION_FRAMES = 8
_BULK_FRAMES = 2
"""Frames of each class that may wait here unsent: enough to keep the socket busy."""
_HELD_FRAMES = 8
"""Bulk frames that the receiver may hold unreleased before this end stops reading."""
_NOTSENT_LOWAT_BYTES = 256 << 10
_UNCOORDINATED_FRAMES = 64
_RECEIVE_BUFFER_BYTES = 128 << 10
_MIN_SEND_BUFFER_BYTES = 16 << 10


class _Part(Enum):
    """What of a frame is being received; the lengths of the later parts stand in the first."""

    PREFIX = "header and MAC"
    AUX = "aux"
    PAYLOAD = "payload"


class TcpLink(Link):
    """One end, over a connected socket whose peer has proven itself (``sockets``)."""

    def __init__(
        self,
        sock: socket.socket,
        handshake: Handshake,
        *,
        activation_bytes: int = 1 << 20,
        bulk_bytes: int = (1 << 20) + (1 << 16),
        epoch: int = 0,
        coordinate: bool = True,
    ) -> None:
        """``coordinate=False``: one queue for all classes, first come, first served (for comparison only)."""
        self.peer: WorkerId = handshake.peer.worker_id
        self._sock = sock
        self._epoch = epoch
        self._key = handshake.session_key
        self._role, self._their_role = (b"i", b"a") if handshake.is_initiator else (b"a", b"i")
        self._max_payload = (activation_bytes, bulk_bytes)
        self._failure: str | None = None
        self._open = True
        self._attached = False
        self._coordinate = coordinate
        queue: deque[tuple[FrameKind, int, bytes, Bytes]] = deque()
        self._queues = (queue, deque[tuple[FrameKind, int, bytes, Bytes]]() if coordinate else queue)
        self._max_frames = (_ACTIVATION_FRAMES, _BULK_FRAMES) if coordinate else (1 << 16, _UNCOORDINATED_FRAMES)
        self._send_buffer_bytes = 0
        self._half_out: deque[memoryview] = deque()
        """What is left of the frame that is being sent."""
        self._num_sent = self._num_received = 0
        self._held = 0
        self._prefix = bytearray(_HEADER.size + _MAC_BYTES)
        self._head = (0, 0, 0)
        """Kind, tag and payload bytes of the frame being received."""
        self._aux = bytearray()
        self._payload: Bytes = EMPTY
        self._expect(_Part.PREFIX, memoryview(self._prefix))
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if coordinate:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOTSENT_LOWAT_BYTES)
            # What has arrived and was not read stands before an activation, too.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self._half_out.append(memoryview(self._sign(_ATTACH, 0, b"", 0)))
        self._pump()

    # --- sending

    def send_frame(self, kind: FrameKind, tag: int, aux: bytes, nbytes: int, fill: Fill) -> bool:
        check_send(self, kind, tag, aux, nbytes)
        if not self._open:
            raise LinkDownError(f"link to worker {self.peer} is down: {self._failure or 'closed'}")
        queue = self._queues[kind.is_bulk]
        self._pump()
        if len(queue) >= self._max_frames[kind.is_bulk]:
            return False
        payload = np.empty(nbytes, dtype=np.uint8) if nbytes else EMPTY
        if nbytes:
            fill(payload)
        queue.append((kind, tag, bytes(aux), payload))
        self._pump()
        return True

    def _pump(self) -> None:
        """Give the kernel what it takes, activations first at each frame boundary."""
        while self._open:
            if not self._half_out:
                queue = self._queues[0] or self._queues[1]
                if not queue:
                    return
                kind, tag, aux, payload = queue.popleft()
                self._half_out.append(memoryview(self._sign(kind, tag, aux, len(payload))))
                if len(payload):
                    self._half_out.append(payload.data)
            try:
                num_sent = self._sock.sendmsg(list(self._half_out))
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(f"send: {error}")
                return
            while self._half_out and num_sent >= len(self._half_out[0]):
                num_sent -= len(self._half_out.popleft())
            if self._half_out:
                self._half_out[0] = self._half_out[0][num_sent:]

    def _sign(self, kind: int, tag: int, aux: bytes, nbytes: int) -> bytes:
        header = _HEADER.pack(_MAGIC, kind, len(aux), self._num_sent & 0xFFFFFFFF, self._epoch, tag, nbytes)
        self._num_sent += 1
        return header + self._mac(self._role, header, aux) + aux

    def _mac(self, role: bytes, header: bytes, aux: bytes) -> bytes:
        return hashlib.blake2b(header + aux, key=self._key, digest_size=_MAC_BYTES, person=role).digest()

    # --- receiving

    def poll_frames(self) -> Iterator[Frame]:
        self._pump()
        while self._open and self._held < _HELD_FRAMES and self._fill_target():
            frame = self._advance()
            if frame is not None:
                yield frame

    def wait_attached(self, timeout_s: float) -> None:
        """Block until the peer uses this link. Raises LinkDownError."""
        deadline = time.monotonic() + timeout_s
        while not self._attached:
            self._pump()
            while self._open and not self._attached and self._fill_target():
                self._advance()
            if not self._attached:
                if not self._open or time.monotonic() > deadline:
                    raise LinkDownError(f"link to worker {self.peer}: {self._failure or 'the peer is silent'}")
                select.select([self._sock], [], [], max(0.0, deadline - time.monotonic()))

    def _fill_target(self) -> bool:
        """Read until the target is full; whether it is."""
        while self._filled < len(self._target):
            try:
                num_bytes = self._sock.recv_into(self._target[self._filled :])
            except BlockingIOError:
                return False
            except OSError as error:
                self._fail(f"receive: {error}")
                return False
            if num_bytes == 0:
                self._fail("the peer closed the link")
                return False
            self._filled += num_bytes
        return True

    def _advance(self) -> Frame | None:
        """The target is full: go on to the next part; the frame, if that was its last one."""
        try:
            if self._part is _Part.PREFIX:
                self._begin_frame()
            elif self._part is _Part.AUX:
                self._begin_payload()
            else:
                return self._end_frame()
        except ValueError as error:
            self._fail(str(error))
        return None

    def _expect(self, part: _Part, target: memoryview) -> None:
        self._part, self._target, self._filled = part, target, 0

    def _begin_frame(self) -> None:
        magic, kind, aux_len, sequence, epoch, tag, nbytes = _HEADER.unpack_from(self._prefix)
        if magic != _MAGIC or epoch != self._epoch or aux_len > MAX_AUX_BYTES:
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
        # Only now is the length believed.
        self._payload = np.empty(self._head[2], dtype=np.uint8)
        self._expect(_Part.PAYLOAD, memoryview(self._payload.data))

    def _end_frame(self) -> Frame | None:
        kind, tag, _ = self._head
        payload = self._payload
        self._expect(_Part.PREFIX, memoryview(self._prefix))
        if kind == _ATTACH:
            self._attached = True
            return None
        payload.flags.writeable = False
        frame_kind = FrameKind(kind)
        if not frame_kind.is_bulk:
            return Frame(frame_kind, tag, bytes(self._aux), payload)
        self._held += 1
        return Frame(frame_kind, tag, bytes(self._aux), payload, self._give_back)

    def _give_back(self) -> None:
        self._held -= 1

    # --- life

    def max_payload(self, kind: FrameKind) -> int:
        return self._max_payload[kind.is_bulk]

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def failure(self) -> str | None:
        return self._failure

    def limit_unsent(self, num_bytes: int) -> None:
        """Bound the kernel's send buffer, where that changes it by much (it doubles what it is told)."""
        wanted = max(_MIN_SEND_BUFFER_BYTES, num_bytes)
        if self._coordinate and self._open and not wanted / 2 < self._send_buffer_bytes < wanted * 2:
            self._send_buffer_bytes = wanted
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)

    @property
    def wants_write(self) -> bool:
        return self._open and bool(self._half_out or self._queues[0] or self._queues[1])

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        """Frames accepted and not yet sent are lost."""
        self._open = False
        self._sock.close()

    def _fail(self, why: str) -> None:
        if self._open:
            self._failure = why
        self.close()
