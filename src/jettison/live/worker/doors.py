"""A worker's sockets for links: where peers connect, and how it connects to them. Nothing here waits.

The address says which kind of link it will be: a Unix socket opens one through shared memory, inside a host; TCP opens
one over a network, with a second connection for what is urgent. Whether a peer is wanted is for ``peers`` to say.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import time
from collections.abc import Callable, Sequence

from jettison.errors import LinkDownError
from jettison.live.wire.messages import PeerAddress
from jettison.transport.dialling import DialledLink
from jettison.transport.handshake import Identity, Purpose
from jettison.transport.link import Link
from jettison.transport.pacing import Alarm, Pacer
from jettison.transport.shm import Pin, ShmLink, SlotGeometry
from jettison.transport.sockets import Acceptor
from jettison.transport.tcp import Connection, TcpLink
from jettison.transport.tls import Credentials, Wire

log = logging.getLogger(__name__)

_PAGE = 4096
PATIENCE_S = 300.0
"""For how long a connecting peer may say nothing, once it has shown its certificate. It serves no link while it
computes: as long as a step may take (``worker_step_timeout``'s default)."""
_ACTIVATION_BYTES = SlotGeometry().activation_bytes


class Doors:
    """One worker's. Owns the listening sockets; links belong to the caller, which closes them."""

    def __init__(
        self, listeners: Sequence[socket.socket], own: Credentials, *, bulk_bytes: int, coordinate: bool,
        bytes_per_s: float | None, clock_ns: Callable[[], int] = time.monotonic_ns, pin: Pin | None = None,
    ) -> None:
        """``bulk_bytes``: the most a bulk frame has. ``coordinate=False``: one connection for all, over a network (for
        comparison only). ``bytes_per_s``: what is sent over each link to another host at most; None: no limit.
        ``pin``: for shared memory (``Device.pin``)."""
        self._pin = pin
        self._own = own
        self._geometry = SlotGeometry(bulk_bytes=-(-bulk_bytes // _PAGE) * _PAGE)
        self._bulk_bytes = bulk_bytes
        self._coordinate = coordinate
        self._bytes_per_s = bytes_per_s
        self._clock_ns = clock_ns
        urgent = frozenset({Purpose.URGENT}) if coordinate else frozenset()
        self._acceptors = [
            Acceptor(
                sock, own.secret, own.me, Purpose.LINK, frozenset() if sock.family == socket.AF_UNIX else urgent,
                PATIENCE_S, lambda: clock_ns() / 1e9, own.tls,
            )
            for sock in listeners
        ]
        self._halves: dict[tuple[Identity, Purpose], Connection] = {}
        """Accepted connections whose other half has not come."""
        self._epoll = select.epoll()
        self._retry = Alarm()
        self._epoll.register(self._retry.fd, select.EPOLLIN)
        self._watch()

    wants_write = False

    def fileno(self) -> int:
        """Readable when ``accept`` has something to do."""
        return self._epoll.fileno()

    @property
    def is_opening(self) -> bool:
        """Whether a peer is connecting. Many strangers are not taken for peers."""
        return any(acceptor.has_pending for acceptor in self._acceptors)

    def dial(self, peer: PeerAddress) -> Link:
        """A link that opens by itself, as it is polled."""
        is_near = peer.address.startswith("unix:")
        purposes = [Purpose.LINK, Purpose.URGENT][: 2 if self._coordinate and not is_near else 1]
        bulk_bytes = self._geometry.bulk_bytes if is_near else self._bulk_bytes
        return DialledLink(
            peer.address, self._own, Identity(peer.worker_id, peer.life), purposes,
            self._make, (_ACTIVATION_BYTES, bulk_bytes), self._clock_ns,
        )

    def accept(self, is_wanted: Callable[[Identity], bool]) -> list[tuple[Link, int]]:
        """Links that are complete now, with the life of each peer. A peer that is not wanted is hung up on."""
        links: list[tuple[Link, int]] = []
        for acceptor in self._acceptors:
            for sock, handshake in acceptor.poll():
                with contextlib.suppress(FileNotFoundError):  # proven at once: it never waited
                    self._epoll.unregister(sock.fileno())
                if _is_hung_up(sock) or not is_wanted(handshake.peer):
                    log.info("a connection of %s is not wanted", handshake.peer)
                    sock.close()
                    continue
                connections = self._matched(Connection(sock, handshake))
                if not connections:
                    continue
                try:
                    links.append((self._make(*connections), handshake.peer.epoch))
                except (LinkDownError, OSError) as error:
                    log.warning("a connection of %s makes no link: %s", handshake.peer, error)
                    for connection in connections:
                        connection.sock.close()
        self._watch()
        return links

    def close(self) -> None:
        """Take no more connections. Idempotent."""
        for acceptor in self._acceptors:
            acceptor.close()
        for half in self._halves.values():
            half.sock.close()
        self._halves.clear()
        if not self._epoll.closed:
            self._epoll.close()
            self._retry.close()

    def _matched(self, half: Connection) -> list[Connection]:
        """All connections of a link, if this is the last one of them; else it is kept until the other one comes."""
        if half.sock.family == socket.AF_UNIX or not self._coordinate:
            return [half]
        peer = half.handshake.peer
        for key, old in list(self._halves.items()):
            if key[0].worker_id == peer.worker_id and (key[0] != peer or _is_hung_up(old.sock)):
                self._halves.pop(key).sock.close()  # what an older life has left, or a try that failed
        replaced = self._halves.pop((peer, half.handshake.purpose), None)
        if replaced is not None:
            replaced.sock.close()
        self._halves[peer, half.handshake.purpose] = half
        both = [(peer, Purpose.LINK), (peer, Purpose.URGENT)]
        return [self._halves.pop(key) for key in both] if all(key in self._halves for key in both) else []

    def close_halves(self, is_wanted: Callable[[Identity], bool]) -> None:
        """Hang up on peers whose other half would not be wanted any more. To be called whenever that may have changed.
        """
        for key in [key for key in self._halves if not is_wanted(key[0])]:
            self._halves.pop(key).sock.close()

    def _make(self, bulk: Connection, urgent: Connection | None = None) -> ShmLink | TcpLink:
        if isinstance(bulk.sock, socket.socket) and bulk.sock.family == socket.AF_UNIX:
            return ShmLink(bulk.sock, bulk.handshake, self._geometry, pin=self._pin)
        rate = self._bytes_per_s
        return TcpLink(
            *bulk, urgent, bulk_bytes=self._bulk_bytes, coordinate=self._coordinate,
            pacer=None if rate is None else Pacer(rate),
        )

    def _watch(self) -> None:
        """Bring the epoll set up to date; closed descriptors have left it by themselves."""
        pauses_ns = []
        for acceptor in self._acceptors:
            fds = acceptor.filenos()
            pause_s = acceptor.pause_s
            pauses_ns.append(math.ceil(1e9 * pause_s))
            if pause_s:
                with contextlib.suppress(FileNotFoundError):
                    self._epoll.unregister(fds.pop(0))
            for fd in fds:
                with contextlib.suppress(FileExistsError):
                    self._epoll.register(fd, select.EPOLLIN)
        self._retry.set(min(filter(None, pauses_ns), default=0))


def _is_hung_up(sock: Wire) -> bool:
    """Whether the peer has closed its end, whatever it sent before."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))
