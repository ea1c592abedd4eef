"""Tells a supervisor what the server does, by systemd's protocol: ``READY=1``, ``STOPPING=1``, a status in words.

One datagram to the socket that ``NOTIFY_SOCKET`` names. Where no supervisor listens nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket

logger = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"


def notify(*assignments: str) -> None:
    """Send ``NAME=VALUE`` texts. A socket that is gone stops nothing."""
    address = os.environ.get(VARIABLE, "")
    if not address.startswith(("/", "@")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.connect("\0" + address[1:] if address[0] == "@" else address)
            sock.send("\n".join(assignments).encode())
    except OSError as error:
        logger.debug("the supervisor at %s was not told: %s", address, error)
