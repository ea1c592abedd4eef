"""The table of bad input: each row is refused by name, and nothing else is disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import tokenizers
from fake_engine import FakeEngine
from served import eventually

from jettison.errors import OverCapacityError
from jettison.server.chat_renderer import TemplateSettings
from jettison.server.limits import Admission
from jettison.server.settings import ServerSettings
from jettison.server.tokenizer import Tokenizer

COMPLETION = {"model": "fake", "prompt": "hi", "max_tokens": 2}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}}

BAD_COMPLETIONS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "x" * 513}, "cache_salt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, 2.5]}, "prompt"),
    ({"prompt": [True, 1]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": [[1], [2**70]]}, "prompt"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"prompt": ["x"] * 100, "n": 100}, "n"),
    ({"messages": CHAT["messages"]}, "messages"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "five"}, "max_tokens"),
    ({"max_tokens": "5" * 50}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_tokens": [5]}, "max_tokens"),
    ({"max_tokens": 2**80}, "max_tokens"),
    ({"max_tokens": 4000}, "max_tokens"),
    *(({name: 10**400}, name) for name in ("max_tokens", "n", "seed", "priority", "logprobs", "min_tokens")),
    *(({name: -(10**400)}, name) for name in ("max_tokens", "top_k", "seed")),
    *(({name: 10**400}, name) for name in ("temperature", "top_p", "presence_penalty")),
    ({"logit_bias": {"1": 10**400}}, "logit_bias"),
    ({"prompt": [10**400]}, "prompt"),
    ({"stop_token_ids": [10**400]}, "stop_token_ids"),
    ({"prompt": "x" * 4000}, "prompt"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": "x" * 1000}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [999]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(200))}, "stop_token_ids"),
    ({"seed": 2**64}, "seed"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": -2}, "logprobs"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {str(at): 0 for at in range(1025)}}, "logit_bias"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"stream": "perhaps"}, "stream"),
    ({"stream": 2}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 2}}, "stream_options.include_usage"),
    ({"priority": 2**40}, "priority"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"metadata": "a"}, "metadata"),
    ({"metadata": {str(at): "x" for at in range(17)}}, "metadata"),
    ({"user": 5}, "user"),
    ({"model": 5}, "model"),
    ({"suffix": "x"}, "suffix"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [300]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**400]}, "allowed_token_ids"),
    ({"allowed_token_ids": [65.5]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": 65}, "allowed_token_ids"),
    ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids"),
    ({"allowed_token_ids": [257], "min_tokens": 1}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": "a"}, "bad_words"),
    ({"bad_words": [5]}, "bad_words[0]"),
    ({"bad_words": ["x" * 513]}, "bad_words"),
    ({"bad_words": [f"{at:03}" for at in range(129)]}, "bad_words"),
    ({"bad_words": ["x" * 500, "y" * 500, "z" * 100]}, "bad_words"),
    ({"bad_words": [f"{at:09}" for at in range(120)]}, "bad_words"),
    ({"logprob_token_ids": [65]}, "logprob_token_ids"),
    ({"logprobs": 1, "logprob_token_ids": [300]}, "logprob_token_ids"),
    ({"logprobs": 1, "logprob_token_ids": [5] * 129}, "logprob_token_ids"),
    ({"logprobs": 1, "logprob_token_ids": [5], "echo": True, "max_tokens": 0}, "logprob_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 401}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": "all"}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 1, "truncation_side": "middle"}, "truncation_side"),
    ({"repetition_detection": {"max_pattern_size": 2}}, "repetition_detection.min_count"),
    ({"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3}}, "repetition_detection"),
    ({"repetition_detection": {"max_pattern_size": "x"}}, "repetition_detection.max_pattern_size"),
    ({"max_new_tokens": 5}, "max_new_tokens"),
    ({"max_tokens": None, "max_new_tokens": -1}, "max_new_tokens"),
    ({"max_tokens": None, "max_new_tokens": 4, "n_predict": 5}, "n_predict"),
    ({"max_completion_tokens": 3, "max_new_tokens": 2}, "max_completion_tokens"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": 5}, "request_id"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"echo": "perhaps"}, "echo"),
]

BAD_CHATS = [
    ({"prompt": "x"}, "prompt"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),  # the template says no
    ({"messages": [{"role": "user", "content": "x"}] * 5000}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 4000}, "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 4000}, "max_completion_tokens"),
    ({"max_tokens": None, "min_tokens": 295}, "min_tokens"),
    ({"logprobs": 2}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [TOOL, {"type": "custom", "custom": {"name": "f"}}]}, "tools[1].type"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 300}}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "f", "parameters": [1]}}]}, "tools[0].function.parameters"),
    ({"tools": [TOOL] * 1025}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": 5}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": "f", "tool_choice": "none"}, "tools"),
    ({"tools": ["f"], "tool_choice": "none"}, "tools[0]"),
    ({"tools": [TOOL], "parallel_tool_calls": "maybe"}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
    ({"functions": [{"parameters": {}}]}, "functions[0].name"),
    ({"include_reasoning": [1]}, "include_reasoning"), ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object", "schema": 3}}, "response_format.schema"),
    ({"response_format": {"type": "json_object", "value": "x"}}, "response_format.value"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"type": "objct"}}, "guided_json"),
    ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "haiku"}}}, "structural_tag"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"messages": [{"role": "user", "content": "x" * 500}]}, "messages"),
]


async def test_bad_fields_are_400_and_named(serve):
    engine = FakeEngine()
    async with serve(engine) as served:
        for path, base, table in (
            ("/v1/completions", COMPLETION, BAD_COMPLETIONS),
            ("/v1/chat/completions", CHAT, BAD_CHATS),
        ):
            for fields, param in table:
                answer = await served.post(path, base | fields)
                assert answer.status_code == 400, (fields, answer.text)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param), (fields, answer.text)
                assert set(error) == {"message", "type", "param", "code"}
                assert error["type"] == "invalid_request_error" and error["code"]
                assert len(answer.content) < 1000  # large input is not sent back
        assert not engine.accepted
        assert served.state.admission.num_active == 0


HARMLESS = [
    {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": None, "parallel_tool_calls": False}, {"functions": [{"name": "f"}]},
    {"include_reasoning": False}, {"functions": [{"name": "f"}], "function_call": "none"},
    {"tools": []}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"tools": None},
    {"unheard_of": {"a": 1}}, {"store": False}, {"stream_options": None}, {"top_k": -1}, {"top_k": 0}, {"n": None},
    {"cache_salt": None}, {"cache_salt": "a"},
    {"request_id": "http://10.0.0.1/"}, {"service_tier": "flex"}, {"temperature": 0}, {"logit_bias": {}},
]  # fmt: skip


async def test_harmless_fields_pass(serve, caplog):
    async with serve(FakeEngine()) as served:
        for fields in [*HARMLESS, {"unheard_of": 2}]:
            answer = await served.post("/v1/chat/completions", CHAT | fields)
            assert answer.status_code == 200, (fields, answer.text)
    assert caplog.text.count("'unheard_of'") == 1


@pytest.mark.parametrize(("excluded", "prompt"), [(False, b'["f"] hi'), (True, b"None hi")])
async def test_tools_that_may_not_be_called_are_in_the_prompt_unless_the_operator_says_no(
    excluded, prompt, serve, tokenizer_dir, tmp_path
):
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    names = "{{ tools | map(attribute='function.name') | list | tojson if tools else tools }}"
    source = names + " {{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    templates = TemplateSettings(leaves_out_unused_tools=excluded)
    async with serve(FakeEngine(), tokenizer=Tokenizer.from_dir(tmp_path, templates=templates)) as served:
        fields = {"tools": [TOOL], "tool_choice": "none", "return_token_ids": True}
        answer = await served.post("/v1/chat/completions", CHAT | fields)
    assert bytes(answer.json()["prompt_token_ids"]) == prompt


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"x"', "invalid_json"),
        (b"null", "invalid_json"),
        (b'{"model": "fake", "prompt": "\xff\xfe"}', "invalid_json"),
        (b'{"model": "fake", "prompt": "\\ud800"}', "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": 1e999}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a":' * 50_000, "invalid_json"),
    ],
)
async def test_what_is_not_json(app_client, body, code):
    answer = await app_client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code


async def test_other_refusals_have_the_same_shape(app_client):
    form = {"content-type": "application/x-www-form-urlencoded"}
    for answer, status, code in (
        (await app_client.get("/v1/completions"), 405, "method_not_allowed"),
        (await app_client.post("/v1/models"), 405, "method_not_allowed"),
        (await app_client.post("/v1/embeddings", json={}), 404, "not_found"),
        (await app_client.get("/v1/files"), 404, "not_found"),
        (await app_client.get("/"), 404, "not_found"),
        (await app_client.get("/v1/completions/"), 405, "method_not_allowed"),  # the same path
        (await app_client.get("/v1/models/none"), 404, "model_not_found"),
        (await app_client.post("/v1/completions", content=b"{}", headers=form), 415, "unsupported_media_type"),
        (await app_client.post("/tokenize", json={"prompt": "a", "messages": []}), 400, "invalid_value"),
        (await app_client.post("/detokenize", json={"tokens": [999999]}), 400, "invalid_value"),
        (await app_client.post("/detokenize", json={}), 400, "missing_required_parameter"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        assert answer.headers["x-request-id"]


async def test_request_ids_are_labels_and_nothing_else(app_client, app_engine):
    label = "tcp://10.0.0.1:5555"
    answer = await app_client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": label})
    assert answer.headers["x-request-id"] == label
    assert label not in answer.text
    assert label not in app_engine.accepted[0].request_id
    answer = await app_client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "x" * 5000})
    assert len(answer.headers["x-request-id"]) == 32


async def test_keys_guard_everything_but_probes_and_metrics(serve):
    async with serve(FakeEngine(), api_keys=("secret",)) as served:
        for path in ("/v1/models", "/version", "/load", "/tokenizer_info", "/nowhere", "//v1//models/", "/metrics/x"):
            assert (await served.http.get(served.url + path)).status_code == 401
        for path in ("/health", "/ping", "/metrics", "/health/", "//metrics"):  # probes and scrapers carry no key
            assert (await served.http.get(served.url + path)).status_code == 200
        for value in ("secret", "Basic secret", "Bearer secre", "Bearer", "Bearer secret2"):
            answer = await served.http.get(f"{served.url}/v1/models", headers={"authorization": value})
            assert answer.status_code == 401
        answer = await served.http.get(f"{served.url}/v1/models", headers={"authorization": "bearer secret"})
        assert answer.status_code == 200


@pytest.mark.parametrize("num_fronts", [0, 1])
@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/messages/count_tokens", "/v1/models"])
async def test_two_keys_are_refused_whichever_is_good(serve, name, path):
    async with serve(FakeEngine(), api_keys=("good", "better")) as served:
        for first, last in (("invented", "good"), ("good", "invented"), ("good", "good")):
            scheme = "Bearer " if name == "authorization" else ""
            headers = [(name, scheme + first), (name.title(), scheme + last)]
            answer = await served.post(path, COMPLETION, headers=headers)
            assert (answer.status_code, "more than one" in answer.text) == (400, True), answer.text
        answer = await served.post("/tokenize", COMPLETION, headers={name: scheme + "good"})
        assert answer.status_code == 200


@pytest.mark.parametrize("keys", [(), ("one",), ("one", "one"), ("one", "two")])
async def test_tenants_share_no_cache(serve, keys):
    engine = FakeEngine()
    async with serve(engine, api_keys=keys) as served:
        async def salt(key, **fields):
            headers = {"authorization": f"Bearer {key}"}
            answer = await served.post("/v1/completions", COMPLETION | fields, headers=headers)
            assert answer.status_code == 200
            return engine.accepted[-1].cache_salt

        own, chosen = await salt("one"), await salt("one", cache_salt="s")
        assert own == await salt("one") != chosen == await salt("one", cache_salt="s")
        if len(set(keys)) < 2:
            assert (own, chosen) == ("", "s")
        else:
            other = await salt("two")
            assert own != other != ""
            assert await salt("two", cache_salt=own) != own, "no salt reaches another tenant's cache"
            assert await salt("two", cache_salt="s") != chosen


async def test_a_large_body_is_refused_before_it_is_kept(serve):
    async with serve(FakeEngine(), api_keys=("secret",), max_body_bytes=1000) as served:
        answer = await served.post("/v1/completions", COMPLETION | {"prompt": "x" * 2000})  # without a key, too
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")

        async def chunks():
            for _ in range(100):
                yield b"x" * 100

        headers = {"authorization": "Bearer secret", "content-type": "application/json"}
        answer = await served.post("/v1/completions", content=chunks(), headers=headers)
        assert answer.status_code == 413
        assert served.state.admission._num_buffered_bytes == 0


async def test_all_bodies_together_are_bounded(serve):
    async with serve(FakeEngine(), max_buffered_bytes=1000) as served:
        answer = await served.post("/v1/completions", COMPLETION | {"prompt": "x" * 2000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert (await served.post("/v1/completions", COMPLETION)).status_code == 200


async def test_a_key_has_a_limit_of_its_own(serve):
    engine = FakeEngine(delay_s=None)
    async with serve(engine, api_keys=("one", "two"), max_active_reqs_per_key=2) as served:
        def ask(key):
            headers = {"authorization": f"Bearer {key}"}
            return asyncio.create_task(served.post("/v1/completions", COMPLETION, headers=headers))

        running = [ask("one"), ask("one")]
        await eventually(lambda: len(engine.accepted) == 2)
        answer = await ask("one")
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "key_limit_reached")
        assert answer.headers["retry-after"]
        sheds = served.state.metrics._sheds
        assert (sheds["key_limit_reached"], sheds["queue_full"]) == (1, 0)
        running.append(ask("two"))  # another key is not held up
        await eventually(lambda: len(engine.accepted) == 3)
        engine.release()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3
        assert (await ask("one")).status_code == 200
        await eventually(lambda: served.state.admission.num_choices == 0)


@contextlib.asynccontextmanager
async def asking(serve, engine, **limits):
    """A server with two keys and a way to ask with one of them."""
    async with serve(engine, api_keys=("one", "two"), **limits) as served:
        def ask(key, **fields):
            headers = {"authorization": f"Bearer {key}"}
            document = {"model": "fake", "prompt": "hi", "max_tokens": 1} | fields
            return asyncio.create_task(served.post("/v1/completions", document, headers=headers))

        yield served, ask


async def test_a_keys_limit_counts_choices(serve):
    engine = FakeEngine(delay_s=None)
    async with asking(serve, engine, max_active_reqs_per_key=8) as (served, ask):
        answer = await ask("one", prompt=["p"] * 8, n=124)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "n"), "no retry would help"
        assert "992" in error["message"] and " 8 " in error["message"]
        running = [ask("one", prompt=["p", "q"], n=3)]
        await eventually(lambda: len(engine.accepted) == 6)
        answer = await ask("one", n=3)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (429, "key_limit_reached")
        assert "6 of 8" in error["message"] and "asks for 3" in error["message"]
        assert len(engine.accepted) == 6, "refused whole"
        running += [ask("one", n=2), ask("two", n=8)]
        await eventually(lambda: len(engine.accepted) == 16)
        assert (await ask("one")).status_code == (await ask("two")).status_code == 429
        engine.release()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3
        await eventually(lambda: served.state.admission.num_choices == 0)
        tenants = Counter(request.tenant for request in engine.accepted)
        assert list(tenants.values()) == [8, 8] and tenants.keys().isdisjoint({"one", "two", ""})


@pytest.mark.parametrize(
    "ending", ["length", "bad", "error", "crash", "refused", "gone", "cancelled", "gone streaming"]
)
async def test_choices_are_given_back_once_however_they_end(serve, ending):
    engine = FakeEngine(delay_s=None if ending.startswith(("gone", "cancelled")) else 0.0)
    engine.fail_after = 0 if ending == "error" else None
    engine.crash_after = 0 if ending == "crash" else None
    engine.max_running = 2 if ending == "refused" else None
    status = {"length": 200, "bad": 400, "error": 500, "crash": 500, "refused": 429, "cancelled": 503}
    async with asking(serve, engine, max_active_reqs_per_key=8) as (served, ask):
        admission = served.state.admission
        for _ in range(3):
            if ending == "bad":
                asked = ask("one", n=8, max_tokens=10_000)
            else:
                asked = ask("one", n=8, max_tokens=4, stream=ending == "gone streaming")
            if ending.startswith(("gone", "cancelled")):
                await eventually(lambda: len(engine.running) == 8)
                assert admission.num_choices == 8
                if ending == "cancelled":
                    served.state.abort_all()
                else:
                    asked.cancel()
            if ending in status:
                assert (await asked).status_code == status[ending]
            await eventually(lambda: admission.num_choices == 0)
            assert ending == "refused" or not engine.running
            assert (admission.num_active, admission.num_arriving) == (0, 0)


async def test_a_key_at_its_limit_is_told_when_its_earliest_request_should_end(serve, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("jettison.server.limits.time", SimpleNamespace(monotonic=lambda: clock[0]))
    engine = FakeEngine(delay_s=None)
    async with asking(serve, engine, max_active_reqs_per_key=2) as (_, ask):
        first = ask("one", n=2)
        await eventually(lambda: len(engine.accepted) == 2)
        assert (await ask("one")).headers["retry-after"] == "1", "nothing is known yet"
        clock[0] += 30.0
        engine.release()
        await first
        engine._held.clear()
        running = [ask("one")]
        await eventually(lambda: len(engine.accepted) == 3)
        clock[0] += 10.0
        running.append(ask("one"))
        await eventually(lambda: len(engine.accepted) == 4)
        refused = await ask("one")
        assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("20", "20000")
        engine.release()
        await asyncio.gather(*running)


async def test_a_full_queue_is_refused_on_arrival(serve):
    engine = FakeEngine(delay_s=None)
    engine.max_waiting = 2
    async with serve(engine) as served:
        running = [asyncio.create_task(served.completion(max_tokens=1)) for _ in range(2)]
        await eventually(lambda: len(engine.accepted) == 2)
        answer = await served.post("/v1/completions", content=b"never parsed, so never found to be no JSON")
        assert answer.status_code == 429
        assert answer.json()["error"]["message"] == "The queue is full: 2 requests wait, and 2 may; retry later."
        assert answer.headers["retry-after-ms"] == "1500"
        engine.num_waiting = 0  # they run, though they have said nothing yet
        running.append(asyncio.create_task(served.completion(max_tokens=1)))
        await eventually(lambda: len(engine.accepted) == 3)
        engine.release()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3


@contextlib.asynccontextmanager
async def without_bodies(served, key, number):
    """So many open requests of a key whose bodies do not come."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 9\r\n\r\n"
    admission, before = served.state.admission, served.state.admission.num_active
    writers = []
    for _ in range(number):
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(head.encode())
        writers.append(writer)
    await eventually(lambda: admission.num_active == before + number)
    yield
    for writer in writers:
        writer.close()
    await eventually(lambda: admission.num_active == before)


