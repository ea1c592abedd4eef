"""What front ends tell the controller's books, and ask of them: a topic and the type of its body."""

from __future__ import annotations

from typing import NamedTuple

from jettison.live.frontend.hub import COUNTS
from jettison.server.console.journal import Row
from jettison.types import RequestId

__all__ = ["BEGAN", "COUNTS", "ENDED", "FIRST", "GONE", "KEEP", "RECORD", "RESPONSE", "Began", "Kept", "Recorded"]

BEGAN = "began"
GONE = "gone"
"""The engine's id of the first choice of a request that is under way no more."""
ENDED = "ended"
"""Rows of the choices of a request that has ended."""
FIRST = "first"
"""When an online request got its first token, and how long after its arrival in seconds."""
RECORD = "record"
KEEP = "keep"
RESPONSE = "response"
"""A tenant and a response's id: its ``StoredResponse``, or nothing."""


class Began(NamedTuple):
    """A request is under way."""

    request_id: RequestId
    """The engine's, of its first choice."""
    rows: list[Row]
    """Of its choices."""


class Recorded(NamedTuple):
    """``ServerSettings.record_request``."""

    arrival_ns: int
    num_prompt: int
    num_output: int
    num_cached: int
    is_offline: bool
    tenant: str


class Kept(NamedTuple):
    """A response to be kept."""

    tenant: str
    response_id: str
    document: bytes
    items: bytes
    output: bytes
