"""What a streamed token costs in the HTTP server, without a model: CPU time, memory.

    python -m benchmarks peers http [--streams 64] [--tokens 500]

A stub engine makes one token for every stream at each step, as soon as all have been taken. It runs in the server's
process, as the real one does; the client is another process that reads raw bytes. The stub alone, with its events taken
by a loop that does nothing, is measured too and subtracted. CPU time hardly depends on what else the machine does.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil
import tokenizers
import uvloop
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.shared import REPOSITORY, SUPPRESS, Namespace, Row, again, keep, machine, parse
from jettison.core.ports import StoredWork
from jettison.live.engine.api import EngineInfo, EngineSnapshot, EngineState, RequestTimings, TokenEvent
from jettison.policy.slo import UNKNOWN_OBJECTIVES, Objectives
from jettison.server.app import ServerSettings, Tokenizer, create_app
from jettison.server.serving import run_server
from jettison.types import FinishReason, Request, RequestId, SampledToken, SamplingParams


class StubEngine:
    """One token for every stream at each step, as soon as all have been taken."""

    state: EngineState = "ready"
    info = EngineInfo("stub", 1 << 20, 1 << 20, 1 << 20, 1 << 31, ())

    def __init__(self) -> None:
        self._queues: dict[RequestId, asyncio.Queue[TokenEvent]] = {}
        self._left: dict[RequestId, int] = {}
        self._stepper: asyncio.Task[None] | None = None

    def submit(self, request: Request, *, is_further: bool = False) -> AsyncIterator[TokenEvent]:
        self._queues[request.request_id] = queue = asyncio.Queue()
        self._left[request.request_id] = request.params.max_tokens
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._step_all())
        return self._events(queue, request)

    async def _events(self, queue: asyncio.Queue[TokenEvent], request: Request) -> AsyncIterator[TokenEvent]:
        while True:
            event = await queue.get()
            yield event
            if event.finish_reason is not None:
                return

    async def _step_all(self) -> None:
        while self._queues:
            while any(queue.qsize() for queue in self._queues.values()):
                await asyncio.sleep(0)
            for request_id, queue in tuple(self._queues.items()):
                self._left[request_id] -= 1
                over = not self._left[request_id]
                timings = RequestTimings(0, 0, 0, 1) if over else None
                reason = FinishReason.LENGTH if over else None
                queue.put_nowait(TokenEvent([SampledToken(97)], reason, timings=timings))
                if over:
                    del self._queues[request_id]
            await asyncio.sleep(0)

    def cancel(self, request_id: RequestId) -> None:
        if (queue := self._queues.pop(request_id, None)) is not None:
            queue.put_nowait(TokenEvent([], FinishReason.CANCELLED))

    finish_early = cancel

    def check_queue(self, tenant: str, num_arriving: int = 0) -> None:
        """No queue is full."""

    def num_unread(self, request_id: RequestId) -> int:
        return self._queues[request_id].qsize() if request_id in self._queues else 0

    def note_stored(self, works: Sequence[StoredWork]) -> None:
        """No instance sleeps."""

    def timings(self, request_id: RequestId) -> None:
        """The harness asks for no way of a request."""

    def objectives(self) -> Objectives:
        return UNKNOWN_OBJECTIVES

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot("ready", 16)


def write_tokenizer(folder: Path) -> None:
    """Token ``b`` stands for byte ``b``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")


async def serve() -> int:
    """The server process: prints its port."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = Tokenizer.from_dir(folder)
    app = create_app(StubEngine(), tokenizer, ServerSettings(model_names=("stub",)))
    return await run_server(
        app, "127.0.0.1", 0, shutdown_timeout_s=1, on_started=lambda port: print(port, flush=True)
    )


async def stub_alone(num_streams: int, num_tokens: int) -> float:
    """CPU microseconds a token that the stub itself costs."""
    engine = StubEngine()

    async def drain(index: int) -> None:
        async for _ in engine.submit(Request(str(index), (1,), SamplingParams(max_tokens=num_tokens), 0)):
            pass

    start_s = time.process_time()
    await asyncio.gather(*(drain(index) for index in range(num_streams)))
    return (time.process_time() - start_s) * 1e6 / (num_streams * num_tokens)


async def read_stream(port: int, path: str, body: bytes) -> int:
    """Tokens received."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    num_events, tail = 0, b""
    while b"[DONE]" not in tail:
        data = await reader.read(1 << 16)
        if not data:
            break
        num_events += data.count(b"data: {")
        tail = data[-20:]
    writer.close()
    return num_events


async def load(port: int, options: Namespace) -> tuple[int, float]:
    """Open all streams; tokens received, seconds."""
    fields = {"model": "stub", "max_tokens": options.tokens, "stream": True, "stream_options": {"include_usage": False}}
    chat = options.endpoint == "chat"
    fields |= {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = json.dumps(fields).encode()
    start_s = time.monotonic()
    counts = await asyncio.gather(*(read_stream(port, path, body) for _ in range(options.streams)))
    return sum(counts), time.monotonic() - start_s


def measure(options: Namespace) -> Row:
    """One run: a fresh server process, the load, and what it cost."""
    command = again("peers", "http", "--serve")
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        process = psutil.Process(child.pid)
        before = process.cpu_times()
        num_tokens, wall_s = uvloop.run(load(port, options))
        after = process.cpu_times()
        rss_mib = process.memory_info().rss / (1 << 20)
    finally:
        child.terminate()
        child.wait(10)
    cpu_s = after.user + after.system - before.user - before.system
    stub_us = uvloop.run(stub_alone(options.streams, options.tokens))
    result: Row = {
        "endpoint": options.endpoint, "streams": options.streams, "tokens_expected": options.streams * options.tokens,
        "tokens_received": num_tokens, "wall_s": round(wall_s, 3),
        "server_cpu_us_per_token": round(cpu_s * 1e6 / num_tokens, 2), "stub_cpu_us_per_token": round(stub_us, 2),
        "http_cpu_us_per_token": round(cpu_s * 1e6 / num_tokens - stub_us, 2), "server_rss_mib": round(rss_mib, 1),
    }  # fmt: skip
    return result


def main() -> None:
    options = parse(
        __doc__, streams=64, tokens=(500, "per stream"),
        endpoint=("chat", {"choices": ["completions", "chat"]}), repeat=1, serve=(False, {"help": SUPPRESS}),
    )  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft < hard else soft, hard))
    if options.serve:
        sys.exit(uvloop.run(serve()))
    document = {"machine": machine(), "runs": [measure(options) for _ in range(options.repeat)]}
    print(json.dumps(document, indent=2))
    keep(options.json, document, "server")
