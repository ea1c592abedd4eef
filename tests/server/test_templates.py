"""Chat templates: the sandbox beside transformers' environment, what is found out about one, which a folder means."""

from __future__ import annotations

import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conversations import TOOL, call, says, text

from jettison.errors import ConfigError, ModelError
from jettison.server.chat_renderer import MAX_REQUEST_TEMPLATES, ChatRenderer, ChatRequest, TemplateSettings
from jettison.server.conversation import checked_messages
from jettison.server.parsers.registry import call_kind
from jettison.server.template_traits import find_traits
from jettison.server.templates import ChatTemplate, TemplateError
from jettison.server.tokenizer import Tokenizer

USER = says("user", "Hello?")


@pytest.fixture
def folder(tokenizer_dir, tmp_path):
    shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
    return tmp_path


def renderer(source, **settings):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatRenderer({"default": (source, "here")}, special, TemplateSettings(**settings))


def prompt(source, *messages, template_settings=None, **request):
    made = renderer(source, **(template_settings or {}))
    return made.render(ChatRequest(checked_messages(list(messages), made.knows), **request))


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999999) %}{% endfor %}",
        "{% for i in range(9999) %}{{ messages[0].content * 1000 }}{% endfor %}",
        "{{ 'x' * 99999999999 }}",
        "{{ 99 ** 9999999 }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ raise_exception('no') }}",
        "{{ messages[0] + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content | xmlattr }}",
        "{% include '/etc/passwd' %}",
        "{% set r = range(99999) | list %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}{{ n.x | length }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
        "{% endfor %}{{ n.x | length }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
        "{% endfor %}{{ n.x | tojson }}",
        "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
        "{% set n.y = [n.y, n.y] %}"
        "{% endfor %}{{ n.x == n.y }}",
        "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
        "{% set n.y = [n.y, n.y] %}"
        "{% endfor %}{{ n.x is eq n.y }}",
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='ab') %}{% for i in range(60) %}"
        "{% set n.x = m(n.x) %}{% endfor %}{{ n.x | length }}",
        "{{ [[[[1] * 999] * 999] * 999] * 999 }}", "{{ [[[[1] * 999] * 999] * 999] * 999 | string }}",
        "{{ 'x'.center(9999999999) }}", "{{ 'x' | center(9999999999) }}", "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}", "{{ '{:9999999999}'.format(1) }}", "{{ '{:{}}'.format(1, 9999999999) }}",
        "{{ 'a\nb' | indent(9999999999) }}", "{{ ('a' * 9999).replace('a', 'b' * 99999) }}",
        "{{ 'x'.zfill(9999999999) }}",
        "{{ 'x'.join(['y' * 999999] * 999999) }}", "{{ ('9' * 99999) | int(base=16) }}",
        "{{ (1).to_bytes(9999999999) }}",
        "{{ lipsum(999999) }}", "{{ strftime_now('%9999999d') }}", "{{ namespace(__init__=1).__init__ }}",
        "{{ dict.mro() }}{{ dict.__class__ }}", "{{ namespace.mro() }}", "{{ tick }}{{ environment.tick }}",
        "{{ raise_exception.__globals__ }}", "{{ cycler.__init__.__globals__ }}", "{{ messages | attr('__class__') }}",
        "{{ messages[0].update(a=1) }}", "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
    ],
)
def test_a_template_cannot_run_away_or_break_out(source, monkeypatch):
    monkeypatch.setattr("jettison.server.template_sandbox.RENDER_LIMIT_S", 0.2)
    template = ChatTemplate(source, "here", max_chars=100_000)
    try:
        text = template.render([{"role": "user", "content": "x" * 100}], {})
    except TemplateError:
        text = ""
    assert text == ""


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ messages.append(1) }}", "is not safely callable|is unsafe"),
        ("{{ messages.__class__.__mro__ }}", "__class__.* is unsafe"),
        ("{{ no_such_function(messages) }}", "'no_such_function' is undefined"),
        ("{% for m in messages %}{% if m.role == 'assistant' %}{{ mark(m) }}{% endif %}{% endfor %}", "'mark' is u"),
        ("{{ messages[0].content.text.words }}", "has no attribute 'text'"),
        ("{% for m in messages %}{{ m.content | xmlattr }}{% endfor %}", "has no attribute 'items'"),
        ("{{ 9 ** 99999 }}", "number that is too large"),
        ("{% for m in messages %}{{ 1 / 0 }}{% endfor %}", "division by zero"),
        ("{{ raise_exception() }}", "missing 1 required"),
        # The system role is refused on purpose; what comes after that is still tried.
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ f() }}", "'f' is un"),
    ],
)
def test_a_template_that_renders_no_conversation_is_refused_with_one_line(source, told, folder):
    (folder / "chat_template.jinja").write_text(source)
    with pytest.raises(ModelError, match=told) as caught:
        Tokenizer.from_dir(folder)
    assert str(folder / "chat_template.jinja") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("source", [
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[0].content }}",
    "{% if messages|length > 1 %}{{ raise_exception('one question') }}{% endif %}{{ messages[0].content }}",
    "{{ raise_exception('this model does not chat') }}",
    "{% if tools %}{{ no_such_function(tools) }}{% endif %}{{ messages[0].content }}",
    "{{ strftime_now('%d %b %Y') if strftime_now is defined }}{{ bos_token }}{{ eos_token }}{{ messages | tojson }}",
    "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}{{ messages[-1].content }}",
])
def test_what_a_template_refuses_on_purpose_is_its_own_affair(source, folder):
    (folder / "chat_template.jinja").write_text(source)
    assert Tokenizer.from_dir(folder).chat_template == source


