"""Front ends that outlive their controllers: whatever had come at a death, clients get each token once.

Hub and remote engine are real, and so are the bytes; the socket between them is two lists, so that a death can cut what
is on its way anywhere.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.errors import KeyLimitError, NotReadyError
from jettison.live.engine.api import OFTEN_LOST, EngineInfo, RequestTimings, TokenEvent
from jettison.live.frontend import remote_engine
from jettison.live.frontend import wire as w
from jettison.live.frontend.hub import Front, Hub
from jettison.live.frontend.remote_engine import LOST, RemoteEngine
from jettison.policy.slo import UNKNOWN_OBJECTIVES
from jettison.types import FinishReason, Request, SampledToken, SamplingParams, TokenLogprobs

FOR_EVER_S = 1000.0


def request(name, length, **params):
    return Request(name, (1, 2, 3), SamplingParams(max_tokens=length, **params), 5)


def tokens_of(name, length):
    """What a model would answer: a function of the request and the position alone."""
    return [random.Random(f"{name} {at}").randrange(1000) for at in range(length)]


class Engine:
    """One controller's. It goes on behind what it is told, and only behind what a client can have."""

    def __init__(self, state="ready"):
        self.info, self.state = EngineInfo("dir", 100, 90, 80, 300, (2,)), state
        self.open, self.requests, self.cancelled, self.finished = {}, {}, [], []
        self.refusal = None

    def ready_in_s(self):
        return None

    def objectives(self):
        return UNKNOWN_OBJECTIVES

    def submit_to(self, request, stream, *, is_further=False):
        if self.refusal is not None:
            raise self.refusal
        assert list(request.resumed) == tokens_of(request.request_id, request.params.max_tokens)[:len(request.resumed)]
        self.requests[request.request_id] = request
        self.open[request.request_id] = [request, stream, len(request.resumed)]

    def step(self, only=None):
        for name, entry in list(self.open.items()):
            if only is not None and name not in only:
                continue
            request, stream, at = entry
            entry[2] = at + 1
            event = TokenEvent([SampledToken(tokens_of(name, at + 1)[at])])
            if at + 1 == request.params.max_tokens:
                event.finish_reason, event.timings = FinishReason.LENGTH, RequestTimings(5, 6, 7, 8)
                stream.ended = True
                del self.open[name]
            stream.put(event)

    def cancel(self, request_id):
        self.cancelled.append(request_id)
        self.open.pop(request_id, None)

    def finish_early(self, request_id):
        self.finished.append(request_id)


class Desk:
    def __init__(self, engine):
        self.engine, self.calls, self.refusal = engine, [], None

    def state(self):
        return self.engine.state

    def key_digests(self):
        return ()

    def arrive(self, front, number, tenant):
        self.calls.append(("arrive", number))
        return w.Answer(number, None if self.refusal is None else w.refusal_of(self.refusal))

    def claim(self, front, number, num_choices, param):
        self.calls.append(("claim", number, num_choices))

    def back(self, front, number, tenant, num_choices):
        self.calls.append(("back", number, tenant, num_choices))

    def leave(self, front, number):
        self.calls.append(("leave", number))

    def ask(self, front, topic, body):
        self.calls.append(("ask", topic))
        return bytes(body)

    def note(self, front, topic, body):
        pass

    def gone(self, front):
        pass


class End:
    """A transport that keeps what is written."""

    def __init__(self):
        self.written = bytearray()

    def write(self, data):
        self.written += data

    def is_closing(self):
        return False

    def get_write_buffer_size(self):
        return 0

    def abort(self):
        pass

    close = abort


class Controller:
    """One, and its socket to a front end."""

    def __init__(self, remote, engine=None):
        self.engine = engine or Engine()
        self.desk = Desk(self.engine)
        self.hub = Hub(self.engine, self.desk, lambda front, why: None)
        self.remote = remote
        self.channel = remote.channel if remote.channel._transport is None and not remote.is_away else remote.reopened()
        self.there, self.back = End(), End()
        self.front = Front(self.hub)
        self.front.channel.connection_made(self.back)
        self.channel.connection_made(self.there)
        self.channel.say(w.Hello(0, 0))
        self.deliver()

    def deliver(self, most=None):
        """Carry what has been said, both ways, until there is nothing; or so many bytes at most to the front end."""
        while True:
            self.front.channel.flush()
            self.channel.flush()
            if self.there.written:
                data, self.there.written = bytes(self.there.written), bytearray()
                self.front.channel.data_received(data)
                continue
            if not self.back.written or most == 0:
                return
            data = bytes(self.back.written[:most])
            self.back.written = self.back.written[len(data):]
            most = None if most is None else most - len(data)
            self.channel.data_received(data)

    def die(self, part=1.0):
        """With this part of what it has written last on its way."""
        self.front.channel.flush()
        self.deliver(int(part * len(self.back.written)))
        if self.hub._ticker is not None:
            self.hub._ticker.cancel()
        self.channel.connection_lost(None)


