"""Tools and thoughts over HTTP: a model that says what a test wants, read by the SDK, whole and in a stream."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import httpx
import jsonschema
import llguidance.numpy
import pytest
from calls_written import FORMS, hermes
from fake_engine import FakeEngine
from llguidance import LLMatcher, LLTokenizer
from served import EOS, sse_events

from jettison.device.grammars import GrammarState, make_tokenizer
from jettison.device.model.vocabulary import read_vocabulary
from jettison.device.step import GrammarRow, bits_token_set, pack_ints, token_mask
from jettison.errors import ConfigError
from jettison.server.answer_form import AnswerForms
from jettison.server.app import create_app, server_state
from jettison.server.chat_renderer import ChatRenderer, TemplateSettings
from jettison.server.parsers.registry import call_kind, call_names, thinking_kind, thinking_names
from jettison.server.parsers.whole import ArgumentsParser
from jettison.server.settings import ServerSettings
from jettison.server.tokenizer import Tokenizer
from jettison.types import FinishReason

TEMPLATES = Path(__file__).parent / "chat_templates"
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Says the weather.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
ASK = {"model": "fake", "messages": [{"role": "user", "content": "Weather in Oslo?"}], "temperature": 0}
OSLO = ("get_weather", {"city": "Oslo"})
TWO = [OSLO, ("now", {})]


def says(*texts):
    """An engine that says the texts, one a request, each to its end."""
    left = list(texts)

    def script(request):
        said = left.pop(0) if len(left) > 1 else left[0]
        return [*said.encode(), EOS]

    return FakeEngine(script, max_model_len=8000)


def template(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


async def both_ways(served, **fields):
    """A message and its end, whole; and the same as the deltas of a stream add up to."""
    body = ASK | fields
    whole = await served.post("/v1/chat/completions", body)
    assert whole.status_code == 200, whole.text
    streamed = await served.post(
        "/v1/chat/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    chunks = [json.loads(event) for event in sse_events(streamed.text)[:-1]]
    choice, document = whole.json()["choices"][0], whole.json()
    message, end = added_up(chunks)
    assert without_ids(message) == without_ids(choice["message"])
    assert end == choice["finish_reason"]
    assert chunks[-1]["usage"] == document["usage"]
    return choice["message"], end, document["usage"], chunks


def added_up(chunks):
    message, end = {"content": "", "refusal": None}, None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            assert len(delta.get("tool_calls", ())) <= 1
            assert end is None
            end = choice["finish_reason"]
            for name in ("content", "reasoning_content", "reasoning"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            if "role" in delta:
                message["role"] = delta["role"]
            if "function_call" in delta:
                message.setdefault("function_call", {"name": "", "arguments": ""})
                for name, text in delta["function_call"].items():
                    message["function_call"][name] += text
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    assert call["id"] and call["type"] == "function" and call["function"]["name"]
                    calls.append({name: value for name, value in call.items() if name != "index"})
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if ("tool_calls" in message or "function_call" in message) and not message["content"]:
        message["content"] = None
    return message, end


def without_ids(message):
    calls = [call | {"id": None} for call in message.get("tool_calls", ())]
    return {name: value for name, value in message.items() if value is not None and name != "tool_calls"} | (
        {"tool_calls": calls} if calls else {})


def called(message):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


FAMILIES = [
    ("qwen3", "hermes"), ("llama3", "llama3_json"), ("mistral_v3", "mistral"), ("mistral_v7", "mistral"),
    ("granite", "granite"), ("harmony", "gpt_oss"), ("chatml", "json"),
]


@pytest.mark.parametrize(("family", "parser"), FAMILIES)
async def test_a_model_calls_in_the_form_that_its_template_shows(family, parser, serve, tokenizer_of):
    tokenizer = tokenizer_of(template(family))
    for form in FORMS[parser]:
        async with serve(says(form(TWO)), tokenizer=tokenizer) as served:
            tools = [WEATHER, NOW | {"function": NOW["function"] | {"description": "Says the time."}}]
            message, end, _, _ = await both_ways(served, tools=tools)
            assert called(message) == TWO and end == "tool_calls" and message["content"] is None
            one, end, _, _ = await both_ways(served, tools=tools, parallel_tool_calls=False)
            assert called(one) == TWO[:1] and end == "tool_calls"
            for fields in ({}, {"tools": tools, "tool_choice": "none"}):
                message, end, _, _ = await both_ways(served, **fields)
                assert "tool_calls" not in message and end == "stop"


@pytest.mark.parametrize(("family", "parser"), FAMILIES)
async def test_the_history_of_an_agent_is_taken_with_and_without_tools(family, parser, serve, tokenizer_of):
    """The ids are those that the server gave; the arguments are texts, as clients send them back."""
    tokenizer = tokenizer_of(template(family))
    form = FORMS[parser][0]
    async with serve(says(form([OSLO]), "It rains."), tokenizer=tokenizer) as served:
        asked = await served.post("/v1/chat/completions", ASK | {"tools": [WEATHER]})
        answer = asked.json()["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in answer["tool_calls"]]
        history = [*ASK["messages"], answer, *results]
        for fields in ({"tools": [WEATHER]}, {}, {"tools": [WEATHER], "tool_choice": "none"}):
            told = await served.post("/v1/chat/completions", ASK | {"messages": history} | fields)
            assert told.status_code == 200, told.text
            assert told.json()["choices"][0]["message"]["content"] == "It rains."
        prompt = served.state.engine.accepted[-1].prompt_token_ids
        text = bytes(token for token in prompt if token < 256).decode()
        assert "Oslo" in text or family == "chatml"
        assert "rain" in text


async def test_an_agent_of_the_sdk_comes_to_its_end(serve, tokenizer_of):
    """A loop as the SDK's users write it: ask, call, tell the results, until there is an answer."""
    turns = [hermes([OSLO]), "I look again.\n" + hermes(TWO), "It rains in Oslo at 12:00."]
    for stream in (False, True):
        async with serve(says(*turns), tokenizer=tokenizer_of(template("qwen3"))) as served:
            client, messages, num_calls = served.openai(), list(ASK["messages"]), 0
            while True:
                ask = {"model": "fake", "messages": messages, "tools": TOOLS}
                if stream:
                    async with client.chat.completions.stream(**ask) as events:
                        async for _ in events:
                            pass
                        choice = (await events.get_final_completion()).choices[0]
                else:
                    choice = (await client.chat.completions.create(**ask)).choices[0]
                messages.append(choice.message.model_dump(exclude_none=True))
                if choice.finish_reason != "tool_calls":
                    break
                for call in choice.message.tool_calls:
                    num_calls += 1
                    told = {"city": "Oslo"} if call.function.name == "get_weather" else {}
                    assert json.loads(call.function.arguments) == told
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
            assert (num_calls, choice.message.content, choice.finish_reason) == (3, turns[-1], "stop")
            assert messages[3]["content"] == "I look again."


