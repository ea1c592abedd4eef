"""Anthropic's API: its SDK, its events, its errors, and what Claude Code sends."""

from __future__ import annotations

import asyncio
import json

import pytest
from calls_written import hermes
from fake_engine import FakeEngine, bytes_of
from served import EOS, eventually
from test_tools import OSLO, TWO, says, template

from jettison.server.doors.message_input import chat_of
from jettison.server.doors.message_tables import MessageFields

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"name": "get_weather", "description": "It says.", "cache_control": {"type": "ephemeral"}, "input_schema": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}, "type": "custom"},
]  # fmt: skip
THINKING = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
async def client_of():
    """An SDK's client of a server, closed in the loop that it was used in."""
    import anthropic  # a second, which other tests of this room need not wait for

    clients = []

    def made(served, **options):
        clients.append(anthropic.AsyncAnthropic(base_url=served.url, **({"api_key": "x", "max_retries": 0} | options)))
        return clients[-1]

    yield made
    for client in clients:
        await client.close()


async def events_of(served, **fields):
    answer = await served.post(PATH, {"model": "fake", "stream": True, "max_tokens": 500, "messages": HI} | fields)
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.split("\n\n"):
        if block:
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def prompt_of(served, at=-1):
    return bytes(t for t in served.state.engine.accepted[at].prompt_token_ids if t < 256).decode()


async def test_a_message_and_its_stream(serve, client_of):
    ask = {"model": "fake", "messages": HI, "max_tokens": 14, "system": "Be kind.", "metadata": {"user_id": "me"}}
    async with serve(FakeEngine(bytes_of("grüße"))) as served:
        client = client_of(served)
        draws = {"temperature": 0.5, "top_p": 0.9, "top_k": 20}  # which older SDKs send
        whole = await client.messages.create(**ask, extra_body=draws)
        params = served.state.engine.accepted[-1].params
        assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 20, 14)
        async with client.messages.stream(**ask) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert prompt_of(served) == "system: Be kind.\nuser: hi\nassistant: "
    assert whole.content[0].text == final.content[0].text == "".join(texts) == "grüßegrüße"
    assert whole.id.startswith("msg_") and (whole.role, whole.model, whole.type) == ("assistant", "fake", "message")
    assert whole.stop_reason == final.stop_reason == "max_tokens"
    assert whole.usage == final.usage
    num_prompt = 1 + len("system: Be kind.\nuser: hi\nassistant: ")
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (num_prompt - 2, 2)
    assert whole.usage.output_tokens == 14 and whole._request_id


async def test_a_stream_has_the_full_order_of_events(serve):
    async with serve(says("ab")) as served:
        events = await events_of(served)
    assert [event["type"] for event in events] == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop"]  # fmt: skip
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] > 0
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 3


async def test_why_a_message_stops(serve, client_of):
    import anthropic

    async with serve(says("one two three")) as served:
        client, ask = client_of(served), {"model": "fake", "messages": HI, "max_tokens": 50}
        stopped = await client.messages.create(**ask, stop_sequences=["thr", "zzz"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "thr")
        assert stopped.content[0].text == "one two "
        ended = await client.messages.create(**ask)
        assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
        events = await events_of(served, stop_sequences=["thr"])
        assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "thr"}
    async with serve(FakeEngine(bytes_of("a"), max_model_len=60)) as served:
        cut = await client_of(served).messages.create(**ask | {"max_tokens": 16_000})
        assert cut.stop_reason == "model_context_window_exceeded"
        assert cut.usage.output_tokens + cut.usage.input_tokens + cut.usage.cache_read_input_tokens == 60
        long = {"messages": [{"role": "user", "content": "x" * 80}]}
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: This model's maximum context"):
            await client_of(served).messages.create(**ask | long)


