"""Each form of tool calls, with nasty arguments: read whole and cut at every character, with the same result."""

from __future__ import annotations

import json

import pytest
from calls_written import ENDS_OF_VALUES, FORMS, as_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jettison.server.parsers.machine import FLOW_CHARS
from jettison.server.parsers.registry import call_kind
from jettison.server.parsers.written import value_of
from longrun import LONG

NUM_EXAMPLES = 200 if LONG else 60
NAMES = ("get_weather", "now", "write-file", "a")
MARKS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "<|channel|>",
    "<|call|>", "<|end|>", "<|message|>", "<arg_key>", "<function=a>", "<|tool_call|>", "```", "<｜tool▁call▁end｜>",
    '"}}', '{"name": "now", "arguments": {}}', "\\", '"', "\n", "é", "🦜", "\u2028", "{", "}", "[", "]", "'", "\\u00e9",
)  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"text": {"type": "string"}, "other": {"type": "string"}}}}}
    for name in NAMES]

words = st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=6)), max_size=5).map("".join)
values = st.recursive(
    st.one_of(words, st.integers(-9, 10**12), st.floats(allow_nan=False, allow_infinity=False), st.booleans(),
              st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)), max_leaves=6)
keys = st.sampled_from(("city", "n", "deep", "list"))
arguments = st.tuples(
    st.dictionaries(keys, values, max_size=3), st.dictionaries(st.sampled_from(("text", "other")), words, max_size=2),
).map(lambda both: both[0] | both[1])
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)
contents = st.one_of(st.just(""), words.filter(lambda text: "<" not in text and "[" not in text))


def read(parser, pieces):
    """The content, and the calls as (name, arguments as text), of a text in pieces."""
    parts = [part for piece in pieces for part in parser.feed(piece)] + list(parser.end())
    said, found, is_open = {"content": "", "reasoning": ""}, [], False
    for kind, text in parts:
        if kind == "call":
            assert not is_open
            found.append([text, ""])
        elif kind == "arguments":
            assert is_open
            found[-1][1] += text
        elif kind == "end":
            assert is_open
        else:
            assert not is_open
            said[kind] += text
        is_open = kind in ("call", "arguments")
    assert not is_open
    return said["content"], [tuple(call) for call in found], said["reasoning"]


def whole_and_cut(name, text, tools=TOOLS):
    kind = call_kind(name, None)
    whole = read(kind.make(tools), [text])
    assert read(kind.make(tools), list(text)) == whole, text
    return whole


def unambiguous(name, made):
    """Whether the form can tell the calls at all: texts between marks have no escapes."""
    if name not in ENDS_OF_VALUES:
        return True
    return all(
        isinstance(value, str) and ENDS_OF_VALUES[name] not in value and not value.startswith("\n")
        and not value.endswith("\n") if key in ("text", "other") else not isinstance(value, str)
        and ENDS_OF_VALUES[name] not in as_json(value)
        for _, told in made for key, value in told.items())


@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=calls, content=contents)
def test_calls_are_read_as_they_were_written_however_the_text_is_cut(made, content):
    """Each example in every form."""
    for name, form in ((name, form) for name, forms in FORMS.items() for form in forms):
        told = made if unambiguous(name, made) else [(called, {"text": "plain"}) for called, _ in made]
        before = "" if name in ("json", "llama3_json", "gpt_oss") else content
        said, found, _ = whole_and_cut(name, before + form(told))
        assert [(called, json.loads(text)) for called, text in found] == told, form.__name__
        assert said == before.rstrip(), form.__name__


@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_text_is_lost_or_an_error(data):
    """Any text at all, and calls cut or spoilt in the middle, in every form."""
    made, at, put = data.draw(calls), data.draw(st.floats(0, 1)), data.draw(words)
    marks = "".join(data.draw(st.lists(st.sampled_from(MARKS), max_size=12)))
    for name, form in ((name, form) for name, forms in FORMS.items() for form in forms):
        text = form(made)
        place = int(at * len(text))
        for spoilt in (text[:place], text[:place] + put + text[place:], marks):
            said, found, thought = whole_and_cut(name, spoilt)
            for called, written in found:
                assert called in NAMES
                if len(written) <= FLOW_CHARS:
                    assert isinstance(json.loads(written), dict)
            if not found and name != "gpt_oss":  # there headers are no content
                assert said + thought == spoilt, form.__name__


