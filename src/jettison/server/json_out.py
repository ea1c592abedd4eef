"""The one encoder of JSON that leaves the server: answers, their chunks, errors, and the lines of result files.

A client that reads line by line must find each document whole (``jettison.jsontext``), so nothing here is written by
``msgspec.json.encode`` itself; a house test looks for it. What the server's own processes and its database say to each
other is decoded by msgspec again and needs no such care.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jettison.jsontext import in_one_line

_encode = msgspec.json.Encoder().encode


def encode(value: Any) -> bytes:
    """As UTF-8, without a line end in any reader's eyes."""
    return in_one_line(_encode(value))