@pytest.mark.parametrize("num_fronts", [0, 1])
async def test_bodies_that_never_come_take_no_place_of_the_queue(serve):
    engine = FakeEngine()
    engine.max_waiting = 2
    async with serve(engine, api_keys=("one", "two")) as served, without_bodies(served, "one", 4):
        answer = await served.post("/v1/completions", COMPLETION, headers={"authorization": "Bearer two"})
        assert answer.status_code == 200, answer.text
        assert served.state.admission.num_arriving == 0


def test_requests_between_body_and_queue_count_as_waiting():
    engine = FakeEngine()
    engine.max_waiting = 2
    admission = Admission(engine, ServerSettings(model_names=("fake",)))
    with contextlib.ExitStack() as stack:
        arrivals = [stack.enter_context(admission.arrival("")) for _ in range(3)]
        for arrival in arrivals:
            arrival.come()
        for arrival in arrivals[:2]:
            arrival.check_queue(is_offline=False)
        with pytest.raises(OverCapacityError):
            arrivals[2].check_queue(is_offline=False)
        assert admission.num_arriving == 2
        arrivals[0].submitted()
        arrivals[2].come()
        arrivals[2].check_queue(is_offline=False)
    assert (admission.num_active, admission.num_arriving) == (0, 0)


def test_a_request_that_came_back_with_its_front_end_and_then_came_is_counted_out():
    """Its body came to the controller after the one that let it in, and it is refused before it is queued."""
    admission = Admission(FakeEngine(), ServerSettings(model_names=("fake",)))
    with admission.returned("", 1) as arrival:
        arrival.come()
        assert admission.num_arriving == 1
    assert (admission.num_active, admission.num_arriving) == (0, 0)


