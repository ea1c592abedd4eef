"""The controller's end of all connections to keepers on other hosts, and of their leases, as a process of its own:

    python -P -m jettison.live.engine.host_server

A beat is granted at once, however long the controller stands still: a collection of its garbage holds all its threads,
for seconds where the machine is busy, and no such stall may end a sound host. Standard input is a socket to the
controller, on which JSON goes, a message a line: ``OpenDoor`` first, ``DoorOpened`` back; then orders in, and what
keepers say out. The process ends with the controller, and the keepers with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from typing import cast

import msgspec

from jettison.errors import LinkDownError
from jettison.live.wire import host_orders as h
from jettison.live.wire.channel import MessageBuffer, framed
from jettison.live.wire.codec import CodecError
from jettison.live.wire.gate import Gate, Settled
from jettison.live.wire.lease import Grantor, LeaseTimes, boot_clock_s
from jettison.transport.handshake import CONTROLLER, HANDSHAKE_TIMEOUT_S, Handshake, HandshakeError, Identity, Purpose
from jettison.transport.tls import Papers, control_context, name_of, name_shown

log = logging.getLogger(__name__)

_MOST_WAITING_BYTES = 1 << 20
"""Beats are told to a controller that reads them; one that stands still needs only the last ones."""

OnWord = Callable[[Identity, "h.HostEvent | h.Lost"], None]


class HostServer:
    """All on one asyncio loop, which nothing keeps for long. ``on_word`` gets what each keeper says, in order."""

    def __init__(self, times: LeaseTimes, on_word: OnWord) -> None:
        self.times = times
        self._on_word = on_word
        self._gate: Gate | None = None
        self._watch: asyncio.Task[None] | None = None
        self.expected: dict[str, tuple[Identity, bytes]] = {}
        """Keepers that may come, with their tokens, by the name in the certificate."""
        self._connections: dict[Identity, _Connection] = {}

    def start(self, address: str, tls: ssl.SSLContext) -> str:
        """See ``Gate.open``."""
        self._gate = Gate(partial(_Connection, self), tls, lambda: len(self.expected))
        self._watch = asyncio.create_task(self._watch_leases())
        return self._gate.open(address)

    def expect(self, post: h.KeeperPost) -> None:
        """Let this life of a keeper in, once."""
        self.expected[name_of(post.identity)] = (post.identity, bytes.fromhex(post.token_hex))
        if self._gate is not None:
            self._gate.look()

    def send(self, keeper: Identity, command: h.HostCommand) -> None:
        """Never blocks. To a keeper that is gone it is dropped: ``Lost`` tells."""
        connection = self._connections.get(keeper)
        if connection is not None:
            connection.send(framed(msgspec.json.encode(command)))

    def dismiss(self, keeper: Identity) -> None:
        """Hang up, which ends the keeper and its workers, and let it in no more. ``Lost`` is told if it was there."""
        self.expected.pop(name_of(keeper), None)
        if keeper in self._connections:
            self._connections[keeper].end("it is not needed any more")

    def close(self) -> None:
        """Hang up on all."""
        if self._watch is not None:
            self._watch.cancel()
        if self._gate is not None:
            self._gate.close()
        for connection in list(self._connections.values()):
            connection.end("the controller ends")

    def joined(self, connection: _Connection) -> None:
        """A keeper has proven itself."""
        self._connections[connection.keeper] = connection

    def tell(self, connection: _Connection, word: h.HostEvent | h.Lost) -> None:
        """What a keeper has said, or that it is lost."""
        if isinstance(word, h.Lost):
            del self._connections[connection.keeper]
        self._on_word(connection.keeper, word)

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
                    lease.excuse(away_s, now_s)  # what has come meanwhile is read after this turn
            for host in {each.host for each, lease in grants if lease.is_lost(now_s)}:
                lost = [(each, lease.silence_s(now_s)) for each, lease in grants
                        if each.host == host and lease.is_lost_with_another(now_s)]  # fmt: skip
                why = f"host {host} is lost: no word of it for {max(silence_s for _, silence_s in lost):.1f} s"
                for each, _ in lost:
                    each.end(why)


class _Connection(asyncio.Protocol):
    """One keeper: TLS and its certificate first, then the proof, then ``Joined``, then all else."""

    def __init__(self, server: HostServer, settled: Settled) -> None:
        """``settled``: see ``Gate``."""
        self.keeper = CONTROLLER
        self.host = ""
        self.lease: Grantor | None = None
        """Once it has proven itself."""
        self._server = server
        self._settled = settled
        self._handshake: Handshake | None = None
        self._messages = MessageBuffer(h.MAX_WORD_BYTES)
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
        self._settled()
        self.end("its keeper has ended" if exc is None else f"its keeper: {exc}")

    def send(self, message: bytes) -> None:
        """One message."""
        if self._transport is not None and not self._is_over:
            self._transport.write(message)

    def end(self, why: str) -> None:
        """Hang up, and tell so if the keeper was there. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()
        if self._handshake is None and self.keeper != CONTROLLER:
            self._server.tell(self, h.Lost(why))

    def _take(self, event: h.HostEvent) -> None:
        if isinstance(event, h.Joined):
            self.host = event.host
        if isinstance(event, h.Joined | h.Beat) and self.lease is not None:
            self.lease.hear(boot_clock_s())
        if isinstance(event, h.Beat):
            self.send(framed(msgspec.json.encode(h.Granted(event.number))))
        self._server.tell(self, event)

    def _prove(self, handshake: Handshake, data: bytes) -> bytes:
        """Feed the handshake; returns what came after it. Raises HandshakeError."""
        assert self._transport is not None and self._deadline is not None
        if answer := handshake.take(data):
            self._transport.write(answer)
        if not handshake.done:
            return b""
        if handshake.peer != self.keeper:
            raise HandshakeError(f"a certificate of {self.keeper} where {handshake.peer} has proven itself")
        self._deadline.cancel()
        self._settled()
        self._handshake = None
        self.host = f"of {name_of(self.keeper)}, which has not said where it is,"  # shared with no other
        self.lease = Grantor(self._server.times, boot_clock_s())
        self._server.joined(self)
        return handshake.rest


