"""A request's events between the engine and its client."""

from __future__ import annotations

import asyncio

import pytest

from jettison.config import EngineConfig
from jettison.core import ports
from jettison.core.requests import RequestState
from jettison.errors import JettisonError
from jettison.live.engine.api import TokenEvent
from jettison.live.engine.engine import Engine
from jettison.live.engine.stream import OpenStreams, Stream, events_of
from jettison.types import FinishReason, Request, SampledToken, SamplingParams


def test_what_was_not_taken_is_unread() -> None:
    stream = Stream(0)
    for token in range(3):
        stream.put(TokenEvent([SampledToken(token)]))
    assert stream.num_unread == 3
    stream.take()
    assert stream.num_unread == 2


@pytest.mark.parametrize("is_left", [True, False])
async def test_leaving_early_cancels_and_nothing_else_does(is_left: bool) -> None:
    stream, cancelled = Stream(0), []
    events = events_of(stream, lambda: cancelled.append(True))
    stream.put(TokenEvent([SampledToken(1)]))
    assert (await anext(events)).tokens[0].token_id == 1
    if is_left:
        reading = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})
    else:
        stream.ended = True
        stream.put(TokenEvent([], FinishReason.LENGTH))
        assert [event.finish_reason async for event in events] == [FinishReason.LENGTH]
    assert cancelled == [True] * is_left


class Broken(Stream):
    def put_token(self, token: SampledToken, state: RequestState) -> None:
        raise RuntimeError("a bug")


async def test_a_token_that_cannot_be_told_ends_all_streams() -> None:
    """None of them may go on with a gap."""
    engine = Engine(EngineConfig.resolve(model="nowhere", memory="64MiB"))
    states = [RequestState(Request(name, (1,), SamplingParams(), 0), 0) for name in ("a", "b")]
    streams = [Broken(0), Stream(0)]
    for state, stream in zip(states, streams, strict=True):
        engine._streams.open(state.request_id, stream)
    engine._streams.on_emit(ports.EmitTokens(states, [SampledToken(4), SampledToken(5)]))
    await asyncio.sleep(0)
    ends = [[event.finish_reason for event in iter(stream.take, None)] for stream in streams]
    assert ends == [[FinishReason.ERROR], [FinishReason.ERROR]] and engine.state == "failed"


async def test_tokens_are_told_in_the_next_turn_and_an_end_never_before_them() -> None:
    """So that workers which answer in one turn have their next steps before any client its token."""
    opened = OpenStreams(lambda: pytest.fail("a bug"))
    states = [RequestState(Request(name, (1,), SamplingParams(), 0), 0) for name in ("a", "b")]
    streams = {state.request_id: Stream(0) for state in states}
    for name, stream in streams.items():
        opened.open(name, stream)

    def read(name: str) -> list[int]:
        return [token.token_id for event in iter(streams[name].take, None) for token in event.tokens]

    opened.on_emit(ports.EmitTokens(states, [SampledToken(4), SampledToken(5)]))
    opened.on_emit(ports.EmitTokens(states[:1], [SampledToken(6)]))
    assert not any(opened.num_unread(name) for name in streams)
    await asyncio.sleep(0)
    assert (read("a"), read("b")) == ([4, 6], [5])
    opened.on_emit(ports.EmitTokens(states, [SampledToken(7), SampledToken(8)]))
    opened.on_emit(ports.Emit("b", (SampledToken(9),), FinishReason.STOP, state=states[1]))
    assert (read("a"), read("b")) == ([7], [8, 9])
    await asyncio.sleep(0)
    assert not any(stream.num_unread for stream in streams.values())
    assert list(opened.ids) == ["a"] and not opened.none.is_set() and opened.num_unread("b") == 0
    opened.fail_all("the server is shutting down")
    assert not opened.ids and opened.none.is_set()
    last = streams["a"].take()
    assert last is not None and (last.finish_reason, last.error) == (FinishReason.ERROR, "the server is shutting down")


def test_an_id_is_open_once() -> None:
    opened = OpenStreams(lambda: None)
    opened.open("a", Stream(0))
    with pytest.raises(JettisonError, match="request id a is in use"):
        opened.open("a", Stream(0))
