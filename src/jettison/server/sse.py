"""Server-sent events: one stream each, and one keeper for all of them.

The keeper sends comments on silent streams (queued requests keep their connection), so that no stream needs a timer for
every token. The HTTP protocol drops clients that take nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Send

from jettison.server.settings import ServerSettings

logger = logging.getLogger(__name__)

COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect tokens
)


WRITE_NOW = "jettison.write_now"
"""Key of a ``WriteNow`` in the scope of a request, where the HTTP protocol has one."""

WriteNow = Callable[[bytes], bool]
"""Writes a piece of a begun answer; returns False, with nothing written, where the write would have to wait or is
impossible."""


class EventStream:
    """One answer as it is made. ``send`` is ASGI's; each call of it writes whole events.

    ``write_now`` does the same without passing through all layers of the application, which would cost more than a
    token's chunk. These layers do nothing between an answer's first and last piece.
    """

    __slots__ = ("_comment", "_num_sending", "_send", "_write_now", "is_open", "last_s", "sending_since_s")

    def __init__(self, send: Send, write_now: WriteNow | None = None, comment: bytes = COMMENT) -> None:
        """``comment``: what is sent where the stream would be silent for long."""
        self._send = send
        self._comment = comment
        self._write_now = write_now
        self.is_open = False
        self.last_s = 0.0
        """Time of the last event sent."""
        self.sending_since_s: float | None = None
        """Begin of a write that waits for the client; else None."""
        self._num_sending = 0

    async def start(self, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Status and headers."""
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *headers]})
        self.last_s = time.monotonic()
        self.is_open = True

    def write(self, events: bytes) -> Awaitable[None] | None:
        """Write whole, terminated events; await the result if it is not None."""
        if self._write_now is not None and not self._num_sending and self._write_now(events):
            self.last_s = time.monotonic()
            return None
        return self.put(events)

    async def put(self, events: bytes) -> None:
        """Write whole, terminated events through all layers."""
        await self._put(events, more=True)

    async def comment(self) -> None:
        """Send a comment for proxies, unless the stream has ended or is sending by now."""
        if self.is_open and self.sending_since_s is None:
            await self._put(self._comment, more=True)

    async def finish(self, events: bytes = b"") -> None:
        """The last events."""
        self.is_open = False
        await self._put(events, more=False)

    async def _put(self, events: bytes, *, more: bool) -> None:
        self.sending_since_s = self.last_s = time.monotonic()
        self._num_sending += 1
        try:
            await self._send({"type": "http.response.body", "body": events, "more_body": more})
        finally:
            self._num_sending -= 1
            # A comment may wait beside an event; each one sent shows that the client reads.
            self.sending_since_s = time.monotonic() if self._num_sending else None


def error_event(body: bytes) -> bytes:
    """The event of a failure in mid-stream; ``body`` is the error document."""
    return b"data: " + body + b"\n\n"


class StreamKeeper:
    """Keeps all open streams alive. Its task runs only while there are any."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._streams: set[EventStream] = set()
        self._task: asyncio.Task[None] | None = None
        self._writes: set[asyncio.Task[None]] = set()

    def add(self, stream: EventStream) -> None:
        """Keep a stream alive from its start on."""
        self._streams.add(stream)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def discard(self, stream: EventStream) -> None:
        """The stream has ended."""
        self._streams.discard(stream)

    async def _run(self) -> None:
        interval_s = self._settings.keep_alive_s / 2
        while self._streams:
            await asyncio.sleep(interval_s)
            self._look(time.monotonic())

    def _look(self, now_s: float) -> None:
        for stream in tuple(self._streams):
            is_silent = stream.sending_since_s is None and now_s - stream.last_s >= self._settings.keep_alive_s
            if is_silent and stream.is_open:
                # In a task of its own: a client that has just stopped reading must not delay the others.
                write = asyncio.create_task(stream.comment())
                self._writes.add(write)
                write.add_done_callback(self._forget)

    def _forget(self, write: asyncio.Task[None]) -> None:
        self._writes.discard(write)
        if not write.cancelled() and (error := write.exception()) is not None:
            logger.debug("a keep-alive could not be sent: %s", error)  # the stream's next write will raise