@pytest.mark.parametrize("source", ["{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "{{ 1 | no_such_filter }}"])
def test_a_template_that_does_not_compile_is_one_line(source):
    with pytest.raises(ModelError, match=r"^here: the chat template is broken: ") as caught:
        ChatTemplate(source, "here")
    assert "\n" not in str(caught.value)


def test_template_conveniences():
    source = (
        "{%- generation %}{{ {'a': '<é>'} | tojson }}{% endgeneration %}"
        "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}{{ strftime_now('%Y')[:2] }}"
    )
    assert ChatTemplate(source, "here").render([], {}) == '{"a": "<é>"}120'




# --- beside transformers' environment

EXPRESSIONS = r"""
2 ** 10|2 ** -1|2 ** 0.5|(-8) ** 2|10 ** 100|7 // 2|-7 // 2|7 % 3|-7 % 3|1 / 3|3 * 'ab'|[1] * 2
'%s-%05.1f' % ('a', 2.5)|'a' ~ 1 ~ none ~ true|[1, 2] + [3]|1 < 2 < 3|1 in [1, 2]|'b' not in 'abc'|not none
1 if false|(1 if false) is defined|x|x.y is defined|x is defined|m|m.role|m['role']|m.get('nope', 5)
m.items() ^ list|m.keys() ^ list|m ^ dictsort|m ^ tojson|m ^ tojson(indent=2)|m ^ tojson(separators=(',', ':'))
m ^ tojson(sort_keys=true)|[1.0, 1e30, none] ^ tojson|m ^ tojson(ensure_ascii=true)
m ^ tojson(indent='--', separators=[', ', '='])|'<&>é' ^ tojson|'a' ^ tojson ^ length|(m, 'é') ^ tojson
dict(a=1, b=[2])|dict([['a', 1]])|dict.fromkeys(['a', 'b'], 0)|namespace(a=1).a|range(5) ^ list
range(9, 0, -3) ^ list|'a,b,,c'.split(',')|'  x '.strip()|'xxabxx'.strip('x')|'a b'.title()|'abc'[::-1]|'abc'[-2:]
'aXb'.lower()|'abc'.startswith('ab')|'abc'.startswith(('x', 'a'))|'a-b'.replace('-', '+')|'a\nb'.splitlines()
'{} {x}'.format(1, x=2)|'x'.center(5, '*')|'{:>5}'.format('a')|'ab'.join(['1', '2'])|'a'.rjust(3)|'7'.zfill(3)
'abc' ^ first|'abc' ^ last|[3, 1, 2] ^ sort|['b', 'A'] ^ sort|['b', 'A'] ^ sort(case_sensitive=true)
[1, 2, 2] ^ unique ^ list|[3, 1] ^ min|[3, 1] ^ max|[1, 2] ^ sum|[[1, 'a'], [2, 'b']] ^ map('last') ^ list
ms ^ map(attribute='role') ^ join(',')|ms ^ selectattr('role', 'equalto', 'user') ^ list
ms ^ rejectattr('role', 'in', ['user']) ^ map(attribute='content') ^ list|ms ^ groupby('role') ^ map('first') ^ list
[1, 2, 3] ^ select('odd') ^ list|[0, 1] ^ reject ^ list|range(7) ^ batch(3, 'x') ^ list|range(7) ^ slice(3) ^ list
'abc' ^ list|'abc' ^ length|'abc' ^ reverse|'a b' ^ capitalize|'hello world' ^ truncate(8)|'a\nb' ^ indent
'a\nb' ^ indent(2, true)|'3.7' ^ int|'x' ^ int(9)|'ff' ^ int(base=16)|'3.5' ^ float|3.567 ^ round(1)
3.5 ^ round(method='floor') ^ int|-3 ^ abs|'<b>' ^ e|'<b>' ^ escape ^ string|'<b>' ^ safe|'a b' ^ urlencode
m ^ string|none ^ default('d')|'' ^ default('d', true)|x ^ d('e')|5 is divisibleby 5|'a' is string|1 is number
1.5 is float|true is boolean|m is mapping|[] is iterable|'a' is sequence|none is none|x is undefined|1 is integer
'A' is upper|[1] is sameas [1]|2 is even|'f' is filter|'tojson' is filter|'odd' is test|(1, 2)
'%.3f' ^ format(3.14159)|'%s=%s' ^ format('a', 1)|1000000 ^ filesizeformat|'x y z' ^ wordcount
'aa bb cc' ^ wordwrap(2)|[[1, 2], [3]] ^ sum(start=[])|m ^ items ^ list|'abc' ^ replace('b', 'x')|'a' ^ center(5)
' a ' ^ trim|'xax' ^ trim('x')|'AbC' ^ swapcase|cycler('a', 'b').next()|joiner(',')() ^ length|'abc'.encode()
'a'.isdigit()|(7).bit_length()|2.5.is_integer()|1_000|0x1f|1e3|[1, [2, {'a': none}]]|{'a': 1}['a']
{'a': 1}.b is defined|ms[0].content[:3]|ms[-1]|ms[5]|ms[1:][0].role|raise_exception is defined
strftime_now('%Y') ^ length|lipsum is defined|m.content ^ length > 2 and m.role == 'user'|messages is defined
tools is none|x + 1|m + 1|m.role()|[].append(1)|m.update(a=1)|1 / 0|'a' + 1|'a' < 1|{}['x'] + 1|m.__class__
''.__class__|nope(1)|1 ^ nope|[x] ^ tojson|namespace(_a=1)|raise_exception('no')|range(999999)|m ^ xmlattr
'a' ^ pprint|[2, 1] ^ pprint
"""
BLOCKS = [
    "{% for m in ms %}{{ loop.index }}{{ loop.first }}{{ loop.revindex0 }}{{ loop.previtem.role }}"
    "{% else %}none{% endfor %}",
    "{% for m in ms if m.role == 'user' %}{{ loop.length }}{{ loop.nextitem is defined }}{% endfor %}",
    "{% for m in ms %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "{% for m in ms %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{{ loop.depth }}{% endfor %}",
    "{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}{% for a in [] %}{% else %}empty{% endfor %}",
    "{% for n in [[1, [2, []]]] recursive %}({{ loop(n) if n is iterable else n }}){% endfor %}",
    "{% set a = 1 %}{% for x in [1, 2] %}{% set a = a + x %}{% endfor %}{{ a }}",
    "{% set n = namespace(a=1) %}{% for x in [1, 2] %}{% set n.a = n.a + x %}{% endfor %}{{ n.a }}{{ n }}",
    "{% set a %}  text {{ 1 }} {% endset %}[{{ a }}]{% set a | upper | trim %} b {% endset %}[{{ a }}]"
    "{% set b, c = 1, 2 %}{{ c }}",
    "{% macro f(a, b=2, *rest) %}{{ a }}{{ b }}{{ rest }}{{ varargs }}{{ caller() if caller }}"
    "{% endmacro %}{{ f(1) }}{{ f(1, b=3) }}",
    "{% macro f() %}<{{ caller('x') }}>{% endmacro %}{% call(y) f() %}{{ y }}{% endcall %}",
    "{% macro f(n) %}{% if n %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}{{ f.name }}{{ f.arguments }}",
    "{% generation %}{% set a = 1 %}{{ a }}{% endgeneration %}{{ a }}",
    "{% for m in ms %}{%- generation -%} {{ m.content }} {%- endgeneration -%}{% endfor %}",
    "{% filter upper %}abc{{ m.role }}{% endfilter %}{% with a = 5 %}{{ a }}{% endwith %}{{ a }}",
    "{% raw %}{{ x }}{% endraw %}{# nothing #}{{ '{{' }}{%- if true -%} a {%- endif -%} b",
    "  {% if true %}\n    a\n  {% endif %}\n b\n{{ 1 }}\n\n",
    "{% block a %}in{% endblock %}{{ self.a() }}",
    "{% do 1 %}", "{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}", "{% nothing %}",
    "{{ 'a' 'b' }}", "{{",
    "{% autoescape true %}{{ '<' }}{{ '<' ~ m.role }}{% endautoescape %}", "{% trans %}a{% endtrans %}",
    "{{ bos_token }}{% if bos_token is defined %}yes{% endif %}{{ m | tojson }}\r\nend\r\n",
    "{% set messages = ms[1:] %}{{ messages | length }}{% for messages in [1] %}{{ messages }}{% endfor %}",
    "{% if a is not defined %}{% set a = 3 %}{% endif %}{{ a }}"
    "{% if ms | length > 1 and ms[1].role == 'assistant' %}y{% endif %}",
    "{% set l = ['a'] %}{% set _ = l.append('b') %}{{ l }}",
]  # fmt: skip


def test_expressions_and_blocks_are_as_in_transformers():
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    variables = {
        "m": {"role": "user", "content": "Grüße <b>"}, "tools": None, "bos_token": "<s>",
        "ms": [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Two."}, {"role": "user",
        "content": ""}],
    }  # fmt: skip
    written = [one.replace("^", "|") for line in EXPRESSIONS.strip().split("\n") for one in line.split("|")]
    sources = [*("{{ " + expression + " }}" for expression in written), *BLOCKS]
    differing = {}
    for source in sources:
        made = rendered(lambda source=source: ChatTemplate(source, "here").render([USER], variables))
        wanted = rendered(
            lambda source=source: utils._compile_jinja_template(source).render(messages=[USER], **variables))
        if made != wanted:
            differing[source] = made, wanted
    assert len(written) > 170
    assert not differing


def rendered(render):
    try:
        return render()
    except Exception:  # noqa: BLE001  # both refuse, whatever they call it
        return None


# --- what is found out about a template

PARTS = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
FRONT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('at the front!') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)
FIRST = (
    "{{ messages[0].content }}"
    "{% for m in messages[1:] if m.role != 'system' %}|{{ m.role }}:{{ m.content }}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.mark.parametrize(("source", "form"), [
    (PLAIN, "string"), (PARTS, "parts"), ("{{ messages | tojson }}", "string"),
    ("{% for m in messages %}{% for c in m['content'] | list %}{{ c['text'] | trim }}{% endfor %}{% endfor %}",
     "parts"),
    ("{% for m in messages %}{% set content = m.content %}{% for c in content %}{{ c.text }}{% endfor %}{% endfor %}",
     "parts"),
    ("{% macro w(x) %}{% for c in x %}{{ c.text }}{% endfor %}{% endmacro %}"
     "{% for m in messages %}{{ w(m.content) }}{% endfor %}",
     "parts"),
    ("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", "parts"),
    ("{% for m in messages %}{{ m.content | map(attribute='text') | join }}{% endfor %}", "parts"),
    ("{% for m in messages %}{% if m.content is string %}{{ raise_exception('a list, please') }}{% endif %}"
     "{{ m.content[0]['text'] }}{% endfor %}", "parts"),
    ("{% for m in messages %}{% if m.content is string %}{{ m.content }}"
     "{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}",
     "as sent"),
    ("{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}", "string"),  # letter by letter
    ("{{ raise_exception('never') }}{% for c in messages[0].content %}{% endfor %}", "parts"),
    ("{{ raise_exception('never') }}{{ messages[0].content }}", "string"),
])  # fmt: skip
def test_whether_a_template_wants_texts_or_parts(source, form):
    assert find_traits(ChatTemplate(source, "here"), {}).form_of("user") == form


