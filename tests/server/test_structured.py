"""What clients may ask answers to look like: fields to constraints, constraints to grammars, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Annotated, Literal

import pytest
from fake_engine import FakeEngine
from llguidance import LLMatcher
from pydantic import BaseModel, Field, SecretStr

from jettison.config import EngineConfig
from jettison.server import compiling
from jettison.server.compile_jobs import Compiled, Job
from jettison.server.compile_process import Compiler
from jettison.server.compiling import GrammarCompiler
from jettison.server.errors import ApiError
from jettison.server.json_schemas import FOLLOWED_FORMATS, NOT_FOLLOWED, OTHER_FORMATS, loosened
from jettison.server.structured import Constraint, JsonDefaults, _closed
from waiting import PATIENCE_S

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SPECIAL = {"<|tool|>": 300, "<|end|>": 301}
TAGS = {
    "type": "structural_tag", "triggers": ["<f="],
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}, {"begin": "<f=b>", "schema": {}, "end": ""}],
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler():
    return Compiler(SPECIAL)


def follows(compiler, constraint, *texts):
    """For each text whether it is one, a beginning of one ("begins"), or neither; a number in it is a token."""
    job = Job(kind=constraint.kind, text=constraint.text, white_space=constraint.whitespace_pattern)
    made = compiler.compiled(job)
    assert made.error is None, made.error
    found = []
    for text in texts:
        matcher = LLMatcher(compiler._tokenizer, made.grammar, log_level=0)
        tokens = []
        for part in [text] if isinstance(text, str) else text:
            tokens += [part] if isinstance(part, int) else compiler._tokenizer.tokenize_str(part)
        is_taken = all(matcher.consume_token(token) for token in tokens)
        found.append(matcher.is_accepting() if is_taken and matcher.is_accepting() else "begins" if is_taken else False)
    return found


# --- grammars


@pytest.mark.parametrize(("constraint", "texts", "expected"), [
    (Constraint("json", json.dumps(SCHEMA)), ['{"a":1}', '{ "a": -3 }', '{"a"', '{"a":"x"}', "{}"],
     [True, True, "begins", False, False]),
    (Constraint("json", json.dumps(SCHEMA), whitespace_pattern=""), ['{"a":1}', '{"a": 1}'], [True, False]),
    (Constraint("json", json.dumps(SCHEMA), whitespace_pattern="[ ]{1,2}"), ['{  "a":1}', '{   "a":1}', '{\n"a":1}'],
     [True, False, False]),
    (Constraint("json", "true"), ["3", '["x"]', "x"], [True, True, False]),
    (Constraint("regex", r"\d{2}-(a|b)/\w"), ["12-a/x", "12-c", "1²-a/x"], [True, False, False]),
    (Constraint("choice", '["yes", "no", "né\\n\\"", "yes"]'), ["yes", "no", 'né\n"', "y", "maybe"],
     [True, True, True, "begins", False]),
    (Constraint("choice", '["", "a"]'), ["", "a", "b"], [True, True, False]),
    (Constraint("choice", '["a\\u007f", "b"]'), ["a\x7f", "b", "a"], [True, True, "begins"]),
    (Constraint("grammar", 'root ::= "SELECT " [a-z]+ (" FROM " [a-z]+)?'), ["SELECT a FROM b", "SELECT a", "DROP"],
     [True, True, False]),
    (Constraint("grammar", 'start: "x" N\nN: /[0-9]+/'), ["x12", "y"], [True, False]),
    (Constraint("grammar", 'start: <|tool|> "x"'), [[300, "x"], "x"], [True, False]),
    (Constraint("structural_tag", json.dumps(TAGS)),
     ["free < text", 'say <f=a>{"a":1}</f> and <f=b>[1]', "<f=c>", '<f=a>{"b"', ""], [True, True, False, False, True]),
])  # fmt: skip
def test_what_follows_a_constraint(compiler, constraint, texts, expected):
    assert follows(compiler, constraint, *texts) == expected


@pytest.mark.parametrize(("document", "texts", "expected"), [
    ({"type": "const_string", "value": "a<|tool|>b"}, [["a", 300, "b"], "ab"], [True, False]),
    ({"type": "json_schema", "json_schema": SCHEMA}, ['{"a":1}', "1"], [True, False]),
    ({"type": "regex", "pattern": "a/b+"}, ["a/bb", "a"], [True, "begins"]),
    ({"type": "sequence", "elements": [{"type": "const_string", "value": "x"}, {"type": "any_text"}]},
     ["x and more", "y"], [True, False]),
    ({"type": "or", "elements": [{"type": "const_string", "value": "x"}, {"type": "const_string", "value": "yy"}]},
     ["x", "yy", "xy"], [True, True, False]),
    ({"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
     ["<t>a<b</t>", "<t>a</t>b", "<t>a"], [True, False, "begins"]),
    ({"type": "tag", "begin": "<|tool|>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "<|end|>"},
     [[300, '{"a":1}', 301], [300, '{"a":1}']], [True, "begins"]),
    ({"type": "tag", "begin": "(", "content": {"type": "regex", "pattern": "a"}, "end": [")", "]"]},
     ["(a)", "(a]", "(a}"], [True, True, False]),
    ({"type": "triggered_tags", "triggers": ["<|tool|>"], "at_least_one": True, "stop_after_first": True, "tags": [
        {"begin": "<|tool|>x", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "!"}]},
     [["so ", 300, 'x{"a":1}!'], ["so ", 300, 'x{"a":1}! more'], "so"], [True, False, "begins"]),
    ({"type": "tags_with_separator", "separator": ",", "at_least_one": True, "tags": [
        {"begin": "<", "content": {"type": "regex", "pattern": "[a-z]"}, "end": ">"}]},
     ["<a>", "<a>,<b>", "<a><b>", ""], [True, True, False, "begins"]),
])  # fmt: skip
def test_formats_of_structural_tags(compiler, document, texts, expected):
    constraint = Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": document}))
    assert follows(compiler, constraint, *texts) == expected


class Card(BaseModel):
    kind: Literal["card"] = "card"
    number: str


class Cash(BaseModel):
    kind: Literal["cash", "coins"] = "cash"
    where: Path | None = None
    secret: SecretStr | None = None


class Split(BaseModel):
    kind: Literal["split"] = "split"
    first: Pay
    second: Pay


Pay = Annotated[Card | Cash | Split, Field(discriminator="kind")]
Split.model_rebuild()


class Sale(BaseModel):
    by: Pay


async def test_pydantics_unions_are_followed(compiler):
    """By a tag with a default, which is not required in the schema; recursive; with formats that say nothing."""
    card, cash = '{"kind":"card","number":"1"}', '{"kind":"coins","where":"/a"}'
    split = f'{{"kind":"split","first":{card},"second":{cash}}}'
    texts = [f'{{"by":{by}}}' for by in (card, cash, split, '{"number":"1"}', "{}", '{"kind":"cheque"}')]
    expected = [True, True, True, False, False, False]
    for kind, document in (("json", Sale.model_json_schema()), ("structural_tag", {
            "format": {"type": "json_schema", "json_schema": Sale.model_json_schema()}})):
        assert follows(compiler, Constraint(kind, json.dumps(document)), *texts) == expected
    for text in texts[:3]:
        Sale.model_validate_json(text)


@pytest.mark.parametrize(("parts", "texts", "expected"), [
    ([{"type": "object", "properties": {"k": {"enum": ["a", "b"]}}},
      {"type": "object", "properties": {"k": {"const": "c"}}}],
     ['{"k":"b"}', '{"k":"c"}', "{}"], [True, True, False]),
    ([{"type": "object", "properties": {"k": {"enum": ["a", "b"]}}},
      {"type": "object", "properties": {"k": {"const": "b"}}}], None, None),
    ([{"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}}}], None, None),  # of 5 both hold
    ([{"type": "object", "properties": {"k": {"const": "a"}}}, {"type": "object"}], None, None),
    ([{"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}, "l": {"const": one}}} for one in "xy"]},
      {"type": "object", "properties": {"k": {"$ref": "#/$defs/K%20b"}}}],
     ['{"k":"a","l":"y"}', '{"k":"a","l":"z"}', '{"k":"a"}', '{"k":"b"}', "{}"], [True, False, False, True, False]),
    ([{"type": "object", "properties": {"k": {"const": "a"}}}, {"anyOf": [{"type": "object"}]}], None, None),
])  # fmt: skip
def test_parts_that_a_constant_tells_apart_are_followed(compiler, parts, texts, expected):
    for extra in ({}, {"anyOf": [{"type": "object", "properties": {"n": {"type": "integer"}}}]}):
        schema = {"oneOf": parts, "$defs": {"K b": {"const": "b"}}, **extra}
        constraint = Constraint("json", json.dumps(schema))
        if texts is not None:
            assert follows(compiler, constraint, *texts) == expected
        else:
            assert "oneOf" in compiler.compiled(Job(kind="json", text=constraint.text)).error


@pytest.mark.parametrize("parts", [
    [{"type": "object", "properties": {"k": {"type": "string"}, name: {"type": "integer"}}} for name in "ab"],
    [{"type": "string"}, {"type": "string", "maxLength": 3}],
    [{"type": "object", "properties": {"k": {"const": "a"}}}] * 2,
])  # fmt: skip
def test_a_discriminator_that_tells_no_parts_apart_is_not_believed(compiler, parts):
    schema = {"oneOf": parts, "discriminator": {"propertyName": "k"}}
    assert "oneOf" in compiler.compiled(Job(kind="json", text=json.dumps(schema))).error


def test_what_references_lead_to_is_a_part_wherever_it_stands(compiler):
    for place in ("#/components/X", "#/list/1", "#/a%20b/X~1"):
        schema = {"$ref": place, "list": [0, {"format": "path"}], "components": {"X": {"format": "path"}},
                  "a b": {"X/": {"format": "path"}}}  # fmt: skip
        assert follows(compiler, Constraint("json", json.dumps(schema)), '"a"') == [True]
    circle = {"properties": {"next": {"$ref": "#"}}, "type": "object", "format": "path"}
    assert follows(compiler, Constraint("json", json.dumps(circle)), '{"next":{}}') == [True]


def test_formats_that_no_standard_defines_say_nothing(compiler):
    for told in ("path", "password", "binary", "ipv4network", "x" * 99, 5):
        assert follows(compiler, Constraint("json", json.dumps({"type": "string", "format": told})), '"a"') == [True]
    for told in FOLLOWED_FORMATS:
        assert compiler.compiled(Job(kind="json", text=json.dumps({"format": told}))).error is None
    for told in OTHER_FORMATS:
        assert told in compiler.compiled(Job(kind="json", text=json.dumps({"format": told}))).error
    named = {"type": "object", "properties": {"format": {"type": "string"}, "uniqueItems": {"const": False}},
             "const": {"format": "path"}, "required": ["format"]}  # fmt: skip
    assert follows(compiler, Constraint("json", json.dumps(named)), '{"format":"path"}') == [True]


@pytest.mark.parametrize("keyword", NOT_FOLLOWED)
def test_what_is_not_followed_is_refused_unless_it_is_left_out(compiler, keyword):
    schema = {"type": "object", "properties": {"a": {keyword: True}, "b": {"pattern": r"(?!x)y\b"}}}
    assert keyword in compiler.compiled(Job(kind="json", text=json.dumps(schema))).error
    loose, left_out = loosened(schema)
    assert left_out == {keyword, "pattern"} and "pattern" in schema["properties"]["b"]
    assert follows(compiler, Constraint("json", json.dumps(loose)), '{"a":1,"b":"z"}') == [True]


def test_names_that_are_left_out_are_not_forbidden(compiler):
    schema = {"type": "object", "patternProperties": {"^(?!x-).+$": {"type": "integer"}}, "additionalProperties": False}
    loose, left_out = loosened(schema)
    assert left_out == {"patternProperties", "additionalProperties"}
    assert follows(compiler, Constraint("json", json.dumps(loose)), '{"a":1}') == [True]


def test_what_looks_around():
    for pattern, left_out in (
        ("(?=a)", True), ("(?<!a)b", True), (r"\bx", True), (r"(a)\1", True), (r"\\b", False), (r"\\(?=", True),
        ("(?:a)(?P<n>b)", False), (r"\(?=", False), (r"\d\W", False),
    ):
        assert loosened({"pattern": pattern})[1] == ({"pattern"} if left_out else set()), pattern
        assert loosened({"patternProperties": {pattern: {}}})[1] == ({"patternProperties"} if left_out else set())


@pytest.mark.parametrize(("constraint", "why"), [
    (Constraint("json", "{"), "no JSON"), (Constraint("json", "[]"), "object"),
    (Constraint("json", '{"type": "objct"}'), "objct"), (Constraint("json", '{"not": {}}'), "not"),
    (Constraint("json", '{"$ref": "#/nowhere"}'), "nowhere"), (Constraint("json", "false"), ""),
    (Constraint("json", '{"a":' * 3000 + "1" + "}" * 3000), ""), (Constraint("regex", "(?=a)"), "look-ahead"),
    (Constraint("regex", "(a"), "unclosed"), (Constraint("grammar", "root ::= nothing"), "nothing"),
    (Constraint("grammar", "start: nothing"), "nothing"), (Constraint("structural_tag", "[]"), "object"),
    (Constraint("structural_tag", "{}"), "format"), (Constraint("structural_tag", '{"format": {}}'), "type"),
    (Constraint("structural_tag", '{"triggers": ["<"], "structures": [{"begin": "[", "end": ""}]}'), "trigger"),
])  # fmt: skip
def test_what_cannot_be_compiled_says_why_in_a_line(compiler, constraint, why):
    error = compiler.compiled(Job(kind=constraint.kind, text=constraint.text)).error
    assert error is not None and why in error and "\n" not in error and len(error) < 400


# --- apart from the server


CHAIN = "start: r0\n" + "\n".join(f'r{at}: "a" r{(at + 1) % 9000}?' for at in range(9000))
"""Its compilation overflows a stack."""
BOMBS = [
    Constraint("grammar", CHAIN),
    Constraint("json", json.dumps({"enum": [f"x{at}" for at in range(18_000)]})),
    Constraint("json", json.dumps({"allOf": [
        {"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {"type": "integer"}}} for j in range(6)]}
        for i in range(14)]})),
    Constraint("regex", "(" * 200 + "a" + "{1,40})" * 200),
    Constraint("json", json.dumps({"type": "string", "pattern": "(x+x+)+y" * 400})),
    Constraint("grammar", "start: " + " ".join(f"a{at}" for at in range(2000)) + "\n" + "\n".join(
        f"a{at}: " + " | ".join(f"a{other}" for other in range(0, 2000, 50)) + ' | "x"' for at in range(2000))),
]  # fmt: skip


async def test_bombs_are_refused_or_compiled_and_the_next_constraint_is_well():
    compiler = GrammarCompiler(SPECIAL)
    try:
        await compiler.compiled(Constraint("choice", '["a"]'))
        for bomb in BOMBS:
            error = None
            try:
                await compiler.compiled(bomb)
            except ApiError as raised:
                error = raised
            told = error is None or (error.status, error.param, error.code, "\n" in error.message)
            assert told in (True, (400, "structured_outputs", "invalid_grammar", False))
            assert "start" in await compiler.compiled(Constraint("regex", f"b{BOMBS.index(bomb)}"))
    finally:
        compiler.close()


async def test_the_time_and_the_length_of_a_constraint_are_bounded(monkeypatch):
    monkeypatch.setattr(compiling, "MAX_COMPILE_S", 0.01)
    compiler = GrammarCompiler(SPECIAL)
    long = Constraint("json", json.dumps({"enum": [f"x{at}" for at in range(15_000)]}))
    try:
        with pytest.raises(ApiError, match=r"takes more than 0\.01 s"):
            await compiler.compiled(long)
        monkeypatch.setattr(compiling, "MAX_COMPILE_S", 30.0)
        with pytest.raises(ApiError, match=r"takes more than 0\.01 s"):
            await compiler.compiled(long)  # kept, too
        assert await compiler.compiled(Constraint("json", "{}"))
        with pytest.raises(ApiError, match="may have 262144"):
            await compiler.compiled(Constraint("regex", "a" * 262145))
    finally:
        compiler.close()


async def test_one_compilation_serves_all_and_the_cache_is_bounded(monkeypatch):
    asked = []
    monkeypatch.setattr(compiling, "MAX_CACHE_BYTES", 4000)
    compiler = GrammarCompiler(SPECIAL)
    ask = compiler._ask
    monkeypatch.setattr(compiler, "_ask", lambda constraint: asked.append(constraint) or ask(constraint))
    try:
        same = [compiler.compiled(Constraint("choice", '["a"]', param)) for param in "pqrs"]
        assert len(set(await asyncio.gather(*same))) == 1 and len(asked) == 1
        for at in range(30):
            await compiler.compiled(Constraint("choice", json.dumps(["x" * at, "y"])))
        assert compiler._num_cached_bytes <= 4000 and len(compiler._cache) < 15
        await compiler.compiled(Constraint("choice", '["a"]'))
        assert len(asked) == 32
    finally:
        compiler.close()


async def test_a_child_that_has_ended_meanwhile_is_replaced():
    compiler = GrammarCompiler(SPECIAL)
    try:
        await compiler.compiled(Constraint("regex", "a"))
        compiler._child._process.kill()
        compiler._child._process.wait()
        assert await compiler.compiled(Constraint("regex", "b")) == "start: /b/"
    finally:
        compiler.close()


async def test_a_child_that_is_ended_from_outside_is_no_verdict(monkeypatch):
    """Nor one that cannot be started: the client may come again."""
    compiler, wanted = GrammarCompiler(SPECIAL), Constraint("regex", "a")
    try:
        await compiler.compiled(Constraint("regex", "b"))
        with monkeypatch.context() as patch:
            patch.setattr(compiler._child, "ask", lambda job: killed(compiler._child))
            with pytest.raises(ApiError) as caught:
                await compiler.compiled(wanted)
        assert caught.value.status == 503 and "retry-after" in caught.value.headers
        with monkeypatch.context() as patch:
            patch.setattr(compiling.subprocess, "Popen", cannot_start)
            with pytest.raises(ApiError) as caught:
                await compiler.compiled(wanted)
        assert caught.value.status == 503
        assert await compiler.compiled(wanted) == "start: /a/"
    finally:
        compiler.close()


def killed(child):
    child._process.kill()
    child._process.wait()
    raise OSError("it has ended")


def cannot_start(*_, **__):
    raise OSError("no process")


async def test_what_has_been_compiled_is_kept_though_its_client_has_gone():
    compiler, wanted = GrammarCompiler(SPECIAL), Constraint("regex", "[ab]+")
    try:
        asked = asyncio.create_task(compiler.compiled(wanted))
        await asyncio.sleep(0)
        made = next(iter(compiler._under_way.values())).made
        asked.cancel()
        await made
        await asyncio.sleep(0)
        assert not compiler._under_way and len(compiler._cache) == 1
    finally:
        compiler.close()


async def test_a_child_may_have_a_descriptor_beyond_1024():
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    compiler = GrammarCompiler(SPECIAL)
    try:
        assert await compiler.compiled(Constraint("regex", "a")) == "start: /a/"
    finally:
        compiler.close()
        for descriptor in opened:
            os.close(descriptor)


async def test_the_loop_goes_on_while_a_grammar_is_compiled(monkeypatch):
    """The compiler waits for the loop's turn, which never comes where the loop waits for the compiler."""
    compiler, turn = GrammarCompiler(SPECIAL), threading.Event()
    ask, had_turn = compiler._ask, []

    def asked(constraint):
        had_turn.append(turn.wait(PATIENCE_S))
        return ask(constraint)

    monkeypatch.setattr(compiler, "_ask", asked)
    try:
        compiling = asyncio.create_task(compiler.compiled(Constraint("regex", "[ab]+")))
        await asyncio.sleep(0)  # it has begun
        await asyncio.sleep(0)
        turn.set()
        assert await compiling and had_turn == [True]
    finally:
        turn.set()
        compiler.close()