async def test_functions_are_the_tools_of_old(serve, tokenizer_of):
    async with serve(says(hermes(TWO)), tokenizer=tokenizer_of(template("qwen3"))) as served:
        message, end, _, _ = await both_ways(served, functions=[WEATHER["function"], NOW["function"]])
        assert end == "function_call" and "tool_calls" not in message
        assert message["function_call"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        history = [*ASK["messages"], message, {"role": "function", "name": "get_weather", "content": "rain"}]
        answer = await served.post("/v1/chat/completions", ASK | {"messages": history})
        assert answer.status_code == 200, answer.text
    text = bytes(t for t in served.state.engine.accepted[-1].prompt_token_ids if t < 256).decode()
    assert '{"city": "Oslo"}' in text and "<tool_response>\nrain" in text


async def test_what_is_no_call_is_content_in_a_stream_too(serve, tokenizer_of):
    for text in ("I <tool_call> you later.", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "<tool_call>{"):
        async with serve(says(text), tokenizer=tokenizer_of(template("qwen3"))) as served:
            message, end, _, _ = await both_ways(served, tools=TOOLS)
            assert (message["content"], end) == (text, "stop")


async def test_an_answer_cut_in_a_call_ends_by_its_length(serve, tokenizer_of):
    long = ("get_weather", {"city": "x" * 600})
    for made, max_tokens in (([OSLO], 30), ([long], 400)):
        async with serve(says(hermes(made)), tokenizer=tokenizer_of(template("qwen3"))) as served:
            message, end, _, _ = await both_ways(served, tools=TOOLS, max_tokens=max_tokens)
            assert end == "length"
            if max_tokens == 30:
                assert message["content"] == hermes(made)[:30]
            else:
                assert message["tool_calls"][0]["function"]["arguments"].startswith('{"city": "xxx')


@pytest.mark.parametrize("at_once", [1, 1000])
@pytest.mark.parametrize("choices", [1, 2])
async def test_the_prompt_is_told_once_beside_the_choices_of_a_streams_first_chunk(
    at_once, choices, serve, tokenizer_of
):
    engine = says(hermes(TWO))
    engine.tokens_per_event = at_once
    fields = {"n": choices, "return_token_ids": True, "return_prompt_text": True, "stream": True}
    async with serve(engine, tokenizer=tokenizer_of(template("qwen3"))) as served:
        for tools in ({}, {"tools": TOOLS}):
            streamed = await served.post("/v1/chat/completions", ASK | fields | tools)
            first, *others = [json.loads(event) for event in sse_events(streamed.text)[:-1]]
            assert first["prompt_token_ids"] == list(engine.accepted[-1].prompt_token_ids)
            assert first["prompt_text"]
            assert not any("prompt_text" in chunk or "prompt_token_ids" in chunk for chunk in others)
            assert not any("prompt_token_ids" in choice for chunk in (first, *others) for choice in chunk["choices"])
            (choice,) = first["choices"]
            told = [one for chunk in (first, *others) for one in chunk["choices"] if one["index"] == choice["index"]]
            assert [i for one in told for i in one["token_ids"]] == [*hermes(TWO).encode(), EOS]


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.CANCELLED])
async def test_an_answer_that_is_over_stays_whole_where_the_engine_fails_it_then(reason, serve, tokenizer_of):
    """The answer ends before the engine's own end: with a stop string, or with the only call that it may have."""
    for said, fields, ending in (
        ("Yes.STOP and more", {"stop": ["STOP"]}, "stop"),
        (hermes(TWO), {"tools": TOOLS, "parallel_tool_calls": False}, "tool_calls"),
    ):
        engine = says(said)
        engine.finish_early = lambda request_id, engine=engine: engine._end(request_id, reason)
        async with serve(engine, tokenizer=tokenizer_of(template("qwen3"))) as served:
            message, end, _, _ = await both_ways(served, **fields)
            assert end == ending
            assert message["content"] == "Yes." if end == "stop" else called(message) == [OSLO]


