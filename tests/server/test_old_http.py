"""HTTP/1.0, as nginx and health checkers speak it, and HEAD: raw bytes against a real server."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_engine import FakeEngine, bytes_of
from served import eventually, sse_events

from waiting import PATIENCE_S


class Connection:
    """One connection, answers read by their length where they have one."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, served):
        return cls(*await asyncio.open_connection("127.0.0.1", served.port))

    async def ask(self, head, body=b"", *more):
        length = b"content-length: %d\r\ncontent-type: application/json\r\n" % len(body) if body else b""
        self.writer.write(b"\r\n".join([head, *more, b""]) + length + b"\r\n" + body)
        async with asyncio.timeout(PATIENCE_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), headers

    async def rest(self):
        async with asyncio.timeout(PATIENCE_S):
            rest = await self.reader.read()
        self.writer.close()
        return rest


ASK = {"prompt": "hi", "max_tokens": 6, "seed": 1}
WHOLE, STREAM = json.dumps(ASK).encode(), json.dumps(ASK | {"stream": True}).encode()
POST = b"POST /v1/completions HTTP/1.0"


@pytest.mark.parametrize("more", [(), (b"connection: keep-alive",), (b"host: x", b"connection: close")])
async def test_a_stream_ends_with_its_connection(serve, more):
    async with serve(FakeEngine(bytes_of("é!"))) as served:
        connection = await Connection.open(served)
        status, headers = await connection.ask(POST, STREAM, *more)
        assert status == 200
        assert "transfer-encoding" not in headers and "content-length" not in headers
        assert headers["connection"] == "close"
        text = (await connection.rest()).decode()
        *events, done = sse_events(text)
        assert text.startswith("data: {") and text.endswith("data: [DONE]\n\n") and done == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == "é!é!"


async def test_an_answer_with_a_length_keeps_the_connection_where_it_is_asked_for(serve):
    async with serve(FakeEngine()) as served:
        connection = await Connection.open(served)
        for _ in range(3):
            status, headers = await connection.ask(POST, WHOLE, b"Connection: Keep-Alive")
            assert (status, headers["connection"]) == (200, "keep-alive")
            assert json.loads(await connection.reader.readexactly(int(headers["content-length"])))["choices"]
        status, headers = await connection.ask(b"GET /nowhere HTTP/1.0", b"", b"connection: keep-alive")
        assert (status, headers["connection"]) == (404, "keep-alive")
        await connection.reader.readexactly(int(headers["content-length"]))
        status, headers = await connection.ask(POST, WHOLE)
        assert (status, headers["connection"]) == (200, "close")
        assert len(await connection.rest()) == int(headers["content-length"])


async def test_a_body_in_chunks_is_none_of_that_version(serve):
    async with serve(FakeEngine()) as served:
        connection = await Connection.open(served)
        status, headers = await connection.ask(POST, b"", b"transfer-encoding: chunked")
        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(await connection.rest())["error"]["code"] == "invalid_http"


async def test_a_transfer_coding_that_is_not_undone_is_refused(serve):
    async with serve(FakeEngine()) as served:
        for coding, told in ((b"gzip, chunked", 400), (b"Chunked", 200), (b"gzip", 400), (b"chunked, gzip", 400)):
            connection = await Connection.open(served)
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: " + coding
            connection.writer.write(head + b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(WHOLE), WHOLE))
            answer = await connection.rest()
            assert answer.startswith(b"HTTP/1.1 %d " % told), (coding, answer[:200])


async def test_an_expectation_of_that_version_is_none(serve):
    async with serve(FakeEngine()) as served:
        connection = await Connection.open(served)
        status, headers = await connection.ask(POST, WHOLE, b"expect: 100-continue")
        assert status == 200  # and no 100 before it
        assert len(await connection.rest()) == int(headers["content-length"])


async def test_a_client_that_leaves_a_stream_cancels_it(serve):
    engine = FakeEngine(delay_s=None)
    async with serve(engine) as served:
        connection = await Connection.open(served)
        await connection.ask(POST, STREAM)
        await eventually(lambda: engine.running)
        connection.writer.close()
        await eventually(lambda: engine.cancelled and not engine.running)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_head_has_headers_and_nothing_behind_them(serve, version):
    async with serve(FakeEngine(), api_keys=("k",), max_header_bytes=2000) as served:
        for path, more, status in (
            (b"/health", (), 200), (b"/metrics", (), 200), (b"/v1/models", (), 401), (b"/health/", (), 200),
            (b"/v1/completions", (b"authorization: Bearer k",), 405), (b"/v1/x", (b"authorization: Bearer k",), 404),
            (b"/health", (b"x-a: " + b"a" * 3000,), 431),
        ):  # fmt: skip
            connection = await Connection.open(served)
            head = b"HEAD %s HTTP/%s" % (path, version)
            told, headers = await connection.ask(head, b"", b"host: x", b"connection: close", *more)
            assert (told, int(headers["content-length"]) > 0) == (status, True), path
            assert await connection.rest() == b""


async def test_the_newer_version_is_answered_as_before(serve):
    async with serve(FakeEngine()) as served:
        connection = await Connection.open(served)
        status, headers = await connection.ask(b"POST /v1/completions HTTP/1.1", STREAM, b"host: x")
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        assert "connection" not in headers
        connection.writer.close()
