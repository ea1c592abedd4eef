"""Listening sockets. Imports next to nothing: the parent of a server binds with it."""

from __future__ import annotations

import socket
from contextlib import suppress

from jettison.errors import ConfigError

BACKLOG = 4096
UNSENT_BYTES = 128 << 10
"""Bytes of an answer that the kernel buffers beyond what it may send."""


def open_socket(host: str, port: int, *, is_shared: bool = False, listens: bool = True) -> socket.socket:
    """Listen, or only bind. Port 0 takes any free one. ``is_shared``: other sockets of this server listen there, too,
    and the kernel deals connections out to them. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only for sockets marked as TCP: with it on,
    # every second small write waits 40 ms for a delayed acknowledgement.
    listener: socket.socket | None = None
    try:
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            # Else the kernel buffers megabytes for a client that reads nothing, which then looks like one that reads.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        listener.bind((host, port))
        if is_shared:
            _close_to_others(family, listener.getsockname())
        if listens:
            listener.listen(BACKLOG)
        else:  # until it listens, it is this that keeps another server from the address
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        if listener is not None:
            listener.close()
        where = f"[{host}]" if ":" in host else host
        raise ConfigError(f"cannot listen on {where}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def _close_to_others(family: int, address: tuple[object, ...]) -> None:
    """Have Linux before 6.8 look for conflicts at the next bind, too: it does so once a socket without SO_REUSEADDR has
    been bound there."""
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as strict:
        strict.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        strict.bind(address)