def test_each_role_has_a_form_of_its_own():
    source = (
        "{% for m in messages %}{% if m.role in ['system', 'tool'] %}{{ m.content | trim }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %};{% endfor %}"
    )
    told = says("assistant", "c", tool_calls=[call({})]), says("tool", text("d", "e"))
    assert prompt(source, says("system", text("a", "b")), says("user", "b"), *told) == "a\nb;b;c;d\ne;"


@pytest.mark.parametrize("source", [
    "hello", "{{ bos_token }}", "{% for m in messages %}{{ m.role }}{{ m.text }}{% endfor %}",
])  # fmt: skip
def test_a_template_that_loses_what_the_user_says_is_told_at_the_start(source, folder, caplog):
    (folder / "chat_template.jinja").write_text(source)
    with pytest.raises(ModelError, match=r"chat_template.jinja: .* leaves out what the user says"):
        Tokenizer.from_dir(folder)
    Tokenizer.from_dir(folder, templates=TemplateSettings(content_format="string"))  # the operator knows better
    assert "leaves out what is said by: " in caplog.text


@pytest.mark.parametrize(("content_format", "wanted"), [
    ("string", "user:a\nb;"), ("openai", "user:[{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}];"),
])  # fmt: skip
def test_the_operator_may_say_the_form(content_format, wanted):
    settings = {"content_format": content_format}
    assert prompt(PLAIN, says("user", text("a", "b")), template_settings=settings) == wanted


