"""Requests as clients' public code sends them, and answers read as it reads them: vLLM's bench, GuideLLM, Open WebUI.

Each request was written down from the project's source (vLLM's `benchmarks/lib`, Open WebUI's `routers/openai.py` and
`routers/tasks.py`) or from a run (GuideLLM 0.8.1, which test_guidellm.py runs itself).
"""

from __future__ import annotations

import json

import pytest
from calls_written import hermes
from fake_engine import FakeEngine, bytes_of
from served import EOS
from test_tools import OSLO, TOOLS, says, template

from jettison.server.cors import CorsSettings

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def frames(answer):
    """The payloads of a stream, read piece by piece as vLLM's client reads: at every double line end, without
    comments."""
    assert answer.status_code == 200, answer.text
    found, buffer = [], ""
    for at in range(0, len(answer.text), 7):
        buffer += answer.text[at : at + 7]
        while "\n\n" in buffer:
            message, buffer = buffer.split("\n\n", 1)
            if message.strip() and not message.startswith(":"):
                found.append(message.strip().removeprefix("data: "))
    assert found.pop() == "[DONE]" and not buffer
    return [json.loads(one) for one in found]


def bench(answer):
    """(Chunks with choices, text, usage), as the bench counts them; a chunk with choices is a token's."""
    chunks = frames(answer)
    told = [chunk["choices"][0] for chunk in chunks if chunk.get("choices")]
    usage = [chunk["usage"] for chunk in chunks if not chunk.get("choices") and chunk.get("usage")]
    assert len(usage) == 1
    texts = [one.get("text") or one.get("delta", {}).get("content") or "" for one in told]
    return len(told), "".join(texts), usage[0]


