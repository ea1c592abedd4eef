"""The OpenAI SDK against a running ``jettison serve``: what applications see, down to tokens and memory."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import re

import openai
import pytest
from e2e_server import KEY, MODEL, WAIT_S, eventually

pytestmark = pytest.mark.live

PROMPT = "The ship"
MESSAGES = [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "Ahoy!"}]
GREEDY = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 48, "extra_body": {"ignore_eos": True}}
SAMPLED = GREEDY | {"temperature": 1.0, "seed": 7}


def complete(client, **fields):
    return client.completions.create(**GREEDY | fields)


def text_of(client, **fields) -> str:
    return complete(client, **fields).choices[0].text


# --- answers


def test_completion(client):
    answer = complete(client)
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.finish_reason) == ("text_completion", MODEL, "length")
    assert choice.text
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 48)  # a token a byte
    assert answer.usage.total_tokens == len(PROMPT) + 48


def test_chat(client):
    ask = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    answer = client.chat.completions.create(**ask)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    rendered = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in MESSAGES)
    plain = client.completions.create(
        model=MODEL, prompt=rendered + "<|im_start|>assistant\n", max_tokens=24, temperature=0)
    assert choice.message.content == plain.choices[0].text
    assert choice.finish_reason == plain.choices[0].finish_reason
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
    assert answer.usage.completion_tokens == plain.usage.completion_tokens


def test_a_greedy_stream_is_the_whole_answer_in_pieces(client):
    whole = complete(client)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    *chunks, last = chunks
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > 1
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"})


def test_a_chat_stream_is_the_whole_answer_in_pieces(client):
    ask = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    *chunks, last = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert (last.choices, last.usage.completion_tokens) == ([], whole.usage.completion_tokens)


def test_all_prompt_kinds_in_one_batch_agree(client):
    ids = list(PROMPT.encode())  # byte-level: token ids are bytes
    expected = text_of(client)
    assert text_of(client, prompt=ids) == expected
    other = text_of(client, prompt="Land!")
    for prompt in ([PROMPT, "Land!"], [ids, list(b"Land!")]):
        choices = complete(client, prompt=prompt).choices
        assert [(choice.index, choice.text) for choice in choices] == [(0, expected), (1, other)]


# --- log-probabilities


def test_completion_logprobs(client):
    answer = complete(client, logprobs=3, max_tokens=16, extra_body={"ignore_eos": True, "return_token_ids": True})
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 16
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3  # greedy: the token is among them
        assert value == max(top.values()) <= 0


def test_echo_scores_a_prompt_as_it_was_generated(client):
    """Decode and prefill agree on what was likely, and a generated token is the likeliest one when it is read back."""
    made = complete(client, logprobs=1, max_tokens=16, extra_body={"ignore_eos": True, "return_token_ids": True})
    (choice,) = made.choices
    read = complete(client, prompt=[*PROMPT.encode(), *choice.token_ids], logprobs=1, echo=True, max_tokens=1)
    logprobs = read.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert len(logprobs.token_logprobs) == len(PROMPT) + 16 + 1
    generated = slice(len(PROMPT), len(PROMPT) + 16)
    assert logprobs.tokens[generated] == choice.logprobs.tokens
    assert logprobs.token_logprobs[generated] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-3)
    tops = logprobs.top_logprobs[generated]
    assert logprobs.token_logprobs[generated] == [max(top.values()) for top in tops]


def test_prompt_logprobs_are_those_of_an_echo(client):
    """vLLM's field, and what lm-eval reads: the same numbers of the same tokens."""
    extra = {"ignore_eos": True, "prompt_logprobs": 2}
    (choice,) = complete(client, logprobs=2, echo=True, max_tokens=1, extra_body=extra).choices
    positions = choice.model_extra["prompt_logprobs"]
    assert positions[0] is None
    assert len(positions) == len(PROMPT)
    ids = list(PROMPT.encode())
    for at in range(1, len(PROMPT)):
        own = positions[at][str(ids[at])]
        assert own["decoded_token"] == PROMPT[at]
        assert own["logprob"] == choice.logprobs.token_logprobs[at]
        tops = {entry["decoded_token"]: entry["logprob"] for entry in positions[at].values()}
        assert tops == choice.logprobs.top_logprobs[at]
        assert {entry["rank"] for entry in positions[at].values()} >= {1, 2}
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, extra_body={"prompt_logprobs": 0, "return_token_ids": True})
    told, ids = chat.model_extra["prompt_logprobs"], chat.model_extra["prompt_token_ids"]
    assert [entry and list(entry) for entry in told] == [None, *([str(token)] for token in ids[1:])]


