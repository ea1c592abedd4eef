"""What a front end and the controller say to each other, and its bytes.

A frame is a length and a msgpack list of messages: all that one side has to say in one turn of its loop, or a part of
it where that is much. A message has no limit: clients decide how large one becomes. Every message is an array that
begins with its number. The most frequent one by far, a token of a stream without anything beside it, has no message of
its own: all of a turn are one flat list of integers (``Tokens``).

Both ends run on one machine: times are nanoseconds of its monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from jettison.errors import (
    JettisonError,
    KeyLimitError,
    NotReadyError,
    OverCapacityError,
    RequestError,
    TooLongError,
)
from jettison.live.engine.api import EngineInfo, EngineState, TokenEvent
from jettison.live.wire.channel import MessageBuffer, framed
from jettison.live.wire.codec import CodecError
from jettison.types import Request, RequestId

MOST_BYTES = (1 << 32) - 1
"""That a length of four bytes can say: the peer is trusted with any."""
FRAME_BYTES = 1 << 20
"""Beyond which what one turn has is cut into several frames, so that no end stands still over a very long one."""

# --- refusals


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """An error that the controller raised, for the front end to raise again."""

    kind: str
    message: str
    retry_after_ms: int = 0
    param: str | None = None
    code: str | None = None


_WITH_RETRY: tuple[type[KeyLimitError | OverCapacityError | NotReadyError], ...] = (
    KeyLimitError, OverCapacityError, NotReadyError)
_WITH_FIELD: tuple[type[RequestError], ...] = (TooLongError, RequestError)


def refusal_of(error: JettisonError) -> Refusal:
    """The error for the wire. One that is no refusal is told as what it is to a client: a failure of the server."""
    for kind in _WITH_RETRY:
        if isinstance(error, kind):
            return Refusal(kind.__name__, str(error), error.retry_after_ms)
    for field_kind in _WITH_FIELD:
        if isinstance(error, field_kind):
            return Refusal(field_kind.__name__, str(error), param=error.param, code=error.code)
    return Refusal(JettisonError.__name__, str(error))


def error_of(refusal: Refusal) -> JettisonError:
    """Inverse of ``refusal_of``."""
    for kind in _WITH_RETRY:
        if refusal.kind == kind.__name__:
            return kind(refusal.message, refusal.retry_after_ms)
    for field_kind in _WITH_FIELD:
        if refusal.kind == field_kind.__name__:
            return field_kind(refusal.message, refusal.param, refusal.code)
    return JettisonError(refusal.message)


# --- from a front end


class Arrive(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An HTTP request for tokens has come. Answered with ``Answer`` under its number."""

    number: int
    """The front end's, of this request until ``Leave``."""
    tenant: str


