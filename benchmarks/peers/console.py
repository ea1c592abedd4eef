"""What the console costs the server: CPU time of its process with 64 streams open, with a viewer and without, in turns.

    python -m benchmarks peers console [--streams 64] [--turns 10] [--seconds 5] [--instances 4] [--rate 20]

The engine is a stub that makes a token for every stream at a fixed pace, and so the streams cost the same in all
turns; its snapshots have as many instances as asked, and read the memory of as many processes as the real one does. The
viewer asks as the page does, for the data (``now``) and every third time for lists, too (``requests``), but ``--rate``
times a second in place of once, with a snapshot made for each: one a second costs less than what turns differ by. The
share of a core that a page costs is the difference over the rate.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.peers.http import StubEngine, write_tokenizer
from benchmarks.shared import REPOSITORY, SUPPRESS, Namespace, Row, again, keep, machine, parse, say, spread
from jettison.core.ports import Record
from jettison.live.engine.api import EngineSnapshot, GroupSnapshot, RequestTimings, TokenEvent, WorkerSnapshot
from jettison.live.machine.memory import rss_bytes
from jettison.server.app import ServerSettings, Tokenizer, create_app
from jettison.server.console import feed
from jettison.server.console.settings import ConsoleSettings
from jettison.server.serving import run_server
from jettison.types import NANOSECONDS, FinishReason, SampledToken

PACE_S = 0.05
"""Seconds between two tokens of a stream: 20 tokens a second, faster than a reader."""
EVENTS_PER_S = 10
"""Records of the log, more than any run here has had for minutes."""
KINDS = ("none", "now", "requests")
TOKENS = 200
"""Of one answer; a stream that ends is opened again at once."""


class PacedEngine(StubEngine):
    """A token for every stream each ``PACE_S``, and a log of decisions."""

    def __init__(self, num_instances: int) -> None:
        super().__init__()
        self._num_instances = num_instances

    async def _step_all(self) -> None:
        due_s = time.monotonic()
        while self._queues:
            for request_id, queue in tuple(self._queues.items()):
                self._left[request_id] -= 1
                over = not self._left[request_id]
                now_ns = time.monotonic_ns()
                timings = RequestTimings(now_ns, now_ns, now_ns, now_ns) if over else None
                queue.put_nowait(TokenEvent([SampledToken(97)], FinishReason.LENGTH if over else None, timings=timings))
                if over:
                    del self._queues[request_id]
            due_s += PACE_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    def records(self, after_ns: int, most: int) -> Sequence[Record]:
        """``EVENTS_PER_S`` for each second since then."""
        now_ns = time.monotonic_ns()
        gap_ns = NANOSECONDS // EVENTS_PER_S
        first_ns = max(after_ns, now_ns - most * gap_ns) // gap_ns * gap_ns + gap_ns
        fields = {"group": 0, "reason": "a step of its group lacked blocks", "request_ids": ["r"], "tokens": 100}
        return [Record("preempted", at_ns, fields) for at_ns in range(first_ns, now_ns, gap_ns)]

    def snapshot(self) -> EngineSnapshot:
        ids = range(self._num_instances)
        groups = [GroupSnapshot(at, (at,), ((0, 32),), 16, 0, 0, 1000, 500, 100) for at in ids]
        workers = [
            WorkerSnapshot(at, os.getpid(), True, 1 << 30, 1 << 29, 0, 1 << 28, 1 << 27, 1 << 27,
                           rss_bytes=rss_bytes(os.getpid()))
            for at in ids
        ]
        return EngineSnapshot("ready", 16, groups, workers)


async def serve(options: Namespace) -> int:
    """The stub's server process: prints its port."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = Tokenizer.from_dir(folder)
    engine = PacedEngine(options.instances)
    feed.PERIOD_NS = 0  # a snapshot for each look
    settings = ServerSettings(model_names=("stub",), console=ConsoleSettings(records=engine.records))
    app = create_app(engine, tokenizer, settings)
    return await run_server(
        app, "127.0.0.1", 0, shutdown_timeout_s=1, on_started=lambda port: print(port, flush=True)
    )


@contextmanager
def served(options: Namespace) -> Iterator[tuple[int, int]]:
    """A server: its port and its process."""
    command = again("peers", "console", "--serve", "--instances", str(options.instances))
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    try:
        assert child.stdout is not None
        yield int(child.stdout.readline()), child.pid
    finally:
        child.terminate()
        child.wait(10)


