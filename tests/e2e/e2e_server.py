"""What these tests share: flags, environments, a handle on a running server, and bounded waits."""

from __future__ import annotations

import os
import re
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import httpx
import openai
import psutil
import pytest

import jettison
from jettison.config import API_KEY_VARIABLES
from jettison.live.experiments.server_process import ServerProcess

PYTHON = sys.executable
MODEL = "tiny"
KEY = "open-sesame"
BLOCK_SIZE = 16
START_TIMEOUT_S = 180.0
WAIT_S = 60.0
"""Bound of every wait for something that should take milliseconds."""

SOURCES = Path(jettison.__file__).resolve().parent.parent

COMMON_FLAGS: dict[str, object] = {
    "instances": 2, "dtype": "float32", "num_threads": 1, "page_size": "4KiB", "block_size": BLOCK_SIZE,
    "max_num_batched_tokens": 256, "exchange_piece_bytes": "64KiB", "overload_min_wait_ms": 20,
    "overload_trigger": "pressure", "api_servers": int(os.environ.get("JETTISON_TEST_API_SERVERS", "0")),
}  # fmt: skip
"""JETTISON_TEST_API_SERVERS puts so many front ends before each server of these tests."""


def child_environment(**variables: str) -> dict[str, str]:
    """For children: the package importable whether or not it is installed, one thread, no key, no proxy, no network."""
    path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    own = {
        "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_PROXY": "*", "no_proxy": "*",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    }  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if name not in API_KEY_VARIABLES}
    return inherited | own | variables


@contextmanager
def as_environment(variables: dict[str, str]) -> Iterator[None]:
    """``ServerProcess`` hands its own environment on: change it, and put it back."""
    with pytest.MonkeyPatch.context() as patch:
        for name in API_KEY_VARIABLES:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@cache
def trust() -> ssl.SSLContext:
    """What clients trust, read once: a client of its own reads all of the world's certificates, in 20 ms."""
    return httpx.create_ssl_context()


class Served:
    """A running server as its clients see it."""

    def __init__(self, process: ServerProcess, log_path: Path, key: str | None) -> None:
        self.process = process
        self.url = process.url
        self.pid = process.pid
        self.log_path = log_path
        self.key = key

    def client(self, **options) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=trust())
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"http_client": http} | self._options(options))

    def async_client(self, **options) -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(verify=trust())
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **{"http_client": http} | self._options(options))

    def _options(self, options):
        return {"api_key": self.key or "none", "max_retries": 0, "timeout": 60.0} | options

    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}

    def metrics(self, *names: str) -> list[float]:
        """Sums over all samples of each; 0 of one that has none."""
        request = urllib.request.Request(f"{self.url}/metrics", headers=self.headers())
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            text = response.read().decode()
        found = [re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in names]
        return [sum(map(float, values)) for values in found]

    def metric(self, name: str) -> float:
        """Of one."""
        return self.metrics(name)[0]

    def is_idle(self) -> bool:
        """Nothing runs, waits or moves, and no KV block is held."""
        return not any(
            self.metrics("vllm:num_requests_running", "vllm:num_requests_waiting", "jettison:kv_blocks_used")
        )

    def wait_idle(self) -> None:
        eventually(self.is_idle, "the server is idle and all its blocks are free")

    def worker_pids(self) -> set[int]:
        """What its fork servers have forked."""
        found = set()
        for child in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if child.name().startswith("jettison-w"):
                    found.add(child.pid)
        return found

    def pids(self) -> set[int]:
        """All of its session, itself too: the guard of its sockets' folder has a session of its own."""
        return session_pids(os.getsid(self.pid))

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


def eventually(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait, with a bound that a healthy server never comes near."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


def session_pids(session_id: int) -> set[int]:
    """Live processes of a session: a server leads one of its own, and its workers stay in it, orphaned or not."""
    pids = set()
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                pids.add(process.pid)
        except (OSError, psutil.NoSuchProcess):
            continue
    return pids
