"""The identity of a socket's other end: a three-message proof that both ends know the cluster's secret.

    initiator                                 acceptor
    HELLO(identity, nonce)          ->
                                    <-        HELLO(identity, nonce), MAC("accept", both hellos)
    MAC("initiate", both hellos)    ->

Sans-I/O: bytes in, bytes out, so the same code serves blocking sockets, worker loops and asyncio. Each proof
covers both nonces, the purpose of the connection and the epochs, so nothing can be replayed or reflected. The
messages are fixed binary structs; the secret never travels. Confidentiality is TLS's below (``transport.tls``).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from enum import IntEnum
from typing import NamedTuple

from jettison.errors import LinkDownError
from jettison.types import WorkerId

_HELLO = struct.Struct("<8s H i I 32s")
_MAGIC = b"JETTSN02"  # ends with the version of everything that follows on the socket
_MAC_BYTES = 32
MIN_SECRET_BYTES = 16
HANDSHAKE_TIMEOUT_S = 5.0
"""How long an acceptor waits for a peer to prove itself."""


class Purpose(IntEnum):
    """The purpose of a connection; a proof for one purpose does not open a connection for another."""

    CONTROL = 1
    LINK = 2
    URGENT = 3
    """The second connection of a link, for frames that must not wait behind bulk."""
    ENROL = 4
    """A worker of another host asks the controller for its certificate."""
    KEEPER = 5
    """A keeper of another host takes orders from the controller."""


class Identity(NamedTuple):
    """One end. ``epoch`` counts the lives of a worker id: a peer of an older life is refused."""

    worker_id: WorkerId
    epoch: int


CONTROLLER = Identity(-1, 0)
"""The controller's end of a control channel."""


def secret_under(secret: bytes, controller_epoch: int) -> bytes:
    """With which workers prove themselves to each other: only those that obey the same controller have the same one.
    What a worker still sends for a controller that has ended would be taken for the next one's, as step and transfer
    ids begin anew."""
    return hmac.new(secret, b"links" + controller_epoch.to_bytes(8), hashlib.sha256).digest()


class HandshakeError(LinkDownError):
    """The other end has not proven the expected identity; the connection must be closed."""


class Handshake:
    """One end's progress. Send ``first()`` (initiator), then ``feed`` each message and send the returned reply."""

    def __init__(
        self, secret: bytes, me: Identity, purpose: Purpose, *, initiator: bool, also: frozenset[Purpose] = frozenset()
    ) -> None:
        """``also``: further purposes that an acceptor agrees to; when ``done``, ``purpose`` is the one of this
        connection."""
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"a secret of {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed")
        self._secret = secret
        self.purpose = purpose
        self._also = also
        self._me = me
        self._nonce = os.urandom(32)
        self.is_initiator = initiator
        self._transcript: bytes | None = None
        self._peer: Identity | None = None
        self.done = False
        self.needed = _HELLO.size + (_MAC_BYTES if initiator else 0)
        """Bytes of the next message to feed; 0 when done."""
        self.rest = b""
        """What ``take`` has not fed: part of a message, or, when ``done``, what the peer sent behind its proof."""

    @property
    def _hello(self) -> bytes:
        return _HELLO.pack(_MAGIC, self.purpose, *self._me, self._nonce)

    @property
    def peer(self) -> Identity:
        """The proven identity of the other end. Only when ``done``."""
        if not self.done or self._peer is None:
            raise HandshakeError("the peer has not proven its identity")
        return self._peer

    @property
    def session_key(self) -> bytes:
        """32 bytes that only both ends know, fresh for this connection. Only when ``done``."""
        if not self.done:
            raise HandshakeError("the peer has not proven its identity")
        return self._mac(b"session")

    def first(self) -> bytes:
        """The initiator's opening message."""
        return self._hello

    def feed(self, message: bytes) -> bytes:
        """Take the next message of ``needed`` bytes; returns the reply to send. Raises HandshakeError."""
        if self.done or len(message) != self.needed:
            raise HandshakeError(f"a handshake message of {len(message)} bytes where {self.needed} were due")
        if self.is_initiator:
            self._read_hello(message[: _HELLO.size])
            self._transcript = self._hello + message[: _HELLO.size]
            self._verify(message[_HELLO.size :], b"accept")
            self._finish()
            return self._mac(b"initiate")
        if self._transcript is None:
            self._read_hello(message)
            self._transcript = message + self._hello
            self.needed = _MAC_BYTES
            return self._hello + self._mac(b"accept")
        self._verify(message, b"initiate")
        self._finish()
        return b""

    def take(self, data: bytes) -> bytes:
        """Feed bytes however they come in; returns what is to be sent, which may be nothing. Raises HandshakeError."""
        self.rest += data
        replies = b""
        while not self.done and len(self.rest) >= self.needed:
            message, self.rest = self.rest[: self.needed], self.rest[self.needed :]
            replies += self.feed(message)
        return replies

    def _read_hello(self, hello: bytes) -> None:
        magic, purpose, worker_id, epoch, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise HandshakeError("the peer speaks another protocol or version")
        if purpose != self.purpose and purpose not in self._also:
            raise HandshakeError(f"the peer wants purpose {purpose}, this is {self.purpose.name}")
        self.purpose = Purpose(purpose)
        self._peer = Identity(worker_id, epoch)

    def _finish(self) -> None:
        self.done = True
        self.needed = 0

    def _mac(self, label: bytes) -> bytes:
        assert self._transcript is not None
        return hmac.new(self._secret, label + self._transcript, hashlib.sha256).digest()

    def _verify(self, proof: bytes, label: bytes) -> None:
        if not hmac.compare_digest(proof, self._mac(label)):
            raise HandshakeError("the peer does not know the secret, or obeys another controller")
