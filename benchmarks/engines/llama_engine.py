"""llama.cpp's server (``llama-server``) as a child; its binding for Python has no continuous batching.

Settings: ``binary``, ``gguf``, ``dtype`` of its weights, ``slots``: requests that are served together, ``context``:
tokens of each, ``options``: further arguments. Every request is a connection of its own that is answered at its end,
not streamed: the cheapest way in.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

import aiohttp
from child import main

READY_S = 120.0


def start_server(binary: str, gguf: str, arguments: list[str]) -> tuple[subprocess.Popen[bytes], str]:
    """A server that has loaded the model, and its address. Raises RuntimeError where it ends or takes too long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [binary, "-m", gguf, "--host", "127.0.0.1", "--port", str(port), *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    url, give_up = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
    while time.monotonic() < give_up and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1.0) as answer:
                if answer.status == 200:
                    return server, url
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    server.kill()
    raise RuntimeError(f"llama-server did not get ready (exit status {server.wait()})")


class LlamaEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> dict[str, Any]:
        settings, num = self._settings, self._settings["slots"]
        threads = str(settings["num_threads"])
        self._server, self._url = start_server(settings["binary"], settings["gguf"], [
            "--threads", threads, "--threads-batch", threads, "--parallel", str(num),
            "--ctx-size", str(num * settings["context"]), *settings["options"],
        ])  # fmt: skip
        with urllib.request.urlopen(f"{self._url}/props") as answer:
            props = json.load(answer)
        return {"version": props.get("build_info", "?"), "dtype": f"weights {settings['dtype']}"}

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        async def all_at_once() -> list[int]:
            if self._session is None:
                timeout = aiohttp.ClientTimeout(total=None)
                self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
            return await asyncio.gather(*(self._complete(prompt, max_tokens) for prompt in prompts))

        return self._loop.run_until_complete(all_at_once())

    async def _complete(self, prompt: list[int], max_tokens: int) -> int:
        assert self._session is not None
        body = {"prompt": prompt, "n_predict": max_tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
        async with self._session.post(f"{self._url}/completion", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
            return int((await response.json())["tokens_predicted"])

    def close(self) -> None:
        if self._session is not None:
            self._loop.run_until_complete(self._session.close())
        self._loop.close()
        self._server.terminate()
        self._server.wait(20)


if __name__ == "__main__":
    main(LlamaEngine)
