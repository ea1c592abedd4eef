"""OpenAI's Responses API: the SDK, the order of events, what is kept and for whom, and what Codex sends."""

from __future__ import annotations

import asyncio
import json

import openai
import pydantic
import pytest
from calls_written import hermes
from fake_engine import FakeEngine, bytes_of
from served import EOS, eventually
from test_tools import OSLO, TWO, WEATHER, says, template

from jettison.server.doors import responses
from jettison.server.doors.response_input import MAX_ITEMS
from jettison.server.doors.response_store import ResponseStore, StoredResponse

PATH = "/v1/responses"
FLAT = [{"type": "function", **WEATHER["function"], "strict": False}, {"type": "function", "name": "now"}]


async def events_of(served, **fields):
    """The events of a stream, each checked for its number and name."""
    answer = await served.post(PATH, {"model": "fake", "stream": True} | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == len(events)
        events.append(event)
    return events


def told(items):
    """Items without what is new each time."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


async def test_a_text_in_and_a_text_out(serve):
    async with serve(FakeEngine(bytes_of("grüße"))) as served:
        answer = await served.openai().responses.create(
            model="fake", input="hi", instructions="Be kind.", max_output_tokens=14, temperature=0.5, top_p=0.9,
            metadata={"a": "b"}, user="me", service_tier="auto", text={"verbosity": "low"}, reasoning={"effort": "low"},
            truncation="auto", include=["reasoning.encrypted_content"])  # fmt: skip
        prompt = bytes(served.state.engine.accepted[-1].prompt_token_ids[1:]).decode()
    assert prompt == "system: Be kind.\nuser: hi\nassistant: "
    assert answer.output_text == "grüßegrüße" and answer.id.startswith("resp_")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.9, 14)
    assert (answer.metadata, answer.instructions, answer.user, answer.store) == ({"a": "b"}, "Be kind.", "me", True)
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (1 + len(prompt), 14)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (2, 0)


async def test_a_stream_has_the_full_order_of_events(serve):
    async with serve(says("ab")) as served:
        events = await events_of(served, input="hi")
        whole = (await served.post(PATH, {"model": "fake", "input": "hi"})).json()
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed"]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    last = events[-1]["response"]
    assert told(last["output"]) == told(whole["output"]) == told([events[-2]["item"]])
    assert last["usage"] == whole["usage"] and last["status"] == "completed"
    ids = {event.get("item_id", event.get("item", {}).get("id")) for event in events[2:-1]}
    assert ids == {last["output"][0]["id"]}
    assert last.keys() == whole.keys()


STRICT = """
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'user' and not loop.first and loop.previtem.role == 'user' %}
        {{- raise_exception('Roles must alternate.') }}
    {%- endif %}
    {{- m.role }}:{{ m.content }}
    {%- for call in m.tool_calls %}
        {{- call.function.name }}{% for k, v in call.function.arguments.items() %} {{ {k: v} | tojson }}{% endfor %}
    {%- endfor %};
{%- endfor %}
{#- <tool_call>{"name": "", "arguments": {}}</tool_call> <think> </think> {{ tools }} -#}
"""
"""A template that reads arguments as mappings, and wants roles to alternate."""
EDIT = {"type": "custom", "name": "edit", "description": "Edits a text."}


@pytest.mark.parametrize("at_once", [1, 1000])
async def test_a_stream_adds_up_to_each_text_once(at_once, serve, tokenizer_of):
    """As the SDK adds it up, which begins with the item that was added; for what it only passes on, as it would."""
    said = "<think>\nHm, rain?\n</think>\n\nI look.\n" + hermes([*TWO, ("edit", {"input": "a b"})])
    engine = says(said)
    engine.tokens_per_event = at_once
    async with (
        serve(engine, tokenizer=tokenizer_of(template("qwen3"))) as served,
        served.openai().responses.stream(model="fake", input="hi", tools=[*FLAT, EDIT]) as stream,
    ):
        events = [event async for event in stream]
        final = await stream.get_final_response()
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.type for item in added] == [item.type for item in final.output]
    assert [getattr(item, "status", None) for item in added] == ["in_progress"] * 5
    assert added[0].content == [] and added[0].summary == []
    assert added[4].input == "" and final.output[4].input == "a b"
    parts = [event.part.text for event in events if event.type == "response.content_part.added"]
    assert parts == ["", ""]
    whole = [final.output[0].content[0].text, final.output[1].content[0].text, *(
        item.arguments for item in final.output[2:4]), final.output[4].input]
    for at, text in enumerate(whole):
        deltas = [event for event in events if event.type.endswith(".delta") and event.output_index == at]
        assert "".join(event.delta for event in deltas) == text
        if at in (1, 2, 3):
            assert deltas[-1].snapshot == text


async def test_thoughts_text_and_calls_are_items_streamed_as_whole(serve, tokenizer_of):
    said = "<think>\nHm, rain?\n</think>\n\nI look.\n" + hermes(TWO)
    async with serve(says(said), tokenizer=tokenizer_of(template("qwen3"))) as served:
        ask = {"input": "Weather?", "tools": FLAT, "reasoning": {"effort": "high", "summary": "auto"}}
        events = await events_of(served, **ask)
        whole = (await served.post(PATH, {"model": "fake"} | ask)).json()
        async with served.openai().responses.stream(model="fake", **ask) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
    items = whole["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Hm, rain?"}] and items[0]["summary"] == []
    assert [(item["name"], json.loads(item["arguments"])) for item in items[2:]] == TWO
    assert told(events[-1]["response"]["output"]) == told(items)
    assert told([event["item"] for event in events if event["type"] == "response.output_item.done"]) == told(items)
    for kind, of in (("output_text", 1), ("reasoning_text", 0), ("function_call_arguments", 2)):
        pieces = [e["delta"] for e in events if e["type"] == f"response.{kind}.delta" and e["output_index"] == of]
        (done,) = [e for e in events if e["type"] == f"response.{kind}.done" and e["output_index"] == of]
        assert "".join(pieces) == done.get("text", done.get("arguments")) and pieces
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert [item.type for item in final.output] == [item["type"] for item in items]
    assert final.output[2].arguments == items[2]["arguments"]


async def test_an_agent_of_the_sdk_comes_to_its_end(serve, tokenizer_of):
    """By the whole history, and by the id of the response before."""
    turns = ["<think>Hm</think>" + hermes([OSLO]), hermes(TWO), "It rains."]
    prompts = []
    for by_id in (False, True):
        async with serve(says(*turns), tokenizer=tokenizer_of(template("qwen3"))) as served:
            client, history, new, last = served.openai(), [], [{"role": "user", "content": "Weather?"}], None
            for _ in range(5):
                history += new
                answer = await client.responses.create(
                    model="fake", tools=FLAT, input=new if by_id else history, previous_response_id=last,
                    store=by_id)  # fmt: skip
                last = answer.id if by_id else None
                history += [item.model_dump(exclude_none=True) for item in answer.output]
                calls = [item for item in answer.output if item.type == "function_call"]
                new = [{"type": "function_call_output", "call_id": c.call_id, "output": "rain"} for c in calls]
                if not calls:
                    break
            assert answer.output_text == "It rains."
            prompts.append([bytes(t for t in r.prompt_token_ids if t < 256) for r in served.state.engine.accepted])
    assert prompts[0] == prompts[1] and prompts[0][-1].count(b"<tool_response>") == 3


@pytest.mark.parametrize("thought", ["", "<think>\nHm.\n</think>\n\n"])
async def test_a_conversation_goes_on_from_a_call_that_was_cut(thought, serve, tokenizer_of):
    """Without the call, which no template can write; with its text where the client has an output of it."""
    said = thought + hermes([("get_weather", {"city": "x" * 600})])
    num_said = len(said) - 100
    async with serve(says(said), tokenizer=tokenizer_of(STRICT)) as served:
        client, engine = served.openai(), served.state.engine

        def prompt():
            return bytes(t for t in engine.accepted[-1].prompt_token_ids if t < 256).decode()

        cut = await client.responses.create(
            model="fake", input="Weather?", tools=FLAT, max_output_tokens=num_said)
        call = cut.output[-1]
        assert (cut.status, call.type, call.status) == ("incomplete", "function_call", "incomplete")
        went_on = await client.responses.create(
            model="fake", input="Go on.", tools=FLAT, previous_response_id=cut.id, max_output_tokens=num_said)
        assert prompt() == "user:Weather?;assistant:;user:Go on.;"
        again = await client.responses.create(
            model="fake", input="Once more.", previous_response_id=went_on.id)
        assert prompt() == "user:Weather?;assistant:;user:Go on.;assistant:;user:Once more.;" and again.output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "Broken."}
        for items in ([output], [output, {"role": "user", "content": "Go on."}]):
            answer = await client.responses.create(
                model="fake", input=items, previous_response_id=cut.id, max_output_tokens=1)
        told = json.dumps({"unread_arguments": call.arguments})
        assert prompt() == f"user:Weather?;assistant:get_weather {told};tool:Broken.;user:Go on.;"
        await client.responses.create(model="fake", input="And?", previous_response_id=answer.id)
        assert f"assistant:get_weather {told};tool:Broken.;user:Go on.;assistant:" in prompt()
        kept = (await client.responses.retrieve(cut.id)).output
        assert kept[-1].arguments == call.arguments


@pytest.mark.parametrize(("tool", "name", "argument"), [
    (FLAT[0], "get_weather", "city"), (EDIT, "edit", "input"),
], ids=["function", "custom"])  # fmt: skip
async def test_a_call_that_was_cut_is_told_so_in_its_own_events(tool, name, argument, serve, tokenizer_of):
    said = hermes([("get_weather", {"city": "Oslo"})]) if name != "edit" else ""
    said += hermes([(name, {argument: "x" * 600})])
    async with serve(says(said), tokenizer=tokenizer_of(template("qwen3"))) as served:
        events = await events_of(served, input="W?", tools=[tool], max_output_tokens=len(said) - 100)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last = events[-1]["response"]
    assert done == last["output"] and last["status"] == "incomplete"
    assert [item["status"] for item in done] == ["completed", "incomplete"][-len(done) :]


async def test_a_response_that_is_too_large_to_be_kept_says_so(serve, monkeypatch):
    monkeypatch.setattr(responses, "MAX_RESPONSE_BYTES", 5000)
    async with serve(says("Yes.")) as served:
        for text, is_kept in (("hi", True), ("x" * 4500, False), ("x" * 6000, False)):
            told = (await served.post(PATH, {"model": "fake", "input": text})).json()
            found = await served.http.get(f"{served.url}{PATH}/{told['id']}")
            assert (told["store"], found.status_code) == (is_kept, 200 if is_kept else 404)


async def test_a_call_of_the_clients_own_that_is_broken_is_named_by_its_item(serve, tokenizer_of):
    call = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"a":'}
    async with serve(says("Yes."), tokenizer=tokenizer_of(STRICT)) as served:
        answer = await served.post(PATH, {
            "model": "fake", "instructions": "Be kind.", "input": [{"role": "user", "content": "W?"}, call]})
        error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input[1].arguments")
    assert "input[1].arguments" in error["message"] and "tool_calls" not in error["message"]


async def test_a_cut_call_of_a_custom_tool_is_left_out_too(serve, tokenizer_of):
    said = hermes([("edit", {"input": "x" * 600})])
    async with serve(says(said), tokenizer=tokenizer_of(template("qwen3"))) as served:
        client, engine = served.openai(), served.state.engine
        cut = await client.responses.create(
            model="fake", input="Edit.", tools=[EDIT], max_output_tokens=len(said) - 100)
        assert (cut.output[0].type, cut.status) == ("custom_tool_call", "incomplete")
        for items, is_told in (("Go on.", False), ([{
            "type": "custom_tool_call_output", "call_id": cut.output[0].call_id, "output": "Broken."}], True)):
            await client.responses.create(model="fake", input=items, tools=[EDIT], previous_response_id=cut.id)
            prompt = bytes(t for t in engine.accepted[-1].prompt_token_ids if t < 256)
            assert (b'"name": "edit", "arguments": {"input"' in prompt) == is_told


async def test_equal_tools_are_taken_and_ambiguous_ones_are_not(serve):
    same = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    within = {"type": "namespace", "name": "n", "tools": [same]}
    async with serve(says("Yes.")) as served:
        for tools in ([same, same], [same, same | {"description": "Once more."}], [within, within], [same, within]):
            answer = await served.post(PATH, {"input": "hi", "tools": tools, "tool_choice": "none"})
            assert answer.status_code == 200, answer.text
        for tools, param in (
            ([same, same | {"type": "custom"}], "tools[1].name"),
            ([within, same | {"name": "n__f"}], "tools[1].name"),
            ([within, within | {"name": "n__"}], "tools[1].tools[0].name"),
        ):
            bad = await served.post(PATH, {"input": "hi", "tools": tools, "tool_choice": "none"})
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, param), bad.text


async def test_structured_output_is_parsed_into_a_model(serve):
    class Place(pydantic.BaseModel):
        city: str
        floors: int

    async with serve(says('{"city": "Oslo", "floors": 3}')) as served:
        answer = await served.openai().responses.parse(model="fake", input="hi", text_format=Place)
        assert answer.output_parsed == Place(city="Oslo", floors=3)
        assert "floors" in str(served.state.engine.accepted[-1].params.grammar)
        await served.openai().responses.create(model="fake", input="hi", text={"format": {"type": "json_object"}})
        assert served.state.engine.accepted[-1].params.grammar is not None
        bad = await served.post(PATH, {"input": "hi", "text": {"format": {"type": "json_schema", "schema": 3}}})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "text.format.schema")


async def test_what_is_kept_is_its_keys_own(serve):
    async with serve(says("Yes."), api_keys=("one", "two")) as served:
        one, two = served.openai(api_key="one"), served.openai(api_key="two")
        first = await one.responses.create(model="fake", input="first")
        assert (await one.responses.retrieve(first.id)).output_text == "Yes."
        items = await one.responses.input_items.list(first.id)
        assert items.data[0].content[0].text == "first"
        unkept = await one.responses.create(model="fake", input="x", store=False)
        for client, lost in ((two, first.id), (one, unkept.id), (one, "resp_0"), (one, "../x")):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(lost)
            with pytest.raises(openai.NotFoundError):
                await client.responses.delete(lost)
            with pytest.raises(openai.NotFoundError, match="not found"):
                await client.responses.create(model="fake", input="x", previous_response_id=lost)
        assert (await served.http.get(f"{served.url}{PATH}/{first.id}")).status_code == 401
        second = await one.responses.create(model="fake", input="second", previous_response_id=first.id)
        prompt = bytes(served.state.engine.accepted[-1].prompt_token_ids[1:]).decode()
        assert prompt == "user: first\nassistant: Yes.\nuser: second\nassistant: "
        with pytest.raises(openai.BadRequestError, match="'background' is not supported"):
            await one.responses.cancel(second.id)
        await one.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await one.responses.retrieve(first.id)
        third = await one.responses.create(model="fake", input="third", previous_response_id=second.id)
        assert b"user: first" in bytes(served.state.engine.accepted[-1].prompt_token_ids[1:])
        assert third.previous_response_id == second.id


async def test_items_of_earlier_responses_are_referred_to_by_their_ids(serve, tokenizer_of):
    """So Vercel's AI SDK tells what was said and thought before, wherever ``store`` is not false."""
    text = "<think>Hm.</think>Look." + hermes([OSLO])
    async with serve(says(text), tokenizer=tokenizer_of(template("qwen3"))) as served:
        client = served.openai()
        first = await client.responses.create(model="fake", input="hi", tools=FLAT)
        thought, said, call = first.output
        done = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        whole = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output), done]
        references = [{"type": "item_reference", "id": item.id} for item in (thought, said)]
        short = [whole[0], *references, {"id": call.id}, done]
        prompts = []
        for items in (whole, short):
            again = await client.responses.create(model="fake", input=items, tools=FLAT)
            prompts.append(served.state.engine.accepted[-1].prompt_token_ids)
        assert prompts[0] == prompts[1]
        ids = {item.id for response in (first, again) for item in response.output}
        assert len(ids) == 6 and again.output[1].id.startswith("msg_")
        kept = await client.responses.input_items.list(again.id, order="asc")
        assert [item.type for item in kept.data] == [
            "message", "reasoning", "message", "function_call", "function_call_output"]


