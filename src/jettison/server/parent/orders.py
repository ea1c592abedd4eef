"""What the parent and a controller tell each other: a packet each, on a pair of sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import msgspec

MOST_BYTES = 1 << 16


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Requests are served from now on."""

    weights: str
    """Digest of the weights: a later controller serves these, or none."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer to ``Ping``."""


class Fronts(msgspec.Struct, frozen=True, tag="fronts"):
    """What front ends are told lies in the memory file beside: they can be started."""


class Door(msgspec.Struct, frozen=True, tag="door"):
    """Beside is the door of the fork server: a later controller finds its workers there."""


class FarControl(msgspec.Struct, frozen=True, tag="far-control"):
    """Beside is the socket at which workers of other hosts find a controller."""


class EndFront(msgspec.Struct, frozen=True, tag="end-front"):
    """This life of a front end is of no use."""

    front: int
    life: int


class FrontsEnd(msgspec.Struct, frozen=True, tag="fronts-end"):
    """All front ends are told to end: none is started any more."""


class Notify(msgspec.Struct, frozen=True, tag="notify"):
    """For the service manager, which listens to the parent."""

    assignments: list[str]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Let requests end, and end."""


class Force(msgspec.Struct, frozen=True, tag="force"):
    """End now."""


class Hangup(msgspec.Struct, frozen=True, tag="hangup"):
    """Read again what can be read again."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Are you there?"""


FromController = Ready | Pong | Fronts | Door | FarControl | EndFront | FrontsEnd | Notify
FromParent = Stop | Force | Hangup | Ping


def send(sock: socket.socket, message: FromController | FromParent, fds: Sequence[int] = ()) -> None:
    """Send one packet. Raises OSError."""
    socket.send_fds(sock, [msgspec.json.encode(message)], fds)


def receive_from_controller(sock: socket.socket) -> tuple[FromController | None, list[int]]:
    """The next packet and its descriptors; None at the end. Raises BlockingIOError where there is none yet."""
    data, fds, _, _ = socket.recv_fds(sock, MOST_BYTES, 1)
    for fd in fds:
        os.set_inheritable(fd, False)
    return (msgspec.json.decode(data, type=FromController) if data else None), list(fds)


def receive_from_parent(sock: socket.socket) -> FromParent | None:
    """As above."""
    data = sock.recv(MOST_BYTES)
    return msgspec.json.decode(data, type=FromParent) if data else None