async def test_too_long_says_both_numbers(app_client):
    for prompt, max_tokens, number in (("x" * 50, 360, 400), ("x" * 50, 280, 300)):
        body = COMPLETION | {"prompt": prompt, "max_tokens": max_tokens}
        answer = await app_client.post("/v1/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert str(number) in error["message"] and str(50 + max_tokens) in error["message"]


async def test_a_prompt_to_score_may_take_all_the_room(app_client):
    for num_prompt, status in ((300, 200), (301, 400), (401, 400)):
        body = COMPLETION | {"prompt": [7] * num_prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
        answer = await app_client.post("/v1/completions", json=body)
        assert answer.status_code == status, answer.text
        if status == 400:
            error = answer.json()["error"]
            assert error["param"] == "prompt"
            assert f"{num_prompt} in the prompt, 0 in the completion" in error["message"]


async def test_a_minimum_above_no_tokens_is_refused(app_client):
    answer = await app_client.post("/v1/completions", json=COMPLETION | {"max_tokens": 0, "min_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")


async def test_a_text_with_a_token_beyond_the_embedding_is_to_blame(serve, tokenizer_dir):
    """A tokenizer may have more tokens than the model has rows: which field had the text is told, and which token."""
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    backend.add_special_tokens(["<|far|>"])  # 260
    known = Tokenizer.from_dir(tokenizer_dir)
    beyond = Tokenizer(
        backend, is_byte_level=True, special_tokens={}, chat=known.chat, tokenizer_class="X")
    engine = FakeEngine()
    engine._info = dataclasses.replace(engine._info, vocab_size=260)
    async with serve(engine, tokenizer=beyond) as served:
        for path, fields, param in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a <|far|> b"}]}, "messages"),
            ("/v1/completions", {"prompt": "a <|far|> b"}, "prompt"),
            ("/v1/completions", {"prompt": ["a", "<|far|>"]}, "prompt"),
            ("/v1/completions", {"prompt": [1, 260]}, "prompt"),
        ):  # fmt: skip
            error = (await served.post(path, fields | {"max_tokens": 2})).json()["error"]
            assert (error["param"], error["code"]) == (param, "invalid_value"), error
            assert error["message"].startswith(f"{param}: ") and "260" in error["message"]
        assert (await served.completion()).status_code == 200


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"model": "fake", "prompt": "ab\xff"}', "byte 31 (0xff)"),
        (b'{"\xfe": 1}', "byte 2 (0xfe)"),
        ('{"prompt": "grüße'.encode() + b'\xc3("}', "byte 19 (0xc3)"),
        (b'{"prompt": "' + b"x" * 9000 + b'\xed\xa0\x80"}', "byte 9012 (0xed)"),
        ('{"prompt": "hi"}'.encode("utf-16"), "UTF-16"),
        ('{"prompt": "hi"}'.encode("utf-16-be"), "UTF-16"),
        (b'{"prompt": }', "byte 11"),
    ],
)
async def test_the_byte_that_is_wrong_is_named(app_client, body, told):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = await app_client.post(path, content=body, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_json")
        assert told in error["message"]


async def test_a_mark_before_the_body_is_passed_over(app_client):
    body = b"\xef\xbb\xbf" + json.dumps(COMPLETION).encode()
    assert (await app_client.post("/v1/completions", content=body)).status_code == 200
    answer = await app_client.post("/v1/completions", content=body[:-1] + b'"\xff"}')
    assert f"byte {len(body)}" in answer.json()["error"]["message"], "counted from the start of what was sent"


async def test_too_many_choices_are_the_fault_of_the_field_that_asks_for_them(serve):
    async with serve(FakeEngine(), max_choices=6, max_active_reqs_per_key=4) as served:
        for fields, param in (
            ({"prompt": ["a"] * 5}, "prompt"), ({"prompt": ["a"] * 3, "n": 2}, "n"), ({"n": 5}, "n"),
            ({"prompt": ["a"] * 7}, "prompt"), ({"prompt": ["a"] * 4, "n": 2}, "n"),
        ):  # fmt: skip
            answer = await served.completion(**fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), fields