# --- over HTTP


@pytest.mark.parametrize("fields", [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"type": "json_object", "value": SCHEMA}},
    {"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"guided_json": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}, {"format": SCHEMA},
])  # fmt: skip
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
async def test_every_way_to_say_a_schema_is_the_same(app_client, app_engine, endpoint, fields):
    base = {"messages": [{"role": "user", "content": "x"}]} if endpoint == CHAT else {"prompt": "x"}
    answer = await app_client.post(endpoint, json=base | fields | {"n": 2})
    assert answer.status_code == 200, answer.text
    grammars = {request.params.grammar for request in app_engine.accepted[-2:]}
    (grammar,) = grammars
    assert json.loads(grammar.text)["grammars"][0]["json_schema"]["properties"] == SCHEMA["properties"]
    assert grammar.begins_after == ""


async def test_what_says_nothing_binds_nothing(app_client, app_engine):
    for fields in (
        {}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "disable_fallback": True}}, {"guided_json": None}, {"format": ""},
        {"structured_outputs": {"json_object": False}}, {"response_format": {}},
    ):
        answer = await app_client.post(COMPLETIONS, json={"prompt": "x", **fields})
        assert answer.status_code == 200, (fields, answer.text)
        assert app_engine.accepted[-1].params.grammar is None, fields


