"""Link between workers of different machines, over two TCP connections (``tls``): one for urgent frames, one for bulk.

No frame overtakes bytes that a socket has taken. On a slow link that is seconds' worth, so activations and remote
attention have a connection of their own, marked so that this host's queue puts its packets first (every queue that
Linux gives an interface by itself honours that, or gives small flows their share). Bytes in other queues on the way
cannot be overtaken even so; therefore the send buffer of bulk is bounded, too (``limit_unsent``): to what the wire
itself holds, its rate times its delay, and a piece. The receive buffer is the kernel's to choose, which lets it grow to
twice what comes in a round trip; a fixed one would cap the rate at its size a round trip.

With one connection (``urgent=None``) both classes share it: urgent frames go first whenever no frame is half out.

An end may have a limit on the bytes that it sends a second (``transport.pacing``), both connections together.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jettison.errors import LinkDownError
from jettison.transport.frames import FrameStream, WireFrame
from jettison.transport.handshake import Handshake
from jettison.transport.link import EMPTY, Fill, Frame, FrameKind, Link, check_send
from jettison.transport.pacing import Alarm, Pacer
from jettison.transport.tls import TlsSocket, Wire
from jettison.types import WorkerId

_ACTIVATION_FRAMES = 8
_BULK_FRAMES = 2
"""Frames of each class that may wait here unsent: enough to keep the socket busy."""
_HELD_FRAMES = 8
"""Bulk frames that the receiver may hold unreleased before this end stops reading."""
_NOTSENT_LOWAT_BYTES = 256 << 10
_UNCOORDINATED_FRAMES = 64
_RECEIVE_BUFFER_BYTES = 128 << 10
_MIN_SEND_BUFFER_BYTES = 16 << 10
_SAME_BUFFER = 8
"""Send buffers that differ by less than one part in so many are the same. A buffer that is the bottleneck has to grow:
what it lets through in a round trip, and a piece, is more than that above it."""
_WIRE_SHARE = 0.75
"""The kernel doubles a buffer's size for what it keeps of each packet besides. That is little of large ones, so this
holds what is on the wire even where it is a half, and beyond it no more than a half of that waits."""
_TCP_INFO_BYTES, _BYTES_ACKED_AT, _MIN_RTT_AT = 152, 120, 148
"""Of ``struct tcp_info`` in linux/tcp.h: tcpi_bytes_acked, and tcpi_min_rtt in microseconds."""
_NO_RTT = 0xFFFFFFFF
_MIN_WINDOW_NS, _ROUND_TRIPS, _FADING = 10_000_000, 2, 0.9
"""Of a rate: a window's least time, the round trips in it, and what is left of an older rate after each."""
_PRIORITY_INTERACTIVE, _PRIORITY_BULK = 6, 2
"""TC_PRIO_INTERACTIVE and TC_PRIO_BULK of linux/pkt_sched.h."""


class Connection(NamedTuple):
    """A socket with a proven other end."""

    sock: Wire
    handshake: Handshake


class WireContent:
    """What a connection's wire holds: the best rate of late times the shortest round trip. Rates are taken over several
    round trips: what the kernel says of the last acknowledgements is several times too much where they come in bursts.
    """

    def __init__(self) -> None:
        self.num_bytes = 0.0
        self._bytes_per_ns = 0.0
        self._since_ns = self._last_ns = 0
        self._acked = 0

    def note(self, acked: int, min_rtt_us: int, now_ns: int) -> None:
        """So many bytes have been acknowledged in all. To be called whenever something is sent."""
        if min_rtt_us == _NO_RTT:
            return
        window_ns = max(_MIN_WINDOW_NS, _ROUND_TRIPS * 1000 * min_rtt_us)
        was_idle, self._last_ns = now_ns - self._last_ns > window_ns, now_ns
        passed_ns = now_ns - self._since_ns
        if not was_idle and passed_ns < window_ns:
            return
        if not was_idle:  # a time without anything to send says nothing of the wire
            self._bytes_per_ns = max((acked - self._acked) / passed_ns, _FADING * self._bytes_per_ns)
        self._since_ns, self._acked = now_ns, acked
        self.num_bytes = self._bytes_per_ns * 1000 * min_rtt_us


