"""Chat templates of families that people use, written from what is published of them, beside transformers' renderer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conversations import CONVERSATIONS, USER, says
from conversations import call as a_call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.server.chat_renderer import ChatRenderer, ChatRequest, TemplateSettings
from jettison.server.conversation import checked_messages
from jettison.server.errors import ApiError
from jettison.server.templates import TemplateError

transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parent / "chat_templates"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
DATE = {"date_string": "26 Jul 2024"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory, tokenizer_dir):
    """transformers' own, on a folder; today's date is a matter of both clocks, and of no test at midnight."""
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_dir / "tokenizer.json"), **SPECIAL)


@pytest.fixture(scope="module")
def renderers():
    return {name: ChatRenderer({"default": (source_of(name), name)}, SPECIAL, TemplateSettings()) for name in FAMILIES}


def source_of(name):
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def ours(renderer, messages, told):
    """The prompt, or None where it is refused."""
    told = DATE | told
    fields = {name: told.pop(name) for name in ("tools", "documents", "continue_final_message") if name in told}
    adds = told.pop("add_generation_prompt", not fields.get("continue_final_message"))
    try:
        checked = checked_messages(messages, renderer.knows)
        return renderer.render(ChatRequest(checked, add_generation_prompt=adds, variables=told, **fields))
    except (TemplateError, ApiError):
        return None


def theirs(reference, source, messages, told):
    """What transformers makes of them, or None where it raises."""
    adds = told.get("add_generation_prompt", not told.get("continue_final_message"))
    try:
        return reference.apply_chat_template(
            messages, chat_template=source, tokenize=False, **(DATE | told | {"add_generation_prompt": adds}))
    except Exception:  # noqa: BLE001  # anything at all can go wrong in a template
        return None


def forms(messages, source):
    """The messages as a user of transformers would write them for this template, the likeliest first."""
    with_mappings = [changed(message, json.loads) for message in messages]
    with_texts = [
        changed(message, str, lambda value: json.dumps(value, ensure_ascii=False)) for message in messages]
    flat_texts = [flat(message) for message in with_texts]
    in_parts_only = [in_parts(message) for message in with_mappings]
    for form in (with_mappings, with_texts, [flat(message) for message in with_mappings], in_parts_only, flat_texts):
        known = form if "'developer'" in source else [
            message | {"role": "system"} if message["role"] == "developer" else message for message in form]
        yield known
        yield merged(known)
        yield [message if "content" in message else message | {"content": ""} for message in known]


def changed(message, of_text, of_mapping=lambda mapping: mapping):
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    made = []
    for call in calls:
        arguments = call["function"]["arguments"]
        arguments = of_text(arguments) if isinstance(arguments, str) else of_mapping(arguments)
        made.append(call | {"function": call["function"] | {"arguments": arguments}})
    return {name: value for name, value in message.items() if value is not None} | {"tool_calls": made}


def flat(message):
    content = message.get("content")
    return message | {"content": "\n".join(part["text"] for part in content)} if isinstance(content, list) else message


def in_parts(message):
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def merged(messages):
    leaders = [message for message in messages if message["role"] in ("system", "developer")]
    if not leaders:
        return messages
    first = leaders[0] | {"content": "\n\n".join(flat(leader)["content"] for leader in leaders)}
    return [first, *(message for message in messages if message not in leaders)]


def is_whole(text, messages):
    """Whether nothing that was said is missing, nor written out as a list of Python's."""
    said = [
        line for message in messages if message["role"] != "assistant" or isinstance(message.get("content"), list)
        for line in flat(message)["content"].split("\n")
    ]  # fmt: skip
    return text is not None and all(line.strip() in text for line in said) and "'type': 'text'" not in text


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_what_transformers_writes(family, reference, renderers):
    source, differing = source_of(family), {}
    for name, (messages, told) in CONVERSATIONS.items():
        made = ours(renderers[family], messages, dict(told))
        possible = [theirs(reference, source, form, told) for form in forms(messages, source)]
        whole = [text for text in possible if is_whole(text, messages)]
        wanted = next(iter(whole), next((text for text in possible if text is not None), None))
        if made is None and possible[0] is None:
            continue  # both refuse
        if made != wanted:
            differing[name] = made, wanted
    assert not differing


@pytest.mark.parametrize("family", FAMILIES)
def test_what_says_nothing_is_an_empty_text(family, renderers):
    """Tools that return nothing, and assistants without a call: clients send them without content, or with null."""
    asked = says("assistant", "", tool_calls=[a_call({"city": "Rom"})])
    result, answer = says("tool", "", tool_call_id="abcdefghi", name="weather"), says("assistant", "")
    for before, message in (([USER, asked], result), ([USER], answer), ([USER], answer | {"tool_calls": []})):
        bare = {name: value for name, value in message.items() if name != "content"}
        wanted = ours(renderers[family], [*before, message], {})
        for silent in (bare, message | {"content": None}):
            assert ours(renderers[family], [*before, silent], {}) == wanted
    if family in ("qwen3", "llama3", "command_r", "deepseek_r1", "harmony"):
        assert wanted is not None


def test_at_least_twelve_families_take_most_conversations(renderers):
    taken = {
        family: sum(ours(renderer, messages, dict(told)) is not None for messages, told in CONVERSATIONS.values())
        for family, renderer in renderers.items()
    }
    assert len(taken) >= 12 and len(CONVERSATIONS) >= 20
    assert all(number >= len(CONVERSATIONS) * 2 // 3 for name, number in taken.items() if "strict" not in name), taken


ROLE = st.sampled_from(["system", "user", "assistant", "tool"])
TEXT = st.text(max_size=12)
MESSAGE = st.fixed_dictionaries({"role": ROLE, "content": TEXT}, optional={"name": TEXT, "reasoning_content": TEXT})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(MESSAGE, min_size=1, max_size=6), st.sampled_from(["chatml", "phi4", "mistral_v7", "granite"]))
def test_any_conversation_of_texts(reference, renderers, messages, family):
    made = ours(renderers[family], messages, {})
    plain = theirs(reference, source_of(family), messages, {})
    assert made in (plain, theirs(reference, source_of(family), merged(messages), {}))
