"""A ``RemoteEngine`` over the real hub and a scripted engine, on a socket pair."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from jettison.core.requests import RequestState
from jettison.errors import JettisonError, KeyLimitError, NotReadyError, OverCapacityError, RequestError
from jettison.live.engine.api import EngineInfo, TokenEvent
from jettison.live.frontend import hub as hub_module
from jettison.live.frontend import wire as w
from jettison.live.frontend.hub import Hub
from jettison.live.frontend.remote_engine import LOST, RemoteEngine
from jettison.policy.slo import Objectives
from jettison.types import FinishReason, Request, SampledToken, SamplingParams, TokenLogprobs
from waiting import until

INFO = EngineInfo("dir", 100, 90, 80, 300, (2,))


def request(name, **fields):
    return Request(name, (1, 2, 3), SamplingParams(max_tokens=9), 5, **fields)


class ScriptedEngine:
    """Takes what it is told to take; the test says what comes."""

    def __init__(self):
        self.info, self.state = INFO, "ready"
        self.streams, self.cancelled, self.finished = {}, [], []
        self.refusal = None

    def ready_in_s(self):
        return None

    def objectives(self):
        return Objectives(0.5, 0.25)

    def submit_to(self, request, stream, *, is_further=False):
        if self.refusal is not None and not is_further:
            raise self.refusal
        self.streams[request.request_id] = stream

    def cancel(self, request_id):
        self.cancelled.append(request_id)
        self.streams.pop(request_id).put(TokenEvent([], FinishReason.CANCELLED))

    def finish_early(self, request_id):
        self.finished.append(request_id)

    def say(self, name, *tokens, **fields):
        self.streams[name].ended = "finish_reason" in fields  # as the engine does, before it tells
        self.streams[name].put(TokenEvent([SampledToken(token) for token in tokens], **fields))


class RecordingDesk:
    def __init__(self):
        self.calls, self.refusal, self.is_full = [], None, False

    def state(self):
        return "ready"

    def key_digests(self):
        return (b"digest",)

    def arrive(self, front, number, tenant):
        self.calls.append(("arrive", tenant))
        refusal = None if self.refusal is None else w.refusal_of(self.refusal)
        return w.Answer(number, refusal, self.is_full)

    def claim(self, front, number, num_choices, param):
        if num_choices > 2:
            raise KeyLimitError("too many", 7)

    def came(self, front, number):
        self.calls.append(("came", number))

    def landed(self, front, number, *, is_accepted):
        self.calls.append(("landed", number, is_accepted))

    def leave(self, front, number):
        self.calls.append(("leave", number))

    def note(self, front, topic, body):
        self.calls.append((topic, body))

    def ask(self, front, topic, body):
        if topic == "secret":
            raise RequestError("no", "topic")
        return bytes(body)

    def serves(self, front):
        self.calls.append(("serves", front))

    def gone(self, front):
        self.calls.append(("gone", front))


class Pair:
    def __init__(self, engine, desk):
        self.engine, self.desk, self.lost = engine, desk, []
        self.hub = Hub(engine, desk, lambda front, why: self.lost.append((front, why)))
        self.remotes = []

    async def add(self, on_stop=None):
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)
        remote = RemoteEngine()
        remote.on_stop = on_stop
        await self.hub.add(len(self.remotes), ours)
        await asyncio.get_running_loop().create_connection(lambda: remote.channel, sock=theirs)
        self.remotes.append(remote)
        await until(lambda: remote.state == "ready")
        return remote


@asynccontextmanager
async def pair():
    made = Pair(ScriptedEngine(), RecordingDesk())
    try:
        yield made
    finally:
        await made.hub.close()
        for remote in made.remotes:
            remote.channel.close()
        await asyncio.sleep(0)


async def submitted(remote, name, **fields):
    events = remote.submit(request(name, **fields))
    await events.accepted()
    return events


async def test_a_front_end_knows_what_the_controller_knows():
    async with pair() as made:
        remote = await made.add()
        assert remote.info == INFO and remote.objectives() == Objectives(0.5, 0.25)
        told = []
        remote.on_status = told.append
        made.engine.info = EngineInfo("dir", 100, 10, 10, 300, (2,))  # an instance is gone
        await until(lambda: remote.info.max_request_tokens == 10)
        assert told[-1].key_digests == (b"digest",)


async def test_streams_are_told_apart_and_keep_what_a_later_controller_needs():
    async with pair() as made:
        remote = await made.add()
        a, b = await submitted(remote, "a"), await submitted(remote, "b")
        for at in range(3):  # as a step does: a token of each in one turn
            made.engine.say("a", 10 + at)
            made.engine.say("b", 20 + at)
        made.engine.say("a", 13, finish_reason=FinishReason.LENGTH)
        got = [event async for event in a]
        assert [token.token_id for event in got for token in event.tokens] == [10, 11, 12, 13]
        assert got[-1].finish_reason is FinishReason.LENGTH
        await until(lambda: len(b.tokens) == 3)
        assert [(each.request.request_id, each.tokens) for each in remote.open_requests] == [("b", [20, 21, 22])]
        assert remote.open_requests[0].request == request("b")


async def test_a_token_that_the_engine_tells_arrives_as_its_event_does():
    """With what is known of the prompt, once; with its log-probabilities; and most of them with nothing else."""
    told = TokenLogprobs(7, -1.0, 1, ((7, -1.0),))
    tokens = [SampledToken(5), SampledToken(6), SampledToken(7, told), SampledToken(8)]
    for num_asked, known in ((None, None), (0, [None, told, told])):
        async with pair() as made:
            events = await submitted(await made.add(), "a")
            state = RequestState(replace(request("a"), params=SamplingParams(prompt_logprobs=num_asked)), 0)
            state.num_cached, state.prompt_logprobs = 2, known
            for token in tokens:
                made.engine.streams["a"].put_token(token, state)
            assert made.engine.streams["a"].num_output == 4
            made.engine.say("a", finish_reason=FinishReason.LENGTH)
            got = [event async for event in events]
            assert [token for event in got for token in event.tokens] == tokens
            assert (got[0].num_cached_tokens, got[0].prompt_logprobs) == (2, known)
            assert not any(event.prompt_logprobs for event in got[1:])


async def test_a_turn_of_many_streams_is_one_frame_and_one_list_of_integers(monkeypatch):
    async with pair() as made:
        remote = await made.add()
        for number in range(8):
            await submitted(remote, f"r{number}")
            made.engine.say(f"r{number}", 1)
        await asyncio.sleep(0)
        frames, encode = [], w.encode_frames
        channel = made.hub.fronts[0].channel
        place = "jettison.live.frontend.channel.encode_frames"
        monkeypatch.setattr(place, lambda turn: frames.append(turn) or encode(turn))
        channel.flush()
        frames.clear()
        for number in range(8):
            made.engine.say(f"r{number}", 2)
        await until(lambda: frames)
        assert [type(message) for message in frames[0]] == [w.Tokens]
        assert len(frames[0][0].pairs) == 16


async def test_a_refusal_is_the_first_that_a_stream_hears():
    async with pair() as made:
        remote = await made.add()
        made.engine.refusal = OverCapacityError("full", 1234)
        first, further = remote.submit(request("a")), remote.submit(request("a-1"), is_further=True)
        for events in (first, further):  # nor is another choice of the same answer taken
            with pytest.raises(OverCapacityError, match="full") as caught:
                await events.accepted()
            assert caught.value.retry_after_ms == 1234
            with pytest.raises(OverCapacityError):
                await anext(events)
        assert not made.engine.streams and not remote.open_requests
        with pytest.raises(RequestError):
            remote.submit(request("b", cache_salt="\ud800"))


async def test_leaving_and_finishing_reach_the_engine_once():
    async with pair() as made:
        remote = await made.add()
        a, b = await submitted(remote, "a"), await submitted(remote, "b")
        remote.finish_early("b")
        await a.aclose()
        await until(lambda: made.engine.cancelled == ["a"] and made.engine.finished == ["b"])
        assert (await anext(a)).finish_reason is FinishReason.CANCELLED
        remote.cancel("a")  # it is over
        made.engine.say("b", finish_reason=FinishReason.STOP)
        assert [event.finish_reason async for event in b] == [FinishReason.STOP]
        assert made.engine.cancelled == ["a"]


async def test_questions_are_answered_or_refused():
    async with pair() as made:
        remote = await made.add()
        assert await remote.ask("echo", [1, 2], list[int]) == [1, 2]
        with pytest.raises(RequestError, match="no"):
            await remote.ask("secret", 1, int)
        answer = await remote.asked(lambda ask: w.Claim(ask, 1, 3, "n"))
        assert w.error_of(answer.refusal).retry_after_ms == 7


async def test_a_front_end_that_goes_takes_its_own_requests_only():
    async with pair() as made:
        first, second = await made.add(), await made.add()
        await submitted(first, "a")
        kept = await submitted(second, "b")
        first.channel.hang_up("killed")
        await until(lambda: made.lost)
        assert made.engine.cancelled == ["a"] and ("gone", 0) in made.desk.calls and list(made.hub.fronts) == [1]
        made.engine.say("b", 5, finish_reason=FinishReason.LENGTH)
        assert [event.tokens[0].token_id async for event in kept] == [5]


async def test_a_controller_that_goes_ends_all_streams_with_an_error():
    async with pair() as made:
        remote = await made.add()
        ended = []
        remote.on_stop = lambda: ended.append(True)
        events = await submitted(remote, "a")
        made.hub.fronts[0].channel.hang_up("killed")
        last = [event async for event in events][-1]
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, LOST)
        assert ended and remote.state == "failed"
        with pytest.raises(NotReadyError):
            remote.submit(request("b"))
        with pytest.raises(NotReadyError):
            await remote.ask("echo", 1, int)


async def test_of_a_front_end_that_does_not_read_the_largest_request_ends(monkeypatch):
    monkeypatch.setattr(hub_module, "MAX_UNREAD_BYTES", 1 << 20)
    async with pair() as made:
        slow, other = await made.add(), await made.add()
        large, small = await submitted(slow, "large"), await submitted(slow, "small")
        kept = await submitted(other, "b")
        slow.channel._transport.pause_reading()
        wide = [SampledToken(7, TokenLogprobs(7, -1.0, 1, ((7, -1.0),) * 500))]
        made.engine.say("small", 1)
        for _ in range(5000):
            if made.engine.cancelled:
                break
            made.engine.streams["large"].put(TokenEvent(list(wide)))
            await asyncio.sleep(0)
        assert made.engine.cancelled == ["large"] and not made.lost
        for name in ("small", "b"):
            made.engine.say(name, 5, finish_reason=FinishReason.LENGTH)
        assert [event.tokens[0].token_id async for event in kept] == [5]
        slow.channel._transport.resume_reading()
        assert [event async for event in large][-1].finish_reason is FinishReason.ERROR
        assert [event.tokens[0].token_id async for event in small] == [1, 5]


async def test_one_event_larger_than_what_may_wait_reaches_a_front_end_that_reads(monkeypatch):
    monkeypatch.setattr(hub_module, "MAX_UNREAD_BYTES", 1 << 16)
    async with pair() as made:
        events = await submitted(await made.add(), "a")
        entry = TokenLogprobs(7, -1.0, 1, tuple((number, -1.0) for number in range(100)))
        made.engine.streams["a"].put(TokenEvent([SampledToken(1)], prompt_logprobs=[None, *[entry] * 3000]))
        made.engine.say("a", 2, finish_reason=FinishReason.LENGTH)
        got = [event async for event in events]
        assert got[0].prompt_logprobs[-1] == entry and got[-1].finish_reason is FinishReason.LENGTH
        assert not made.engine.cancelled and not made.lost


async def test_choices_of_one_prompt_say_it_once(monkeypatch):
    async with pair() as made:
        remote = await made.add()
        requests = {}
        monkeypatch.setattr(made.engine, "submit_to", lambda request, stream, *, is_further: requests.update(
            {request.request_id: request}))
        said = []
        monkeypatch.setattr(remote.channel, "say", lambda message, say=remote.channel.say: said.append(message) or say(
            message))
        asked = [replace(request(f"{at}"), prompt_token_ids=prompt) for prompt in ((1, 2), (3, 4)) for at in (
            f"{prompt[0]}-0", f"{prompt[0]}-1")]
        for at, each in enumerate(asked):
            await remote.submit(each, is_further=at > 0).accepted()
        assert list(requests.values()) == asked
        assert [message.request.prompt_token_ids for message in said] == [(1, 2), (), (3, 4), ()]
        remote.channel.say(w.Submit(9, replace(asked[1], prompt_token_ids=()), True, 77))  # of a prompt that never came
        await remote.submit(request("z")).accepted()
        assert len(requests) == 5 and not made.lost


async def test_what_fails_in_the_controller_fails_one_request(monkeypatch):
    async with pair() as made:
        remote = await made.add()
        kept = await submitted(remote, "kept")
        submit_to = made.engine.submit_to

        def bad(request, stream, *, is_further=False):
            raise ZeroDivisionError

        monkeypatch.setattr(made.engine, "submit_to", bad)
        with pytest.raises(JettisonError, match="failed"):
            await remote.submit(request("a")).accepted()
        monkeypatch.setattr(made.engine, "submit_to", submit_to)
        monkeypatch.setattr(made.desk, "ask", lambda front, topic, body: {}["x"])
        with pytest.raises(JettisonError, match="failed"):
            await remote.ask("echo", 1, int)
        worse = await submitted(remote, "worse")
        made.engine.streams["worse"].put(TokenEvent([], error="\ud800"))  # has no bytes
        made.engine.say("kept", 5, finish_reason=FinishReason.LENGTH)
        assert [event.tokens[0].token_id async for event in kept] == [5]
        assert [event async for event in worse][-1].finish_reason is FinishReason.ERROR
        assert made.engine.cancelled == ["a", "worse"] and not made.lost


async def test_what_a_front_end_cannot_write_fails_alone():
    async with pair() as made:
        remote = await made.add()
        bad, good = remote.submit(request("\ud800")), remote.submit(request("b"))
        with pytest.raises(JettisonError, match="failed"):
            await bad.accepted()
        await good.accepted()
        with pytest.raises(JettisonError, match="failed"):
            await remote.asked(lambda ask: w.Ask(ask, "\ud800", w.packed(1)))
        assert list(made.engine.streams) == ["b"]


async def test_a_front_end_whose_loop_stands_still_is_given_up(monkeypatch):
    monkeypatch.setattr(hub_module, "STATUS_S", 0.001)
    monkeypatch.setattr(hub_module, "SLOW_LOOKS", 1)
    async with pair() as made:
        remote = await made.add()
        remote.on_tell = lambda: None  # hears it, and does not answer
        await asyncio.sleep(0.1)
        assert not made.lost  # it may still begin
        remote.say(w.Serves())
        await until(lambda: made.lost)
        assert "said nothing" in made.lost[0][1]


async def test_a_life_that_is_dropped_leaves_nothing_to_the_next():
    async with pair() as made:
        remote = await made.add()
        await submitted(remote, "a")
        first = made.hub.fronts[0]
        made.hub.drop(first, "its process has ended")
        assert made.engine.cancelled == ["a"] and made.desk.calls.count(("gone", 0)) == 1
        made.remotes.clear()
        second = await made.add()
        kept = await submitted(second, "b")
        first.on_message(w.Leave(1))
        await until(lambda: remote.is_lost)
        assert made.desk.calls.count(("gone", 0)) == 1 and ("leave", 1) not in made.desk.calls
        made.engine.say("b", 5, finish_reason=FinishReason.LENGTH)
        assert [event.tokens[0].token_id async for event in kept] == [5]
        remote.channel.close()


async def test_one_that_is_added_at_the_end_is_told_to_end():
    async with pair() as made:
        await made.hub.close()
        ended = []
        remote = await made.add(on_stop=lambda: ended.append(True))
        await until(lambda: ended)
        assert not remote.is_lost
