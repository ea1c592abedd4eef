"""The socket's side: headers without end, slow clients, signals, and draining."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from served import eventually, sse_events

from jettison.config import EngineConfig
from jettison.device.model.end_tokens import EndTokens
from jettison.errors import ConfigError, ModelError
from jettison.server import launch, serving
from jettison.server import sockets as server_sockets
from jettison.server.serving import open_socket
from jettison.server.settings import ServerSettings
from waiting import PATIENCE_S


async def exchange(port, *parts, timeout_s=PATIENCE_S):
    """Send raw parts, one packet each, and read until the server closes. It may have closed before all are sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()

    async def listen() -> None:
        with contextlib.suppress(ConnectionError):
            while some := await reader.read(1 << 16):
                answer.extend(some)

    listening = asyncio.create_task(listen())
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.005)
        async with asyncio.timeout(timeout_s):
            await listening
        return bytes(answer)
    finally:
        listening.cancel()
        writer.close()


async def test_headers_have_a_limit(serve):
    async with serve(FakeEngine(), max_header_bytes=2000) as served:
        for parts in (
            [b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 3000 + b"\r\n\r\n"],
            [b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: ", *[b"a" * 300] * 9],  # a line that never ends
            [b"GET /health HTTP/1.1\r\n", *[b"x-a: %d\r\n" % at * 30 for at in range(15)]],  # headers that never end
            [b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
            [b"GET /" + b"a" * 3000],
        ):
            answer = await exchange(served.port, *parts)
            assert answer.startswith(b"HTTP/1.1 431 "), (parts[0][:40], answer)
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
        body = b'{"prompt": "' + b"x" * 250 + b'", "max_tokens": 1}'
        big = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        answer = await exchange(served.port, big * 3 + b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer.count(b"HTTP/1.1 200 OK") == 4  # bodies and pipelined requests are not headers


CHUNKED = b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_what_surrounds_a_body_is_no_way_around_the_limit(serve):
    line = b"x-t: %s\r\n" % (b"t" * 500)
    async with serve(FakeEngine(), api_keys=("secret",), max_header_bytes=2000) as served:
        for start, tail in (
            (b"POST /v1/completions", [b"0\r\n", *[line] * 40]),  # trailers that never end
            (b"POST /v1/completions", [b"0\r\nx-t: ", *[b"t" * 500] * 40]),  # one trailer that never ends
            (b"GET /health", [b"1\r\nx\r\n0\r\n", *[line] * 40]),
            (b"POST /v1/completions", [b"1;x=", *[b"x" * 500] * 40]),  # a chunk extension that never ends
        ):
            answer = await exchange(served.port, start + CHUNKED, *tail)  # reads until the server closes
            assert answer.count(b"HTTP/1.1 ") == 1, answer  # one request, one answer
        body = b'{"prompt": "hi", "max_tokens": 1}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n"
        whole = head + b"\r\n%x;a=b\r\n%s\r\n0\r\nauthorization: Bearer secret\r\n\r\n" % (len(body), body)
        assert (await exchange(served.port, whole)).startswith(b"HTTP/1.1 401 ")  # a trailer is no header
        whole = whole.replace(b"connection", b"authorization: Bearer secret\r\nconnection")
        assert (await exchange(served.port, whole)).startswith(b"HTTP/1.1 200 ")


async def test_trailers_before_an_answer_are_refused(serve):
    line = b"x-t: %s\r\n" % (b"t" * 500)
    async with serve(FakeEngine(), max_header_bytes=2000) as served:
        parts = [b"POST /v1/completions" + CHUNKED, b"1\r\n{\r\n0\r\n", *[line] * 8]
        assert (await exchange(served.port, *parts)).startswith(b"HTTP/1.1 431 ")
        parts = [b"POST /v1/completions" + CHUNKED, b"1\r\n{\r\nno chunk"]
        assert (await exchange(served.port, *parts)).startswith(b"HTTP/1.1 400 ")
        await eventually(lambda: served.state.admission.num_active == 0)


async def test_an_answered_request_must_end_too(serve):
    async with serve(FakeEngine(), idle_timeout_s=0.2) as served:
        for tail in ([b"1\r\nx\r\n"], [b"1\r\nx\r\n0\r\n\r\n"], [b"1\r\nx\r\n"] * 9, []):
            answer = await exchange(served.port, b"GET /health" + CHUNKED, *tail)
            assert answer.startswith(b"HTTP/1.1 200 "), tail


async def test_a_body_that_ends_behind_its_answer_keeps_the_connection(serve):
    async with serve(FakeEngine()) as served:
        last = b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        answer = await exchange(served.port, b"GET /health" + CHUNKED, b"1\r\nx\r\n", b"0\r\n\r\n", last)
        assert answer.count(b"HTTP/1.1 200 OK") == 2


async def test_headers_and_bodies_have_a_deadline(serve):
    async with serve(FakeEngine(), header_timeout_s=0.25, body_timeout_s=0.25) as served:
        for parts in (
            [],
            [b"GET /health HT"],
            [b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /health HT"],  # the second one on a kept connection
            [b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n", b"{"],
            [b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\n{\r\n"],
        ):
            answer = await exchange(served.port, *parts)
            assert b"HTTP/1.1 408 " in answer, (parts, answer)
            assert b"request_timeout" in answer
        await eventually(lambda: served.state.admission.num_active == 0)


async def test_bytes_that_are_no_http(serve):
    async with serve(FakeEngine()) as served:
        for data in (b"\x16\x03\x01\x02\x00\x01\x00\xff\xff", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\x00" * 99):
            answer = await exchange(served.port, data)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


async def test_draining(serve):
    engine = FakeEngine(delay_s=None)
    hooks = []

    async def on_drain(timeout_s):
        hooks.append(timeout_s)
        engine.release()

    async with serve(engine, on_drain=on_drain, shutdown_timeout_s=60) as served:
        stream = asyncio.create_task(served.completion(max_tokens=50, stream=True))
        await eventually(lambda: engine.accepted)
        served.state.begin_drain()
        health = await served.http.get(f"{served.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        refused = await served.completion(max_tokens=1)
        assert refused.status_code == 503
        assert refused.headers["retry-after-ms"]
        served.stop.set()
        assert await served.finished == 0
        assert len(sse_events((await stream).text)) == 51  # nothing of it was lost
        assert hooks == [60]


@pytest.fixture
def no_grace(monkeypatch):
    """What the server's end does not wait for is cut off at once."""
    monkeypatch.setattr(serving, "ABORT_GRACE_S", 0.05)


@pytest.mark.parametrize("num_fronts", [0, 1])
async def test_draining_waits_for_downloads(serve, batch_settings, no_grace):
    content = b"x" * (32 << 20)  # more than sockets hold
    limits = {"shutdown_timeout_s": 60, "max_upload_bytes": 2 * len(content)}
    async with serve(FakeEngine(), batches=batch_settings(), **limits) as served:
        async with served.openai() as client:
            file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        async with served.http.stream("GET", f"{served.url}/v1/files/{file.id}/content") as answer:
            pieces = answer.aiter_raw(1 << 20)
            num_bytes = len(await anext(pieces))
            served.stop.set()
            await asyncio.wait({served.finished}, timeout=0.5)
            num_bytes += sum([len(piece) async for piece in pieces])
        assert num_bytes == len(content)
        assert await served.finished == 0


@pytest.mark.parametrize("num_fronts", [0, 1])
async def test_draining_waits_for_uploads(serve, batch_settings, no_grace):
    parts = (b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n',
             b'content-disposition: form-data; name="file"; filename="f"\r\n\r\n{}\n\r\n--b--\r\n')  # fmt: skip
    head = "POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\nconnection: close"
    async with serve(FakeEngine(), batches=batch_settings(), shutdown_timeout_s=60) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(f"{head}\r\ncontent-length: {sum(map(len, parts))}\r\n\r\n".encode() + parts[0])
        await eventually(lambda: served.state.num_running == 1)
        served.stop.set()
        await asyncio.wait({served.finished}, timeout=0.5)
        writer.write(parts[1])
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        assert await served.finished == 0


async def test_what_outlasts_the_timeout_is_told(serve):
    engine = FakeEngine(delay_s=None)
    async with serve(engine, shutdown_timeout_s=0.05) as served:
        stream = asyncio.create_task(served.completion(max_tokens=50, stream=True))
        whole = asyncio.create_task(served.completion(max_tokens=50))
        await eventually(lambda: len(engine.accepted) == 2)
        served.stop.set()
        error, done = sse_events((await stream).text)
        assert json.loads(error)["error"]["code"] == "shutting_down"
        assert done == "[DONE]"
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert int(answer.headers["retry-after-ms"]) > 0
        assert await served.finished == 0


CHILD = """
import sys, uvloop
sys.path.insert(0, sys.argv[1])
from fake_engine import FakeEngine
from jettison.server.app import ServerSettings, Tokenizer, create_app
from jettison.server.serving import run_server

async def main():
    engine = FakeEngine(delay_s=0.02)
    app = create_app(engine, Tokenizer.from_dir(sys.argv[2]), ServerSettings(model_names=("fake",)))
    def started(port): print(port, flush=True)
    return await run_server(app, "127.0.0.1", 0, shutdown_timeout_s=60, on_started=started)

sys.exit(uvloop.run(main()))
"""


@pytest.mark.parametrize("num_signals", [1, 2])
async def test_signals(tokenizer_dir, num_signals):
    """The first one drains, the second one does not wait."""
    import httpx

    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(Path(__file__).parent), str(tokenizer_dir),
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    try:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            url = f"http://127.0.0.1:{int(await child.stdout.readline())}"
            body = {"prompt": "p", "max_tokens": 25 if num_signals == 1 else 290, "stream": True}
            async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                first = await anext(lines)
                for _ in range(num_signals):
                    child.send_signal(signal.SIGTERM)
                    await asyncio.sleep(0.05)
                events = sse_events("\n\n".join([first, *[line async for line in lines]]))
        code = await asyncio.wait_for(child.wait(), PATIENCE_S)
    finally:
        if child.returncode is None:
            child.kill()
    assert events[-1] == "[DONE]"
    if num_signals == 1:
        assert (code, len(events)) == (0, 26)
    else:
        assert code == 1
        assert json.loads(events[-2])["error"]["code"] == "shutting_down"


def test_an_address_in_use_is_one_line():
    with open_socket("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # see open_socket
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: "):
            open_socket("127.0.0.1", listener.getsockname()[1])


def test_a_kind_of_address_that_the_machine_does_not_have_is_one_line(monkeypatch):
    """As on a kernel that is booted with ipv6.disable=1."""
    def none(*_):
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(server_sockets.socket, "socket", none)
    with pytest.raises(ConfigError, match=r"cannot listen on \[::\]:8000: Address family not supported"):
        open_socket("::", 8000)


async def test_front_ends_hear_that_the_engine_has_started_and_the_collector_settles(monkeypatch):
    """At once: ``/health``, which the controller answers for them, says so to a client."""
    order = []

    class Starting:
        async def start(self):
            order.append("started")

    monkeypatch.setattr(launch, "settle_garbage_collector", lambda: order.append("settled"))
    monkeypatch.setattr(launch, "notify", lambda *told: order.append(told[0]))
    served = asyncio.Event()
    fronts = SimpleNamespace(tell=lambda: order.append("told"))
    starting = asyncio.create_task(launch._start(Starting(), SimpleNamespace(fronts=fronts), served))
    await asyncio.sleep(0)
    assert order == ["started", "told", "settled"]
    assert not starting.done()  # no client can connect yet
    served.set()
    await starting
    assert order == ["started", "told", "settled", "READY=1"]


async def test_the_launcher_hands_every_limit_on(tmp_path, monkeypatch):
    seen = {}

    def from_dir(folder, **options):
        seen.update(options)
        raise ModelError("seen enough")

    prepared = SimpleNamespace(end_tokens=EndTokens((), ()), byte_tokens=None)
    monkeypatch.setattr(launch.Engine, "prepare", lambda self: prepared)
    monkeypatch.setattr(launch, "health_details", lambda _: {})
    monkeypatch.setattr(launch.Tokenizer, "from_dir", from_dir)
    with pytest.raises(ModelError, match="enough"):
        await launch._serve(EngineConfig.resolve(model=str(tmp_path)))
    told = ServerSettings(model_names=("m",))
    assert seen == {"max_template_chars": told.max_template_chars, "templates": told.templates, "byte_tokens": None}
