"""Structured output of a real server: whole and streamed answers, choices, pydantic models, offline requests."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pytest
from e2e_server import MODEL, Served
from pydantic import BaseModel

SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["kind", "sizes"], "additionalProperties": False,
    "properties": {
        "kind": {"enum": ["a", "bé"]}, "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "note": {"type": "string", "maxLength": 6},
    },
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
MESSAGES: list[Any] = [{"role": "user", "content": "say something"}]


class Part(BaseModel):
    name: Literal["x", "y"]
    count: int


class Whole(BaseModel):
    parts: list[Part]
    is_done: bool


def test_answers_that_stop_are_valid_and_others_begin_so(server: Served) -> None:
    client = server.client()

    def ask(seed: int) -> list[Any]:
        return client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=seed, n=2, max_tokens=240, temperature=1.2, response_format=FORMAT,
            logprobs=seed % 2 == 0, extra_body={"service_tier": "flex"} if seed % 5 == 4 else {},
        ).choices  # fmt: skip

    with ThreadPoolExecutor(8) as pool:
        choices = [choice for found in pool.map(ask, range(20)) for choice in found]
    stopped = [choice.message.content for choice in choices if choice.finish_reason == "stop"]
    assert len(stopped) > 10
    for text in stopped:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert all((choice.message.content.lstrip() or "{")[0] == "{" for choice in choices)


def test_a_stream_is_the_whole_answer_in_pieces(server: Served) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "prompt": "x", "seed": 5, "max_tokens": 80, "temperature": 0.9,
        "extra_body": {"structured_outputs": {"regex": "(ab|cd){4,12}"}},
    }  # fmt: skip
    client = server.client()
    whole = client.completions.create(**asked).choices[0]
    pieces = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert whole.finish_reason == pieces[-1].finish_reason == "stop"
    assert len(whole.text) >= 8 and set(whole.text) <= set("abcd")


def test_pydantic_models_are_parsed(server: Served) -> None:
    for seed in range(6):
        found = server.client().chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=seed, max_tokens=200, temperature=0.8,
            response_format={"type": "json_schema", "json_schema": {
                "name": "whole", "schema": Whole.model_json_schema(), "strict": True}},
        ).choices[0]  # fmt: skip
        if found.finish_reason == "stop":
            assert Whole.model_validate_json(found.message.content)


def test_what_cannot_be_followed_is_told_in_a_line(server: Served) -> None:
    for body, param in (
        ({"guided_json": {"type": "objct"}}, "guided_json"), ({"guided_regex": "(?=a)"}, "guided_regex"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            server.client().completions.create(model=MODEL, prompt="x", extra_body=body)
        assert raised.value.param == param
