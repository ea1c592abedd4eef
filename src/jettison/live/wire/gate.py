"""Where connections over TCP come in whose other end is not proven yet: of workers and keepers, and of anything else
that reaches the port.

A handshake of TLS costs the loop a millisecond or two of its processor, and all that connect can ask for it; on the
same loop beats are granted and steps are told. So a connection is taken only while one is awaited, after a pause; few
are unproven at once; and where there are too many, the oldest goes, which has had its time or is silent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from jettison.transport.handshake import HANDSHAKE_TIMEOUT_S
from jettison.transport.sockets import listening_socket, parse_address, tend

log = logging.getLogger(__name__)

_PAUSE_S = 0.01
"""Between two connections: a hundred handshakes a second take a sixth of a loop's time, where six hundred take all."""
_SPARE = 16
"""Strangers that may be unproven beside those that are awaited, of which each may come twice: a try and the next."""
_NO_DESCRIPTOR_S = 1.0
"""Until the next look, where a connection cannot be taken."""

Settled = Callable[[], object]
"""Called when a connection has been proven or is over."""


class Gate:
    """Opened and closed once. All calls on one asyncio loop."""

    def __init__(
        self, make: Callable[[Settled], asyncio.Protocol], tls: ssl.SSLContext, num_awaited: Callable[[], int]
    ) -> None:
        """``make``: the protocol of one connection, which calls what it is given. ``num_awaited``: how many may come
        now; after it has grown, ``look`` is called."""
        self._make = make
        self._tls = tls
        self._num_awaited = num_awaited
        self._grown = asyncio.Event()
        self._sock: socket.socket | None = None
        self._taking: asyncio.Task[None] | None = None
        self._unproven: dict[socket.socket, asyncio.Task[None]] = {}
        """The oldest first."""

    def open(self, address: str, listener: socket.socket | None = None) -> str:
        """Listen at ``tcp:<interface>:<port>`` (``listener``: bound there already); returns the address with the port
        that it has got. Raises OSError, ValueError."""
        self._sock = listening_socket(address) if listener is None else listener
        self._taking = asyncio.create_task(self._take(self._sock), name="jettison-gate")
        return f"tcp:{parse_address(address)[1]}:{self._sock.getsockname()[1]}"

    def look(self) -> None:
        """One more may come."""
        self._grown.set()

    def close(self) -> None:
        """Take no more, and drop what is unproven. Idempotent."""
        if self._taking is not None:
            self._taking.cancel()
        if self._sock is not None:
            self._sock.close()
        for sock in list(self._unproven):
            self._drop(sock)

    async def _take(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._num_awaited():
                self._grown.clear()
                await self._grown.wait()
            try:
                sock, _ = await loop.sock_accept(listening)
                sock.setblocking(False)
                tend(sock)
            except OSError as error:
                log.error("a connection cannot be taken: %s", error)
                await asyncio.sleep(_NO_DESCRIPTOR_S)
                continue
            if not self._num_awaited():  # meanwhile all have come
                sock.close()
                continue
            while len(self._unproven) >= 2 * self._num_awaited() + _SPARE:
                self._drop(next(iter(self._unproven)))
            self._unproven[sock] = asyncio.create_task(self._shake_hands(sock))
            await asyncio.sleep(_PAUSE_S)

    async def _shake_hands(self, sock: socket.socket) -> None:
        """TLS; the proof inside is the protocol's."""
        connection = self._make(partial(self._unproven.pop, sock, None))
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, sock, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )
        except BaseException as error:
            self._unproven.pop(sock, None)
            sock.close()
            if not isinstance(error, OSError):
                raise
            log.info("a connection is refused: %s", error)

    def _drop(self, sock: socket.socket) -> None:
        """What uses it meets its end."""
        self._unproven.pop(sock, None)
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
