"""Values are taken as pydantic takes them without strictness, which is what vLLM's request models do."""

from __future__ import annotations

import pytest

from jettison.server.coercion import as_kind, loosened, whole_numbers
from jettison.server.fields import ChatFields

VALUES = [
    0, 1, -1, 2, 5, 2**63, 0.0, 1.0, -3.0, 5.0, 5.5, 1e3, 1e300, True, False, "5", "-5", "+5", " 5 ", "5.0", "5.00",
    "5.", "5.5", "0", "1", "007", "1e3", ".5", "-.5", "true", "False", "YES", "no", "on", "off", "t", "f", "y", "n",
    "maybe", "", " ", "five", "0x10", "5 5", "--5", "٥", "½", [], [5], {}, {"a": 1},
]  # fmt: skip


@pytest.mark.parametrize("kind", [int, float, bool])
def test_as_pydantic_takes_them(kind):
    pydantic = pytest.importorskip("pydantic")
    reference = pydantic.TypeAdapter(kind)
    differing = []
    for value in VALUES:
        taken = as_kind(value, kind)
        try:
            wanted = reference.validate_python(value)
        except pydantic.ValidationError:
            wanted = None
        ours = taken if type(taken) is kind or (kind is float and type(taken) is int) else None
        if ours != wanted:
            differing.append((value, ours, wanted))
    assert differing == []


def test_what_is_not_meant_as_a_number_stays_as_it_is():
    for value in ("nan", "inf", "5" * 41, None, [1.0], {"a": 1.0}):
        for kind in (int, float, bool):
            assert as_kind(value, kind) is value


def test_lists_of_ids():
    assert whole_numbers([1.0, 2, 3.0]) == [1, 2, 3]
    assert whole_numbers([1.5, 2.0]) == [1.5, 2]
    assert whole_numbers(["1", True]) == ["1", True]
    assert whole_numbers("text") == "text"


def test_ids_and_biases_in_quotes():
    wanted = {"stop_token_ids": [7, 8, 9], "allowed_token_ids": [5],
              "logit_bias": {"72": -100.0, "73": 5, "74": "much"}}
    sent = {"stop_token_ids": ["7", 8.0, 9], "allowed_token_ids": ["5"],
            "logit_bias": {"72": "-100", "73": 5, "74": "much"}}  # fmt: skip
    assert loosened(sent, ChatFields) == wanted
    for untouched in (["all"], "7", {"a": 1}, None):
        assert loosened({"stop_token_ids": untouched}, ChatFields) == {"stop_token_ids": untouched}
    assert loosened({"logit_bias": []}, ChatFields) == {"logit_bias": []}


def test_only_fields_with_such_a_type_are_touched():
    document = {
        "max_tokens": "5", "temperature": "0.5", "stream": "true", "stop": "5", "stop_token_ids": [7.0], "user": "1",
        "stream_options": {"include_usage": 1, "other": "1"}, "mystery": "5", "metadata": {"a": "1"}, "logprobs": 1,
        "messages": [{"role": "user", "content": "5"}], "repetition_detection": {"min_count": "2"}, "seed": None,
    }  # fmt: skip
    assert loosened(document, ChatFields) == document | {
        "max_tokens": 5, "temperature": 0.5, "stream": True, "stop_token_ids": [7], "logprobs": True,
        "stream_options": {"include_usage": True, "other": "1"}, "repetition_detection": {"min_count": 2},
    }  # fmt: skip


async def test_numbers_as_clients_write_them(app_client, app_engine):
    """Languages with one kind of number write 5.0; some libraries put numbers in quotes."""
    fields = {
        "max_tokens": 5.0, "seed": 42.0, "top_k": "40", "n": 2.0, "stop_token_ids": [7.0], "ignore_eos": 1,
        "temperature": "0", "min_tokens": True, "priority": "-1", "metadata": {"a": 1}, "echo": "false",
    }  # fmt: skip
    answer = await app_client.post("/v1/completions", json=fields | {"prompt": [104.0, 105], "logprobs": True})
    assert answer.status_code == 200, answer.text
    request = app_engine.accepted[0]
    params = request.params
    assert (request.prompt_token_ids, params.max_tokens, params.seed, params.top_k) == ((104, 105), 5, 42, 40)
    assert (params.stop_token_ids, params.ignore_eos, params.temperature, params.min_tokens) == ((7,), True, 0.0, 1)
    assert (params.logprobs, len(app_engine.accepted), request.priority) == (1, 2, -1)
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": 1, "stream_options": {}, "max_tokens": "3"}
    answer = await app_client.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 200 and answer.json()["choices"][0]["logprobs"] is not None
    for name, value in (("max_tokens", "inf"), ("temperature", "nan"), ("top_p", "inf"), ("n", 1.5), ("n", "two")):
        answer = await app_client.post("/v1/completions", json={"prompt": "x", name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
