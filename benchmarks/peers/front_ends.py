"""What a streamed token costs with front ends in processes of their own: an engine that pretends (a token for every
open stream each 20 ms) under the real hub, front ends, HTTP and sockets.

For each number of front ends and of open streams: CPU of the controller and of the front ends, microseconds a token,
in all over what it is without front ends, and gaps between the pieces that a client gets (P50, P99). The client is a
process beside them; on few cores it takes from what it measures, so CPU counts there, throughput does not.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import uvloop

from benchmarks.shared import (
    REPOSITORY,
    Row,
    in_turn,
    keep,
    machine,
    median,
    parse,
    print_rows,
    print_verdicts,
    ratio,
    settings_of,
)
from jettison.config import EngineConfig
from jettison.core.requests import RequestState
from jettison.device.model.create import create_model
from jettison.live.engine.api import EngineInfo, EngineSnapshot, RequestTimings, TokenEvent
from jettison.live.engine.stream import Stream, events_of
from jettison.live.experiments.server_process import free_port
from jettison.policy.slo import UNKNOWN_OBJECTIVES
from jettison.report.results import percentile
from jettison.server.app import create_app, server_state
from jettison.server.descriptors import raise_descriptor_limit
from jettison.server.fronts.beside import front_ends
from jettison.server.parent.line import ParentLine
from jettison.server.parent.process import Parent
from jettison.server.serving import run_on, run_server
from jettison.server.settings import ServerSettings
from jettison.server.tls import TlsSettings
from jettison.server.tokenizer import Tokenizer
from jettison.types import FinishReason, SampledToken

STEP_S = 0.02
TOKEN = SampledToken(97)
CHILD = "--as-server"
DESCRIPTORS = 8192
"""Of each process: a thousand streams have as many at either end."""
MOST_OVER_NONE = 1.15
"""CPU of a token with front ends over that without: the goal."""
COLUMNS = ("fronts", "streams", "controller_us_a_token", "front_ends_us_a_token", "us_a_token", "itl_p50_ms",
           "itl_p99_ms", "over_none")  # fmt: skip


class PretendingEngine:
    """A token for every open stream each ``STEP_S``: the letter a."""

    def __init__(self) -> None:
        self.info = EngineInfo("nowhere", 1 << 20, 1 << 20, 1 << 20, 300, (257,))
        self.state = "ready"
        self._open: dict[str, tuple[Stream, RequestState]] = {}

    def ready_in_s(self) -> None: ...

    def timings(self, request_id: str) -> None: ...

    def objectives(self):
        return UNKNOWN_OBJECTIVES

    def check_queue(self, tenant: str, num_arriving: int = 0) -> None: ...

    def note_stored(self, works) -> None: ...

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot("ready", 16)

    def submit_to(self, request, stream: Stream, *, is_further: bool = False) -> None:
        self._open[request.request_id] = (stream, RequestState(request, 0))

    def submit(self, request, *, is_further: bool = False):
        stream = Stream(request.arrival_ns)
        self.submit_to(request, stream)
        return events_of(stream, lambda: self.cancel(request.request_id))

    def num_unread(self, request_id: str) -> int:
        return self._open[request_id][0].num_unread if request_id in self._open else 0

    def cancel(self, request_id: str) -> None:
        if request_id in self._open:
            stream, _ = self._open.pop(request_id)
            stream.put(TokenEvent([], FinishReason.CANCELLED, timings=RequestTimings(0)))

    finish_early = cancel

    async def run(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + STEP_S, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())
            for request_id, (stream, state) in list(self._open.items()):
                state.num_tokens += 1
                if state.num_output < state.request.params.max_tokens:
                    stream.put_token(TOKEN, state)  # as the engine does
                else:
                    del self._open[request_id]
                    stream.put(TokenEvent([TOKEN], FinishReason.LENGTH, timings=RequestTimings(0)))


async def serve(folder: Path, port: int, num_fronts: int, line: ParentLine | None) -> int:
    """The server's process: an engine that pretends, and all else as ``jettison serve`` has it."""
    config = EngineConfig.resolve(model=str(folder), port=port, api_servers=num_fronts)
    engine = PretendingEngine()
    app = create_app(engine, Tokenizer.from_dir(folder), ServerSettings(("pretend",)))  # type: ignore[arg-type]
    asyncio.get_running_loop().create_task(engine.run())
    if line is None:
        return await run_server(app, "127.0.0.1", port, shutdown_timeout_s=0.1)
    line.open(0.0)
    async with front_ends(server_state(app), config, None, line, TlsSettings(), on_served=lambda: None) as listener:
        return await run_on(app, listener, shutdown_timeout_s=0.1, stop=line.stop, force=line.force)


def run_server_process(folder: Path, port: int, num_fronts: int) -> int:
    """``serve`` as ``jettison serve`` runs it."""

    def controller(line: ParentLine | None) -> int:
        return uvloop.run(serve(folder, port, num_fronts, line))

    if not num_fronts:
        return controller(None)
    return Parent(controller, num_fronts, "127.0.0.1", port, 0.0).run()