class TcpLink(Link):
    """One end, over connected sockets with a proven peer (``sockets``)."""

    def __init__(
        self,
        sock: Wire,
        handshake: Handshake,
        urgent: Connection | None = None,
        *,
        activation_bytes: int = 1 << 20,
        bulk_bytes: int = (1 << 20) + (1 << 16),
        coordinate: bool = True,
        pacer: Pacer | None = None,
    ) -> None:
        """``coordinate=False``: one queue for all classes, first come, first served (for comparison only). ``pacer``:
        limits the rate at which this end sends.

        Raises ValueError when the two connections do not lead to the same life of the same peer.
        """
        if urgent is not None and (not coordinate or urgent.handshake.peer != handshake.peer):
            raise ValueError("two connections to two peers, or for one queue")
        self.peer: WorkerId = handshake.peer.worker_id
        self._max_payload = (activation_bytes, bulk_bytes)
        self._failure: str | None = None
        self._open = True
        self._coordinate = coordinate
        shared: deque[WireFrame] = deque()
        self._queues = (shared, deque[WireFrame]() if coordinate else shared)
        """By ``FrameKind.is_bulk``."""
        self._max_frames = (_ACTIVATION_FRAMES, _BULK_FRAMES) if coordinate else (1 << 16, _UNCOORDINATED_FRAMES)
        self._send_buffer_bytes = 0
        self._wire = WireContent()
        self._is_attached = False
        """All connections are."""
        self._is_read = False
        """Frames are asked for: from then on all that has come is to be told of."""
        self._held = 0
        self._pacer = pacer
        self._alarm: Alarm | None = None
        """Rings when the pacer allows more, and where bytes wait that no socket tells of."""
        self._epoll: select.epoll | None = None
        self._watched: dict[int, int] = {}
        if coordinate:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _NOTSENT_LOWAT_BYTES)
        if urgent is None:
            if coordinate:  # bytes that have arrived and are not read stand before an activation, too
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            self._bulk = self._urgent = FrameStream(sock, handshake, self._queues, pacer)
            self._streams = [self._bulk]
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _PRIORITY_BULK)
            urgent.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _PRIORITY_INTERACTIVE)
            self._urgent = FrameStream(*urgent, self._queues[:1], pacer)
            self._bulk = FrameStream(sock, handshake, self._queues[1:], pacer)
            self._streams = [self._urgent, self._bulk]
        is_encrypted = isinstance(sock, TlsSocket)
        if urgent is not None or pacer is not None or is_encrypted:
            self._epoll = select.epoll()
        if (pacer is not None or is_encrypted) and self._epoll is not None:
            self._alarm = Alarm()
            self._epoll.register(self._alarm.fd, select.EPOLLIN)
        self._watch()

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
        queue.append(WireFrame(kind, tag, bytes(aux), payload))
        self._pump()
        return True

    def _pump(self) -> None:
        if self._open:
            for stream in self._streams:
                stream.pump()
            self._check()

    def _check(self) -> None:
        """Close when a connection has failed; else bring the epoll set up to date."""
        failure = next((s.failure for s in self._streams if s.failure is not None), None)
        if failure is not None:
            self._failure = self._failure or failure
            self.close()
        self._watch()

    def _watch(self) -> None:
        """Bring the epoll set up to date."""
        if self._epoll is None or not self._open:
            return
        has_unread = False
        for stream in self._streams:
            fd = stream.sock.fileno()
            reads = stream is not self._bulk or self._held < _HELD_FRAMES
            # Of a link that opens, only what shows that the peer uses it is read; the rest waits for the other half.
            has_unread |= reads and stream.has_unread and (self._is_attached or self._is_read or not stream.attached)
            mask = (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if stream.wants_write else 0)
            if fd not in self._watched:
                self._epoll.register(fd, mask)
            elif self._watched[fd] != mask:
                self._epoll.modify(fd, mask)
            self._watched[fd] = mask
        if self._alarm is not None:
            is_paced = self._pacer is not None and any(stream.is_paced for stream in self._streams)
            self._alarm.set(1 if has_unread else self._pacer.wait_ns() if is_paced and self._pacer else 0)

    # --- receiving

    def poll_frames(self) -> Iterator[Frame]:
        self._is_read = True
        self._pump()
        if not self._open:
            return
        try:
            if self._urgent is not self._bulk:
                yield from self._received(self._urgent)
            yield from self._received(self._bulk)
        finally:  # also where the caller has had enough: what it has not read may be in no socket
            if self._open:
                self._check()

    def _received(self, stream: FrameStream) -> Iterator[Frame]:
        while self._open and (stream is not self._bulk or self._held < _HELD_FRAMES):
            frame = stream.next_frame()
            if frame is None:
                return
            if frame.kind.is_bulk:
                self._held += 1
                yield Frame(*frame, self._give_back)
            else:
                yield Frame(*frame)

    def _give_back(self) -> None:
        self._held -= 1
        if self._held == _HELD_FRAMES - 1:
            self._watch()

    def wait_attached(self, timeout_s: float) -> None:
        """Block until the peer uses this link. Raises LinkDownError."""
        deadline = time.monotonic() + timeout_s
        while not self.attached():
            if not self._open or time.monotonic() > deadline:
                raise LinkDownError(f"link to worker {self.peer}: {self._failure or 'the peer is silent'}")
            silent = [stream.sock for stream in self._streams if not stream.attached]
            select.select(silent, [], [], max(0.0, deadline - time.monotonic()))

    def attached(self) -> bool:
        """Whether the peer uses this link, by what has come of it; frames behind its first word wait."""
        self._pump()
        for stream in self._streams:
            if self._open and not stream.attached:
                stream.await_attach()
                self._check()
        if not self._is_attached and all(stream.attached for stream in self._streams):
            self._is_attached = True
            self._watch()
        return self._is_attached

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
        """Bound the kernel's send buffer to so much beyond what is on the wire, where that changes it (the kernel
        doubles the given size, for what it keeps of each packet besides)."""
        if not self._coordinate or not self._open:
            return
        info = self._bulk.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) == _TCP_INFO_BYTES:
            (acked,), (min_rtt_us,) = (struct.unpack_from("=Q", info, _BYTES_ACKED_AT),
                                       struct.unpack_from("=I", info, _MIN_RTT_AT))  # fmt: skip
            self._wire.note(acked, min_rtt_us, time.monotonic_ns())
        wanted = max(_MIN_SEND_BUFFER_BYTES, num_bytes) + int(_WIRE_SHARE * self._wire.num_bytes)
        if abs(wanted - self._send_buffer_bytes) * _SAME_BUFFER > self._send_buffer_bytes:
            self._send_buffer_bytes = wanted
            self._bulk.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, wanted)

    @property
    def wants_write(self) -> bool:
        # With two connections the epoll set says so itself.
        return self._open and self._epoll is None and self._bulk.wants_write

    def fileno(self) -> int:
        if not self._open:
            return -1
        return self._bulk.sock.fileno() if self._epoll is None else self._epoll.fileno()

    def close(self) -> None:
        """Close the link. Frames accepted and not yet sent are lost."""
        self._open = False
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.callback(stream.sock.close)
            if self._epoll is not None:
                stack.callback(self._epoll.close)
            if self._alarm is not None:
                stack.callback(self._alarm.close)
                self._alarm = None
