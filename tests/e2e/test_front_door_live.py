"""The front door of a real server: hostile connections, keys that change, and how many files it may open."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from e2e_server import COMMON_FLAGS, MODEL, PYTHON, START_TIMEOUT_S, WAIT_S, child_environment, eventually, trust

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "server"))

from http_cases import Verdicts, play_all

from jettison.cli.main import main
from jettison.live.experiments.server_process import free_port
from jettison.server.descriptors import RESERVED, RESERVED_PER_INSTANCE
from jettison.server.http_protocol import PROBE_CONNECTIONS

pytestmark = pytest.mark.live

NUM_CASES = 300
CANARY = {"model": MODEL, "prompt": "canary", "temperature": 0, "max_tokens": 16, "ignore_eos": True}


async def test_hostile_connections_disturb_nothing(serving, memory_for):
    """The short version of ``python tests/server/fuzz_http.py``; in float64 no batch changes a token."""
    flags: dict[str, object] = {"dtype": "float64", "max_model_len": 256}
    with serving(memory=memory_for(96, **flags), **flags) as served:

        def canary() -> str:
            answer = httpx.post(f"{served.url}/v1/completions", json=CANARY, timeout=WAIT_S, verify=trust())
            return answer.json()["choices"][0]["text"]

        pids, text = served.worker_pids(), canary()
        verdicts = Verdicts()
        await play_all(served.process.port, 1, range(NUM_CASES), verdicts)
        assert verdicts.findings == []
        assert canary() == text
        served.wait_idle()
        assert served.worker_pids() == pids
        log = served.log()
        assert "Traceback" not in log
        assert " ERROR " not in log
        assert not [line for line in log.splitlines() if any(ord(char) < 32 and char != "\t" for char in line)]


def statuses(url: str, *keys: str) -> list[int]:
    with httpx.Client(timeout=WAIT_S, verify=trust()) as http:
        return [
            http.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code for key in keys
        ]


def test_keys_from_a_file_change_while_it_serves(serving, memory_for, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# first\nalpha-key\n\nbeta-key\n")
    flags: dict[str, object] = {"instances": 1}
    with serving(memory=memory_for(96, **flags), api_key_file=keys, **flags) as served:
        processes = [psutil.Process(served.pid), *psutil.Process(served.pid).children(recursive=True)]
        pids = served.worker_pids()
        assert not [word for process in processes for word in process.cmdline() if "alpha" in word]
        assert statuses(served.url, "alpha-key", "beta-key", "gamma-key", "none") == [200, 200, 401, 401]
        keys.write_text("beta-key\ngamma-key\n")
        for process in processes:  # as a terminal does that goes away: the workers stay
            process.send_signal(signal.SIGHUP)
        eventually(lambda: statuses(served.url, "alpha-key") == [401], "the file is read again")
        assert statuses(served.url, "alpha-key", "beta-key", "gamma-key") == [401, 200, 200]
        keys.write_text("bad\x1b[31m key\n")
        os.kill(served.pid, signal.SIGHUP)
        eventually(lambda: "the API keys stay as they were" in served.log(), "the bad file is told of")
        assert statuses(served.url, "alpha-key", "beta-key", "gamma-key") == [401, 200, 200]
        assert served.worker_pids() == pids
        assert len([line for line in served.log().splitlines() if "API keys" in line]) == 2
        assert not [word for word in ("alpha", "beta", "gamma", "bad\x1b") if word in served.log()]


def test_a_bad_key_file_ends_the_start_with_one_line(model_dir, tmp_path, capsys):
    path = tmp_path / "keys"
    path.write_bytes(b"two words\n")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (COMMON_FLAGS | {"port": 0}).items()]
    assert main(["serve", str(model_dir), f"--api-key-file={path}", *flags]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert not out
    assert line.startswith("jettison: ")
    assert str(path) in line


def test_the_limit_of_open_files_is_raised_and_told(model_dir, memory_for, tmp_path):
    """Started with few files allowed, and few more to be had."""
    soft, hard = 128, 200
    limit = hard - RESERVED - RESERVED_PER_INSTANCE
    port, log_path = free_port(), tmp_path / "log"
    flags = COMMON_FLAGS | {"instances": 1, "port": port, "memory": memory_for(96, instances=1)}
    command = [PYTHON, "-m", "jettison", "serve", str(model_dir),
               *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())]  # fmt: skip
    limited = ["bash", "-c", f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"', "bash", *command]
    url = f"http://127.0.0.1:{port}"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            limited, env=child_environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        eventually(lambda: is_ready(url), "the server is ready", START_TIMEOUT_S)
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
        (warning,) = [line for line in log_path.read_text().splitlines() if " WARNING " in line]
        assert f"the limit of {hard} open files leaves {limit} for connections" in warning
        clients = [socket.create_connection(("127.0.0.1", port), WAIT_S) for _ in range(hard)]
        for client in clients[limit + PROBE_CONNECTIONS :]:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        clients[0].sendall(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n")
        assert clients[0].recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        for client in clients:
            client.close()
        eventually(lambda: is_ready(url), "there is room again")
        assert len([line for line in log_path.read_text().splitlines() if "turning clients away" in line]) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=WAIT_S, verify=trust()).status_code == 200
    except httpx.TransportError:
        return False
