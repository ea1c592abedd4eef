"""Ending a server: the first signal drains, the second cuts off, and no process outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess

import httpx
import openai
import pytest
from e2e_server import COMMON_FLAGS, MODEL, PYTHON, WAIT_S, child_environment, eventually, session_pids

from jettison.live.experiments.server_process import ENDS_WITH_STDIN, free_port

pytestmark = pytest.mark.live

LONG = {"model": MODEL, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}


async def open_streams(client, num_streams: int, num_tokens: int) -> list:
    """Streams that have begun to speak."""
    streams = []
    for index in range(num_streams):
        stream = await client.completions.create(
            **LONG, prompt=[index, 2, 3], max_tokens=num_tokens, stream_options={"include_usage": True})
        await anext(stream)
        streams.append(stream)
    return streams


async def until_draining(http: httpx.AsyncClient, url: str) -> dict:
    async with asyncio.timeout(WAIT_S):
        while (answer := await http.get(f"{url}/health")).status_code == 200:
            await asyncio.sleep(0.005)
    assert answer.status_code == 503
    return answer.json()


@pytest.fixture
def supervisor(tmp_path, monkeypatch):
    """The socket on which systemd is told what a server does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(WAIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


@pytest.fixture
def hanging_collector():
    """Flags that send traces to where connections are taken, and nothing is read."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield {"otlp_traces_endpoint": f"http://127.0.0.1:{listener.getsockname()[1]}"}


LOST = "the last traces are lost"


async def test_the_first_signal_lets_accepted_requests_finish(serving, memory_for, supervisor, hanging_collector):
    """Six answers are owed, more than the memory holds at once: all are given, and nothing new is taken."""
    with serving(memory=memory_for(96), shutdown_timeout=120, **hanging_collector) as served:
        assert supervisor.recv(100).startswith(b"READY=1\n")
        assert len(served.worker_pids()) == 2
        async with served.async_client() as client, httpx.AsyncClient() as http:
            streams = await open_streams(client, 4, 600)
            whole = [
                asyncio.create_task(client.completions.create(
                    model=MODEL, prompt=[9] * 900, max_tokens=40, temperature=0, extra_body={"ignore_eos": True}))
                for _ in range(2)
            ]  # fmt: skip
            while served.metric("vllm:num_requests_running") + served.metric("vllm:num_requests_waiting") < 6:
                await asyncio.sleep(0.005)
            ending = asyncio.create_task(asyncio.to_thread(served.process.close, 120.0))
            health = await until_draining(http, served.url)
            assert health["status"] == "draining"
            assert supervisor.recv(100).startswith(b"STOPPING=1\n")
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(model=MODEL, prompt="late", max_tokens=1)
            assert caught.value.status_code == 503
            assert caught.value.code == "not_ready"
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert not ending.done()
            for stream in streams:
                chunks = [chunk async for chunk in stream]
                assert chunks[-2].choices[0].finish_reason == "length"
                assert chunks[-1].usage.completion_tokens == 600
            for answer in await asyncio.gather(*whole):
                assert answer.usage.completion_tokens == 40
            assert await ending == 0
    assert session_pids(served.pid) == set()
    assert "Traceback" not in served.log() and "traces are lost" in served.log()


async def test_the_second_signal_ends_at_once_and_says_so(serving, memory_for, hanging_collector):
    """No collector of traces is waited for, either."""
    flags: dict[str, object] = {"instances": 1, "shutdown_timeout": 600}
    with serving(memory=memory_for(256, **flags), **flags, **hanging_collector) as served:
        async with served.async_client() as client, httpx.AsyncClient() as http:
            streams = await open_streams(client, 2, 3900)  # far more than can be made before the second signal
            ending = asyncio.create_task(asyncio.to_thread(served.process.close, WAIT_S))
            await until_draining(http, served.url)
            os.kill(served.pid, signal.SIGTERM)
            for stream in streams:
                with pytest.raises(openai.APIError, match="shutting down"):
                    async for _ in stream:
                        pass
            assert await ending == 1
    assert session_pids(served.pid) == set()
    assert "Traceback" not in served.log() and LOST not in served.log()


def test_a_signal_while_loading_ends_it_too(model_dir, tmp_path):
    """HTTP is up before the model is: probes and clients hear 503 with the reason, and the half-started workers go."""
    port = free_port()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in COMMON_FLAGS.items()]
    command = [PYTHON, "-m", "jettison", "serve", str(model_dir), f"--port={port}", "--memory=16MiB", *flags]
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("wb") as log, httpx.Client(timeout=WAIT_S) as http:
        process = subprocess.Popen(
            command, env=child_environment(**{ENDS_WITH_STDIN: "1"}), stdin=subprocess.PIPE, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True)
        try:

            def answers() -> bool:
                try:
                    return bool(http.get(f"{url}/ping"))
                except httpx.ConnectError:
                    return False

            eventually(answers, "the server listens")
            health = http.get(f"{url}/health")
            late = http.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "x"})
            process.send_signal(signal.SIGTERM)
            assert (health.status_code, health.json()["status"]) == (503, "loading")
            assert late.status_code == 503
            assert "loading" in late.json()["error"]["message"]
            assert process.wait(WAIT_S) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            process.stdin.close()
    assert session_pids(process.pid) == set()
    assert "Traceback" not in (tmp_path / "log").read_text()
