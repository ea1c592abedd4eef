"""Requests one behind another on a connection: bounded however many come, ended with it, and silent in the log."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import struct

import psutil
import pytest
from fake_engine import FakeEngine
from served import eventually

from jettison.server import http_protocol
from jettison.server.http_protocol import MAX_QUEUED, SLICE_BYTES, BoundedHttpProtocol
from waiting import PATIENCE_S

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
GROWTH_LIMIT_BYTES = 25_000_000


def post(**fields) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 1} | fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def all_of(reader) -> bytes:
    """What comes until the server closes."""
    async with asyncio.timeout(PATIENCE_S):
        return await reader.read()


class Watched:
    """The protocols of all connections so far."""

    def __init__(self) -> None:
        self.made: list[BoundedHttpProtocol] = []
        self.lost: list[BoundedHttpProtocol] = []
        self.most_queued = 0


@pytest.fixture
def watched(monkeypatch):
    watched = Watched()
    made, lost = BoundedHttpProtocol.connection_made, BoundedHttpProtocol.connection_lost
    parse = BoundedHttpProtocol._parse

    def connection_made(self, transport):
        watched.made.append(self)
        made(self, transport)

    def connection_lost(self, error):
        watched.lost.append(self)
        lost(self, error)

    def counted_parse(self, data):
        assert len(data) <= SLICE_BYTES
        parse(self, data)
        watched.most_queued = max(watched.most_queued, len(self.pipeline))

    monkeypatch.setattr(BoundedHttpProtocol, "connection_made", connection_made)
    monkeypatch.setattr(BoundedHttpProtocol, "connection_lost", connection_lost)
    monkeypatch.setattr(BoundedHttpProtocol, "_parse", counted_parse)
    return watched


async def test_few_requests_wait_however_many_come(serve, watched):
    engine = FakeEngine(delay_s=None)
    async with serve(engine) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(post() + GET * 3000 + post() + LAST)
        await eventually(lambda: watched.most_queued == MAX_QUEUED)
        assert len(engine.accepted) == 1
        engine.release()
        answer = await all_of(reader)
        assert answer.count(b"HTTP/1.1 404 ") == 3000
        assert answer.count(b"HTTP/1.1 200 ") == 3
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert watched.most_queued == MAX_QUEUED
        writer.close()


@pytest.mark.parametrize("num_connections", [1, 4])
async def test_pipelined_requests_do_not_fill_the_memory(serve, num_connections):
    """40 MB of them, of 8 KB each: short ones take minutes."""
    request = b"GET /ping HTTP/1.1\r\nhost: x\r\nx-a: %s\r\n\r\n" % (b"a" * 8000)
    num_requests = 40_000_000 // len(request) // num_connections
    async with serve(FakeEngine()) as served:

        async def flood() -> int:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            answers = asyncio.create_task(reader.read())
            for _ in range(num_requests):
                writer.write(request)
                await writer.drain()
            writer.write(LAST)
            answer = await answers
            writer.close()
            return answer.count(b"HTTP/1.1 200 ")

        gc.collect()
        process = psutil.Process()
        before_bytes = process.memory_info().rss
        floods = asyncio.gather(*(flood() for _ in range(num_connections)))
        peak_bytes = before_bytes
        while not floods.done():
            peak_bytes = max(peak_bytes, process.memory_info().rss)
            await asyncio.wait([floods], timeout=0.02)
        assert await floods == [num_requests + 1] * num_connections
        assert peak_bytes - before_bytes < GROWTH_LIMIT_BYTES


async def test_a_body_behind_a_running_request_waits_outside(serve, watched):
    engine = FakeEngine(delay_s=None)
    async with serve(engine) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(post() + post(padding="x" * 3_000_000) + LAST)
        await eventually(lambda: watched.made and watched.made[0]._held)
        (protocol,) = watched.made
        assert len(protocol.cycle.body) < (64 << 10) + 2 * SLICE_BYTES
        engine.release()
        assert (await all_of(reader)).count(b"HTTP/1.1 200 ") == 3
        writer.close()


PART = b"GET /ping HTTP/1.1\r\nhost: x\r\nx-a: "


@pytest.mark.parametrize("behind", [GET * 100, PART, GET * 100 + PART, post()[:-5]])
async def test_no_deadline_for_headers_runs_behind_an_answer(serve, behind):
    """The first answer takes several times the deadline."""
    timeout_s = 0.05
    engine = FakeEngine(delay_s=None)
    async with serve(engine, header_timeout_s=timeout_s, body_timeout_s=timeout_s, idle_timeout_s=timeout_s) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(post() + behind)
        await eventually(lambda: engine.accepted)
        asyncio.get_running_loop().call_later(6 * timeout_s, engine.release)
        answer = await all_of(reader)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"HTTP/1.1 404 ") == behind.count(GET)
        # What stays incomplete has its deadline afterwards.
        assert answer.count(b"HTTP/1.1 408 ") == (0 if behind.endswith(GET) else 1)
        writer.close()


async def test_the_rest_of_a_pipelined_header_may_come_later(serve):
    engine = FakeEngine(delay_s=None)
    async with serve(engine, header_timeout_s=0.2, idle_timeout_s=0.01) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(post() + PART)
        await eventually(lambda: engine.accepted)
        engine.release()
        await reader.readuntil(b"completion_tokens")
        writer.write(b"a\r\nconnection: close\r\n\r\n")
        assert (await all_of(reader)).count(b"HTTP/1.1 200 ") == 1
        writer.close()


@pytest.mark.parametrize("behind", [b"", GET, post() * 3, GET * 3 + PART, post() * 3 + post()[:-5]])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", ["half-close", "reset"])
async def test_who_leaves_takes_all_requests_along(serve, watched, caplog, behind, stream, leave):
    engine = FakeEngine(delay_s=None)
    async with serve(engine) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(post(stream=stream) + behind)
        await eventually(lambda: engine.accepted)
        if leave == "reset":
            writer.transport.abort()
        else:
            writer.write_eof()
            answer = await all_of(reader)
            assert answer.count(b"HTTP/1.1 ") <= 1
        await eventually(lambda: served.state.admission.num_active == 0 and len(watched.lost) == 1)
        assert len(engine.cancelled) == len(engine.accepted) == 1
        assert not engine.running
        assert not watched.lost[0].pipeline
        writer.close()
    assert not caplog.records, caplog.text


async def test_a_half_close_behind_more_than_fits_ends_too(serve, watched, caplog):
    """It is seen when all bytes before it have had their turn."""
    engine = FakeEngine(delay_s=None)
    async with serve(engine) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(post() + GET * 500)
        writer.write_eof()
        await eventually(lambda: watched.most_queued == MAX_QUEUED)
        engine.release()
        answer = await all_of(reader)
        assert answer.count(b"HTTP/1.1 404 ") >= 500 - MAX_QUEUED
        await eventually(lambda: watched.lost)
        writer.close()
    assert not caplog.records, caplog.text


async def test_no_continue_behind_a_refusal(serve, caplog):
    async with serve(FakeEngine()) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"no chunk")
        assert (await all_of(reader)).startswith(b"HTTP/1.1 400 ")
        await eventually(lambda: served.state.admission.num_active == 0)
        writer.close()
    assert not caplog.records, caplog.text


@pytest.mark.parametrize("tail", [b"GARBAGE\r\n\r\n", b"\x00", b"GET http://[: HTTP/1.1\r\n\r\n" + GET])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_requests_before_garbage_are_answered(serve, tail, number, stream):
    async with serve(FakeEngine(delay_s=0.002)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(post(stream=stream, max_tokens=5) * number + tail)
        answers = await all_of(reader)
        writer.close()
        assert answers.count(b"HTTP/1.1 200 ") == number
        assert answers.count(b"HTTP/1.1 ") == number + 1
        last = answers[answers.rindex(b"HTTP/1.1 "):]
        assert last.startswith(b"HTTP/1.1 400 ") and b"connection: close" in last and b"invalid_http" in last
        await eventually(lambda: served.state.admission.num_active == 0)


@pytest.mark.parametrize("tail", [b"\x00", PART + b"a" * 20_000, b"GET http://[: HTTP/1.1\r\n\r\n\x1b[31m"])
@pytest.mark.parametrize("engine_delay_s", [0, 0.002])
async def test_garbage_behind_requests_is_not_logged(serve, watched, caplog, tail, engine_delay_s):
    engine = FakeEngine(delay_s=engine_delay_s)
    async with serve(engine) as served:
        for _ in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n{" * 2 + tail)
            await all_of(reader)
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(post(stream=True, max_tokens=5) * 2 + tail)
            await all_of(reader)
            writer.close()
        await eventually(lambda: len(watched.lost) == 100)
        await eventually(lambda: served.state.admission.num_active == 0)
        assert not engine.running
        assert served.state.admission.num_choices == 0
    assert not caplog.records, caplog.text


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET http://[: HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET //%zz HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET \xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n" + b"\x16\x03" * 99,
        b"GET /ping HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\nx-a: " + b"a" * 16_360 + b"\r\n\r\n" + GET,
        b"GET /ping HTTP/1.0\r\n\r\n" + b"\x00" * 99,
        LAST + GET * 3,
    ],
)
async def test_one_answer_and_the_end(serve, caplog, request_bytes):
    async with serve(FakeEngine(), idle_timeout_s=0.05) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request_bytes)
        answer = await all_of(reader)
        assert answer.count(b"HTTP/1.1 ") == 1, answer
        assert not answer.startswith(b"HTTP/1.1 5")
        writer.close()
    assert not caplog.records, caplog.text


@pytest.mark.parametrize("path", [b"/v1/nothing", b"/ping", b"/v1/completions"])
async def test_who_is_answered_before_the_request_has_ended_hears_it(serve, path):
    """Unread input would reset the connection, and the answer would be lost with it."""
    async with serve(FakeEngine(), api_keys=("secret",)) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 9\r\n\r\n{" % path)
        head = await reader.readuntil(b"\r\n\r\n")
        for byte in b'"a": 5}':
            writer.write(bytes([byte]))
            await asyncio.sleep(0.01)
        assert head.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 405 "))
        assert (await all_of(reader)).endswith(b"}}")
        writer.close()


async def test_line_ends_between_requests_hold_no_connection(serve):
    async with serve(FakeEngine(), header_timeout_s=0.1, idle_timeout_s=60) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"{}")
        writer.write(b"\r\n")
        assert (await all_of(reader)).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def connected(served, watched):
    """A connection, its stream to write to, and the protocol that has it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    own = writer.get_extra_info("sockname")

    def found():
        return [each for each in watched.made if each.client == own]

    await eventually(found)
    return reader, writer, found()[-1]


