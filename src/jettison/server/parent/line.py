"""A controller's end of the line to its parent."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from jettison.live.host.heritage import Heritage
from jettison.server.parent import orders as o
from jettison.server.parent.kept import Kept

if TYPE_CHECKING:
    from jettison.transport.authority import LentAuthority

logger = logging.getLogger(__name__)


class ParentLine:
    """What a controller has from its parent. Made in the forked process; ``open`` on its loop."""

    def __init__(
        self, sock: socket.socket, kept: Kept, weights: str | None, epoch: int, signature: bytes,
        signing: socket.socket | None = None,
    ) -> None:
        """``kept``: what outlives this process; ``weights``: digest of those that an earlier controller served;
        ``epoch``, ``signature``: this one's; ``signing``: its end of the line to the parent's authority."""
        self._sock = sock
        self.folder = str(kept.folder)
        self.fronts = kept.fronts
        """At which front ends connect."""
        self.forward = kept.forward
        """Where the controller's own application is served."""
        self.port = kept.port
        """Of all front ends."""
        self.credentials_fd = kept.credentials_fd
        """See ``Credentials``."""
        self.weights = weights
        self.heritage = None if not kept.orphan_timeout_s else Heritage(
            folder=kept.folder, control=kept.control, secret=kept.secret, epoch=epoch, signature=signature,
            public_key=kept.public_key, orphan_timeout_s=kept.orphan_timeout_s, parent_pid=kept.parent_pid,
            door=kept.door, keep_door=lambda door: self._say(o.Door(), door.fileno()),
            authority=_authority(kept, signing), far_control=kept.far_control,
            keep_far_control=lambda listener: self._say(o.FarControl(), listener.fileno()),
            networks_fd=kept.networks_fd)
        """For its workers; None where they end with it."""
        self.stop = asyncio.Event()
        self.force = asyncio.Event()
        self.is_told_to_stop = False
        """By the parent: the server ends. Where this controller ends for another reason, the next one goes on."""
        self.is_back = weights is None
        """Whether the streams of controllers before this one are here: until then a stop would end them, not wait."""
        self._most_held_s = 0.0
        self.on_hangup: Callable[[], None] | None = None
        self._has_served = weights is not None
        """This controller, or one before it."""

    @property
    def is_followed(self) -> bool:
        """Whether the parent starts another controller where this one ends now with an error (``rules``)."""
        return self.heritage is not None and self._has_served and not self.is_told_to_stop

    def open(self, most_held_s: float) -> None:
        """Hear the parent from now on. A stop that comes while streams are on their way back is held until ``ready``,
        so many seconds at most."""
        self._most_held_s = most_held_s
        self._sock.setblocking(False)
        asyncio.get_running_loop().add_reader(self._sock, self._on_readable)

    def close(self) -> None:
        """Hear it no more. Idempotent."""
        asyncio.get_running_loop().remove_reader(self._sock)

    def _on_readable(self) -> None:
        try:
            message = o.receive_from_parent(self._sock)
        except BlockingIOError:
            return
        match message:
            case o.Ping():
                self._say(o.Pong())
            case o.Stop():
                self.is_told_to_stop = True
                if self.is_back:
                    self.stop.set()
                else:
                    asyncio.get_running_loop().call_later(self._most_held_s, self.stop.set)
            case o.Force():
                self.is_told_to_stop = True
                self.stop.set()
                self.force.set()
            case o.Hangup():
                if self.on_hangup is not None:
                    self.on_hangup()
            case None:  # it is gone, and the kernel ends this process
                self.close()

    def ready(self, weights: str) -> None:
        """Clients are served, and streams that an earlier controller has left are here."""
        self._has_served = self.is_back = True
        self._say(o.Ready(weights))
        if self.is_told_to_stop:
            self.stop.set()

    def notify(self, *assignments: str) -> None:
        """As ``server.notify``, in the name of the process that the service manager knows."""
        self._say(o.Notify(list(assignments)))

    def start_fronts(self, told: bytes) -> None:
        """Have front ends started that are told this on their standard input."""
        fd = os.memfd_create("jettison-front")
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(told)
            self._say(o.Fronts(), fd)
        finally:
            os.close(fd)

    def end_front(self, front: int, life: int) -> None:
        """Have one ended that is of no use."""
        self._say(o.EndFront(front, life))

    def fronts_end(self) -> None:
        """All are told to end."""
        self._say(o.FrontsEnd())

    def _say(self, message: o.FromController, *fds: int) -> None:
        with suppress(OSError):  # the parent is gone, and this process next
            o.send(self._sock, message, fds)


def _authority(kept: Kept, signing: socket.socket | None) -> LentAuthority | None:
    if signing is None or kept.authority_pem is None:
        return None
    from jettison.server.parent.signing import lent_authority  # brings certificates

    return lent_authority(signing, kept.authority_pem)