def test_system_messages_are_merged_only_where_the_template_needs_it():
    developer, answer = says("developer", text("b", "c")), says("assistant", "d")
    talk = [says("system", "a"), developer, USER, answer, says("system", "e"), USER]
    assert prompt(PLAIN, *talk) == "system:a;system:b\nc;user:Hello?;assistant:d;system:e;user:Hello?;"
    assert prompt(FRONT, *talk) == "system:a\n\nb\nc\n\ne;user:Hello?;assistant:d;user:Hello?;"
    assert prompt(FIRST, *talk) == "a\n\nb\nc\n\ne|user:Hello?|assistant:d|user:Hello?"
    assert prompt(PARTS, *talk[:3]) == "system:a;system:bc;user:Hello?;"


ALTERNATING = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [FRONT, FIRST])
@pytest.mark.parametrize("source_of", [str, lambda source: source.replace("m.content", "(m.content | trim)")])
def test_turns_of_the_users_that_a_system_message_parted_are_one_where_roles_must_alternate(source, source_of):
    talk = [says("system", "a"), USER, says("system", "b"), says("developer", "c"), says("user", text("d", "e"))]
    answered = [*talk, says("assistant", "f"), says("user", "g")]
    rest = "user:Hello?\nd\ne;assistant:f;user:g;" if source is FRONT else "user:Hello?\nd\ne|assistant:f|user:g"
    told = prompt(source_of(ALTERNATING + source), *answered)
    assert told == ("system:a\n\nb\n\nc;" if source is FRONT else "a\n\nb\n\nc|") + rest
    parts = ALTERNATING + PARTS.replace("{{ m.role }}", "{% if m.role == 'system' and not loop.first %}"
                                        "{{ raise_exception('at the front!') }}{% endif %}{{ m.role }}")
    assert prompt(parts, *talk) == "system:a\n\nb\n\nc;user:Hello?de;"
    for refused in ([USER, USER], [*talk, says("assistant", "f"), says("assistant", "g")], [*talk, USER]):
        with pytest.raises(TemplateError, match=r"Roles must alternate\."):
            prompt(ALTERNATING + source, *refused)


