"""The engine as a front end in a process of its own sees it: ``EngineClient`` over a channel to the controller.

Nothing is decided here. The controller accepts or refuses, and its word on a request is the first that its stream
hears. A stream keeps its request and the tokens that came, which is all that a later controller needs to go on with it.

    HERE --the channel ends--> AWAY --a later controller says that it is ready--> HERE
                                |--a request or a question comes: it waits
                                |--a stream is cancelled or finished: it ends here
                                '--``orphan_timeout_s``: what waits ends with an error, and nothing waits any more

What a controller said last is in the socket when it dies, and is read before the end; a message that it had not
written whole does not count. So the tokens that a stream has are what its client gets, and the later controller is
asked for what follows them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from jettison.core.ports import StoredWork
from jettison.errors import JettisonError, NotReadyError, RequestError
from jettison.live.engine.api import (
    OFTEN_LOST,
    EngineInfo,
    EngineSnapshot,
    EngineState,
    PendingEvents,
    RequestTimings,
    TokenEvent,
)
from jettison.live.frontend import wire as w
from jettison.live.frontend.channel import FAILED, Message, TurnChannel
from jettison.policy.slo import UNKNOWN_OBJECTIVES, Objectives
from jettison.types import FinishReason, Request, RequestId, SampledToken

GONE = "The server's engine is gone; retry later."
LOST = "the server's engine is gone; the request was not completed"
MOST_RETURNS = 3
"""Controllers that may end under a request: as many as deaths of workers in its steps end it
(``core.requests.Suspicion``)."""

T = TypeVar("T")


class RemoteEvents(PendingEvents):
    """The events of one request; see ``EngineClient.submit``."""

    def __init__(self, engine: RemoteEngine, request: Request, *, is_further: bool = False) -> None:
        self._engine = engine
        self.request = request
        self.is_further = is_further
        self.tokens: list[int] = []
        """All that came."""
        self.first_ns: int | None = None
        """When the first of them did."""
        self.ending: FinishReason | None = None
        """How it is to end by this front end's word, which the controller has not answered."""
        self.num_returns = 0
        """Controllers that it has been handed to beside the first."""
        self._events: deque[TokenEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.is_accepted = False
        """Whether a controller has accepted it: its client may have heard so."""
        self._refusal: JettisonError | None = None
        self.is_ended = False
        """Whether its last event has come."""
        self._is_read = False

    # --- from the channel

    def accept(self) -> None:
        """The controller has the request."""
        self.is_accepted = True
        self._wake()

    def refuse(self, error: JettisonError) -> None:
        """It has not."""
        if self.is_accepted:  # by an earlier one
            self.put(TokenEvent([], FinishReason.ERROR, error=str(error)))
            return
        self._refusal, self.is_ended = error, True
        self._wake()

    def put(self, event: TokenEvent) -> None:
        """The next event."""
        self.is_accepted = True
        if event.tokens and self.first_ns is None:
            self.first_ns = time.monotonic_ns()
        self.tokens.extend([token.token_id for token in event.tokens])
        if event.finish_reason is not None:
            self.is_ended = True
            if self.num_returns and event.timings is not None:  # what the last controller knows of the beginning
                event.timings = replace(event.timings, first_scheduled_ns=None, first_token_ns=self.first_ns)
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

    def to_go_on(self) -> Request:
        """What a later controller is asked for."""
        if not self.tokens:
            return self.request
        params = replace(self.request.params, prompt_logprobs=None)  # they came with the first token
        return replace(self.request, params=params, resumed=tuple(self.tokens))

    @property
    def num_unread(self) -> int:
        """Events that have come and were not read."""
        return len(self._events)

    # --- from the reader

    async def accepted(self) -> None:
        """See ``PendingEvents``."""
        while not self.is_accepted:
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

    def __init__(self, orphan_timeout_s: float = 0.0) -> None:
        """``orphan_timeout_s``: how long streams wait for the next controller; 0: they end with theirs."""
        # What waits for the controller is bounded by the bodies that this front end may hold.
        self.channel = TurnChannel(self, reads_front=False)
        self._orphan_timeout_s = orphan_timeout_s
        self.is_away = False
        """Whether the controller is gone and the next one is not ready."""
        self._is_connected = True
        self._patience: asyncio.TimerHandle | None = None
        """While the next controller is waited for."""
        self._status: w.Status | None = None
        self._streams: dict[int, RemoteEvents] = {}
        self._numbers: dict[RequestId, int] = {}
        self._num_streams = 0
        self._said_prompt: tuple[int, Sequence[int]] | None = None
        """The last that was said, and its stream: further choices refer to it."""
        self._asks: dict[int, tuple[w.FromFront, asyncio.Future[w.Answer]]] = {}
        """Questions without an answer."""
        self._num_asks = 0
        self._places: dict[int, tuple[str, int]] = {}
        """Requests that have been let in: tenant and number of choices of each."""
        self.is_lost = False
        """Whether the controller is gone and none will come."""
        self.on_status: Callable[[w.Status], None] | None = None
        """Called when the controller has told its state."""
        self.on_abort: Callable[[RequestId], None] | None = None
        self.on_tell: Callable[[], None] | None = None
        self.on_stop: Callable[[], None] | None = None
        """Called when the controller has told to end, and when none will come."""
        self.on_parted: Callable[[], None] | None = None
        """Called when a channel has ended and the next is to be opened (``reopened``)."""
        self.on_back: Callable[[], None] | None = None
        """Called when a later controller has all requests of this front end."""

    # --- EngineClient

    @property
    def info(self) -> EngineInfo:
        """See ``EngineClient``. Raises NotReadyError before the controller has told it."""
        if self._status is None or self._status.info is None:
            raise NotReadyError("the model is still loading")
        return self._status.info

    @property
    def state(self) -> EngineState:
        """As the controller told it last, its own draining included; ``loading`` while the next one is awaited,
        ``failed`` where none comes."""
        if self.is_lost:
            return "failed"
        return "loading" if self._status is None or self.is_away else self._status.state

    def ready_in_s(self) -> float | None:
        """See ``EngineClient``."""
        return None if self._status is None else self._status.ready_in_s

    def objectives(self) -> Objectives:
        """See ``EngineClient``."""
        return UNKNOWN_OBJECTIVES if self._status is None else Objectives(self._status.ttft_s, self._status.tpot_s)

    def submit(self, request: Request, *, is_further: bool = False) -> RemoteEvents:
        """See ``EngineClient``. What it raises there but for NotReadyError is raised by ``accepted`` of what is
        returned: NotReadyError too, where the request has waited in vain for the next controller."""
        self._refuse_if_given_up()
        try:
            request.cache_salt.encode()
        except UnicodeEncodeError:  # no text for the channel either
            raise RequestError("cache_salt is no valid text", param="cache_salt") from None
        self._num_streams += 1
        number = self._num_streams
        events = self._streams[number] = RemoteEvents(self, request, is_further=is_further)
        self._numbers[request.request_id] = number
        if self.is_away:  # it goes with all others (``_come_back``), to the first controller that it has
            events.num_returns = -1
            return events
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
        if request_id in self._numbers and not self._ends_here(request_id, FinishReason.CANCELLED):
            self.channel.say(w.Cancel(request_id))

    def finish_early(self, request_id: RequestId) -> None:
        """See ``EngineClient``."""
        if request_id in self._numbers and not self._ends_here(request_id, FinishReason.STOP):
            self.channel.say(w.FinishEarly(request_id))

    def _ends_here(self, request_id: RequestId, ending: FinishReason) -> bool:
        """Note how a request ends; whether there is no controller that ends it, so that it has ended."""
        number = self._numbers[request_id]
        events = self._streams[number]
        events.ending = ending
        if self.is_away:
            self._end(number, TokenEvent([], ending))
        return self.is_away

    def num_unread(self, request_id: RequestId) -> int:
        """See ``EngineClient``."""
        number = self._numbers.get(request_id)
        return 0 if number is None else self._streams[number].num_unread

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
        """Tell the controller; nothing where there is none."""
        if isinstance(message, w.Leave):
            self._places.pop(message.number, None)
        if self._is_connected:
            self.channel.say(message)

    async def asked(self, make: Callable[[int], w.FromFront]) -> w.Answer:
        """The answer to a message that ``make`` makes of the number of the question; that of the next controller where
        this one has ended. Raises NotReadyError where none comes."""
        self._refuse_if_given_up()
        self._num_asks += 1
        ask, message = self._num_asks, make(self._num_asks)
        future: asyncio.Future[w.Answer] = asyncio.get_running_loop().create_future()
        self._asks[ask] = message, future
        if not self.is_away:
            self.channel.say(message)
        try:
            answer = await future
        finally:
            del self._asks[ask]
        self._note_place(message, answer)
        return answer

    @property
    def awaits_next(self) -> bool:
        """Whether what comes now waits for the next controller."""
        return self._patience is not None

    @property
    def num_asked(self) -> int:
        """Questions without an answer."""
        return len(self._asks)

    def _refuse_if_given_up(self) -> None:
        """Raises NotReadyError where there is no controller, and the next one is late or will not come."""
        if self.is_lost or (self.is_away and not self.awaits_next):
            raise NotReadyError(GONE)

    def _note_place(self, message: w.FromFront, answer: w.Answer) -> None:
        if answer.refusal is not None and not answer.is_full:
            return
        if isinstance(message, w.Arrive):
            self._places[message.number] = message.tenant, 1
        elif isinstance(message, w.Claim) and message.number in self._places:
            self._places[message.number] = self._places[message.number][0], message.num_choices

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
                _, future = self._asks.get(ask, (None, None))
                if future is not None and not future.done():
                    future.set_result(message)
            case _:
                self._on_order(message)

    def _on_order(self, message: Message) -> None:
        match message:
            case w.Status():
                self._status = message
                _call(self.on_status, message)
                if self.is_away and message.state == "ready":
                    self._come_back()
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
                _, future = self._asks.get(ask, (None, None))
                if future is not None and not future.done():
                    future.set_exception(error)
            case w.Resubmit(number):
                if number in self._streams:
                    self._end(number, TokenEvent([], FinishReason.ERROR, error=FAILED))

    # --- from one controller to the next

    def on_lost(self, why: str) -> None:
        """See ``Speaker``."""
        self._is_connected = False
        if self.is_lost or not self._orphan_timeout_s:
            self.give_up()
            return
        if not self.is_away:
            self.is_away = True
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(self._orphan_timeout_s, self._end_all)
            for number, events in list(self._streams.items()):
                if events.ending is not None:
                    self._end(number, TokenEvent([], events.ending))
        _call(self.on_parted)

    def reopened(self) -> TurnChannel:
        """The channel to the next controller, to be connected."""
        self.channel, self._is_connected = TurnChannel(self, reads_front=False), True
        return self.channel

    def give_up(self) -> None:
        """No controller will come."""
        self.is_lost = True
        self._end_all()
        _call(self.on_stop)

    def _come_back(self) -> None:
        """Hand everything that is open to the controller that is ready now: places, streams, questions."""
        self.is_away, self._said_prompt = False, None
        self._end_patience()
        for number, (tenant, num_choices) in self._places.items():
            self.channel.say(w.Return(number, tenant, num_choices))
        for number, events in list(self._streams.items()):
            events.num_returns += 1
            num_tokens = len(events.tokens)
            if num_tokens and num_tokens >= events.request.params.max_tokens:
                self._end(number, TokenEvent([], FinishReason.LENGTH))
            elif events.num_returns > MOST_RETURNS:
                self._end(number, TokenEvent([], FinishReason.ERROR, error=OFTEN_LOST))
            elif events.is_accepted:
                self.channel.say(w.Resubmit(number, events.to_go_on()))
            else:
                self.channel.say(w.Submit(number, events.request, events.is_further))
        for message, _ in self._asks.values():
            self.channel.say(message)
        _call(self.on_back)

    def _end(self, number: int, event: TokenEvent) -> None:
        events = self._streams[number]
        self._forget(number)
        events.put(event)

    def _end_all(self) -> None:
        """Nothing that is open goes on."""
        self._end_patience()
        for number, events in list(self._streams.items()):
            if events.is_accepted:
                self._end(number, TokenEvent([], FinishReason.ERROR, error=LOST))
            else:
                self._forget(number)
                events.refuse(NotReadyError(GONE))
        for _, future in self._asks.values():
            if not future.done():
                future.set_exception(NotReadyError(GONE))

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def _call(hook: Callable[..., None] | None, *arguments: object) -> None:
    if hook is not None:
        hook(*arguments)