async def _serve(sock: socket.socket) -> None:
    """The process, until the controller is gone."""
    reader, writer = await asyncio.open_unix_connection(sock=sock, limit=h.MAX_MESSAGE_BYTES)

    def tell(word: h.DoorWord) -> None:
        writer.write(msgspec.json.encode(word) + b"\n")

    def pass_on(keeper: Identity, word: h.HostEvent | h.Lost) -> None:
        if not isinstance(word, h.Beat) or writer.transport.get_write_buffer_size() < _MOST_WAITING_BYTES:
            tell(h.Said(keeper, word))

    opening = msgspec.json.decode(await reader.readline(), type=h.OpenDoor)
    server = HostServer(LeaseTimes.of(opening.lease_s), pass_on)
    try:
        papers = Papers(opening.key_pem.encode(), opening.certificate_pem.encode(), opening.authority_pem.encode())
        address = server.start(opening.address, control_context(papers, is_open=False))
    except (OSError, ValueError) as error:
        tell(h.DoorOpened("", str(error)))
        await writer.drain()
        return
    tell(h.DoorOpened(address))
    with contextlib.suppress(OSError):  # also of what was told to a controller that is gone
        while line := await reader.readline():
            command = msgspec.json.decode(line, type=h.DoorCommand)
            if isinstance(command, h.Expect):
                server.expect(command.post)
            elif isinstance(command, h.Dismiss):
                server.dismiss(command.keeper)
            else:
                server.send(command.keeper, command.command)
    server.close()
    writer.close()


def main() -> None:
    """The process. A terminal's signals are the controller's matter."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(_serve(socket.socket(fileno=0)))


if __name__ == "__main__":
    main()
