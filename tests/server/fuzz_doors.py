"""Ten thousand requests with bad values through every door of a real server: ``python tests/server/fuzz_doors.py``.

Starts ``jettison serve`` over a tiny model with a key and a folder of batches, and sends it what ``door_cases`` draws,
some at one time. Exit code 1 on a finding: a status from 500 up, a traceback or error in an answer or in the log,
memory of the server or its workers that grows by more than 30 MB after the first fifth, what is held when all is over.

The memory that counts is anonymous: what a process has allocated. Files and shared memory are left out: code is shared
by all, and the pages of a worker's budget (parameters, KV, workspace) are touched one by one as requests need more of
them, up to ``--memory`` and twice in a process's tables, so their growth is no leak and has a bound of its own. What
clients can make a process keep (compiled grammars, templates, stored answers) is bounded, and nearly as large as it
gets after a fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from jettison.device.model.create import create_model
from jettison.live.experiments.server_process import ServerProcess

sys.path.append(str(Path(__file__).parents[1]))  # what all tests share; pytest puts it there by itself

from door_cases import NO_FILE, DoorCase, drawn
from fuzz_http import FLAGS, GROWTH_LIMIT_BYTES, Server, judge_log

ALLOWED = (200, 400, 404, 409, 413, 429)
SEED = 20261127
_NAMES = {"compiler": "jettison.server.compile_process", "checks": "jettison.server.batches.check_process"}
"""Processes that come and go, by the module that they run: they are no growth of the workers."""


def judge(at: int, case: DoorCase, answer: httpx.Response) -> None:
    """Raises AssertionError where an answer is none that a client could be at fault for."""
    told = (at, case, answer.status_code, answer.text[:1000])
    assert answer.status_code in ALLOWED, told
    assert "Traceback" not in answer.text and '"internal_error"' not in answer.text, told
    assert "response.failed" not in answer.text and "event: error" not in answer.text, told
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and error["type"], told
        assert (answer.json().get("type") == "error") == case.path.startswith("/v1/messages"), told


def of_a_file(case: DoorCase, files: list[str]) -> DoorCase:
    """A batch's case with the last file that was taken in place of the one that is made up."""
    if files and case.document.get("input_file_id") == NO_FILE:
        return replace(case, document=case.document | {"input_file_id": files[-1]})
    return case


def anonymous_bytes(process: psutil.Process) -> int:
    """Resident memory that is neither a file's nor shared. Raises psutil.NoSuchProcess."""
    told = process.memory_info()
    return int(told.rss - told.shared)


def memory_bytes(server: Server) -> dict[str, int]:
    """Anonymous, of the server, of the processes that compile grammars and check batches, and of its workers
    together."""
    own = psutil.Process(server.process.pid)
    sizes = Counter({"server": anonymous_bytes(own)})
    for child in own.children(recursive=True):
        try:
            line, num_bytes = child.cmdline(), anonymous_bytes(child)
        except psutil.NoSuchProcess:  # a check of a batch that has ended meanwhile
            continue
        sizes[next((name for name, module in _NAMES.items() if module in line), "workers")] += num_bytes
    return dict(sizes)


async def send(server: Server, cases: range, width: int, findings: list[str], counts: Counter[Any]) -> None:
    """All of them, ``width`` at one time."""
    left, files = iter(cases), list[str]()

    async def client(http: httpx.AsyncClient) -> None:
        for at in left:
            case = of_a_file(drawn(SEED, at), files)
            try:
                answer = await http.post(server.url + case.path, **case.arguments())
                if case.path == "/v1/files" and answer.status_code == 200:
                    files.append(answer.json()["id"])
                counts[case.path, answer.status_code] += 1
                judge(at, case, answer)
            except (AssertionError, httpx.HTTPError, ValueError, KeyError) as error:
                findings.append(repr(error)[:1500])

    async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
        await asyncio.gather(*(client(http) for _ in range(width)))


async def fuzz(server: Server, num_cases: int, width: int) -> dict[str, Any]:
    """All cases; what came of them."""
    findings: list[str] = []
    counts: Counter[Any] = Counter()
    start_s, sizes, at, base = time.monotonic(), dict[int, dict[str, int]](), 0, max(1, num_cases // 5)
    while at < num_cases:
        upto = min(at + base, num_cases)
        await send(server, range(at, upto), width, findings, counts)
        held = await server.wait_idle()
        at, sizes[upto] = upto, memory_bytes(server)
        told = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sorted(sizes[upto].items()))
        print(f"{at} cases, {time.monotonic() - start_s:.0f} s, {told}, {len(findings)} findings", flush=True)
        findings += [f"still held: {held}"] if held else []
    for name in ("server", "workers"):
        grown = sizes[at].get(name, 0) - sizes[base].get(name, 0)
        if grown > GROWTH_LIMIT_BYTES:
            findings.append(f"{name} grew by {grown / 1e6:.1f} MB from case {base} to {at}")
    judge_log(server, findings)
    statuses = Counter[int]()
    for (_, status), number in counts.items():
        statuses[status] += number
    return {
        "cases": at, "statuses": dict(sorted(statuses.items())), "seconds": round(time.monotonic() - start_s, 1),
        "paths": {path: {s: n for (p, s), n in sorted(counts.items()) if p == path} for path in {p for p, _ in counts}},
        "megabytes": {n: {name: round(size / 1e6, 1) for name, size in told.items()} for n, told in sizes.items()},
        "findings": findings,
    }  # fmt: skip


def run(num_cases: int, width: int) -> dict[str, Any]:
    """A server of its own, and all cases against it."""
    with tempfile.TemporaryDirectory() as folder:
        model_dir, log_path = Path(folder) / "fake", Path(folder) / "log"
        create_model(model_dir, arch="qwen3", layers=2, hidden=32, heads=4, kv_heads=2, seed=1, std=0.2)
        flags = FLAGS | {
            "max_model_len": 4096, "memory": "32MiB", "batch_dir": str(Path(folder) / "batches"),
            "served_model_name": "fake", "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
        process = ServerProcess(model_dir, flags, log_path)
        process.start(180.0)
        try:
            return asyncio.run(fuzz(Server(process, log_path), num_cases, width))
        finally:
            process.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=8, help="requests at one time")
    options = parser.parse_args()
    document = run(options.cases, options.width)
    print(json.dumps(document, indent=2))
    return 1 if document["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
