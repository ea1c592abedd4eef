"""Which keeper gets in at the controller, what a capture shows, and that beats are granted whatever else waits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import signal
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from jettison.errors import JettisonError, LinkDownError
from jettison.live.engine import host_door
from jettison.live.engine.host_door import HostDoor
from jettison.live.engine.host_server import HostServer
from jettison.live.host.far_keeper import FarKeeper
from jettison.live.wire import host_orders as h
from jettison.live.wire.channel import MessageBuffer, framed
from jettison.live.wire.lease import LeaseTimes
from jettison.transport.authority import Authority
from jettison.transport.handshake import CONTROLLER, Identity
from jettison.transport.sockets import parse_address
from jettison.transport.tls import control_context, dialling_context, keeper_identity
from waiting import PATIENCE_S, until

OURS, OTHERS = Authority(), Authority()
TOKEN = b"t" * 32


class Desk:
    """A controller that expects keeper 3, life 1."""

    def __init__(self, lease_s=600.0):
        self.heard, self.ended = [], asyncio.Event()
        self.server = HostDoor(lease_s, lambda keeper, word: self.heard.append((keeper, word)), self.ended.set)

    async def start(self, papers=None):
        self.address = await self.server.start("tcp:127.0.0.1:0", papers or OURS.papers_for(CONTROLLER))
        self.server.expect(self.post())
        self.server.expect(self.post(number=99))  # so that connections are taken all the time

    def post(self, token=TOKEN, number=3, life=1):
        return h.KeeperPost(
            number=number, life=life, address=self.address, token_hex=token.hex(),
            authority_pem=OURS.certificate.decode(), lease_s=600.0,
        )  # fmt: skip

    async def come(self, post, papers):
        """A keeper that says where it is; None where it is not let in."""
        keeper = FarKeeper(post, h.Place(host="somewhere", ip="127.0.0.1", certificate_pem=""))
        reader, writer = await keeper._connect(dialling_context(papers))
        writer.write(framed(msgspec.json.encode(h.Joined("somewhere", "x", "10.0.0.2"))))
        return reader, writer

    async def until(self, count):
        async with asyncio.timeout(PATIENCE_S):
            while len(self.heard) < count:
                await asyncio.sleep(0.001)


@pytest.fixture
async def desk():
    desk = Desk()
    await desk.start()
    yield desk
    await desk.server.close()


def papers(number=3, life=1, authority=OURS):
    return authority.papers_for(keeper_identity(number, life))


async def test_a_keeper_is_let_in_once_and_heard_to_its_end(desk):
    _, writer = await desk.come(desk.post(), papers())
    await desk.until(1)
    assert desk.heard == [(keeper_identity(3, 1), h.Joined("somewhere", "x", "10.0.0.2"))]
    await refused(desk, desk.post(), papers(), 1)
    writer.close()
    await desk.until(2)
    assert desk.heard[1] == (keeper_identity(3, 1), h.Lost("its keeper has ended"))


async def refused(desk, post, shown, num_heard=0):
    """It may find that out with its first read only; what it says is not heard."""
    with contextlib.suppress(LinkDownError, OSError, TimeoutError):
        reader, writer = await desk.come(post, shown)
        assert await reader.read(100) == b""
        writer.close()
    assert len(desk.heard) == num_heard


@pytest.mark.parametrize("shown", [
    pytest.param(lambda: papers(authority=OTHERS), id="of another authority"),
    pytest.param(lambda: papers(4), id="of another keeper"),
    pytest.param(lambda: papers(3, 0), id="of an older life"),
    pytest.param(lambda: OURS.papers_for(Identity(3, 1)), id="a worker's"),
    pytest.param(lambda: OURS.papers_for(CONTROLLER), id="the controller's"),
])  # fmt: skip
async def test_a_keeper_with_a_wrong_certificate_is_refused(desk, shown):
    await refused(desk, desk.post(), shown())
    _, writer = await desk.come(desk.post(), papers())
    await desk.until(1)
    writer.close()


async def test_a_stolen_certificate_opens_nothing_without_the_token(desk):
    await refused(desk, desk.post(token=b"x" * 32), papers())


async def test_a_keeper_obeys_no_other_controller():
    false = Desk()
    await false.start(OURS.papers_for(Identity(3, 1)))
    with pytest.raises(LinkDownError, match="certificate"):
        await false.come(false.post(), papers())
    await false.server.close()


async def test_a_keeper_that_is_dismissed_is_not_let_in(desk):
    desk.server.dismiss(keeper_identity(3, 1))
    await refused(desk, desk.post(), papers())


async def test_a_keeper_that_is_dismissed_between_its_certificate_and_its_proof_does_not_stay(desk):
    server = HostServer(LeaseTimes.of(600.0))
    server.expect(desk.post())
    address = server.start("tcp:127.0.0.1:0", control_context(OURS.papers_for(CONTROLLER), is_open=False))
    reader, writer = await asyncio.open_connection(*parse_address(address)[1:], ssl=dialling_context(papers()))
    await until(lambda: server.unproven)
    server.dismiss(keeper_identity(4, 1))
    assert server.unproven, "another one"
    server.dismiss(keeper_identity(3, 1))
    assert not server.unproven and not server.expected, "its proof would let it in"
    with contextlib.suppress(OSError):
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    assert not server._connections
    writer.close()
    server.close()


async def test_words_that_are_none_end_a_keeper(desk):
    _, writer = await desk.come(desk.post(), papers())
    writer.write(framed(b"{}"))
    await desk.until(2)
    assert desk.heard[1][1].why.startswith("it broke the protocol")


async def test_a_keeper_that_has_proven_itself_and_says_no_more_is_lost():
    desk = Desk(lease_s=0.5)
    await desk.start()
    keeper = FarKeeper(desk.post(), h.Place(host="somewhere", ip="127.0.0.1", certificate_pem=""))
    _, writer = await keeper._connect(dialling_context(papers()))
    await desk.until(1)
    assert "no word of it" in desk.heard[0][1].why
    writer.close()
    await desk.server.close()


async def test_beats_are_granted_while_the_controller_stands_still(desk):
    reader, writer = await desk.come(desk.post(), papers())
    await desk.until(1)
    grants, sock = MessageBuffer(), writer.get_extra_info("socket")
    writer.write(framed(msgspec.json.encode(h.Beat(1, []))))
    await asyncio.sleep(0)  # written; from here on this loop stands still
    assert select.select([sock], [], [], PATIENCE_S)[0], "the grant is there, and this process has not had a turn"
    (grant,) = grants.feed(await reader.read(1 << 16))
    assert msgspec.json.decode(grant, type=h.HostCommand) == h.Granted(1)
    writer.close()


async def test_a_capture_of_orders_shows_no_secret(desk):
    """The cluster's secret goes to keepers in these orders."""
    said = bytearray()

    async def relay(reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", int(desk.address.rpartition(":")[2]))

        async def pass_on(source, target):
            while data := await source.read(1 << 16):
                said.extend(data)
                target.write(data)
            target.close()

        await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer), return_exceptions=True)

    tap = await asyncio.start_server(relay, "127.0.0.1", 0)
    post = msgspec.structs.replace(desk.post(), address=f"tcp:127.0.0.1:{tap.sockets[0].getsockname()[1]}")
    reader, writer = await desk.come(post, papers())
    await desk.until(1)
    desk.server.send(keeper_identity(3, 1), h.Abandon(1234567, 7654321))
    assert b"7654321" in await reader.read(1 << 16)
    writer.close()
    await desk.until(2)
    tap.close()
    assert said and not any(word in said for word in (b"1234567", b"7654321", b"somewhere", TOKEN, b"keeper-3"))


