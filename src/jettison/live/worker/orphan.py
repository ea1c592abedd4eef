"""A worker whose controller has ended, until another one takes it over: it keeps its parameters, and nothing else.

    serves --end of file--> ORPHAN: links closed, KV and steps forgotten, the layers of its start mapped
                              |--TakeOver of a higher epoch, signed by the parent--> WorkerReady, with what it has kept
                              |--anything else: hung up on, and tried again
                              '--no controller in time: the fork server ends it (``worker.forked``)
"""

from __future__ import annotations

import logging
import select
import time

from jettison.errors import JettisonError, LinkDownError
from jettison.live.wire import messages as m
from jettison.live.wire.channel import WorkerChannel
from jettison.live.wire.worker_config import WorkerStart
from jettison.transport.tls import Credentials

log = logging.getLogger(__name__)

RETRY_S = 0.05
"""Between two tries. The parent keeps the socket, so a try waits there for the next controller as long as a handshake
may."""
FIRST_WORD_S = 5.0
"""For the controller's first command, which it sends when the connection is proven."""


class Orphan:
    """One worker's."""

    def __init__(self, start: WorkerStart, own: Credentials) -> None:
        self._start = start
        self._own = own
        self.epoch = start.controller_epoch
        """Of the controller that it obeys."""

    def next_controller(self) -> tuple[WorkerChannel, list[m.Command]]:
        """Blocks until one may take over; what it has said behind that comes with its channel."""
        while True:
            channel: WorkerChannel | None = None
            try:
                channel = WorkerChannel.connect(self._start.control_address, self._own)
                first, *others = self._heard(channel)
                self.check(first)
            except (JettisonError, ValueError) as error:
                log.info("not taken over yet: %s", error)
                if channel is not None:
                    channel.close(0.0)
                time.sleep(RETRY_S)
                continue
            return channel, others

    def _heard(self, channel: WorkerChannel) -> list[m.Command]:
        """At least one command. Raises LinkDownError, CodecError."""
        poll, ends_s = select.poll(), time.monotonic() + FIRST_WORD_S
        poll.register(channel.fileno(), select.POLLIN)
        while channel.is_open and (left_s := ends_s - time.monotonic()) > 0:
            poll.poll(1e3 * left_s)
            if commands := channel.receive():
                return commands
        raise LinkDownError("the controller says nothing")

    def check(self, first: m.Command) -> None:
        """Obey the sender of this command from now on. Raises LinkDownError where that may not be."""
        if not isinstance(first, m.TakeOver):
            raise LinkDownError(f"a controller begins with {type(first).__name__}")
        if first.epoch <= self.epoch:
            raise LinkDownError(f"a controller of epoch {first.epoch}, after one of {self.epoch}")
        from jettison.transport.succession import check_signed  # brings cryptography, which few workers ever need

        check_signed(bytes.fromhex(self._start.parent_key_hex), self._start.secret, first.epoch, first.signature)
        self.epoch = first.epoch
