"""What people reported of other servers and of their clients, sent again to this one: each report with its outcome.

A report is a coroutine of the name that ``public_reports.md`` gives as its test: it sends what the client sent, and
asserts what comes back. ``python tests/server/public_reports.py --write`` writes that table anew.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import openai
from calls_written import as_json, granite, hermes
from fake_engine import FakeEngine
from llguidance import LLMatcher, LLTokenizer
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from served import EOS, sse_events
from test_messages import claude_code
from test_responses import CODEX
from test_tools import OSLO, TOOLS, WEATHER, template

PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- reports -->\n", "<!-- /reports -->\n"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "Weather in Oslo?"}]
CALL = {"id": "call_1234567890", "type": "function", "function": {
    "name": "get_weather", "arguments": '{"city": "Oslo"}'}}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "call_1234567890", "content": "rain"}


@dataclass(frozen=True)
class Report:
    """One public report, and how this server stands to it."""

    where: str
    """The repository and the number of the issue or pull request."""
    told: str
    """What went wrong there."""
    outcome: str
    """What comes of it here."""
    run: Callable[[Bench], Awaitable[None]]

    @property
    def name(self) -> str:
        """Of its test."""
        return self.run.__name__


REPORTS: list[Report] = []


def report(where: str, told: str, outcome: str) -> Callable[[Callable[[Bench], Awaitable[None]]], Any]:
    """Keeps a coroutine as the replay of a report."""

    def kept(run: Callable[[Bench], Awaitable[None]]) -> Any:
        REPORTS.append(Report(where, told, outcome, run))
        return run

    return kept


@dataclass
class Bench:
    """Makes servers over models that say what a report wants."""

    serve: Any
    tokenizer_of: Any
    caplog: Any

    def says(self, *texts: str, family: str = "qwen3", at_once: int = 1, **settings: Any) -> Any:
        """A server whose model says the texts, one a request, ``at_once`` tokens an event."""
        left = list(texts)

        def script(request: Any) -> Sequence[int]:
            said = left.pop(0) if len(left) > 1 else left[0]
            return [*said.encode(), EOS]

        engine = FakeEngine(script, tokens_per_event=at_once, max_model_len=60_000)
        return self.serve(engine, tokenizer=self.tokenizer_of(template(family)), **settings)


async def ask(served: Any, path: str = CHAT, status: int = 200, **fields: Any) -> Any:
    """The answer's document."""
    base = {"model": "fake", "messages": HI} if path != RESPONSES else {"model": "fake"}
    answer = await served.post(path, base | fields)
    assert answer.status_code == status, answer.text
    return answer.json()


async def stream(served: Any, **fields: Any) -> list[Any]:
    """The chunks of a chat's stream."""
    answer = await served.post(CHAT, {"model": "fake", "messages": HI, "stream": True} | fields)
    assert answer.status_code == 200, answer.text
    events = sse_events(answer.text)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def deltas(chunks: list[Any]) -> list[Any]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def calls(chunks: list[Any]) -> list[Any]:
    return [call for delta in deltas(chunks) for call in delta.get("tool_calls", ())]


def end_of(chunks: list[Any]) -> Any:
    return [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1]


def events_of(answer: Any) -> list[Any]:
    """Of a stream of Anthropic's or of Responses."""
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


def prompt_of(served: Any) -> str:
    return bytes(token for token in served.state.engine.accepted[-1].prompt_token_ids if token < 256).decode()


# --- calls in streams


@report("vllm#13078", "a named `tool_choice`, streamed: pieces of the call without id and type", "done")
async def named_call_streamed(bench: Bench) -> None:
    async with bench.says('{"city": "Oslo"}') as served:
        named = {"type": "function", "function": {"name": "get_weather"}}
        chunks = await stream(served, tools=TOOLS, tool_choice=named)
        first, *others = calls(chunks)
        assert first["id"] and first["type"] == "function" and first["function"]["name"] == "get_weather"
        assert json.loads("".join(call["function"]["arguments"] for call in (first, *others))) == {"city": "Oslo"}