@pytest.mark.parametrize(("source", "role"), [
    (PLAIN, "system"), (PLAIN + "{# 'developer' #}", "system"),
    (PLAIN + "{% if x == 'developer' %}{% endif %}", "developer"),
    ("{% for m in messages if m.role != 'developer' %}{{ m.role }}:{{ m.content }};{% endfor %}", "system"),
])  # fmt: skip
def test_developer_stays_where_the_template_writes_it(source, role):
    assert prompt(source, says("developer", "a"), USER) == f"{role}:a;user:Hello?;"


# --- messages

CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} "
    "{{ ARGUMENTS }}]{% endfor %}{{ m.tool_call_id }};{% endfor %}"
)


@pytest.mark.parametrize(("written", "wanted"), [
    ("c.function.arguments | tojson", '{"a": "é"}'), ("c.function.arguments.items() | list", "[('a', 'é')]"),
    ("c.function.arguments + ''", '{"a":"é"}'), ("c.function.arguments", '{"a":"é"}'),
])  # fmt: skip
def test_arguments_of_calls_are_a_mapping_or_a_text_as_the_template_wants(written, wanted):
    source = CALLS.replace("ARGUMENTS", written)
    calling = says("assistant", None, tool_calls=[call('{"a":"é"}')])
    history = [USER, calling, says("tool", "x", tool_call_id="abcdefghi")]
    assert prompt(source, *history) == f"user:Hello?;assistant:[abcdefghi weather {wanted}];tool:xabcdefghi;"


