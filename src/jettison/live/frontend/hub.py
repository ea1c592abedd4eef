"""The controller's end of all front ends: their requests go to the one engine, and all that happens in one turn of the
loop goes back to each together.

A front end that is gone takes its requests along, and nothing else. What belongs to no stream (places of keys, books,
metrics) is kept behind ``Desk``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import msgspec

from jettison.core.requests import RequestState
from jettison.errors import JettisonError, NotReadyError
from jettison.live.engine.api import EngineClient, EngineInfo, EngineState, TokenEvent
from jettison.live.engine.stream import Stream
from jettison.live.frontend import wire as w
from jettison.live.frontend.channel import FAILED, Message, TurnChannel
from jettison.live.wire.kept_sockets import serve_kept
from jettison.types import FinishReason, Request, RequestId, SampledToken

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 64 << 20
"""To one front end since it last read. A token takes some 10 bytes here: as many as a thousand streams have in half a
minute and more, after which a front end that says nothing is given up. What passes it are log-probabilities: the
request with the most is ended then."""
TOKEN_BYTES, LOGPROB_BYTES = 10, 16
"""Of one on its way, about."""
STATUS_S = 0.05
"""Between two looks at the engine's state."""
SLOW_LOOKS = 20
"""Looks after which the time that loading goes on is told again, and front ends are asked for their counts."""
MOST_UNANSWERED = 30
"""Questions for its counts, one a second, after which a front end that has said nothing is given up: its loop stands
still. The longest work on its loop takes a tenth of that; its start, before its first word, is not counted."""

COUNTS = "counts"
"""Topic of the note that answers ``Tell``."""

FrontId = int


class StreamEngine(EngineClient, Protocol):
    """An engine that writes a request's events into a stream of the caller's, without a task to read them."""

    def submit_to(self, request: Request, stream: Stream, *, is_further: bool = False) -> None:
        """As ``submit``."""
        ...


class Desk(Protocol):
    """What the controller keeps for front ends beside their streams."""

    def state(self) -> EngineState:
        """The server's: draining from the first signal on."""
        ...

    def key_digests(self) -> tuple[bytes, ...]:
        """Of the keys that open the API."""
        ...

    def arrive(self, front: FrontId, number: int, tenant: str) -> w.Answer:
        """An HTTP request for tokens has come."""
        ...

    def came(self, front: FrontId, number: int) -> None:
        """Its body has come, too."""
        ...

    def claim(self, front: FrontId, number: int, num_choices: int, param: str) -> None:
        """It has so many choices. Raises JettisonError."""
        ...

    def landed(self, front: FrontId, number: int, *, is_accepted: bool) -> None:
        """It is submitted."""
        ...

    def leave(self, front: FrontId, number: int) -> None:
        """It is over."""
        ...

    def note(self, front: FrontId, topic: str, body: bytes) -> None:
        """Something for the books."""
        ...

    def ask(self, front: FrontId, topic: str, body: bytes) -> bytes | None:
        """Something of the books. Raises JettisonError."""
        ...

    def serves(self, front: FrontId) -> None:
        """It takes connections from now on."""
        ...

    def back(self, front: FrontId, number: int, tenant: str, num_choices: int) -> None:
        """A request that an earlier controller let in has its places again."""
        ...

    def gone(self, front: FrontId) -> None:
        """A front end is gone, and its requests end next."""
        ...


