"""Three hundred schemas, regular expressions, choices, grammars and tags of many kinds, each from a number."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from jettison.server.structured import Constraint

NUM_SCHEMAS, NUM_OTHERS = 240, 60
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri", "duration", "unknown")
PATTERNS = ("^[a-z]{2,5}$", "^\\d{3}-\\d{4}$", "[A-Z]x", "^(a|bc)*$", "^\\w+@\\w+\\.com$", "^$", "(?=a)b", "^.{0,9}$")
NAMES = ("name", "age", "tags", "é", "a b", "x\"y", "id", "$ref2", "z")


def schema(number: int) -> Any:
    """The schema of a number; some of them ask for what no grammar follows."""
    rng = random.Random(number)
    made = _schema(rng, 0)
    if number % 8 == 7:
        made = {"$ref": "#/$defs/node", "$defs": {"node": {
            "type": "object", "required": ["value"], "additionalProperties": False,
            "properties": {"value": _leaf(rng), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}}}
    return made


def _schema(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(("object", "object", "array", "any", "leaf", "leaf")) if depth < 3 else "leaf"
    if kind == "object":
        return _object(rng, depth)
    if kind == "array":
        made: dict[str, Any] = {"type": "array", "items": _schema(rng, depth + 1), "maxItems": rng.randint(1, 4)}
        if rng.random() < 0.3:
            made["minItems"] = 1
        if rng.random() < 0.2:
            made["prefixItems"] = [_leaf(rng)]
        if rng.random() < 0.05:
            made["uniqueItems"] = True
        return made
    if kind == "any":
        parts = [_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
        return {rng.choice(("anyOf", "anyOf", "anyOf", "oneOf", "allOf")): parts}
    return _leaf(rng)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    made: dict[str, Any] = {"type": "object", "properties": {name: _schema(rng, depth + 1) for name in names}}
    made["required"] = rng.sample(names, rng.randint(0, len(names)))
    made["additionalProperties"] = rng.choice((False, False, False, True, {"type": "integer"}))
    if rng.random() < 0.05:
        made["patternProperties"] = {"^q": {"type": "null"}}
    if rng.random() < 0.05:
        made["minProperties"] = 1
    if rng.random() < 0.03:
        made["if"] = {"required": names[:1]}
    return made


def _leaf(rng: random.Random) -> dict[str, Any]:
    made: list[dict[str, Any]] = [
        {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 5000)},
        {"type": "number", "exclusiveMinimum": 0, "maximum": rng.choice((1, 2.5, 1e6))},
        {"type": "integer", "multipleOf": rng.choice((1, 5, 7))},
        {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 9)},
        {"type": "string", "format": rng.choice(FORMATS)},
        {"type": "string", "pattern": rng.choice(PATTERNS)},
        {"enum": rng.sample(["a", "b\n", "é", 1, 2.5, None, True, "\\", "中文"], rng.randint(1, 5))},
        {"const": rng.choice((3, "x", None, {"k": [1]}, ["y", False]))},
        {"type": ["string", "null"], "maxLength": 4},
        {"type": rng.choice(("boolean", "null"))},
    ]
    return rng.choice(made)


def other(number: int) -> Constraint:
    """A constraint of another kind."""
    rng = random.Random(1000 + number)
    word = "".join(rng.choice("abcxyz é<\"\\/") for _ in range(rng.randint(1, 8)))
    text = json.dumps(word)
    kinds: list[Constraint] = [
        Constraint("regex", rng.choice((r"\d{1,4}(\.\d+)?", r"[a-f]{3,6}/x", r"(ab|c)*d?", "(?i)yes|no", r"\bword"))),
        Constraint("choice", json.dumps([word, word + "x", "no", ""][: rng.randint(1, 4)])),
        Constraint("grammar", f'root ::= {json.dumps("SELECT " + "abc"[: rng.randint(1, 3)])} (", " [a-z]+)* " ;"'),
        Constraint("grammar", 'start: sum\nsum: N ("+" N)*\nN: /[0-9]{1,4}/'),
        Constraint("structural_tag", json.dumps({
            "type": "structural_tag", "triggers": ["<f="], "structures": [
                {"begin": "<f=a>", "schema": schema(number), "end": "</f>"}]})),
        Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": {
            "type": "sequence", "elements": [
                {"type": "const_string", "value": word}, {"type": "regex", "pattern": "[0-9]{2}"}]}})),
        Constraint("grammar", f"start: {text} | nothing" if rng.random() < 0.2 else f"start: {text} A?\nA: /a+/"),
    ]  # fmt: skip
    return kinds[number % len(kinds)]


class Published(NamedTuple):
    """A schema of the JSON Schema test suite, with values that it allows and values that it does not."""

    name: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]


def published() -> list[Published]:
    """Those of ``json_schema_suite.json``, which says where they are from and under which licence."""
    path = Path(__file__).with_name("json_schema_suite.json")
    return [Published(*group) for group in json.loads(path.read_text(encoding="utf-8"))["groups"]]
