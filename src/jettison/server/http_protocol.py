"""uvicorn's HTTP protocol with additions: limits and deadlines around requests, and JSON for its own errors.

llhttp has no limit on the size of headers and trailers; without one, a client that never ends them fills the memory.
uvicorn makes objects of every request in the bytes read, hundreds of times their size, and reports a lost connection
only to the newest request. It watches a connection only between requests, so a client would hold it for ever if its
answer is complete before its request, or if it never reads its answer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from jettison.server.cors import CorsSettings
from jettison.server.errors import NOT_READY_RETRY_MS, ApiError, retry_headers
from jettison.server.generation import CUT_OFF
from jettison.server.http_transport import AnswerTransport, Flow, HeldBytes, cut_off, write_now
from jettison.server.idle_connections import IdleConnections
from jettison.server.old_http import VERSIONS, UnchunkedApp
from jettison.server.paths import plain_path
from jettison.server.quiet_log import Seldom
from jettison.server.settings import ServerSettings
from jettison.server.sse import WRITE_NOW
from jettison.server.upgrades import framing_behind, parser_of_body

logger = logging.getLogger(__name__)
logger.setLevel(logging.ERROR)  # a line for each malformed request would let any client fill the log

LINGER_S = 1.0
"""Time for which unwanted bytes are still read and discarded: those of a refused client, and the rest of an answered
body."""
SLICE_BYTES = 2048
"""Most bytes parsed at one time: the parser cannot be stopped inside of them."""
MAX_QUEUED = 8
"""Most requests of one connection that wait for their turn. Later ones stay unparsed bytes."""
_LEFT_STATES = (7, 8)
"""TCP_CLOSE and TCP_CLOSE_WAIT, by the kernel's numbers."""
_END_OF_LINES = b"\r\n\r\n"
"""The end of headers, and of a chunked body."""


