"""TLS over a non-blocking TCP socket: what goes between hosts, encrypted, from an end with a certified name.

Both ends show a certificate of the cluster's authority (``authority``), TLS 1.3 alone. The three-message proof
(``handshake``) goes inside, and its identity must be the certificate's name: a certificate does not open a connection
by itself, nor does the secret. One connection goes without the dialling end's certificate: the one that asks for it
(``Purpose.ENROL``).

``TlsSocket`` has the calls of a socket that links use. ``ssl.SSLSocket`` has not: no ``sendmsg``, other errors where a
call would block, and bytes in a buffer of its own that no epoll tells of. Here that buffer is in sight
(``has_unread``).
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence
from typing import NamedTuple

from jettison.transport.handshake import CONTROLLER, HandshakeError, Identity

DOMAIN = "jettison.internal"
_READ_BYTES = 256 << 10
_WRITE_BYTES = 64 << 10
"""Encrypted in one call at most: so much may wait here, unsent, beyond what the socket's buffer is bounded to."""


class Papers(NamedTuple):
    """What one end shows and trusts, as PEM."""

    key: bytes
    certificate: bytes
    authority: bytes
    """The authority's own certificate: nothing that another has signed is trusted."""


def name_of(identity: Identity) -> str:
    """The name in an end's certificate."""
    if identity == CONTROLLER:
        return f"controller.{DOMAIN}"
    if identity.worker_id < CONTROLLER.worker_id:
        return f"life-{identity.epoch}.keeper-{CONTROLLER.worker_id - 1 - identity.worker_id}.{DOMAIN}"
    return f"life-{identity.epoch}.worker-{identity.worker_id}.{DOMAIN}"


def keeper_identity(number: int, life: int) -> Identity:
    """Of a keeper: below the controller's, where no worker has one."""
    return Identity(CONTROLLER.worker_id - 1 - number, life)


class TlsContexts:
    """Of one end, for all of its connections."""

    def __init__(self, papers: Papers) -> None:
        """Raises OSError, ssl.SSLError for papers that do not go together."""
        self._ends = [_context(papers, ssl.PROTOCOL_TLS_CLIENT), _context(papers, ssl.PROTOCOL_TLS_SERVER)]

    @classmethod
    def without_certificate(cls, authority: bytes) -> TlsContexts:
        """Of an end that dials to ask for one; it trusts this authority (PEM). Raises ssl.SSLError."""
        return cls(Papers(b"", b"", authority))

    def wrap(self, sock: socket.socket, *, accepts: bool) -> TlsSocket:
        """Over a connected socket, of which this end has been the accepting one or not. Nothing is sent yet."""
        return TlsSocket(sock, self._ends[accepts], accepts)


def control_context(papers: Papers, *, is_open: bool = True) -> ssl.SSLContext:
    """Of the controller, for an event loop's own TLS. ``is_open``: an end may show no certificate; ``name_shown``
    tells. Raises OSError, ssl.SSLError."""
    context = _context(papers, ssl.PROTOCOL_TLS_SERVER)
    if is_open:
        context.verify_mode = ssl.CERT_OPTIONAL  # what is shown is verified
    return context


def dialling_context(papers: Papers) -> ssl.SSLContext:
    """Of an end that dials the controller, for an event loop's own TLS. Raises OSError, ssl.SSLError."""
    return _context(papers, ssl.PROTOCOL_TLS_CLIENT)


def name_shown(tls: ssl.SSLObject) -> str | None:
    """The name in the other end's certificate; None: it has shown none."""
    names: tuple[tuple[str, str], ...] = (tls.getpeercert() or {}).get("subjectAltName", ())  # type: ignore[assignment]
    return next((name for kind, name in names if kind == "DNS"), None)


