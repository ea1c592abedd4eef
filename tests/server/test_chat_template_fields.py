"""Over HTTP: what a request tells the chat template, and what it may not."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
from conversations import TOOL, call, says
from fake_engine import FakeEngine

from jettison.server.batches.check import Job, endpoint_for
from jettison.server.batches.lines import parse_line
from jettison.server.chat_renderer import TemplateSettings
from jettison.server.tokenizer import Tokenizer

SOURCE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
    "{{ m.tool_call_id }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{{ reasoning_effort }}{{ documents | tojson if documents }}{{ tools | length if tools }}"
    "{% endif %}"
)
USER = says("user", "q")
CHAT = {"model": "fake", "messages": [USER], "max_tokens": 1, "return_token_ids": True}
PREFILLED = {"messages": [USER, says("assistant", "Sure: ")], "continue_final_message": True}
HISTORY = [USER, says("assistant", None, tool_calls=[call('{"city": "Rom"}')]),
           says("tool", "dry", tool_call_id="abcdefghi"), says("user", "So?")]  # fmt: skip


@pytest.fixture
def folder(tokenizer_dir, tmp_path):
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(SOURCE)
    return tmp_path


@pytest.fixture
def serving(serve, folder):
    """``async with serving(...)``: a server with this template, told so of templates."""
    return lambda **told: serve(
        FakeEngine(), tokenizer=Tokenizer.from_dir(folder, templates=TemplateSettings(**told)))


async def prompts(served, fields):
    """The prompt of a chat; ``/tokenize`` says the same."""
    answer = await served.post("/v1/chat/completions", CHAT | fields)
    assert answer.status_code == 200, answer.text
    made = answer.json()["prompt_token_ids"]
    fields = {name: value for name, value in fields.items() if name != "tool_choice"}
    tokens = await served.post("/tokenize", {"messages": CHAT["messages"], **fields})
    assert tokens.json()["tokens"] == made
    return (await served.post("/detokenize", {"tokens": made})).json()["prompt"]


@pytest.mark.parametrize(("fields", "wanted"), [
    ({}, "<user>q<assistant>"),
    ({"messages": [USER, says("assistant", "", tool_calls=[call({}) | {"type": None, "id": None}])],
      "add_generation_prompt": False},
     '<user>q<assistant>[{"function": {"name": "weather", "arguments": {}}}]'),  # as stream accumulators leave it
    ({"add_generation_prompt": False}, "<user>q"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "<user>q<assistant><think></think>"),
    ({"chat_template_kwargs": {"enable_thinking": None, "add_generation_prompt": True}}, "<user>q<assistant>"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "<user>q"),
    ({"messages": PREFILLED["messages"], "chat_template_kwargs": {"continue_final_message": True}},
     "<user>q<assistant>Sure: "),
    (PREFILLED | {"add_generation_prompt": False}, "<user>q<assistant>Sure: "),
    (PREFILLED, "<user>q<assistant>Sure: "),
    ({"reasoning_effort": "low"}, "<user>q<assistant>low"),
    ({"reasoning_effort": "none"}, "<user>q<assistant><think></think>none"),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "<user>q<assistant>none"),
    ({"documents": [{"title": "é"}]}, '<user>q<assistant>[{"title": "é"}]'),
    ({"tools": [TOOL], "tool_choice": "none"}, "<user>q<assistant>1"),
    ({"tools": [TOOL, TOOL]}, "<user>q<assistant>2"),
    ({"tools": []}, "<user>q<assistant>"),
    ({"messages": HISTORY},
     '<user>q<assistant>[{"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '
     '{"city": "Rom"}}}]<tool>dryabcdefghi<user>So?<assistant>'),
    ({"messages": [USER, says("assistant", None, function_call={"name": "f", "arguments": '{"a": 1}'}),
                   says("function", "dry", name="f"), USER]},
     '<user>q<assistant>[{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]'
     "<tool>drycall00001<user>q<assistant>"),
    ({"messages": [USER, says("function", "dry", name="f"), says("function", "wet", name="f"), USER]},
     "<user>q<tool>drycall00001<tool>wetcall00002<user>q<assistant>"),
    ({"messages": [says("system", [{"type": "text", "text": "a"}, "b"]), USER]}, "<system>a\nb<user>q<assistant>"),
])  # fmt: skip
async def test_fields_reach_the_template(fields, wanted, serving):
    async with serving() as served:
        assert await prompts(served, fields) == wanted


@pytest.mark.parametrize(("reasoning", "effort", "is_told"), [
    ("high", "high", False), ("none", "<think></think>none", False), ({"effort": "low"}, "low", False),
    ({"enabled": "true"}, "", False), (None, "", False),
    ("much", "", True), ("", "", True), (True, "", True), (False, "", True), (3, "", True), ([], "", True),
])  # fmt: skip
async def test_reasoning_may_be_an_effort_and_else_is_passed_over(reasoning, effort, is_told, serving, caplog):
    async with serving() as served:
        answer = await served.post("/v1/chat/completions", CHAT | {"reasoning": reasoning})
        assert answer.status_code == 200, answer.text
        [request] = served.state.engine.accepted
        prompt = (await served.post("/detokenize", {"tokens": list(request.prompt_token_ids)})).json()["prompt"]
        assert prompt == f"<user>q<assistant>{effort}"
    assert ("request field 'reasoning' is ignored" in caplog.text) == is_told


@pytest.mark.parametrize(("fields", "param"), [
    (PREFILLED | {"add_generation_prompt": True}, "continue_final_message"),
    ({"continue_final_message": True, "messages": [USER, HISTORY[1]]}, "continue_final_message"),
    ({"chat_template": SOURCE}, "chat_template"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": SOURCE}}, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"tools": [TOOL]}}, "chat_template_kwargs.tools"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}, "add_generation_prompt": True},
     "chat_template_kwargs.add_generation_prompt"),
    ({"chat_template_kwargs": {"add_generation_prompt": "no"}}, "chat_template_kwargs.add_generation_prompt"),
    (PREFILLED | {"chat_template_kwargs": {"continue_final_message": False}},
     "chat_template_kwargs.continue_final_message"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ({"documents": ["a"]}, "documents[0]"),
    ({"messages": [USER, says("assistant", None, tool_calls={})]}, "messages[1].tool_calls"),
    ({"messages": [USER, says("assistant", None, tool_calls=[5])]}, "messages[1].tool_calls[0]"),
    ({"messages": [USER, says("assistant", None, tool_calls=[call(5)])]},
     "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [USER, says("assistant", None, tool_calls=[call({}, name=None)])]},
     "messages[1].tool_calls[0].function.name"),
    ({"messages": [USER, says("assistant", None, tool_calls=[call({}) | {"type": "custom"}])]},
     "messages[1].tool_calls[0]"),
    ({"messages": [USER, says("assistant", None, function_call={"name": 5})]},
     "messages[1].tool_calls[0].function.name"),
    ({"messages": [USER, says("assistant", None, function_call="f")]}, "messages[1].function_call"),
    ({"messages": [USER, says("tool", "a", tool_call_id=5)]}, "messages[1].tool_call_id"),
    ({"messages": [says("assistant", "a", reasoning_content=["b"]), USER]}, "messages[0].reasoning_content"),
])  # fmt: skip
async def test_what_cannot_be_is_named(fields, param, serving):
    async with serving() as served:
        for path in ("/v1/chat/completions", "/tokenize"):
            body = CHAT | fields if path != "/tokenize" else {"messages": CHAT["messages"], **fields}
            answer = await served.post(path, body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert answer.json()["error"]["message"].startswith(param)


async def test_templates_of_requests_are_taken_where_the_operator_trusts_them(serving):
    async with serving(trusts_requests=True) as served:
        assert await prompts(served, {"chat_template": "mine {{ messages[0].content }}"}) == "mine q"
        answer = await served.post("/v1/chat/completions", CHAT | {"chat_template": "{{ 1"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")


async def test_the_operators_defaults_yield_to_the_request(serving):
    async with serving(default_kwargs={"enable_thinking": False}) as served:
        assert await prompts(served, {}) == "<user>q<assistant><think></think>"
        assert await prompts(served, {"chat_template_kwargs": {"enable_thinking": True}}) == "<user>q<assistant>"


async def test_a_variable_that_no_template_asks_for_is_told_once(serving, caplog):
    with caplog.at_level(logging.WARNING):
        async with serving() as served:
            for _ in range(2):
                await prompts(served, {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}})
    assert caplog.text.count("chat_template_kwargs.thinking") == 1
    assert "enable_thinking" not in caplog.text


async def test_lines_of_batches_go_through_the_same_template(folder):
    job = Job(
        path="", endpoint="/v1/chat/completions", tokenizer_dir=str(folder), model_names=("fake",), max_model_len=999,
        max_request_tokens=999, vocab_size=300, eos_token_ids=(257,), max_line_bytes=9999, max_lines=9,
        default_chat_max_tokens=None, default_completion_max_tokens=16, max_choices=9, max_stops=4,
        max_logprobs=20,
        templates=TemplateSettings(chat_template="<{{ a }}>{{ messages[0].content }}", default_kwargs={"a": 5}),
    )  # fmt: skip
    line = {"custom_id": "a", "method": "POST", "url": job.endpoint, "body": CHAT}
    _, [prompt], _ = await endpoint_for(job).prepare(parse_line(json.dumps(line).encode(), job.endpoint, 9999).body)
    assert prompt.text == "<5>q"
