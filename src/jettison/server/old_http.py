"""Answers to requests in HTTP/1.0: no chunked coding, and a connection that is kept only where its client asks for it.

uvicorn answers every version as 1.1. A 1.0 client takes the sizes of chunks for text (RFC 9112 6.1 forbids them), so
the end of the connection has to end an answer without an announced length.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

VERSIONS = ("0.9", "1.0")


class UnchunkedApp:
    """The application as one request in HTTP/1.0 sees it."""

    def __init__(self, app: Any, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._has_length = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it; ``send`` is the cycle's."""
        await self._app(scope, receive, self._send)

    async def _send(self, message: Message) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message.get("headers", ()) if name != b"transfer-encoding"]
            has_body = cycle.scope["method"] != "HEAD" and message["status"] not in (204, 304)
            self._has_length = not has_body or any(name.lower() == b"content-length" for name, _ in headers)
            if not self._has_length:
                cycle.keep_alive = False
                cycle.chunked_encoding = False
            elif cycle.keep_alive:
                headers.append((b"connection", b"keep-alive"))  # else an HTTP/1.0 client assumes that it is closed
            message = {**message, "headers": headers}
        elif not self._has_length:
            cycle.expected_content_length = len(message.get("body", b""))  # each piece has the length that it has
        await cycle.send(message)  # type: ignore[arg-type]  # Starlette's messages are mappings, uvicorn's are typed