async def test_without_a_parser_calls_stay_content(serve, tokenizer_of):
    for family, parser in (("harmony", "gpt_oss"), ("qwen3", "hermes")):
        tokenizer = tokenizer_of(template(family), tool_call_parser="none")
        async with serve(says(FORMS[parser][0]([OSLO])), tokenizer=tokenizer) as served:
            tools = [WEATHER]
            message, end, _, _ = await both_ways(served, tools=tools)
            assert '{"city": "Oslo"}' in message["content"] and "tool_calls" not in message and end == "stop"
            if family == "harmony":
                forced, end, _, _ = await both_ways(served, tools=tools, tool_choice="required")
                assert called(forced) == [OSLO] and end == "tool_calls"


async def test_a_call_that_breaks_off_is_no_reason_to_call(serve, tokenizer_of):
    long = hermes([("get_weather", {"city": "x" * 300 + "END" + "x" * 300})])
    for text, fields in ((long, {"stop": ["END"]}), (long[:400], {}), (hermes([OSLO]) + long[:400], {})):
        async with serve(says(text), tokenizer=tokenizer_of(template("qwen3"))) as served:
            message, end, _, _ = await both_ways(served, tools=TOOLS, **fields)
            assert end == "stop" and message["tool_calls"][-1]["function"]["arguments"].startswith('{"city": "xxx')
    async with serve(says(long), tokenizer=tokenizer_of(template("qwen3"))) as served:
        assert (await both_ways(served, tools=TOOLS))[1] == "tool_calls"


async def test_a_long_call_that_breaks_is_content_in_an_answer_in_one_piece(serve, tokenizer_of):
    text = hermes([("get_weather", {"city": "x" * 300})]).replace('"}', '" oops}')
    for before in ("", hermes([OSLO])):
        async with serve(says(before + text), tokenizer=tokenizer_of(template("qwen3"))) as served:
            (whole,) = (await served.post("/v1/chat/completions", ASK | {"tools": TOOLS})).json()["choices"]
            assert whole["message"]["content"] == text
            assert len(whole["message"].get("tool_calls", ())) == bool(before)
            assert whole["finish_reason"] == ("tool_calls" if before else "stop")
            streamed = await served.post("/v1/chat/completions", ASK | {"tools": TOOLS, "stream": True})
            message, end = added_up([json.loads(event) for event in sse_events(streamed.text)[:-1]])
            assert end == "stop" and message["tool_calls"][-1]["function"]["arguments"].startswith('{"city": "xxx')


async def test_a_long_call_whose_arguments_are_whole_is_told_whatever_follows(serve, tokenizer_of):
    long = "get_weather", {"city": "x" * 300}
    whole = hermes([long])
    for text in (whole[: whole.rindex("}")], whole.replace('"}}', '"}')):
        async with serve(says(text), tokenizer=tokenizer_of(template("qwen3"))) as served:
            message, end, _, _ = await both_ways(served, tools=TOOLS)
            assert called(message) == [long] and end == "tool_calls"


def test_arguments_as_a_whole_answer_may_break_off():
    for text, breaks_off in (('{"a": 1}', False), ('{"a": 1', True), ("[1]", True)):
        parser = ArgumentsParser("now")
        parser.feed(text)
        parser.end()
        assert parser.breaks_off == breaks_off


THOUGHT = "<think>\nOslo is <b>north</b>.\n</think>\n\n"


@pytest.mark.parametrize(("family", "source", "said"), [
    ("qwen3", None, THOUGHT), ("deepseek_r1", None, THOUGHT.removeprefix("<think>\n")),
    ("mistral", PLAIN + "[THINK]", THOUGHT.removeprefix("<think>\n").replace("</think>", "[/THINK]")),
    ("granite", None, "Here is my thought process:\nOslo is <b>north</b>.\nHere is my response:\n"),
    ("harmony", None, "<|channel|>analysis<|message|>Oslo is <b>north</b>.<|end|><|start|>assistant"),
])
async def test_thoughts_are_apart_from_content(family, source, said, serve, tokenizer_of):
    told = "granite" if family == "granite" else "auto"
    tokenizer = tokenizer_of(source or template(family), reasoning_parser=told)
    last = "<|channel|>final<|message|>Cold." if family == "harmony" else "Cold."
    async with serve(says(said + last), tokenizer=tokenizer) as served:
        message, end, usage, chunks = await both_ways(served)
        assert message["reasoning_content"] == message["reasoning"] == "Oslo is <b>north</b>."
        assert (message["content"], end) == ("Cold.", "stop")
        num = usage["completion_tokens_details"]["reasoning_tokens"]
        assert len("Oslo is <b>north</b>.") <= num <= len(said)
        assert all("content" not in c["choices"][0]["delta"] or not c["choices"][0]["delta"].get("reasoning")
                   for c in chunks[1:-1])
        message, _, without, _ = await both_ways(served, include_reasoning=False)
        assert "reasoning_content" not in message and message["content"] == "Cold."
        assert without == usage


