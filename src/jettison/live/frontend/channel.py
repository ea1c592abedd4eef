"""One end of the socket between a front end and the controller: what is said in one turn of the loop leaves as one
frame."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from jettison.live.frontend.wire import CodecError, Frames, FromController, FromFront, encode_frame

logger = logging.getLogger(__name__)

Message = FromFront | FromController


class TurnChannel(asyncio.Protocol):
    """``on_message`` gets every message in order, then ``on_lost`` is called once with the reason."""

    def __init__(
        self, on_message: Callable[[Message], None], on_lost: Callable[[str], None], *, reads_front: bool,
        max_unsent_bytes: int,
    ) -> None:
        """``max_unsent_bytes``: a peer that has left more than this unread is given up, so that it costs no more
        memory; nothing waits for it before that either."""
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = Frames(is_from_front=reads_front)
        self._max_unsent_bytes = max_unsent_bytes
        self._transport: asyncio.Transport | None = None
        self._why_lost = "the other end has closed it"
        self.turn: list[Message] = []
        """What has been said in this turn."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        if self.turn:
            self.flush()

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        try:
            for message in self._frames.feed(data):
                self._on_message(message)
        except CodecError as error:
            self.hang_up(f"it sent what is no frame: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = None
        self._on_lost(self._why_lost if exc is None else str(exc))

    def say(self, message: Message) -> None:
        """Send it with all else of this turn."""
        if not self.turn:
            asyncio.get_running_loop().call_soon(self.flush)
        self.turn.append(message)

    def flush(self) -> None:
        """Send what has been said so far."""
        if self._transport is None or not self.turn:
            return
        turn, self.turn = self.turn, []
        if self._transport.is_closing():
            return
        self._transport.write(encode_frame(turn))  # type: ignore[arg-type]  # an end says what its direction has
        num_unsent = self._transport.get_write_buffer_size()
        if num_unsent > self._max_unsent_bytes:
            self.hang_up(f"{num_unsent} bytes wait for it")

    def hang_up(self, why: str) -> None:
        """Close now; what is not sent is lost."""
        self._why_lost = why
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close behind what has been said."""
        self.flush()
        if self._transport is not None:
            self._transport.close()