async def test_thoughts_text_and_calls_are_blocks_streamed_as_whole(serve, tokenizer_of, client_of):
    said = "<think>\nHm, rain?\n</think>\n\nI look.\n" + hermes(TWO)
    async with serve(says(said), tokenizer=tokenizer_of(template("qwen3"))) as served:
        ask = {"model": "fake", "messages": HI, "max_tokens": 500, "tools": TOOLS, "thinking": THINKING}
        whole = await client_of(served).messages.create(**ask | {"max_tokens": 2000})
        async with client_of(served).messages.stream(**ask) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_message()
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert whole.content[0].thinking == "Hm, rain?" and whole.content[0].signature
        assert [(block.name, block.input) for block in whole.content[2:]] == TWO
        assert all(block.id.startswith("toolu_") for block in whole.content[2:])
        assert whole.stop_reason == final.stop_reason == "tool_use"
        assert whole.usage == final.usage and whole.usage.output_tokens_details.thinking_tokens > 0
        def without(message):
            return [block.model_dump(exclude={"id", "signature"}) for block in message.content]
        assert without(whole) == without(final)
        assert not prompt_of(served).endswith("</think>\n\n")
        hidden = await client_of(served).messages.create(**ask | {"thinking": {**THINKING, "display": "omitted"}})
        assert [block.type for block in hidden.content] == ["text", "tool_use", "tool_use"]
        for thinking in ({"type": "disabled"}, None):
            await served.post(PATH, ask | {"thinking": thinking})
            assert prompt_of(served).endswith("</think>\n\n")
        await served.post(PATH, ask | {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}})
        assert not prompt_of(served).endswith("</think>\n\n")


async def test_an_agent_of_the_sdk_comes_to_its_end(serve, tokenizer_of, client_of):
    turns = ["<think>Hm</think>" + hermes([OSLO]), "More.\n" + hermes(TWO), "It rains."]
    for stream in (False, True):
        async with serve(says(*turns), tokenizer=tokenizer_of(template("qwen3"))) as served:
            client, messages = client_of(served), list(HI)
            for _ in range(5):
                ask = {"model": "fake", "max_tokens": 600, "messages": messages, "tools": TOOLS, "thinking": THINKING}
                if stream:
                    async with client.messages.stream(**ask) as events:
                        answer = await events.get_final_message()
                else:
                    answer = await client.messages.create(**ask)
                messages.append({"role": "assistant", "content": answer.content})
                if answer.stop_reason != "tool_use":
                    break
                messages.append({"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}],
                     "cache_control": {"type": "ephemeral"}}
                    for block in answer.content if block.type == "tool_use"] + [{"type": "text", "text": "Go on."}]})
            assert answer.content[-1].text == "It rains." and answer.stop_reason == "end_turn"
            assert prompt_of(served).count("<tool_response>") == 3 and prompt_of(served).count("Go on.") == 2