async def test_a_call_that_was_cut_is_referred_to_as_it_is_gone_on_from(serve, tokenizer_of):
    """Vercel's AI SDK sends a reference to the call, and an output that tells the failure."""
    said = hermes([("get_weather", {"city": "x" * 600})])
    async with serve(says(said), tokenizer=tokenizer_of(STRICT)) as served:
        client, engine = served.openai(), served.state.engine
        cut = await client.responses.create(
            model="fake", input="Weather?", tools=FLAT, max_output_tokens=len(said) - 100)
        call = cut.output[-1]
        user, broken = {"role": "user", "content": "Weather?"}, {"type": "item_reference", "id": call.id}
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "Broken."}
        prompts = []
        for fields in (
            {"input": [user, broken, output]}, {"input": [output], "previous_response_id": cut.id},
            {"input": [user, broken, user]}, {"input": [user], "previous_response_id": cut.id},
        ):  # fmt: skip
            await client.responses.create(model="fake", **fields)
            prompts.append(engine.accepted[-1].prompt_token_ids)
        assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


async def test_items_are_counted_before_they_are_looked_for(serve, monkeypatch):
    async with serve(says("Yes.")) as served:
        looked_for = []
        monkeypatch.setattr(type(served.state.responses), "get", lambda *asked: looked_for.append(asked))
        items = [{"type": "item_reference", "id": f"msg_{at:032x}0000"} for at in range(MAX_ITEMS + 1)]
        answer = await served.post(PATH, {"model": "fake", "input": items})
    assert (answer.status_code, answer.json()["error"]["param"], looked_for) == (400, "input", [])