def _context(papers: Papers, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # names are identities, which ``check_name`` compares
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no connection is resumed
    context.load_verify_locations(cadata=papers.authority.decode())
    if not papers.certificate:
        return context
    fd = os.memfd_create("jettison-papers", os.MFD_CLOEXEC)  # the ssl module reads keys from files only
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(papers.key + papers.certificate)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


class TlsSocket:
    """One connection. Errors are a socket's: BlockingIOError where a call would block, OSError where it fails."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, accepts: bool) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=accepts)
        self._is_ready = False
        self._early = bytearray()
        """Said before the handshake was over."""
        self._unsent = memoryview(b"")
        """Encrypted."""
        self.has_unread = False
        """The last call to receive did not find the end of what has come: the socket may say nothing of the rest."""
        self.family = sock.family
        self.fileno = sock.fileno
        self.setsockopt = sock.setsockopt
        self.getsockopt = sock.getsockopt
        self.setblocking = sock.setblocking

    @property
    def has_unsent(self) -> bool:
        """Encrypted bytes wait for room in the socket: call ``flush`` when there is."""
        return bool(self._unsent)

    @property
    def peer_name(self) -> str | None:
        """The name in the other end's certificate; None before the handshake is over."""
        return name_shown(self._tls) if self._is_ready else None

    def flush(self) -> None:
        """Give the socket what it takes of what is encrypted. Raises OSError."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            return

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """See ``socket.send``."""
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """See ``socket.sendmsg``; at most ``_WRITE_BYTES``, and nothing while earlier bytes wait."""
        if not self._is_ready:
            for data in buffers:
                self._early += data
            self._shake_hands()
            return sum(len(data) for data in buffers)
        self.flush()
        if self._unsent:
            raise BlockingIOError
        num_sent = 0
        for data in buffers:
            part = memoryview(data)[: _WRITE_BYTES - num_sent]
            if part.nbytes:
                num_sent += self._tls.write(part)
            if num_sent >= _WRITE_BYTES:
                break
        self._push()
        return num_sent

    def recv(self, num_bytes: int) -> bytes:
        """See ``socket.recv``."""
        data = bytearray(num_bytes)
        return bytes(data[: self.recv_into(memoryview(data))])

    def recv_into(self, target: memoryview) -> int:
        """See ``socket.recv_into``; 0: the other end has hung up."""
        while True:
            if not self._is_ready:
                self._shake_hands()
            if self._is_ready:
                try:
                    num_bytes = self._tls.read(target.nbytes, target)
                    self.has_unread = True
                    return int(num_bytes)
                except ssl.SSLWantReadError:
                    self._push()  # an answer to the other end's change of keys
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return 0
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                self.has_unread = False
                raise
            if not data:
                return 0
            self._incoming.write(data)

    def close(self) -> None:
        """At once: an end that stops says so inside, or has failed."""
        self._sock.close()

    def _shake_hands(self) -> None:
        """As far as it goes now. Raises OSError."""
        try:
            self._tls.do_handshake()
            self._is_ready = True
            if self._early:
                self._tls.write(self._early)
                self._early = bytearray()
        except ssl.SSLWantReadError:
            pass
        finally:
            self._push()  # also the alert that says why not

    def _push(self) -> None:
        if self._outgoing.pending:
            more = self._outgoing.read()
            self._unsent = memoryview(bytes(self._unsent) + more if self._unsent else more)
            self.flush()


class Credentials(NamedTuple):
    """What one end proves itself with."""

    secret: bytes
    """The cluster's."""
    me: Identity
    tls: TlsContexts | None = None
    """For connections over TCP; None: they are not encrypted."""


Wire = socket.socket | TlsSocket
"""What a link runs over."""


def check_name(wire: Wire, peer: Identity) -> None:
    """Of a connection that is proven inside: its certificate is that identity's, too. Raises HandshakeError."""
    if isinstance(wire, TlsSocket):
        check_shown(wire.peer_name, peer)


def check_shown(name: str | None, peer: Identity | None) -> None:
    """The name in a certificate (None: none was shown) is this identity's; None: there must be none. Raises
    HandshakeError."""
    if name != (None if peer is None else name_of(peer)):
        raise HandshakeError(f"a certificate of {name} where {peer or 'an end without one'} has proven itself")
