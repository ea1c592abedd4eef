"""The control channel: commands to workers and events back, with length prefixes: over a Unix socket on one host, over
TCP with TLS (``transport.tls``) between hosts.

A plain socket and not ZeroMQ, which design.md names: measured here, a command and its
answer take a fraction of ZeroMQ's time, a dead peer shows at once as end of file, and the same handshake as on
links opens it. Messages are msgspec structs; nothing else is accepted.

A worker of another host has no certificate when it begins. It opens a first connection without one, which the secret
opens for one purpose alone: its signing request goes in, the certificate comes back. The control channel is the second
one.

``ControlServer`` is the controller's side, on an asyncio loop. ``WorkerChannel`` is a worker's, on a plain
non-blocking socket that its own loop watches.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

from jettison.errors import LinkDownError
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.live.wire.gate import Gate, Settled
from jettison.live.wire.kept_sockets import serve_kept
from jettison.transport.dialling import Dialling
from jettison.transport.handshake import CONTROLLER, HANDSHAKE_TIMEOUT_S, Handshake, Purpose
from jettison.transport.sockets import connect, parse_address
from jettison.transport.tls import Credentials, TlsSocket, Wire, check_shown, name_shown
from jettison.types import WorkerId

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_PLAIN_READ_BYTES, _TLS_READ_BYTES = 1 << 18, 1 << 14
"""A record of TLS brings 16 KiB at most."""
MAX_MESSAGE_BYTES = 64 << 20
"""Far above any step; what a length prefix may make the reader wait for."""


class MessageBuffer:
    """Cuts a byte stream into messages."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """``max_bytes``: of one message; None: ``MAX_MESSAGE_BYTES``."""
        self._data = bytearray()
        self._max_bytes = MAX_MESSAGE_BYTES if max_bytes is None else max_bytes

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[bytes]:
        """Messages that are whole now. Raises CodecError for an impossible length."""
        self._data += data
        at = 0
        try:
            while len(self._data) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._data, at)
                if length > self._max_bytes:
                    raise codec.CodecError(f"a control message of {length} bytes")
                end = at + _LENGTH.size + length
                if end > len(self._data):
                    break
                message = bytes(memoryview(self._data)[at + _LENGTH.size : end])
                at = end
                yield message
        finally:
            del self._data[:at]


def framed(message: bytes) -> bytes:
    """A message behind its length."""
    return _LENGTH.pack(len(message)) + message


class WorkerChannel:
    """A worker's end, never blocking once made. Unsent events wait in memory: few, as the steps in flight are few."""

    def __init__(self, sock: Wire) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self._incoming = MessageBuffer()
        self._outgoing = bytearray()
        self.is_open = True

    @classmethod
    def connect(cls, address: str, own: Credentials, purpose: Purpose = Purpose.CONTROL) -> WorkerChannel:
        """Blocks until both ends are proven. Raises LinkDownError."""
        sock: Wire
        if parse_address(address)[0] == "unix":
            sock, handshake = connect(address, own.secret, own.me, purpose)
        else:
            sock, handshake = _dialled(address, own, purpose)
        if handshake.peer != CONTROLLER:
            sock.close()
            raise LinkDownError(f"worker {handshake.peer.worker_id} answers where the controller should")
        return cls(sock)

    def fileno(self) -> int:
        """Watch for readability, and for writability while ``wants_write``."""
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether events wait for the socket."""
        return bool(self._outgoing) or (self._tls is not None and self._tls.has_unsent)

    def receive(self) -> list[m.Command]:
        """Commands that have come; ``is_open`` is False afterwards when the controller is gone. Raises CodecError."""
        commands: list[m.Command] = []
        while self.is_open:
            try:
                data = self._sock.recv(_PLAIN_READ_BYTES if self._tls is None else _TLS_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_open = False
                break
            commands += map(codec.decode_command, self._incoming.feed(data))
        return commands

    def emit(self, event: m.Event) -> None:
        """Send an event, or keep it until ``flush`` can."""
        self._outgoing += framed(codec.encode(event))
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        try:
            while self._outgoing and self.is_open:
                num_sent = self._sock.send(self._outgoing)
                del self._outgoing[:num_sent]
            if self._tls is not None and self.is_open:
                self._tls.flush()
        except BlockingIOError:
            return
        except OSError:
            self.is_open = False

    def close(self, timeout_s: float = 1.0) -> None:
        """Send what is left, briefly waiting for it, and close. Idempotent."""
        poll, ends_s = select.poll(), time.monotonic() + timeout_s
        if self.is_open:
            poll.register(self._sock.fileno(), select.POLLOUT)
        while self.is_open and self.wants_write and (left_s := ends_s - time.monotonic()) > 0:
            poll.poll(1e3 * left_s)
            self.flush()
        if self.wants_write:
            log.warning("the last events did not reach the controller")
        self._outgoing.clear()
        self.is_open = False
        self._sock.close()


def _dialled(address: str, own: Credentials, purpose: Purpose) -> tuple[Wire, Handshake]:
    """Over a network, with both ends proven. Raises LinkDownError."""
    if own.tls is None:
        raise LinkDownError(f"no control channel goes over a network without TLS ({address})")
    poll, ends_s, dial = select.poll(), time.monotonic() + HANDSHAKE_TIMEOUT_S, None
    try:
        dial = Dialling(address, own, purpose)
        while (connection := dial.advance()) is None:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise LinkDownError("it does not answer")
            poll.register(dial.sock.fileno(), select.POLLOUT if dial.is_connecting else select.POLLIN)
            poll.poll(1e3 * left_s)
        return connection
    except (OSError, LinkDownError) as error:
        if dial is not None:
            dial.sock.close()
        raise LinkDownError(f"no control channel to {address}: {error}") from None


class ControlServer:
    """The controller's end of all channels. All calls and callbacks on one asyncio loop.

    ``on_event`` gets every event of a worker in order, and then ``on_lost`` once when its connection ends.
    """

    def __init__(
        self, secret: bytes, on_event: Callable[[WorkerId, m.Event], None], on_lost: Callable[[WorkerId], None],
        certify: Callable[[WorkerId, m.CertificateWanted], m.Certificate | None] = lambda worker_id, event: None,
    ) -> None:
        """``certify``: answers a worker that has no certificate yet; None: not this one."""
        self.secret = secret
        self.on_event = on_event
        self.on_lost = on_lost
        self.certify = certify
        self.on_proven: Callable[[WorkerId], None] = lambda worker_id: None
        """Called when a worker can be sent commands, before any other word of it."""
        self._lives: dict[WorkerId, int] = {}
        """Worker -> the only life of it that is let in."""
        self._awaited: set[WorkerId] = set()
        """Those of them that have not come."""
        self._turned_away: dict[WorkerId, int] = {}
        """Worker -> the last life of it that was not let in."""
        self._gate: Gate | None = None
        self._connections: dict[WorkerId, _Connection] = {}
        self._all: set[_Connection] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(
        self, address: str, tls: ssl.SSLContext | None = None, listener: socket.socket | None = None
    ) -> str:
        """Listen at ``unix:<path in a 0700 folder>``, or with ``tls`` at ``tcp:<interface>:<port>``; returns that
        address with the port that it has got. ``listener``: a socket there that another process keeps for this one.
        Raises OSError, ValueError."""
        loop = asyncio.get_running_loop()
        scheme, path, _ = parse_address(address)
        if scheme == "unix":
            if listener is not None:
                self._server = await serve_kept(lambda: _Connection(self), listener)
            else:
                self._server = await loop.create_unix_server(lambda: _Connection(self), path)
            return address
        if tls is None:
            raise ValueError(f"no control channel goes over a network without TLS ({address})")
        self._gate = Gate(partial(_Connection, self), tls, lambda: len(self._awaited))
        return self._gate.open(address, listener)

    def expect(self, worker_id: WorkerId, life: int) -> None:
        """Let this life of a worker in from now on, and no other."""
        self._lives[worker_id] = life
        self._awaited.add(worker_id)
        if self._gate is not None:
            self._gate.look()

    def send(self, worker_id: WorkerId, command: m.Command) -> None:
        """Queue a command; never blocks. To a worker that is gone it is dropped: ``on_lost`` has told or will."""
        connection = self._connections.get(worker_id)
        if connection is not None:
            connection.send(codec.encode(command))

    def is_connected(self, worker_id: WorkerId) -> bool:
        """Whether events of this worker may still come."""
        return worker_id in self._connections

    def hang_up(self, worker_id: WorkerId) -> None:
        """Close a worker's connection now, without ``on_lost``: nothing that it still sends is heard."""
        self._awaited.discard(worker_id)
        connection = self._connections.pop(worker_id, None)
        if connection is not None:
            connection.hang_up()

    def close(self) -> None:
        """Stop listening and hang up on every worker, without ``on_lost``. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._gate is not None:
            self._gate.close()
        self._connections.clear()
        for connection in list(self._all):
            connection.hang_up()

    # --- called by connections

    def opened(self, connection: _Connection) -> None:
        """A socket, not yet proven."""
        self._all.add(connection)

    def proven(self, connection: _Connection) -> None:
        """A worker has proven itself; a second one of the same id takes the first one's place."""
        old = self._connections.get(connection.worker_id)
        if old is not None:
            old.hang_up()
        self._awaited.discard(connection.worker_id)
        self._connections[connection.worker_id] = connection
        self.on_proven(connection.worker_id)

    def is_wanted(self, worker_id: WorkerId, life: int) -> bool:
        """Whether this life is let in."""
        return self._lives.get(worker_id) == life

    def turned_away(self, worker_id: WorkerId, life: int) -> None:
        """A life that is not wanted has knocked. It does so again and again until it ends; it is told of once."""
        if self._turned_away.get(worker_id) != life:
            self._turned_away[worker_id] = life
            log.info("life %d of worker %d is over and let in no more", life, worker_id)

    def closed(self, connection: _Connection) -> None:
        """The connection is over."""
        self._all.discard(connection)
        if self._connections.get(connection.worker_id) is connection:
            del self._connections[connection.worker_id]
            self.on_lost(connection.worker_id)