class Load:
    """Streams that stay open."""

    def __init__(self, port: int, num_streams: int) -> None:
        body = json.dumps({
            "model": "stub", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "prompt": "a",
        }).encode()  # fmt: skip
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self._request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        self._port = port
        self.num_tokens = 0
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(num_streams)]

    async def _stream(self) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(self._request)
            tail = b""
            while b"[DONE]" not in tail and (data := await reader.read(1 << 16)):
                self.num_tokens += data.count(b"data: {")
                tail = data[-20:]
            writer.close()

    async def close(self) -> None:
        """End them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Viewer:
    """Asks as a page does."""

    def __init__(self, port: int, kind: str, rate: float) -> None:
        self._port, self._kind, self._pause_s = port, kind, 1.0 / rate
        self.num_answers = self.num_bytes = 0

    async def watch(self) -> None:
        """Until it is cancelled."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        after, num_asked = 0, 0

        async def ask(path: str) -> bytes:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            body = await reader.readexactly(int(length.partition(b":")[2]))
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head.decode())
            self.num_answers += 1
            self.num_bytes += len(body)
            return body

        try:
            while True:
                begun_s = time.monotonic()
                after = json.loads(await ask(f"/console/data?after={after}"))["last_event"]
                if self._kind == "requests" and num_asked % 3 == 0:
                    await ask("/console/requests")
                num_asked += 1
                await asyncio.sleep(max(0.0, self._pause_s - (time.monotonic() - begun_s)))
        finally:
            writer.close()


def cpu_s(pid: int) -> float:
    """CPU seconds of the process's threads so far, without its children; to the nanosecond, as the kernel counts."""
    folder = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in folder.iterdir()) / NANOSECONDS


async def turn(server: tuple[int, int], load: Load, kind: str, options: Namespace) -> Row:
    """One turn: CPU time and tokens meanwhile."""
    port, pid = server
    viewer = Viewer(port, kind, options.rate)
    watching = None if kind == "none" else asyncio.create_task(viewer.watch())
    await asyncio.sleep(1.0)  # the first look reads the whole log
    begun_s, cpu_before_s, tokens_before = time.monotonic(), cpu_s(pid), load.num_tokens
    answers_before, bytes_before = viewer.num_answers, viewer.num_bytes
    await asyncio.sleep(options.seconds)
    wall_s = time.monotonic() - begun_s
    row: Row = {
        "viewer": kind, "cpu_share": (cpu_s(pid) - cpu_before_s) / wall_s,
        "tokens_per_s": (load.num_tokens - tokens_before) / wall_s,
        "answers": viewer.num_answers - answers_before, "bytes": viewer.num_bytes - bytes_before, "wall_s": wall_s,
    }  # fmt: skip
    if watching is not None:
        if watching.done():
            watching.result()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return row


async def measure(options: Namespace) -> list[Row]:
    """All turns, the kinds in another order each time."""
    rows: list[Row] = []
    with served(options) as server:
        load = Load(server[0], options.streams)
        await asyncio.sleep(3.0)
        try:
            for number in range(options.turns):
                for at in range(len(KINDS)):
                    kind = KINDS[(at + number) % len(KINDS)]
                    rows.append({"turn": number} | await turn(server, load, kind, options))
                    say(f"{kind}: {rows[-1]['cpu_share']:.4f} of a core, {rows[-1]['tokens_per_s']:.0f} tokens/s")
        finally:
            await load.close()
    return rows


def summary(rows: Sequence[Row], rate: float) -> Row:
    """For each view: the share of a core that a page costs, by the turn without one beside it, and the bytes that it
    takes a second."""
    found: Row = {}
    none = {row["turn"]: row["cpu_share"] for row in rows if row["viewer"] == "none"}
    for kind in KINDS[1:]:
        mine = [row for row in rows if row["viewer"] == kind]
        seen = median(row["answers"] / row["wall_s"] for row in mine)
        found[kind] = {
            "core_share": spread([(row["cpu_share"] - none[row["turn"]]) / rate for row in mine]),
            "bytes_per_s": median(row["bytes"] / row["wall_s"] for row in mine) / rate, "answers_per_s": seen / rate,
        }  # fmt: skip
    return found | {"without": spread(list(none.values()))}


def main() -> None:
    options = parse(
        __doc__, streams=64, turns=10, seconds=5.0, instances=4, rate=(20.0, "looks a second"),
        serve=(False, {"help": SUPPRESS}),
    )  # fmt: skip
    if options.serve:
        sys.exit(uvloop.run(serve(options)))
    rows = uvloop.run(measure(options))
    settings = {name: str(value) for name, value in vars(options).items() if name not in ("json", "serve")}
    document = {"machine": machine(), "settings": settings, "summary": summary(rows, options.rate), "rows": rows}
    print(json.dumps(document["summary"], indent=2))
    keep(options.json, document, "server")