async def fill(served, watched):
    """Connections that have been answered and ask again, as many as may be: with front ends each has its own limit, and
    the kernel deals connections out."""
    states = [served.state] if served.fronts is None else [*served.fronts.states.values()]
    places = []
    async with asyncio.timeout(PATIENCE_S):
        while len(places) < sum(state.settings.max_connections for state in states):
            place = reader, writer, protocol = await connected(served, watched)
            if protocol._is_probe or protocol.is_refused:
                writer.close()
                await eventually(lambda protocol=protocol: protocol in watched.lost)
                continue
            writer.write(PING)
            assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200 ")
            writer.write(b"GET")
            await eventually(lambda protocol=protocol: protocol not in protocol.idle)
            places.append(place)
    return places


PING = b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n"


async def idle_one(served, watched):
    """A connection that has been answered and stays."""
    reader, writer, protocol = place = await connected(served, watched)
    writer.write(PING)
    await reader.readuntil(b"{}")
    await eventually(lambda: protocol in protocol.idle)
    return place


@pytest.fixture
def one_process(num_fronts):
    if num_fronts:
        pytest.skip("each front end has connections of its own")


async def test_an_idle_connection_gives_way_to_a_request_without_a_place(serve, watched, one_process, monkeypatch):
    """The one that has been idle longest, however many probes are there; one with a request keeps its place."""
    monkeypatch.setattr(http_protocol, "PROBE_TIMEOUT_S", PATIENCE_S)
    engine = FakeEngine(delay_s=None)
    async with serve(engine, max_connections=4, header_timeout_s=PATIENCE_S) as served:
        busy = await connected(served, watched)
        busy[1].write(post(stream=True, max_tokens=5))
        again, *idle = [await idle_one(served, watched) for _ in range(3)]
        again[1].write(PING)
        await again[0].readuntil(b"{}")
        others = [await connected(served, watched) for _ in range(3)]
        for reader, _, protocol in [*idle, again]:
            assert protocol not in watched.lost
            others.append(await connected(served, watched))
            others[-1][1].write(post(stream=True, max_tokens=5))
            assert await all_of(reader) == b"" and protocol in watched.lost
        await eventually(lambda: len(engine.running) == 4)
        others.append(await connected(served, watched))
        others[-1][1].write(post())
        assert (await all_of(others[-1][0])).startswith(b"HTTP/1.1 503 ")
        assert len(engine.running) == 4
        for _, writer, _ in (busy, again, *idle, *others):
            writer.close()


