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


def chat(delta: object, reason: str | None = None, **more: object) -> bytes:
    return sse({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], **more})


def usage(num_tokens: int, **more: object) -> bytes:
    return sse({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": num_tokens}, **more})


ROLE = chat({"role": "assistant", "content": ""})
TOKEN = chat({"content": "a"})
LITELLM_ROLE = chat({
    "provider_specific_fields": None, "refusal": None, "content": "", "role": "assistant", "function_call": None,
    "tool_calls": None, "audio": None,
})  # fmt: skip
CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}

OPENINGS = {
    "none": [],
    "role, empty content (OpenAI, vLLM, SGLang)": [ROLE],
    "role, content null (llama-server)": [chat({"role": "assistant", "content": None})],
    "role alone": [chat({"role": "assistant"})],
    "LiteLLM's": [LITELLM_ROLE],
    "role with reasoning null": [chat({"role": "assistant", "content": "", "reasoning_content": None})],
    "empty content": [chat({"content": ""})],
    "empty delta": [chat({})],
    "no delta": [sse({"choices": [{"index": 0, "finish_reason": None}]})],
    "role twice": [ROLE, ROLE],
    "usage first": [usage(0)],
    "usage in each": [chat({"role": "assistant", "content": ""}, usage={"completion_tokens": 0})],
    "choices null": [sse({"choices": None})],
    "Azure's filter": [sse({"choices": [], "prompt_filter_results": [{"prompt_index": 0}]}), ROLE],
    "keep-alive": [b": keep-alive\n\n", ROLE, b": OPENROUTER PROCESSING\n\n"],
    "ping": [b"event: ping\ndata: {\"type\": \"ping\"}\n\n", ROLE],
    "keys of nothing": [chat({"role": "assistant", "content": "", "reasoning_content": None, "tool_calls": None})],
    "empty logprobs": [sse({"choices": [{"delta": {"role": "assistant"}, "logprobs": {"content": []}}]})],
}


@pytest.mark.parametrize("opening", OPENINGS.values(), ids=OPENINGS.keys())
@pytest.mark.parametrize("end", [chat({}, "length"), chat({"content": ""}, "stop")], ids=["length", "stop"])
@pytest.mark.parametrize("counts", [True, False], ids=["usage", "no usage"])
def test_the_clock_starts_at_the_first_token_whatever_opens_the_stream(
    opening: list[bytes], end: bytes, counts: bool
) -> None:
    """Once the role frame of a server that opens a stream before it reads the prompt was its first token: TTFT 3 ms of
    1 s, TPOT 161 ms of 50."""
    meter = StreamMeter()
    for frame in opening:
        meter.feed(frame, 0.003)
    for index in range(10):
        meter.feed(TOKEN, 1.0 + 0.05 * index)
    meter.feed(end, 1.5)
    meter.feed((usage(10) if counts else b"") + DONE, 1.5)
    meter.close()
    assert meter.error is None and meter.done
    assert meter.first_s == 1.0 and meter.output_tokens == meter.num_chunks == 10
    assert meter.gaps_s == pytest.approx([0.05] * 9)
    opens = any(b'"delta"' in frame or b'"index"' in frame for frame in opening)
    assert meter.first_chunk_s == (0.003 if opens else 1.0)


@pytest.mark.parametrize("delta", [
    {"content": "a"}, {"content": " "}, {"role": "assistant", "content": "a"}, {"reasoning_content": "a"},
    {"reasoning": "a"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"refusal": "No"},
    {"function_call": {"name": "f", "arguments": ""}}, {"content": [{"type": "text", "text": "a"}]},
    {"thinking_blocks": [{"type": "thinking", "thinking": "a"}]},
])  # fmt: skip
def test_whatever_a_model_generates_is_a_token(delta: dict) -> None:
    meter = StreamMeter()
    meter.feed(ROLE, 0.5)
    meter.feed(chat(delta), 1.0)
    assert (meter.first_chunk_s, meter.first_s, meter.num_chunks) == (0.5, 1.0, 1)


@pytest.mark.parametrize("choice", [
    {"index": 0, "text": "", "token_ids": [5]}, {"index": 0, "text": "", "logprobs": {"tokens": [""]}},
    {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": {"content": [{"token": ""}]}},
])  # fmt: skip
def test_a_token_that_is_named_needs_no_text(choice: dict) -> None:
    meter = StreamMeter()
    meter.feed(sse({"choices": [choice | {"finish_reason": None}]}), 1.0)
    assert meter.first_s == 1.0


def test_a_chunk_that_counts_tokens_is_one() -> None:
    """With ``continuous_usage_stats`` the server says how many there are by now."""
    meter = StreamMeter()
    meter.feed(chat({"role": "assistant", "content": ""}, usage={"completion_tokens": 1}), 1.0)
    assert meter.first_s == 1.0


@pytest.mark.parametrize("end", [token("", "length"), token("x", "length"), token("", "stop")])
def test_tokens_whose_text_is_held_back_are_tokens_where_the_count_says_so(end: bytes) -> None:
    """A server sends a chunk for a token that is a part of a character, or that may begin a stop string."""
    num_closing = 0 if end == token("", "length") else 1
    meter = StreamMeter()
    for index, frame in enumerate([token(""), token(""), token("\u20ac"), token("b"), end]):
        meter.feed(frame, float(index))
    meter.feed(usage(4 + num_closing) + DONE, 5.0)
    meter.close()
    assert meter.first_s == 0.0 and meter.output_tokens == 4 + num_closing
    assert meter.gaps_s == [1.0] * (4 if end == token("x", "length") else 3)


def test_a_role_that_is_null_is_none() -> None:
    """SGLang writes the key into every chunk."""
    meter = StreamMeter()
    for index, delta in enumerate([{"role": "assistant", "content": ""}, {"role": None, "content": ""},
                                   {"role": None, "content": "\u20ac"}]):  # fmt: skip
        meter.feed(chat(delta), float(index))
    meter.feed(chat({"role": None, "content": None}, "length") + usage(2) + DONE, 3.0)
    meter.close()
    assert (meter.first_chunk_s, meter.first_s, meter.gaps_s) == (0.0, 1.0, [1.0])


def test_an_answer_without_text_has_its_tokens() -> None:
    """All of one character's bytes that never end, say; of one token, which is where it ends."""
    held, single, empty = StreamMeter(), StreamMeter(), StreamMeter()
    for index, frame in enumerate([token(""), token(""), token("", "length"), usage(3), DONE]):
        held.feed(frame, float(index))
    for index, frame in enumerate([ROLE, chat({}, "length"), usage(1), DONE]):
        single.feed(frame, float(index))
    for index, frame in enumerate([ROLE, chat({}, "stop"), usage(0), DONE]):
        empty.feed(frame, float(index))
    for meter in (held, single, empty):
        meter.close()
    assert (held.first_s, held.gaps_s, held.output_tokens, held.num_seen) == (0.0, [1.0], 3, 2)
    assert (single.first_chunk_s, single.first_s, single.output_tokens) == (0.0, 1.0, 1)
    assert (empty.first_chunk_s, empty.first_s, empty.output_tokens) == (0.0, None, 0)


def test_a_frame_that_opens_is_no_token_where_several_come_together() -> None:
    meter = StreamMeter()
    for at_s, frame in ((0.0, chat({"content": ""})), (1.0, TOKEN), (2.0, TOKEN), (2.0, chat({}, "length"))):
        meter.feed(frame, at_s)
    meter.feed(usage(8) + DONE, 2.0)
    meter.close()
    assert meter.first_s == 1.0 and meter.gaps_s == [1.0]


def test_what_comes_behind_the_end_is_no_token() -> None:
    """LiteLLM's last chunk has usage and a choice."""
    meter = StreamMeter()
    meter.feed(LITELLM_ROLE + TOKEN, 1.0)
    meter.feed(TOKEN + chat({}, "stop") + chat({}, usage={"completion_tokens": 2}) + DONE, 2.0)
    meter.close()
    assert meter.gaps_s == [1.0] and meter.output_tokens == 2 and meter.finish_reason == "stop"


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
