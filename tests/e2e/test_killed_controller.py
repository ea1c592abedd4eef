"""kill -9 of the serving process with moves under way, a sleeper and a batch: nothing of it is left but the batch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from e2e_server import (
    COMMON_FLAGS,
    MODEL,
    START_TIMEOUT_S,
    WAIT_S,
    Served,
    as_environment,
    child_environment,
    eventually,
    session_pids,
)
from test_batches_live import begin, check_whole, client_of, num_done

from jettison.live.experiments.server_process import ServerProcess

pytestmark = pytest.mark.live

GONE_S = 10.0
"""What is promised."""
NUM_STREAMS, NUM_LINES = 6, 80
LENGTH = 2000


def post(process: ServerProcess, path: str) -> dict:
    request = urllib.request.Request(f"{process.url}{path}", method="POST")
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return json.load(answer)


def states(process: ServerProcess) -> list[str]:
    with urllib.request.urlopen(f"{process.url}/is_sleeping", timeout=WAIT_S) as answer:
        return [row["state"] for row in json.load(answer)["instances"]]


def memory_files(pids: set[int]) -> set[tuple[int, int]]:
    """Files without a name that these processes have open: (device, inode) of each."""
    found = set()
    for pid in pids:
        try:
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                if os.readlink(fd).startswith("/memfd:jettison"):
                    found.add((fd.stat().st_dev, fd.stat().st_ino))
        except OSError:  # it has ended, or closed the file
            continue
    return found


def socket_paths(pid: int) -> set[Path]:
    paths = (connection.laddr for connection in psutil.Process(pid).net_connections("unix"))
    return {Path(path) for path in paths if path and "jettison-run-" in path}


async def open_stream(client: openai.AsyncOpenAI, number: int) -> openai.AsyncStream:
    stream = await client.completions.create(
        model=MODEL, prompt=[number + 1] * 20, max_tokens=LENGTH, temperature=0, stream=True,
        extra_body={"ignore_eos": True})  # fmt: skip
    await anext(aiter(stream))
    return stream


async def rest_of(stream: openai.AsyncStream) -> str:
    """How a stream ends: ``length``, or ``broken``."""
    reason = "broken"
    try:
        async for chunk in stream:
            reason = (chunk.choices and chunk.choices[0].finish_reason) or reason
    except (openai.APIError, httpx.HTTPError):
        pass
    return reason


async def test_of_a_killed_controller_nothing_is_left_but_its_batch(model_dir, tmp_path, memory_for):
    flags = COMMON_FLAGS | {
        "instances": 3, "memory": memory_for(400, instances=3), "offline": "harvest", "host_memory": "64MiB",
        "batch_dir": tmp_path / "batches", "batch_window": 24, "packing": "mell", "packing_epoch_s": 0.05,
    }  # fmt: skip

    def started() -> ServerProcess:
        process = ServerProcess(model_dir, flags, tmp_path / "log")
        with as_environment(child_environment()):
            process.start(START_TIMEOUT_S)
        return process

    process = started()
    try:
        post(process, "/sleep?level=1&instance=2")
        eventually(lambda: states(process)[2] == "asleep", "an instance sleeps")
        batch_id = begin(client_of(process), NUM_LINES)
        eventually(lambda: num_done(client_of(process), batch_id) > 10, "some lines are done")
        client = Served(process, tmp_path / "log", None).async_client()
        streams = [await open_stream(client, number) for number in range(NUM_STREAMS)]
        session = session_pids(os.getsid(process.pid))
        files, paths = memory_files(session), socket_paths(process.pid)
        assert len(session) == 5 and len(files) >= 4 and paths
        assert post(process, "/sleep?level=1&instance=1")["instances"][0]["state"] == "leaving"
        os.kill(process.pid, signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*map(rest_of, streams)), GONE_S)
        assert ends == ["broken"] * NUM_STREAMS
        await client.close()

        def is_gone() -> bool:
            everybody = {int(name.name) for name in Path("/proc").iterdir() if name.name.isdecimal()}
            folders = {path.parent for path in paths}
            is_there = session_pids(process.pid) or files & memory_files(everybody)
            return not is_there and not any(folder.exists() for folder in folders)

        eventually(is_gone, "workers, memory and sockets are gone", GONE_S)
        process.close()
        process = started()
        client = client_of(process)
        eventually(lambda: client.batches.retrieve(batch_id).status == "completed", "the batch ends", 5 * WAIT_S)
        batch = client.batches.retrieve(batch_id)
        texts = (client.files.content(file_id).text for file_id in (batch.output_file_id, batch.error_file_id))
        output, errors = ([json.loads(line) for line in text.splitlines()] for text in texts)
        check_whole(output, errors, NUM_LINES)
    finally:
        process.close()
