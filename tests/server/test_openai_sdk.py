"""The OpenAI SDK against a real server: what a client's own code sees."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from fake_engine import FakeEngine, bytes_of
from served import EOS, eventually, sse_events


async def test_chat(serve):
    async with serve(FakeEngine(bytes_of("grüße"))) as served:
        answer = await served.openai().chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=14, service_tier="priority",
            extra_headers={"x-request-id": "mine"})  # fmt: skip
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.service_tier == "default"
    assert answer._request_id == "mine"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "grüßegrüße")
    assert choice.finish_reason == "length"
    prompt = "user: hi\nassistant: "
    assert answer.usage.prompt_tokens == 1 + len(prompt)
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (14, 15 + len(prompt))
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_chat_streams_role_with_the_first_token_and_usage_last(serve):
    engine = FakeEngine(bytes_of("grüße"))
    async with serve(engine) as served:
        stream = await served.openai().chat.completions.create(
            model="fake", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            max_completion_tokens=7, stream=True, stream_options={"include_usage": True})  # fmt: skip
        chunks = [chunk async for chunk in stream]
    *chunks, usage = chunks
    assert usage.choices == []
    assert usage.usage.completion_tokens == 7
    assert len(chunks) == 7  # one a token, with or without text
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + 6 * [None]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "grüße"
    assert [chunk.choices[0].delta.content for chunk in chunks][2:4] == ["", "ü"]  # incomplete UTF-8 is held back
    assert [chunk.choices[0].finish_reason for chunk in chunks] == 6 * [None] + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_chat_logprobs(serve):
    async with serve(FakeEngine(bytes_of("é!"))) as served:
        answer = await served.openai().chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=3, logprobs=True, top_logprobs=2)
        stream = await served.openai().chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=3, logprobs=True, stream=True)
        streamed = [chunk.choices[0].logprobs.content async for chunk in stream]
    content = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[0xC3], [0xA9], [0x21]]
    assert [entry.token for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert [entry.logprob for entry in content] == [-1.5, -1.5, -1.5]
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert [[entry.token for entry in part] for part in streamed] == [[entry.token] for entry in content]
    assert streamed[0][0].top_logprobs == []


async def test_end_of_sequence_is_no_text(serve):
    def script(request):
        return [*b"ok", EOS, *b"never"]

    async with serve(FakeEngine(script)) as served:
        answer = await served.openai().chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=20)
        ignoring = await served.openai().chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=5,
            extra_body={"ignore_eos": True, "skip_special_tokens": False})  # fmt: skip
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("ok", "stop")
    assert answer.usage.completion_tokens == 3
    assert (ignoring.choices[0].message.content, ignoring.choices[0].finish_reason) == ("ok</s>ne", "length")


async def test_completions_of_every_prompt_kind(serve):
    engine = FakeEngine(bytes_of("xyz"))
    async with serve(engine) as served:
        client = served.openai()
        for prompt, ids in (
            ("ab", [[97, 98]]),
            (["ab", "c"], [[97, 98], [99]]),
            ([97, 98], [[97, 98]]),
            ([[97, 98], [99]], [[97, 98], [99]]),
        ):
            engine.accepted.clear()
            answer = await client.completions.create(model="alias", prompt=prompt, max_tokens=3)
            assert [list(request.prompt_token_ids) for request in engine.accepted] == ids
            assert [choice.index for choice in answer.choices] == list(range(len(ids)))
            assert [choice.text for choice in answer.choices] == ["xyz"] * len(ids)
            assert answer.usage.prompt_tokens == sum(map(len, ids))
            assert answer.model == "fake", "answers carry the first name"


async def test_samples_have_neighbouring_seeds_and_merge_by_index(serve):
    engine = FakeEngine()
    async with serve(engine) as served:
        fields = {"model": "fake", "prompt": ["p", "q"], "n": 2, "max_tokens": 3, "seed": 1}
        whole = await served.openai().completions.create(**fields)
        texts = {choice.index: "" for choice in whole.choices}
        async for chunk in await served.openai().completions.create(**fields, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in whole.choices] == ["bcd", "cde", "bcd", "cde"]  # a prompt is the same in a batch
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert whole.usage.prompt_tokens == 2
    assert whole.usage.completion_tokens == 12
    ids = [request.request_id for request in engine.accepted]
    assert len(set(ids)) == 8


async def test_prompts_of_a_request_without_a_seed_are_not_drawn_alike(serve):
    """Harnesses ask for k answers with k times the same prompt."""
    series = []
    for _ in range(2):
        engine = FakeEngine()
        async with serve(engine) as served:
            for fields in ({"prompt": ["p"] * 4}, {"prompt": [[112]] * 4, "echo": True, "seed": -1}):
                await served.post("/v1/completions", fields | {"model": "fake", "n": 2, "max_tokens": 1})
        seeds = [request.params.seed for request in engine.accepted]
        assert len(set(seeds)) == 16
        assert all(second == first + 1 for first, second in zip(seeds[::2], seeds[1::2], strict=True))
        series.append(seeds)
    assert series[0] == series[1], "they follow from the server's seed"


async def test_requests_without_a_seed_differ_and_the_series_repeats(serve):
    seeds = []
    for _ in range(2):
        engine = FakeEngine()
        async with serve(engine) as served:
            for _ in range(2):
                await served.completion(max_tokens=1)
        seeds.append([request.params.seed for request in engine.accepted])
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_cross_tokens_and_truncate(serve, stream):
    engine = FakeEngine(bytes_of("one, two, three"), delay_s=0.001)
    async with serve(engine) as served:
        fields = {"model": "fake", "prompt": "p", "max_tokens": 40, "stop": ["two, f", "o, th"]}
        if stream:
            chunks = [chunk async for chunk in await served.openai().completions.create(**fields, stream=True)]
            text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
        else:
            answer = await served.openai().completions.create(**fields)
            text, reason = answer.choices[0].text, answer.choices[0].finish_reason
            assert answer.usage.completion_tokens == len("one, two, th")
    assert (text, reason) == ("one, tw", "stop")
    assert len(engine.finished_early) == 1
    assert not engine.cancelled
    assert not engine.running


STOPPED = [
    ({"stop": ["two, f", "o, th"]}, "stop", "o, th"),
    ({"stop": ["x", "w"], "stop_token_ids": [ord("t")]}, "stop", ord("t")),
    ({"stop": ["t"], "stop_token_ids": [ord("t")], "include_stop_str_in_output": True}, "stop", "t"),
    ({"stop_token_ids": [EOS]}, "stop", EOS),
    ({"stop": ["x"], "stop_token_ids": [ord("x")]}, "stop", None),
    ({"stop": ["two"], "max_tokens": 3}, "length", None),
]


@pytest.mark.parametrize(("fields", "reason", "stopped"), STOPPED)
async def test_a_choice_tells_what_stopped_it(fields, reason, stopped, serve):
    """As vLLM's do: the stop string, or the token of ``stop_token_ids``; an end of the model's own is none of them."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with serve(FakeEngine(lambda request: [*b"one, two, three", EOS])) as served:
        for path, asked in (("completions", {"prompt": "p"}), ("chat/completions", chat)):
            body = {"model": "fake", "max_tokens": 40, "n": 2} | asked | fields
            whole = (await served.post(f"/v1/{path}", body)).json()["choices"]
            assert [(choice["finish_reason"], choice["stop_reason"]) for choice in whole] == [(reason, stopped)] * 2
            answer = await served.post(f"/v1/{path}", body | {"stream": True})
            told = [choice for event in sse_events(answer.text)[:-1] for choice in json.loads(event)["choices"]]
            last = [choice for choice in told if choice["finish_reason"] is not None]
            assert [(choice["finish_reason"], choice["stop_reason"]) for choice in last] == [(reason, stopped)] * 2
            assert not any("stop_reason" in choice for choice in told if choice not in last)


