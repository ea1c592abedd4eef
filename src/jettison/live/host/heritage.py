"""What outlives a controller on its host: sockets, the cluster's secret, and the fork server with its workers. The
server's parent keeps it, and each controller has it from there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


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


def control_path(folder: Path | str) -> str:
    """Where workers find a controller."""
    return f"{folder}/control"
