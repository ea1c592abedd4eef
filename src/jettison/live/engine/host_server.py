"""The controller's end of all connections to keepers on other hosts, and of their leases, as a process of its own:

    python -P -m jettison.live.engine.host_server

A beat is granted at once, however long the controller stands still: a collection of its garbage holds all its threads,
for seconds where the machine is busy, and no such stall may end a sound host. Standard input is a socket to the
controller, on which JSON goes, a message a line: ``OpenDoor`` first, ``DoorOpened`` back; then orders in, and what
keepers say out. The process ends with the controller, and the keepers with it. But where the server has a parent, beats
are granted on for a while, and a later controller that the parent has signed finds the keepers here (``TakeDoor``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from typing import cast

import msgspec

from jettison.errors import LinkDownError
from jettison.live.machine.process_name import HOST_SERVER, name_process
from jettison.live.wire import host_orders as h
from jettison.live.wire.channel import MessageBuffer, framed
from jettison.live.wire.codec import CodecError
from jettison.live.wire.gate import Gate, Settled
from jettison.live.wire.lease import Grantor, LeaseTimes, boot_clock_s
from jettison.live.wire.worker_config import digest_of
from jettison.transport.handshake import CONTROLLER, HANDSHAKE_TIMEOUT_S, Handshake, HandshakeError, Identity, Purpose
from jettison.transport.sockets import listening_socket
from jettison.transport.tls import Papers, control_context, name_of, name_shown

log = logging.getLogger(__name__)

_MOST_WAITING_BYTES = 1 << 20
"""Beats are told to a controller that reads them; one that stands still needs only the last ones."""
_FIRST_WORD_S = 5.0
"""For a later controller's, which it sends at once."""

OnWord = Callable[[Identity, "h.HostEvent | h.Lost"], None]


class HostServer:
    """All on one asyncio loop, which nothing keeps for long."""

    def __init__(self, times: LeaseTimes) -> None:
        self.times = times
        self.on_word: OnWord | None = None
        """Gets what each keeper says, in order; None while there is no controller."""
        self._gate: Gate | None = None
        self._watch: asyncio.Task[None] | None = None
        self.expected: dict[str, h.KeeperPost] = {}
        """Keepers that may come, by the name in the certificate."""
        self._lives: dict[int, int] = {}
        """The last one of each keeper, by number."""
        self.unproven: set[_Connection] = set()
        """They have shown a certificate, and not proven themselves."""
        self._connections: dict[Identity, _Connection] = {}

    def start(self, address: str, tls: ssl.SSLContext) -> str:
        """See ``Gate.open``."""
        self._gate = Gate(partial(_Connection, self), tls, lambda: len(self.expected))
        self._watch = asyncio.create_task(self._watch_leases())
        return self._gate.open(address)

    def expect(self, post: h.KeeperPost) -> None:
        """Let this life of a keeper in, once."""
        self.expected[name_of(post.identity)] = post
        self._lives[post.number] = post.life
        if self._gate is not None:
            self._gate.look()

    def send(self, keeper: Identity, command: h.HostCommand) -> None:
        """Never blocks. To a keeper that is gone it is dropped: ``Lost`` tells."""
        connection = self._connections.get(keeper)
        if connection is not None:
            connection.carry(command)

    def dismiss(self, keeper: Identity) -> None:
        """Hang up, which ends the keeper and its workers, and let it in no more. ``Lost`` is told if it was there."""
        self.expected.pop(name_of(keeper), None)
        for connection in (*self.unproven, *self._connections.values()):
            if connection.keeper == keeper:
                connection.end("it is not needed any more")

    def taken(self, address: str) -> h.DoorTaken:
        """What there is for a later controller. Keepers that were on their way, with what brought them gone, are let in
        no more."""
        self.expected.clear()
        for connection in (*self.unproven, *self._connections.values()):
            if connection.joined is None:
                connection.end("another controller has come before it has said where it is")
        return h.DoorTaken(address, [each.kept() for each in self._connections.values()], self._lives)

    def close(self) -> None:
        """Hang up on all."""
        if self._watch is not None:
            self._watch.cancel()
        if self._gate is not None:
            self._gate.close()
        for connection in list(self._connections.values()):
            connection.end("the controller ends")

    def proven(self, connection: _Connection) -> None:
        """A keeper has proven itself."""
        self.unproven.discard(connection)
        self._connections[connection.keeper] = connection

    def tell(self, connection: _Connection, word: h.HostEvent | h.Lost) -> None:
        """What a keeper has said, or that it is lost."""
        if isinstance(word, h.Lost):
            del self._connections[connection.keeper]
        if self.on_word is not None:
            self.on_word(connection.keeper, word)

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
        self.joined: h.Joined | None = None
        """Where it has said that it is."""
        self._post: h.KeeperPost | None = None
        """Once it has shown its certificate."""
        self._workers: dict[int, h.KeptWorker] = {}
        """Those that have been ordered and have not ended, by order."""
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
        self._post = post = self._server.expected.pop(name)
        self._server.unproven.add(self)
        self.keeper = post.identity
        self._handshake = Handshake(bytes.fromhex(post.token_hex), CONTROLLER, Purpose.KEEPER, initiator=False)
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

    def carry(self, command: h.HostCommand) -> None:
        """The controller's order to this keeper."""
        if isinstance(command, h.Spawn):
            start = command.start
            self._workers[command.order] = h.KeptWorker(command.order, start.epoch, digest_of(start.spec))
        self.send(framed(msgspec.json.encode(command)))

    def kept(self) -> h.KeptKeeper:
        """For a later controller."""
        assert self._post is not None and self.joined is not None
        return h.KeptKeeper(self._post.number, self._post.life, self.joined, list(self._workers.values()))

    def send(self, message: bytes) -> None:
        """One message."""
        if self._transport is not None and not self._is_over:
            self._transport.write(message)

    def end(self, why: str) -> None:
        """Hang up, and tell so if the keeper was there. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self._server.unproven.discard(self)
        if self._transport is not None:
            self._transport.abort()
        if self._handshake is None and self.keeper != CONTROLLER:
            self._server.tell(self, h.Lost(why))

    def _take(self, event: h.HostEvent) -> None:
        match event:
            case h.Joined():
                self.host, self.joined = event.host, event
            case h.Ended(order):
                self._workers.pop(order, None)
            case h.Spawned(order, near, far) if order in self._workers:
                self._workers[order] = msgspec.structs.replace(self._workers[order], near=near, far=far)
            case h.Forked(order, pid) if order in self._workers:
                self._workers[order] = msgspec.structs.replace(self._workers[order], pid=pid)
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
        self._server.proven(self)
        return handshake.rest


class _Line:
    """To one controller."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def tell(self, word: h.DoorWord) -> None:
        """Never blocks."""
        self.writer.write(msgspec.json.encode(word) + b"\n")

    def pass_on(self, keeper: Identity, word: h.HostEvent | h.Lost) -> None:
        """What a keeper has said."""
        if not isinstance(word, h.Beat) or self.writer.transport.get_write_buffer_size() < _MOST_WAITING_BYTES:
            self.tell(h.Said(keeper, word))

    async def obey(self, server: HostServer) -> bool:
        """Until the controller is gone; whether it has ended in order."""
        server.on_word = self.pass_on
        try:
            with contextlib.suppress(OSError):  # also of what was told to a controller that is gone
                while (line := await self.reader.readline()).endswith(b"\n"):  # one that is not whole does not count
                    command = msgspec.json.decode(line, type=h.DoorCommand)
                    if isinstance(command, h.Expect):
                        server.expect(command.post)
                    elif isinstance(command, h.Dismiss):
                        server.dismiss(command.keeper)
                    elif isinstance(command, h.CloseDoor):
                        return True
                    else:
                        server.send(command.keeper, command.command)
            return False
        finally:
            server.on_word = None
            self.writer.close()


