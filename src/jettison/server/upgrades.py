"""Requests with a body that ask for another protocol than HTTP/1.1: they are answered in HTTP/1.1.

Java's HttpClient asks for HTTP/2 this way, with the first request of each connection. A server may ignore that (RFC
9110 7.8), but llhttp takes the head of such a request for the whole request, and the body for the other protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httptools

_CALLBACKS = ("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete")


def framing_behind(parser: httptools.HttpRequestParser, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The header line that gives the end of the body of such a request; empty for a request without a body, or without
    an upgrade. ``parser`` has read the headers."""
    if not parser.should_upgrade() or parser.get_method() == b"CONNECT":
        return b""
    of_body = {name: value.strip() for name, value in headers if name in (b"content-length", b"transfer-encoding")}
    return b"".join(b"%s: %s\r\n" % item for item in of_body.items() if item[1].lstrip(b"0"))


def parser_of_body(
    protocol: object, parser: httptools.HttpRequestParser, framing: bytes
) -> httptools.HttpRequestParser:
    """A parser of the bytes after the head that ``parser`` has read. It reports the body, and everything after it, to
    ``protocol``."""
    is_told = False

    def passed_on(name: str) -> Callable[..., None]:
        call = getattr(protocol, name)

        def callback(*args: Any) -> None:
            if is_told:
                call(*args)

        return callback

    follower = httptools.HttpRequestParser(SimpleNamespace(**{name: passed_on(name) for name in _CALLBACKS}))
    follower.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's first one
    follower.feed_data(b"%s / HTTP/1.1\r\nhost: -\r\n%s\r\n" % (parser.get_method(), framing))
    is_told = True
    return follower