async def test_pages_end_whatever_the_ids_that_a_client_gave(serve):
    ids = ["x", "x", None, "item_5", 7, "item_5"]
    items = [{"role": "user", "content": f"{at}", "id": each} for at, each in enumerate(ids)]
    async with serve(says("Yes.")) as served:
        answer = (await served.post(PATH, {"model": "fake", "input": items})).json()
        told, after = [], ""
        while len(told) <= len(items):
            url = f"{served.url}{PATH}/{answer['id']}/input_items?order=asc&limit=1&after={after}"
            page = (await served.http.get(url)).json()
            told += page["data"]
            after = page["last_id"]
            if not page["has_more"]:
                break
    assert [item["content"] for item in told] == [item["content"] for item in items]
    assert (told[0]["id"], told[3]["id"]) == ("x", "item_5")


async def test_input_items_come_in_pages(serve):
    async with serve(says("Yes.")) as served:
        client = served.openai()
        items = [{"role": "user", "content": text} for text in "abcde"]
        answer = await client.responses.create(model="fake", input=items)
        for order, wanted in ("asc", "abcde"), ("desc", "edcba"):
            page = await client.responses.input_items.list(answer.id, order=order, limit=2)
            assert ([item.content for item in page.data], page.has_more) == (list(wanted[:2]), True)
            assert [item.content async for item in page] == list(wanted)
        assert len((await client.responses.input_items.list(answer.id)).data) == 5
        url = f"{served.url}{PATH}/{answer.id}/input_items"
        for query, param in (
            ("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"),
            ("after=x", "after"),
        ):  # fmt: skip
            bad = await served.http.get(f"{url}?{query}")
            assert bad.status_code in (400, 404) and bad.json()["error"]["param"] == param


