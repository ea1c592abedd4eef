"""The control channel between hosts: which worker gets in and what for, what a capture shows, what it is good for."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket

import pytest

from jettison.core import ports
from jettison.errors import LinkDownError
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.live.wire.channel import ControlServer, WorkerChannel, framed
from jettison.transport.authority import Applicant, Authority
from jettison.transport.dialling import Dialling
from jettison.transport.handshake import CONTROLLER, Identity, Purpose
from jettison.transport.tls import Credentials, TlsContexts, control_context
from waiting import PATIENCE_S

SECRET = b"s" * 32
OURS, OTHERS = Authority(), Authority()
WORDS = b"what the tenant has asked, in plain words"
TOKEN = b"t" * 32
WORKER = Identity(1, 0)


def contexts(worker=1, life=0, authority=OURS):
    return TlsContexts(authority.papers_for(Identity(worker, life)))


class Controller:
    """Life 0 of worker 1 is wanted; one with the right token gets a certificate."""

    def __init__(self):
        self.heard = []
        self.server = ControlServer(
            SECRET,
            lambda worker, event: self.heard.append((worker, event)),
            lambda worker: self.heard.append((worker,)),
            self.certify,
        )

    def certify(self, worker, event):
        if event.token != TOKEN:
            return None
        return m.Certificate(OURS.sign(event.request, Identity(worker, 0)), OURS.certificate)

    async def start(self, identity=CONTROLLER, authority=OURS):
        self.address = await self.server.start("tcp:127.0.0.1:0", control_context(authority.papers_for(identity)))
        self.server.expect(1, 0)

    async def connect(self, tls, me=WORKER, purpose=Purpose.CONTROL, secret=SECRET):
        return await asyncio.to_thread(WorkerChannel.connect, self.address, Credentials(secret, me, tls), purpose)

    async def joined(self, tls):
        """The channel of a worker that the controller has let in."""
        channel = await self.connect(tls)
        async with asyncio.timeout(PATIENCE_S):
            while not self.server.is_connected(1):
                await asyncio.sleep(0.001)
        return channel

    async def until(self, count):
        async with asyncio.timeout(PATIENCE_S):
            while len(self.heard) < count:
                await asyncio.sleep(0.001)


@pytest.fixture
async def controller():
    controller = Controller()
    await controller.start()
    yield controller
    controller.server.close()


async def receive(channel, count):
    commands = []
    async with asyncio.timeout(PATIENCE_S):
        while len(commands) < count and channel.is_open:
            commands += channel.receive()
            await asyncio.sleep(0.001)
    return commands


async def refused(channel):
    """It is hung up on, with no word before."""
    assert await receive(channel, 1) == [] and not channel.is_open
    channel.close()


async def test_a_worker_asks_for_its_certificate_and_speaks_with_it(controller):
    me = Identity(1, 0)
    asks = TlsContexts.without_certificate(OURS.certificate)
    desk = await controller.connect(asks, purpose=Purpose.ENROL)
    applicant = Applicant(me)
    desk.emit(m.CertificateWanted(1, TOKEN, applicant.request))
    (answer,) = await receive(desk, 1)
    desk.close()
    assert not controller.server.is_connected(1) and controller.heard == []
    channel = await controller.joined(TlsContexts(applicant.papers(answer.certificate, answer.authority)))
    big = m.Step(bytes(3_000_000))
    controller.server.send(1, big)
    controller.server.send(1, m.Stop())
    assert await receive(channel, 2) == [big, m.Stop()]
    events = [ports.CallFailed(1, i, "y" * 100_000) for i in range(100)]
    for event in events:
        channel.emit(event)
    assert channel.wants_write
    await asyncio.to_thread(channel.close, 10.0)
    await controller.until(101)
    assert controller.heard == [*((1, event) for event in events), (1,)]


@pytest.mark.parametrize("tls", [
    pytest.param(lambda: contexts(authority=OTHERS), id="of another authority"),
    pytest.param(lambda: contexts(2), id="of another worker"),
    pytest.param(lambda: contexts(1, 1), id="of another life"),
    pytest.param(lambda: TlsContexts.without_certificate(OURS.certificate), id="none at all"),
])  # fmt: skip
async def test_a_worker_with_a_wrong_certificate_commands_nothing(controller, tls):
    with contextlib.suppress(LinkDownError):  # of another authority: TLS itself says no
        await refused(await controller.connect(tls()))
    assert not controller.server.is_connected(1) and controller.heard == []
    channel = await controller.joined(contexts())
    controller.server.send(1, m.Stop())
    assert await receive(channel, 1) == [m.Stop()], "the door is open to the right one"
    channel.close()


async def test_an_older_life_is_refused_with_its_own_certificate(controller):
    controller.server.expect(1, 1)
    await refused(await controller.connect(contexts(1, 0)))
    (await controller.connect(contexts(1, 1), Identity(1, 1))).close()


async def test_the_secret_is_asked_for_inside(controller):
    for tls, purpose in ((contexts(), Purpose.CONTROL), (TlsContexts.without_certificate(OURS.certificate),
                                                         Purpose.ENROL)):  # fmt: skip
        with pytest.raises(LinkDownError, match="secret"):
            await controller.connect(tls, secret=b"x" * 32, purpose=purpose)
    assert controller.heard == []


@pytest.mark.parametrize("event", [
    pytest.param(m.CertificateWanted(1, b"x" * 32, Applicant(Identity(1, 0)).request), id="a token of its own"),
    pytest.param(ports.ShardLoaded(1, 5), id="another word"),
])  # fmt: skip
async def test_a_connection_without_certificate_gets_one_and_says_nothing_else(controller, event):
    desk = await controller.connect(TlsContexts.without_certificate(OURS.certificate), purpose=Purpose.ENROL)
    controller.server.send(1, m.Stop())
    desk.emit(event)
    await refused(desk)
    assert controller.heard == []


async def test_a_certified_worker_does_not_ask_again_this_way(controller):
    await refused(await controller.connect(contexts(), purpose=Purpose.ENROL))


@pytest.mark.parametrize(("identity", "authority"), [
    pytest.param(CONTROLLER, OTHERS, id="of another authority"),
    pytest.param(Identity(2, 0), OURS, id="a worker's"),
])  # fmt: skip
async def test_a_worker_tells_nothing_to_a_controller_with_a_wrong_certificate(identity, authority):
    false = Controller()
    await false.start(identity, authority)
    for tls, purpose in ((contexts(), Purpose.CONTROL), (TlsContexts.without_certificate(OURS.certificate),
                                                         Purpose.ENROL)):  # fmt: skip
        with pytest.raises(LinkDownError, match="certificate"):
            await false.connect(tls, purpose=purpose)
    false.server.close()


async def test_nothing_goes_over_a_network_without_tls(controller):
    with pytest.raises(LinkDownError, match="without TLS"):
        await controller.connect(None)
    with pytest.raises(ValueError, match="without TLS"):
        await ControlServer(SECRET, print, print).start("tcp:127.0.0.1:0")


class Tap:
    """A relay between a worker and the controller that keeps what either says."""

    def __init__(self, address):
        self.there = address.rpartition(":")[2]
        self.said = [bytearray(), bytearray()]
        self._tasks = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"tcp:127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _relay(self, *near):
        far = await asyncio.open_connection("127.0.0.1", int(self.there))
        for kept, (reader, _), (_, writer) in ((self.said[0], near, far), (self.said[1], far, near)):
            self._tasks.add(asyncio.create_task(self._pass_on(kept, reader, writer)))

    async def _pass_on(self, kept, reader, writer):
        while data := await reader.read(1 << 16):
            kept += data
            writer.write(data)
        writer.close()


async def test_a_capture_shows_nothing_and_opens_nothing(controller):
    async with Tap(controller.address) as tap:
        there, controller.address = controller.address, tap.address
        channel = await controller.joined(contexts())
        controller.server.send(1, m.Step(WORDS))
        channel.emit(ports.CallFailed(1, 1, WORDS.decode()))
        assert await receive(channel, 1) == [m.Step(WORDS)]
        await controller.until(1)
        channel.close()
        await controller.until(2)
        controller.address = there
        said = bytes(tap.said[0])
    assert all(kept and WORDS not in kept and SECRET not in kept for kept in tap.said)
    controller.server.expect(1, 0)
    for step in (len(said), 100):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(there.rpartition(":")[2]))
        for at in range(0, len(said), step):
            writer.write(said[at : at + step])
        with contextlib.suppress(OSError):
            await asyncio.wait_for(reader.read(), PATIENCE_S)  # the controller's own hello, and then it hangs up
        writer.close()
    assert len(controller.heard) == 2 and not controller.server.is_connected(1)


async def test_a_hello_that_was_heard_inside_opens_nothing_even_with_the_certificate(controller):
    """As of a host whose memory was read: a stolen key and certificate, and a hello and a proof of before."""

    class Recorded:
        def __init__(self, wire):
            self.wire, self.said = wire, []
            self.fileno, self.recv, self.close = wire.fileno, wire.recv, wire.close

        def send(self, data):
            self.said.append(bytes(data))
            return self.wire.send(data)

    class Recording:
        def wrap(self, sock, *, accepts):
            return Recorded(contexts().wrap(sock, accepts=accepts))

    def open_wire():
        sock = socket.create_connection(("127.0.0.1", int(controller.address.rpartition(":")[2])))
        sock.setblocking(False)
        return contexts().wrap(sock, accepts=False)

    def record():
        dial = Dialling(controller.address, Credentials(SECRET, Identity(1, 0), contexts()), Purpose.CONTROL)
        select.select([], [dial.sock], [], 10)
        dial._tls = Recording()
        while dial.advance() is None:
            select.select([dial.sock], [], [], 1)
        return dial.sock

    def repeat(said):
        wire, answers = open_wire(), 0
        wire.send(said[0])
        while True:
            select.select([wire], [], [], 10)
            try:
                data = wire.recv(1 << 14)
            except BlockingIOError:
                continue
            except OSError:
                break
            if not data:
                break
            answers += 1
            wire.send(said[1] + framed(codec.encode(ports.ShardLoaded(1, 7))))
        wire.close()
        return answers

    recorded = await asyncio.to_thread(record)
    assert len(recorded.said) == 2
    recorded.close()
    await controller.until(1)
    assert controller.heard == [(1,)]
    controller.server.expect(1, 0)
    assert await asyncio.to_thread(repeat, recorded.said) == 1, "its hello is answered, its proof is not taken"
    assert controller.heard == [(1,)] and not controller.server.is_connected(1)