SAMPLING = [{}, {"ignore_eos": True}, {"temperature": 0.0}, {"ignore_eos": True, "temperature": 0.7, "top_p": 0.9,
            "top_k": 20, "min_p": 0.05, "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1}]


@pytest.mark.parametrize("extra", SAMPLING)
async def test_vllm_bench_serve_completions(serve, extra):
    """Backend ``openai`` (and ``vllm``): the first request is a probe, the model is the first of /v1/models."""
    async with serve(FakeEngine(bytes_of("grüße"))) as served:
        models = (await served.http.get(f"{served.url}/v1/models")).json()
        model = models["data"][0]["id"]
        assert models["data"][0].get("root", model)
        for prompt in ("hello", [104, 105], ["hello"]):
            body = {
                "model": model, "prompt": prompt, "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None,
                "stream": True, "stream_options": {"include_usage": True}} | extra
            answer = await served.post(
                "/v1/completions", body, headers={"x-request-id": "benchmark-serving0", "authorization": "Bearer x"})
            num_chunks, text, usage = bench(answer)
            # A letter of two bytes is one chunk of two tokens: the bench takes its counts from the usage.
            assert usage["completion_tokens"] == 8 and text == "grüßeg" and num_chunks <= 8
            assert usage["prompt_tokens"] > 0 and answer.headers["x-request-id"] == "benchmark-serving0"


@pytest.mark.parametrize("extra", SAMPLING)
async def test_vllm_bench_serve_chat(serve, extra):
    """Backend ``openai-chat``: the prompt as a part of a user's message."""
    async with serve(FakeEngine(bytes_of("abcd"))) as served:
        body = {
            "model": "fake", "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            "max_completion_tokens": 8, "stream": True, "stream_options": {"include_usage": True}} | extra
        num_chunks, text, usage = bench(await served.post(CHAT, body))
        assert (num_chunks, text, usage["completion_tokens"]) == (8, "abcdabcd", 8)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
async def test_guidellm(serve, path):
    """What it sends to a backend of OpenAI's HTTP, after ``GET /health`` and ``GET /v1/models``."""
    part = {"type": "text", "text": "1 0 m0 Finish medica"}
    own = {
        CHAT: {"messages": [{"role": "user", "content": [part]}], "max_completion_tokens": 8},
        "/v1/completions": {"prompt": part["text"], "max_tokens": 8},
        "/v1/responses": {"max_output_tokens": 8, "input": [{"role": "user", "content": [part | {
            "type": "input_text"}]}]},
    }[path]  # fmt: skip
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = own | {"model": "fake", "stream": True, "stop": None, "ignore_eos": True} | (
        {} if path == "/v1/responses" else {"stream_options": usage})
    async with serve(FakeEngine(lambda request: [*b"ab", EOS, *b"cdefghij"])) as served:
        assert (await served.http.get(f"{served.url}/health")).status_code == 200
        assert (await served.http.get(f"{served.url}/v1/models")).json()["data"][0]["id"] == "fake"
        answer = await served.post(path, body, headers={"authorization": "Bearer none"})
        if path == "/v1/responses":
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
            told = events[-1]["response"]["usage"]["output_tokens"]
        else:
            told = frames(answer)[-1]["usage"]["completion_tokens"]
        assert told == 8, "an end token does not end it"


# --- Open WebUI

USER = {"X-OpenWebUI-User-Name": "J%C3%B6rg", "X-OpenWebUI-User-Id": "1", "X-OpenWebUI-User-Email": "a@b.c",
        "X-OpenWebUI-User-Role": "user", "X-OpenWebUI-Chat-Id": "9"}  # fmt: skip
KEY = {"authorization": "Bearer k"}


async def test_open_webui_lists_models_with_its_key(serve):
    async with serve(FakeEngine(), api_keys=("k",)) as served:
        listed = await served.http.get(f"{served.url}/v1/models", headers=KEY | USER)
        assert {"id", "object", "owned_by"} <= listed.json()["data"][0].keys()
        for headers in ({"authorization": "Bearer None"}, {}):  # a connection without a key
            refused = await served.http.get(f"{served.url}/v1/models", headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["message"]


async def test_open_webui_chats(serve, tokenizer_of):
    """A stream with usage, the mark for caches on the last message, thoughts asked for by ``reasoning``."""
    last = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    body = {
        "stream": True, "model": "fake", "messages": [{"role": "system", "content": "Be kind."}, *HI, {
            "role": "assistant", "content": "x"}, last], "stream_options": {"include_usage": True},
        "temperature": 0.7, "top_p": 0.9, "max_tokens": 300, "frequency_penalty": 0, "seed": 3, "stop": ["###"],
        "logit_bias": {"65": 1}, "reasoning": {"effort": "low"}}
    async with serve(says("<think>\nHm.\n</think>\n\nYes."), tokenizer=tokenizer_of(template("qwen3"))) as served:
        chunks = frames(await served.post(CHAT, body, headers=USER))
        told = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("reasoning_content", "") for delta in told) == "Hm."
        assert "".join(delta.get("content", "") for delta in told) == "Yes."
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] > 0
        hidden = body | {"reasoning": {"exclude": True}}
        told = [choice["delta"] for chunk in frames(await served.post(CHAT, hidden)) for choice in chunk["choices"]]
        assert not any("reasoning" in delta for delta in told)
        wrong = await served.post(CHAT, body | {"reasoning_effort": "high"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "reasoning.effort")
        off = body | {"reasoning": {"effort": "none"}, "stream": False, "stream_options": None}
        await served.post(CHAT, off)
        prompt = bytes(t for t in served.state.engine.accepted[-1].prompt_token_ids if t < 256)
        assert prompt.endswith(b"</think>\n\n"), "an effort of none turns thinking off"


async def test_open_webui_calls_tools_and_sends_the_results(serve, tokenizer_of):
    async with serve(says(hermes([OSLO]), "It rains."), tokenizer=tokenizer_of(template("qwen3"))) as served:
        body = {"stream": True, "model": "fake", "messages": list(HI), "tools": TOOLS}
        chunks = frames(await served.post(CHAT, body))
        calls = [call for chunk in chunks for choice in chunk["choices"]
                 for call in choice["delta"].get("tool_calls", ())]  # fmt: skip
        made = {"index": 0, "id": calls[0]["id"], "type": "function", "function": {
            "name": calls[0]["function"]["name"],
            "arguments": "".join(call["function"]["arguments"] for call in calls)}}
        body["messages"] += [
            {"role": "assistant", "content": "", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": made["id"], "content": [{"type": "input_text", "text": "rain"}]}]
        chunks = frames(await served.post(CHAT, body))
        assert "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]) == "It rains."


@pytest.mark.parametrize("more", [{"max_completion_tokens": 1000}, {"max_tokens": 1000}, {}])
async def test_open_webui_asks_for_titles_and_tags(serve, more):
    """Not streamed. What it keeps for itself of ``metadata`` it takes out; its pipelines do not."""
    asked = "### Task:\nGenerate a concise, 3-5 word title.\n### Output:\nJSON format: { \"title\": \"...\" }"
    metadata = {"task": "title_generation", "task_body": {"messages": HI, "chat_id": "9"}, "chat_id": None}
    async with serve(says('{"title": "Rain"}'), model_names=("fake",)) as served:
        for extra in ({}, {"metadata": metadata}):
            body = {"model": "fake", "messages": [{"role": "user", "content": asked}], "stream": False} | more
            answer = await served.post(CHAT, body | extra)
            assert answer.status_code == 200, answer.text
            assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"title": "Rain"}


async def test_open_webui_sends_an_image(serve):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    async with serve(FakeEngine()) as served:
        answer = await served.post(CHAT, {"model": "fake", "stream": True, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (
            400, "messages[0].content[1]", "unsupported_content")
        assert "image_url" in error["message"]


async def test_open_webui_connects_from_the_browser(serve):
    """A direct connection is the browser's own: a preflight, then the request with its key."""
    origin = {"origin": "https://chat.example"}
    cors = CorsSettings(origins=("https://chat.example",))
    async with serve(FakeEngine(), api_keys=("k",), cors=cors) as served:
        for path, method in (("/v1/models", "GET"), (CHAT, "POST")):
            asked = origin | {"access-control-request-method": method,
                              "access-control-request-headers": "authorization,content-type"}
            allowed = await served.http.options(served.url + path, headers=asked)
            assert allowed.status_code == 200
            assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        listed = await served.http.get(f"{served.url}/v1/models", headers=origin | KEY)
        assert listed.headers["access-control-allow-origin"] == "https://chat.example"
