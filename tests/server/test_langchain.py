"""LangChain against a real server: chats, streams, agents' loops over both doors, structured output in every method."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from calls_written import hermes
from fake_engine import FakeEngine
from served import EOS
from test_tools import OSLO, template

from client_environments import python_with

CLIENT = Path(__file__).with_name("langchain_client.py")
WEATHER = {"city": "Oslo", "is_sunny": False}
TURNS = ("<think>\nHm.\n</think>\n\n" + hermes([OSLO, ("now", {})]), hermes([OSLO]), "", "It rains.")
"""By the number of results in the prompt: two after the first turn, three after the second."""


def script(request):
    """What a model would say that does as it is asked."""
    prompt = bytes(token for token in request.prompt_token_ids if token < 256).decode(errors="replace")
    grammar = request.params.grammar
    if "any, please" in prompt:
        said = hermes([("now", {})])
    elif grammar is not None:
        said = json.dumps(WEATHER)
    elif "Weather in Oslo?" in prompt:
        num_results = prompt.count("<tool_response>")
        said = TURNS[0] if num_results == 0 else TURNS[1] if num_results == 2 else TURNS[3]
    else:
        said = "grüße!"
    return [*said.encode(), EOS]


async def test_what_langchains_callers_meet(serve, tokenizer_of):
    python = python_with("langchain_openai", "langchain-openai")
    async with serve(
        FakeEngine(script, max_model_len=20_000), tokenizer=tokenizer_of(template("qwen3")), api_keys=("right",)
    ) as served:
        process = await asyncio.create_subprocess_exec(
            str(python), str(CLIENT), f"{served.url}/v1", stdout=asyncio.subprocess.PIPE)
        told, _ = await process.communicate()
    assert process.returncode == 0
    met = json.loads(told)
    assert met["chat"] == {"text": "grüße!", "usage": 9, "reason": "stop"}
    assert met["stream"] == {"text": "grüße!", "usage": 9, "many": True}
    called = [["get_weather", {"city": "Oslo"}], ["now", {}], ["get_weather", {"city": "Oslo"}]]
    for name in ("loop", "loop, streamed", "loop, items", "loop, items, streamed"):
        assert met[name] == {"called": called, "text": "It rains.", "invalid": 0}, name
    assert met["any"] == "now"
    for name in ("json_schema", "json_schema, strict", "json_schema, items", "json_mode", "function_calling"):
        assert met[name] == WEATHER, name
    assert met["batch"] == ["grüße!"] * 2
    assert met["completion"] == met["completion, streamed"] == "grüße!"
    assert "BadRequestError" in met["image"]["kinds"] and "image_url" in met["image"]["told"]
    assert "AuthenticationError" in met["key"]["kinds"]
