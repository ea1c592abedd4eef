"""Long answers in one piece are encoded in a thread, so that streams go on meanwhile; short ones on the event loop."""

from __future__ import annotations

import threading

import pytest
from batches_util import documents, jsonl, line
from fake_engine import FakeEngine
from test_batches_sdk import begin, text_of, until

from jettison.server import completions, endpoint
from jettison.server.doors import responses, wire

SHORT, LONG = 2, 150
"""Tokens of answers with 20 log-probabilities each."""


@pytest.fixture
def on_loop(monkeypatch):
    """Whether each encoding was done by the event loop's thread."""
    done, encode = [], endpoint.encode

    def noted(value):
        if "choices" in value:  # no error, and no chunk's head
            done.append(threading.current_thread() is threading.main_thread())
        return encode(value)

    monkeypatch.setattr(endpoint, "encode", noted)
    return done


@pytest.mark.parametrize(("path", "asked"), [
    ("/v1/completions", {"prompt": "x", "logprobs": 20}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}),
])  # fmt: skip
async def test_answers(serve, on_loop, path, asked):
    async with serve(FakeEngine()) as served:
        for num_tokens in (SHORT, LONG):
            answer = await served.post(path, {"model": "fake", "max_tokens": num_tokens} | asked)
            told = answer.json()["choices"][0]["logprobs"]
            assert len(told["content"] if "content" in told else told["tokens"]) == num_tokens
    assert on_loop == [True, False]


async def test_a_prompt_counts_too(serve, on_loop):
    async with serve(FakeEngine()) as served:
        await served.completion(prompt="x" * LONG, max_tokens=1, prompt_logprobs=20)
        await served.completion(prompt="x" * LONG, max_tokens=1, logprobs=20, echo=True)
    assert on_loop == [False, False]


async def test_a_prompt_that_a_stream_echoes(serve, monkeypatch):
    done, encode = [], completions.encode

    def noted(value):
        if isinstance(value, dict) and "top_logprobs" in value:
            done.append(threading.current_thread() is threading.main_thread())
        return encode(value)

    monkeypatch.setattr(completions, "encode", noted)
    async with serve(FakeEngine()) as served:
        for num_tokens in (SHORT, LONG):
            told = {"prompt": "x" * num_tokens, "max_tokens": 2, "logprobs": 20, "echo": True, "stream": True}
            answer = await served.post("/v1/completions", {"model": "fake"} | told)
            assert answer.status_code == 200 and answer.text.count("top_logprobs") == 2
    assert done == [True, True, False, True]


async def test_lines_of_batches(serve, on_loop, batch_settings):
    async with serve(FakeEngine(), batches=batch_settings(window=1)) as served, served.openai() as client:
        content = jsonl(line("a", max_tokens=SHORT, logprobs=20), line("b", max_tokens=LONG, logprobs=20))
        batch = await until(client, await begin(client, content))
        told = documents(await text_of(client, batch.output_file_id))
        lengths = [len(each["response"]["body"]["choices"][0]["logprobs"]["tokens"]) for each in told]
    assert lengths == [SHORT, LONG] and on_loop == [True, False]


@pytest.fixture
def threads_of(monkeypatch):
    """Whether each encoding of a whole answer of a door was done by the event loop's thread, by what was encoded."""
    done = {}

    def watch(module):
        encode = module.encode

        def noted(value):
            told = value if isinstance(value, dict) else {"list": value}
            name = told.get("object") or told.get("type") or "output"
            if told.get("status") != "in_progress" and (told.get("response") or {}).get("status") != "in_progress":
                is_on_loop = threading.current_thread() is threading.main_thread()
                done.setdefault(f"{module.__name__.rpartition('.')[2]} {name}", []).append(is_on_loop)
            return encode(value)

        monkeypatch.setattr(module, "encode", noted)

    for module in (endpoint, responses, wire):
        watch(module)
    return done


@pytest.mark.parametrize(("path", "asked", "told"), [
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, ["endpoint message"]),
    ("/v1/responses", {"input": "x"}, ["endpoint response", "responses response", "responses output"]),
    ("/v1/responses", {"input": "x", "stream": True}, [
        "wire response.output_text.done", "wire response.output_item.done", "wire response.incomplete",
        "responses response", "responses output"]),
])  # fmt: skip
async def test_answers_of_the_other_doors(serve, threads_of, path, asked, told):
    length = "max_tokens" if path == "/v1/messages" else "max_output_tokens"
    async with serve(FakeEngine(max_model_len=6000)) as served:
        for num_tokens in (SHORT, endpoint.MOST_VALUES_ON_LOOP + 1):
            answer = await served.post(path, {"model": "fake", length: num_tokens} | asked)
            assert answer.status_code == 200
            if path == "/v1/responses" and not asked.get("stream"):
                kept = await served.http.get(f"{served.url}/v1/responses/{answer.json()['id']}")
                assert kept.json() == answer.json()
    assert {name: threads_of[name] for name in told} == {name: [True, False] for name in told}