async def test_items_that_are_not_kept_for_a_key_cannot_be_referred_to(serve, monkeypatch):
    async with serve(says("Yes."), api_keys=("one", "two")) as served:
        one, two = served.openai(api_key="one"), served.openai(api_key="two")
        first, other = [await one.responses.create(model="fake", input="first") for _ in range(2)]
        unkept = await one.responses.create(model="fake", input="x", store=False)
        item_id = first.output[0].id
        for client, ids, lost in (
            (two, [item_id], 0), (one, [unkept.output[0].id], 0), (one, ["msg_0"], 0), (one, [first.id], 0),
            (one, [item_id[:-1] + "7"], 0), (one, [item_id, item_id], 1),
        ):  # fmt: skip
            with pytest.raises(openai.NotFoundError) as caught:
                await client.responses.create(
                    model="fake", input=[{"type": "item_reference", "id": each} for each in ids])
            assert (caught.value.param, caught.value.code) == (f"input[{lost}].id", "item_not_found")
        both = [{"type": "item_reference", "id": response.output[0].id} for response in (first, other)]
        assert (await one.responses.create(model="fake", input=both)).output_text == "Yes."
        monkeypatch.setattr("jettison.server.doors.responses.MAX_RESPONSE_BYTES", 300)
        with pytest.raises(openai.BadRequestError, match="refers to more than 300 bytes"):
            await one.responses.create(model="fake", input=both)