async def all_of(events):
    return [event async for event in events]


def remote_engine_with(patience_s=FOR_EVER_S):
    return RemoteEngine(patience_s)


LIVES = st.lists(st.tuples(st.lists(st.sets(st.integers(0, 4)), max_size=6), st.floats(0.0, 1.0)), max_size=3)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), lives=LIVES)
def test_clients_get_each_token_once_whatever_had_come_at_a_death(lengths, lives):
    """``lives``: of controllers that die: which streams get a token in each of their steps, and how much of what was
    written after the last step arrives."""

    async def run():
        remote = remote_engine_with()
        controller = Controller(remote)
        names = [f"r{at}" for at in range(len(lengths))]
        streams = [remote.submit(request(*each)) for each in zip(names, lengths, strict=True)]
        for steps, part in lives:
            controller.deliver()
            for at, which in enumerate(steps):
                controller.engine.step({names[number] for number in which if number < len(names)})
                if at + 1 < len(steps):
                    controller.deliver()
            controller.die(part)
            controller = Controller(remote)
        controller.deliver()
        while controller.engine.open:
            controller.engine.step()
            controller.deliver()
        for name, length, events in zip(names, lengths, streams, strict=True):
            got = await all_of(events)
            assert [token.token_id for event in got for token in event.tokens] == tokens_of(name, length)
            assert [event.finish_reason for event in got if event.finish_reason] == [FinishReason.LENGTH]
        assert not remote.open_requests
        controller.die()
        remote.give_up()

    asyncio.run(run())


async def begun(remote, controller, name="a", length=9, **params):
    """A stream with two tokens."""
    events = remote.submit(request(name, length, **params))
    for _ in range(2):
        controller.deliver()
        controller.engine.step()
    controller.deliver()
    return events


async def test_while_no_controller_is_ready_streams_wait_and_what_is_submitted_does(monkeypatch):
    monkeypatch.setattr(remote_engine, "MOST_RETURNS", 0)  # one that waited has met no death
    remote = remote_engine_with()
    controller = Controller(remote)
    controller.die()
    early = remote.submit(request("b", 3))
    later = Controller(remote, Engine("loading"))
    further = [remote.submit(request(name, 3), is_further=True) for name in ("b-2", "b-3")]
    left = remote.submit(request("c", 3))
    await left.aclose()
    later.deliver()
    assert remote.state == "loading" and not later.engine.requests and not early.is_accepted
    later.engine.state = "ready"
    later.hub.tell_all()
    later.deliver()
    assert remote.state == "ready" and list(later.engine.requests) == ["b", "b-2", "b-3"]
    assert all(each.prompt_token_ids == (1, 2, 3) for each in later.engine.requests.values())
    while later.engine.open:
        later.engine.step()
    later.deliver()
    for events in (early, *further):
        await events.accepted()
        got = await all_of(events)
        assert [token.token_id for event in got for token in event.tokens] == tokens_of(events.request.request_id, 3)
    assert (await all_of(left))[-1].finish_reason is FinishReason.CANCELLED
    later.die()
    remote.give_up()


async def test_what_waited_in_vain_for_a_controller_is_refused_and_nothing_waits_any_more():
    remote = remote_engine_with(0.001)
    controller = Controller(remote)
    controller.die()
    assert remote.awaits_next
    events = remote.submit(request("a", 3))
    with pytest.raises(NotReadyError):
        await events.accepted()
    assert not remote.awaits_next and not remote.open_requests
    with pytest.raises(NotReadyError):
        remote.submit(request("b", 3))
    with pytest.raises(NotReadyError):
        await remote.asked(lambda ask: w.Ask(ask, "x", w.packed(1)))
    later = Controller(remote)
    again = await begun(remote, later, "b", 2)
    assert (await all_of(again))[-1].finish_reason is FinishReason.LENGTH
    later.die()
    assert remote.awaits_next
    remote.give_up()
    assert not remote.awaits_next


async def test_what_ends_meanwhile_ends_here():
    remote = remote_engine_with()
    controller = Controller(remote)
    left, stopped, unanswered, kept = [await begun(remote, controller, name) for name in "abcd"]
    remote.finish_early("c")
    controller.deliver()
    assert controller.engine.finished == ["c"]  # and it dies before it says so
    controller.die()
    await left.aclose()
    remote.finish_early("b")
    assert (await all_of(left))[-1].finish_reason is FinishReason.CANCELLED
    for events in (stopped, unanswered):
        assert (await all_of(events))[-1].finish_reason is FinishReason.STOP
    later = Controller(remote)
    assert list(later.engine.requests) == ["d"] and not kept.is_ended
    later.die()
    remote.give_up()


