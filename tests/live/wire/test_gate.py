"""Connections that are not proven: how many may be, and that none is taken where none is awaited."""

from __future__ import annotations

import asyncio
import socket

import pytest

from jettison.live.wire.gate import Gate
from jettison.transport.authority import Authority
from jettison.transport.handshake import CONTROLLER, Identity
from jettison.transport.sockets import parse_address
from jettison.transport.tls import Papers, control_context, dialling_context
from waiting import PATIENCE_S, until

OURS = Authority()


class Guest(asyncio.Protocol):
    def __init__(self, met, settled):
        self.met, self.settled = met, settled

    def connection_made(self, transport):
        self.transport = transport
        self.met.append(self)

    def connection_lost(self, exc):
        self.settled()


class House:
    def __init__(self, num_awaited):
        self.num_awaited, self.met = num_awaited, []
        tls = control_context(OURS.papers_for(CONTROLLER))
        self.gate = Gate(lambda settled: Guest(self.met, settled), tls, lambda: self.num_awaited)
        self.address = self.gate.open("tcp:127.0.0.1:0")
        self.where = parse_address(self.address)[1:]

    async def silent(self):
        _, writer = await asyncio.open_connection(*self.where)
        return writer

    async def comes(self):
        _, writer = await asyncio.open_connection(*self.where, ssl=dialling_context(OURS.papers_for(Identity(1, 0))))
        return writer


@pytest.fixture
async def house():
    house = House(1)
    yield house
    house.gate.close()
    for guest in house.met:
        guest.transport.abort()


async def test_silent_connections_are_few_and_the_oldest_goes(house):
    silent = [await house.silent() for _ in range(40)]
    writer = await asyncio.wait_for(house.comes(), PATIENCE_S)
    await until(lambda: house.met)
    assert len(house.gate._unproven) == 18, "twice what is awaited, and strangers"
    house.met[0].settled()
    assert len(house.gate._unproven) == 17
    house.gate.close()
    for each in (*silent, writer):
        each.close()


async def test_none_is_taken_where_none_is_awaited(house):
    house.num_awaited = 0
    silent = [await house.silent() for _ in range(5)]
    await asyncio.sleep(0.1)
    assert not house.gate._unproven
    coming = asyncio.create_task(house.comes())
    house.num_awaited = 1
    house.gate.look()
    await asyncio.wait_for(coming, PATIENCE_S)
    await until(lambda: house.met)
    for each in (*silent, coming.result()):
        each.close()


async def test_a_handshake_that_fails_leaves_its_place(house):
    stranger = dialling_context(Papers(b"", b"", Authority().certificate))
    with pytest.raises(OSError):
        await asyncio.open_connection(*house.where, ssl=stranger)
    await until(lambda: not house.gate._unproven)
    (await house.comes()).close()
    await until(lambda: house.met and not house.gate._unproven)


async def test_a_connection_that_is_taken_sends_at_once_and_notices_a_lost_end(house):
    writer = await house.comes()
    await until(lambda: house.met)
    sock = house.met[0].transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 330_000
    writer.close()
