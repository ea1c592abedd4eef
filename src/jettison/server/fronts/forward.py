"""A request's way through a front end to the controller and its answer's way back, byte by byte, over a Unix socket.

The controller's own application answers: its keys, limits and forms are the only ones. Each request has a connection of
its own, so that an end on either side ends the other.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from contextlib import suppress

import h11
from starlette.types import Receive, Scope, Send

from jettison.errors import OUT_OF_DESCRIPTORS
from jettison.server.errors import NOT_READY_RETRY_MS, ApiError, retry_headers
from jettison.server.gate import label_headers, label_of
from jettison.server.paths import plain_path
from jettison.server.settings import ServerSettings

READ_BYTES = 64 << 10

GONE = "The server's engine is gone; retry later."
FULL = "The server has too many connections; retry later."
_IS_FULL = OUT_OF_DESCRIPTORS | {errno.EAGAIN}
"""Without a descriptor, or with as many connections as wait for the controller."""

_OF_A_CONNECTION = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"expect", b"transfer-encoding",
})  # fmt: skip
_SET_HERE = _OF_A_CONNECTION | {b"date", b"server"}


Refuse = Callable[[ApiError, Scope, Receive, Send], Awaitable[None]]


def _not_ready(why: str) -> ApiError:
    return ApiError(503, why, code="not_ready", headers=retry_headers(NOT_READY_RETRY_MS))


class Forward:
    """An ASGI application that has another server answer."""

    def __init__(self, path: str, settings: ServerSettings) -> None:
        """``path``: its socket."""
        self._path = path
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            await self._refuse(_not_ready(FULL if error.errno in _IS_FULL else GONE), scope, receive, send)
            return
        way = _Way(reader, writer, self._refuse)
        try:
            await way.go(scope, receive, send)
        finally:
            writer.transport.abort()

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error that is none of the controller's, with the headers that its answers have."""
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        path = plain_path(scope["path"], self._settings.root_path)
        error.headers |= self._settings.cors.error_headers(None if origin is None else origin.decode("latin-1"))
        error.headers |= {name.decode(): value.decode() for name, value in label_headers(path, label_of(headers))}
        await error.response(path)(scope, receive, send)


class _Way:
    """One request and its answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, refuse: Refuse) -> None:
        self._reader = reader
        self._writer = writer
        self._refuse = refuse
        self._connection = h11.Connection(h11.CLIENT)
        self._is_started = False
        self._is_wanted = asyncio.Event()
        """Set when the controller waits for a body that its client has only announced."""

    async def go(self, scope: Scope, receive: Receive, send: Send) -> None:
        there = asyncio.create_task(self._there(scope, receive))
        back = asyncio.create_task(self._back(send))
        try:
            # ``there`` ends early only where the client has left.
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
            try:
                if not back.done():
                    return there.result()
                back.result()
            except (OSError, h11.RemoteProtocolError):
                if self._is_started:
                    raise  # the client's connection is cut off, as the answer was
                await self._refuse(_not_ready(GONE), scope, receive, send)
            except h11.LocalProtocolError as error:
                refusal = ApiError(400, f"The request cannot be read: {error}.", code="invalid_request")
                await self._refuse(refusal, scope, receive, send)
        finally:
            for task in (there, back):
                task.cancel()
            await asyncio.gather(there, back, return_exceptions=True)

    async def _there(self, scope: Scope, receive: Receive) -> None:
        """The request; returns when the client has left."""
        headers = [(name, value) for name, value in scope["headers"] if name not in _OF_A_CONNECTION]
        names = {name for name, _ in headers}
        has_body = b"content-length" in names or any(name == b"transfer-encoding" for name, _ in scope["headers"])
        if b"host" not in names:
            headers.append((b"host", b"localhost"))
        if has_body and b"content-length" not in names:
            headers.append((b"transfer-encoding", b"chunked"))
        # What refuses the request before its body is the controller's: only its word has the client send it.
        waits = has_body and any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"])
        if waits:
            headers.append((b"expect", b"100-continue"))
        headers.append((b"connection", b"close"))
        target = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        with suppress(OSError):  # what the other side answered meanwhile is read
            await self._write(h11.Request(method=scope["method"], target=target, headers=headers))
            if waits:
                await self._is_wanted.wait()  # else the answer ends this
            while has_body:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                if message.get("body"):
                    await self._write(h11.Data(data=message["body"]))
                has_body = message.get("more_body", False)
            await self._write(h11.EndOfMessage())
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _write(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        if data := self._connection.send(event):
            self._writer.write(data)
            await self._writer.drain()

    async def _back(self, send: Send) -> None:
        """The answer. Raises OSError, h11.ProtocolError where it is cut off."""
        while True:
            event = self._connection.next_event()
            if event is h11.NEED_DATA:
                self._connection.receive_data(await self._reader.read(READ_BYTES))
            elif isinstance(event, h11.Response):
                headers = [(name, value) for name, value in event.headers if name not in _SET_HERE]
                self._is_started = True
                await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
            elif isinstance(event, h11.Data):
                await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            elif isinstance(event, h11.InformationalResponse):
                self._is_wanted.set()
            else:
                raise ConnectionError("the answer was cut off")