class HubStream(Stream):
    """Events of one request on their way to a front end."""

    __slots__ = ("first_ns", "front", "has_begun", "num_cached", "num_logprobs", "num_output", "number", "was_failed")

    def __init__(self, front: Front, number: int, arrival_ns: int, num_told: int = 0) -> None:
        """``num_told``: tokens that came of it before this controller."""
        super().__init__(arrival_ns)
        self.front = front
        self.number = number
        self.has_begun = num_told > 0
        """Whether an event has told what only the first one tells."""
        self.num_output = num_told
        self.num_logprobs = 0
        self.num_cached = 0
        self.was_failed = False
        """Whether it has ended here, with an error; the engine's word on it comes too late."""
        self.first_ns: int | None = None
        """When its first token came here."""

    def put_token(self, token: SampledToken, state: RequestState) -> None:
        """See ``Stream``. Nearly always the token is all that there is to tell, and needs no event on its way."""
        if not self.has_begun or self.was_failed or token.logprobs is not None or state.prompt_logprobs is not None:
            super().put_token(token, state)
            return
        self.num_output += 1
        self._say_token(token.token_id)

    def _say_token(self, token_id: int) -> None:
        channel = self.front.channel
        if channel.turn and isinstance(last := channel.turn[-1], w.Tokens):
            last.pairs.extend((self.number, token_id))
        else:
            channel.say(w.Tokens([self.number, token_id]))

    def put(self, event: TokenEvent) -> None:
        """Send it with all else of this turn."""
        tokens = event.tokens
        self.num_output += len(tokens)
        if (
            self.has_begun and event.finish_reason is None and len(tokens) == 1 and tokens[0].logprobs is None
            and event.prompt_logprobs is None and event.error is None
        ):
            self._say_token(tokens[0].token_id)
            return
        if self.was_failed:  # the engine hears of it later
            return
        self.num_logprobs += sum(len(token.logprobs.top) for token in tokens if token.logprobs is not None)
        self.num_logprobs += sum(len(entry.top) for entry in event.prompt_logprobs or () if entry is not None)
        if tokens and not self.has_begun:
            self.has_begun, self.first_ns, self.num_cached = True, time.monotonic_ns(), event.num_cached_tokens
        if event.finish_reason is not None:
            self.ended = True
            self.front.streams_over(self)
        self.front.channel.say(w.Event(self.number, event))

    def fail(self, why: str) -> None:
        """Have it end with an error."""
        self.put(TokenEvent([], FinishReason.ERROR, error=why))
        self.was_failed = True

    @property
    def num_bytes(self) -> int:
        """That it took on the way so far, about."""
        return TOKEN_BYTES * self.num_output + LOGPROB_BYTES * self.num_logprobs


class Front:
    """One life of one front end."""

    def __init__(self, hub: Hub, front_id: FrontId = -1, life: int = 0) -> None:
        """One without a number has not said yet which it is."""
        self.id = front_id
        self.life = life
        self._hub = hub
        self.channel = TurnChannel(
            self, reads_front=True, max_unread_bytes=MAX_UNREAD_BYTES, on_unread=lambda: hub.on_unread(self))
        self.streams: dict[RequestId, HubStream] = {}
        self.ids: dict[int, RequestId] = {}
        self.told: w.Status | None = None
        self.counted: asyncio.Event = asyncio.Event()
        """Set when it has told its counts."""
        self.num_unanswered: int | None = None
        """Times that it was asked for them since; None before its first word."""
        self.refusal: w.Refusal | None = None
        """Of the last request that was the first of its answer."""
        self.prompt: tuple[int, tuple[int, ...]] | None = None
        """The last that came, and its stream."""
        self.gone = asyncio.Event()
        """Set when its requests have ended with it."""

    def on_message(self, message: Message) -> None:
        """See ``Speaker``."""
        self._hub.on_message(self, message)

    def on_failure(self, message: Message, *, is_own: bool) -> None:
        """See ``Speaker``."""
        self._hub.on_failure(self, message)

    def on_lost(self, why: str) -> None:
        """See ``Speaker``."""
        self._hub.on_lost(self, why)

    def streams_over(self, stream: HubStream) -> None:
        """A stream has had its last event."""
        self.streams.pop(self.ids.pop(stream.number, ""), None)


