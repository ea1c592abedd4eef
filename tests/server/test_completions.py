"""Echo and log-probabilities, the way lm-evaluation-harness reads them."""

from __future__ import annotations

import json

import pytest
from fake_engine import FakeEngine, bytes_of
from served import EOS, sentencepiece_tokenizer, sse_events

LOGLIKELIHOOD = {"model": "fake", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}


async def test_loglikelihood(app_client):
    answer = await app_client.post("/v1/completions", json=LOGLIKELIHOOD | {"prompt": [[104, 105, 33], [97, 98]]})
    first, second = answer.json()["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    logprobs = first["logprobs"]
    assert logprobs["tokens"][:3] == ["h", "i", "!"]
    assert len(logprobs["tokens"]) == 4  # exactly one generated token at the end
    assert logprobs["token_logprobs"][:3] == [None, -1.5, -1.5]
    assert logprobs["top_logprobs"][:2] == [None, {"h": -0.5, "i": -1.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert first["text"][:3] == "hi!"
    # the harness's own sums
    for choice, num_context in ((first, 1), (second, 1)):
        values = choice["logprobs"]["token_logprobs"][num_context:-1]
        tops = choice["logprobs"]["top_logprobs"][num_context:-1]
        assert sum(values) < 0
        assert [value == max(top.values()) for value, top in zip(values, tops, strict=True)] in ([False, False], [True])


async def test_lm_eval_parses_it(app_client):
    models = pytest.importorskip("lm_eval.models.openai_completions")
    answer = await app_client.post("/v1/completions", json=LOGLIKELIHOOD | {"prompt": [[104, 105, 33], [97, 98]]})
    parsed = models.LocalCompletionsAPI.parse_logprobs(answer.json(), tokens=[[104, 105, 33], [97, 98]], ctxlens=[1, 1])
    assert parsed == [(-3.0, False), (-0.5, True)]


async def test_the_end_of_sequence_is_still_one_token(serve):
    async with serve(FakeEngine(lambda request: [EOS])) as served:
        answer = await served.post("/v1/completions", LOGLIKELIHOOD | {"prompt": "hi"})
    (choice,) = answer.json()["choices"]
    assert choice["text"] == "hi"
    assert choice["logprobs"]["tokens"] == ["h", "i", "</s>"]
    assert choice["finish_reason"] == "stop"


async def test_messages_count_only_where_there_are_some(app_client):
    fields = {"prompt": "hi", "max_tokens": 1}
    assert (await app_client.post("/v1/completions", json=fields | {"messages": None})).status_code == 200
    assert (await app_client.post("/v1/completions", json=fields | {"messages": []})).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_but_the_prompt(serve, stream):
    """``max_tokens`` 0: the engine ends the request when its prompt is computed."""
    engine = FakeEngine(bytes_of("zzz"))
    async with serve(engine) as served:
        fields = {"max_tokens": 0, "echo": True, "logprobs": 2, "prompt": "grün"}
        if stream:
            async with serve(engine) as served:
                answer = await served.openai().completions.create(model="fake", **fields, stream=True)
                choices = [chunk.choices[0] async for chunk in answer]
            assert len(choices) == 1
            (choice,) = choices
        else:
            answer = await served.openai().completions.create(model="fake", **fields)
            (choice,) = answer.choices
            assert answer.usage.completion_tokens == 0
            assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert engine.accepted[0].params.max_tokens == 0
    assert (choice.text, choice.finish_reason) == ("grün", "length")
    assert choice.logprobs.tokens == ["g", "r", "bytes:\\xc3", "bytes:\\xbc", "n"]
    assert choice.logprobs.text_offset == [0, 1, 2, 2, 3]


async def test_echo_streams_the_prompt_with_the_first_token(serve):
    async with serve(FakeEngine(bytes_of("xyz"))) as served:
        stream = await served.openai().completions.create(
            model="fake", prompt="ab", max_tokens=2, echo=True, logprobs=0, stream=True)
        first, second = [chunk.choices[0] async for chunk in stream]
    assert (first.text, second.text) == ("abx", "y")
    assert first.logprobs.tokens == ["a", "b", "x"]
    assert first.logprobs.token_logprobs[0] is None
    assert second.logprobs.text_offset == [3]
    assert second.logprobs.top_logprobs == [{"y": -1.5}]


async def test_echo_with_token_ids(app_client):
    body = {"model": "fake", "prompt": [256, 97], "max_tokens": 1, "seed": 0, "echo": True, "return_token_ids": True}
    (choice,) = (await app_client.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == "aa"
    assert choice["token_ids"] == [97]
    assert choice["prompt_token_ids"] == [256, 97]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [None, ["t the"], [" cats "]])
async def test_a_sentencepiece_answer_goes_on_where_the_prompt_ends(serve, stream, echo, stop):
    tokenizer, vocabulary = sentencepiece_tokenizer()
    prompt, output = (
        [vocabulary[word] for word in words] for words in (["<s>", "▁the", "▁cat"], ["▁the", "▁cat", "s", "▁the"]))
    fields = {"prompt": prompt, "echo": echo, "stop": stop, "logprobs": 0, "ignore_eos": True, "stream": stream}
    async with serve(FakeEngine(lambda request: output), tokenizer=tokenizer) as served:
        answer = await served.completion(**fields)
    choices = [json.loads(event)["choices"][0] for event in sse_events(answer.text)[:-1]] if stream else (
        answer.json()["choices"])
    text = "".join(choice["text"] for choice in choices)
    # A stop string that begins in the prompt ("...t the") does not end the answer.
    expected = {None: " the cats the", "t the": " the cats the", " cats ": " the"}[stop and stop[0]]
    assert text == ("the cat" if echo else "") + expected
    if stop is None:
        offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
        assert offsets == ([0, 0, 3, 7, 11, 15, 16] if echo else [0, 4, 8, 9])


async def test_offsets_count_what_a_stop_string_holds_back(serve):
    async with serve(FakeEngine(bytes_of("azbzc"))) as served:
        answer = await served.completion(max_tokens=5, logprobs=0, stop=["zz"])
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == ("azbzc", [0, 1, 2, 3, 4])
