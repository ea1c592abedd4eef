"""A server's connections between two requests. They cost a descriptor and save their clients a handshake, so they stay
as long as there is room, and give way to requests of clients without a place."""

from __future__ import annotations

import array
import fcntl
import termios
from itertools import islice
from typing import Any, Protocol

MOST_LEAVING = 16
"""Connections that may be on their way out at one time: each has its descriptor yet."""
MOST_LOOKED_AT = 8
"""Connections that are looked at for one that may go."""


class Connection(Protocol):
    """What is asked of one."""

    transport: Any

    def end_idle(self) -> None:
        """Close the connection, and cut it off where its client does not take part in that."""


class IdleConnections:
    """The connections of one server that have no request, in the order in which they came to have none."""

    def __init__(self) -> None:
        self._idle: dict[Connection, None] = {}
        self._leaving: set[Connection] = set()

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._idle

    @property
    def num_leaving(self) -> int:
        """How many have given way and are still open."""
        return len(self._leaving)

    def add(self, connection: Connection) -> None:
        """It has no request from now on."""
        self._idle[connection] = None

    def discard(self, connection: Connection) -> None:
        """It has a request, or is being closed; nothing where it was not idle."""
        self._idle.pop(connection, None)

    def lost(self, connection: Connection) -> None:
        """It is closed."""
        self.discard(connection)
        self._leaving.discard(connection)

    def give_way(self) -> bool:
        """End one of those that have been idle longest, in favour of a client without a place. Returns False where none
        may end now."""
        if len(self._leaving) >= MOST_LEAVING:
            return False
        found = next(filter(_may_end, islice(self._idle, MOST_LOOKED_AT)), None)
        if found is None:
            return False
        self.discard(found)
        self._leaving.add(found)
        found.end_idle()
        return True


def _may_end(connection: Connection) -> bool:
    """Whether nothing would be lost with it: no rest of an answer, and no request that has come and was not read."""
    transport = connection.transport
    return not (transport.is_closing() or transport.get_write_buffer_size() or _num_unread(transport))


def _num_unread(transport: Any) -> int:
    """Bytes that the kernel has for a connection."""
    number = array.array("i", [0])
    fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, number)
    return number[0]
