"""The engine as a front end in a process of its own sees it: ``EngineClient`` over a channel to the controller.

Nothing is decided here. The controller accepts or refuses, and its word on a request is the first that its stream
hears. A stream keeps its request and the tokens that came, which is all that a later controller would need to go on
with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from jettison.core.ports import StoredWork
from jettison.errors import JettisonError, NotReadyError, RequestError
from jettison.live.engine.api import EngineInfo, EngineSnapshot, EngineState, PendingEvents, RequestTimings, TokenEvent
from jettison.live.frontend import wire as w
from jettison.live.frontend.channel import FAILED, Message, TurnChannel
from jettison.policy.slo import UNKNOWN_OBJECTIVES, Objectives
from jettison.types import FinishReason, Request, RequestId, SampledToken

LOST = "the server's engine is gone; the request was not completed"

T = TypeVar("T")


class RemoteEvents(PendingEvents):
    """The events of one request; see ``EngineClient.submit``."""

    def __init__(self, engine: RemoteEngine, request: Request) -> None:
        self._engine = engine
        self.request = request
        self.tokens: list[int] = []
        """All that came."""
        self._events: deque[TokenEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_accepted = False
        self._refusal: JettisonError | None = None
        self.is_ended = False
        """Whether its last event has come."""
        self._is_read = False

    # --- from the channel

    def accept(self) -> None:
        """The controller has the request."""
        self._is_accepted = True
        self._wake()

    def refuse(self, error: JettisonError) -> None:
        """It has not."""
        self._refusal, self.is_ended = error, True
        self._wake()

    def put(self, event: TokenEvent) -> None:
        """The next event."""
        self._is_accepted = True
        self.tokens.extend([token.token_id for token in event.tokens])
        if event.finish_reason is not None:
            self.is_ended = True
        self._events.append(event)
        self._wake()

    def put_token(self, token_id: int) -> None:
        """The next event, of one token."""
        self.tokens.append(token_id)
        self._events.append(TokenEvent([SampledToken(token_id)]))
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():  # a reader that was cancelled has left it so
                waiter.set_result(None)

    # --- from the reader

    async def accepted(self) -> None:
        """See ``PendingEvents``."""
        while not self._is_accepted:
            if self._refusal is not None:
                raise self._refusal
            await self._more()

    def __aiter__(self) -> RemoteEvents:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._events:
            if self._refusal is not None:
                raise self._refusal
            if self._is_read:
                raise StopAsyncIteration
            await self._more()
        event = self._events.popleft()
        self._is_read = event.finish_reason is not None
        return event

    async def aclose(self) -> None:
        """Leave: cancels the request if it is not over."""
        if not self.is_ended:
            self._engine.cancel(self.request.request_id)

    def _more(self) -> asyncio.Future[None]:
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


class RemoteEngine:
    """Implements ``EngineClient``. All calls on one asyncio loop."""

    def __init__(self) -> None:
        # What waits for the controller is bounded by the bodies that this front end may hold.
        self.channel = TurnChannel(self, reads_front=False)
        self._status: w.Status | None = None
        self._streams: dict[int, RemoteEvents] = {}
        self._numbers: dict[RequestId, int] = {}
        self._num_streams = 0
        self._said_prompt: tuple[int, Sequence[int]] | None = None
        """The last that was said, and its stream: further choices refer to it."""
        self._asks: dict[int, asyncio.Future[w.Answer]] = {}
        self._num_asks = 0
        self.is_lost = False
        """Whether the controller is gone."""
        self.on_status: Callable[[w.Status], None] | None = None
        """Called when the controller has told its state."""
        self.on_abort: Callable[[RequestId], None] | None = None
        self.on_tell: Callable[[], None] | None = None
        self.on_stop: Callable[[], None] | None = None
        """Called when the controller has told to end, and when it is gone."""

    # --- EngineClient

    @property
    def info(self) -> EngineInfo:
        """See ``EngineClient``. Raises NotReadyError before the controller has told it."""
        if self._status is None or self._status.info is None:
            raise NotReadyError("the model is still loading")
        return self._status.info

    @property
    def state(self) -> EngineState:
        """As the controller told it last, its own draining included; ``failed`` once it is gone."""
        if self.is_lost:
            return "failed"
        return "loading" if self._status is None else self._status.state

    def ready_in_s(self) -> float | None:
        """See ``EngineClient``."""
        return None if self._status is None else self._status.ready_in_s

    def objectives(self) -> Objectives:
        """See ``EngineClient``."""
        return UNKNOWN_OBJECTIVES if self._status is None else Objectives(self._status.ttft_s, self._status.tpot_s)

    def submit(self, request: Request, *, is_further: bool = False) -> RemoteEvents:
        """See ``EngineClient``. What it raises there but for NotReadyError is raised by ``accepted`` of what is
        returned."""
        if self.is_lost:
            raise NotReadyError("the engine is failed")
        try:
            request.cache_salt.encode()
        except UnicodeEncodeError:  # no text for the channel either
            raise RequestError("cache_salt is no valid text", param="cache_salt") from None
        self._num_streams += 1
        number = self._num_streams
        events = self._streams[number] = RemoteEvents(self, request)
        self._numbers[request.request_id] = number
        said = self._said_prompt
        if is_further and said is not None and said[1] is request.prompt_token_ids:
            self.channel.say(w.Submit(number, replace(request, prompt_token_ids=()), is_further, said[0]))
        else:
            self._said_prompt = number, request.prompt_token_ids
            self.channel.say(w.Submit(number, request, is_further))
        return events

    def check_queue(self, tenant: str, num_arriving: int = 0) -> None:
        """Refuses nothing: the controller is asked for each arrival (``arrive``)."""

    def cancel(self, request_id: RequestId) -> None:
        """See ``EngineClient``."""
        if request_id in self._numbers:
            self.channel.say(w.Cancel(request_id))

    def finish_early(self, request_id: RequestId) -> None:
        """See ``EngineClient``."""
        if request_id in self._numbers:
            self.channel.say(w.FinishEarly(request_id))

    def timings(self, request_id: RequestId) -> RequestTimings | None:
        """None: the controller has them, and tells them with the last event."""
        return None

    def note_stored(self, works: Sequence[StoredWork]) -> None:
        """Raises JettisonError: files and batches are the controller's."""
        raise JettisonError("a front end stores no batches")

    def snapshot(self) -> EngineSnapshot:
        """Raises JettisonError: what needs the engine's whole state is answered by the controller."""
        raise JettisonError("a front end does not know the engine's whole state")

    # --- what else is asked of the controller

    def say(self, message: w.FromFront) -> None:
        """Tell the controller."""
        if not self.is_lost:
            self.channel.say(message)

    async def asked(self, make: Callable[[int], w.FromFront]) -> w.Answer:
        """The answer to a message that ``make`` makes of the number of the question. Raises NotReadyError once the
        controller is gone."""
        if self.is_lost:
            raise NotReadyError("The server's engine is gone; retry later.")
        self._num_asks += 1
        ask = self._num_asks
        future = self._asks[ask] = asyncio.get_running_loop().create_future()
        self.channel.say(make(ask))
        try:
            return await future
        finally:
            del self._asks[ask]

    def note(self, topic: str, value: object) -> None:
        """Something for the controller's books."""
        self.say(w.Note(topic, w.packed(value)))

    async def ask(self, topic: str, value: object, kind: type[T]) -> T | None:
        """Something of the controller's books. Raises what the controller refuses it with."""
        answer = await self.asked(lambda ask: w.Ask(ask, topic, w.packed(value)))
        if answer.refusal is not None:
            raise w.error_of(answer.refusal)
        return None if answer.body is None else msgspec.msgpack.decode(answer.body, type=kind)

    @property
    def open_requests(self) -> list[RemoteEvents]:
        """Streams that are not over: their requests, and the tokens that came."""
        return list(self._streams.values())

    # --- the channel

    def on_message(self, message: Message) -> None:
        """See ``Speaker``."""
        match message:
            case w.Tokens(pairs):
                streams, each = self._streams, iter(pairs)
                for number, token_id in zip(each, each, strict=True):
                    events = streams.get(number)
                    if events is not None:
                        events.put_token(token_id)
            case w.Event(number, event):
                if number in self._streams:
                    events = self._streams[number]
                    if event.finish_reason is not None:
                        self._forget(number)
                    events.put(event)
            case w.Accepted(number):
                if number in self._streams:
                    self._streams[number].accept()
            case w.Refused(number, refusal):
                if number in self._streams:
                    events = self._streams[number]
                    self._forget(number)
                    events.refuse(w.error_of(refusal))
            case w.Answer(ask):
                future = self._asks.get(ask)
                if future is not None and not future.done():
                    future.set_result(message)
            case _:
                self._on_order(message)

    def _on_order(self, message: Message) -> None:
        match message:
            case w.Status():
                self._status = message
                _call(self.on_status, message)
            case w.Abort(request_id):
                _call(self.on_abort, request_id)
            case w.Tell():
                _call(self.on_tell)
            case w.Stop():
                _call(self.on_stop)

    def _forget(self, number: int) -> None:
        self._numbers.pop(self._streams.pop(number).request.request_id, None)

    def on_failure(self, message: Message, *, is_own: bool) -> None:
        """See ``Speaker``: what waits for it ends with an error."""
        error = JettisonError(FAILED)
        match message:
            case w.Submit(number):
                if number in self._streams:
                    events = self._streams[number]
                    self._forget(number)
                    events.refuse(error)
            case w.Event(number):
                if number in self._streams:
                    self.cancel(self._streams[number].request.request_id)
                    events = self._streams[number]
                    self._forget(number)
                    events.put(TokenEvent([], FinishReason.ERROR, error=FAILED))
            case w.Arrive(ask) | w.Claim(ask) | w.Ask(ask) | w.Answer(ask):
                future = self._asks.get(ask)
                if future is not None and not future.done():
                    future.set_exception(error)

    def on_lost(self, why: str) -> None:
        """See ``Speaker``."""
        self.is_lost = True
        for number in list(self._streams):
            events = self._streams[number]
            self._forget(number)
            events.put(TokenEvent([], FinishReason.ERROR, error=LOST))
        for future in self._asks.values():
            if not future.done():
                future.set_exception(NotReadyError("The server's engine is gone; retry later."))
        _call(self.on_stop)


def _call(hook: Callable[..., None] | None, *arguments: object) -> None:
    if hook is not None:
        hook(*arguments)