async def test_a_word_of_a_keeper_is_short(desk):
    _, writer = await desk.come(desk.post(), papers())
    writer.write(framed(msgspec.json.encode(h.Joined("x" * h.MAX_WORD_BYTES, "x", "x"))))
    await desk.until(2)
    assert "control message of" in desk.heard[1][1].why


async def test_a_line_that_cannot_be_read_ends_all(desk):
    """As of a process whose memory is broken: no keeper lives of which nothing is heard any more."""
    desk.server._listening.cancel()
    reader = asyncio.StreamReader(limit=100)
    reader.feed_data(b"x" * 1000)
    await desk.server._listen(reader)
    assert desk.ended.is_set()
    assert await asyncio.wait_for(desk.server._process.wait(), PATIENCE_S)


async def test_a_process_that_does_not_end_is_killed(desk, monkeypatch):
    monkeypatch.setattr(host_door, "_CLOSE_TIMEOUT_S", 0.05)
    desk.server._process.send_signal(signal.SIGSTOP)
    await asyncio.wait_for(desk.server.close(), PATIENCE_S)


async def test_without_the_process_that_takes_them_all_keepers_end(desk):
    reader, writer = await desk.come(desk.post(), papers())
    await desk.until(1)
    assert psutil.Process(desk.server._process.pid).name() == "jettison-hosts"
    desk.server._process.kill()
    await asyncio.wait_for(desk.ended.wait(), PATIENCE_S)
    with contextlib.suppress(OSError):
        assert await reader.read(100) == b""
    writer.close()
    desk.server.send(keeper_identity(3, 1), h.EmptyCopy())


async def test_an_address_that_cannot_be_had_is_told_of():
    desk = Desk()
    with pytest.raises(JettisonError, match=r"keepers cannot be taken at tcp:203\.0\.113\.1:1"):
        await desk.server.start("tcp:203.0.113.1:1", OURS.papers_for(CONTROLLER))
    await desk.server.close()


async def test_a_first_controller_finds_no_keepers_and_says_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    door = HostDoor(1.0, lambda keeper, word: None, lambda: None)
    assert await door.find(SimpleNamespace(folder=tmp_path)) is None
    assert not caplog.records and not door.is_open