async def test_options_of_json(app_client, app_engine):
    asked = {"json": {"type": "object", "properties": {"a": SCHEMA}}, "disable_any_whitespace": True,
             "disable_additional_properties": True}
    assert (await app_client.post(COMPLETIONS, json={"prompt": "x", "structured_outputs": asked})).status_code == 200
    schema = json.loads(app_engine.accepted[-1].params.grammar.text)["grammars"][0]["json_schema"]
    assert schema["additionalProperties"] is False and schema["properties"]["a"]["additionalProperties"] is False
    assert schema["x-guidance"] == {"whitespace_flexible": False}


async def test_the_operators_options_of_json_hold_where_the_request_has_none(serve):
    config = EngineConfig.resolve(model="m", structured_outputs_config={
        "disable_any_whitespace": "true", "disable_additional_properties": True})
    engine = FakeEngine()

    async def schema_of(served, **fields):
        answer = await served.post(COMPLETIONS, {"prompt": "x", **fields})
        assert answer.status_code == 200, answer.text
        return json.loads(engine.accepted[-1].params.grammar.text)["grammars"][0]["json_schema"]

    async with serve(engine, json_defaults=JsonDefaults.of(config.server.structured_outputs_config)) as served:
        open_schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": open_schema}}
        schema = await schema_of(served, response_format=wrapped)
        assert schema["additionalProperties"] is False and schema["x-guidance"] == {"whitespace_flexible": False}
        asked = {"json": open_schema, "disable_any_whitespace": False, "disable_additional_properties": False}
        schema = await schema_of(served, structured_outputs=asked)
        assert "additionalProperties" not in schema and schema["x-guidance"]["whitespace_flexible"]
        schema = await schema_of(served, response_format={"type": "json_object"})
        assert "additionalProperties" not in schema, "it would be an empty one"


