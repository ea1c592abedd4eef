"""Connecting and accepting: sockets with a proven other end, for links of any kind.

Addresses are ``unix:<path>`` (one machine) or ``tcp:<host>:<port>``. A Unix socket's folder must be private
(0700) and its peer must have this process's user id; TCP binds to the interface it is given, never to all.
"""

from __future__ import annotations

import math
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jettison.errors import OUT_OF_DESCRIPTORS, LinkDownError
from jettison.transport.handshake import HANDSHAKE_TIMEOUT_S, Handshake, HandshakeError, Identity, Purpose
from jettison.transport.tls import TlsContexts, TlsSocket, Wire, check_name

_MAX_PENDING = 256
"""Connections that wait to be proven: two of every peer, and strangers where no certificate tells these apart."""
_PAUSE_S = 0.01
"""Between two strangers: a hundred handshakes of TLS a second take 4 % of the thread that computes steps."""
_BURST = 64
"""Strangers that are taken without a pause after a time without any. Peers are strangers until they have shown a
certificate, and many come at once when a cluster starts."""
_MAX_STRANGERS = 128
"""At once; where more come, the oldest goes, which has had a second or more to show a certificate."""
_FEW_STRANGERS = 8
"""So many are taken for peers that will show one: looking after them between layers costs little, and a link opens
within the step in which it is dialled."""
_SHOW_S = 2 * HANDSHAKE_TIMEOUT_S
"""Until a certificate is shown, from when a connection is taken, and once more from its first word."""
_RETRY_S = 0.2
"""Until a connection for which there was no descriptor is looked at again."""
_IDLE_S = 60
"""Of a quiet connection, until the kernel asks whether the other end is there, and between two such questions."""
_GONE_S = 330
"""Leases tell of a lost host long before; this ends what nothing tells of. Linux counts a full window as well, which a
worker may leave unread for as long as a unit of its work may take (``--worker-step-timeout``: 300 s by default)."""
_UCRED = struct.Struct("iII")


def parse_address(address: str) -> tuple[str, str, int]:
    """``("unix", path, 0)`` or ``("tcp", host, port)``. Raises ValueError."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        return "unix", rest, 0
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdigit():
        return "tcp", host.strip("[]"), int(port)
    raise ValueError(f"{address!r} is neither unix:<path> nor tcp:<host>:<port>")


def listening_socket(address: str, *, seqpacket: bool = False) -> socket.socket:
    """A bound, listening, non-blocking socket. Raises ValueError, OSError."""
    scheme, host, port = parse_address(address)
    if scheme == "unix":
        _check_private(os.path.dirname(host) or ".")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if seqpacket else socket.SOCK_STREAM)
        sock.bind(host)
        os.chmod(host, 0o600)
    else:
        if host in ("", "0.0.0.0", "::", "*"):
            raise ValueError(f"refusing to listen on every interface ({address}): name one")
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
    sock.listen(_MAX_PENDING)
    sock.setblocking(False)
    return sock


def tend(sock: socket.socket | Wire) -> None:
    """What a connection over a network is to be like at either end: small messages go at once, and one whose other end
    has gone without a word ends. A Unix socket is left alone. Raises OSError."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _GONE_S)


def connect(
    address: str,
    secret: bytes,
    me: Identity,
    purpose: Purpose,
    *,
    seqpacket: bool = False,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> tuple[socket.socket, Handshake]:
    """Connect and prove both ends; blocks, retrying while no peer listens yet. Raises LinkDownError."""
    deadline = time.monotonic() + timeout_s
    scheme, host, port = parse_address(address)
    while True:
        try:
            if scheme == "unix":
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if seqpacket else socket.SOCK_STREAM)
                sock.settimeout(timeout_s)
                sock.connect(host)
                check_same_user(sock)
            else:
                sock = socket.create_connection((host, port), timeout_s)
            break
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            sock.close() if scheme == "unix" else None
            if time.monotonic() > deadline:
                raise LinkDownError(f"no peer listens at {address}: {error}") from None
            time.sleep(0.005)
        except OSError as error:
            raise LinkDownError(f"cannot connect to {address}: {error}") from None
    try:
        return sock, _prove(sock, secret, me, purpose)
    except (OSError, HandshakeError) as error:
        sock.close()
        raise LinkDownError(f"handshake with {address} failed: {error}") from None


