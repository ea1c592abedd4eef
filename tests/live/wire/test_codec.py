"""Bytes there and back; nonsense is refused by name."""

from __future__ import annotations

import contextlib
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.core import ports
from jettison.device.model.identity import FileMark, WeightsIdentity
from jettison.device.step import PromptLogprobsRow, SamplingRow, StepInput
from jettison.live.engine.driver import CoreDriver
from jettison.live.engine.encoder import StepEncoder
from jettison.live.wire import channel, codec
from jettison.live.wire import messages as m
from jettison.live.wire.channel import MAX_MESSAGE_BYTES, MessageBuffer, framed
from jettison.memory.layout import LayoutOffer, LayoutResult, LayoutSpec, RetainedKV
from jettison.types import LayerRange, SampledToken, TokenLogprobs

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)


def int32s(size):
    return st.lists(INT32, min_size=size, max_size=size).map(lambda values: np.array(values, dtype=np.int32))


@st.composite
def steps(draw):
    num_rows, width = draw(st.integers(0, 4)), draw(st.integers(0, 5))
    worker = st.none() | st.integers(0, 1000)
    sampling = st.builds(
        SamplingRow, st.integers(0, 9), st.integers(0, 9), INT64, st.floats(0, 2), st.floats(0, 1), st.integers(0, 9),
        st.floats(0, 1), st.floats(0, 1), logprobs=st.integers(-1, 5),
        banned_token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
        logit_bias=st.lists(st.tuples(st.integers(0, 99), st.floats(-1, 1)), max_size=2).map(tuple),
        prompt_ids=st.binary(max_size=12), output_ids=st.binary(max_size=12), output_counts=st.binary(max_size=12),
    )
    prompt = st.builds(PromptLogprobsRow, st.integers(0, 9), st.integers(0, 5),
                       st.lists(st.integers(0, 99), max_size=3).map(tuple))
    return StepInput(
        step_id=draw(INT64), epoch=draw(INT64), group_id=draw(INT32), layer_lo=draw(INT32), layer_hi=draw(INT32),
        prev_worker=draw(worker), next_worker=draw(worker), token_ids=draw(int32s(draw(st.integers(0, 9)))),
        query_lens=draw(int32s(num_rows)), context_lens=draw(int32s(num_rows)),
        block_tables=draw(int32s(num_rows * width)).reshape(num_rows, width),
        sample_rows=draw(int32s(draw(st.integers(0, num_rows)))),
        safepoint_layers=draw(st.integers(0, 2**31 - 1)),
        follows_step=draw(st.none() | st.integers(0, 2**63 - 1)),
        sheds_from=draw(st.none() | st.integers(0, 2**31 - 1)),
        resumes_step=draw(st.none() | st.integers(0, 2**63 - 1)),
        most_layers=draw(st.none() | st.integers(0, 2**31 - 1)),
        sampling=draw(st.lists(sampling, max_size=2)), prompt_logprobs=draw(st.lists(prompt, max_size=2)),
    )


def same(a, b):
    for name in StepInput.__slots__:
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype == np.int32 and left.shape == right.shape, name
            assert (left == right).all(), name
        else:
            assert left == right, name


@settings(max_examples=40, deadline=None)
@given(steps())
def test_a_step_survives_the_wire(step):
    command = codec.decode_command(codec.encode(codec.step_command(step)))
    assert isinstance(command, m.Step)
    decoded = codec.decode_step(command.payload)
    same(step, decoded)
    decoded.block_tables[:] = 1  # writable, so torch.from_numpy takes it without complaint
    assert decoded.token_ids.ctypes.data % 4 == 0


def test_any_integer_layout_of_arrays_is_accepted():
    tables = np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2]
    step = StepInput(
        step_id=1, layer_lo=0, layer_hi=1, token_ids=np.arange(3), query_lens=np.ones(3, np.int16),
        context_lens=np.zeros(3, np.int32), block_tables=tables, sample_rows=np.arange(3, dtype=np.int32),
    )
    assert (codec.decode_step(codec.encode_step(step)).block_tables == tables).all()


@settings(max_examples=60, deadline=None)
@given(steps(), st.data())
def test_a_broken_step_is_refused_or_readable_but_never_out_of_bounds(step, data):
    payload = bytearray(codec.encode_step(step))
    if data.draw(st.booleans()):
        payload = payload[: data.draw(st.integers(0, len(payload) - 1))]
    else:
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(codec.CodecError):
        codec.decode_step(payload)


