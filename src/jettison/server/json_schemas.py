"""JSON schemas of clients: their parts, their references, and what of them llguidance is given.

``made_followable`` writes differently what means the same; ``loosened`` leaves out what cannot be followed. Nothing is
compiled here (``grammar_texts``). Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
WITH_SCHEMAS = (
    "items", "prefixItems", "additionalItems", "additionalProperties", "contains", "anyOf", "oneOf", "allOf", "not",
    "if", "then", "else",
)  # fmt: skip
"""Keywords of JSON Schema: schemas by name, and a schema or a list of them."""
MAX_HOPS = 32
"""References that are followed one behind the other: they may go in a circle."""
MAX_UNIONS = 4
"""Unions that are looked into, one in the other; likewise."""
FOLLOWED_FORMATS = frozenset((
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
"""llguidance knows them."""
OTHER_FORMATS = frozenset((
    "idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer",
    "relative-json-pointer", "regex"))
"""JSON Schema defines them, too. Every other format is an annotation."""
NOT_FOLLOWED = (
    "uniqueItems", "contains", "minContains", "maxContains", "not", "propertyNames", "dependentRequired",
    "dependentSchemas", "dependencies", "if", "then", "else", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
"""Keywords that llguidance does not know."""
_STEP = re.compile(r"(\\[bBk1-9]|\(\?<?[=!])|\\.", re.DOTALL)
"""Of a pattern: what looks around, and other escapes."""


def subschemas(root: Any) -> Iterator[Schema]:
    """The schema, all within, and all that they refer to there, each once and before its parts: it may be changed then.
    Values that are no schemas, such as constants and defaults, are none of them."""
    left, seen = [root], set[int]()
    while left:
        one = left.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left.append(_target(one.get("$ref"), root))
        for key in OF_SCHEMAS:
            if isinstance(one.get(key), dict):
                left += one[key].values()
        for key in WITH_SCHEMAS:
            value = one.get(key)
            left += value if isinstance(value, list) else [value]


def resolved(schema: Any, root: Any) -> Any:
    """The schema that a reference within ``root`` leads to; None where it leads nowhere. Other schemas stay."""
    for _ in range(MAX_HOPS):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        schema = _target(schema["$ref"], root)
    return None


def _target(place: object, root: Any) -> Any:
    """What a JSON pointer as a fragment leads to; None where it leads nowhere."""
    if not isinstance(place, str) or not (place == "#" or place.startswith("#/")):
        return None
    found = root
    for name in place[2:].split("/") if place != "#" else ():
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def made_followable(root: Schema) -> None:
    """Change the schema to one that llguidance follows, and that no value satisfies that did not satisfy it before.

    Unknown formats go. A ``oneOf`` whose parts a tag tells apart becomes an ``anyOf`` whose parts require their tag:
    pydantic's tags have defaults, so its schemas do not, and without its tag a value may be of several parts."""
    for schema in subschemas(root):
        if "format" in schema and not _is_defined(schema["format"]):
            del schema["format"]
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        tag = _tag_of(schema, root)
        if tag is None:
            continue
        parts = schema.pop("oneOf")
        schema.pop("discriminator", None)  # beside a reference to what it is in llguidance refuses it
        for part in parts:
            _require(tag, part, root)
        if "anyOf" in schema:
            schema["allOf"] = [*(schema.get("allOf") or ()), {"anyOf": parts}]
        else:
            schema["anyOf"] = parts


def _is_defined(format_name: object) -> bool:
    return isinstance(format_name, str) and format_name in FOLLOWED_FORMATS | OTHER_FORMATS


def _require(tag: str, part: Any, root: Schema) -> None:
    """Have each object that the part may be require the tag."""
    for one in _alternatives(part, root):
        if tag not in (one.get("required") or ()):
            one["required"] = [*(one.get("required") or ()), tag]


def _tag_of(schema: Schema, root: Schema) -> str | None:
    """A property whose constants tell the parts of a ``oneOf`` apart: that of its discriminator, if it does."""
    parts, told = schema.get("oneOf"), schema.get("discriminator")
    if not isinstance(parts, list) or not parts:
        return None
    found = [_constants(part, root) for part in parts]
    name = told.get("propertyName") if isinstance(told, dict) else None
    for tag in sorted(found[0], key=lambda one: one != name):
        texts = [text for constants in found for text in constants.get(tag, ())]
        if all(tag in constants for constants in found) and len(set(texts)) == len(texts):
            return tag
    return None


def _constants(part: Any, root: Schema) -> dict[str, set[str]]:
    """The properties that have one of some texts in each object that the part may be, and these texts."""
    each = [_own_constants(one, root) for one in _alternatives(part, root)]
    return {name: set().union(*(one[name] for one in each)) for name in each[0]
            if all(name in one for one in each)} if each else {}


def _alternatives(part: Any, root: Schema, depth: int = MAX_UNIONS) -> list[Schema]:
    """The objects that a part may be, those of the unions in it; none where it may be anything else."""
    one = resolved(part, root)
    if not isinstance(one, dict):
        return []
    unions = [one[name] for name in ("oneOf", "anyOf") if isinstance(one.get(name), list)]
    if not unions:
        return [one] if one.get("type") == "object" else []
    each = [_alternatives(inner, root, depth - 1) for union in unions for inner in union] if depth else [[]]
    return [found for inner in each for found in inner] if all(each) else []


def _own_constants(one: Schema, root: Schema) -> dict[str, set[str]]:
    properties, found = one.get("properties"), dict[str, set[str]]()
    for name, value in properties.items() if isinstance(properties, dict) else ():
        value = resolved(value, root)
        if isinstance(value, dict):
            told = [value["const"]] if "const" in value else value.get("enum")
            if isinstance(told, list) and told and all(isinstance(text, str) for text in told):
                found[name] = set(told)
    return found


def loosened(schema: Schema) -> tuple[Schema, set[str]]:
    """The schema without what cannot be followed, and the names of what is left out: for a function whose schema is a
    description. Where the parts of a ``oneOf`` overlap, any will do."""
    root = json.loads(json.dumps(schema))
    left_out = set()
    for one in subschemas(root):
        gone = [name for name in NOT_FOLLOWED if name in one]
        if isinstance(one.get("format"), str) and one["format"] in OTHER_FORMATS:
            gone.append("format")
        if isinstance(one.get("pattern"), str) and _looks_around(one["pattern"]):
            gone.append("pattern")
        named = one.get("patternProperties")
        if isinstance(named, dict) and any(map(_looks_around, named)):
            gone += ["patternProperties"] + ["additionalProperties"] * ("additionalProperties" in one)  # of other names
        for name in gone:
            del one[name]
        left_out |= set(gone)
    told = root.get("x-guidance")
    root["x-guidance"] = {**(told if isinstance(told, dict) else {}), "coerce_one_of": True}
    return root, left_out


def _looks_around(pattern: str) -> bool:
    """Whether a pattern looks ahead or behind, at the edges of words, or at what it has matched."""
    return any(step[1] for step in _STEP.finditer(pattern))