def test_the_store_is_bounded_in_count_and_bytes_by_tenant_and_in_all():
    store = ResponseStore(max_count=3, max_bytes=100, max_total_bytes=150)
    for at in range(5):
        store.put("a", f"a{at}", StoredResponse(b"x" * 10, b"", b""))
    assert [store.get("a", f"a{at}") is not None for at in range(5)] == [False, False, True, True, True]
    store.put("a", "big", StoredResponse(b"x" * 80, b"y", b""))
    assert store.get("a", "a4") is not None and store.get("a", "a3") is None and store.num_bytes == 91
    store.put("a", "bigger", StoredResponse(b"x" * 101, b"", b""))
    assert store.get("a", "bigger") is None and store.num_bytes == 91
    store.put("b", "b0", StoredResponse(b"x" * 59, b"", b""))
    assert store.num_bytes == 150 and store.get("b", "a4") is None
    store.put("b", "b1", StoredResponse(b"x" * 30, b"", b""))  # the tenant with most loses what is oldest
    assert store.get("a", "a4") is None and store.get("a", "big") is not None
    assert store.get("b", "b0") is None and store.num_bytes == 111
    assert store.delete("b", "b1") and not store.delete("b", "b1") and not store.delete("a", "b1")
    assert store.num_bytes == 81 and store.delete("a", "big") and store.num_bytes == 0