async def test_stop_strings_wait_for_min_tokens(serve):
    async with serve(FakeEngine(bytes_of("a."))) as served:
        answer = await served.openai().completions.create(
            model="fake", prompt="p", max_tokens=20, stop=".", extra_body={"min_tokens": 4})
    assert answer.choices[0].text == "a.a.a"


async def test_sampling_fields_reach_the_engine(serve):
    engine = FakeEngine()
    async with serve(engine) as served:
        await served.openai().completions.create(
            model="fake", prompt="p", max_tokens=5, temperature=0.5, top_p=0.9, presence_penalty=0.1,
            frequency_penalty=0.2, seed=-2, logit_bias={"65": -100}, logprobs=3, user="u",
            extra_body={"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [7],
                        "ignore_eos": True, "priority": -3, "metadata": {"a": "b"}, "mystery": 1})  # fmt: skip
    (request,) = engine.accepted
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (5, 0.5, 0.9, 5, 0.05)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.1)
    assert (params.seed, params.min_tokens, params.stop_token_ids) == (2**63 - 2, 2, (7,))
    assert (params.ignore_eos, params.logprobs, params.logit_bias) == (True, 3, ((65, -100.0),))
    assert request.priority == -3


async def test_defaults(serve):
    engine = FakeEngine()
    async with serve(engine) as served:
        await served.openai().completions.create(model="fake", prompt="p")
        await served.openai().chat.completions.create(model="fake", messages=[{"role": "developer", "content": "p"}])
    completion, chat = engine.accepted
    assert completion.params.max_tokens == 16
    assert chat.params.max_tokens == engine.info.max_request_tokens - len(chat.prompt_token_ids)
    assert chat.has_default_length
    assert bytes(chat.prompt_token_ids[1:]).startswith(b"system: p")