def test_arguments_that_are_no_object_stay_as_they_are_or_are_named():
    history = [USER, says("assistant", None, tool_calls=[call({}), call('{"a": ')])]
    made = prompt(CALLS.replace("ARGUMENTS", "c.function.arguments | tojson"), *history)
    assert '[abcdefghi weather "{\\"a\\": "]' in made
    with pytest.raises(TemplateError) as caught:
        prompt(CALLS.replace("ARGUMENTS", "c.function.arguments.items() | list"), *history)
    assert caught.value.param == "messages[1].tool_calls[1].function.arguments"


@pytest.mark.parametrize(("source", "wanted"), [
    ("{{ m.content }}", ""), ("{{ m.content + '' }}", ""), ("{{ 'no' if m.content is none else m.content + '.' }}",
     "no"),
    ("{% if m.content is none %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}", "weather"),
    ("{{ 'absent' if m.content is not defined else m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}",
     "absentweather"),
])  # fmt: skip
def test_a_call_without_content_is_given_as_the_template_can_take_it(source, wanted):
    source = "{% for m in messages %}" + source + ";{% endfor %}"
    assert prompt(source, USER, says("assistant", None, tool_calls=[call({})])).split(";")[1] == wanted


def test_content_joins_the_thoughts_of_a_call_where_the_template_takes_only_one():
    source = (Path(__file__).parent / "chat_templates" / "harmony.jinja").read_text(encoding="utf-8")
    calling = says("assistant", "I look.", reasoning_content="Hm.", tool_calls=[call({})])
    assert "analysis<|message|>Hm.\n\nI look.<|end|>" in prompt(source, USER, calling)
    assert "analysis<|message|>Hm.\n\na\nb<|end|>" in prompt(source, USER, calling | {"content": text("a", "b")})
    for content, thoughts in (("I look.", ""), ("", "Hm.")):
        made = prompt(source, USER, calling | {"content": content, "reasoning_content": thoughts})
        assert f"analysis<|message|>{content}{thoughts}<|end|>" in made
    takes_both = "{% for m in messages %}{{ m.thinking }}|{{ m.content }};{% endfor %}"
    assert prompt(takes_both, USER, calling).endswith(";Hm.|I look.;")