def test_rows_that_do_not_agree_are_refused():
    step = StepInput(step_id=1, layer_lo=0, layer_hi=1, token_ids=np.zeros(0, np.int32),
                     query_lens=np.ones(2, np.int32), context_lens=np.ones(3, np.int32),
                     block_tables=np.zeros((2, 1), np.int32), sample_rows=np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="context lengths"):
        codec.encode_step(step)


def there_and_back(message):
    decode = codec.decode_event if type(message) in get_args(m.Event) else codec.decode_command
    return decode(codec.encode(message))


WEIGHTS = WeightsIdentity({"embed": "aa"}, b"norm", "bb", {"a.safetensors": FileMark(1, 2, 3, 4)})
TOP = TokenLogprobs(4, -0.5, 1, ((4, -0.5), (2, -1.5)))
SPEC = LayoutSpec(frozenset({"embed", "layer:3"}), LayerRange(3, 5), (RetainedKV(LayerRange(0, 3), (1, 4)),))


@pytest.mark.parametrize("message", [
    ports.OfferLayout(1, 2, SPEC, 7),
    ports.ApplyLayout(1, 2, SPEC, 7, 3, ((1, 2), (3, 4))),
    ports.SendKV(2**40, 0, 1, LayerRange(0, 28), (1, 2), (3, 4), urgent=True, beside_steps=True),
    ports.SendShard(1, 0, 1, "layer:3"),
    ports.LoadShard(1, 2, "embed"),
    ports.KeepShard(1, 2, "head"),
    ports.CancelTransfer(0, 9),
    ports.FenceWorker(1, 2, 0, 3),
    m.AdoptWeights(WEIGHTS),
    m.TakeOver(2, b"signed"),
    m.KnowPeers([m.PeerAddress(1, 2, "unix:/somewhere/link-1.2")]),
    m.ForgetPeer(1, 2),
    m.ReportMemory(4),
    m.Certificate(b"-----BEGIN CERTIFICATE-----", b"authority"),
    m.Stop(),
    m.CertificateWanted(3, b"\0token", b"request\xff"),
    m.WorkerReady(0, 99, 8, 1, "native", {"kv": 3}, WEIGHTS, 5, 6),
    m.WorkerStartFailed(0, "ModelError", "none", True),
    m.StepDone(3, ports.StepCompleted(9, [SampledToken(4, TOP), SampledToken(7)], {1: [TOP, TOP]}, 55), 1, 2, 3, 4),
    m.StepLogprobs(3, 9, {0: TOP}, {2: [TOP]}),
    m.StageDone(3, 9, 55, 1, 2, 3, 4),
    m.MemoryReported(0, 1, {"kv": 3}),
    ports.StepFailed(9, "no", 2, True),
    ports.StepAbandoned(9),
    ports.LayoutOffered(0, 1, LayoutOffer(3, 4, 5)),
    ports.LayoutApplied(0, 1, LayoutResult(1, 2, -3, 4, 5, frozenset({"a"}), frozenset({"b", "c"}))),
    ports.ShardLoaded(0, 1),
    ports.CallFailed(0, 1, "ModelError: truncated"),
    ports.TransferEnded(1, True, 2, 3),
    ports.LinkLost(0, 1, 2),
    ports.WorkerFenced(0, 1),
], ids=lambda message: type(message).__name__)  # fmt: skip
def test_every_message_survives_the_wire(message):
    assert there_and_back(message) == message and type(there_and_back(message)) is type(message)


def test_the_list_above_is_whole():
    marks = test_every_message_survives_the_wire.pytestmark
    told = {type(message) for mark in marks for message in mark.args[1]}
    assert told == {*get_args(m.Command), *get_args(m.Event)} - {m.Step}


@pytest.mark.parametrize("data", [
    b"", b"\xff", b"\x00nope", codec.encode(ports.ShardLoaded(1, 2)), codec.encode(m.Stop()) + b"\0",
])  # fmt: skip
def test_what_is_no_command_is_refused(data):
    with pytest.raises(codec.CodecError):
        codec.decode_command(data)