async def test_documents_and_search_results_that_are_text_are_read(serve, tokenizer_of):
    """A text file that a user attaches is a document in Vercel's AI SDK, and what a search of the client's has found
    comes as results."""
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Rain."},
             "title": "a.txt", "context": None, "citations": {"enabled": False}}  # fmt: skip
    parts = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Sun."}]}}
    bare = {"type": "document", "source": {"type": "content", "content": "Snow."}, "context": "Of May."}
    fog = [{"type": "text", "text": "Fog."}]
    found = {"type": "search_result", "source": "https://a.b", "title": "A", "content": fog}
    texts = ["a.txt\nRain.", "Sun.", "Of May.\nSnow.", "A\nhttps://a.b\nFog."]
    blocks = [plain, parts, bare, found]
    call = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}
    asked = {"model": "fake", "max_tokens": 5, "tools": TOOLS}
    async with serve(says("Ok."), tokenizer=tokenizer_of(template("qwen3"))) as served:
        prompts = []
        for told in (blocks, [{"type": "text", "text": text} for text in texts]):
            messages = [
                {"role": "user", "content": told}, {"role": "assistant", "content": [call]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": told}]}]
            answer = await served.post(PATH, asked | {"messages": messages})
            assert answer.status_code == 200, answer.text
            prompts.append(prompt_of(served))
        assert prompts[0] == prompts[1] and "a.txt\nRain." in prompts[0]


async def test_turns_of_one_role_that_follow_one_another_are_one(serve, tokenizer_of):
    """As at Anthropic: many templates refuse them."""
    def user(content):
        return {"role": "user", "content": content}

    def assistant(content):
        return {"role": "assistant", "content": content}

    def text(*texts):
        return [{"type": "text", "text": each} for each in texts]

    apart = [user("a"), user(text("b", "c")), user("d"), assistant("e"), assistant(text("f")), user("g")]
    joined = [user(text("a", "b", "c", "d")), assistant("ef"), user("g")]
    call = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon"}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    called = [user("a"), assistant([thought, *text("b")]), assistant([call]), user([result]), user("c")]
    call_joined = [user("a"), assistant([thought, *text("b"), call]), user([result, *text("c")])]
    for name, fields, pair in (
        ("gemma_strict", {}, (apart, joined)), ("qwen3", {"tools": TOOLS}, (called, call_joined)),
    ):  # fmt: skip
        async with serve(says("Ok."), tokenizer=tokenizer_of(template(name))) as served:
            prompts = []
            for messages in pair:
                asked = {"model": "fake", "max_tokens": 5, "messages": messages}
                answer = await served.post(PATH, asked | fields)
                assert answer.status_code == 200, answer.text
                prompts.append(prompt_of(served))
            assert prompts[0] == prompts[1]


async def test_a_system_message_between_turns_of_the_users_leaves_one_turn_where_roles_must_alternate(
    serve, tokenizer_of
):
    turns = [("user", "a"), ("system", "Be brief."), ("user", "b"), ("assistant", "c"), ("user", "d")]
    async with serve(says("Ok."), tokenizer=tokenizer_of(template("mistral_v3"))) as served:
        messages = [{"role": role, "content": content} for role, content in turns]
        answer = await served.post(PATH, {"model": "fake", "max_tokens": 5, "messages": messages})
        assert answer.status_code == 200, answer.text
        assert prompt_of(served).endswith("[INST] a\nb[/INST] c[INST] Be brief.\n\nd[/INST]")


def test_many_turns_of_one_role_are_one():
    """Each is added to what is there: a copy for each would hold the server's loop for many seconds."""
    number = 50_000
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant") for _ in range(number)]
    fields = MessageFields(model="fake", max_tokens=5, messages=[*messages, *HI])
    first, second, last = chat_of(fields, knows_thinking=False)["messages"]
    assert first == {"role": "user", "content": [{"type": "text", "text": "a"}] * number}
    assert second == {"role": "assistant", "content": "a" * number} and last == HI[0]


async def test_which_calls_may_be_made(serve, tokenizer_of):
    async with serve(says(hermes(TWO)), tokenizer=tokenizer_of(template("qwen3"))) as served:
        async def ask(choice):
            body = {"model": "fake", "max_tokens": 500, "messages": HI, "tools": TOOLS, "tool_choice": choice}
            answer = (await served.post(PATH, body)).json()
            return [block["type"] for block in answer["content"]], served.state.engine.accepted[-1].params.grammar

        assert await ask({"type": "auto"}) == (["tool_use", "tool_use"], None)
        assert await ask({"type": "auto", "disable_parallel_tool_use": True}) == (["tool_use"], None)
        assert await ask({"type": "none"}) == (["text"], None)
        kinds, grammar = await ask({"type": "any"})
        assert kinds == ["tool_use", "tool_use"] and grammar is not None
        assert (await ask({"type": "tool", "name": "now"}))[1] is not None


async def test_structured_output_and_prefill(serve, client_of):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    async with serve(says('{"city": "Oslo"}')) as served:
        form = {"format": {"type": "json_schema", "schema": schema}}
        await client_of(served).messages.create(model="fake", max_tokens=50, messages=HI, output_config=form)
        assert "city" in str(served.state.engine.accepted[-1].params.grammar)
        answer = await client_of(served).messages.create(
            model="fake", max_tokens=50, messages=[*HI, {"role": "assistant", "content": "I say "}])
        assert prompt_of(served).endswith("assistant: I say ") and answer.content[0].text == '{"city": "Oslo"}'


async def test_tokens_are_counted(serve, client_of, tokenizer_of):
    async with serve(says("x"), tokenizer=tokenizer_of(template("qwen3"))) as served:
        client = client_of(served)
        ask = {"model": "fake", "system": [{"type": "text", "text": "Be kind."}], "messages": HI, "tools": TOOLS}
        for fields in ({}, {"tool_choice": {"type": "any"}}, {"thinking": THINKING}):
            counted = await client.messages.count_tokens(**ask | fields)
            await client.messages.create(**ask | fields, max_tokens=3)
            assert counted.input_tokens == len(served.state.engine.accepted[-1].prompt_token_ids)
        assert len(served.state.engine.accepted) == 3
        bad = await served.post(COUNT, {"messages": []})
        assert (bad.status_code, bad.json()["error"]["type"]) == (400, "invalid_request_error")
        assert served.state.admission.num_side_jobs == 0


async def test_what_a_message_may_have_its_count_may_have(serve):
    long = [{"role": "user", "content": "x" * 3000}]
    async with serve(FakeEngine(max_model_len=9000), max_body_bytes=5000, max_side_body_bytes=1000) as served:
        counted = await served.post(COUNT, {"model": "fake", "messages": long})
        assert counted.status_code == 200 and counted.json()["input_tokens"] > 3000
        assert (await served.post("/tokenize", {"prompt": "x" * 3000})).status_code == 413
        assert (await served.post(COUNT, {"messages": long * 2})).status_code == 413


WRONG = [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"messages": []}, "messages"),
    ({"messages": None}, "messages"), ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
     "messages[0].content[0].source.type"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "x"}}]}]},
     "messages[0].content[0].source.type"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text"}}]}]},
     "messages[0].content[0].source.data"),
    ({"messages": [{"role": "user", "content": [{"type": "search_result", "title": "x", "source": "x"}]}]},
     "messages[0].content[0].content"),
    ({"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}]}]},
     "messages[0].content[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": "z"}]}]},
     "messages[0].content[0].input"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [{"name": ""}]}, "tools[0].name"),
    ({"tools": [{"name": "x", "input_schema": 3}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "deep"}}, "thinking.type"), ({"temperature": 9}, "temperature"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences"), ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"), ({"system": 3}, "system"), ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"output_config": {"effort": "much"}}, "output_config.effort"), ({"service_tier": "gold"}, "service_tier"),
]  # fmt: skip