async def read_stream(port: int, num_tokens: int, gaps: list[float]) -> int:
    """One client; returns its tokens."""
    body = json.dumps({"prompt": [97, 98], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                 b"content-length: %d\r\n\r\n%s" % (len(body), body))  # fmt: skip
    num_read, last_s, tail = 0, None, b""
    while b"[DONE]" not in tail:
        data = await reader.read(1 << 16)
        if not data:
            raise ConnectionError(f"a stream was cut off: {tail!r}")
        now_s, num_new = time.monotonic(), data.count(b'"text":')
        if last_s is not None and num_new:
            gaps.append(now_s - last_s)
        last_s, num_read, tail = now_s, num_read + num_new, data[-32:]
    writer.close()
    return num_read


def cpu_s(pids: list[int]) -> list[float]:
    """Of each process, as the scheduler counts it: the kernel's ticks are of 10 ms, a tenth of what few streams
    take."""
    return [
        sum(int(stat.read_text().split()[0]) for stat in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
        for pid in pids
    ]


async def measure(port: int, pids: list[int], num_streams: int, num_tokens: int) -> Row:
    """One round."""
    gaps: list[float] = []
    before = cpu_s(pids)
    counts = await asyncio.gather(*(read_stream(port, num_tokens, gaps) for _ in range(num_streams)))
    spent = [after - early for after, early in zip(cpu_s(pids), before, strict=True)]
    total = sum(counts)
    return {
        "controller_us_a_token": 1e6 * spent[0] / total, "front_ends_us_a_token": 1e6 * sum(spent[1:]) / total,
        "us_a_token": 1e6 * sum(spent) / total,
        "itl_p50_ms": 1e3 * (percentile(gaps, 50) or 0.0), "itl_p99_ms": 1e3 * (percentile(gaps, 99) or 0.0),
        "tokens": total,
    }  # fmt: skip


def server_of(folder: Path, port: int, num_fronts: int) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A server that listens, and the processes of it that handle tokens, the controller first."""
    command = [sys.executable, "-m", "benchmarks.peers.front_ends", CHILD, str(folder), str(port), str(num_fronts)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL, env=environment)
    deadline_s = time.monotonic() + 60
    while True:
        children = [] if process.poll() is not None else psutil.Process(process.pid).children(recursive=True)
        fronts = [each for each in children if "jettison.server.fronts.process" in each.cmdline()]
        controller = next((each for each in children if each.name() == "jettison-serve"), None)
        ready = sum(each.status == psutil.CONN_LISTEN for each in psutil.net_connections("tcp")
                    if each.laddr and each.laddr.port == port)  # fmt: skip
        if len(fronts) == num_fronts and ready >= max(1, num_fronts):
            return process, [process.pid if controller is None else controller.pid, *(each.pid for each in fronts)]
        if time.monotonic() > deadline_s or process.poll() is not None:
            raise RuntimeError("the server did not come up")
        time.sleep(0.1)


def rows_of(rounds: list[Row]) -> list[Row]:
    """Medians for each number of front ends and streams, and what a token's CPU is of that without front ends."""
    rows = []
    for fronts, streams in dict.fromkeys((row["fronts"], row["streams"]) for row in rounds):
        same = [row for row in rounds if (row["fronts"], row["streams"]) == (fronts, streams)]
        alone = {row["round"]: row["us_a_token"] for row in rounds if (row["fronts"], row["streams"]) == (0, streams)}
        ratios = [ratio(row["us_a_token"], alone.get(row["round"])) for row in same]
        rows.append({key: median(row[key] for row in same) for key in COLUMNS[:-1]} | {"over_none": median(ratios)})
    return rows


def main() -> None:
    """Rounds interleave the numbers of front ends, so that a disturbance meets all of them."""
    options = parse(
        __doc__, fronts=([0, 1, 2, 4], "front ends"), streams=([64, 256, 1000], "open streams"),
        tokens=(200, "of each stream"), rounds=3)
    raise_descriptor_limit(DESCRIPTORS)
    rounds: list[Row] = []
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "pretend"
        create_model(folder, arch="qwen3", layers=2, hidden=32, heads=2, kv_heads=1, seed=1)
        for number in range(options.rounds):
            for num_fronts in in_turn(options.fronts, number):
                port = free_port()
                process, pids = server_of(folder, port, num_fronts)
                try:
                    uvloop.run(measure(port, pids, 8, 20))  # first requests compile and import
                    for num_streams in options.streams:
                        row = uvloop.run(measure(port, pids, num_streams, options.tokens))
                        rounds.append({"round": number, "fronts": num_fronts, "streams": num_streams} | row)
                finally:
                    process.terminate()
                    process.wait(20)
    rows = rows_of(rounds)
    print_rows(rows, COLUMNS)
    verdicts = print_verdicts(
        (row["over_none"] <= MOST_OVER_NONE, f"{row['fronts']} front ends, {row['streams']} streams: a token costs "
         f"{row['over_none']:.2f} of what it costs without, at most {MOST_OVER_NONE}")
        for row in rows if row["fronts"] and row["over_none"] is not None)  # fmt: skip
    keep(options.json, {"settings": settings_of(options), "machine": machine(), "rows": rows, "rounds": rounds,
                        "verdicts": verdicts}, "live", "server")  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == CHILD:
        sys.exit(run_server_process(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
    else:
        main()
