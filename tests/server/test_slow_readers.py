"""Clients that do not read: cut off after a while, whatever they have asked for; slow ones are served."""

from __future__ import annotations

import asyncio
import json
import logging
import socket

import pytest
from fake_engine import FakeEngine
from served import eventually

from jettison.server import serving, state
from jettison.server.http_protocol import BoundedHttpProtocol
from jettison.server.quiet_log import Seldom


async def small_window(port: int):
    """A connection whose kernel takes next to nothing ahead of its reader."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=sock, limit=1024)


def post(**fields) -> bytes:
    body = json.dumps({"model": "fake", "prompt": "p", "ignore_eos": True} | fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


LARGE = {"max_tokens": 290, "n": 16, "logprobs": 20}
"""Several megabytes of answer."""


@pytest.fixture
def lost(monkeypatch):
    """Connections that have ended. They are looked at with every tick: a second's wait shows nothing more."""
    monkeypatch.setattr(serving, "LOOK_TICKS", 1)
    protocols = []
    connection_lost = BoundedHttpProtocol.connection_lost

    def note(self, error):
        protocols.append(self)
        connection_lost(self, error)

    monkeypatch.setattr(BoundedHttpProtocol, "connection_lost", note)
    return protocols


@pytest.mark.parametrize("num_fronts", [0, 1])
async def test_who_reads_more_slowly_than_tokens_are_made_is_dropped(serve, num_fronts, lost, caplog, monkeypatch):
    monkeypatch.setattr(state, "MOST_UNREAD_VALUES", 16 * 21 * 5)
    engine = FakeEngine(delay_s=0.005)
    engine.unread = 6  # the fake makes no event before it is asked for; a front end's wait in truth
    async with serve(engine, write_timeout_s=60) as served:
        _, writer = await small_window(served.port)
        writer.write(post(**LARGE, stream=True))
        await eventually(lambda: len(set(engine.cancelled)) == LARGE["n"])
        await eventually(lambda: lost and served.state.admission.num_active == 0)
        assert not engine.running and not served.state.generations
        writer.close()
        engine.unread = 5
        assert (await served.completion(max_tokens=20, logprobs=20)).status_code == 200
    assert "reads its answer more slowly" in caplog.text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("behind", [b"", b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"])
async def test_who_reads_nothing_is_dropped(serve, lost, caplog, stream, behind):
    engine = FakeEngine(tokens_per_event=10)
    async with serve(engine, write_timeout_s=0.1, idle_timeout_s=60) as served:
        _, writer = await small_window(served.port)
        writer.write(post(**LARGE, stream=stream) + behind)
        await eventually(lambda: lost)
        await eventually(lambda: served.state.admission.num_active == 0)
        assert not engine.running
        assert bool(engine.cancelled) == stream  # what is answered in one piece is made when no client reads it
        assert served.state.admission.num_choices == 0
        writer.transport.abort()
    assert [record.getMessage() for record in caplog.records] == [
        "dropping a client that has not read its answer for 0.1 s"]


async def test_a_refusal_that_is_not_read_holds_nothing(serve, lost):
    """Errors and probes too: a connection that is to be closed waits for its last bytes."""
    async with serve(FakeEngine(), write_timeout_s=0.1) as served:
        _, writer = await small_window(served.port)
        head = b"GET /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: %s\r\n\r\n" % (b"x" * 128)
        for _ in range(1000):
            writer.write(head)
        await eventually(lambda: lost)
        writer.transport.abort()


async def test_who_reads_slowly_gets_everything(serve):
    engine = FakeEngine(tokens_per_event=10)
    async with serve(engine) as served:
        reader, writer = await small_window(served.port)
        writer.write(post(**LARGE, stream=True))
        async with asyncio.timeout(60):
            answer = bytearray()
            while not answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                answer += await reader.read(1 << 14)
        assert not engine.cancelled
        writer.close()


class FakeTransport:
    """Bytes that wait, as the test says."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_aborted = False
        self.is_ending = False

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def is_closing(self) -> bool:
        return self.is_ending

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def connection():
    """A protocol with a fake transport: ``look`` is all that is called."""
    made = BoundedHttpProtocol.__new__(BoundedHttpProtocol)
    made.transport = FakeTransport()
    made.flow = type("Flow", (), {"write_paused": True})
    made.write_timeout_s = 60.0
    made.seldom = Seldom(logging.getLogger("test"))
    made._running = type("Cycle", (), {"response_complete": False})
    made._held, made._num_unsent_bytes, made._unread_since_s = b"", 0, None
    return made


def test_nothing_taken_for_the_whole_time_ends_it(connection):
    connection.transport.num_bytes = 70_000
    for now_s in range(0, 60):
        connection.look(float(now_s))
    assert not connection.transport.is_aborted
    connection.look(60.0)
    assert connection.transport.is_aborted


def test_any_byte_taken_begins_the_time_anew(connection):
    connection.transport.num_bytes = 70_000
    for now_s in range(0, 600, 50):
        connection.look(float(now_s))
        connection.transport.num_bytes -= 1
    assert not connection.transport.is_aborted


def test_an_answer_that_can_go_on_is_no_sign(connection):
    """The buffer of a slow reader grows while its answer is made faster than it is read."""
    connection.flow.write_paused = False
    for now_s in range(0, 600, 10):
        connection.transport.num_bytes += 100
        connection.look(float(now_s))
    assert not connection.transport.is_aborted
    connection.transport.is_ending = True
    connection.look(600.0)
    connection.look(660.0)
    assert connection.transport.is_aborted
