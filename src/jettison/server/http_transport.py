"""Between ``http_protocol`` and its transport: the bytes that wait to be parsed, when to read on, and where answers are
written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from jettison.server.quiet_log import Seldom


class HeldBytes:
    """The unparsed bytes of all connections of a server."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0


class Flow(FlowControl):
    """Flow control that first parses the held bytes when the application wants to read on."""

    def __init__(self, transport: asyncio.Transport, read_on: Callable[[], None]) -> None:
        super().__init__(transport)
        self._read_on = read_on

    def resume_reading(self) -> None:
        """Called when an application asks for its body, or an answer is complete."""
        self._read_on()

    def set_reading(self, wanted: bool) -> None:
        """Start or stop reading from the socket."""
        if wanted:
            super().resume_reading()
        else:
            self.pause_reading()


class Answering(Protocol):
    """What answers are written by."""

    transport: asyncio.Transport
    is_refused: bool
    """Whether nothing more may be written."""

    def hang_up(self) -> None:
        """End the connection after its last answer."""


class AnswerTransport:
    """The transport that answers are written to: their end need not be the connection's, and nothing is written after
    that end."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self.close = answering.hang_up

    def write(self, data: bytes) -> None:
        """Write, unless the answers have ended; so a refused request gets no ``100 Continue``."""
        if not self._answering.is_refused:
            self._answering.transport.write(data)

    def is_closing(self) -> bool:
        """As a transport's."""
        return self._answering.is_refused or self._answering.transport.is_closing()


def cut_off(transport: asyncio.Transport, seldom: Seldom) -> None:
    """End the connection of a client for which too much waits."""
    seldom.warning("dropping a client that reads its answer more slowly than it is made")
    transport.abort()


def write_now(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Write a piece of a chunked answer; see ``sse.WriteNow``. Returns False where ``send`` would wait or refuse."""
    is_plain = cycle.response_started and cycle.chunked_encoding and not cycle.response_complete
    if not is_plain or cycle.flow.write_paused or cycle.disconnected or not body:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True