class _Connection(asyncio.Protocol):
    """One socket: handshake first, then messages."""

    def __init__(self, server: ControlServer, settled: Settled = lambda: None) -> None:
        """``settled``: see ``Gate``."""
        self.worker_id: WorkerId = CONTROLLER.worker_id
        self._server = server
        self._settled = settled
        self._handshake: Handshake | None = None
        self._enrols = False
        """It was opened to ask for a certificate, and for nothing else."""
        self._tls: ssl.SSLObject | None = None
        self._messages = MessageBuffer()
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's classes, so this cannot be an isinstance check.
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        self._tls = transport.get_extra_info("ssl_object")
        also = frozenset() if self._tls is None else frozenset({Purpose.ENROL})
        self._handshake = Handshake(self._server.secret, CONTROLLER, Purpose.CONTROL, initiator=False, also=also)
        self._server.opened(self)
        self._deadline = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self.hang_up)

    def data_received(self, data: bytes) -> None:
        try:
            if self._handshake is not None:
                data = self._prove(self._handshake, data)
            if data:
                for message in self._messages.feed(data):
                    self._take(codec.decode_event(message))
        except (LinkDownError, codec.CodecError) as error:
            log.error("control connection of worker %d refused: %s", self.worker_id, error)
            self.hang_up()

    def _take(self, event: m.Event) -> None:
        """Raises LinkDownError."""
        if not self._enrols:
            self._server.on_event(self.worker_id, event)
            return
        answer = self._server.certify(self.worker_id, event) if isinstance(event, m.CertificateWanted) else None
        if answer is None:
            raise LinkDownError("it gets no certificate")
        self.send(codec.encode(answer))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._settled()
        self._server.closed(self)

    def send(self, message: bytes) -> None:
        """Queue one message."""
        if self._transport is not None:
            self._transport.write(framed(message))

    def hang_up(self) -> None:
        """Close now; what is queued is lost."""
        if self._transport is not None:
            self._transport.abort()

    def _prove(self, handshake: Handshake, data: bytes) -> bytes:
        """Feed the handshake; returns what came after it."""
        assert self._transport is not None and self._deadline is not None
        if answer := handshake.take(data):
            self._transport.write(answer)
        if not handshake.done:
            return b""
        worker_id, life = handshake.peer
        self._enrols = handshake.purpose is Purpose.ENROL
        if self._tls is not None:
            check_shown(name_shown(self._tls), None if self._enrols else handshake.peer)
        if not self._server.is_wanted(worker_id, life):
            self._server.turned_away(worker_id, life)
            self.hang_up()
            return b""
        self._deadline.cancel()
        self._settled()
        self._handshake = None
        self.worker_id = worker_id
        if not self._enrols:
            self._server.proven(self)
        return handshake.rest