def test_allowed_tokens_and_bad_words(client):
    """Of a real sampler, streamed or not, greedy or not."""
    (free,) = complete(client, max_tokens=1, extra_body={"ignore_eos": True, "return_token_ids": True}).choices
    for fields in ({}, {"temperature": 1.5, "seed": 5}):
        extra = {"ignore_eos": True, "return_token_ids": True, "allowed_token_ids": [*b"abc"]}
        (choice,) = complete(client, **fields, max_tokens=24, extra_body=extra).choices
        assert set(choice.text) <= set("abc") and len(choice.token_ids) == 24
        word = choice.text[4:6]
        extra |= {"bad_words": [word]}
        (without,) = complete(client, **fields, max_tokens=24, extra_body=extra).choices
        assert word not in without.text and set(without.text) <= set("abc")
        end = choice.text.index(word) + 1
        assert without.text[:end] == choice.text[:end], "nothing changes before the word would have been complete"
        pieces = complete(client, **fields, max_tokens=24, extra_body=extra, stream=True)
        assert "".join(chunk.choices[0].text for chunk in pieces) == without.text
    named = {"ignore_eos": True, "logprob_token_ids": [free.token_ids[0], 7], "return_tokens_as_token_ids": True}
    (choice,) = complete(client, logprobs=1, max_tokens=1, extra_body=named).choices
    assert set(choice.logprobs.top_logprobs[0]) == {f"token_id:{free.token_ids[0]}", "token_id:7"}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client, stream):
    ask = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2,
           "extra_body": {"ignore_eos": True, "skip_special_tokens": False}}  # fmt: skip
    if stream:
        chunks = list(client.chat.completions.create(**ask, stream=True))
        text = "".join(chunk.choices[0].delta.content for chunk in chunks)
        content = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    else:
        (choice,) = client.chat.completions.create(**ask).choices
        text, content = choice.message.content, choice.logprobs.content
    assert len(content) == 8
    assert bytes(itertools.chain.from_iterable(entry.bytes for entry in content)).decode(errors="replace") == text
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)


# --- sampling


def test_a_seed_repeats_itself_and_another_differs(client):
    first, again, other = (text_of(client, **SAMPLED | {"seed": seed}) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    streamed = "".join(chunk.choices[0].text for chunk in complete(client, **SAMPLED, stream=True))
    assert streamed == first


def test_n_samples_differ_and_repeat(client):
    first, again = (complete(client, **SAMPLED, n=3) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [choice.text for choice in again.choices] == texts
    assert texts[0] == text_of(client, **SAMPLED)  # a sample is the same alone and among others
    assert first.usage.prompt_tokens == len(PROMPT)
    assert first.usage.completion_tokens == 3 * 48


def sample_with_ascii(client) -> tuple[dict, str, re.Match]:
    """A sample, and a place in it fit for a stop string: not at the start, and no broken UTF-8."""
    for seed in range(20):
        fields = SAMPLED | {"seed": seed}
        text = text_of(client, **fields)
        match = re.compile(r"[!-~]{2}").search(text, 6)
        if match is not None:
            return fields, text, match
    raise AssertionError("no sample has two printable characters in a row")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, server, stream):
    fields, text, match = sample_with_ascii(client)
    stop = [match.group(), "never to be seen"]
    if stream:
        chunks = list(complete(client, **fields, stop=stop, stream=True))
        got, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        (choice,) = complete(client, **fields, stop=stop).choices
        got, reason = choice.text, choice.finish_reason
    assert (got, reason) == (text[: text.index(match.group())], "stop")
    server.wait_idle()


# --- errors


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"logprobs": 99}, "logprobs"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
    ],
)
def test_bad_request_names_the_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **fields)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param in caught.value.message


def test_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        complete(client, model="gpt-9")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    assert [model.id for model in client.models.list()] == [MODEL]


def test_authentication(guarded):
    with pytest.raises(openai.AuthenticationError) as caught:
        complete(guarded.client(api_key="wrong"))
    assert caught.value.code == "invalid_api_key"
    assert KEY not in str(caught.value.body)
    assert complete(guarded.client(), max_tokens=2).usage.completion_tokens == 2


# --- leaving, and pressure


@pytest.mark.parametrize("chat", [False, True])
def test_closing_a_stream_frees_its_memory(client, server, chat):
    server.wait_idle()
    cancelled = server.metric("jettison:cancelled_total")
    fields = {"model": MODEL, "max_tokens": 1400, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
    if chat:
        stream = client.chat.completions.create(**fields, messages=MESSAGES)
    else:
        stream = client.completions.create(**fields, prompt=PROMPT)
    for _ in range(3):
        next(stream)
    stream.close()
    server.wait_idle()
    assert server.metric("jettison:cancelled_total") == cancelled + 1


def test_leaving_without_an_answer_frees_the_memory(server):
    """Not streaming: nothing has been written to this client when it goes."""
    server.wait_idle()
    cancelled = server.metric("jettison:cancelled_total")
    connection = http.client.HTTPConnection("127.0.0.1", server.process.port, timeout=WAIT_S)
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 1400, "ignore_eos": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    eventually(lambda: server.metric("vllm:num_requests_running"), "the request runs")
    connection.close()
    server.wait_idle()
    assert server.metric("jettison:cancelled_total") == cancelled + 1


async def test_a_burst_beyond_the_memory_is_answered_in_full(server):
    """64 requests need 576 blocks and there are 192: layers are dropped, none is turned away, layers come back."""
    server.wait_idle()
    drops = server.metric("jettison:drops_total")
    async with server.async_client() as client:

        async def ask(index: int):
            prompt = [index, *range(1, 32)]
            stream = await client.completions.create(
                **GREEDY | {"prompt": prompt, "max_tokens": 112}, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            return chunks[-2].choices[0].finish_reason, chunks[-1].usage.completion_tokens

        assert await asyncio.gather(*(ask(index) for index in range(64))) == [("length", 112)] * 64
    assert server.metric("jettison:drops_total") > drops
    server.wait_idle()
    await asyncio.to_thread(
        eventually, lambda: server.metric("jettison:groups") == 2, "the layers are restored and the instances part")
    assert server.metric("jettison:dropped_parameter_bytes") == 0
