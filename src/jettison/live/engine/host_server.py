"""The controller's end of all connections to keepers on other hosts, and of their leases.

It has a thread and an event loop of its own: a beat is granted at once, however long the controller's own loop is busy
with steps and clients, so no such stall ends a sound host. What keepers say is told on the controller's loop, in order.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import ssl
import threading
from collections.abc import Callable
from typing import NamedTuple, cast

import msgspec

from jettison.errors import LinkDownError
from jettison.live.wire import host_orders as h
from jettison.live.wire.channel import MessageBuffer, framed
from jettison.live.wire.codec import CodecError
from jettison.live.wire.lease import Grantor, LeaseTimes, boot_clock_s
from jettison.transport.handshake import CONTROLLER, HANDSHAKE_TIMEOUT_S, Handshake, HandshakeError, Identity, Purpose
from jettison.transport.sockets import parse_address
from jettison.transport.tls import name_of, name_shown

log = logging.getLogger(__name__)


class Lost(NamedTuple):
    """The last that is told of one life of a keeper."""

    why: str


OnWord = Callable[[Identity, h.HostEvent | Lost], None]


class HostServer:
    """Started and closed once. Each method may be called on the controller's loop, where ``on_word`` is called, too."""

    def __init__(self, times: LeaseTimes, on_word: OnWord) -> None:
        self.times = times
        self._on_word = on_word
        self._home: asyncio.AbstractEventLoop | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jettison-hosts", daemon=True)
        self._server: asyncio.AbstractServer | None = None
        self._watch: asyncio.Task[None] | None = None
        self.expected: dict[str, tuple[Identity, bytes]] = {}
        """Keepers that may come, with their tokens, by the name in the certificate."""
        self._connections: dict[Identity, _Connection] = {}

    async def start(self, address: str, tls: ssl.SSLContext) -> str:
        """Listen at ``tcp:<interface>:<port>``; returns the address with the port that it has got. Raises OSError."""
        self._home = asyncio.get_running_loop()
        self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._listen(address, tls), self._loop))

    async def _listen(self, address: str, tls: ssl.SSLContext) -> str:
        _, host, port = parse_address(address)
        self._server = server = await self._loop.create_server(
            lambda: _Connection(self), host, port, ssl=tls, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
        )
        self._watch = self._loop.create_task(self._watch_leases())
        return f"tcp:{host}:{server.sockets[0].getsockname()[1]}"

    def expect(self, post: h.KeeperPost) -> None:
        """Let this life of a keeper in, once."""
        self._soon(self.expected.__setitem__, name_of(post.identity), (post.identity, bytes.fromhex(post.token_hex)))

    def send(self, keeper: Identity, command: h.HostCommand) -> None:
        """Never blocks. To a keeper that is gone it is dropped: ``Lost`` tells."""
        self._soon(self._send, keeper, framed(msgspec.json.encode(command)))

    def dismiss(self, keeper: Identity) -> None:
        """Hang up, which ends the keeper and its workers, and let it in no more. ``Lost`` is told if it was there."""
        self._soon(self._dismiss, keeper)

    def close(self) -> None:
        """Hang up on all. Idempotent."""
        if self._thread.is_alive():
            ended = concurrent.futures.Future[None]()
            self._soon(self._end, ended)
            ended.result()
            self._thread.join()
        self._loop.close()

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    # --- on this server's own loop

    def _send(self, keeper: Identity, message: bytes) -> None:
        connection = self._connections.get(keeper)
        if connection is not None:
            connection.send(message)

    def _dismiss(self, keeper: Identity) -> None:
        self.expected.pop(name_of(keeper), None)
        if keeper in self._connections:
            self._connections[keeper].end("it is not needed any more")

    def _end(self, done: concurrent.futures.Future[None]) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            self._server.close()
        self._home = None
        for connection in list(self._connections.values()):
            connection.end("the controller ends")
        self._loop.call_soon(self._loop.stop)
        done.set_result(None)

    def joined(self, connection: _Connection) -> None:
        """A keeper has proven itself."""
        self._connections[connection.keeper] = connection

    def tell(self, connection: _Connection, word: h.HostEvent | Lost) -> None:
        """What a keeper has said, or that it is lost."""
        if isinstance(word, Lost):
            del self._connections[connection.keeper]
        if self._home is not None and not self._home.is_closed():
            self._home.call_soon_threadsafe(self._on_word, connection.keeper, word)

    async def _watch_leases(self) -> None:
        """Declare keepers lost that are silent; those of one host that went silent together, together."""
        pause_s = self.times.beat_s
        looked_s = boot_clock_s()
        while True:
            await asyncio.sleep(pause_s / 2)
            now_s = boot_clock_s()
            away_s = now_s - looked_s - pause_s
            looked_s = now_s
            grants = [(each, each.lease) for each in self._connections.values() if each.lease is not None]
            if away_s > pause_s:
                for _, lease in grants:
                    lease.excuse(away_s)  # what has come meanwhile is read after this turn
            for host in {each.host for each, lease in grants if lease.is_lost(now_s)}:
                for each, lease in grants:
                    if each.host == host and lease.is_lost_with_another(now_s):
                        each.end(f"host {host} is lost: no word of it for {lease.silence_s(now_s):.1f} s")


