"""The one encoder of JSON that leaves the server: answers, their chunks, errors, and the lines of result files.

A client that reads line by line must get each document whole (``jettison.jsontext``), so nothing here is written by
``msgspec.json.encode`` itself; a house test checks this. Messages between the server's own processes and its database
are decoded by msgspec again and need no such care.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jettison.jsontext import in_one_line

_encode = msgspec.json.Encoder().encode


def encode(value: Any) -> bytes:
    """JSON in UTF-8, without any character that some reader takes for a line end."""
    return in_one_line(_encode(value))
