"""The address of a server that a command asks.

Only whether a client could ask it at all; whether a server answers is found by asking.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from jettison.errors import UserError


def server_root(url: str) -> str:
    """The URL as it was given. Raises UserError where it is no HTTP address."""
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number, a bracket without its other
        is_http = False
    if not is_http:
        raise UserError(f"{url!r} is no server's root: write http://HOST:PORT")
    return url