@report("vllm#9209", "the same ended with `stop`, so agents did not run the tool", "done")
async def named_call_ends_as_call(bench: Bench) -> None:
    async with bench.says('{"city": "Oslo"}') as served:
        named = {"type": "function", "function": {"name": "get_weather"}}
        assert end_of(await stream(served, tools=TOOLS, tool_choice=named)) == "tool_calls"
        whole = await ask(served, tools=TOOLS, tool_choice=named)
        assert whole["choices"][0]["finish_reason"] == "tool_calls"


@report("vllm#53269", "a call that `max_tokens` cuts ended with `tool_calls` in streams alone",
        "done: `length` in both")
async def cut_call_ends_with_length(bench: Bench) -> None:
    said = as_json([{"name": "get_weather", "parameters": {"city": "O" * 500}}])
    async with bench.says(said) as served:
        fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 400}
        assert end_of(await stream(served, **fields)) == "length"
        assert (await ask(served, **fields))["choices"][0]["finish_reason"] == "length"


@report("vllm#24509", "`required`, streamed: text counted twice, so no call came", "done")
async def required_call_streamed(bench: Bench) -> None:
    said = hermes([("get_weather", {"city": "Oslo"}), ("now", {})])
    async with bench.says(said) as served:
        chunks = await stream(served, tools=TOOLS, tool_choice="required")
        assert [call["function"]["name"] for call in calls(chunks) if "id" in call] == ["get_weather", "now"]
        assert not any(delta.get("content") for delta in deltas(chunks))


@report("sglang#5661, openai-python#2806", "deltas of calls without `index`: SDKs fail or join two calls", "done")
async def every_piece_of_a_call_has_an_index(bench: Bench) -> None:
    async with bench.says(hermes([("get_weather", {"city": "O" * 600}), ("now", {})])) as served:
        pieces = calls(await stream(served, tools=TOOLS))
        assert len(pieces) > 4 and {piece["index"] for piece in pieces} == {0, 1}


@report("sglang#4700", "later pieces of a call had an empty name, which clients took for the name", "done: no name")
async def later_pieces_have_no_name(bench: Bench) -> None:
    async with bench.says(hermes([("get_weather", {"city": "O" * 600})])) as served:
        _, *others = calls(await stream(served, tools=TOOLS))
        assert others and all(set(piece["function"]) == {"arguments"} and "id" not in piece for piece in others)


@report("sglang#29441", "an empty text before the call: the AI SDK ended the turn there", "done")
async def no_empty_text_before_a_call(bench: Bench) -> None:
    async with bench.says("<think>\nHm\n</think>\n\n" + hermes([OSLO])) as served:
        for delta in deltas(await stream(served, tools=TOOLS)):
            assert delta.get("content") != "" or "role" in delta or not set(delta) - {"content"} or delta == {}
            assert "tool_calls" not in delta or delta["tool_calls"]


@report("litellm#29286", "`tool_calls: []` in every delta: a gateway made empty calls of a text", "done: left out")
async def no_empty_list_of_calls(bench: Bench) -> None:
    async with bench.says("It rains.") as served:
        assert not any("tool_calls" in delta for delta in deltas(await stream(served, tools=TOOLS)))
        assert "tool_calls" not in (await ask(served, tools=TOOLS))["choices"][0]["message"]


@report("sglang#18335", "`role` and `content` null while the model thinks", "done: `reasoning_content` alone")
async def thoughts_come_without_nulls(bench: Bench) -> None:
    async with bench.says("<think>\nHm, rain.\n</think>\n\nYes.") as served:
        told = deltas(await stream(served))
        assert told[0]["role"] == "assistant"
        assert all(value is not None for delta in told for value in delta.values())
        assert "".join(delta.get("reasoning_content", "") for delta in told) == "Hm, rain."


