"""Real servers: ``python -m jettison serve`` as child processes, over a model made from a seed.

Two servers last for the whole session: ``server`` has room to spare, ``guarded`` asks for a key and has next to no
memory and queue. Tests that end a server start one of their own with ``serving``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from jettison.config import API_KEY_VARIABLES, EngineConfig
from jettison.device.model.create import create_model
from jettison.live.engine.assembly import assemble
from jettison.live.experiments.server_process import ServerProcess

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode puts no test folder on the path

from e2e_server import COMMON_FLAGS, KEY, MODEL, START_TIMEOUT_S, Served, as_environment, child_environment


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    """Clients find the loopback address by themselves."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """At this width a standard deviation of 0.2 gives varied output."""
    folder = tmp_path_factory.mktemp("e2e") / MODEL
    create_model(folder, arch="qwen3", layers=4, hidden=64, heads=4, kv_heads=2, seed=1, std=0.2)
    return folder


@pytest.fixture(scope="session")
def memory_for(model_dir) -> Callable[..., int]:
    """``memory_for(num_blocks, **flags)``: the budget in bytes that leaves so many KV blocks an instance."""

    def bytes_for(num_blocks: int, **flags: object) -> int:
        config = EngineConfig.resolve(model=str(model_dir), **COMMON_FLAGS | flags)
        return assemble(config).memory_for_blocks(num_blocks)

    return bytes_for


@pytest.fixture(scope="session")
def serving(model_dir, tmp_path_factory):
    """``with serving(**flags) as served``; flags beside the common ones, ``key`` by way of the environment."""

    @contextmanager
    def start(*, key: str | None = None, **flags: object) -> Iterator[Served]:
        log_path = tmp_path_factory.mktemp("server") / "log"
        process = ServerProcess(model_dir, COMMON_FLAGS | flags, log_path)
        environment = child_environment() | ({} if key is None else {API_KEY_VARIABLES[0]: key})
        with as_environment(environment):
            process.start(START_TIMEOUT_S)
        try:
            yield Served(process, log_path, key)
        finally:
            process.close()

    return start


@pytest.fixture(scope="session")
def server(serving, memory_for):
    """Two instances with 96 blocks (1,536 tokens) each."""
    with serving(memory=memory_for(96), restore_dwell_ms=100) as served:
        yield served


@pytest.fixture(scope="session")
def guarded(serving, memory_for):
    """One instance with a key, 250 blocks (4,000 tokens) for a context of 4,096, and room for one to wait."""
    flags: dict[str, object] = {"instances": 1, "max_num_queued_reqs": 1}
    with serving(key=KEY, memory=memory_for(250, **flags), **flags) as served:
        yield served


@pytest.fixture
def client(server) -> openai.OpenAI:
    return server.client()
