"""Opening a link without ever waiting: connect, prove both ends, learn that the peer uses it.

    connecting --all connections proven--> unconfirmed --the peer's first word--> settled
      ^    '------------- failed -------------'
      |                     v
      '--after a pause-- refused --for too long--> down

Of two workers that dial each other at once the connection of the lower id stays: the lower one closes the other's. So
a hang-up by a lower id mostly says that its own connection is on the way, and the pause after it is longer.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from jettison.errors import LinkDownError
from jettison.transport.handshake import Handshake, HandshakeError, Identity, Purpose
from jettison.transport.link import Fill, Frame, FrameKind, Link
from jettison.transport.pacing import Alarm
from jettison.transport.shm import ShmLink
from jettison.transport.sockets import check_same_user, parse_address, tend
from jettison.transport.tcp import Connection, TcpLink
from jettison.transport.tls import Credentials, Wire, check_name

log = logging.getLogger(__name__)

_IN_PROGRESS = (errno.EINPROGRESS, errno.EALREADY, errno.EINTR)
_NUM_SYN_RETRIES = 3
"""A host that does not answer at all counts as a refusal after about 15 s, not after Linux's two minutes."""
PAUSE_NS = 200_000_000
"""After a refusal, before the peer is dialled again."""
AWAIT_NS = 1_000_000_000
"""After a hang-up by a peer of a lower id, whose own connection is expected meanwhile."""
PATIENCE_NS = 10_000_000_000
"""Of pauses together, before a link is given up; a host that does not answer at all is tried twice. A connected peer
may be as slow to answer as it likes: it does not answer while it computes."""


class Dialling:
    """One connection on its way. Watch ``sock``, for room to write while ``is_connecting``; call ``advance``."""

    def __init__(self, address: str, own: Credentials, purpose: Purpose) -> None:
        """Raises OSError, ValueError."""
        self._tls = own.tls
        scheme, host, port = parse_address(address)
        self._where: str | tuple[str, int] = host if scheme == "unix" else (host, port)
        self._handshake = Handshake(own.secret, own.me, purpose, initiator=True)
        self._reply = b""
        self.is_connecting = True
        if scheme == "unix":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        else:
            family, kind, proto, _, _ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, proto)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, _NUM_SYN_RETRIES)
            tend(sock)
        sock.setblocking(False)
        self._plain = sock
        self.sock: Wire = sock

    def advance(self) -> Connection | None:
        """The connection, once both ends are proven (and from then on). Raises LinkDownError, OSError."""
        if self.is_connecting:
            error = self._plain.connect_ex(self._where)
            if error in _IN_PROGRESS:
                return None
            if error not in (0, errno.EISCONN):
                raise OSError(error, f"cannot connect to {self._where}")
            if self._plain.family == socket.AF_UNIX:
                check_same_user(self._plain)
            elif self._tls is not None:
                self.sock = self._tls.wrap(self._plain, accepts=False)
            self.is_connecting = False
            self.sock.send(self._handshake.first())
        while not self._handshake.done:
            try:
                part = self.sock.recv(self._handshake.needed - len(self._reply))
            except BlockingIOError:
                return None
            if not part:
                raise HandshakeError("the peer hung up")
            self._reply += part
            if len(self._reply) == self._handshake.needed:
                check = self._handshake.feed(self._reply)
                check_name(self.sock, self._handshake.peer)
                self.sock.send(check)
        return Connection(self.sock, self._handshake)