@report("theia#16055", "streams whose last choice had no `finish_reason`", "done")
async def streams_end_with_a_reason(bench: Bench) -> None:
    async with bench.says("[TOOL_CALLS] " + as_json([{"name": "now", "arguments": {}}]), family="mistral_v3") as served:
        for options in (None, {"include_usage": True}):
            assert end_of(await stream(served, tools=TOOLS, stream_options=options)) == "tool_calls"


@report("vllm#47907", "a whole call in one delta was lost (granite)", "done")
async def a_call_at_once_is_not_lost(bench: Bench) -> None:
    async with bench.says(granite([OSLO]), family="granite", at_once=4000) as served:
        chunks = await stream(served, tools=TOOLS)
        assert [call["function"]["name"] for call in calls(chunks) if "id" in call] == ["get_weather"]
        assert end_of(chunks) == "tool_calls"


@report("vllm#41691", "several tokens an event: the last words of the thoughts were lost", "done")
async def thoughts_are_whole_with_wide_events(bench: Bench) -> None:
    for at_once in (1, 3, 7, 50):
        async with bench.says("<think>\nHm, rain, then.\n</think>\n\nYes.", at_once=at_once) as served:
            told = deltas(await stream(served))
            assert "".join(delta.get("reasoning_content", "") for delta in told) == "Hm, rain, then."
            assert "".join(delta.get("content", "") for delta in told) == "Yes."


@report("vllm#30866", "streams with tools lost the first characters of a text", "done")
async def texts_beside_tools_are_whole(bench: Bench) -> None:
    said = "<|UB| is no call, {neither} is <tool."
    async with bench.says(said) as served:
        assert "".join(delta.get("content", "") for delta in deltas(await stream(served, tools=TOOLS))) == said


# --- histories


@report("vllm#21089", "an assistant's empty text in the history: 400", "done")
async def an_empty_answer_in_the_history(bench: Bench) -> None:
    history = [*HI, {"role": "assistant", "content": ""}, {"role": "user", "content": "B"}]
    for family in ("qwen3", "mistral_v3", "llama3", "gemma_strict"):
        async with bench.says("x", family=family) as served:
            await ask(served, messages=history)


@report("vllm#10015", "the SDK's message with `refusal` and `function_call` null, sent back: 400", "done")
async def the_sdks_message_sent_back(bench: Bench) -> None:
    async with bench.says(hermes([OSLO]), "It rains.") as served:
        client = served.openai()
        first = (await client.chat.completions.create(model="fake", messages=HI, tools=TOOLS)).choices[0].message
        history = [*HI, first.model_dump(), RESULT | {"tool_call_id": first.tool_calls[0].id}]
        second = await client.chat.completions.create(model="fake", messages=history, tools=TOOLS)
        assert second.choices[0].message.content == "It rains."


@report("vllm#3906", "a history with `function_call` as an object: 400", "done")
async def an_old_call_in_the_history(bench: Bench) -> None:
    async with bench.says("It rains.") as served:
        old = {"role": "assistant", "content": None, "function_call": CALL["function"]}
        await ask(served, messages=[*HI, old, {"role": "function", "name": "get_weather", "content": "rain"}])
        assert "<tool_response>" in prompt_of(served)


@report("ogx#3456", "a call without arguments in the history (empty text, null): 500", "done")
async def a_call_without_arguments_in_the_history(bench: Bench) -> None:
    for family in ("qwen3", "llama3", "mistral_v7"):
        for arguments in ("", None, "{}", {}):
            call = CALL | {"id": "abcdefghi", "function": {"name": "now", "arguments": arguments}}
            async with bench.says("x", family=family) as served:
                await ask(served, tools=TOOLS, messages=[
                    *HI, {"role": "assistant", "tool_calls": [call]}, RESULT | {"tool_call_id": "abcdefghi"}])


