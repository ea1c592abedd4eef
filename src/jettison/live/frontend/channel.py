"""One end of the socket between a front end and the controller: what is said in one turn of the loop leaves together.

A message that cannot be acted on, or has no bytes, is its request's trouble alone (``Speaker``)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, cast

from jettison.live.frontend.wire import CodecError, Frames, FromController, FromFront, encode_frames

logger = logging.getLogger(__name__)

Message = FromFront | FromController
FAILED = "the server failed at this request"
"""Told to a client whose message could not be acted on."""


class Speaker(Protocol):
    """What is behind one end."""

    def on_message(self, message: Message) -> None:
        """The next one that has come."""
        ...

    def on_failure(self, message: Message, *, is_own: bool) -> None:
        """Acting on this message has failed (or, ``is_own``, writing it): whatever waits for it is to be told so."""
        ...

    def on_lost(self, why: str) -> None:
        """The channel is closed; called once, the last."""
        ...


class TurnChannel(asyncio.Protocol):
    """Gives a ``Speaker`` all messages in order."""

    def __init__(
        self, speaker: Speaker, *, reads_front: bool, max_unread_bytes: int | None = None,
        on_unread: Callable[[], None] | None = None,
    ) -> None:
        """``on_unread`` is called when the peer has read nothing since more than ``max_unread_bytes`` were sent, and
        again with each eighth of it. One turn does not count before the next, so that a peer may be sent anything."""
        self._speaker = speaker
        self._frames = Frames(is_from_front=reads_front)
        self._max_unread_bytes = max_unread_bytes
        self._on_unread = on_unread
        self._num_waiting = 0
        """Bytes that the socket had not taken when it was last looked at."""
        self._num_unread = 0
        """Bytes said since it last took some."""
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
                try:
                    self._speaker.on_message(message)
                except Exception:
                    logger.exception("a %s could not be acted on", type(message).__name__)
                    self._failed(message, is_own=False)
        except CodecError as error:
            self.hang_up(f"it sent what is no frame: {error}")

    def _failed(self, message: Message, *, is_own: bool) -> None:
        try:
            self._speaker.on_failure(message, is_own=is_own)
        except Exception:
            logger.exception("the failure of a %s could not be told", type(message).__name__)

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = None
        self._speaker.on_lost(self._why_lost if exc is None else str(exc))

    def say(self, message: Message) -> None:
        """Send it with all else of this turn."""
        if not self.turn:
            asyncio.get_running_loop().call_soon(self.flush)
        self.turn.append(message)

    def flush(self) -> None:
        """Send what has been said so far."""
        transport = self._transport
        if transport is None or not self.turn:
            return
        turn, self.turn = self.turn, []
        if transport.is_closing():
            return
        frames = self._encoded(turn)
        num_waiting = transport.get_write_buffer_size()
        if num_waiting < self._num_waiting or not num_waiting:
            self._num_unread = 0
        elif self._max_unread_bytes is not None and self._num_unread > self._max_unread_bytes:
            self._num_unread -= self._max_unread_bytes // 8
            if self._on_unread is not None:
                self._on_unread()
        for frame in frames:
            transport.write(frame)
            self._num_unread += len(frame)
        self._num_waiting = transport.get_write_buffer_size()

    def _encoded(self, turn: list[Message]) -> list[bytes]:
        try:
            return encode_frames(turn)  # type: ignore[arg-type]  # an end says what its direction has
        except Exception:  # one of them; the others are sent
            logger.debug("a turn could not be written as a whole", exc_info=True)
            frames = []
            for message in turn:
                try:
                    frames += encode_frames([message])  # type: ignore[arg-type]
                except Exception:
                    logger.exception("a %s could not be written", type(message).__name__)
                    self._failed(message, is_own=True)
            return frames

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
