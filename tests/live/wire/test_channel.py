"""The control channel between an asyncio controller and plain sockets."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest

from jettison.core import ports
from jettison.errors import LinkDownError
from jettison.live.wire import codec
from jettison.live.wire import messages as m
from jettison.live.wire.channel import ControlServer, WorkerChannel
from jettison.transport.handshake import Identity
from jettison.transport.tls import Credentials
from waiting import PATIENCE_S

SECRET = b"s" * 32


class Controller:
    def __init__(self, folder):
        self.address = f"unix:{folder}/control"
        self.heard: list[tuple] = []
        self.server = ControlServer(
            SECRET,
            lambda worker, event: self.heard.append((worker, event)),
            lambda worker: self.heard.append((worker,)),
        )

    async def connect(self, worker_id, secret=SECRET):
        self.server.expect(worker_id, 0)
        return await asyncio.to_thread(WorkerChannel.connect, self.address, Credentials(secret, Identity(worker_id, 0)))

    async def until(self, count):
        async with asyncio.timeout(PATIENCE_S):
            while len(self.heard) < count:
                await asyncio.sleep(0.001)


@pytest.fixture
async def controller(tmp_path):
    tmp_path.chmod(0o700)
    controller = Controller(tmp_path)
    await controller.server.start(controller.address)
    yield controller
    controller.server.close()


async def receive(channel, count):
    commands = []
    async with asyncio.timeout(PATIENCE_S):
        while len(commands) < count:
            commands += channel.receive()
            await asyncio.sleep(0.001)
    return commands


async def test_commands_and_events_in_order(controller):
    channel = await controller.connect(3)
    big = m.Step(bytes(3_000_000))
    controller.server.send(3, m.ReportMemory(1))
    controller.server.send(3, big)
    controller.server.send(3, m.Stop())
    controller.server.send(99, m.Stop())  # no such worker
    assert await receive(channel, 3) == [m.ReportMemory(1), big, m.Stop()]
    events = [ports.ShardLoaded(3, i) for i in range(100)]
    for event in events:
        channel.emit(event)
    await controller.until(100)
    assert controller.heard == [(3, event) for event in events]
    channel.close()
    await controller.until(101)
    assert controller.heard[-1] == (3,) and not controller.server.is_connected(3)


async def test_more_than_the_socket_takes_waits_and_arrives(controller):
    channel = await controller.connect(1)
    event = ports.CallFailed(1, 1, "X: " + "y" * 1_000_000)
    channel.emit(event)
    channel.emit(event)
    assert channel.wants_write
    await asyncio.to_thread(channel.close)
    # close() waits for the controller, which runs on this loop.
    await controller.until(3)
    assert controller.heard == [(1, event), (1, event), (1,)]


async def test_a_controller_that_goes_away_is_noticed(controller):
    channel = await controller.connect(1)
    await controller.until(0)
    controller.server.close()
    async with asyncio.timeout(PATIENCE_S):
        while channel.is_open:
            channel.receive()
            await asyncio.sleep(0.001)
    channel.emit(ports.ShardLoaded(1, 1))
    channel.close()
    channel.close()
    assert controller.heard == []


async def test_another_secret_is_refused(controller):
    with pytest.raises(LinkDownError, match="secret"):
        await controller.connect(1, b"x" * 32)
    assert not controller.server.is_connected(1)


async def test_a_life_that_is_over_is_let_in_no_more_which_is_said_once(controller, caplog):
    caplog.set_level(logging.INFO, "jettison.live.wire.channel")
    controller.server.expect(1, 1)
    over = Credentials(SECRET, Identity(1, 0))
    for _ in range(3):
        channel = await asyncio.to_thread(WorkerChannel.connect, controller.address, over)
        async with asyncio.timeout(PATIENCE_S):
            while channel.is_open:
                channel.receive()
                await asyncio.sleep(0.001)
    assert not controller.server.is_connected(1)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("INFO", "life 0 of worker 1 is over and let in no more")


async def test_garbage_costs_one_connection(controller):
    good = await controller.connect(1)
    bad = await controller.connect(2)
    bad._sock.sendall(b"\xff" * 64)
    await controller.until(1)
    assert controller.heard == [(2,)]
    rude = socket.socket(socket.AF_UNIX)
    rude.connect(controller.address.removeprefix("unix:"))
    rude.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    good.emit(ports.ShardLoaded(1, 5))
    await controller.until(2)
    assert controller.heard[-1] == (1, ports.ShardLoaded(1, 5))
    rude.close()
    good.close()
    bad.close()


async def test_a_command_that_cannot_be_read_is_an_error_of_the_channel(controller):
    channel = await controller.connect(1)
    controller.server._connections[1].send(b"\xc1")
    with pytest.raises(codec.CodecError):
        await receive(channel, 1)
    channel.close()
