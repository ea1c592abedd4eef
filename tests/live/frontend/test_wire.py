"""Every message between a front end and the controller survives its bytes, however these are cut."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.errors import (
    JettisonError,
    KeyLimitError,
    NotReadyError,
    OverCapacityError,
    RequestError,
    TooLongError,
    WorkerLostError,
)
from jettison.live.engine.api import EngineInfo, RequestTimings, TokenEvent
from jettison.live.frontend import wire as w
from jettison.live.wire.channel import MAX_MESSAGE_BYTES
from jettison.types import (
    FinishReason,
    Grammar,
    Request,
    SampledToken,
    SamplingParams,
    ServiceClass,
    TokenLogprobs,
)

NUMBERS = st.integers(0, 2**31 - 1)
TIMES = st.integers(0, 2**62)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
RAW = st.builds(w.packed, st.one_of(NUMBERS, TEXTS, st.lists(NUMBERS, max_size=4), st.binary(max_size=9)))
TOKENS = st.builds(
    SampledToken, NUMBERS,
    st.none() | st.builds(
        TokenLogprobs, NUMBERS, st.floats(-50, 0), NUMBERS,
        st.lists(st.tuples(NUMBERS, st.floats(-50, 0)), max_size=3).map(tuple)))
PARAMS = st.builds(
    SamplingParams, max_tokens=NUMBERS, temperature=st.floats(0, 2), top_k=st.none() | NUMBERS,
    seed=st.integers(0, 2**63 - 1), stop_token_ids=st.lists(NUMBERS, max_size=3).map(tuple),
    logprobs=st.none() | NUMBERS, logit_bias=st.lists(st.tuples(NUMBERS, st.floats(-9, 9)), max_size=3).map(tuple),
    allowed_token_ids=st.binary(max_size=9), bad_words=st.lists(st.lists(NUMBERS, max_size=3).map(tuple)).map(tuple),
    grammar=st.none() | st.builds(Grammar, TEXTS, TEXTS))
REQUESTS = st.builds(
    Request, request_id=TEXTS, prompt_token_ids=st.lists(NUMBERS, max_size=9).map(tuple), params=PARAMS,
    arrival_ns=TIMES, priority=st.integers(-9, 9), cache_salt=TEXTS, tenant=TEXTS,
    service_class=st.sampled_from(ServiceClass), deadline_ns=st.none() | TIMES,
    resumed=st.lists(NUMBERS, max_size=4).map(tuple))
EVENTS = st.builds(
    TokenEvent, st.lists(TOKENS, max_size=3), st.none() | st.sampled_from(FinishReason), st.none() | NUMBERS,
    st.none() | TEXTS, st.none() | st.lists(st.none(), max_size=2), NUMBERS,
    st.none() | st.builds(RequestTimings, TIMES, st.none() | TIMES, st.none() | TIMES, st.none() | TIMES, NUMBERS))
REFUSALS = st.builds(w.Refusal, TEXTS, TEXTS, NUMBERS, st.none() | TEXTS, st.none() | TEXTS)

MESSAGES = {
    w.Arrive: st.builds(w.Arrive, NUMBERS, TEXTS),
    w.Claim: st.builds(w.Claim, NUMBERS, NUMBERS, NUMBERS, TEXTS),
    w.Submit: st.builds(w.Submit, NUMBERS, REQUESTS, st.booleans(), st.none() | NUMBERS),
    w.Came: st.builds(w.Came, NUMBERS),
    w.Landed: st.builds(w.Landed, NUMBERS, st.booleans()),
    w.Leave: st.builds(w.Leave, NUMBERS),
    w.Cancel: st.builds(w.Cancel, TEXTS),
    w.FinishEarly: st.builds(w.FinishEarly, TEXTS),
    w.Note: st.builds(w.Note, TEXTS, RAW),
    w.Ask: st.builds(w.Ask, NUMBERS, TEXTS, RAW),
    w.Serves: st.builds(w.Serves),
    w.Hello: st.builds(w.Hello, NUMBERS, NUMBERS),
    w.Return: st.builds(w.Return, NUMBERS, TEXTS, NUMBERS),
    w.Resubmit: st.builds(w.Resubmit, NUMBERS, REQUESTS),
    w.Status: st.builds(
        w.Status, st.sampled_from(["loading", "ready", "draining", "failed"]), st.none() | st.floats(0, 9),
        st.none() | st.builds(EngineInfo, TEXTS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.just((1, 2))),
        st.none() | st.floats(0, 9), st.none() | st.floats(0, 9), st.lists(st.binary(max_size=32)).map(tuple)),
    w.Accepted: st.builds(w.Accepted, NUMBERS),
    w.Refused: st.builds(w.Refused, NUMBERS, REFUSALS),
    w.Tokens: st.builds(w.Tokens, st.lists(NUMBERS, max_size=8)),
    w.Event: st.builds(w.Event, NUMBERS, EVENTS),
    w.Answer: st.builds(w.Answer, NUMBERS, st.none() | REFUSALS, st.booleans(), st.none() | st.binary(max_size=9)),
    w.Abort: st.builds(w.Abort, TEXTS),
    w.Tell: st.builds(w.Tell),
    w.Stop: st.builds(w.Stop),
}


def test_there_is_a_strategy_for_every_message():
    assert set(MESSAGES) == {*get_args(w.FromFront), *get_args(w.FromController)}


@pytest.mark.parametrize("is_from_front", [True, False])
def test_frames_come_out_as_they_went_in(is_from_front):
    kinds = get_args(w.FromFront if is_from_front else w.FromController)
    one = st.one_of([MESSAGES[kind] for kind in kinds])

    @given(st.lists(st.lists(one, max_size=4), max_size=3), st.integers(1, 64))
    def check(turns, num_bytes):
        data = b"".join(map(w.encode_frame, turns))
        frames = w.Frames(is_from_front=is_from_front)
        found = [m for at in range(0, len(data), num_bytes) for m in frames.feed(data[at : at + num_bytes])]
        assert found == [message for turn in turns for message in turn]

    check()


@given(st.binary(max_size=40))
def test_other_bytes_are_refused_or_wait_for_more(data):
    frames = w.Frames(is_from_front=True)
    try:
        messages = list(frames.feed(data))
    except w.CodecError:
        return
    assert all(isinstance(message, get_args(w.FromFront)) for message in messages)


def test_a_message_of_the_other_direction_is_refused():
    with pytest.raises(w.CodecError):
        list(w.Frames(is_from_front=True).feed(w.encode_frame([w.Stop()])))


@pytest.mark.parametrize("error", [
    KeyLimitError("k", 7), OverCapacityError("o", 8), NotReadyError("n", 9), TooLongError("t", "max_tokens", "c"),
    RequestError("r", "prompt"),
])  # fmt: skip
def test_a_refusal_is_raised_as_what_it_was(error):
    again = w.error_of(msgspec.msgpack.decode(msgspec.msgpack.encode(w.refusal_of(error)), type=w.Refusal))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_any_other_error_is_a_failure_of_the_server():
    assert type(w.error_of(w.refusal_of(WorkerLostError("gone")))) is JettisonError


def test_what_is_much_comes_in_frames_of_which_none_is_long():
    messages = [w.Note("t", w.packed(b"x" * (w.FRAME_BYTES // 3))) for _ in range(10)]
    frames = w.encode_frames(messages)
    assert len(frames) == 5 and max(map(len, frames)) <= w.FRAME_BYTES + 8
    reader = w.Frames(is_from_front=True)
    assert [message for frame in frames for message in reader.feed(frame)] == messages


def test_one_message_may_be_longer_than_any_of_a_worker():
    message = w.Note("t", w.packed(b"x" * (MAX_MESSAGE_BYTES + 1)))
    (frame,) = w.encode_frames([message])
    assert list(w.Frames(is_from_front=True).feed(frame)) == [message]