class _Successors:
    """Later controllers, of which the parent lets one live at a time."""

    def __init__(self, succession: h.Succession) -> None:
        """Listens. Raises OSError, also where the parent has ended."""
        self._succession = succession
        self._epoch = succession.epoch
        """Of the last controller."""
        self._proven = asyncio.Queue[_Line]()
        self._parent_fd = os.pidfd_open(succession.parent_pid)
        with contextlib.suppress(FileNotFoundError):  # left by a process like this one that has ended
            os.unlink(succession.path)
        self._listener = listening_socket(f"unix:{succession.path}")
        self._server: asyncio.AbstractServer | None = None

    async def listen(self) -> None:
        """From now on."""
        self._server = await asyncio.start_unix_server(self._on_connect, sock=self._listener, limit=h.MAX_MESSAGE_BYTES)

    async def next(self) -> _Line | None:
        """The next one; None: the parent has ended, or there has been none in time."""
        loop, parent_ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._parent_fd, parent_ended.set)
        ends = [asyncio.ensure_future(each) for each in (self._proven.get(), parent_ended.wait())]
        try:
            await asyncio.wait(ends, timeout=self._succession.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return cast(_Line, ends[0].result()) if ends[0].done() else None
        finally:
            loop.remove_reader(self._parent_fd)
            for end in ends:
                end.cancel()

    async def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            word = msgspec.json.decode(await asyncio.wait_for(reader.readline(), _FIRST_WORD_S), type=h.TakeDoor)
            self._check(word)
        except (LinkDownError, msgspec.DecodeError, OSError, ValueError, TimeoutError) as error:
            log.error("what asks for the keepers gets none: %s", error)
            writer.close()
            return
        self._epoch = word.epoch
        self._proven.put_nowait(_Line(reader, writer))

    def _check(self, word: h.TakeDoor) -> None:
        """Raises LinkDownError."""
        from jettison.transport.succession import check_signed  # brings what no other controller needs

        if word.epoch <= self._epoch:
            raise LinkDownError(f"a controller of epoch {word.epoch}, after one of {self._epoch}")
        secret, public_key = map(bytes.fromhex, (self._succession.secret_hex, self._succession.public_key_hex))
        check_signed(public_key, secret, word.epoch, word.signature)


async def _serve(sock: socket.socket) -> None:
    """The process, until no controller is left."""
    line: _Line | None = _Line(*await asyncio.open_unix_connection(sock=sock, limit=h.MAX_MESSAGE_BYTES))
    assert line is not None
    opening = msgspec.json.decode(await line.reader.readline(), type=h.OpenDoor)
    server, successors = HostServer(LeaseTimes.of(opening.lease_s)), None
    try:
        papers = Papers(opening.key_pem.encode(), opening.certificate_pem.encode(), opening.authority_pem.encode())
        if opening.succession is not None:
            successors = _Successors(opening.succession)
            await successors.listen()
        address = server.start(opening.address, control_context(papers, is_open=False))
    except (OSError, ValueError) as error:
        line.tell(h.DoorOpened("", str(error)))
        await line.writer.drain()
        return
    line.tell(h.DoorOpened(address))
    while line is not None:
        ends_in_order = await line.obey(server)
        line = None if ends_in_order or successors is None else await successors.next()
        if line is not None:
            line.tell(server.taken(address))
    server.close()


def main() -> None:
    """The process. A terminal's signals are the controller's matter."""
    name_process(HOST_SERVER)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(_serve(socket.socket(fileno=0)))


if __name__ == "__main__":
    main()