async def test_errors_have_anthropics_form_and_name_the_field(app_client, app_engine):
    for fields, name in WRONG:
        answer = await app_client.post(PATH, json={"model": "fake", "max_tokens": 9, "messages": HI} | fields)
        document = answer.json()
        assert (answer.status_code, document["type"]) == (400, "error"), (fields, document)
        assert document["error"]["type"] == "invalid_request_error" and set(document["error"]) == {"type", "message"}
        assert name in document["error"]["message"], (name, document)
    unknown = await app_client.post(PATH, json={"model": "claude-x", "max_tokens": 9, "messages": HI})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    assert (await app_client.get(PATH)).json()["type"] == "error"
    assert (await app_client.get(f"{PATH}/batches")).json()["error"]["type"] == "not_found_error"
    assert (await app_client.post(PATH, content="{")).json()["error"]["type"] == "invalid_request_error"
    assert not app_engine.accepted


async def test_a_key_comes_in_either_header(serve, client_of):
    import anthropic

    async with serve(says("Yes."), api_keys=("one", "two")) as served:
        ask = {"model": "fake", "max_tokens": 9, "messages": HI}
        for options in (
            {"api_key": "one"}, {"api_key": None, "auth_token": "two"},
            {"api_key": "no", "default_headers": {"authorization": "Bearer two"}},
        ):  # fmt: skip
            assert (await client_of(served, **options).messages.create(**ask)).content[0].text == "Yes."
        tenants = [request.tenant for request in served.state.engine.accepted]
        assert tenants[0] != tenants[1] == tenants[2] and all(tenants)
        for path in (PATH, COUNT):
            for headers in ({}, {"x-api-key": "no"}, {"x-api-key": ""}, {"authorization": "Bearer no"}):
                answer = await served.post(path, ask, headers=headers)
                assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        with pytest.raises(anthropic.AuthenticationError):
            await client_of(served, api_key="no").messages.create(**ask)
        assert (await served.http.get(f"{served.url}/v1/models", headers={"x-api-key": "one"})).status_code == 200


async def test_limits_and_failures_are_those_of_chats(serve, client_of):
    import anthropic

    engine, ask = FakeEngine(bytes_of("a"), delay_s=None), {"model": "fake", "max_tokens": 9, "messages": HI}
    async with serve(engine, max_active_reqs_per_key=1) as served:
        running = asyncio.create_task(client_of(served).messages.create(**ask))
        await eventually(lambda: engine.running)
        with pytest.raises(anthropic.RateLimitError) as limited:
            await client_of(served).messages.create(**ask)
        assert limited.value.response.headers["retry-after"]
        running.cancel()
        await eventually(lambda: not engine.running and served.state.admission.num_active == 0)
        assert engine.cancelled
    engine = FakeEngine(bytes_of("a"), delay_s=None)
    engine.max_waiting = 0
    async with serve(engine) as served:
        full = await served.post(PATH, ask)
        assert (full.status_code, full.json()["error"]["type"]) == (529, "overloaded_error")
        assert full.headers["retry-after"]
        assert served.state.metrics.exposition().count(b'queue_full') > 0
    engine = FakeEngine(bytes_of("a"))
    engine.fail_after = 2
    async with serve(engine) as served:
        events = await events_of(served)
        assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "a worker was lost"}}
        with pytest.raises(anthropic.APIStatusError):
            async with client_of(served).messages.stream(**ask) as stream:
                await stream.get_final_message()
        assert (await served.post(PATH, ask)).json()["error"]["type"] == "api_error"


