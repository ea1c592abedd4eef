"""Bytes there and back; nonsense is refused by name."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.core import ports
from jettison.device.step import PromptLogprobsRow, SamplingRow, StepInput, StepOutput
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
    command = codec.decode_command(codec.encode_command(codec.step_command(step)))
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


def test_step_output_and_its_logprobs():
    top = TokenLogprobs(4, -0.5, 1, ((4, -0.5), (2, -1.5)))
    output = StepOutput(9, [SampledToken(4, top), SampledToken(7)], {1: [top, top]})
    event = codec.decode_event(codec.encode_event(codec.step_done(3, output, 55)))
    assert isinstance(event, m.StepDone)
    assert (event.worker_id, event.step_id, event.token_ids, event.compute_ns) == (3, 9, [4, 7], 55)
    assert {i: codec.logprobs_from_record(record) for i, record in event.logprobs.items()} == {0: top}
    assert [codec.logprobs_from_record(record) for record in event.prompt_logprobs[1]] == [top, top]


def test_layouts_survive_the_wire():
    spec = LayoutSpec(frozenset({"embed", "layer:3"}), LayerRange(3, 5), (RetainedKV(LayerRange(0, 3), (1, 4)),))
    command = codec.decode_command(codec.encode_command(m.OfferLayout(1, codec.layout_to_record(spec), 7)))
    assert isinstance(command, m.OfferLayout) and codec.layout_from_record(command.spec) == spec
    offer = LayoutOffer(3, 4, 5)
    assert codec.offer_from_event(codec.layout_offered(0, 1, offer)) == offer
    result = LayoutResult(1, 2, -3, 4, 5, frozenset({"a"}), frozenset({"b", "c"}))
    assert codec.result_from_event(codec.layout_applied(0, 1, result, {})) == result


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\xa4nope", codec.encode_event(m.CallDone(1, 2))])
def test_what_is_no_command_is_refused(data):
    with pytest.raises(codec.CodecError):
        codec.decode_command(data)


def test_what_is_no_event_is_refused():
    with pytest.raises(codec.CodecError):
        codec.decode_event(codec.encode_command(m.Stop()))


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
    top = st.lists(st.tuples(INT32, st.floats(-90, 0)), max_size=6)
    return st.builds(m.SampledRecord, INT32, st.floats(-90, 0), st.integers(1, 2**31 - 1), top)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.integers(0, 300), records(), max_size=6),
    st.dictionaries(st.integers(0, 300), st.lists(records(), min_size=1, max_size=9), max_size=4),
    st.integers(1, 2000),
)
def test_logprobs_in_parts_are_the_same_and_every_part_is_small(logprobs, prompt_logprobs, max_bytes):
    done = m.StepDone(1, 7, [1, 2], 5, logprobs, prompt_logprobs, 1, 2, 3, 4)
    *parts, last = codec.step_answer(done, max_bytes)
    largest = max([32 + 16 * len(r.top) for r in logprobs.values()]
                  + [32 + 16 * len(r.top) for rows in prompt_logprobs.values() for r in rows], default=0)
    for part in parts:
        assert isinstance(part, m.StepLogprobs) and (part.worker_id, part.step_id) == (1, 7)
        assert len(codec.encode_event(part)) <= max(max_bytes, largest) + 32
    assert not parts or len(codec.encode_event(last)) < 100
    arrived = [codec.decode_event(codec.encode_event(event)) for event in (*parts, last)]
    assert codec.with_parts(arrived[-1], arrived[:-1]) == done


def test_a_step_with_more_logprobs_than_a_message_may_have_arrives_whole(monkeypatch):
    assert codec.MAX_LOGPROBS_BYTES + 16 * 1_000_000 < MAX_MESSAGE_BYTES, "room for a token of a million words"
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 1 << 20)
    record = m.SampledRecord(1, -1.5, 3, [(i, -0.25) for i in range(20)])
    done = m.StepDone(0, 9, [4] * 3, 5, {2: record}, {0: [record] * 4000, 2: [record] * 2000})
    with pytest.raises(codec.CodecError):
        list(MessageBuffer().feed(framed(codec.encode_event(done))))
    events = codec.step_answer(done, 1 << 19)
    frames = b"".join(framed(codec.encode_event(event)) for event in events)
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


class RecordingCore:
    def __init__(self):
        self.events = []
        self.groups = {}

    def handle(self, event, now_ns):
        self.events.append(event)
        return []