@report("vllm#5649", "Mistral's template wants ids of nine characters, and other servers' are longer", "done")
async def long_ids_for_mistral(bench: Bench) -> None:
    async with bench.says("It rains.", family="mistral_v3") as served:
        await ask(served, tools=TOOLS, messages=[*HI, {"role": "assistant", "tool_calls": [CALL]}, RESULT])
    async with bench.says("[TOOL_CALLS] " + as_json([{"name": "now", "arguments": {}}]), family="mistral_v3") as served:
        message = (await ask(served, tools=TOOLS))["choices"][0]["message"]
        assert re.fullmatch("[a-zA-Z0-9]{9}", message["tool_calls"][0]["id"])


@report("vllm#10463, #12864", "keys of a client's own in messages (`id`, `opts`), and `name`: 400", "done")
async def extra_keys_in_messages(bench: Bench) -> None:
    async with bench.says("x") as served:
        own = {"id": 1947269257, "opts": {"visible": False}, "name": "bob"}
        await ask(served, messages=[{"role": "system", "content": "Be kind."} | own, HI[0] | own])


@report("langchain#34751", "parts of the type `output_text` in a chat's history: 400", "done")
async def parts_of_responses_in_a_chat(bench: Bench) -> None:
    async with bench.says("x") as served:
        told = [{"type": "output_text", "text": "a fun fact", "annotations": []}]
        await ask(served, messages=[*HI, {"role": "assistant", "content": told}, {"role": "user", "content": "B"}])
        assert "a fun fact" in prompt_of(served)


# --- tools and schemas


@report("llama_index#18928, vercel/ai#6687", "tools without parameters: refused, or called with an empty text",
        "done: `{}`")
async def tools_without_parameters(bench: Bench) -> None:
    bare = [{"type": "function", "function": {"name": "now"} | more}
            for more in ({}, {"parameters": {}}, {"parameters": None}, {"parameters": {"type": "object"}})]
    for tool in bare:
        async with bench.says(hermes([("now", {})])) as served:
            message = (await ask(served, tools=[tool], tool_choice="auto"))["choices"][0]["message"]
            assert message["tool_calls"][0]["function"]["arguments"] == "{}"
        async with bench.says('<tool_call>\n{"name": "now"}\n</tool_call>') as served:
            pieces = calls(await stream(served, tools=[tool]))
            assert "".join(piece["function"]["arguments"] for piece in pieces) == "{}"


@report("pydantic-ai#728", "`required` beside `parallel_tool_calls` for an answer that is a tool: 400", "done")
async def an_answer_that_is_a_tool(bench: Bench) -> None:
    async with bench.says(hermes([OSLO])) as served:
        document = await ask(
            served, tools=[WEATHER], tool_choice="required", parallel_tool_calls=True, n=1, stream=False)
        assert document["choices"][0]["finish_reason"] == "tool_calls"
        assert served.state.engine.accepted[-1].params.grammar is not None


@report("vllm#20470", "`required` over tools that have definitions of the same name: an error", "done")
async def tools_with_definitions_of_one_name(bench: Bench) -> None:
    def tool(name: str, kind: str) -> Any:
        return {"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "required": ["task"], "additionalProperties": False,
            "properties": {"task": {"$ref": "#/$defs/Task"}}, "$defs": {"Task": {"type": kind}}}}}

    async with bench.says(hermes([("b", {"task": 5})])) as served:
        await ask(served, tools=[tool("a", "string"), tool("b", "integer")], tool_choice="required")
        assert served.state.engine.accepted[-1].params.grammar is not None


@report("worker-vllm#85", "`functions` of older SDKs: 400", "done: answered in their form")
async def functions_of_old(bench: Bench) -> None:
    async with bench.says(hermes([OSLO])) as served:
        choice = (await ask(served, functions=[WEATHER["function"]], function_call="auto"))["choices"][0]
        assert choice["finish_reason"] == "function_call"
        assert json.loads(choice["message"]["function_call"]["arguments"]) == {"city": "Oslo"}


@report("vllm#16887", "`tool_choice: \"any\"` (Mistral's word): 500", "done, as `required`")
async def any_is_required(bench: Bench) -> None:
    async with bench.says("[TOOL_CALLS] " + as_json([{"name": "now", "arguments": {}}]), family="mistral_v3") as served:
        await ask(served, tools=TOOLS, tool_choice="any")
        assert served.state.engine.accepted[-1].params.grammar is not None