async def test_errors_are_the_sdk_s_exceptions(serve):
    engine = FakeEngine()
    async with serve(engine, api_keys=("right", "other")) as served:
        ask = {"model": "fake", "prompt": "p", "max_tokens": 2}
        with pytest.raises(openai.AuthenticationError) as caught:
            await served.openai(api_key="wrong").completions.create(**ask)
        assert caught.value.code == "invalid_api_key"
        client = served.openai(api_key="other")
        with pytest.raises(openai.NotFoundError) as caught:
            await client.completions.create(**ask | {"model": "gpt-9"})
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert "The model `gpt-9` does not exist" in caught.value.message
        assert "this server serves 'fake'" in caught.value.message
        assert (await client.completions.create(**ask | {"model": ""})).model == "fake", "an empty name is none"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(**ask | {"temperature": 3})
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(**ask | {"max_tokens": 1000})
        assert caught.value.code == "context_length_exceeded"
        # What LiteLLM, OpenHands and others go by; see test_litellm.py.
        assert caught.value.body["message"].startswith("This model's maximum context length is 300 tokens. However, ")
        assert "Please reduce the length of the prompt" in caught.value.message
        assert "400" in caught.value.message and "1001" in caught.value.message
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="fake", input="x")
        engine.max_running = 0
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**ask)
        assert caught.value.response.headers["retry-after-ms"] == "1500"
        assert caught.value.response.headers["retry-after"] == "2"
        engine.engine_state = "loading"
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(**ask)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after-ms"]) > 0


async def test_other_errors_of_the_sdk(serve):
    engine = FakeEngine(delay_s=None)
    async with serve(engine, api_keys=("right",), max_body_bytes=3000, shutdown_timeout_s=0.05) as served:
        ask = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key provided"):
            await served.openai(api_key="wrong").chat.completions.create(**ask)
        client = served.openai(api_key="right")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**ask | {"messages": [{"role": "user", "content": "x" * 500}]})
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        assert "in the messages" in caught.value.message
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**ask | {"messages": [{"role": "user", "content": "x" * 5000}]})
        assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
        with pytest.raises(openai.PermissionDeniedError):
            await client.post("../sleep", cast_to=object)
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**ask, timeout=0.05)
        engine.delay_s, engine.crash_after = 0.0, 1
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**ask)
        assert (caught.value.status_code, caught.value.code) == (500, "internal_error")


async def test_the_sdk_retries_a_full_queue(serve):
    engine = FakeEngine()
    engine.max_running, engine.retry_after_ms = 0, 20
    async with serve(engine) as served:
        client = served.openai(max_retries=2)
        ask = asyncio.create_task(client.completions.create(model="fake", prompt="p", max_tokens=1))
        await eventually(lambda: served.state.metrics._sheds.get("queue_full", 0) >= 1)
        engine.max_running = None
        assert (await ask).choices[0].finish_reason == "length"


async def test_failure_in_mid_stream_is_an_error_event(serve):
    engine = FakeEngine()
    engine.fail_after = 2
    async with serve(engine) as served:
        stream = await served.openai().completions.create(model="fake", prompt="p", max_tokens=5, stream=True)
        for _ in range(2):
            await anext(stream)
        with pytest.raises(openai.APIError, match="a worker was lost"):
            await anext(stream)
        with pytest.raises(openai.InternalServerError, match="a worker was lost"):
            await served.openai().completions.create(model="fake", prompt="p", max_tokens=5)


async def test_models(serve):
    async with serve(FakeEngine()) as served:
        models = (await served.openai().models.list()).data
        assert [model.id for model in models] == ["fake", "alias"]
        assert (await served.openai().models.retrieve("alias")).id == "alias"
        with pytest.raises(openai.NotFoundError):
            await served.openai().models.retrieve("a/b")