async def test_without_a_controller_in_time_streams_end_with_an_error_and_later_ones_run():
    remote = remote_engine_with(0.001)
    controller = Controller(remote)
    events = await begun(remote, controller)
    asked = asyncio.create_task(remote.asked(lambda ask: w.Ask(ask, "x", w.packed(1))))
    await asyncio.sleep(0)
    controller.die(0.0)
    last = (await all_of(events))[-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, LOST)
    with pytest.raises(NotReadyError):
        await asked
    later = Controller(remote)
    assert not later.engine.requests and remote.state == "ready"
    again = await begun(remote, later, "b", 2)
    assert (await all_of(again))[-1].finish_reason is FinishReason.LENGTH
    later.die()
    remote.give_up()


async def test_places_and_questions_come_along():
    remote = remote_engine_with()
    controller = Controller(remote)

    def arrive(number):
        return w.Arrive(number, "tenant")

    async def answered(asking):
        task = asyncio.create_task(asking)
        await asyncio.sleep(0)
        controller.deliver()
        return await task

    first = (await answered(remote.asked(arrive))).ask
    second = (await answered(remote.asked(arrive))).ask
    await answered(remote.asked(lambda ask: w.Claim(ask, first, 3, "n")))
    remote.say(w.Leave(second))
    controller.desk.refusal = KeyLimitError("too many", 7)
    await answered(remote.asked(arrive))
    controller.deliver()
    open_question = asyncio.create_task(remote.asked(lambda ask: w.Ask(ask, "again", w.packed(5))))
    late = asyncio.create_task(remote.asked(arrive))
    await asyncio.sleep(0)
    controller.die(0.0)
    given_up = asyncio.create_task(remote.asked(arrive))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.sleep(0)
    later = Controller(remote)
    assert (await open_question).body == bytes(w.packed(5)) and (await late).refusal is None
    backs = [call for call in later.desk.calls if call[0] == "back"]
    assert backs == [("back", first, "tenant", 3)]
    assert [call[0] for call in later.desk.calls] == ["back", "ask", "arrive"]
    later.die()
    remote.give_up()


async def test_a_later_controller_may_refuse_and_then_the_stream_ends_with_an_error():
    remote = remote_engine_with()
    controller = Controller(remote)
    events = await begun(remote, controller)
    controller.die()
    engine = Engine()
    engine.refusal = KeyLimitError("no", 7)
    later = Controller(remote, engine)
    last = (await all_of(events))[-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "no")
    later.die()
    remote.give_up()


@pytest.mark.parametrize("refusal", [KeyLimitError("no", 7), RuntimeError("a bug")])
async def test_a_refusal_on_the_way_back_is_no_word_on_another_request_s_choice(refusal):
    remote = remote_engine_with()
    controller = Controller(remote)
    streams = [await begun(remote, controller, name) for name in "ab"]
    further = remote.submit(request("b-2", 1), is_further=True)
    controller.die(0.0)  # before it has accepted the last

    class Picky(Engine):
        def submit_to(self, request, stream, *, is_further=False):
            self.refusal = refusal if request.request_id == "a" else None
            super().submit_to(request, stream, is_further=is_further)

    later = Controller(remote, Picky())
    assert (await all_of(streams[0]))[-1].finish_reason is FinishReason.ERROR
    await further.accepted()
    assert list(later.engine.requests) == ["b", "b-2"]
    later.die()
    remote.give_up()


async def test_a_request_that_controllers_die_under_ends_in_the_end(monkeypatch):
    monkeypatch.setattr(remote_engine, "MOST_RETURNS", 2)
    remote = remote_engine_with()
    controller = Controller(remote)
    events = await begun(remote, controller)
    for _ in range(3):
        controller.die()
        controller = Controller(remote)
    last = (await all_of(events))[-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, OFTEN_LOST)
    controller.die()
    remote.give_up()


async def test_what_came_with_the_first_token_is_not_asked_for_again_and_times_are_what_clients_saw():
    remote = remote_engine_with()
    controller = Controller(remote)
    begun_one = await begun(remote, controller, "a", 4, prompt_logprobs=1)
    early = remote.submit(request("b", 4, prompt_logprobs=1))
    controller.deliver()
    controller.die()
    later = Controller(remote)
    assert later.engine.requests["a"].params.prompt_logprobs is None
    assert later.engine.requests["b"].params.prompt_logprobs == 1 and not later.engine.requests["b"].resumed
    entry = TokenLogprobs(7, -1.0, 1, ((7, -1.0),))
    later.engine.open["b"][1].put(TokenEvent([], prompt_logprobs=[None, entry]))
    while later.engine.open:
        later.engine.step()
    later.deliver()
    last = (await all_of(begun_one))[-1]
    assert last.timings.first_token_ns == begun_one.first_ns and last.timings.first_scheduled_ns is None
    assert (await all_of(early))[0].prompt_logprobs == [None, entry]
    later.die()
    remote.give_up()
