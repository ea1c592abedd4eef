from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.workload.stream import StreamMeter


def sse(chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def token(text: str = "a", reason: str | None = None) -> bytes:
    return sse({"choices": [{"index": 0, "text": text, "finish_reason": reason}], "usage": None})


USAGE = sse({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}})
DONE = b"data: [DONE]\n\n"
ANSWER = (
    token() + b": keep-alive\n\n" + token('"error" "choices":[] {"usage": 1}') + token("c", "length") + USAGE + DONE
)


@given(cuts=st.lists(st.integers(0, len(ANSWER)), max_size=30))
def test_an_answer_reads_the_same_however_it_is_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(ANSWER)]
    meter = StreamMeter()
    for index, (start, end) in enumerate(pairwise(edges)):
        meter.feed(ANSWER[start:end], float(index))
    assert (meter.num_chunks, meter.completion_tokens, meter.output_tokens) == (3, 3, 3)
    assert meter.done and meter.error is None and meter.finish_reason == "length"
    assert len(meter.gaps_s) == 2
    assert meter.first_s is not None and meter.last_s == pytest.approx(meter.first_s + sum(meter.gaps_s))


def test_times_are_those_of_the_reads() -> None:
    meter = StreamMeter()
    for at_s, data in (
        (1.0, b": queued\n\n"),
        (2.5, token()),
        (3.0, token() + token()),
        (5.0, token("", "stop") + DONE),
    ):
        meter.feed(data, at_s)
    assert meter.first_s == 2.5
    assert meter.gaps_s == [0.5, 0.0]  # the closing chunk carries no token
    assert meter.output_tokens == 3


def test_the_first_chunk_with_choices_counts_even_without_text() -> None:
    meter = StreamMeter()
    meter.feed(sse({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}), 1.0)
    assert meter.first_s == 1.0


def test_a_chat_chunk_that_closes_with_text_is_a_token() -> None:
    meter = StreamMeter()
    meter.feed(sse({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}), 1.0)
    meter.feed(sse({"choices": [{"delta": {"content": "b"}, "finish_reason": "length"}]}), 2.0)
    assert meter.gaps_s == [1.0]


@pytest.mark.parametrize("line_end", [b"\r\n\r\n", b"\n"])
def test_other_line_ends_are_read(line_end: bytes) -> None:
    meter = StreamMeter()
    meter.feed(ANSWER.replace(b"\n\n", line_end), 1.0)
    assert meter.num_chunks == 3 and meter.done


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (sse({"error": {"message": "device lost", "type": "server_error"}}), "device lost"),
        (sse({"error": "plain"}), "plain"),
        (b"data: {\n\n", "a chunk is not JSON"),
        (b"data: [1]\n\n", "a chunk is not a JSON object"),
    ],
)
@pytest.mark.parametrize("before", [b"", token()])
def test_errors_in_the_stream_are_kept(before: bytes, data: bytes, error: str) -> None:
    meter = StreamMeter()
    meter.feed(before + data + DONE, 1.0)
    assert meter.error == error


def test_without_usage_chunks_are_counted() -> None:
    meter = StreamMeter()
    meter.feed(token() * 5 + DONE, 1.0)
    assert meter.completion_tokens is None and meter.output_tokens == 5