async def test_a_call_begins_behind_the_thoughts(serve, tokenizer_of):
    text = f"<think>\nI could say {hermes([OSLO])} here.\n</think>\n\n{hermes([OSLO])}"
    async with serve(says(text), tokenizer=tokenizer_of(template("qwen3"))) as served:
        message, end, _, _ = await both_ways(served, tools=TOOLS)
        assert called(message) == [OSLO] and end == "tool_calls"
        assert message["reasoning"].startswith("I could say <tool_call>")


async def test_thinking_is_turned_off_through_the_template(serve, tokenizer_of):
    async with serve(says("Cold."), tokenizer=tokenizer_of(template("qwen3"))) as served:
        for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
            message, _, usage, _ = await both_ways(served, **fields)
            assert message["content"] == "Cold." and not message.get("reasoning")
            assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
            assert bytes(served.state.engine.accepted[-1].prompt_token_ids[-10:]) == b"</think>\n\n"


def test_whether_an_answer_begins_with_thoughts():
    def thinks(prompt, opened="", told="qwen3"):
        chat = ChatRenderer({}, {}, TemplateSettings(reasoning_parser=told))
        return AnswerForms(chat).speech(prompt, opened).thinks

    assert thinks("user: q assistant: ") == "maybe"
    assert thinks("user: q assistant: <think>\n") == "already"
    assert thinks("user: q assistant: <think>\n\n</think>\n\n") == "no"
    assert thinks("user: <think> assistant: ", told="deepseek_r1") == "already"
    assert thinks("<think></think>\n", told="deepseek_r1") == "no"
    assert thinks("a: <think> Hm", opened="<think> Hm") == "already"
    assert thinks("a: <think> Hm </think> So", opened="<think> Hm </think> So") == "no"
    assert thinks("<think>", told="none") == thinks("<think>", told="auto") == "no"


@pytest.mark.parametrize(("family", "calls", "thinking"), [
    ("qwen3", "hermes", "qwen3"), ("llama3", "llama3_json", None), ("mistral_v3", "mistral", None),
    ("deepseek_r1", "json", "qwen3"), ("granite", "granite", None), ("harmony", "gpt_oss", "gpt_oss"),
    ("smollm3", "json", "qwen3"), ("chatml", "json", None), ("llama2", "json", None),
])
def test_parsers_are_chosen_by_the_template(family, calls, thinking):
    kinds = call_kind("auto", template(family)), thinking_kind("auto", template(family))
    assert [kind and kind.name for kind in kinds] == [calls, thinking]


def test_parsers_are_chosen_by_name(tmp_path):
    assert call_kind("auto", "<seed:tool_call>\n<function=").name == "qwen3_coder"
    for name in call_names():
        assert call_kind(name, None).make([WEATHER]).feed("x") is not None
    for name in thinking_names():
        assert thinking_kind(name, None).begin
    assert thinking_kind("olmo3", None) is thinking_kind("qwen3", None)
    assert call_kind("none", template("qwen3")) is thinking_kind("none", template("qwen3")) is None
    for told in ("nobody", str(tmp_path / "missing.py")):
        with pytest.raises(ConfigError, match="--tool-call-parser"):
            call_kind(told, None)
    with pytest.raises(ConfigError, match="--reasoning-parser"):
        thinking_kind("nobody", None)


OWN = '''
MARKERS = ("<|user|>",)

class Parser:
    def __init__(self, tools):
        self.names = [tool["function"]["name"] for tool in tools]
        self.text = ""

    def feed(self, text):
        self.text += text
        return []

    def end(self):
        if not self.text.startswith("<|user|>CALL "):
            return [("content", self.text)]
        name = self.text.split()[1]
        return [("call", name), ("arguments", "{}"), ("end", "")]


def parser(tools):
    return Parser(tools)
'''