async def test_a_model_without_end_tokens_has_no_structured_output(app_client, app_engine, monkeypatch):
    monkeypatch.setattr(app_engine, "_info", app_engine.info.__class__(
        **{name: getattr(app_engine.info, name) for name in app_engine.info.__slots__ if name != "eos_token_ids"},
        eos_token_ids=()))
    answer = await app_client.post(COMPLETIONS, json={"prompt": "x", "guided_regex": "a"})
    assert answer.status_code == 400 and "end token" in answer.json()["error"]["message"]


async def test_a_grammar_that_fails_is_an_error_of_its_request(serve):
    engine = FakeEngine()
    engine.fail_after = 3
    async with serve(engine) as served:
        answer = await served.post(COMPLETIONS, {"prompt": "x", "guided_regex": "a+", "max_tokens": 9})
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_error"


async def test_closing_a_schema_leaves_what_is_no_schema_alone(app_client, app_engine):
    schema = {
        "const": {"type": "object", "x": 1}, "properties": {"type": {"type": "object"}},
        "items": [{"properties": {}}, True], "default": {"properties": {}},
    }  # fmt: skip
    closed = _closed(schema)
    assert closed["const"] == schema["const"] and closed["default"] == schema["default"]
    assert closed["properties"] == {"type": {"type": "object", "additionalProperties": False}}
    assert closed["items"] == [{"properties": {}, "additionalProperties": False}, True]
    deep = '{"items":' * 900 + "{}" + "}" * 900
    wanted = {"json": deep, "disable_additional_properties": True}
    answer = await app_client.post(COMPLETIONS, json={"prompt": "x", "structured_outputs": wanted})
    assert answer.status_code in (200, 400)