PHI = (
    "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
    "{{ '<|system|>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|>' + '<|end|>' }}"
    "{% else %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)


def test_tools_are_in_the_system_message_where_the_template_reads_them_there(caplog):
    written = f"<|tool|>{json.dumps([TOOL])}<|/tool|><|end|>"
    user = "<|user|>Hello?<|end|>"
    assert prompt(PHI, USER, tools=[TOOL]) == f"<|system|>{written}{user}"
    for role in ("system", "developer"):
        assert prompt(PHI, says(role, "a"), USER, tools=[TOOL]) == f"<|system|>a{written}{user}"
    assert prompt(PHI, says("system", "a", tools="mine"), USER, tools=[TOOL]).startswith("<|system|>a<|tool|>mine<")
    assert prompt(PHI, USER) == user
    assert prompt(PLAIN + "{{ tools | tojson }}", USER, tools=[TOOL]) == f"user:Hello?;{json.dumps([TOOL])}"
    assert call_kind("auto", PHI).name == "phi4_mini_json"
    assert "writes no tools" not in caplog.text


def test_a_template_that_writes_no_tools_is_told_at_the_start(caplog):
    caplog.set_level(logging.INFO)
    renderer("{% if tools %}Tools!{% endif %}" + PLAIN, tool_call_parser="none")
    assert "writes no tools" not in caplog.text
    for source in (PLAIN, "{% if tools %}Tools!{% endif %}" + PLAIN):
        caplog.clear()
        renderer(source)
        assert caplog.text.count("here: the chat template writes no tools") == 1


def test_every_field_of_a_message_reaches_the_template():
    message = says("user", "a", name="n", extra={"deep": [1]}, none=None)
    assert json.loads(prompt("{{ messages | tojson }}", message)) == [
        {"role": "user", "content": "a", "name": "n", "extra": {"deep": [1]}}]
    for name in ("reasoning_content", "reasoning", "thinking"):
        for read in ("reasoning_content", "reasoning", "thinking"):
            source = "{% for m in messages %}{{ m." + read + " }}{{ m.content }};{% endfor %}"
            assert prompt(source, USER, says("assistant", "b", **{name: "why"})) == "Hello?;whyb;"
    source = "{% for m in messages %}{{ m.content if m.role != 'ipython' else '<' ~ m.content ~ '>' }}{% endfor %}"
    assert prompt(source, USER, says("ipython", "x")) == "Hello?<x>"


@pytest.mark.parametrize(("part", "wanted"), [
    ({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, "a"), ("a", "a"),
    ({"type": "input_text", "text": "a"}, "a"), ({"type": "output_text", "text": "a"}, "a"),
    ({"type": "refusal", "refusal": "a"}, "a"), ({"type": "thinking", "thinking": "a"}, "a"),
])  # fmt: skip
def test_parts_of_text(part, wanted):
    assert prompt(PLAIN, says("user", [part])) == prompt(PARTS, says("user", [part])) == f"user:{wanted};"


# --- prefill


@pytest.mark.parametrize(("content", "wanted"), [
    ("Sure: ", "user:Hello?;assistant:Sure: "), (text("a", "Sure: "), "user:Hello?;assistant:a\nSure: "),
    ("", "user:Hello?;assistant:"), ("x;y", "user:Hello?;assistant:x;y"),
])  # fmt: skip
def test_the_prompt_ends_where_the_last_message_does(content, wanted):
    request = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt(PLAIN, USER, says("assistant", content), **request) == wanted


@pytest.mark.parametrize("messages", [
    [USER, says("assistant", None, tool_calls=[call({})])], [USER, says("assistant", "<think>no</think>yes")],
])  # fmt: skip
def test_what_cannot_be_continued_is_told(messages):
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] if m.content }};{% endfor %}"
    with pytest.raises(TemplateError) as caught:
        prompt(source, *messages, continue_final_message=True, add_generation_prompt=False)
    assert caught.value.param == "continue_final_message"


# --- which template


