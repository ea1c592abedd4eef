"""A small OpenAI-compatible server in this process whose timing and misbehaviour a test decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web


@dataclass
class FakeServer:
    """Streams ``max_tokens`` chunks, ``gap_s`` apart, to everyone; ``behaviour`` by request number."""

    gap_s: float = 0.0
    opens_early: bool = False
    """A frame with the role goes out ``gap_s`` before the first token."""
    behaviour: dict[int, str] = field(default_factory=dict)
    """``reject``, ``fail``, ``break`` (ends early), ``error`` (in mid-stream), ``hang``."""
    models_status: int = 200
    metrics: str | None = None
    events: dict[str, Any] | None = None
    deployment: dict[str, Any] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_hung_up: int = 0
    url: str = ""

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake-model"}]}, status=self.models_status)

    async def metrics_page(self, _request: web.Request) -> web.Response:
        return web.Response(status=404) if self.metrics is None else web.Response(text=self.metrics)

    async def events_page(self, _request: web.Request) -> web.Response:
        return web.Response(status=404) if self.events is None else web.json_response(self.events)

    async def deployment_page(self, _request: web.Request) -> web.Response:
        return web.Response(status=404) if self.deployment is None else web.json_response(self.deployment)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        kind = self.behaviour.get(len(self.bodies), "serve")
        self.bodies.append(body)
        if kind == "reject":
            return web.json_response({"error": {"message": "queue full"}}, status=429)
        if kind == "fail":
            return web.json_response({"error": {"message": "broken"}}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            if kind == "hang":
                await asyncio.sleep(3600)
            await self._stream(response, body, kind, is_chat="messages" in body)
        except (ConnectionError, asyncio.CancelledError):
            self.num_hung_up += 1
            raise
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any], kind: str, is_chat: bool) -> None:
        count = body["max_tokens"]
        if self.opens_early:
            role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
            await response.write(b"data: " + json.dumps(role).encode() + b"\n\n")
            await asyncio.sleep(self.gap_s)
        for index in range(count):
            reason = "length" if index == count - 1 else None
            content = {"delta": {"content": "x"}} if is_chat else {"text": 'say "error" and "choices":[]'}
            chunk = {"id": "1", "choices": [{"index": 0, **content, "finish_reason": reason}], "usage": None}
            if kind == "break" and index == 1:
                return
            if kind == "error" and index == 1:
                chunk = {"error": {"message": "device lost", "type": "server_error", "code": 500}}
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")
                return
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(self.gap_s)
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": count}}
        await response.write(b": keep-alive\n\ndata: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[FakeServer]:
    """Serve on a free port while the block runs."""
    fake = FakeServer(**options)
    app = web.Application()
    app.router.add_get("/v1/models", fake.models)
    app.router.add_get("/metrics", fake.metrics_page)
    app.router.add_get("/jettison/events", fake.events_page)
    app.router.add_get("/jettison/deployment", fake.deployment_page)
    app.router.add_post("/v1/completions", fake.complete)
    app.router.add_post("/v1/chat/completions", fake.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}"
    try:
        yield fake
    finally:
        await runner.cleanup()


@pytest.fixture
def serve() -> Callable[..., AbstractAsyncContextManager[FakeServer]]:
    """``async with serve(gap_s=...) as fake``: a fake server and its ``url``."""
    return serving