PROBE_CONNECTIONS = 16
"""Connections accepted beyond the limit, for one request each to ``PROBE_PATHS`` only: a supervisor should not restart
a server because it is full. With another request one takes the place of an idle connection."""
PROBE_PATHS = ("/health", "/ping")
PROBE_TIMEOUT_S = 2.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. A subclass for each server carries its limits (``bounded_protocol``)."""

    max_header_bytes = 16 << 10
    header_timeout_s = 20.0
    write_timeout_s = 60.0
    max_connections: int | None = None
    held_bytes: HeldBytes
    idle: IdleConnections
    """The server's connections between two requests."""
    root_path_of_proxy = ""
    cors: CorsSettings
    flow: Flow
    seldom: Seldom
    """The logger of events that clients cause."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = logger
        self._held = b""
        """Bytes received but not parsed: they wait for a place in the queue, or for the application to take a body."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered, or was answered last; ``cycle`` is the newest one read."""
        self._num_overhead_bytes = 0
        """Bytes since the last piece of a body or the last end of a message: headers, trailers, chunk extensions."""
        self._num_body_bytes = 0
        """Bytes still to come of a body with an announced length."""
        self._is_in_headers = True
        """Whether headers are read, also between requests; else a body is."""
        self._is_begun = False
        """Whether the newest message has begun and not ended."""
        self._is_last = False
        """Whether the newest request ends the connection: later bytes are discarded."""
        self._late_refusal: ApiError | None = None
        """The last answer, behind those of all requests that were read."""
        self.is_refused = False
        """Whether its client gets nothing more: what still comes is read and discarded."""
        self._is_probe = False
        """Whether the connection is beyond the limit, so that only probes are answered."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._num_unsent_bytes = 0
        """Unsent bytes at the last ``look``."""
        self._unread_since_s: float | None = None

    # --- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first request's headers."""
        super().connection_made(transport)
        self.flow = Flow(transport, self._feed)
        num_open = len(self.connections) - self.idle.num_leaving
        num_beyond = 0 if self.max_connections is None else num_open - self.max_connections
        is_beyond_probes = num_beyond > PROBE_CONNECTIONS
        if is_beyond_probes and not self.idle.give_way():
            self._turn_away()
            return
        self._is_probe = num_beyond > 0 and not is_beyond_probes
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop deadlines, bytes and queued requests, and inform the running request."""
        self._drop_requests()
        self.idle.lost(self)
        super().connection_lost(exc)

    def end_idle(self) -> None:
        """Close the connection between two requests; over TLS a client may take long to agree."""
        self._unset_keepalive_if_required()
        self.transport.close()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """The client has sent no request for as long as it may."""
        self.idle.discard(self)
        super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """Make the running request the connection's last."""
        if self._is_idle:
            self.transport.close()
        elif self._running is not None:
            self._running.keep_alive = False

    def look(self, now_s: float) -> None:
        """Check for clients that have stalled or left. Called about every second.

        Cuts the connection of a client that has taken nothing for ``write_timeout_s`` while an answer, or the end of
        the connection, waits for it. Ends the requests of a client that has left: while its bytes are held, nothing is
        read, so the socket reports no end of file.
        """
        if self._held and not self._is_idle and self._has_left():
            self._drop_requests()
            self.transport.close()
            return
        num_bytes = self.transport.get_write_buffer_size()
        # An answer that can go on adds bytes by itself, so that the number of unsent bytes would not show what the
        # client takes.
        is_waiting = num_bytes > 0 and (self.flow.write_paused or self._is_idle or self.transport.is_closing())
        if not is_waiting or self._unread_since_s is None or num_bytes < self._num_unsent_bytes:
            self._unread_since_s = now_s if is_waiting else None
        elif now_s - self._unread_since_s >= self.write_timeout_s:
            self.seldom.warning("dropping a client that has not read its answer for %g s", self.write_timeout_s)
            self.transport.abort()
        self._num_unsent_bytes = num_bytes

    def _has_left(self) -> bool:
        """Whether the client has closed or reset its side, unread bytes or not."""
        sock = self.transport.get_extra_info("socket")
        try:
            state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:  # a Unix socket, in tests
            return False
        return state in _LEFT_STATES

    # --- what comes in

    def data_received(self, data: bytes) -> None:
        """Take bytes, and parse them as far as there is room for requests."""
        if self.is_refused or self._is_last:
            return
        self._unset_keepalive_if_required()
        self._hold(self._held + data if self._held else data)
        self._feed()
        if self._held and self.held_bytes.total > self.held_bytes.limit:
            self.seldom.warning("refusing a client: %d bytes of requests that wait are held", self.held_bytes.total)
            headers = retry_headers(NOT_READY_RETRY_MS)
            message = "Too many requests wait to be read; retry later."
            self._refuse(ApiError(503, message, code="overloaded", headers=headers))

    def _hold(self, data: bytes) -> None:
        self.held_bytes.total += len(data) - len(self._held)
        self._held = data

    def _feed(self) -> None:
        """Parse held bytes until the queue is full; read on when none are left."""
        data = memoryview(self._held)
        at = 0
        while at < len(data) and not self._is_full and not self.is_refused and not self._is_last:
            end = self._end_of_slice(at)
            self._parse(bytes(data[at:end]))
            at = end
        self._hold(b"" if self.is_refused or self._is_last else self._held[at:])
        self.flow.set_reading(not self._held and not self._is_full)
        self._set_header_timer()

    def _end_of_slice(self, at: int) -> int:
        """End of the slice at a position. No slice reaches into the next message, or a hundred short requests would be
        parsed at once."""
        end = at + SLICE_BYTES
        if self._num_body_bytes:
            return min(end, at + self._num_body_bytes)
        found = self._held.find(_END_OF_LINES, at, end)
        return end if found < 0 else found + len(_END_OF_LINES)

    def _parse(self, data: bytes) -> None:
        """Parse bytes, and count the ones outside of bodies, even before the parser has made lines of them."""
        self._num_overhead_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            if not self.is_refused:
                self._parse_behind_upgrade(data[stop.args[0] :])
        except httptools.HttpParserError:
            error = ApiError(400, "Invalid HTTP request received.", code="invalid_http")
            if self._is_in_headers and not self._is_idle and not self.is_refused:
                # The whole requests before are answered first: they are not at fault.
                self._late_refusal, self._is_last = error, True
                return
            self._refuse(error)
        if self._num_overhead_bytes > self.max_header_bytes:
            self._refuse_headers()

    def _parse_behind_upgrade(self, data: bytes) -> None:
        if framing := framing_behind(self.parser, self.headers):
            self.parser = parser_of_body(self, self.parser, framing)
            if data:  # the end of the head had been cut in two
                self._parse(data)
        else:  # the rest is in another protocol, or the sender has to learn that this server does not speak it
            self.cycle.keep_alive = False
            self._is_last = True

    @property
    def _is_full(self) -> bool:
        is_body_waiting = self.cycle is not None and not self.cycle.response_complete
        return len(self.pipeline) >= MAX_QUEUED or (is_body_waiting and len(self.cycle.body) > HIGH_WATER_LIMIT)

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self._running is None or self._running.response_complete

    def on_message_begin(self) -> None:
        """A request starts."""
        super().on_message_begin()
        self._is_in_headers = self._is_begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers are dropped, as the application reads its request's headers from the same list."""
        if self._is_in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Headers and target are complete: check their exact size before the application sees them."""
        self._num_overhead_bytes = 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_header_bytes:
            self._refuse_headers()
        self._check_framing()
        if self._is_probe and not self.is_refused and not self._is_for_probes():
            self._is_probe = not self.idle.give_way()
            if self._is_probe:
                self._turn_away()
        if not self.is_refused:
            super().on_headers_complete()  # raises for an invalid target
            self.cycle.keep_alive = self.parser.should_keep_alive() and not self._is_probe
            self._is_in_headers = False
            self.cycle.transport = AnswerTransport(self)  # type: ignore[assignment]
            self.scope[CUT_OFF] = partial(cut_off, self.transport, self.seldom)  # type: ignore[literal-required]
            self.scope[WRITE_NOW] = partial(write_now, self.cycle)  # type: ignore[literal-required]
            self._num_body_bytes = int(dict(self.headers).get(b"content-length", 0))  # llhttp has checked it

    def _check_framing(self) -> None:
        """Refuse transfer codings in HTTP/1.0, and unsupported ones in later versions (RFC 9112 6.1).

        The answer is 400, as for all invalid requests; 5xx is for the server's own faults."""
        is_old = self.parser.get_http_version() in VERSIONS
        if is_old:
            self.expect_100_continue = False  # RFC 9110 10.1.1
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and is_old:
            self._refuse(ApiError(400, "A request in HTTP/1.0 has no transfer-encoding.", code="invalid_http"))
        elif codings and codings != [b"chunked"]:
            message = "The only transfer-encoding that is taken is chunked; a compressed body has a content-encoding."
            self._refuse(ApiError(400, message, code="unsupported_transfer_encoding"))

    def _is_for_probes(self) -> bool:
        path = self.url.partition(b"?")[0].decode("latin-1")
        return plain_path(path, self.root_path_of_proxy) in PROBE_PATHS

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body; of a refused request nothing is kept."""
        self._num_overhead_bytes = 0
        if self._num_body_bytes:
            self._num_body_bytes -= len(body)
        if not self.is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The next bytes on this connection belong to another request's headers."""
        if self.is_refused or framing_behind(self.parser, self.headers):
            return
        super().on_message_complete()
        self._is_in_headers, self._is_begun = True, False
        self._num_overhead_bytes = self._num_body_bytes = 0
        self._is_last = not self.cycle.keep_alive
        if self.cycle.response_complete:
            # The answer came before the end of the body, whose bytes have ended the connection's idle time: it starts
            # again.
            self._stop_header_timer()
            self._await_request()

    # --- requests and their answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._unset_keepalive_if_required()  # the request may have come in one piece with the end of the one before
        if cycle.scope["http_version"] in VERSIONS:
            app = UnchunkedApp(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Start the next request; the rest of the answered request's message gets a deadline."""
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self.is_refused:
            return
        self._unset_keepalive_if_required()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        self._feed()
        if not self._is_idle or self.is_refused:
            return
        if self._late_refusal is not None:
            self._refuse(self._late_refusal)
        elif not self._is_in_headers:
            self._stop_header_timer()
            self._header_timer = self.loop.call_later(LINGER_S, self.transport.close)
        elif not self._is_begun:
            self._stop_header_timer()
            self._await_request()

    def _unset_keepalive_if_required(self) -> None:
        self.idle.discard(self)
        super()._unset_keepalive_if_required()

    def _await_request(self) -> None:
        self._unset_keepalive_if_required()
        self.idle.add(self)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _drop_requests(self) -> None:
        """End all requests of this connection, as nothing can be written any more."""
        self._stop_header_timer()
        self._unset_keepalive_if_required()
        self._hold(b"")
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.flow.resume_writing()  # a write that waits for the client sees the end

    # --- refusals

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP."""
        self._refuse(ApiError(400, msg, code="invalid_http"))

    def _refuse_headers(self) -> None:
        message = f"The request headers or trailers are larger than {self.max_header_bytes} bytes."
        self._refuse(ApiError(431, message, code="headers_too_large"))

    def _refuse(self, error: ApiError) -> None:
        if self.is_refused or self.transport.is_closing():
            return
        self.is_refused = True
        if self._may_answer():
            self._write_error(error)
        self._linger()

    def hang_up(self) -> None:
        """End the connection after its last answer, so that a client that still sends its request can read the
        answer."""
        if self._is_in_headers or self.is_refused or self.transport.is_closing():
            self.transport.close()
        else:
            self.is_refused = True
            self._linger()

    def _linger(self) -> None:
        """Keep reading for a while: closing with unread input would reset the connection and lose the answer."""
        self._drop_requests()
        try:
            if self.transport.can_write_eof():  # TLS cannot: its client uses the answer's length
                self.transport.write_eof()
        except OSError:  # the client has reset it: asyncio's loop raises here, uvloop later
            self.transport.abort()
        else:
            self._header_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _turn_away(self) -> None:
        """Refuse a connection without lingering, because descriptors are short."""
        self.is_refused = True
        self._stop_header_timer()
        self.seldom.warning("turning clients away: %d connections are open, as many as may be", self.max_connections)
        message = "The server has as many connections as it can hold; retry later."
        headers = retry_headers(NOT_READY_RETRY_MS)
        self._write_error(ApiError(503, message, code="too_many_connections", headers=headers))
        self.transport.close()

    def _write_error(self, error: ApiError) -> None:
        # Headers of the newest request as far as read; before the first request there is no list.
        origin = dict(self.headers or ()).get(b"origin")
        headers = error.headers | self.cors.error_headers(None if origin is None else origin.decode("latin-1")) | {
            "content-type": "application/json", "content-length": str(len(error.body)), "connection": "close",
        }  # fmt: skip
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        body = b"" if self._is_begun and self.parser.get_method() == b"HEAD" else error.body
        self.transport.write(STATUS_LINE[error.status] + lines.encode("latin-1") + b"\r\n" + body)

    def _may_answer(self) -> bool:
        """Whether an answer can be written without being taken for a part of another one."""
        if self._is_in_headers or self._running is None:
            return self._is_idle
        return self.cycle is self._running and not self._running.response_started

    # --- deadlines

    def _set_header_timer(self) -> None:
        """Start the deadline for headers. It counts only time spent waiting for the client, not while an answer is made
        or its bytes are held."""
        if self.is_refused:
            return  # the timer is the end of lingering
        if self._is_in_headers and self._is_idle and not self._held and not self._is_last:
            if self._is_begun:
                self._unset_keepalive_if_required()
            if self.timeout_keep_alive_task is None:
                self._await_headers()
        elif self._is_in_headers or not self._is_idle:
            self._stop_header_timer()

    def _await_headers(self) -> None:
        if self._header_timer is None:
            timeout_s = PROBE_TIMEOUT_S if self._is_probe else self.header_timeout_s
            self._header_timer = self.loop.call_later(timeout_s, self._header_timeout)

    def _header_timeout(self) -> None:
        self._header_timer = None
        self._refuse(ApiError(408, "The request headers did not arrive in time.", code="request_timeout"))

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def bounded_protocol(settings: ServerSettings) -> type[BoundedHttpProtocol]:
    """The protocol class with these limits; uvicorn makes one instance for each connection."""
    limits = {
        "max_header_bytes": settings.max_header_bytes,
        "header_timeout_s": settings.header_timeout_s,
        "write_timeout_s": settings.write_timeout_s,
        "max_connections": settings.max_connections,
        "held_bytes": HeldBytes(settings.max_buffered_bytes),
        "idle": IdleConnections(),
        "root_path_of_proxy": settings.root_path,
        "cors": settings.cors,
        "seldom": Seldom(logging.getLogger("jettison.server")),
    }
    return type("HttpProtocol", (BoundedHttpProtocol,), limits)