async def test_a_parser_of_ones_own_is_a_file(serve, tokenizer_of, tmp_path, caplog):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    tokenizer = tokenizer_of(template("chatml"), tool_call_parser=str(path))
    engine = FakeEngine(lambda request: [259, *b"CALL now", EOS], max_model_len=2000)
    async with serve(engine, tokenizer=tokenizer) as served:
        message, end, _, _ = await both_ways(served, tools=TOOLS)
        assert called(message) == [("now", {})] and end == "tool_calls"
        assert (await both_ways(served))[0]["content"] == "CALL now"  # a special token is no text else
    for body in ("1 / 0", "return [('call', 'now')] * 2", "return [('arguments', '')]", "return 5",
                 "return [('content', '\\ud800')]", "return [('shout', 'x')]", "return [('content', 5)]"):
        path.write_text(f"class P:\n def feed(self, text):\n  {body}\n end = feed\nparser = lambda tools: P()\n")
        tokenizer = tokenizer_of(template("chatml"), tool_call_parser=str(path))
        async with serve(says("hello"), tokenizer=tokenizer) as served:
            assert (await both_ways(served, tools=TOOLS))[0]["content"] == "hello"
    assert "the parser of --tool-call-parser failed" in caplog.text
    for wrong, why in (("x = (", "SyntaxError"), ("parser = 5", "has no function"), ("1 / 0", "ZeroDivisionError")):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=why):
            call_kind(str(path), None)


async def test_special_tokens_that_mark_calls_are_seen_and_others_are_not(serve, tokenizer_dir, tmp_path):
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    document = json.loads(path.read_text())
    added = document["added_tokens"]
    added.append(added[-1] | {"id": 260, "content": "[TOOL_CALLS]"})
    path.write_text(json.dumps(document))
    (tmp_path / "chat_template.jinja").write_text(template("mistral_v7"))
    call = b'get_weather[ARGS]{"city": "Oslo"}'
    engine = FakeEngine(lambda request: [259, *b"Hm.", 260, *call, EOS], max_model_len=2000)
    async with serve(engine, tokenizer=Tokenizer.from_dir(tmp_path)) as served:
        message, end, _, _ = await both_ways(served, tools=TOOLS)
        assert called(message) == [OSLO] and message["content"] == "Hm." and end == "tool_calls"
        assert len(message["tool_calls"][0]["id"]) == 9
        assert (await both_ways(served))[0]["content"] == "Hm." + call.decode()


async def test_beside_logprobs_and_ids_and_several_choices(serve, tokenizer_of):
    async with serve(says(THOUGHT + hermes(TWO)), tokenizer=tokenizer_of(template("qwen3"))) as served:
        fields = {"tools": TOOLS, "n": 2, "logprobs": True, "return_token_ids": True}
        answer = (await served.post("/v1/chat/completions", ASK | fields)).json()
        streamed = await served.post("/v1/chat/completions", ASK | fields | {"stream": True})
    ids = {0: [], 1: []}
    for event in sse_events(streamed.text)[:-1]:
        for choice in json.loads(event)["choices"]:
            ids[choice["index"]] += choice["token_ids"]
    for choice in answer["choices"]:
        assert called(choice["message"]) == TWO
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        assert ids[choice["index"]] == choice["token_ids"]


# --- calls that have to be made

DEEP = {"type": "function", "function": {"name": "plan", "parameters": {
    "type": "object", "additionalProperties": False, "required": ["steps", "mode"], "properties": {
        "steps": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/step"}},
        "mode": {"enum": ["fast", "</tool_call>"]}, "note": {"type": "string"}},
    "$defs": {"step": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"],
                       "additionalProperties": False}}}}}  # fmt: skip
FORCED = [WEATHER | {"function": WEATHER["function"] | {
    "parameters": WEATHER["function"]["parameters"] | {"additionalProperties": False}}}, DEEP]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in FORCED}


USUAL = frozenset(b'"}],:{</')
FREE = (
    (b"<think>", b"So.</think>"), (b"analysis<|message|>", b"So.<|end|><|start|>assistant"),
    (b"commentary<|message|>", b"So.<|end|><|start|>assistant"))
"""Where free text begins, and how it ends: one drawn at random would not."""


def anything_allowed(rng, opening=b""):
    """An engine whose model says ``opening``, then whatever the request's grammar allows, drawn at random."""
    words = LLTokenizer("byte")

    def script(request):
        grammar = request.params.grammar
        told = list(opening)
        matcher = LLMatcher(words, grammar.text)
        marker = grammar.begins_after.encode()
        behind = told if not marker else list(bytes(told).partition(marker)[2])
        assert matcher.try_consume_tokens(behind) == len(behind), opening
        while not matcher.is_stopped() and len(told) < 3000:
            mask = llguidance.numpy.allocate_token_bitmask(1, words.vocab_size)
            llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
            bits = mask.view("uint32")[0]
            allowed = [token for token in range(words.vocab_size) if bits[token // 32] >> (token % 32) & 1]
            usual = [token for token in allowed if token in USUAL or token >= 256]
            token = rng.choice(usual if usual and rng.random() < 0.6 else allowed)
            if token >= 256:
                assert matcher.is_accepting()
                break
            closing = next((end for begin, end in FREE if bytes([*told, token]).endswith(begin)), b"")
            assert matcher.consume_tokens([token, *closing])
            told += [token, *closing]
        assert matcher.is_accepting(), bytes(told)
        return [*told, EOS]

    return FakeEngine(script, max_model_len=8000)


def checked(calls):
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])


