"""What outlives a controller on its host: sockets, the cluster's secret, and the fork server with its workers; where
workers are on other hosts, the authority of their certificates, and what networks between hosts carry. The server's
parent keeps it, and each controller has it from there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jettison.transport.sockets import listening_socket, parse_address

if TYPE_CHECKING:
    from jettison.transport.authority import Authority


@dataclass(frozen=True, slots=True)
class Heritage:
    """As one controller has it."""

    folder: Path
    """Of sockets; the parent removes it."""
    control: socket.socket
    """The listening socket of control channels, at ``control_path`` in the folder."""
    secret: bytes
    """Of the cluster."""
    epoch: int
    """Of this controller; the first one's is 1."""
    signature: bytes
    """Of the parent, for this epoch (``transport.succession``)."""
    public_key: bytes
    """To check it with."""
    orphan_timeout_s: float
    """How long workers live without a controller."""
    parent_pid: int
    """With which the fork server ends."""
    door: socket.socket | None
    """Of the fork server that an earlier controller has started."""
    keep_door: Callable[[socket.socket], None]
    """Has the parent keep the door of one that this controller has started."""
    authority: Authority | None = None
    """Where workers may be on other hosts: the parent signs."""
    far_control: socket.socket | None = None
    """The listening socket of control channels from other hosts, which an earlier controller has opened."""
    keep_far_control: Callable[[socket.socket], None] | None = None
    """Has the parent keep the one that this controller has opened."""
    networks_fd: int | None = None
    """Of the memory file in which controllers keep what networks between hosts carry (``engine.known_networks``)."""

    def listener_at(self, address: str) -> socket.socket:
        """For control channels: one that is kept, or a new one that is from now on. Raises OSError, ValueError."""
        scheme, host, _ = parse_address(address)
        if scheme == "unix":
            return self.control
        if self.far_control is not None and self.far_control.getsockname()[0] == host:
            return self.far_control
        opened = listening_socket(address)
        if self.keep_far_control is not None:
            self.keep_far_control(opened)
        return opened


def control_path(folder: Path | str) -> str:
    """Where workers find a controller."""
    return f"{folder}/control"