def test_what_is_no_event_is_refused():
    with pytest.raises(codec.CodecError):
        codec.decode_event(codec.encode(m.Stop()))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=50)), st.data())
def test_messages_are_cut_right_however_the_bytes_come(messages, data):
    stream = b"".join(map(framed, messages))
    buffer, got = MessageBuffer(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        got += buffer.feed(stream[:cut])
        stream = stream[cut:]
    assert got == messages


def test_an_impossible_length_is_refused():
    with pytest.raises(codec.CodecError):
        list(MessageBuffer().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little")))


def records():
    top = st.lists(st.tuples(INT32, st.floats(-90, 0)), max_size=6).map(tuple)
    return st.builds(TokenLogprobs, INT32, st.floats(-90, 0), st.integers(1, 2**31 - 1), top)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.none() | records(), max_size=6),
    st.dictionaries(st.integers(0, 300), st.lists(records(), min_size=1, max_size=9), max_size=4),
    st.integers(1, 2000),
)
def test_logprobs_in_parts_are_the_same_and_every_part_is_small(logprobs, prompt_logprobs, max_bytes):
    tokens = [SampledToken(place, entry) for place, entry in enumerate(logprobs)]
    done = m.StepDone(1, ports.StepCompleted(7, tokens, prompt_logprobs, 5), 1, 2, 3, 4)
    *parts, last = codec.step_answer(done, max_bytes)
    largest = max([32 + 16 * len(r.top) for r in logprobs if r is not None]
                  + [32 + 16 * len(r.top) for rows in prompt_logprobs.values() for r in rows], default=0)
    for part in parts:
        assert isinstance(part, m.StepLogprobs) and (part.worker_id, part.step_id) == (1, 7)
        assert len(codec.encode(part)) <= max(max_bytes, largest) + 32
    assert not parts or len(codec.encode(last)) < 100
    *arrived, end = map(there_and_back, (*parts, last))
    assert codec.with_parts(end.completed, arrived) == done.completed


def test_a_step_with_more_logprobs_than_a_message_may_have_arrives_whole(monkeypatch):
    assert codec.MAX_LOGPROBS_BYTES + 16 * 1_000_000 < MAX_MESSAGE_BYTES, "room for a token of a million words"
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 1 << 20)
    record = TokenLogprobs(1, -1.5, 3, tuple((i, -0.25) for i in range(20)))
    tokens = [SampledToken(4), SampledToken(4), SampledToken(4, record)]
    done = m.StepDone(0, ports.StepCompleted(9, tokens, {0: [record] * 4000, 2: [record] * 2000}, 5))
    with pytest.raises(codec.CodecError):
        list(MessageBuffer().feed(framed(codec.encode(done))))
    events = codec.step_answer(done, 1 << 19)
    frames = b"".join(framed(codec.encode(event)) for event in events)
    core = RecordingCore()
    driver = CoreDriver(core, StepEncoder({}, 4, frozenset()), None, None, None, None)
    driver.on_worker_event(m.StepLogprobs(3, 8, {0: record}), 0)  # of a worker that dies before it is through
    driver.handle(ports.WorkerLost(3), 0)
    for message in MessageBuffer().feed(frames):
        driver.on_worker_event(codec.decode_event(message), 0)
    _, completed = core.events
    assert [len(completed.prompt_logprobs[row]) for row in (0, 2)] == [4000, 2000]
    assert completed.tokens[2].logprobs == completed.prompt_logprobs[2][-1] and completed.tokens[0].logprobs is None
    assert not driver._parts


def test_a_step_of_which_any_stage_has_prepared_others_says_so():
    core = RecordingCore()
    driver = CoreDriver(core, StepEncoder({}, 4, frozenset()), None, None, None, None)
    for step_id, first, last in ((1, True, False), (2, False, True), (3, False, False)):
        driver.on_worker_event(there_and_back(m.StageDone(0, step_id, 5, has_prepared=first)), 0)
        done = m.StepDone(1, ports.StepCompleted(step_id, [], {}, 5, None, last))
        driver.on_worker_event(there_and_back(done), 0)
    assert [(event.step_id, event.has_prepared) for event in core.events] == [(1, True), (2, True), (3, False)]


class RecordingCore:
    def __init__(self):
        self.events = []
        self.groups = {}

    def handle(self, event, now_ns):
        self.events.append(event)
        return []