class _Bell:
    """One descriptor for all that a link waits for, whatever the try: sockets, and the end of a pause."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._epoll = select.epoll()
        try:
            self._alarm = Alarm()
        except OSError:
            self._epoll.close()
            raise
        self._epoll.register(self._alarm.fd, select.EPOLLIN)
        self.fileno = self._epoll.fileno
        self.ring_after = self._alarm.set

    def watch(self, fd: int, mask: int) -> None:
        """Wait for this of ``fd``, and for nothing else of it; 0: for nothing at all."""
        with contextlib.suppress(FileNotFoundError):
            self._epoll.unregister(fd)
        if mask:
            self._epoll.register(fd, mask)

    def close(self) -> None:
        """Once."""
        self._epoll.close()
        self._alarm.close()


class DialledLink(Link):
    """A link that is being opened: it takes no frames and brings none until ``settled`` takes its place."""

    is_opening = True

    def __init__(
        self, address: str, own: Credentials, them: Identity, purposes: Sequence[Purpose],
        make: Callable[..., ShmLink | TcpLink], max_payload: tuple[int, int],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``make`` turns connections, one for each purpose, into a link that takes ``max_payload`` bytes (of urgent
        frames, of bulk). Never raises: without a descriptor to wait with it is down."""
        self.peer = them.worker_id
        self._address = address
        self._own = own
        self._them = them
        self._purposes = list(purposes)
        self._make = make
        self._max_payload = max_payload
        self._clock_ns = clock_ns
        self.queues_bulk = not address.startswith("unix:")
        self._dials: list[Dialling] = []
        """Of this try, one for each purpose; none in a pause."""
        self._made: ShmLink | TcpLink | None = None
        self._failure: str | None = None
        self._patience_ns = PATIENCE_NS
        self._resumes_ns: int | None = None
        """When a pause is over."""
        self._bell: _Bell | None = None
        """None: the link is down."""
        try:
            self._bell = _Bell()
        except OSError as error:
            self._failure = str(error)
        self._advance()

    def _advance(self) -> None:
        """As far as it goes now."""
        bell = self._bell
        if bell is None or self.settled is not None:
            return
        if self._resumes_ns is not None:
            if self._clock_ns() < self._resumes_ns:
                return
            self._resumes_ns = None
            bell.ring_after(0)
        try:
            self._try(bell)
        except (LinkDownError, OSError, ValueError) as error:
            self._refused(bell, error)

    def _try(self, bell: _Bell) -> None:
        """Raises LinkDownError, OSError, ValueError."""
        if self._made is None:
            connections = self._dialled(bell)
            if len(connections) < len(self._purposes):
                return
            self._made = self._make(*connections)
        if self._made.attached():
            self.settled = self._made
        elif not self._made.is_open:
            raise LinkDownError(self._made.failure or "closed")
        else:
            bell.watch(self._made.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._made.wants_write else 0))

    def _dialled(self, bell: _Bell) -> list[Connection]:
        """Those that are proven by now, of all purposes: the dials do not wait for each other."""
        for purpose in self._purposes[len(self._dials) :]:
            self._dials.append(Dialling(self._address, self._own, purpose))
        connections = []
        for dial in self._dials:
            connection = dial.advance()
            if connection is None:
                bell.watch(dial.sock.fileno(), select.EPOLLOUT if dial.is_connecting else select.EPOLLIN)
                continue
            if connection.handshake.peer != self._them:
                raise LinkDownError(f"{connection.handshake.peer} answers in the place of {self._them}")
            bell.watch(dial.sock.fileno(), 0)
            connections.append(connection)
        return connections

    def _refused(self, bell: _Bell, error: Exception) -> None:
        """Dial again after a pause, or give up."""
        now_ns, is_first = self._clock_ns(), self._patience_ns == PATIENCE_NS
        is_hang_up = any(not dial.is_connecting for dial in self._dials)
        self._hang_up()
        pause_ns = AWAIT_NS if is_hang_up and self.peer < self._own.me.worker_id else PAUSE_NS
        # Only pauses, and silence that the kernel tells of: this worker may have computed while it was refused.
        self._patience_ns -= PATIENCE_NS // 2 if isinstance(error, TimeoutError) else pause_ns
        if self._patience_ns <= 0:
            self._failure = f"{self._address}: {error}"
            self.close()
            return
        if is_first:
            log.info("link to worker %d: %s: %s; it is dialled again", self.peer, self._address, error)
        self._resumes_ns = now_ns + pause_ns
        bell.ring_after(pause_ns)

    def send_frame(self, kind: FrameKind, tag: int, aux: bytes, nbytes: int, fill: Fill) -> bool:
        if self._bell is None:
            raise LinkDownError(f"link to worker {self.peer} is down: {self._failure or 'closed'}")
        return False

    def poll_frames(self) -> Iterator[Frame]:
        self._advance()
        return iter(())

    def max_payload(self, kind: FrameKind) -> int:
        return self._max_payload[kind.is_bulk]

    @property
    def is_open(self) -> bool:
        return self._bell is not None

    @property
    def failure(self) -> str | None:
        return self._failure

    def fileno(self) -> int:
        return -1 if self._bell is None else self._bell.fileno()

    def close(self) -> None:
        """Also where ``settled`` has taken its place, which lives on."""
        bell, self._bell = self._bell, None
        if bell is not None:
            self._hang_up()
            bell.close()

    def _hang_up(self) -> None:
        """Close what there is of this try, unless the settled link has taken its place."""
        if self.settled is not None:
            return
        if self._made is not None:
            self._made.close()
        for dial in self._dials:
            dial.sock.close()
        self._dials.clear()
        self._made = None
