"""Ten thousand hostile connections against a real server: ``python tests/server/fuzz_http.py``.

Starts ``jettison serve`` over a tiny model on loopback and sends it what ``http_cases`` draws: wrong
fields, bodies that are no JSON, broken framing, pipelines, half-closed and abandoned connections, clients that do not
read.

Exit code 1 on a finding: a status from 500 up (503 while the server drains excepted), a complete request without an
end, a traceback or an error in the log, control bytes in it, another worker process than before, a canary stream that
says something else, memory that grows by more than 30 MB after the first tenth, requests, blocks or descriptors that
are held when all is over, a bad end. ``--only N`` plays one case again and shows what came back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from http_cases import Verdicts, draw_case, play, play_all

from jettison.device.model.create import create_model
from jettison.errors import JettisonError
from jettison.live.experiments.server_process import ServerProcess

GROWTH_LIMIT_BYTES = 30_000_000
LOG_LIMIT_BYTES = 64 << 10
"""Of what the server writes while it is fuzzed: unknown fields are named once each, 100 of them at most."""
IDLE_LIMIT_S = 60.0
ROUND = 500
"""Cases between two looks at the server."""
FLAGS: dict[str, object] = {
    "instances": 2, "dtype": "float64", "num_threads": 1, "page_size": "4KiB", "block_size": 16, "memory": "16MiB",
    "max_num_batched_tokens": 256, "max_model_len": 256, "shutdown_timeout": 30,
}  # fmt: skip
CANARY = {"prompt": "canary", "temperature": 0, "max_tokens": 40, "ignore_eos": True, "stream": True}
CONTROL_BYTES = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")


class Server:
    """The server under test, and what can be seen of it from outside."""

    def __init__(self, process: ServerProcess, log_path: Path) -> None:
        self.process = process
        self.port = process.port
        self.url = process.url
        self.log_path = log_path
        self._os_process = psutil.Process(process.pid)

    def rss_bytes(self) -> int:
        """Of the controller."""
        return int(self._os_process.memory_info().rss)

    def num_descriptors(self) -> int:
        """Of the controller."""
        return int(self._os_process.num_fds())

    def worker_pids(self) -> set[int]:
        """Its children, all the way down."""
        return {child.pid for child in self._os_process.children(recursive=True)}

    def held(self) -> dict[str, float]:
        """What should be nothing when no request asks for anything."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "jettison:kv_blocks_used")
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        values = {
            name: sum(float(v) for v in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)) for name in names
        }
        with urllib.request.urlopen(f"{self.url}/load", timeout=30) as response:
            values["server_load"] = json.load(response)["server_load"]
        return {name: value for name, value in values.items() if value}

    async def wait_idle(self) -> dict[str, float]:
        """Until nothing is held; what is, after ``IDLE_LIMIT_S``."""
        deadline = time.monotonic() + IDLE_LIMIT_S
        while (held := await asyncio.to_thread(self.held)) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return held


@contextmanager
def serving(scratch: Path) -> Iterator[Server]:
    """A server over a model made from a seed."""
    model_dir, log_path = scratch / "tiny", scratch / "log"
    create_model(model_dir, arch="qwen3", layers=2, hidden=32, heads=4, kv_heads=2, seed=1, std=0.2)
    process = ServerProcess(model_dir, FLAGS, log_path)
    process.start(180.0)
    try:
        yield Server(process, log_path)
    finally:
        process.close()


