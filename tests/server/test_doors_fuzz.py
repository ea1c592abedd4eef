"""Bad values through both doors: never a 5xx, a traceback or a request that stays; what is refused names a field."""

from __future__ import annotations

import json
import os
import random

import pytest
from anthropic.types import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from fake_engine import bytes_of
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from test_messages import claude_code
from test_responses import CODEX

from jettison.server.doors.message_tables import MESSAGES
from jettison.server.doors.response_tables import RESPONSES

NUM_CASES = int(os.environ.get("JETTISON_FUZZ_DOORS", "400"))
SEED = 20261127
BAD = (
    None, True, False, 0, -1, 1, 3, 1 << 70, -1e300, 0.5, "", "x", "auto", "none",
    "\0", "é" * 300, [], {}, [None], [{}], [[]], {"type": None}, {"type": "text"}, {"type": "function", "name": "x"},
    [{"type": "text", "text": "t"}], [{"type": "text", "text": None}], {"type": 3}, {"a": {"b": [1]}},
    {"type": "tool", "name": "Tool1"}, {"type": "json_schema", "schema": {"type": "x"}}, {"$ref": "#/a"},
    [{"type": "tool_result"}], [{"type": "tool_use", "id": 1}], [{"type": "reasoning"}], [{"type": "function_call"}],
    {"role": "user"}, {"role": "assistant", "content": []}, {"format": {"type": "json_schema"}}, {"effort": 3},
)  # fmt: skip
EXTRA = (
    "metadata", "n", "stop", "seed", "top_k", "logit_bias", "priority", "store", "previous_response_id", "conversation",
    "background", "truncation", "include", "text", "reasoning", "top_logprobs", "output_format", "service_tier",
    "chat_template_kwargs", "structured_outputs", "stop_sequences", "cache_salt", "unknown", "betas", "min_tokens",
)  # fmt: skip


def places(value, path=()):
    """Paths to everything in a document."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in pairs:
        yield from places(item, (*path, name))


def spoilt(base, draw):
    """A copy with up to three bad values in it."""
    document = json.loads(json.dumps(base))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if draw.random() < 0.25:
            document[draw.choice(EXTRA)] = draw.choice(BAD)
            continue
        *front, last = draw.choice([path for path in places(document) if path])
        inner = document
        for name in front:
            inner = inner[name]
        what = draw.random()
        if what < 0.15 and isinstance(inner, dict):
            del inner[last]
        elif what < 0.3 and isinstance(inner, list):
            inner.append(draw.choice(BAD))
        else:
            inner[last] = json.loads(json.dumps(draw.choice(BAD)))
    return document


async def test_no_bad_value_is_our_fault(app_client, app_engine, caplog):
    draw, counts = random.Random(SEED), {}
    app_engine.script = bytes_of('{"a": "<tool_call>')
    small = claude_code(2)
    small["system"] = small["system"][:2]
    codex = CODEX | {"instructions": "Be kind."}
    doors = [
        ("/v1/messages", small | {"max_tokens": 20}), ("/v1/messages/count_tokens", small),
        ("/v1/responses", codex | {"max_output_tokens": 20}),
    ]
    for case in range(NUM_CASES):
        path, base = doors[case % len(doors)]
        document = spoilt(base, draw)
        answer = await app_client.post(path, json=document)
        counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
        assert answer.status_code in (200, 400, 404), (case, path, document, answer.text)
        assert "Traceback" not in answer.text and '"internal_error"' not in answer.text
        assert "response.failed" not in answer.text and "event: error" not in answer.text
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["message"] and error["type"]
            assert (answer.json().get("type") == "error") == path.startswith("/v1/messages")
    assert counts[200] > NUM_CASES // 20 and counts[400] > NUM_CASES // 4, counts
    assert not app_engine.running
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


def test_every_field_of_the_sdks_is_in_a_table():
    for params, table in (
        (ResponseCreateParamsNonStreaming, RESPONSES), (MessageCreateParamsNonStreaming, MESSAGES),
        (MessageCountTokensParams, MESSAGES),
    ):
        assert sorted(set(params.__annotations__) - set(table)) == []


@pytest.mark.parametrize("depth", [50, *range(900, 1000, 9)])
async def test_what_could_be_read_can_be_told_and_kept(depth, app_client):
    """Python's bound of nesting counts from where the work is done: what was just read there may be too deep here."""
    deep = '{"a":' * depth + "{}" + "}" * depth
    asks = [
        ("/v1/messages", '"max_tokens":5,"messages":[{"role":"user","content":"x"}],'
                         '"tools":[{"name":"x","input_schema":%s}]'),
        *(("/v1/responses", f'"input":"x",{more}') for more in (
            '"tools":[{"type":"function","name":"x","parameters":%s}]', '"text":{"format":{"type":"text","x":%s}}',
            '"tool_choice":%s', '"unknown":%s')),
        ("/v1/responses", '"input":[{"role":"user","content":"x","z":%s}]'),
    ]
    for path, body in asks:
        for stream in ("true", "false"):
            answer = await app_client.post(
                path, content=f'{{"stream":{stream},' + body % deep + "}", headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400) and "internal" not in answer.text and "failed" not in answer.text
            if answer.status_code == 200 and path == "/v1/responses" and stream == "false":
                kept = f"{path}/{answer.json()['id']}"
                for again in (
                    await app_client.get(kept), await app_client.get(f"{kept}/input_items"),
                    await app_client.post(path, json={"input": "x", "previous_response_id": answer.json()["id"]}),
                ):
                    assert again.status_code in (200, 400)


def test_a_case_depends_on_the_seed_alone():
    first, again = (spoilt(CODEX, random.Random(7)) for _ in range(2))
    assert first == again != CODEX
