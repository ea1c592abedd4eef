"""Opening a link without ever waiting: connect, prove both ends, learn that the peer uses it.

    connecting --proven--> (again, for a second connection) --made--> unconfirmed --the peer's first word--> settled
         '------------------ failed ------------------+-------------------'
                                                      v
              down, or, where the peer may have dialled itself, waiting for its connection

Of two workers that dial each other at once the connection of the lower id stays: the lower one closes the other's. So a
refusal by a lower id is no failure: its own connection is on the way, or the controller will say that it is gone.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator, Sequence

from jettison.errors import LinkDownError
from jettison.transport.handshake import Handshake, HandshakeError, Identity, Purpose
from jettison.transport.link import Fill, Frame, FrameKind, Link
from jettison.transport.shm import ShmLink
from jettison.transport.sockets import check_same_user, parse_address
from jettison.transport.tcp import Connection, TcpLink

_IN_PROGRESS = (errno.EINPROGRESS, errno.EALREADY, errno.EINTR)


class Dialling:
    """One connection on its way. Watch ``fileno``, for room to write while ``is_connecting``; call ``advance``."""

    def __init__(self, address: str, secret: bytes, me: Identity, purpose: Purpose) -> None:
        """Raises OSError, ValueError."""
        scheme, host, port = parse_address(address)
        self._where: str | tuple[str, int] = host if scheme == "unix" else (host, port)
        self._handshake = Handshake(secret, me, purpose, initiator=True)
        self._reply = b""
        self.is_connecting = True
        if scheme == "unix":
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        else:
            family, kind, proto, _, _ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.sock = socket.socket(family, kind, proto)
        self.sock.setblocking(False)

    def advance(self) -> Connection | None:
        """The connection, once both ends are proven. Raises LinkDownError, OSError."""
        if self.is_connecting:
            error = self.sock.connect_ex(self._where)
            if error in _IN_PROGRESS:
                return None
            if error not in (0, errno.EISCONN):
                raise OSError(error, f"cannot connect to {self._where}")
            if self.sock.family == socket.AF_UNIX:
                check_same_user(self.sock)
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
                self.sock.send(self._handshake.feed(self._reply))
        return Connection(self.sock, self._handshake)


class DialledLink(Link):
    """A link that is being opened: it takes no frames and brings none until ``settled`` takes its place."""

    is_opening = True

    def __init__(
        self, address: str, secret: bytes, me: Identity, them: Identity, purposes: Sequence[Purpose],
        make: Callable[..., ShmLink | TcpLink], max_payload: tuple[int, int],
    ) -> None:
        """``make`` turns connections, one for each purpose, into a link that takes ``max_payload`` bytes (of urgent
        frames, of bulk). Never raises: a connection that cannot be is a link that is down."""
        self.peer = them.worker_id
        self._address = address
        self._secret = secret
        self._me = me
        self._them = them
        self._purposes = list(purposes)
        self._make = make
        self._max_payload = max_payload
        self.queues_bulk = not address.startswith("unix:")
        self._connections: list[Connection] = []
        self._dialling: Dialling | None = None
        self._made: ShmLink | TcpLink | None = None
        self._failure: str | None = None
        self._open = True
        self._waits = False
        """The peer has refused; its own connection comes, or its end is told."""
        self._advance()

    def _advance(self) -> None:
        """As far as it goes now."""
        if not self._open or self._waits or self.settled is not None:
            return
        try:
            while self._made is None:
                if self._dialling is None:
                    purpose = self._purposes[len(self._connections)]
                    self._dialling = Dialling(self._address, self._secret, self._me, purpose)
                connection = self._dialling.advance()
                if connection is None:
                    return
                if connection.handshake.peer != self._them:
                    raise LinkDownError(f"{connection.handshake.peer} answers in the place of {self._them}")
                self._connections.append(connection)
                self._dialling = None
                if len(self._connections) == len(self._purposes):
                    self._made = self._make(*self._connections)
            if self._made.attached():
                self.settled = self._made
            elif not self._made.is_open:
                raise LinkDownError(self._made.failure or "closed")
        except (LinkDownError, OSError, ValueError) as error:
            self._hang_up()
            self._waits = self._them.worker_id < self._me.worker_id
            if not self._waits:
                self._failure, self._open = f"{self._address}: {error}", False

    def send_frame(self, kind: FrameKind, tag: int, aux: bytes, nbytes: int, fill: Fill) -> bool:
        if not self._open:
            raise LinkDownError(f"link to worker {self.peer} is down: {self._failure or 'closed'}")
        return False

    def poll_frames(self) -> Iterator[Frame]:
        self._advance()
        return iter(())

    def max_payload(self, kind: FrameKind) -> int:
        return self._max_payload[kind.is_bulk]

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def wants_write(self) -> bool:
        return self._dialling is not None and self._dialling.is_connecting

    def fileno(self) -> int:
        if self._made is not None:
            return self._made.fileno()
        return -1 if self._dialling is None else self._dialling.sock.fileno()

    def close(self) -> None:
        self._open = False
        self._hang_up()

    def _hang_up(self) -> None:
        """Close what there is of it, unless the settled link has taken its place."""
        if self.settled is not None:
            return
        if self._made is not None:
            self._made.close()
        elif self._dialling is not None:
            self._dialling.sock.close()
        for connection in self._connections:
            connection.sock.close()
        self._dialling = self._made = None
