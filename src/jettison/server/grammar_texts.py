"""A constraint as llguidance's grammar text: schemas with their options, choices, and structural tags as rules of Lark.

Pure, apart from llguidance's own conversions, which a child process runs (``compile_process``): a client's text may be
made to be expensive.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, grammar_from, regex_to_lark

from jettison.server.json_schemas import made_followable

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between tokens of JSON, unless a request says otherwise: enough for a deep indentation, and bounded, as models that
may write white space for ever do."""
ANY_OBJECT = '{"type":"object"}'
_OPTIONS = "x-guidance"
_ANY_TEXT = r"/(.|\n)*/"


class ConstraintError(ValueError):
    """A constraint that cannot be followed; the message is one line that says why."""


def grammar_text(kind: str, text: str, white_space: str | None, special_tokens: Mapping[str, int]) -> str:
    """The grammar of a constraint of this kind (``structured.Constraint``). ``special_tokens``: text -> id, for
    structural tags that name some. Raises ConstraintError."""
    made: Callable[[], str] = {
        "json": lambda: LLMatcher.grammar_from_json_schema(_schema(text), overrides=_options(white_space)),
        "regex": lambda: LLMatcher.grammar_from_lark(f"start: {_regex(text)}"),
        "choice": lambda: LLMatcher.grammar_from_lark("start: " + _alternatives(map(_literal, _choices(text)))),
        "grammar": lambda: grammar_from("grammar", text),
        "structural_tag": lambda: LLMatcher.grammar_from_lark(_Tags(special_tokens, white_space).lark(text)),
    }[kind]
    try:
        return made()
    except ConstraintError:
        raise
    except Exception as error:  # noqa: BLE001 - llguidance's, of many kinds, and of schemas of other shapes
        raise ConstraintError(one_line(str(error))) from None


def one_line(message: str) -> str:
    """A library's message without its picture of the place, as one line."""
    lines = [line.strip() for line in message.splitlines()]
    kept = [line for line in lines if line and not re.match(r"\d+ \|", line) and set(line) - {"^", "|", " "}]
    return " ".join(kept)[:300].rstrip(".") or "it is not valid"


def _options(white_space: str | None) -> JsonCompileOptions:
    if white_space == "":
        return {"whitespace_flexible": False}
    return {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE if white_space is None else white_space}


