"""Unix sockets that another process keeps: to close one here leaves its path, at which the next process goes on."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Callable
from typing import Any


async def serve_kept(make: Callable[[], asyncio.Protocol], listener: socket.socket) -> asyncio.AbstractServer:
    """Take connections. From Python 3.13 on a loop would remove the path at the end."""
    loop = asyncio.get_running_loop()
    removes = isinstance(loop, asyncio.BaseEventLoop) and "cleanup_socket" in inspect.signature(
        loop.create_unix_server).parameters
    options: dict[str, Any] = {"cleanup_socket": False} if removes else {}
    return await loop.create_unix_server(make, sock=listener, **options)