class _Connection(asyncio.Protocol):
    """One keeper: TLS and its certificate first, then the proof, then ``Joined``, then all else."""

    def __init__(self, server: HostServer) -> None:
        self.keeper = CONTROLLER
        self.host = ""
        self.lease: Grantor | None = None
        """Once it has said where it is."""
        self._server = server
        self._handshake: Handshake | None = None
        self._unproven = b""
        self._messages = MessageBuffer()
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        name = name_shown(transport.get_extra_info("ssl_object"))
        if name is None or name not in self._server.expected:
            log.error("a connection with a certificate of %s is not wanted", name)
            transport.abort()
            return
        self.keeper, token = self._server.expected.pop(name)
        self._handshake = Handshake(token, CONTROLLER, Purpose.KEEPER, initiator=False)
        self._deadline = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        try:
            if self._handshake is not None:
                data = self._prove(self._handshake, data)
            for message in self._messages.feed(data):
                self._take(msgspec.json.decode(message, type=h.HostEvent))
        except (LinkDownError, CodecError, msgspec.DecodeError) as error:
            log.error("the connection of keeper %s is refused: %s", self.keeper, error)
            self.end(f"it broke the protocol: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.end("its keeper has ended" if exc is None else f"its keeper: {exc}")

    def send(self, message: bytes) -> None:
        """One message."""
        if self._transport is not None:
            self._transport.write(message)

    def end(self, why: str) -> None:
        """Hang up, and tell so if the keeper was there. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()
        if self._handshake is None and self.keeper != CONTROLLER:
            self._server.tell(self, Lost(why))

    def _take(self, event: h.HostEvent) -> None:
        if isinstance(event, h.Joined):
            self.host = event.host
            self.lease = Grantor(self._server.times, boot_clock_s())
        elif isinstance(event, h.Beat):
            if self.lease is not None:
                self.lease.hear(boot_clock_s())
            self.send(framed(msgspec.json.encode(h.Granted(event.number))))
        self._server.tell(self, event)

    def _prove(self, handshake: Handshake, data: bytes) -> bytes:
        """Feed the handshake; returns what came after it. Raises HandshakeError."""
        assert self._transport is not None and self._deadline is not None
        self._unproven += data
        while not handshake.done:
            if len(self._unproven) < handshake.needed:
                return b""
            message, self._unproven = self._unproven[: handshake.needed], self._unproven[handshake.needed :]
            if answer := handshake.feed(message):
                self._transport.write(answer)
        if handshake.peer != self.keeper:
            raise HandshakeError(f"a certificate of {self.keeper} where {handshake.peer} has proven itself")
        self._deadline.cancel()
        self._handshake = None
        self._server.joined(self)
        return self._unproven