class Hub:
    """All front ends of one controller. All calls on one asyncio loop."""

    def __init__(self, engine: StreamEngine, desk: Desk, on_lost: Callable[[Front, str], None]) -> None:
        """``on_lost`` is called when a front end is gone, its requests cancelled."""
        self._engine = engine
        self._desk = desk
        self._on_lost = on_lost
        self.fronts: dict[FrontId, Front] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._is_closing = False

    async def add(self, front_id: FrontId, sock: socket.socket) -> Front:
        """Serve a front end at the other end of this socket; it takes the place of an earlier life that is gone."""
        front = Front(self, front_id)
        await asyncio.get_running_loop().create_connection(lambda: front.channel, sock=sock)
        self._enter(front)
        return front

    async def listen(self, listener: socket.socket) -> asyncio.AbstractServer:
        """Take front ends that connect here; the first word of each is which it is."""
        return await serve_kept(lambda: Front(self).channel, listener)

    def _enter(self, front: Front) -> None:
        if (earlier := self.fronts.get(front.id)) is not None:
            self.drop(earlier, "a later life of it is here")
        self.fronts[front.id] = front
        self._tell(front)
        if self._is_closing:
            front.channel.say(w.Stop())
        elif self._ticker is None:
            self._ticker = asyncio.create_task(self._tick(), name="jettison-front-ends")

    async def close(self) -> None:
        """Tell all front ends to end."""
        self._is_closing = True
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        for front in self.fronts.values():
            front.channel.say(w.Stop())
            front.channel.flush()

    def stream(self, request_id: RequestId) -> HubStream | None:
        """A request's stream while it runs."""
        for front in self.fronts.values():
            if request_id in front.streams:
                return front.streams[request_id]
        return None

    def say(self, front_id: FrontId, message: w.FromController) -> None:
        """To one that lives; else nothing."""
        if front_id in self.fronts:
            self.fronts[front_id].channel.say(message)

    async def ask_counts(self, timeout_s: float) -> None:
        """Have all front ends tell their counts; returns when they have, or after this time."""
        fronts = list(self.fronts.values())
        for front in fronts:
            front.counted.clear()
            front.channel.say(w.Tell())
        waits = [asyncio.ensure_future(front.counted.wait()) for front in fronts]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for wait in late:
                wait.cancel()

    def drop(self, front: Front, why: str) -> None:
        """A front end is gone, whatever its socket still has. Idempotent: a later life of its number has none of it."""
        front.channel.hang_up(why)
        self.on_lost(front, why)

    # --- status

    async def _tick(self) -> None:
        num_looks = 0
        while True:
            await asyncio.sleep(STATUS_S)
            num_looks += 1
            is_slow_look = num_looks % SLOW_LOOKS == 0
            for front in list(self.fronts.values()):
                self._tell(front, with_time=is_slow_look)
                if is_slow_look:
                    self._ask(front)

    def _ask(self, front: Front) -> None:
        if front.num_unanswered is None:
            return
        if front.num_unanswered >= MOST_UNANSWERED:
            front.channel.hang_up(f"it has said nothing for {MOST_UNANSWERED} s")
            return
        front.num_unanswered += 1
        front.channel.say(w.Tell())

    def tell_all(self) -> None:
        """The state now, where it has changed."""
        for front in self.fronts.values():
            self._tell(front)

    def _tell(self, front: Front, *, with_time: bool = True) -> None:
        engine, objectives = self._engine, self._engine.objectives()
        info: EngineInfo | None = None
        with contextlib.suppress(NotReadyError):
            info = engine.info
        left_s = engine.ready_in_s() if with_time or front.told is None else front.told.ready_in_s
        status = w.Status(
            self._desk.state(), left_s, info, objectives.ttft_s, objectives.tpot_s, self._desk.key_digests())
        if status != front.told:
            front.told = status
            front.channel.say(status)

    # --- from front ends

    def on_message(self, front: Front, message: Message) -> None:
        """Act on what a front end says."""
        if front.gone.is_set():
            return
        if front.id < 0:
            if not isinstance(message, w.Hello) or message.front < 0:
                front.channel.hang_up("it did not say which it is")
                return
            front.id, front.life = message.front, message.life
            self._enter(front)
            return
        desk = self._desk
        if front.num_unanswered is None:
            front.num_unanswered = 0
        match message:
            case w.Submit():
                self._submit(front, message)
            case w.Cancel(request_id):
                if request_id in front.streams:
                    self._engine.cancel(request_id)
            case w.FinishEarly(request_id):
                if request_id in front.streams:
                    self._engine.finish_early(request_id)
            case w.Arrive(number, tenant):
                front.channel.say(desk.arrive(front.id, number, tenant))
            case w.Came(number):
                desk.came(front.id, number)
            case w.Landed(number, is_accepted):
                desk.landed(front.id, number, is_accepted=is_accepted)
            case w.Leave(number):
                desk.leave(front.id, number)
            case w.Note(topic, body):
                desk.note(front.id, topic, bytes(body))
                if topic == COUNTS:
                    front.num_unanswered = 0
                    front.counted.set()
            case w.Serves():
                desk.serves(front.id)
            case w.Return(number, tenant, num_choices):
                desk.back(front.id, number, tenant, num_choices)
            case w.Resubmit(number, request):
                self._hand_in(front, number, request, is_further=True)
                front.refusal = None  # the choice that comes next may be another request's
            case w.Claim() | w.Ask():
                front.channel.say(self._answer(front, message))

    def _answer(self, front: Front, message: w.Claim | w.Ask) -> w.Answer:
        try:
            if isinstance(message, w.Ask):
                return w.Answer(message.ask, body=self._desk.ask(front.id, message.topic, bytes(message.body)))
            self._desk.claim(front.id, message.number, message.num_choices, message.param)
        except JettisonError as error:
            return w.Answer(message.ask, w.refusal_of(error))
        except msgspec.MsgspecError as error:
            return w.Answer(message.ask, w.refusal_of(JettisonError(str(error))))
        return w.Answer(message.ask)

    def on_failure(self, front: Front, message: Message) -> None:
        """Acting on what it said, or writing what it was to hear, has failed: its request fails, and nothing else."""
        refusal = w.refusal_of(JettisonError(FAILED))
        match message:
            case w.Submit(stream) | w.Resubmit(stream):
                front.channel.say(w.Refused(stream, refusal))
                front.refusal = refusal if isinstance(message, w.Submit) else None
                if (request_id := front.ids.pop(stream, None)) is not None:
                    front.streams.pop(request_id).was_failed = True
                    self._engine.cancel(request_id)
            case w.Arrive(ask) | w.Claim(ask) | w.Ask(ask) | w.Answer(ask):
                front.channel.say(w.Answer(ask, refusal))
            case w.Event(stream):
                if (request_id := front.ids.get(stream)) is not None:
                    self.end(front, request_id, FAILED)
                else:
                    front.channel.say(w.Event(stream, TokenEvent([], FinishReason.ERROR, error=FAILED)))
            case w.Refused(stream):
                front.channel.say(w.Refused(stream, refusal))

    def end(self, front: Front, request_id: RequestId, why: str) -> None:
        """End a request of a front end with an error."""
        front.streams[request_id].fail(why)
        self._engine.cancel(request_id)

    def on_unread(self, front: Front) -> None:
        """It does not read, and much waits for it: the request that has the most ends."""
        largest = max(front.streams.items(), key=lambda item: item[1].num_bytes, default=None)
        if largest is not None:
            logger.error("front end %d does not read: its largest request is cancelled", front.id)
            self.end(front, largest[0], "too much of the answer waits to be sent")

    def _submit(self, front: Front, message: w.Submit) -> None:
        request = message.request
        if message.prompt_of is None:
            front.prompt = message.stream, request.prompt_token_ids
        elif front.prompt is not None and front.prompt[0] == message.prompt_of:
            request = replace(request, prompt_token_ids=front.prompt[1])
        else:
            raise JettisonError("the prompt of a further choice has not come")
        if not message.is_further:
            front.refusal = None
        elif front.refusal is not None:  # where the first choice was refused, the others are
            front.channel.say(w.Refused(message.stream, front.refusal))
            return
        self._hand_in(front, message.stream, request, is_further=message.is_further)

    def _hand_in(self, front: Front, number: int, request: Request, *, is_further: bool) -> None:
        stream = HubStream(front, number, request.arrival_ns, len(request.resumed))
        front.streams[request.request_id], front.ids[number] = stream, request.request_id
        try:
            self._engine.submit_to(request, stream, is_further=is_further)
        except JettisonError as error:
            front.streams_over(stream)
            front.refusal = w.refusal_of(error)
            front.channel.say(w.Refused(number, front.refusal))
            return
        front.channel.say(w.Accepted(number))

    def on_lost(self, front: Front, why: str) -> None:
        """A front end is gone. Its requests end here; those of the others do not notice."""
        if front.gone.is_set():
            return
        front.gone.set()
        if front.id < 0:  # it never said which it is
            return
        self._desk.gone(front.id)
        if self.fronts.get(front.id) is front:
            del self.fronts[front.id]
        for request_id in list(front.streams):
            self._engine.cancel(request_id)
        front.streams.clear()
        front.counted.set()
        self._on_lost(front, why)