@report("vllm#4597", "`guided_choice` at the top level", "done")
async def a_choice_at_the_top_level(bench: Bench) -> None:
    async with bench.says("positive", family="chatml") as served:
        await ask(served, guided_choice=["positive", "negative"])
        assert matcher_of(served).consume_tokens([*b"positive"])


@report("vllm#4093", "`guided_json` beside `response_format: json_object`: thousands of line ends",
        "refused: one constraint a request; white space is bounded")
async def two_constraints(bench: Bench) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    async with bench.says("{}", family="chatml") as served:
        told = await ask(served, status=400, guided_json=schema, response_format={"type": "json_object"})
        assert told["error"]["param"] in ("guided_json", "response_format")


@report("vllm#20060, #13260", "a grammar that allows white space without end, which the model writes to the end",
        "done: 64 characters at a place")
async def white_space_is_bounded(bench: Bench) -> None:
    async with bench.says("{}", family="chatml") as served:
        await ask(served, guided_json={"type": "object", "properties": {"a": {"type": "null"}}})
        matcher = matcher_of(served)
        assert matcher.consume_tokens([*b'{"a"'])
        assert 0 < matcher.validate_tokens([*(b"\n" * 1000)]) <= 64


@report("vllm#15210", "`guided_regex` with characters below the space: `Unclosed '['`", "done")
async def a_regex_with_control_characters(bench: Bench) -> None:
    async with bench.says("abc", family="chatml") as served:
        await ask(served, guided_regex="[\x00-\u2e7f]+")
        assert matcher_of(served).consume_tokens([*"a\nß".encode()])


@report("llguidance#266", "separators of a schema's own let JSON with wrong quotes through", "refused: of `x-guidance` "
        "only what leaves JSON valid")
async def separators_of_a_schemas_own(bench: Bench) -> None:
    schema = {
        "type": "object", "required": ["temperature"], "properties": {
            "forecast": {"type": "array", "items": {"type": "object"}}, "temperature": {"type": "number"}},
        "x-guidance": {"key_separator": "\\s{0,10}:\\s{0,10}", "item_separator": "\\s{0,10},\\s{0,10}",
                       "whitespace_flexible": False},
    }  # fmt: skip
    async with bench.says("{}", family="chatml") as served:
        told = await ask(served, status=400, guided_json=schema)
        assert told["error"]["code"] == "invalid_grammar" and "x-guidance" in told["error"]["message"]
        lenient = {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}
        assert "x-guidance" in (await ask(served, status=400, guided_json=lenient))["error"]["message"]


def matcher_of(served: Any) -> LLMatcher:
    """Of the grammar that the last request brought to the engine; a byte is a token."""
    grammar = served.state.engine.accepted[-1].params.grammar
    matcher = LLMatcher(LLTokenizer("byte"), grammar if isinstance(grammar, str) else grammar.text)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


@report("langchain#23629", "`response_format` with `stream`: 400", "done")
async def a_schema_streamed(bench: Bench) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}}}
    async with bench.says('{"a": 1}', family="chatml") as served:
        assert "".join(delta.get("content", "") for delta in deltas(await stream(served, response_format=form))) == (
            '{"a": 1}')


@report("langchain#38561", "a schema beside `reasoning_effort`: the thoughts broke the parser", "done")
async def a_schema_behind_thoughts(bench: Bench) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with bench.says('<think>\nHm.\n</think>\n\n{"a": 1}') as served:
        message = (await ask(served, response_format=form, reasoning_effort="high"))["choices"][0]["message"]
        jsonschema.validate(json.loads(message["content"]), schema)
        assert message["reasoning_content"] == "Hm."


# --- fields


@report("gpustack#429", "`stream_otpions`, a slip of the pen: 400", "ignored, with a line in the log")
async def a_misspelt_field(bench: Bench) -> None:
    async with bench.says("x") as served:
        await stream(served, stream_otpions={"include_usage": True})
    assert any("stream_otpions" in record.getMessage() for record in bench.caplog.records)


