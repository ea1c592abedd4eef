"""A server that listens and does not serve yet: what it tells clients, and its log."""

from __future__ import annotations

import asyncio
import logging

import openai
import pytest
from fake_engine import FakeEngine

from waiting import PATIENCE_S

MESSAGES = [{"role": "user", "content": "hi"}]


def loading_engine(left_s):
    engine = FakeEngine()
    engine.engine_state, engine.loading_left_s = "loading", left_s
    return engine


@pytest.mark.parametrize(
    ("left_s", "seconds", "milliseconds"),
    [(12.3, "13", "12300"), (0.0, "1", "1000"), (0.04, "1", "1000"), (1e9, "60", "60000"), (None, "1", "1000")],
)
async def test_a_client_that_comes_too_early_is_told_when_to_come_again(serve, left_s, seconds, milliseconds):
    async with serve(loading_engine(left_s)) as served:
        for answer in (
            await served.completion(), await served.completion(stream=True),
            await served.post("/v1/chat/completions", {"messages": MESSAGES}),
            await served.http.get(f"{served.url}/health"),
        ):  # fmt: skip
            assert answer.status_code == 503
            assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == (seconds, milliseconds)
        assert (await served.completion()).json()["error"]["code"] == "not_ready"
        health = await served.http.get(f"{served.url}/health")
        assert health.json()["status"] == "loading"
        assert (await served.http.get(f"{served.url}/ping")).status_code == 200


async def test_the_sdk_s_own_patience_is_enough(serve):
    """A client that heeds the hint is answered in the end, without code of its own."""
    engine = loading_engine(0.0)
    async with serve(engine) as served:
        ask = asyncio.create_task(
            served.openai(max_retries=4).chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2))
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            while not served.state.metrics._sheds["loading"]:
                await asyncio.sleep(0.01)
        engine.engine_state = "ready"
        assert (await ask).choices[0].message.content
        engine.engine_state, engine.loading_left_s = "loading", 7.0
        with pytest.raises(openai.InternalServerError) as caught:
            await served.openai().chat.completions.create(model="fake", messages=MESSAGES)
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "7")


@pytest.mark.parametrize("state", ["loading", "ready"])
async def test_the_log_of_a_server_that_listens_does_not_call_it_ready(serve, caplog, state):
    caplog.set_level(logging.INFO)
    engine = FakeEngine()
    engine.engine_state = state
    async with serve(engine) as served:
        (line,) = [record.getMessage() for record in caplog.records if "listening on" in record.getMessage()]
        assert served.url in line
    assert ("not serving yet" in line) == (state == "loading")
    assert "ready" not in line