async def test_a_probe_takes_no_place(serve, watched, one_process):
    async with serve(FakeEngine(), max_connections=1) as served:
        _, kept, protocol = await idle_one(served, watched)
        for _ in range(3):
            reader, writer, _ = await connected(served, watched)
            writer.write(PING)
            assert (await all_of(reader)).startswith(b"HTTP/1.1 200 ")
            writer.close()
        assert protocol in protocol.idle
        kept.close()


async def test_a_request_behind_the_end_of_the_one_before_is_not_idle(serve, watched):
    """In one piece with the rest of a message whose answer has come."""
    engine = FakeEngine(delay_s=None)
    async with serve(engine) as served:
        reader, writer, protocol = await connected(served, watched)
        writer.write(b"GET /ping HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        await reader.readuntil(b"{}")
        writer.write(b"1\r\nx\r\n0\r\n\r\n" + post(stream=True, max_tokens=5))
        await eventually(lambda: engine.running)
        assert protocol not in protocol.idle and protocol.timeout_keep_alive_task is None
        writer.close()


async def test_a_full_server_still_answers_probes(serve, watched, monkeypatch):
    """One request each, on a few connections beyond the limit; they are no way in for anything else."""
    monkeypatch.setattr(http_protocol, "PROBE_CONNECTIONS", 2)
    async with serve(FakeEngine(), max_connections=1, header_timeout_s=PATIENCE_S) as served:
        places = await fill(served, watched)
        for path in (b"/ping", b"/health"):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path * 3)
            answer = await all_of(reader)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.count(b"HTTP/1.1 ") == 1
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(post(stream=True))
        assert (await all_of(reader)).startswith(b"HTTP/1.1 503 ")
        writer.close()

        def open_clients():
            return [each for each in watched.made if each.client is not None and each not in watched.lost]

        await eventually(lambda: len(open_clients()) == len(places))
        silent = []
        while len(silent) < 2 * len(places):
            another = await connected(served, watched)
            if another[2].is_refused:  # where both places of probes are taken
                another[1].close()
            else:
                silent.append(another)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        assert (await all_of(reader)).startswith(b"HTTP/1.1 503 ")
        for _, other, _ in (*silent, *places, (reader, writer, None)):
            other.close()