REFUSED = [
    ({"background": True}, "background"), ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"), ({"top_logprobs": 3}, "top_logprobs"), ({"n": 2}, "n"),
    ({"max_tokens": 3}, "max_tokens"), ({"messages": []}, "messages"),
    *(({"tools": [{"type": kind}]}, "tools[0].type") for kind in (
        "web_search", "web_search_preview", "file_search", "computer_use_preview", "mcp", "code_interpreter",
        "image_generation", "local_shell")),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
]
WRONG = [
    ({"input": None}, "input"), ({"input": []}, "input"), ({"input": 3}, "input"), ({"input": [3]}, "input[0]"),
    ({"input": [{"role": "x", "content": ""}]}, "input[0].role"), ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10_000}, "max_output_tokens"), ({"temperature": 9}, "temperature"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name"), ({"tools": [{"type": "namespace"}]}, "tools[0].tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"), ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"), ({"metadata": {"a": 1}}, "metadata.a"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
]


async def test_what_is_not_done_is_refused_by_name(app_client, app_engine):
    for fields, param in REFUSED + WRONG:
        answer = await app_client.post(PATH, json={"model": "fake", "input": "hi"} | fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), (fields, error)
        assert (error["code"] == "unsupported_parameter") == ((fields, param) in REFUSED), error
    answer = await app_client.post(PATH, json={"model": "other", "input": "hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert not app_engine.accepted


async def test_limits_and_failures_are_those_of_chats(serve):
    engine = FakeEngine(bytes_of("a"), delay_s=None)
    async with serve(engine, api_keys=("one", "two"), max_active_reqs_per_key=1) as served:
        client = served.openai(api_key="one")
        running = asyncio.create_task(client.responses.create(model="fake", input="hi", max_output_tokens=5))
        await eventually(lambda: engine.running)
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model="fake", input="hi")
        running.cancel()
        await eventually(lambda: not engine.running and served.state.admission.num_active == 0)
        assert engine.cancelled
    engine = FakeEngine(bytes_of("a"))
    engine.fail_after = 2
    async with serve(engine) as served:
        events = await events_of(served, input="hi")
        assert events[-1]["type"] == "response.failed"
        failed = events[-1]["response"]
        assert failed["status"] == "failed" and failed["error"]["code"] == "engine_error"
        assert failed["output"][0]["content"][0]["text"] == "aa"
        assert (await served.http.get(f"{served.url}{PATH}/{failed['id']}")).status_code == 404


CODEX = {
    "model": "fake", "instructions": "You are a coding agent running in a terminal. " * 40,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>ask"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False, "parameters": {
            "type": "object", "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
            "required": ["cmd"], "additionalProperties": False}},
        {"type": "function", "name": "update_plan", "description": "Plans.", "strict": False, "parameters": {
            "type": "object", "properties": {"plan": {"type": "array", "items": {"type": "object"}}}}},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False, "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199-thread",
    "text": {"verbosity": "medium"}, "client_metadata": {"x-codex-installation-id": "1"},
}  # fmt: skip