def _prove(sock: socket.socket, secret: bytes, me: Identity, purpose: Purpose) -> Handshake:
    handshake = Handshake(secret, me, purpose, initiator=True)
    sock.sendall(handshake.first())
    reply = b""
    while len(reply) < handshake.needed:
        part = sock.recv(handshake.needed - len(reply))
        if not part:
            raise HandshakeError("the peer hung up")
        reply += part
    sock.sendall(handshake.feed(reply))
    return handshake


def check_same_user(sock: socket.socket) -> None:
    """The peer of a Unix socket runs as this user. Raises LinkDownError."""
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid != os.getuid():
        raise LinkDownError(f"the peer runs as user {uid}")


def _check_private(folder: str) -> None:
    info = os.stat(folder)
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise ValueError(f"{folder} must belong to this user with mode 0700: sockets in it open the cluster")


def _readable(socks: Iterable[Wire]) -> set[int]:
    """The descriptors of those that have something new."""
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLIN)
    return {fd for fd, _ in poll.poll(0)}


@dataclass(slots=True)
class _Pending:
    sock: Wire
    handshake: Handshake
    deadline: float
    is_stranger: bool
    """It is to show a certificate, and has not yet."""
    has_spoken: bool = False
    received: bytearray = field(default_factory=bytearray)