async def test_a_silent_stream_pings(serve):
    engine = FakeEngine(bytes_of("a"), delay_s=None)
    async with serve(engine, keep_alive_s=0.02) as served:
        body, kinds = {"model": "fake", "stream": True, "max_tokens": 2, "messages": HI}, []
        async with served.http.stream("POST", served.url + PATH, json=body) as answer:
            async for line in answer.aiter_lines():
                kinds += [line.removeprefix("event: ")] if line.startswith("event: ") else []
                if kinds.count("ping") > 2:
                    engine.release()
    assert kinds[-1] == "message_stop"


def claude_code(num_tools):
    """As its requests are seen at proxies: a billing header that changes, marks for caches, an agents' list as a system
    message behind the user's, many tools."""
    mark = {"type": "ephemeral"}
    return {
        "model": "fake", "max_tokens": 32_000, "stream": True, "temperature": 1,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0ab12;"},
            {"type": "text", "text": "You are a coding agent.", "cache_control": mark},
            {"type": "text", "text": "Rules of the house. " * 500, "cache_control": mark | {"ttl": "1h"}}],
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "<system-reminder>Today</system-reminder>"},
                {"type": "text", "text": "List the files.", "cache_control": mark}]},
            {"role": "system", "content": "Agents: one, two."}],
        "tools": [{"name": f"Tool{at}", "description": "Does it. " * 20, "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "additionalProperties": False,
            "properties": {"path": {"type": "string"}, "depth": {"type": "integer", "minimum": 0}}}}
            for at in range(num_tools)],
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_0_account__session_1"},
    }  # fmt: skip


async def test_what_claude_code_sends(serve, tokenizer_of):
    said = ["<think>\nFiles.\n</think>\n\n" + hermes([("Tool3", {"path": ".", "depth": 1})]), "Two files."]
    engine = FakeEngine(lambda request: [*said.pop(0).encode(), EOS], max_model_len=60_000)
    async with serve(engine, tokenizer=tokenizer_of(template("qwen3"))) as served:
        ask = claude_code(24)
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
        counted = await served.post(COUNT, {k: ask[k] for k in ("model", "system", "messages", "tools", "thinking")})
        answer = await served.post(f"{PATH}?beta=true", ask, headers=headers)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert counted.json()["input_tokens"] == len(engine.accepted[-1].prompt_token_ids)
        prompt = prompt_of(served)
        assert "billing-header" not in prompt and "Rules of the house." in prompt and "cache_control" not in prompt
        assert prompt.index("Agents: one, two.") > 0 and '"Tool23"' in prompt
        blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        assert [block["type"] for block in blocks] == ["thinking", "tool_use"]
        partial = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
        assert json.loads("".join(partial)) == {"path": ".", "depth": 1}
        ask["messages"] += [
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Files.", "signature": "x"},
                {"type": "tool_use", "id": blocks[1]["id"], "name": "Tool3", "input": {"path": "."}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": blocks[1]["id"], "content": "a\nb", "is_error": False}]}]
        answer = await served.post(f"{PATH}?beta=true", ask | {"stream": False}, headers=headers)
        assert answer.json()["content"] == [{"type": "text", "text": "Two files."}]


async def test_arguments_that_are_no_object_are_not_lost(serve, tokenizer_of):
    said = '<tool_call>\n{"name": "now", "arguments": {"a": [1, '
    async with serve(FakeEngine(lambda request: said.encode(), max_model_len=2000),
                     tokenizer=tokenizer_of(template("qwen3"))) as served:  # fmt: skip
        answer = await served.post(PATH, {"max_tokens": len(said), "messages": HI, "tools": TOOLS})
        assert answer.status_code == 200 and answer.json()["stop_reason"] == "max_tokens"


async def test_the_end_token_is_no_text(serve, client_of):
    async with serve(FakeEngine(lambda request: [EOS])) as served:
        answer = await client_of(served).messages.create(model="fake", max_tokens=5, messages=HI)
    assert (answer.content[0].text, answer.stop_reason, answer.usage.output_tokens) == ("", "end_turn", 1)
