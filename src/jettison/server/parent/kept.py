"""What the parent of a server keeps for its controllers."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from jettison.live.host.heritage import control_path
from jettison.server.fronts.paths import channel_path, forward_path
from jettison.server.sockets import BACKLOG


def unix_listener(path: str) -> socket.socket:
    """A listening socket in a folder that is its user's alone. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


@dataclass(frozen=True, slots=True)
class Kept:
    """From one controller to the next. Listening sockets stay open between two: what connects meanwhile waits there."""

    folder: Path
    """Of sockets."""
    fronts: socket.socket
    """For front ends."""
    forward: socket.socket
    """For the controller's own application."""
    control: socket.socket
    """For workers."""
    secret: bytes
    """Of the cluster."""
    port: int
    """Of all front ends."""
    orphan_timeout_s: float
    public_key: bytes
    """For the signatures of this process, its parent's (``transport.succession``)."""
    parent_pid: int
    networks_fd: int
    """Of a memory file in which controllers keep what networks between hosts carry. Each inherits it at its fork."""
    credentials_fd: int
    """Of a memory file of keys and certificates that were good last (``server.credentials``), inherited like that."""
    authority_pem: bytes | None = None
    """Of certificates, where workers may be on other hosts."""
    door: socket.socket | None = None
    """Of the fork server, once there is one."""
    far_control: socket.socket | None = None
    """For workers of other hosts, once there is one."""

    @classmethod
    def made(
        cls, folder: Path, port: int, orphan_timeout_s: float, public_key: bytes, authority_pem: bytes | None
    ) -> Kept:
        """In the parent, in an empty folder. Raises OSError."""
        return cls(
            folder, unix_listener(channel_path(str(folder))), unix_listener(forward_path(str(folder))),
            unix_listener(control_path(folder)), secrets.token_bytes(32), port, orphan_timeout_s, public_key,
            os.getpid(), os.memfd_create("jettison-networks"), os.memfd_create("jettison-credentials"), authority_pem)

    def with_door(self, fd: int) -> Kept:
        """With the door behind this descriptor instead of the one before."""
        if self.door is not None:
            self.door.close()
        return replace(self, door=socket.socket(fileno=fd))

    def with_far_control(self, fd: int) -> Kept:
        """With the listening socket behind this descriptor instead of the one before."""
        if self.far_control is not None:
            self.far_control.close()
        return replace(self, far_control=socket.socket(fileno=fd))