@report("ms-agent#489", "`stream_options: {}`", "done")
async def empty_stream_options(bench: Bench) -> None:
    async with bench.says("x") as served:
        assert all(chunk.get("usage") is None for chunk in await stream(served, stream_options={}))


@report("open-webui#9067, #9348", "thoughts in titles and tags", "done: `content` has none")
async def titles_without_thoughts(bench: Bench) -> None:
    async with bench.says('<think>\nA title.\n</think>\n\n{"title": "Rain"}') as served:
        document = await ask(served, stream=False, max_completion_tokens=1000)
        assert document["choices"][0]["message"]["content"] == '{"title": "Rain"}'


@report("open-webui#11259", "the template opens the thoughts, and the client misses the mark", "done")
async def thoughts_that_the_prompt_opens(bench: Bench) -> None:
    async with bench.says("Hm.\n</think>\n\nYes.", family="deepseek_r1") as served:
        message = (await ask(served))["choices"][0]["message"]
        assert (message["reasoning_content"].strip(), message["content"].strip()) == ("Hm.", "Yes.")


# --- Responses


@report("openai-agents#1227, openai-python#2489, litellm#20943", "events without `logprobs`, `created_at` and others "
        "that the SDK's types need", "done: every event fits the SDK's types")
async def every_event_fits_the_sdks_types(bench: Bench) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    flat = [{"type": "function", **WEATHER["function"], "strict": False}]
    async with bench.says("<think>\nHm.\n</think>\n\nI look.\n" + hermes([OSLO])) as served:
        events = events_of(await served.post(
            RESPONSES, {"model": "fake", "input": "Weather?", "tools": flat, "stream": True}))
        assert len({event["type"] for event in events}) >= 12
        for event in events:
            adapter.validate_python(event)
        openai.types.responses.Response.model_validate(events[-1]["response"])


@report("ogx#5309", "no `response.output_text.done`", "done")
async def texts_are_done(bench: Bench) -> None:
    async with bench.says("Four.") as served:
        events = events_of(await served.post(RESPONSES, {"model": "fake", "input": "2 + 2?", "stream": True}))
        assert [event["text"] for event in events if event["type"] == "response.output_text.done"] == ["Four."]


PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches files.", "format": {
    "type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}  # fmt: skip
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [
    {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}]}  # fmt: skip


@report("llama.cpp#20156, codex#20574", "Codex's `custom` tools and namespaces of tools: 400, or never called", "done")
async def codex_with_more_than_functions(bench: Bench) -> None:
    said = hermes([("apply_patch", {"input": "*** Begin Patch\n*** End Patch"}), ("mcp__files__read", {})])
    async with bench.says(said, "Done.") as served:
        body = CODEX | {"tools": [*CODEX["tools"], PATCH, FILES]}
        events = events_of(await served.post(RESPONSES, body))
        adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
        for event in events:
            adapter.validate_python(event)
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [(item["type"], item["name"]) for item in items] == [
            ("custom_tool_call", "apply_patch"), ("function_call", "read")]
        assert items[0]["input"] == "*** Begin Patch\n*** End Patch" and items[1]["namespace"] == "mcp__files"
        told = [event.get("input") for event in events if event["type"] == "response.custom_tool_call_input.done"]
        assert told == [items[0]["input"]]
        results = [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"} for item in items]
        history = [*CODEX["input"], *({k: v for k, v in item.items() if k not in ("id", "status")} for item in items)]
        events = events_of(await served.post(RESPONSES, body | {"input": [*history, *results]}))
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Done."
        assert '"name": "mcp__files__read"' in prompt_of(served) and "*** Begin Patch" in prompt_of(served)


@report("command-code#885", "tools of the provider's own among Codex's: every turn refused, without a way out",
        "refused by name, with Codex's setting that leaves it out")
async def codex_with_tools_of_the_servers_own(bench: Bench) -> None:
    async with bench.says("x") as served:
        for tool, switch in (({"type": "image_generation", "output_format": "png"}, "features.image_generation"),
                             ({"type": "web_search", "external_web_access": True}, 'web_search = "disabled"')):
            error = (await ask(served, RESPONSES, 400, **CODEX | {"tools": [*CODEX["tools"], tool]}))["error"]
            assert error["param"] == "tools[3].type" and switch in error["message"]


# --- Messages


@report("vllm#44000", "Claude Code from 2.1.154 on has messages of `system` in the midst: 400", "done")
async def system_messages_in_the_midst(bench: Bench) -> None:
    async with bench.says("ok") as served:
        events = events_of(await served.post(MESSAGES, claude_code(2)))
        assert events[-1]["type"] == "message_stop"
        assert "Agents: one, two." in prompt_of(served)


@report("claude-code-router#4", "empty texts in a history: `messages must have non-empty content`", "done")
async def empty_blocks_in_a_history(bench: Bench) -> None:
    async with bench.says("ok") as served:
        history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": ""}]},
                   {"role": "user", "content": [{"type": "text", "text": "b"}]}]
        for more in (history, [*history[:1], {"role": "assistant", "content": ""}, history[2]]):
            await ask(served, MESSAGES, messages=more, max_tokens=5)


