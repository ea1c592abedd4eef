"""The proxy before a fleet: whom it chooses, that answers come piece by piece, that no request stays counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engines.least_connections import HOST, LeastConnections, Proxy
from waiting import until

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\nContent-Length: 4\r\n\r\nbody"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
LIMIT_S = 20.0


class Replica:
    """A server that answers a request with the pieces that the test puts into ``pieces`` (None ends it)."""

    def __init__(self, name: str = "r") -> None:
        self.name = name
        self.port = 0
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.requests: list[bytes] = []
        self.hung_up = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /metrics"):
            writer.write(HEAD + f"vllm:num_requests_running {len(self.requests)}\n".encode())
            writer.close()
            return
        self.requests.append(head + await reader.readexactly(4))
        closed = asyncio.create_task(reader.read(1))
        closed.add_done_callback(lambda _: self.hung_up.set())
        writer.write(HEAD)
        while (piece := await self.pieces.get()) is not None:
            writer.write(piece)
        writer.close()


@pytest.fixture
async def replicas() -> AsyncIterator[list[Replica]]:
    both = [Replica("a"), Replica("b")]
    servers = [await asyncio.start_server(one.serve, HOST, 0) for one in both]
    for one, server in zip(both, servers, strict=True):
        one.port = server.sockets[0].getsockname()[1]
    yield both
    for one, server in zip(both, servers, strict=True):
        one.pieces.put_nowait(None)
        server.close()


@pytest.fixture
async def proxy(replicas: list[Replica]) -> AsyncIterator[Proxy]:
    made = Proxy([one.port for one in replicas])
    await made.start()
    yield made
    await made.close()


async def ask(proxy: Proxy, request: bytes = POST) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    writer.write(request)
    return reader, writer


@given(st.integers(1, 5), st.lists(st.integers(0, 9), max_size=60))
def test_the_least_loaded_is_chosen_whatever_ends_meanwhile(num, script):
    balance = LeastConnections(num)
    held: list[int] = []
    for choice in script:
        if choice < 4 and held:
            balance.end(held.pop(choice % len(held)))
        else:
            before = list(balance.in_flight)
            chosen = balance.begin()
            held.append(chosen)
            assert before[chosen] == min(before)
        assert balance.in_flight == [held.count(i) for i in range(num)]


def test_equals_take_turns():
    balance = LeastConnections(3)
    order = []
    for _ in range(6):
        order.append(balance.begin())
        balance.end(order[-1])
    assert order == [0, 1, 2, 0, 1, 2]


async def test_an_answer_is_handed_on_piece_by_piece(proxy, replicas):
    reader, writer = await ask(proxy)
    async with asyncio.timeout(LIMIT_S):
        assert await reader.readuntil(b"\r\n\r\n") == HEAD
        for piece in (b"data: one\n\n", b"data: two\n\n"):
            replicas[0].pieces.put_nowait(piece)
            assert await reader.readexactly(len(piece)) == piece  # before the next exists
        replicas[0].pieces.put_nowait(None)
        assert await reader.read() == b""
    writer.close()
    (request,) = replicas[0].requests
    assert request.endswith(b"\r\n\r\nbody")
    assert b"Connection: close\r\n" in request
    assert b"keep-alive" not in request
    await until(lambda: proxy.balance.in_flight == [0, 0])


async def test_requests_under_way_at_once_are_spread(proxy, replicas):
    open_ones = [await ask(proxy) for _ in range(4)]
    await until(lambda: sum(len(one.requests) for one in replicas) == 4)
    assert [len(one.requests) for one in replicas] == [2, 2]
    assert proxy.balance.in_flight == [2, 2]
    for one in replicas:
        one.pieces.put_nowait(None)
        one.pieces.put_nowait(None)
    await until(lambda: proxy.balance.in_flight == [0, 0])
    for _, writer in open_ones:
        writer.close()


async def test_a_client_that_hangs_up_frees_its_replica(proxy, replicas):
    reader, writer = await ask(proxy)
    async with asyncio.timeout(LIMIT_S):
        await reader.readuntil(b"\r\n\r\n")
    writer.close()
    async with asyncio.timeout(LIMIT_S):
        await replicas[0].hung_up.wait()
    replicas[0].pieces.put_nowait(None)
    await until(lambda: proxy.balance.in_flight == [0, 0])


async def test_metrics_are_those_of_every_replica(proxy, replicas):
    _, under_way = await ask(proxy)
    await until(lambda: replicas[0].requests)
    reader, _ = await ask(proxy, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(LIMIT_S):
        answer = await reader.read()
    assert answer.endswith(b"\r\n\r\nvllm:num_requests_running 1\nvllm:num_requests_running 0\n")
    assert proxy.balance.in_flight == [1, 0], "a look at the metrics is no request"
    under_way.close()


async def test_a_replica_that_is_down_is_a_bad_gateway(replicas):
    with contextlib.closing(await asyncio.start_server(lambda r, w: None, HOST, 0)) as gone:
        port = gone.sockets[0].getsockname()[1]
    lonely = Proxy([port])
    await lonely.start()
    reader, _ = await ask(lonely)
    async with asyncio.timeout(LIMIT_S):
        assert (await reader.read()).startswith(b"HTTP/1.1 502 ")
    await until(lambda: lonely.balance.in_flight == [0])
    await lonely.close()