class Canary:
    """An honest client beside the others: one stream after the other, each compared with the first."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.num_streams = 0
        self.findings: list[str] = []
        self.longest_s = 0.0

    async def run(self, stop: asyncio.Event) -> None:
        """Until told to stop."""
        async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
            expected = await self._text(http)
            while not stop.is_set():
                start_s = time.monotonic()
                text = await self._text(http)
                self.longest_s = max(self.longest_s, time.monotonic() - start_s)
                self.num_streams += 1
                if text != expected:
                    said = f"{text[:200]!r}, not {expected[:200]!r}"
                    self.findings.append(f"canary stream {self.num_streams} said {said}")

    async def _text(self, http: httpx.AsyncClient) -> str:
        parts = []
        try:
            async with http.stream("POST", f"{self._url}/v1/completions", json=CANARY) as answer:
                if answer.status_code != 200:
                    return f"status {answer.status_code}"
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        document = json.loads(line.removeprefix("data: "))
                        parts += [choice["text"] for choice in document.get("choices", [{"text": line}])]
        except httpx.HTTPError as error:
            return repr(error)
        return "".join(parts)


async def fuzz(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """All cases with a canary beside them; then the drain."""
    verdicts, canary, stop = Verdicts(), Canary(server.url), asyncio.Event()
    pids, num_descriptors = server.worker_pids(), server.num_descriptors()
    watching = asyncio.create_task(canary.run(stop))
    base_at = max(1, options.cases // 10)
    rss_bytes: dict[int, int] = {}
    start_s, at = time.monotonic(), 0
    while at < options.cases and time.monotonic() - start_s < options.max_seconds:
        upto = min(at + ROUND, options.cases, base_at if at < base_at else options.cases)
        await play_all(server.port, options.seed, range(at, upto), verdicts, width=options.width)
        at = upto
        rss_bytes[at] = server.rss_bytes()
        print(f"{at} cases, {time.monotonic() - start_s:.0f} s, {rss_bytes[at] / 1e6:.1f} MB, "
              f"{len(verdicts.findings)} findings", flush=True)  # fmt: skip
    stop.set()
    await watching
    held = await server.wait_idle()
    findings = verdicts.findings + canary.findings
    rss_bytes[at] = server.rss_bytes()
    grown_bytes = rss_bytes[at] - rss_bytes.get(base_at, rss_bytes[at])
    if grown_bytes > GROWTH_LIMIT_BYTES:
        findings.append(f"memory grew by {grown_bytes / 1e6:.1f} MB from case {base_at} to {at}")
    if at < options.cases:
        findings.append(f"only {at} of {options.cases} cases in {options.max_seconds:g} s")
    if held:
        findings.append(f"still held when all is over: {held}")
    if server.worker_pids() != pids:
        findings.append(f"worker processes were {sorted(pids)} and are {sorted(server.worker_pids())}")
    await _descriptors_fall(server, num_descriptors, findings)
    await drain(server, options, verdicts, findings)
    num_log_bytes = judge_log(server, findings)
    return {
        "seed": options.seed, "cases": at, "width": options.width,
        "seconds": round(time.monotonic() - start_s, 1), "answers": verdicts.statuses,
        "canary_streams": canary.num_streams, "longest_canary_s": round(canary.longest_s, 3),
        "controller_mb": {f"after {n}": round(b / 1e6, 1) for n, b in rss_bytes.items() if n in (base_at, at)},
        "grown_mb": round(grown_bytes / 1e6, 1), "log_bytes": num_log_bytes, "findings": findings,
    }  # fmt: skip


async def _descriptors_fall(server: Server, before: int, findings: list[str]) -> None:
    """Connections that were left in mid-request have deadlines: the longest is that of a body, 60 s."""
    deadline = time.monotonic() + 90
    while (now := server.num_descriptors()) > before and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    if now > before:
        findings.append(f"{before} descriptors were open before, {now} are afterwards")


def judge_log(server: Server, findings: list[str]) -> int:
    log = server.log_path.read_bytes()
    lines = log.splitlines()
    if b"Traceback" in log:
        findings.append(f"a traceback in the log: {log[log.index(b'Traceback'):][:1500].decode(errors='replace')}")
    # uvicorn's word for clients that were still connected at the very end.
    errors = [line for line in lines if b" ERROR " in line and b"timeout graceful shutdown exceeded" not in line]
    findings += [f"in the log: {line[:300]!r}" for line in errors[:5]]
    findings += [f"control bytes in the log: {line[:300]!r}" for line in lines if CONTROL_BYTES.search(line)][:5]
    if len(log) > LOG_LIMIT_BYTES:
        findings.append(f"{len(log)} bytes of log")
    return len(log)


async def drain(server: Server, options: argparse.Namespace, verdicts: Verdicts, findings: list[str]) -> None:
    """More of the same while the server ends: 503 is right then, and so is a refused connection."""
    ending = asyncio.create_task(asyncio.to_thread(server.process.close, 60.0))
    indices = range(options.cases, options.cases + 200)
    num_before = len(verdicts.findings)
    await play_all(server.port, options.seed, indices, verdicts, width=options.width, allowed=("503",))
    code = await ending
    findings += verdicts.findings[num_before:]
    if code != 0:
        findings.append(f"the server ended with {code}")


async def replay(server: Server, seed: int, index: int) -> None:
    """One case, with all its bytes."""
    case = draw_case(seed, index)
    print(f"{case.kind}, {case.ending}:")
    for part in case.parts:
        print(f"  > {part!r}")
    print(f"  < {await play(server.port, case)!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=24, help="connections at one time")
    parser.add_argument("--max-seconds", type=float, default=1800.0)
    parser.add_argument("--only", type=int, help="play this case alone")
    options = parser.parse_args()
    logging.getLogger("asyncio").setLevel("ERROR")  # it warns of our own sends to a connection that is gone
    with tempfile.TemporaryDirectory() as folder:
        try:
            with serving(Path(folder)) as server:
                if options.only is not None:
                    asyncio.run(replay(server, options.seed, options.only))
                    print((Path(folder) / "log").read_text(errors="replace"), end="")
                    return 0
                document = asyncio.run(fuzz(server, options))
        except JettisonError as error:
            raise SystemExit(f"fuzz: {error}") from error
    for kind, counts in sorted(document["answers"].items()):
        print(f"{kind:12} {counts}")
    print(json.dumps({name: value for name, value in document.items() if name != "answers"}, indent=2))
    return 1 if document["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
