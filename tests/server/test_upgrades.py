"""Requests that ask for another protocol: answered in HTTP/1.1, their bodies read."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest
from fake_engine import FakeEngine

from waiting import PATIENCE_S

BODY = json.dumps({"prompt": "hi", "max_tokens": 3, "seed": 1}).encode()
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAA\r\n"
"""What Java's HttpClient sends."""


def request(*lines: bytes, body: bytes = BODY, more: bytes = H2C, is_chunked: bool = False) -> bytes:
    framing = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % len(body)
    if is_chunked:
        half = len(body) // 2
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:], b""))
    head = b"\r\n".join([b"POST /v1/completions HTTP/1.1", b"host: x", *lines, framing])
    return head + b"\r\n" + more + b"\r\n" + body


async def answers(served, data: bytes, *, size: int | None = None) -> list[dict]:
    """Of a connection whose last request closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    for at in range(0, len(data), size or len(data)):
        writer.write(data[at : at + (size or len(data))])
        await writer.drain()
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        parts = (await reader.read()).split(b"HTTP/1.1 ")[1:]
    writer.close()
    return [{"status": int(part[:3])} | json.loads(part.split(b"\r\n\r\n", 1)[1]) for part in parts]


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("size", [None, 1, 50])
async def test_the_body_is_read_and_the_connection_goes_on(serve, is_chunked, size):
    data = request(is_chunked=is_chunked) * 2 + request(b"connection: close", more=b"")
    async with serve(FakeEngine()) as served:
        first, second, last = await answers(served, data, size=size)
        assert first["status"] == second["status"] == last["status"] == 200
        assert first["choices"] == second["choices"] == last["choices"]


@pytest.mark.parametrize("asked", [b"upgrade\r\nupgrade: websocket", b"close, upgrade\r\nupgrade: x"])
async def test_whatever_is_asked_for(serve, asked):
    more = b"connection: " + asked + b"\r\n"
    async with serve(FakeEngine()) as served:
        last = request(b"connection: close", more=b"")
        coded = request(b"content-encoding: gzip", body=gzip.compress(BODY), more=more)
        for data in (request(more=more) + last, coded + last):
            told = [answer["status"] for answer in await answers(served, data)]
            assert told == [200] * (1 if asked.startswith(b"close") else 2)


async def test_limits_hold_for_such_a_body(serve):
    async with serve(FakeEngine(), max_body_bytes=500) as served:
        for data in (request(body=b"x" * 600), request(body=b"x" * 600, is_chunked=True)):
            (answer,) = await answers(served, data)
            assert (answer["status"], answer["error"]["code"]) == (413, "request_too_large")
        (answer,) = await answers(served, request(is_chunked=True)[: -len(b"0\r\n\r\n")] + b"no size\r\n")
        assert (answer["status"], answer["error"]["code"]) == (400, "invalid_http")


@pytest.mark.parametrize("head", [
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n", b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n",
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nx: " + b"a" * 9000 + b"\r\n",
])  # fmt: skip
async def test_what_is_refused_by_its_head_is_not_read_on(serve, caplog, head):
    async with serve(FakeEngine(), max_header_bytes=8000) as served:
        (answer,) = await answers(served, head + H2C + b"\r\nhello")
        assert answer["status"] in (400, 431)
    assert not caplog.records, caplog.text