@pytest.mark.parametrize("num_behind", [0, 4, 40, 20_000])
@pytest.mark.parametrize("resets", [False, True])
async def test_a_client_that_leaves_is_noticed_whatever_it_had_sent(serve, num_behind, resets):
    """Bytes that are held stop reading, so the end of the connection is looked for."""
    engine = FakeEngine(delay_s=None)
    async with serve(engine) as served:
        sock = socket.create_connection(("127.0.0.1", served.port))
        sock.sendall(post(stream=True, max_tokens=5))
        await eventually(lambda: engine.running)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.send(GET * num_behind)
        if resets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        await eventually(lambda: not engine.running)
        await eventually(lambda: served.state.admission.num_active == 0)


async def test_bytes_held_by_all_connections_are_bounded(serve, watched, caplog):
    """With front ends in each of them, by its part of the bound."""
    engine = FakeEngine(delay_s=None)
    async with serve(engine, max_buffered_bytes=100_000, max_body_bytes=10_000) as served:
        writers = []
        for _ in range(8):
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(post(stream=True, max_tokens=5) + GET * 1500)
            writers.append(writer)
        await eventually(lambda: len(watched.made) == 8 and any(p.is_refused for p in watched.made))
        held = {id(each.held_bytes): each.held_bytes for each in watched.made}.values()
        takers = 1 if served.fronts is None else len(served.fronts.states)
        assert len(held) <= takers and sum(each.limit for each in held) <= 100_000
        await eventually(lambda: all(each.total <= each.limit for each in held))
        for writer in writers:
            writer.close()
        await eventually(lambda: len(watched.lost) == 8)
        assert [each.total for each in held] == [0] * len(held)
        assert 1 <= len([r for r in caplog.records if "are held" in r.message]) <= takers


async def test_connections_have_a_limit(serve, watched, caplog):
    async with serve(FakeEngine(), max_connections=2, header_timeout_s=PATIENCE_S) as served:
        places = await fill(served, watched)
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = await all_of(reader)
            assert answer.startswith(b"HTTP/1.1 503 ")
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"retry-after: 1" in head
            assert json.loads(body)["error"]["code"] == "too_many_connections"
            writer.close()
        takers = 1 if served.fronts is None else len(served.fronts.states)
        assert 1 <= len(caplog.records) <= takers  # of many clients that are turned away each says one line a minute
        assert f"{len(places) // takers} connections are open" in caplog.text
        places[0][1].close()

        async def is_open_again() -> bool:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(LAST)
            answer = await all_of(reader)
            writer.close()
            return answer.startswith(b"HTTP/1.1 200 ")

        async with asyncio.timeout(PATIENCE_S):
            while not await is_open_again():
                pass
        for _, writer, _ in places[1:]:
            writer.close()
