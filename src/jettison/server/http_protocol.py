"""uvicorn's HTTP protocol with what it leaves open: limits and deadlines around bodies, and JSON for its own errors.

llhttp has no limit on the size of headers and trailers; without one, a client that never ends them fills the memory.
uvicorn watches a connection only between requests; a client whose answer is complete before its request is would
hold one for ever.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jettison.server.errors import ApiError
from jettison.server.settings import ServerSettings
from jettison.server.sse import ABORT_KEY

logger = logging.getLogger(__name__)
logger.setLevel(logging.ERROR)  # a line for each malformed request would let any client fill the log

LINGER_S = 1.0
"""How long bytes that nobody reads any more are still thrown away: a refused client's, the rest of an answered body."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. A subclass for each server carries its limits (``bounded_protocol``)."""

    max_header_bytes = 16 << 10
    header_timeout_s = 20.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = logger
        self._num_overhead_bytes = 0
        """Bytes since the last piece of a body or the last end of a message: headers, trailers, chunk extensions."""
        self._is_in_headers = True
        """Also between requests. Else the message of the newest request is incomplete."""
        self._is_refused = False
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first request's headers are awaited from here on."""
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The deadline goes with the connection."""
        self._stop_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what comes and is no body, whether or not the parser has made lines of it."""
        if self._is_refused:
            return
        if self._is_in_headers:
            self._await_headers()
        self._num_overhead_bytes += len(data)
        super().data_received(data)
        if self._num_overhead_bytes > self.max_header_bytes:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        """A request starts."""
        super().on_message_begin()
        self._is_in_headers = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are dropped: the application reads its request's headers from the same list."""
        if self._is_in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Headers and target are known: their exact size is checked before the application sees them."""
        self._num_overhead_bytes = 0
        self._stop_header_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_header_bytes:
            self._refuse_headers()
        if not self._is_refused:
            self._is_in_headers = False
            self.scope[ABORT_KEY] = self.transport.abort  # type: ignore[literal-required]
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Of a refused request nothing is kept."""
        self._num_overhead_bytes = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The next bytes on this connection belong to another request's headers."""
        if self._is_refused:
            return
        super().on_message_complete()
        self._is_in_headers = True
        self._num_overhead_bytes = 0
        if self.cycle is not None and self.cycle.response_complete:
            # The answer came first, and the bytes behind it have ended the connection's idle time: it starts again.
            self._stop_header_timer()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """What is left of an answered request's message has a deadline."""
        super().on_response_complete()
        is_left = not self._is_in_headers and self.cycle.response_complete
        if is_left and not self._is_refused and not self.transport.is_closing():
            self._stop_header_timer()
            self._header_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """For bytes that are no HTTP."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _refuse_headers(self) -> None:
        message = f"The request headers or trailers are larger than {self.max_header_bytes} bytes."
        self._refuse(ApiError(431, message, code="headers_too_large"))

    def _refuse(self, error: ApiError) -> None:
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_header_timer()
        if self._may_answer():
            body = error.body
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # nothing can be written behind the end
            self.cycle.message_event.set()
        # Closing now, with input unread, would reset the connection and take the answer with it.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._header_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _may_answer(self) -> bool:
        """Whether an answer of ours would not land inside another one, or be taken for it."""
        if self._is_in_headers:
            return self.cycle is None or self.cycle.response_complete
        return not self.cycle.response_started and not self.pipeline

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout_s, self._header_timeout)

    def _header_timeout(self) -> None:
        self._header_timer = None
        self._refuse(ApiError(408, "The request headers did not arrive in time.", code="request_timeout"))

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def bounded_protocol(settings: ServerSettings) -> type[BoundedHttpProtocol]:
    """The protocol class with these limits; uvicorn makes one instance for each connection."""
    limits = {"max_header_bytes": settings.max_header_bytes, "header_timeout_s": settings.header_timeout_s}
    return type("HttpProtocol", (BoundedHttpProtocol,), limits)