WEATHER = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
UNLIKE = [
    "no call at all", "<tool_call>", "<tool_call></tool_call>", "<tool_call>get_weather</tool_call>",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', '<tool_call>{"name": "now", "arguments": [1]}',
    '<tool_call>{"name": "now", "arguments": {"a": }}</tool_call>',
    '<tool_call>{"name": "now", "arguments": {"a": 01}}',
    '<tool_call>{"name": "now", "name": "a", "arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": "now", "arguments": {}, "x": 1}',
    '<tool_call>{"name": "now", "arguments": "[1]"}</tool_call>', "<tool_call>[]</tool_call>", "a <tool_call b> c",
    '<tool_call>{"name": "now", "arguments": tru',
    '<tool_call>{"name": "now", "arguments": {"a":' + "[" * 200,
    '<tool_call>{"name": "now", "arguments": "{\\"\\ud800\\":1}"}',
]


@pytest.mark.parametrize("text", UNLIKE)
def test_what_only_looks_like_a_call_is_content(text):
    assert whole_and_cut("hermes", text) == (text, [], "")


@pytest.mark.parametrize(("text", "content", "found"), [
    (f"I look.\n\n<tool_call>{WEATHER}</tool_call>\n", "I look.", ['{"city": "Oslo"}']),
    (f"<tool_call>{WEATHER}", "", ['{"city": "Oslo"}']),
    (f"<tool_call>{WEATHER}</tool_call> Done. <tool_call>{WEATHER}</tool_call>", " Done.", ['{"city": "Oslo"}'] * 2),
    (f"<tool_call>oops<tool_call>{WEATHER}</tool_call>", "<tool_call>oops", ['{"city": "Oslo"}']),
    ('<tool_call>{"name": "now"}</tool_call>', "", ["{}"]),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", ["{}"]),
    ('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", ['{"a": 1}']),
    ('<tool_call>{"name": "now", "arguments": {"a": "1\n2\t\x01\r"}}</tool_call>', "", ['{"a": "1\\n2\\t\\u0001\\r"}']),
    (f"<tool_call>[{WEATHER}, {WEATHER}]</tool_call>", "", ['{"city": "Oslo"}'] * 2),
])
def test_what_models_write_around_calls(text, content, found):
    told, calls_found, _ = whole_and_cut("hermes", text)
    assert (told, [written for _, written in calls_found]) == (content, found)


def test_long_arguments_flow_and_short_ones_are_told_whole():
    parser = call_kind("hermes", None).make(TOOLS)
    text = as_json({"text": "x" * 2 * FLOW_CHARS})
    told = [parser.feed(char) for char in f'<tool_call>{{"name": "now", "arguments": {text}']
    assert sum(part.kind == "arguments" for parts in told for part in parts) > FLOW_CHARS
    assert parser.feed("!!") == [("end", ""), ("content", "!!")]  # told already, so what breaks off stays a call


def test_a_line_end_in_a_long_text_breaks_no_call():
    text = "x" * 2 * FLOW_CHARS + "\nOslo"
    written = f'{{"text": "{text}"}}'
    for name, around in (("hermes", '<tool_call>{{"name": "now", "arguments": {}}}</tool_call>'),
                         ("mistral", "[TOOL_CALLS]now[ARGS]{}"),
                         ("gpt_oss", "<|channel|>commentary to=functions.now<|message|>{}<|call|>")):
        content, [(_, told)], _ = whole_and_cut(name, around.format(written))
        assert json.loads(told) == {"text": text} and not content


def test_json_of_another_kind_is_content():
    for text in ('{"name": "now", "age": 5}', '{"name": "now"}', "{}", "[]", "[1]", '{"name": "Bob", "arguments": {}}',
                 '  {"name": "now", "arguments": {}, "because": 1}', 'See {"name": "now", "arguments": {}}'):
        for name in ("json", "llama3_json"):
            assert whole_and_cut(name, text) == (text, [], ""), text


def test_a_call_may_have_no_arguments():
    for name, text in (
        ("json", '{"name": "now", "arguments": null}'), ("llama3_json", '{"name": "now", "parameters": null}'),
        ("mistral", "[TOOL_CALLS]now[ARGS]null"), ("gpt_oss", "<|channel|>commentary to=functions.now<|message|>null"),
        ("gpt_oss", "<|channel|>commentary to=functions.now<|message|>"),
        ("gpt_oss", " to=functions.now<|channel|>commentary json<|message|>\n<|call|>"),
    ):
        assert whole_and_cut(name, text) == ("", [("now", "{}")], ""), text
    text = "<|channel|>commentary to=functions.rm<|message|><|call|>"
    assert whole_and_cut("gpt_oss", text) == ("", [], "")


def test_values_between_marks_follow_the_schema():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "s": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}, "o": {"type": ["string", "null"]},
        "e": {"enum": ["1", "2"]}, "u": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "bad": {"type": 5}}}}}]
    values = {"s": "12", "n": "12", "b": "True", "o": "null", "e": "1", "u": "None", "bad": "NaN", "free": "[1, 2]",
              "far": "1e999", "half": '["\\ud800"]', "deep": "[" * 5000}
    text = "<tool_call>f" + "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values.items()) + "</tool_call>"
    _, [(_, written)], _ = whole_and_cut("glm45", text, tools)
    assert json.loads(written) == {
        "s": "12", "n": 12, "b": True, "o": None, "e": "1", "u": None, "bad": "NaN", "free": [1, 2],
        "far": "1e999", "half": '["\\ud800"]', "deep": "[" * 5000}
    deep = "[" * 960 + "]" * 960
    whole_and_cut("glm45", f"<tool_call>f<arg_key>x</arg_key><arg_value>{deep}</arg_value></tool_call>", tools)