class Came(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """A request's body has come, so it is on its way to the queue. Has no answer."""

    number: int


class Claim(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """It has so many choices. Answered with ``Answer`` under ``ask``."""

    ask: int
    number: int
    num_choices: int
    param: str


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """One of its choices for the engine. Answered with ``Accepted`` or ``Refused``."""

    stream: int
    """The front end's, of this choice until its last event."""
    request: Request
    """Without its prompt where ``prompt_of`` says whose it has."""
    is_further: bool
    prompt_of: int | None = None
    """The stream said last with a prompt, which is this one's, too: choices of one prompt need not repeat it."""


class Landed(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """All choices of a request have been accepted (or, ``is_accepted`` False, will not be submitted)."""

    number: int
    is_accepted: bool


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The last byte of a request's answer is written, or there will be none."""

    number: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """``EngineClient.cancel``."""

    request_id: RequestId


class FinishEarly(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """``EngineClient.finish_early``."""

    request_id: RequestId


class Note(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Something for the controller's books; ``body`` is msgpack, and ``topic`` says of what. Has no answer."""

    topic: str
    body: msgspec.Raw


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The same with an answer: ``Answer`` under ``ask``."""

    ask: int
    topic: str
    body: msgspec.Raw


class Serves(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Connections are taken from now on."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The first on a channel: which front end it is."""

    front: int
    life: int
    """Which process of this front end it is."""


class Return(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A request that another controller has let in, with so many choices: its place. Has no answer."""

    number: int
    tenant: str
    num_choices: int


class Resubmit(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """A choice that another controller has accepted, and the tokens that came of it (``Request.resumed``). Answered
    as ``Submit`` is."""

    stream: int
    request: Request


# --- from the controller


class Status(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """What a front end knows of the engine; sent when it has changed."""

    state: EngineState
    ready_in_s: float | None
    info: EngineInfo | None
    """None before the model's configuration is read."""
    ttft_s: float | None
    tpot_s: float | None
    """Objectives."""
    key_digests: tuple[bytes, ...]
    """Of the keys that open the API now."""


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """The engine has a stream's request."""

    stream: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """The engine does not take it: the stream's first and last event."""

    stream: int
    refusal: Refusal


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """Tokens of many streams in the order in which they were sampled: stream, token, stream, token, and so on."""

    pairs: list[int]


class Event(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """An event of a stream that is more than one token."""

    stream: int
    event: TokenEvent


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """To ``Arrive``, ``Claim`` or ``Ask``."""

    ask: int
    refusal: Refusal | None = None
    is_full: bool = False
    """With a refusal of ``Arrive``: only the queue of online requests is full, and the request keeps its place."""
    body: bytes | None = None
    """msgpack. To ``Arrive``: the number of other requests in the server."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=38):
    """End an HTTP request whose client gets an error that says that the server stops; named by the engine's id of its
    first choice."""

    request_id: RequestId


class Tell(msgspec.Struct, frozen=True, array_like=True, tag=39):
    """Send the counts of the metrics now."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """End: all requests are over."""


FromFront = (
    Arrive | Came | Claim | Submit | Landed | Leave | Cancel | FinishEarly | Note | Ask | Serves | Hello | Return
    | Resubmit
)
FromController = Status | Accepted | Refused | Tokens | Event | Answer | Abort | Tell | Stop

_encoder = msgspec.msgpack.Encoder()
_from_front = msgspec.msgpack.Decoder(list[FromFront])
_from_controller = msgspec.msgpack.Decoder(list[FromController])


def encode_frame(messages: Sequence[FromFront] | Sequence[FromController]) -> bytes:
    """The frame that tells these messages."""
    return framed(_encoder.encode(messages))


def encode_frames(messages: Sequence[FromFront] | Sequence[FromController]) -> list[bytes]:
    """The same in frames of ``FRAME_BYTES``, or of one message that is longer."""
    whole = encode_frame(messages)
    if len(whole) <= FRAME_BYTES or len(messages) == 1:
        return [whole]
    frames: list[bytes] = []
    part: list[msgspec.Raw] = []
    num_bytes = 0
    for message in messages:
        raw = packed(message)
        if part and num_bytes + len(memoryview(raw)) > FRAME_BYTES:
            frames.append(framed(_encoder.encode(part)))
            part, num_bytes = [], 0
        part.append(raw)
        num_bytes += len(memoryview(raw))
    return [*frames, framed(_encoder.encode(part))]


def packed(value: object) -> msgspec.Raw:
    """A body of ``Note`` or ``Ask``."""
    return msgspec.Raw(_encoder.encode(value))


class Frames:
    """Cuts bytes into messages of one direction."""

    def __init__(self, *, is_from_front: bool) -> None:
        self._buffer = MessageBuffer(max_bytes=MOST_BYTES)
        self._decoder: msgspec.msgpack.Decoder[Any] = _from_front if is_from_front else _from_controller

    def feed(self, data: bytes) -> Iterator[FromFront | FromController]:
        """Messages that are whole now. Raises CodecError for anything else."""
        for frame in self._buffer.feed(data):
            try:
                messages = self._decoder.decode(frame)
            except (msgspec.MsgspecError, ValueError) as error:  # also of text that is none
                raise CodecError(f"not a frame: {error}") from None
            yield from messages
