"""Events of requests on their way from the engine to their clients."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from jettison.core import ports
from jettison.core.requests import RequestState
from jettison.errors import JettisonError
from jettison.live.engine.api import RequestTimings, TokenEvent
from jettison.types import FinishReason, RequestId, SampledToken

logger = logging.getLogger(__name__)


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


class OpenStreams:
    """The streams of requests that have not ended, and what the core emits on its way into them."""

    def __init__(self, on_bug: Callable[[], None]) -> None:
        """``on_bug``: called where a token could not be told; no stream may go on without one of its tokens."""
        self._on_bug = on_bug
        self._streams: dict[RequestId, Stream] = {}
        self._untold: list[ports.EmitTokens] = []
        """Tokens that the next turn of the loop tells."""
        self.none = asyncio.Event()
        """Set while no stream is open."""
        self.none.set()

    @property
    def ids(self) -> Iterable[RequestId]:
        """Requests with an open stream."""
        return self._streams.keys()

    def open(self, request_id: RequestId, stream: Stream) -> None:
        """From here on until the request's end. Raises JettisonError where the id is in use."""
        if request_id in self._streams:
            raise JettisonError(f"request id {request_id} is in use")
        self._streams[request_id] = stream
        self.none.clear()

    def num_unread(self, request_id: RequestId) -> int:
        """Events that the request's client has not taken; 0 where it has no stream."""
        stream = self._streams.get(request_id)
        return 0 if stream is None else stream.num_unread

    def on_emit(self, emit: ports.EmitTokens | ports.Emit) -> None:
        """Tokens of requests that go on are told when all workers that have answered meanwhile have their next steps;
        an end tells them first."""
        if isinstance(emit, ports.Emit):
            self._tell()
            self._end(emit)
            return
        if not self._untold:
            asyncio.get_running_loop().call_soon(self._tell)
        self._untold.append(emit)

    def fail(self, request_id: RequestId, message: str) -> None:
        """End the request's stream with an error."""
        self.on_emit(ports.Emit(request_id, (), FinishReason.ERROR, None, message))

    def fail_all(self, message: str) -> None:
        """End every open stream with an error."""
        for request_id in list(self._streams):
            self.fail(request_id, message)

    def _tell(self) -> None:
        untold, self._untold = self._untold, []
        try:
            for emit in untold:
                for state, token in zip(emit.states, emit.tokens, strict=True):
                    if (stream := self._streams.get(state.request_id)) is not None:
                        stream.put_token(token, state)
        except Exception:
            logger.exception("tokens could not be told")
            self._on_bug()

    def _end(self, emit: ports.Emit) -> None:
        stream = self._streams.get(emit.request_id)
        if stream is None:
            return
        state = emit.state
        event = TokenEvent(list(emit.tokens), emit.finish_reason, emit.stop_token_id, emit.error)
        if state is not None:
            stream.with_prompt(event, state)
        if emit.finish_reason is not None:
            stream.ended = True
            del self._streams[emit.request_id]
            if not self._streams:
                self.none.set()
            event.timings = stream.timings if state is None else stream.timings.note(state)
        stream.put(event)