def test_templates_are_found_where_transformers_finds_them(folder):
    def written(**request):
        return Tokenizer.from_dir(folder).render_chat(ChatRequest([USER], **request))

    def configure(template):
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))

    configure(None)
    with pytest.raises(TemplateError, match="no chat template"):
        written()
    configure(" ")
    with pytest.raises(TemplateError, match="no chat template"):
        written()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json " + PLAIN}))
    assert written() == "json user:Hello?;"
    named = {"other": "other " + PLAIN, "default": "list " + PLAIN, "tool_use": "tools " + PLAIN}
    for template in (named, [{"name": name, "template": source} for name, source in named.items()]):
        configure(template)
        assert written() == "list user:Hello?;"
        assert written(tools=[TOOL]) == "tools user:Hello?;"
        assert written(chat_template="other") == "other user:Hello?;"
    configure([{"name": "other", "template": PLAIN}])
    with pytest.raises(TemplateError, match="only: other"):
        written()
    configure("config " + PLAIN)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("file with tools " + PLAIN)
    assert written() == "config user:Hello?;"
    assert written(tools=[TOOL]) == "file with tools user:Hello?;"
    (folder / "chat_template.jinja").write_text("file {{ eos_token }}\r\n" + PLAIN, newline="")
    assert written() == "file </s>\nuser:Hello?;"


def test_a_broken_template_for_tools_is_no_matter_of_the_others(folder, caplog):
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ nothing_like_it(1) }}")
    tokenizer = Tokenizer.from_dir(folder)
    assert "tool_use.jinja" in caplog.text
    assert tokenizer.render_chat(ChatRequest([USER]))
    with pytest.raises(TemplateError) as caught:
        tokenizer.render_chat(ChatRequest([USER], tools=[TOOL]))
    assert caught.value.param == "tools"


def test_the_operators_template_beats_the_folders(folder, tmp_path):
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("folder " + PLAIN)
    file = tmp_path / "mine.jinja"
    file.write_text("mine " + PLAIN)
    for told, wanted in ((str(file), "mine"), ("line " + PLAIN, "line"), ("tool_use", "folder")):
        tokenizer = Tokenizer.from_dir(folder, templates=TemplateSettings(chat_template=told))
        for tools in (None, [TOOL]):
            assert tokenizer.render_chat(ChatRequest([USER], tools=tools)) == f"{wanted} user:Hello?;"
    with pytest.raises(ConfigError, match=r"--chat-template: no/such/file .*is no template itself"):
        Tokenizer.from_dir(folder, templates=TemplateSettings(chat_template="no/such/file"))
    with pytest.raises(ModelError, match="--chat-template: the chat template is broken"):
        Tokenizer.from_dir(folder, templates=TemplateSettings(chat_template="{{ 1"))


def test_templates_of_requests_are_compiled_once_and_not_kept_for_ever(monkeypatch):
    made = renderer(PLAIN)
    compiled = []
    original = made._try
    monkeypatch.setattr(made, "_try", lambda *arguments: compiled.append(1) or original(*arguments))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: made.render(ChatRequest([USER], chat_template=f"{at % 2}{PLAIN}")), range(20)))
    assert 2 <= len(compiled) <= 8  # at one time several threads may compile the same
    for at in range(MAX_REQUEST_TEMPLATES + 5):
        made.render(ChatRequest([USER], chat_template=f"{at}{PLAIN}"))
    assert len(made._of_requests) == MAX_REQUEST_TEMPLATES
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr("jettison.server.template_sandbox.RENDER_LIMIT_S", 0.2)
    for source in ("{{ 1", "lost", "x" * (1 << 17), endless):
        with pytest.raises(TemplateError) as caught:
            made.render(ChatRequest([USER], chat_template=source))
        assert caught.value.param == "chat_template"


def test_a_special_token_that_is_not_there_is_undefined_unless_the_template_cannot_do_without():
    for source, wanted in (("{{ bos_token | default('<b>') }}", "<b>"), ("{{ bos_token + '.' }}", ".")):
        made = ChatRenderer({"default": (source + PLAIN, "here")}, {}, TemplateSettings())
        assert made.render(ChatRequest([USER])) == wanted + "user:Hello?;"


def test_variables_of_the_operator_and_of_the_request():
    source = "{{ a }}{{ b }}{{ documents }}{{ tools }}" + PLAIN
    settings = {"default_kwargs": {"a": 1, "b": 2, "add_generation_prompt": 5}}
    assert prompt(source, USER, template_settings=settings, variables={"b": 3}) == "13NoneNoneuser:Hello?;"
    made = prompt(source, USER, variables={"self": 1, "context": 2, "messages": "x", "loop": 3}, documents=[{"a": 1}])
    assert made == "[{'a': 1}]Noneuser:Hello?;"