@pytest.mark.parametrize("family", [
    "qwen3", "llama3", "mistral_v7", "granite", "harmony", "deepseek_r1", "chatml"])
@pytest.mark.parametrize("seed", range(2))
async def test_forced_calls_parse_whatever_the_model_draws(family, seed, serve, tokenizer_of):
    opening = {"deepseek_r1": b"So.</think>", "qwen3": (b"", b"<think>So.</think>\n\n")[seed % 2]}.get(family, b"")
    if family == "harmony" and seed % 2:
        opening = b"<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    tools = [tool | {"function": tool["function"] | {"description": "d"}} for tool in FORCED]
    engine = anything_allowed(random.Random(seed), opening)
    templates = template(family) if family != "harmony" else PLAIN + "<|channel|>"
    async with serve(engine, tokenizer=tokenizer_of(templates)) as served:
        for choice in ("required", {"type": "function", "function": {"name": "plan"}}):
            for stream in (False, True):
                fields = {"tools": tools, "tool_choice": choice, "stream": stream, "parallel_tool_calls": seed > 0}
                answer = await served.post("/v1/chat/completions", ASK | fields)
                assert answer.status_code == 200, answer.text
                message, end = added_up([json.loads(event) for event in sse_events(answer.text)[:-1]]) if stream else (
                    answer.json()["choices"][0]["message"], answer.json()["choices"][0]["finish_reason"])
                assert end == "tool_calls", message
                checked(called(message))
                assert len(message["tool_calls"]) == 1 or (seed > 0 and choice == "required")
                assert choice == "required" or called(message)[0][0] == "plan"
                assert not (message["content"] or "").strip() or family == "harmony"
                thought = message.get("reasoning") or ""
                assert thought.startswith("So.") or (b"So." not in opening and not thought)


@pytest.mark.parametrize("family", ["qwen3", "mistral_v7", "chatml"])
async def test_a_form_of_answers_leaves_room_for_thoughts_and_calls(family, serve, tokenizer_of):
    schema = {"type": "object", "properties": {"grade": {"enum": ["good", "bad"]}}, "required": ["grade"],
              "additionalProperties": False}  # fmt: skip
    asked = {"type": "json_schema", "json_schema": {"name": "g", "schema": schema}}
    seen = set()
    for seed in range(8):
        thought = b"<think>So.</think>" if family == "qwen3" and seed % 2 else b""
        engine = anything_allowed(random.Random(seed), thought)
        async with serve(engine, tokenizer=tokenizer_of(template(family))) as served:
            for fields in ({}, {"tools": FORCED}):
                answer = await served.post("/v1/chat/completions", ASK | fields | {"response_format": asked})
                assert answer.status_code == 200, answer.text
                choice = answer.json()["choices"][0]
                assert (choice["message"].get("reasoning") == "So.") == bool(thought) or family == "qwen3"
                if choice["finish_reason"] == "tool_calls":
                    checked(called(choice["message"]))
                else:
                    jsonschema.validate(json.loads(choice["message"]["content"]), schema)
                seen.add((bool(fields), choice["finish_reason"]))
    assert seen == {(False, "stop"), (True, "stop"), (True, "tool_calls")}


async def test_without_a_parser_a_form_of_answers_leaves_no_room_for_calls(serve, tokenizer_of):
    asked = {"type": "json_schema", "json_schema": {"name": "g", "schema": {"type": "array"}}}
    for family in ("qwen3", "mistral_v7", "harmony"):
        said = '[{"name": "get_weather", "arguments": {"city": "Oslo"}}]'
        templates = template(family) if family != "harmony" else PLAIN + "<|channel|>"
        engine = says(said if family != "harmony" else f"<|channel|>final<|message|>{said}")
        async with serve(engine, tokenizer=tokenizer_of(templates, tool_call_parser="none")) as served:
            message, end, _, _ = await both_ways(served, tools=[WEATHER], response_format=asked)
            assert (message["content"], end) == (said, "stop") and "tool_calls" not in message
            assert "get_weather" not in engine.accepted[-1].params.grammar.text


async def test_a_form_of_calls_of_the_clients_own_is_the_models(serve, tokenizer_of):
    tag = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["[TOOL_CALLS]"], "tags": [{
        "type": "tag", "begin": "[TOOL_CALLS]", "content": {"type": "any_text"}, "end": "]"}]}}
    engine = says(FORMS["mistral"][0]([OSLO]))
    async with serve(engine, tokenizer=tokenizer_of(template("mistral_v7"))) as served:
        message, end, _, _ = await both_ways(served, tools=[WEATHER], response_format=tag)
    assert called(message) == [OSLO] and end == "tool_calls"
    assert '\\"arguments' not in engine.accepted[-1].params.grammar.text


