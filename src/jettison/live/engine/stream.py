"""Events of one request on their way from the engine to its client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from jettison.core.requests import RequestState
from jettison.live.engine.api import RequestTimings, TokenEvent
from jettison.types import SampledToken


class Stream:
    """A queue with one reader, the request's client.

    A step wakes up as many clients as it has rows; ``asyncio.Queue``, made for many readers, costs twice as much.
    """

    __slots__ = ("_events", "_waiter", "ended", "sent_prompt_logprobs", "timings")

    def __init__(self, arrival_ns: int) -> None:
        self._events: deque[TokenEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.timings = RequestTimings(arrival_ns)
        self.sent_prompt_logprobs = False
        self.ended = False

    def put(self, event: TokenEvent) -> None:
        """Wakes up the reader."""
        self._events.append(event)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():  # a reader that was cancelled has left it so
                waiter.set_result(None)

    def put_token(self, token: SampledToken, state: RequestState) -> None:
        """Tell one token of a request that goes on."""
        self.put(self.with_prompt(TokenEvent([token]), state))

    def with_prompt(self, event: TokenEvent, state: RequestState) -> TokenEvent:
        """The event, told what is known of the request's prompt; its log-probabilities once, when all are there."""
        event.num_cached_tokens = state.num_cached
        known = state.prompt_logprobs
        if known is not None and len(known) == state.num_prompt and not self.sent_prompt_logprobs:
            event.prompt_logprobs = list(known)
            self.sent_prompt_logprobs = True
        return event

    def take(self) -> TokenEvent | None:
        """The next event, if it has come."""
        return self._events.popleft() if self._events else None

    @property
    def num_unread(self) -> int:
        """Events that have come and were not taken."""
        return len(self._events)

    def more(self) -> asyncio.Future[None]:
        """Done when another event has come; only where ``take`` gave none."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


async def events_of(stream: Stream, cancel: Callable[[], None]) -> AsyncIterator[TokenEvent]:
    """All events as they come. Leaving the iterator before the last one calls ``cancel``."""
    try:
        while True:
            event = stream.take()
            if event is None:
                await stream.more()
                continue
            yield event
            if event.finish_reason is not None:
                return
    finally:
        if not stream.ended:
            cancel()