@report("litellm#24443", "`tool_choice: {\"type\": \"none\"}` in messages: 500", "done")
async def no_tool_in_messages(bench: Bench) -> None:
    tools = [{"name": "now", "input_schema": {"type": "object"}}]
    async with bench.says(hermes([("now", {})])) as served:
        document = await ask(served, MESSAGES, tools=tools, tool_choice={"type": "none"}, max_tokens=500)
        assert document["stop_reason"] == "end_turn"


@report("vllm#34887", "streamed arguments of a call in messages began without `{\"`", "done")
async def arguments_of_messages_are_whole(bench: Bench) -> None:
    async with bench.says(hermes([("now", {"code": "uptime" * 100})])) as served:
        events = events_of(await served.post(MESSAGES, {
            "model": "fake", "messages": HI, "max_tokens": 5000, "stream": True,
            "tools": [{"name": "now", "input_schema": {"type": "object"}}]}))
        pieces = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
        assert len(pieces) > 2 and json.loads("".join(pieces)) == {"code": "uptime" * 100}


@report("vllm#38738", "several turns of tools in messages with Mistral's template: `Invalid assistant message`", "done")
async def tools_of_messages_with_mistral(bench: Bench) -> None:
    history = [{"role": "user", "content": "Weather?"}]
    for at in range(2):
        history += [
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": f"toolu_0123456789{at}", "name": "now", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": f"toolu_0123456789{at}", "content": "noon"}]}]  # fmt: skip
    for family in ("mistral_v3", "mistral_v7"):
        async with bench.says("Noon.", family=family) as served:
            await ask(served, MESSAGES, messages=history, max_tokens=50,
                      tools=[{"name": "now", "input_schema": {"type": "object"}}])


@report("Rapid-MLX#619", "Claude Code asks for `claude-...` models: 404", "mapped: `--served-model-name`, several")
async def names_that_clients_ask_for(bench: Bench) -> None:
    async with bench.says("ok", model_names=("tiny", "claude-opus-4-5")) as served:
        document = await ask(served, MESSAGES, model="claude-opus-4-5", max_tokens=5)
        assert document["model"] == "tiny"
        error = await ask(served, MESSAGES, 404, model="claude-sonnet-4-5", max_tokens=5)
        assert error["error"]["type"] == "not_found_error"


def table() -> str:
    """For the page."""
    rows = [f"| {one.where} | {one.told} | {one.outcome} | `{one.name}` |" for one in REPORTS]
    return "\n".join(["| report | told there | here | test |", "|---|---|---|---|", *rows]) + "\n"


def page_with(told: str, page: str) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + told + END + rest.partition(END)[2]


if __name__ == "__main__":
    text = page_with(table(), PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