def test_types_of_values_are_looked_for_behind_references():
    schema = {
        "$ref": "#/$defs/Args", "$defs": {
            "Args": {"type": "object", "properties": {
                "code": {"$ref": "#/$defs/Code"}, "old": {"allOf": [{"$ref": "#/$defs/Code"}], "default": "1"},
                "maybe": {"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}, "ring": {"$ref": "#/$defs/Ring"},
                "tag": {"const": "1"}, "loop": {"$ref": "#/$defs/Loop"}, "far": {"$ref": "http://x/y"},
                "number": {"$ref": "#/$defs/a~1b"}}},
            "Code": {"enum": ["1", "true", "null"], "type": "string"}, "a/b": {"type": "integer"},
            "Ring": {"anyOf": [{"$ref": "#/$defs/Ring"}, {"type": "string"}]}, "Loop": {"$ref": "#/$defs/Loop"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    values = dict.fromkeys(("code", "ring", "tag", "loop", "far", "number"), "1") | {"old": "true", "maybe": "null"}
    text = "<function=f>" + "".join(
        f"<parameter={key}>{value}</parameter>" for key, value in values.items()) + "</function>"
    _, [(_, written)], _ = whole_and_cut("qwen3_coder", text, tools)
    assert json.loads(written) == values | {"loop": 1, "far": 1, "number": 1, "maybe": None}


@pytest.mark.parametrize("text", [
    "<parameter=text>\none\n<parameter=other>\n two \n</parameter>\n</function>\n</tool_call>",
    "<parameter=text>\none\n</parameter>\n<parameter=other>\n two \n</function>\n</tool_call>",
    "<parameter=text>one\n<parameter=other> two \n</function>",
])
def test_a_value_whose_end_is_forgotten_ends_where_the_next_thing_begins(text):
    said, [(_, written)], _ = whole_and_cut("qwen3_coder", f"<tool_call>\n<function=now>\n{text}")
    assert json.loads(written) == {"text": "one", "other": " two "} and not said


def test_objects_may_be_written_as_python_writes_them():
    for kind in ("object", "array", ["object", "null"]):
        for text, wanted in (("{'a': True, 2: (None,)}", {"a": True, "2": [None]}), ("['\\d']", ["\\d"]),
                             ('{"a": 1}', {"a": 1})):
            assert value_of(text, {"type": kind}) == wanted
        for text in ("{1, 2}", "{'a': 1e999}", "[b'x']", "['\\ud800']", "{'a': open('x')}", "[" * 5000, "{(1,): 2}"):
            assert value_of(text, {"type": kind}) == text
    assert value_of("{'a': 1}", {}) == value_of("{'a': 1}", {"type": "string"}) == "{'a': 1}"


def test_harmony_tells_channels_apart():
    text = (
        "<|channel|>analysis<|message|>Let me <b>see.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
        '{"text": "<|"}')
    assert whole_and_cut("gpt_oss", text) == ("I look it up.", [("now", '{"text": "<|"}')], "Let me <b>see.")
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert whole_and_cut("gpt_oss", text) == ("Yes.", [], "Hm.")
    for body in ("no JSON", '{"a": 1} and more', "[1]"):
        text = f"<|channel|>commentary to=functions.now<|message|>{body}<|call|>"
        assert whole_and_cut("gpt_oss", text) == (body, [], "")
    assert whole_and_cut("gpt_oss", "Plain text.") == ("Plain text.", [], "")