def merges_the_mark(folder):
    """Write a tokenizer to which ``</think>`` is text, in pieces that hold what is around it too, as OLMo 3's does."""
    told = json.loads((folder / "tokenizer.json").read_text())
    vocab = told["model"]["vocab"]
    vocab |= {token["content"]: token["id"] for token in told["added_tokens"]}  # else merges would get their ids
    for pair in (("<", "/"), (".", "</"), ("t", "h"), ("i", "n"), ("th", "in"), ("thin", "k"), ("Ċ", "Ċ"), (">", "ĊĊ")):
        vocab["".join(pair)] = len(vocab)
        told["model"]["merges"].append(pair)
    (folder / "tokenizer.json").write_text(json.dumps(told))


@pytest.mark.parametrize("thought", ["So.</think>", "So\n</think>\n\n", "So.</think>\n\n"])
@pytest.mark.parametrize("asked", [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["no"]}}}},
    {"structured_outputs": {"grammar": 'start: "\\"no\\""'}},
])  # fmt: skip
async def test_an_answer_is_bound_behind_thoughts_whose_end_is_text(asked, thought, serve, tokenizer_of, tmp_path):
    tokenizer_of(template("deepseek_r1"))
    merges_the_mark(tmp_path)
    tokenizer, vocabulary = Tokenizer.from_dir(tmp_path), read_vocabulary(tmp_path)
    words = make_tokenizer(vocabulary, (EOS,), len(vocabulary.tokens))

    def script(request):
        told = tokenizer.encode(thought, False)
        while told[-1] != EOS:
            grammar = request.params.grammar
            row = GrammarRow("r", grammar.text, grammar.begins_after, 0, pack_ints(told), (EOS,))
            mask = GrammarState(words, row).mask_behind(row)
            assert mask is not None
            told.append(int(token_mask(bits_token_set(mask), len(vocabulary.tokens)).nonzero()[0][-1]))
        return told

    async with serve(FakeEngine(script, max_model_len=8000), tokenizer=tokenizer) as served:
        answer = await served.post("/v1/chat/completions", ASK | asked)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (thought.partition("</")[0].strip(), '"no"')


async def test_a_tool_whose_schema_cannot_be_followed_is_named(serve, tokenizer_of):
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "objct"}}}
    async with serve(FakeEngine(), tokenizer=tokenizer_of(template("qwen3"))) as served:
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            answer = await served.post("/v1/chat/completions", ASK | {"tools": [bad], "tool_choice": choice})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, "tool_choice", "invalid_grammar")
        answer = await served.post("/v1/chat/completions", ASK | {"tools": [bad], "max_tokens": 5})
        assert answer.status_code == 200, answer.text  # nothing has to follow it


async def test_a_tool_that_is_not_strict_is_called_though_its_schema_cannot_be_followed(serve, tokenizer_of, caplog):
    """One such tool is no reason to refuse the others; OpenAI does not follow such schemas."""
    schema = {"type": "object", "properties": {
        "tags": {"type": "array", "uniqueItems": True}, "name": {"type": "string", "pattern": "^(?!x)y"}}}  # fmt: skip
    odd = {"type": "function", "function": {"name": "f", "parameters": schema}}
    async with serve(FakeEngine(max_model_len=8000), tokenizer=tokenizer_of(template("qwen3"))) as served:
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            fields = {"tools": [WEATHER, odd], "tool_choice": choice, "max_tokens": 5}
            answer = await served.post("/v1/chat/completions", ASK | fields)
            assert answer.status_code == 200, answer.text
            fields["tools"] = [WEATHER, {"type": "function", "function": odd["function"] | {"strict": True}}]
            answer = await served.post("/v1/chat/completions", ASK | fields)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_grammar")
    told = [record.getMessage() for record in caplog.records if "tools.parameters." in record.getMessage()]
    assert [line.split("'")[1] for line in sorted(told)] == ["tools.parameters.pattern", "tools.parameters.uniqueItems"]


async def test_of_a_tool_that_may_not_be_called_nothing_is_said_to_be_left_out(serve, tokenizer_of, caplog):
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    odd = {"type": "function", "function": {"name": "f", "parameters": schema}}
    async with serve(FakeEngine(max_model_len=8000), tokenizer=tokenizer_of(template("qwen3"))) as served:
        for fields in (
            {"tool_choice": "none", "response_format": {"type": "json_object"}},
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ):
            answer = await served.post(
                "/v1/chat/completions", ASK | {"tools": [WEATHER, odd], "max_tokens": 5} | fields)
            assert answer.status_code == 200, answer.text
    assert not [record for record in caplog.records if "tools.parameters." in record.getMessage()]


# --- anything at all

TEXTS = (
    "auto", "none", "required", "any", "function", "get_weather", "now", "", " ", "{}", '{"city": 1}', "object",
    "string", "<tool_call>", "x" * 300, "a.b", "é", "\u2028", "custom", "user")
KEYS = (
    "type", "function", "name", "parameters", "properties", "arguments", "description", "id", "tool_calls", "$ref",
    "anyOf", "enum", "role", "content", "city", "strict", "enable_thinking")
ROLES = ("user", "assistant", "tool", "function", "system")
NUM_FUZZED = int(os.environ.get("JETTISON_FUZZ_REQUESTS", "400"))


