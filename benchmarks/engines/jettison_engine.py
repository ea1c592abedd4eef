"""Jettison itself, in one of three shapes: one process, worker processes, or behind HTTP.

Settings: ``mode``, ``config``: keys of ``EngineConfig``; for HTTP, ``log``: a file for the server's output.

- ``local``: ``LocalCluster``, everything in this process. What the other engines' offline interfaces are compared with.
- ``workers``: the live ``Engine`` with its worker processes, submitted to directly.
- ``http``: ``jettison serve`` as a child; every request is a streaming connection of its own from this process, which
  shares the cores with the server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import uvloop
from child import main

import jettison
from jettison.config import EngineConfig
from jettison.device.kernels.loading import load_kernels
from jettison.live.engine.assembly import assemble
from jettison.live.engine.engine import Engine
from jettison.live.engine.local_cluster import LocalCluster
from jettison.live.experiments.server_process import ServerProcess
from jettison.live.machine.garbage import settle_garbage_collector
from jettison.types import Request, SamplingParams

Prompts = dict[str, list[int]]


class JettisonEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        config = EngineConfig.resolve(**settings["config"])
        self._config = config
        self._ids = itertools.count()
        self._mode: Mode
        if settings["mode"] == "http":
            self._mode = HttpMode(settings["config"], Path(settings["log"]))
        else:
            self._mode = WorkersMode(config) if settings["mode"] == "workers" else LocalMode(config)

    def start(self) -> dict[str, Any]:
        self._mode.start()
        settle_garbage_collector()  # as ``jettison serve`` does when it is ready
        return {
            "version": jettison.__version__, "dtype": assemble(self._config).worker_specs[0].dtype,
            "max_num_batched_tokens": self._config.scheduler.max_num_batched_tokens,
            "kernels": load_kernels(self._config.model.kernels).name,
        }  # fmt: skip

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        return self._mode.run({f"r{next(self._ids)}": prompt for prompt in prompts}, max_tokens)

    def close(self) -> None:
        self._mode.close()


class Mode(Protocol):
    def start(self) -> None: ...

    def run(self, prompts: Prompts, max_tokens: int) -> list[int]: ...

    def close(self) -> None: ...


class LocalMode:
    def __init__(self, config: EngineConfig) -> None:
        self._cluster = LocalCluster(config)

    def start(self) -> None:
        self._cluster.start()

    def run(self, prompts: Prompts, max_tokens: int) -> list[int]:
        for request_id, prompt in prompts.items():
            self._cluster.submit(request_id, prompt, _params(max_tokens))
        self._cluster.run()
        return [len(self._cluster.completions.pop(request_id).tokens) for request_id in prompts]

    def close(self) -> None:
        self._cluster.close()


class WorkersMode:
    def __init__(self, config: EngineConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = Engine(config)

    def start(self) -> None:
        self._loop.run_until_complete(self._engine.start())

    def run(self, prompts: Prompts, max_tokens: int) -> list[int]:
        async def all_at_once() -> list[int]:
            streams = [
                self._engine.submit(Request(request_id, tuple(prompt), _params(max_tokens), 0))
                for request_id, prompt in prompts.items()
            ]
            return await asyncio.gather(*(_count(stream) for stream in streams))

        return self._loop.run_until_complete(all_at_once())

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()


class HttpMode:
    def __init__(self, config: dict[str, Any], log: Path) -> None:
        file = log.with_suffix(".yaml")
        file.write_text(json.dumps({name: value for name, value in config.items() if name != "model"}))  # JSON is YAML
        self._server = ServerProcess(Path(config["model"]), {"config": file}, log)
        self._loop = uvloop.new_event_loop()

    def start(self) -> None:
        self._server.start()

    def run(self, prompts: Prompts, max_tokens: int) -> list[int]:
        async def all_at_once() -> list[int]:
            return await asyncio.gather(*(self._stream(prompt, max_tokens) for prompt in prompts.values()))

        return self._loop.run_until_complete(all_at_once())

    async def _stream(self, prompt: list[int], max_tokens: int) -> int:
        """The tokens that the server says it has sent."""
        fields = {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        body, url = json.dumps(fields).encode(), urlsplit(self._server.url)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        ended: asyncio.Future[bytes] = self._loop.create_future()
        await self._loop.create_connection(lambda: _Reader(head.encode() + body, ended), url.hostname, url.port)
        tail = await ended
        _, found, count = tail.rpartition(b'"completion_tokens":')
        if not found or b"data: [DONE]" not in tail:
            raise RuntimeError(f"not a whole stream: {tail!r}")
        return int(count.lstrip().split(b",")[0].split(b"}")[0])

    def close(self) -> None:
        self._loop.close()
        self._server.close()


class _Reader(asyncio.Protocol):
    """Reads an answer to its end and keeps the last of it: a client that takes as little as one can of the cores that
    it shares with the server."""

    def __init__(self, request: bytes, ended: asyncio.Future[bytes]) -> None:
        self._request = request
        self._ended = ended
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]  # uvloop's do not derive from asyncio's classes

    def data_received(self, data: bytes) -> None:
        self._tail = data if len(data) > 1000 else self._tail[-1000:] + data

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(self._tail)


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


async def _count(stream: AsyncIterator[Any]) -> int:
    return sum([len(event.tokens) async for event in stream])


if __name__ == "__main__":
    main(JettisonEngine)