async def test_what_codex_sends_and_reads(serve, tokenizer_of):
    """As its public source has it: the history whole in each request, items taken from ``output_item.done``, their
    ``content`` and ``summary`` as it reads them, the end only from ``response.completed`` with whole counts."""
    turns = ["<think>\nFiles.\n</think>\n\n" + hermes([("exec_command", {"cmd": "ls"})]), "Two files."]
    async with serve(says(*turns), tokenizer=tokenizer_of(template("qwen3"))) as served:
        history = list(CODEX["input"])
        for turn in range(2):
            events = await events_of(served, **CODEX | {"input": history})
            assert events[0]["type"] == "response.created" and events[0]["response"]
            items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            for event in events:
                assert not event["type"].endswith("delta") or isinstance(event["delta"], str)
                assert event["type"] != "response.reasoning_text.delta" or event["content_index"] == 0
            usage = events[-1]["response"]["usage"]
            assert events[-1]["type"] == "response.completed"
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
            assert usage["input_tokens_details"]["cached_tokens"] >= 0
            if turn == 0:
                assert [item["type"] for item in items] == ["reasoning", "function_call"]
                assert isinstance(items[0]["summary"], list) and items[0]["content"][0]["type"] == "reasoning_text"
                call = items[1]
                assert (call["name"], json.loads(call["arguments"])) == ("exec_command", {"cmd": "ls"})
                output = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt\nb.txt"}
                # It sends items back without their ids and states.
                history += [{k: v for k, v in item.items() if k not in ("id", "status")} for item in items] + [output]
        assert items[0]["content"][0]["text"] == "Two files." and items[0]["role"] == "assistant"
        live = await served.post(PATH, CODEX | {"tools": [{"type": "web_search", "external_web_access": True}]})
        assert live.status_code == 400 and "web_search = \"disabled\"" in live.json()["error"]["message"]


async def test_the_end_token_is_no_text(serve):
    async with serve(FakeEngine(lambda request: [*b"ok", EOS])) as served:
        answer = await served.openai().responses.create(model="fake", input="hi")
    assert (answer.output_text, answer.status, answer.usage.output_tokens) == ("ok", "completed", 3)
