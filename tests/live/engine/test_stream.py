"""A request's events between the engine and its client."""

from __future__ import annotations

import asyncio

import pytest

from jettison.live.engine.api import TokenEvent
from jettison.live.engine.stream import Stream, events_of
from jettison.types import FinishReason, SampledToken


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