def _schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ConstraintError("the schema is nested too deeply") from None
    except ValueError as error:
        raise ConstraintError(f"the schema is no JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise ConstraintError("a schema is an object, true or false")
    whole = {} if schema is True else {"not": {}} if schema is False else schema
    made_followable(whole)
    if _OPTIONS in whole:
        whole = whole | {_OPTIONS: _own_options(whole)}
    return json.dumps(whole)


def _own_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a schema may say to llguidance itself: its other options have it write what is no JSON (separators), or
    leave out what it cannot follow."""
    told = schema.get(_OPTIONS) or {}
    known = isinstance(told, dict) and told.keys() <= {"coerce_one_of", "whitespace_flexible", "whitespace_pattern"}
    if not known:
        raise ConstraintError(f"of {_OPTIONS} only coerce_one_of, whitespace_flexible and whitespace_pattern are done")
    return {"coerce_one_of": bool(told.get("coerce_one_of", False))}


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    if not choices:
        raise ConstraintError("there is no choice")
    return list(dict.fromkeys(choices))


def _regex(pattern: str) -> str:
    r"""In Lark. As in JSON schemas, ``\d`` and ``\w`` are ASCII's."""
    return f"/{regex_to_lark(pattern, 'dw')}/" if pattern else '""'


def _literal(text: str) -> str:
    """In Lark, which takes no raw U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _alternatives(parts: Iterable[str]) -> str:
    return " | ".join(parts)


class _Tags:
    """Structural tags as rules of Lark."""

    def __init__(self, special_tokens: Mapping[str, int], white_space: str | None) -> None:
        self._special_tokens = {text: token for text, token in special_tokens.items() if text}
        names = sorted(map(re.escape, self._special_tokens), key=len, reverse=True)
        self._special = re.compile("(" + "|".join(names) + ")") if names else None
        self._white_space = white_space
        self._rules: list[str] = []
        self._numbers = itertools.count()

    def lark(self, text: str) -> str:
        """The grammar of a document. Raises ConstraintError."""
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ConstraintError(f"the structural tag is no JSON: {error}") from None
        if not isinstance(document, dict):
            raise ConstraintError("a structural tag is an object")
        if "format" in document:
            start = self._format(_object(document, "format"))
        elif "structures" in document or "triggers" in document:
            tags = [
                {"begin": _text(each, "begin"), "end": _text(each, "end"),
                 "content": {"type": "json_schema", "json_schema": each.get("schema") or {}}}
                for each in _objects(document, "structures")
            ]  # fmt: skip
            start = self._triggered({"triggers": document.get("triggers"), "tags": tags})
        else:
            raise ConstraintError("a structural tag has a format, or structures and triggers")
        return "\n".join([f"start: {start}", *self._rules])

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{next(self._numbers)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _text(self, text: str) -> str:
        """A text, in which special tokens may stand."""
        pieces = [text] if self._special is None else self._special.split(text)
        special = self._special_tokens
        return " ".join(f"<[{special[p]}]>" if p in special else _literal(p) for p in pieces if p)

    def _format(self, document: Mapping[str, Any]) -> str:
        kind = document.get("type")
        match kind:
            case "const_string":
                return self._rule(self._text(_text(document, "value")) or '""')
            case "json_schema" if document.get("style", "json") == "json":
                return self._rule(self._json(document.get("json_schema")))
            case "regex":
                return self._rule(_regex(_text(document, "pattern")))
            case "any_text":
                if document.get("excludes"):
                    raise ConstraintError("any_text with excludes is not done here")
                return self._rule(_ANY_TEXT)
            case "sequence":
                return self._rule(" ".join(self._format(each) for each in _objects(document, "elements")))
            case "or":
                return self._rule(_alternatives(self._format(each) for each in _objects(document, "elements")))
            case "tag":
                return self._tag(document, _text(document, "begin"))
            case "triggered_tags":
                return self._triggered(document)
            case "tags_with_separator":
                return self._separated(document)
        raise ConstraintError(f"a format of type {kind!r:.60} is not done here")

    def _json(self, schema: Any) -> str:
        if not isinstance(schema, dict | bool):
            raise ConstraintError("json_schema must be an object")
        whole = {} if schema is True else {"not": {}} if schema is False else schema
        made_followable(whole)
        own = _own_options(whole) if _OPTIONS in whole else {}
        return "%json " + json.dumps({**whole, _OPTIONS: {**own, **_options(self._white_space)}})

    def _tag(self, document: Mapping[str, Any], begin: str) -> str:
        """A tag, of whose beginning ``begin`` is still to be written. Free text within it ends with its end."""
        content, ends = _object(document, "content"), _ends(document)
        parts = [self._text(begin)] if begin else []
        if content.get("type") != "any_text":
            parts += [self._format(content), self._any_of(ends)]
        elif not any(ends):
            parts.append(self._format(content))
        else:
            parts.append(self._rule(_alternatives(self._up_to(end) for end in ends)))
        return self._rule(" ".join(part for part in parts if part) or '""')

    def _any_of(self, texts: list[str]) -> str:
        return "(" + _alternatives(self._text(text) or '""' for text in texts) + ")" if any(texts) else ""

    def _up_to(self, end: str) -> str:
        """Any text up to the first ``end``, and that."""
        if self._special is not None and self._special.search(end):
            return self._rule(f"{_ANY_TEXT} {self._text(end)}")
        return self._rule(_ANY_TEXT, f"[suffix={_literal(end)}]")

    def _triggered(self, document: Mapping[str, Any]) -> str:
        """Free text in which a trigger begins one of the tags that begin with it."""
        triggers, tags = document.get("triggers"), _objects(document, "tags")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            raise ConstraintError("triggers must be texts")
        groups: dict[str, list[str]] = {}
        for tag in tags:
            begin = _text(tag, "begin")
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise ConstraintError(f"no trigger begins {begin!r:.60}")
            groups.setdefault(trigger, []).append(self._tag(tag, begin[len(trigger) :]))
        if not groups:
            raise ConstraintError("there is no tag")
        one = "(" + _alternatives(self._behind_text(trigger, rules) for trigger, rules in groups.items()) + ")"
        if document.get("stop_after_first"):
            return self._rule(one if document.get("at_least_one") else f"{one} | {_ANY_TEXT}")
        return self._rule(f"{one}{'+' if document.get('at_least_one') else '*'} {self._rule(_ANY_TEXT)}")

    def _behind_text(self, trigger: str, rules: list[str]) -> str:
        rest = "(" + _alternatives(rules) + ")"
        if self._special is not None and self._special.search(trigger):
            return self._rule(f"{_ANY_TEXT} {self._text(trigger)} {rest}")
        return self._rule(f"{self._up_to(trigger)} {rest}")

    def _separated(self, document: Mapping[str, Any]) -> str:
        tags = self._rule(_alternatives(self._tag(tag, _text(tag, "begin")) for tag in _objects(document, "tags")))
        between = self._text(_text(document, "separator"))
        more = "" if document.get("stop_after_first") else f" ({between} {tags})*"
        return self._rule(tags + more if document.get("at_least_one") else f'({tags}{more}) | ""')


def _ends(document: Mapping[str, Any]) -> list[str]:
    """A tag's end, or the ends that it may have."""
    end = document.get("end")
    if isinstance(end, list) and end and all(isinstance(each, str) for each in end):
        return end
    return [_text(document, "end")]


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str):
        raise ConstraintError(f"{key} must be a text")
    return value


def _object(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise ConstraintError(f"{key} must be an object")
    return value


def _objects(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    values = document.get(key)
    if not isinstance(values, list) or not values or not all(isinstance(each, dict) for each in values):
        raise ConstraintError(f"{key} must be a list of objects")
    return values