async def test_tenants_take_turns_at_the_compiler(monkeypatch):
    """One with many constraints does not make the others wait for all of them, nor fill the queue for them."""
    compiler, order, begun = GrammarCompiler(SPECIAL), list[str](), threading.Event()

    def asked(constraint):
        begun.wait(30)
        order.append(constraint.text)
        return Compiled(grammar="start: " + constraint.text)

    async def ask(tenant, text):
        compiling.TENANT.set(tenant)
        return await compiler.compiled(Constraint("regex", text))

    monkeypatch.setattr(compiler, "_ask", asked)
    monkeypatch.setattr(compiling, "MAX_OF_A_TENANT", 5)
    try:
        tasks = [asyncio.create_task(ask("a", f"a{at}")) for at in range(6)]
        tasks += [asyncio.create_task(ask("b", f"b{at}")) for at in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="Too many constraints"):
            await ask("a", "a9")
        tasks.append(asyncio.create_task(ask("c", "c0")))
        await asyncio.sleep(0)
        begun.set()
        assert await asyncio.gather(*tasks) == [
            "start: " + text for text in ("a0", "a1", "a2", "a3", "a4", "a5", "b0", "b1", "c0")]
        assert order == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4", "a5"]
    finally:
        begun.set()
        compiler.close()


async def test_a_compiler_that_closes_leaves_nothing_waiting(monkeypatch):
    compiler, begun = GrammarCompiler(SPECIAL), threading.Event()
    monkeypatch.setattr(compiler, "_ask", lambda constraint: begun.wait(30) and Compiled(grammar="start:"))
    tasks = [asyncio.create_task(compiler.compiled(Constraint("regex", text))) for text in "abc"]
    await asyncio.sleep(0)
    begun.set()
    compiler.close()
    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError | str) for one in told) and len(told) == 3