def any_value(rng, depth=3):
    """Any JSON."""
    kind = rng.randrange(8 if depth else 5)
    if kind < 5:
        return rng.choice((None, True, False, rng.randrange(-3, 4), rng.random(), 1e300, rng.choice(TEXTS)))
    if kind == 5:
        return [any_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): any_value(rng, depth - 1) for _ in range(rng.randrange(5))}


def any_tool(rng):
    return rng.choice((any_value(rng), WEATHER, NOW, {"type": "function", "function": {
        "name": rng.choice(TEXTS), "parameters": any_value(rng)}}))


def any_call(rng):
    return rng.choice((any_value(rng), {"id": rng.choice(TEXTS), "type": "function", "function": {
        "name": rng.choice(TEXTS), "arguments": rng.choice((any_value(rng), rng.choice(TEXTS)))}}))


def any_message(rng):
    message = {"role": rng.choice(ROLES), "content": rng.choice((rng.choice(TEXTS), None, any_value(rng)))}
    for name in ("tool_calls", "function_call", "tool_call_id", "reasoning_content", "name"):
        if rng.random() < 0.2:
            calls = [any_call(rng) for _ in range(rng.randrange(3))]
            message[name] = rng.choice((any_value(rng), calls if name == "tool_calls" else any_call(rng)))
    return message


def any_fields(rng):
    named = {"type": "function", "function": {"name": rng.choice(TEXTS)}}
    fields = {
        "tools": rng.choice((any_value(rng), [any_tool(rng) for _ in range(rng.randrange(3))], TOOLS)),
        "functions": rng.choice((any_value(rng), [any_value(rng)], [WEATHER["function"]])),
        "tool_choice": rng.choice((any_value(rng), rng.choice(TEXTS), named)),
        "function_call": rng.choice((any_value(rng), named["function"])),
        "parallel_tool_calls": rng.choice((any_value(rng), True, False)),
        "include_reasoning": rng.choice((any_value(rng), True, False)),
        "chat_template_kwargs": rng.choice((any_value(rng), {"enable_thinking": any_value(rng)})),
        "messages": rng.choice((any_value(rng), [any_message(rng) for _ in range(rng.randrange(1, 4))])),
        "stream": rng.random() < 0.5, "stop": "o", "n": rng.randrange(1, 3), "response_format": {"type": "json_object"},
    }  # fmt: skip
    return {name: value for name, value in fields.items() if rng.random() < 0.3}


@pytest.mark.parametrize("family", ["qwen3", "mistral_v3", "harmony", "chatml"])
async def test_no_value_of_the_new_fields_is_our_fault(family, tokenizer_of, caplog):
    """Fields are drawn at random, and so are the answers that are read."""
    rng = random.Random(family)
    texts = [THOUGHT, hermes(TWO), *(form(TWO) for forms in FORMS.values() for form in forms), "plain", "<think>", "{"]

    def script(request):
        said = "".join(rng.choice(texts)[: rng.randrange(200)] for _ in range(rng.randrange(4)))
        return [*said.encode()[:150], EOS]

    app = create_app(
        FakeEngine(script, max_model_len=8000), tokenizer_of(template(family)), ServerSettings(model_names=("fake",)))
    statuses = Counter()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for _ in range(NUM_FUZZED):
            fields = any_fields(rng)
            answer = await client.post("/v1/chat/completions", json=ASK | fields)
            assert answer.status_code in (200, 400), (fields, answer.text)
            assert '"server_error"' not in answer.text, fields
            statuses[answer.status_code] += 1
    server_state(app).grammars.close()
    assert min(statuses[200], statuses[400]) > NUM_FUZZED // 20, statuses
    assert "Traceback" not in caplog.text


async def test_some_of_the_tools_may_be_allowed(serve, tokenizer_of):
    """OpenAI's ``allowed_tools``: all are in the prompt, which so stays the same from turn to turn, and some are
    called."""
    named = {"type": "function", "function": {"name": "now"}}
    async with serve(says(hermes(TWO)), tokenizer=tokenizer_of(template("qwen3"))) as served:
        for mode in ("auto", "required"):
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
            message, end, _, _ = await both_ways(served, tools=TOOLS, tool_choice=choice)
            assert called(message) == [("now", {})] and end == "tool_calls"
            accepted = served.state.engine.accepted[-1]
            assert '"name": "get_weather"' in bytes(t for t in accepted.prompt_token_ids if t < 256).decode()
            grammar = accepted.params.grammar
            assert (grammar is None) == (mode == "auto")
            assert grammar is None or ("now" in grammar.text and "get_weather" not in grammar.text)
        flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
        choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
        body = {"model": "fake", "input": "x", "tools": flat, "tool_choice": choice}
        answer = await served.post("/v1/responses", body)
        assert [item.get("name") for item in answer.json()["output"] if item["type"] == "function_call"] == ["now"]
        for bad in ({}, {"mode": "auto"}, {"mode": "some", "tools": [named]}, {"mode": "auto", "tools": [3]},
                    {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]}, 7):
            wrong = await served.post("/v1/chat/completions", ASK | {
                "tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": bad}})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tool_choice")
