"""LiteLLM against real servers: each error becomes the exception that gateways and agents built on it act upon.

It goes by status, code and, for an overflow of the context alone, by the message's words.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fake_engine import FakeEngine, bytes_of

CLIENT = Path(__file__).with_name("litellm_client.py")
LONG = "x" * 2000

EXPECTED = {
    "answer": None, "stream": None, "text": None, "fallback": None,
    "wrong key": "AuthenticationError",
    "no such model": "NotFoundError",
    "messages too long": "ContextWindowExceededError",
    "messages too long, streamed": "ContextWindowExceededError",
    "messages too long, hosted_vllm": "ContextWindowExceededError",
    "answer too long": "ContextWindowExceededError",
    "prompt too long": "ContextWindowExceededError",
    "longer than memory": "ContextWindowExceededError",
    "bad value": "BadRequestError",
    "queue full": "RateLimitError",
    "loading": "ServiceUnavailableError",
    "internal": "InternalServerError",
    "internal, streamed": "APIError",
    "never answers": "Timeout",
}  # fmt: skip


async def test_every_exception_of_litellm_is_the_right_one(serve):
    if importlib.util.find_spec("litellm") is None:
        pytest.skip("litellm is not installed: it comes with the extra `dev`")
    engines = {
        "ready": FakeEngine(bytes_of("hi!")), "long": FakeEngine(bytes_of("long"), max_model_len=4000),
        "small": FakeEngine(max_model_len=4000, max_request_tokens=300), "full": FakeEngine(), "loading": FakeEngine(),
        "broken": FakeEngine(), "stuck": FakeEngine(delay_s=None),
    }  # fmt: skip
    engines["full"].max_waiting = 0
    engines["loading"].engine_state, engines["loading"].loading_left_s = "loading", 7.0
    engines["broken"].crash_after = 1
    async with AsyncExitStack() as stack:
        urls = {}
        for name, engine in engines.items():
            keys = {"api_keys": ("right",)} if name == "ready" else {}
            served = await stack.enter_async_context(serve(engine, shutdown_timeout_s=0.05, **keys))
            urls[name] = f"{served.url}/v1"
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(CLIENT), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        told, _ = await process.communicate(json.dumps(cases(urls)).encode())
    assert process.returncode == 0
    outcomes = json.loads(told)
    assert outcomes.keys() == EXPECTED.keys()
    for name, expected in EXPECTED.items():
        seen = outcomes[name]
        assert "text" in seen if expected is None else expected in seen.get("kinds", ()), (name, seen)
    assert "ContextWindowExceededError" not in outcomes["bad value"]["kinds"]
    assert outcomes["fallback"]["text"] == "long"  # the deployment with the longer context has answered


def cases(urls):
    def at(server, **fields):
        return {"model": "openai/fake", "api_base": urls[server], "api_key": "right"} | fields

    def long(text):
        return [{"role": "user", "content": text}]

    deployments = [
        {"model_name": name, "litellm_params": at(server, max_tokens=4)}
        for name, server in (("short", "ready"), ("wide", "long"))
    ]
    fallbacks = [{"short": ["wide"]}]
    return {
        "answer": at("ready"), "stream": at("ready", stream=True),
        "text": at("ready", model="text-completion-openai/fake", prompt="hi"),
        "wrong key": at("ready", api_key="wrong"),
        "no such model": at("ready", model="openai/gpt-9"),
        "messages too long": at("ready", messages=long(LONG)),
        "messages too long, streamed": at("ready", messages=long(LONG), stream=True),
        "messages too long, hosted_vllm": at("ready", messages=long(LONG), model="hosted_vllm/fake"),
        "answer too long": at("ready", max_tokens=5000),
        "prompt too long": at("ready", model="text-completion-openai/fake", prompt=LONG),
        "longer than memory": at("small", messages=long(LONG)),
        "bad value": at("ready", temperature=3),
        "queue full": at("full"), "loading": at("loading"), "internal": at("broken"),
        "internal, streamed": at("broken", stream=True),
        "never answers": at("stuck", timeout=0.3),
        "fallback": {
            "model": "short", "messages": long("x" * 1000),
            "router": {"model_list": deployments, "context_window_fallbacks": fallbacks},
        },
    }  # fmt: skip
