"""kill -9 of the controller with streams open through front ends: every stream ends with exact tokens, after a gap.

A server of its own, over a model made from a seed, in float64. ``--streams`` streams are open when the controller is
killed, ``--rounds`` times (five in five minutes at most: the server ends with the sixth). Per round: each stream's
longest time without a token behind the kill (median and longest of all streams); how long another controller takes to
be ready; workers that stayed. Then each stream is asked for once more, undisturbed, and compared token by token.
``--workers-too`` kills the workers as well, so that they load again. Exit code 1 where a token is wrong, lost or
repeated, or a stream fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import psutil

from benchmarks.shared import LIVE, Row, keep, machine, median, parse, print_rows, say, settings_of, work_folder
from jettison.device.model.create import create_model
from jettison.live.experiments.server_process import ServerProcess

PATIENCE_S = 300.0
BEGUN_TOKENS = 3
"""A stream counts as open from here on."""


class Piece(NamedTuple):
    """Tokens of a stream that came together."""

    at_s: float
    tokens: tuple[int, ...]


def controller_of(pid: int) -> psutil.Process | None:
    """Of the server's processes the one that calls itself so; None: there is none now."""
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.name() == "jettison-serve":
                return child
    return None


def workers_of(pid: int) -> set[int]:
    """Processes of the server that are workers."""
    return {each.pid for each in psutil.Process(pid).children(recursive=True) if each.name().startswith("jettison-w")}


async def stream(client: openai.AsyncOpenAI, model: str, number: int, length: int, begun: asyncio.Queue) -> list[Piece]:
    """One client's; half of them draw their tokens."""
    pieces: list[Piece] = []
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
    asked = await client.completions.create(
        model=model, prompt=[number % 200 + 1, 2, 3], max_tokens=length, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True}, **drawn)
    async for chunk in asked:
        tokens = tuple(token for choice in chunk.choices for token in choice.token_ids or ())
        before = sum(len(piece.tokens) for piece in pieces)
        pieces.append(Piece(time.monotonic(), tokens))
        if before < BEGUN_TOKENS <= before + len(tokens):
            begun.put_nowait(number)
    return pieces


async def ready_s(url: str, pid: int, before: int) -> float:
    """When another controller says that it is ready."""
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(timeout=PATIENCE_S) as http:
        while True:
            controller = controller_of(pid)
            if controller is not None and controller.pid != before:
                answer = await http.get(f"{url}/health")
                if answer.status_code == 200:
                    return time.monotonic()
            await asyncio.sleep(0.02)


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


async def killed(process: ServerProcess, args, number: int) -> Row:
    """One round."""
    begun: asyncio.Queue = asyncio.Queue()
    model = Path(process_model(args)).name
    options = {"base_url": f"{process.url}/v1", "api_key": "none", "max_retries": 0, "timeout": PATIENCE_S}
    async with openai.AsyncOpenAI(**options) as client:
        tasks = [asyncio.create_task(stream(client, model, at, args.length, begun)) for at in range(args.streams)]
        for _ in range(args.streams):
            await begun.get()
        controller, workers = controller_of(process.pid), workers_of(process.pid)
        assert controller is not None
        os.kill(controller.pid, signal.SIGKILL)
        kill_s = time.monotonic()
        for worker in workers if args.workers_too else ():
            os.kill(worker, signal.SIGKILL)
        readying = asyncio.create_task(ready_s(process.url, process.pid, controller.pid))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        back_s = await readying - kill_s
        kept = workers & workers_of(process.pid)
        failed = [result for result in results if isinstance(result, BaseException)]
        gaps_s = [
            max(after.at_s - before.at_s for before, after in pairwise(result) if after.at_s > kill_s)
            for result in results if not isinstance(result, BaseException) and result[-1].at_s > kill_s
        ]
        again = await asyncio.gather(*(stream(client, model, at, args.length, begun) for at in range(args.streams)))
    wrong = sum(
        tokens_of(result) != tokens_of(undisturbed) for result, undisturbed in zip(results, again, strict=True)
        if not isinstance(result, BaseException))
    for error in failed:
        say(repr(error))
    return {
        "round": number, "streams": args.streams, "open_at_the_kill": len(gaps_s), "failed": len(failed),
        "wrong": wrong, "tokens_compared": sum(len(tokens_of(each)) for each in again),
        "workers_kept": len(kept), "ready_s": back_s, "gap_p50_s": median(gaps_s),
        "gap_max_s": max(gaps_s, default=None),
    }


def process_model(args) -> Path:
    """The model's folder: a given one, or one made from a seed."""
    if args.model is not None:
        return args.model
    folder = args.work / "tiny"
    if not folder.exists():
        create_model(folder, arch="qwen3", layers=4, hidden=64, heads=4, kv_heads=2, seed=1, std=0.2)
    return folder


def main() -> int:
    args = parse(
        __doc__, streams=(64, "open at the kill"), length=(400, "tokens of each"), rounds=(3, "kills"),
        instances=2, memory=("64MiB", "of each instance"), api_servers=2,
        workers_too=(False, "kill the workers as well"), model=(Path, "a folder instead of the small one"),
        work=(Path, "folder for the model and the log"))
    args.work = work_folder(args.work, "controller")
    flags = {
        "instances": args.instances, "memory": args.memory, "api_servers": args.api_servers, "dtype": "float64",
        "num_threads": 1, "max_num_seqs": max(64, args.streams), "shutdown_timeout": 5,
    }
    process = ServerProcess(process_model(args), flags, args.work / "log")
    process.start(PATIENCE_S)
    try:
        rows = [asyncio.run(killed(process, args, number)) for number in range(args.rounds)]
    finally:
        process.close()
    print_rows(rows)
    keep(args.json, {"machine": machine(), "settings": settings_of(args), "rows": rows}, *LIVE)
    return int(any(row["failed"] or row["wrong"] for row in rows))