class Acceptor:
    """It takes connections without ever blocking on one: watch ``filenos()``, call ``poll``.

    A peer that stays silent is dropped after ``timeout_s``, counted from the last that it said; the oldest goes before
    that where there are too many, or no descriptor is left for the next. A peer of an older epoch than one seen is
    refused, so a worker that was declared dead cannot come back in the place of its successor.

    Where TLS is spoken, all that reaches the port can connect. There a connection is a stranger until it has shown a
    certificate: strangers are taken at a bounded pace, are few, have seconds, and never cost a peer its place.
    """

    def __init__(
        self, sock: socket.socket, secret: bytes, me: Identity, purpose: Purpose,
        also: frozenset[Purpose] = frozenset(), timeout_s: float = HANDSHAKE_TIMEOUT_S,
        clock_s: Callable[[], float] = time.monotonic, tls: TlsContexts | None = None,
    ) -> None:
        """``also``: further purposes for which connections are taken. ``tls``: of connections over TCP; None: they are
        not encrypted."""
        self.tls = tls
        self._timeout_s = timeout_s
        self._clock_s = clock_s
        self._also = also
        self._sock = sock
        self._secret = secret
        self._me = me
        self._purpose = purpose
        self._pending: list[_Pending] = []
        """The oldest first."""
        self._epochs: dict[int, int] = {}
        self._has_strangers = tls is not None and sock.family != socket.AF_UNIX
        self._takes_from_s = -math.inf
        """When the next connection may be taken."""
        self.lacks_descriptor = False
        """A connection waits until this process has a descriptor for it: the listening one stays readable."""

    def filenos(self) -> list[int]:
        """Descriptors to watch for readability: the listening one first."""
        return [self._sock.fileno(), *(pending.sock.fileno() for pending in self._pending)]

    @property
    def has_pending(self) -> bool:
        """Whether a peer is about to prove itself. Many strangers are not taken for peers."""
        num_strangers = sum(pending.is_stranger for pending in self._pending)
        return len(self._pending) > num_strangers or 0 < num_strangers <= _FEW_STRANGERS

    @property
    def pause_s(self) -> float:
        """For how long no connection is taken: the listening descriptor stays readable meanwhile, and is not to be
        watched. 0: it is."""
        return _RETRY_S if self.lacks_descriptor else max(0.0, self._takes_from_s - self._clock_s())

    def poll(self) -> list[tuple[Wire, Handshake]]:
        """Non-blocking sockets with a peer that has proven itself since the last call."""
        proven = self._hear()  # first: what has come of a peer counts, however long ago this was last called
        if self._accept():
            proven += self._hear()
        return proven

    def _hear(self) -> list[tuple[Wire, Handshake]]:
        """Those that have proven themselves now; those that have failed, or been silent for too long, are gone."""
        proven: list[tuple[Wire, Handshake]] = []
        waiting: list[_Pending] = []
        speaking = _readable(pending.sock for pending in self._pending)
        for pending in self._pending:
            try:
                if pending.sock.fileno() in speaking and self._advance(pending):
                    proven.append((pending.sock, pending.handshake))
                elif self._clock_s() < pending.deadline:
                    waiting.append(pending)
                else:
                    pending.sock.close()
            except (OSError, LinkDownError):
                pending.sock.close()
        self._pending = waiting
        self._keep_newest(False, _MAX_PENDING)
        return proven

    def close(self) -> None:
        """Stop listening; connections already proven live on. Idempotent."""
        self._sock.close()
        for pending in self._pending:
            pending.sock.close()
        self._pending.clear()

    def _accept(self) -> bool:
        """Take what has connected, as far as it may be now; whether there was any."""
        has_taken = False
        while not self._has_strangers or self._clock_s() >= self._takes_from_s:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:
                # Without a descriptor it fails also where none is there.
                lacks_descriptor = error.errno in OUT_OF_DESCRIPTORS and bool(_readable([self._sock]))
                if lacks_descriptor and self._drop_oldest():
                    continue
                self.lacks_descriptor = lacks_descriptor
                break  # none is there, or the one that came has failed already, or it waits for a descriptor
            self.lacks_descriptor = False
            if self._has_strangers:
                self._takes_from_s = max(self._takes_from_s, self._clock_s() - (_BURST - 1) * _PAUSE_S) + _PAUSE_S
            sock.setblocking(False)
            try:
                if sock.family == socket.AF_UNIX:
                    check_same_user(sock)
                tend(sock)
            except (LinkDownError, OSError):
                sock.close()
                continue
            self._pending.append(self._unproven(sock))
            self._keep_newest(self._has_strangers, _MAX_STRANGERS if self._has_strangers else _MAX_PENDING)
            has_taken = True
        return has_taken

    def _unproven(self, sock: socket.socket) -> _Pending:
        handshake = Handshake(self._secret, self._me, self._purpose, initiator=False, also=self._also)
        wire = self.tls.wrap(sock, accepts=True) if self.tls is not None and self._has_strangers else sock
        timeout_s = _SHOW_S if self._has_strangers else self._timeout_s
        return _Pending(wire, handshake, self._clock_s() + timeout_s, self._has_strangers)

    def _keep_newest(self, strangers: bool, most: int) -> None:
        """Of strangers or of the others, so many."""
        alike = [pending for pending in self._pending if pending.is_stranger is strangers]
        for pending in alike[: max(0, len(alike) - most)]:
            self._pending.remove(pending)
            pending.sock.close()

    def _drop_oldest(self) -> bool:
        """For its descriptor; False: there is none that may go."""
        for at, pending in enumerate(self._pending):
            if pending.is_stranger or not self._has_strangers:
                self._pending.pop(at).sock.close()
                return True
        return False

    def _advance(self, pending: _Pending) -> bool:
        """Take what it has said; whether it is proven now. Raises LinkDownError, OSError."""
        if pending.is_stranger and not pending.has_spoken:
            pending.has_spoken, pending.deadline = True, self._clock_s() + _SHOW_S
        has_said_all = self._feed(pending)
        if pending.is_stranger and isinstance(pending.sock, TlsSocket) and pending.sock.peer_name is not None:
            pending.is_stranger, pending.deadline = False, self._clock_s() + self._timeout_s
            self._takes_from_s -= _PAUSE_S  # peers are not paced
        if has_said_all:
            self._check(pending.sock, pending.handshake)
        return has_said_all

    def _feed(self, pending: _Pending) -> bool:
        handshake = pending.handshake
        while not handshake.done:
            try:
                part = pending.sock.recv(handshake.needed - len(pending.received))
            except BlockingIOError:
                return False
            if not part:
                raise HandshakeError("the peer hung up")
            pending.received += part
            pending.deadline = self._clock_s() + self._timeout_s
            if len(pending.received) == handshake.needed:
                answer = handshake.feed(bytes(pending.received))
                pending.received.clear()
                if answer:
                    pending.sock.send(answer)
        return True

    def _check(self, sock: Wire, handshake: Handshake) -> None:
        """The identity that is proven is the certificate's, and has not been replaced. Raises HandshakeError."""
        check_name(sock, handshake.peer)
        worker_id, epoch = handshake.peer
        if epoch < self._epochs.get(worker_id, 0):
            raise HandshakeError(f"worker {worker_id} of epoch {epoch} was replaced")
        self._epochs[worker_id] = epoch
