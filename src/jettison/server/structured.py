"""Structured output: what an answer has to look like, as one small value, whichever field a client wrote it in.

``response_format``, ``structured_outputs`` and the older ``guided_*`` fields become a ``Constraint`` here; tools may
make one of their own. ``grammar_texts`` writes it as llguidance's grammar, ``compiling`` tries that apart from the
server, and what travels to the engine is ``types.Grammar``. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from jettison.config.values import shown
from jettison.server import field_table
from jettison.server.errors import bad_request
from jettison.server.field_table import Table
from jettison.server.json_schemas import subschemas

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer has to look like, and from where on."""

    kind: Kind
    text: str
    """``json``: a JSON schema. ``regex``: a regular expression of the whole answer (Rust's syntax). ``choice``: a JSON
    list of strings, one of which is the answer. ``grammar``: Lark as llguidance reads it, or GBNF; in Lark ``<name>``
    is the special token of that text. ``structural_tag``: vLLM's JSON document, of either form: free text with
    ``structures`` and ``triggers``, or a ``format``."""
    param: str = "structured_outputs"
    """The request's field that the constraint came from: errors name it."""
    whitespace_pattern: str | None = None
    """``json``: a regular expression for the white space between tokens of JSON; None: what JSON allows."""
    begins_after: str = ""
    """A marker, such as the end of the model's thinking: the answer is free up to and with the first place where its
    text has it, and the constraint begins behind it. Empty: it begins at once. Stop tokens end the answer before that,
    too."""


MAX_CHOICES = 1024
ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class JsonDefaults:
    """The operator's, for JSON that a request asks for: what vLLM's fields of these names say, where it has none."""

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    @classmethod
    def of(cls, text: str) -> JsonDefaults:
        """Of the configuration's ``structured_outputs_config``, a JSON object."""
        return cls(**msgspec.json.decode(text, type=dict[str, bool]))


NO_JSON_DEFAULTS = JsonDefaults()


class StructuredFields(msgspec.Struct, kw_only=True):
    """vLLM's ``structured_outputs``."""

    table: ClassVar[Table] = field_table.STRUCTURED_OUTPUTS

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class ConstraintFields(msgspec.Struct, kw_only=True):
    """Fields of a body that say what the answer has to look like; ``GenerationFields`` has them among others."""

    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    format: dict[str, Any] | str | None = None


def constraint_of(fields: ConstraintFields, defaults: JsonDefaults = NO_JSON_DEFAULTS) -> Constraint | None:
    """The one constraint of a body; None where it has none. Raises ApiError 400 that names the field: for two of them,
    and for one that is not written as it should be. Whether it can be compiled is seen later."""
    found = [*_of_response_format(fields.response_format), *_of_structured(fields), *_of_single_fields(fields)]
    if len(found) > 1:
        names = " and ".join(dict.fromkeys(constraint.param for constraint in found))
        raise bad_request(f"an answer can follow one constraint, and there are several: {names}.", found[1].param)
    return _with_defaults(found[0], fields.structured_outputs, defaults) if found else None


def _with_defaults(constraint: Constraint, asked: StructuredFields | None, defaults: JsonDefaults) -> Constraint:
    """What the request says of white space and of properties goes before the operator's."""
    if constraint.kind != "json":
        return constraint
    says_space = constraint.whitespace_pattern is not None or (asked and asked.disable_any_whitespace is not None)
    says_closed = asked is not None and asked.disable_additional_properties is not None
    space = "" if defaults.disable_any_whitespace and not says_space else constraint.whitespace_pattern
    # Of any object there is no property that the schema names: closed it would be empty.
    is_closed = defaults.disable_additional_properties and not says_closed and constraint.text != ANY_OBJECT
    (made,) = _json(constraint.param, constraint.text, space, is_closed=is_closed)
    return made


def _of_response_format(value: dict[str, Any] | None) -> Iterator[Constraint]:
    """OpenAI's field, with vLLM's structural tags."""
    if not value:
        return
    param, kind = "response_format", value.get("type")
    if kind == "text":
        return
    if kind == "json_object":
        # A schema beside it, as clients of llama.cpp, Together, Fireworks and TGI send one, is what the client wants.
        name = "schema" if value.get("schema") is not None else "value"
        schema = value.get(name)
        if not isinstance(schema, dict | None):
            raise bad_request(f"{param}.{name} must be an object.", f"{param}.{name}")
        yield Constraint("json", _dump(schema) if schema else ANY_OBJECT, param)
    elif kind == "json_schema":
        wrapped = value.get("json_schema")
        if not isinstance(wrapped, dict):
            raise bad_request(f"{param}.json_schema must be an object with a schema.", f"{param}.json_schema")
        schema = wrapped.get("schema", wrapped.get("json_schema"))
        if not isinstance(schema, dict | bool):
            raise bad_request(f"{param}.json_schema.schema must be an object.", f"{param}.json_schema.schema")
        yield Constraint("json", _dump(schema), param)
    elif kind == "structural_tag":
        yield Constraint("structural_tag", _dump(value), param)
    else:
        kinds = "text, json_object, json_schema or structural_tag"
        raise bad_request(f"{param}.type must be {kinds}, got {shown(kind)}.", f"{param}.type")


def _of_structured(fields: ConstraintFields) -> Iterator[Constraint]:
    """vLLM's field."""
    asked = fields.structured_outputs
    if asked is None:
        return
    space = "" if asked.disable_any_whitespace else asked.whitespace_pattern
    strict = bool(asked.disable_additional_properties)
    name = "structured_outputs."
    yield from _json(name + "json", asked.json, space, is_closed=strict)
    if asked.json_object:
        yield Constraint("json", ANY_OBJECT, name + "json_object", space)
    yield from _texts(name + "regex", "regex", asked.regex)
    yield from _choice(name + "choice", asked.choice)
    yield from _texts(name + "grammar", "grammar", asked.grammar)
    yield from _texts(name + "structural_tag", "structural_tag", asked.structural_tag)


def _of_single_fields(fields: ConstraintFields) -> Iterator[Constraint]:
    """The older fields of vLLM, and those of SGLang, llama.cpp and Ollama."""
    space = fields.guided_whitespace_pattern
    yield from _json("guided_json", fields.guided_json, space)
    if fields.guided_json_object:
        yield Constraint("json", ANY_OBJECT, "guided_json_object", space)
    yield from _texts("guided_regex", "regex", fields.guided_regex)
    yield from _choice("guided_choice", fields.guided_choice)
    yield from _texts("guided_grammar", "grammar", fields.guided_grammar)
    yield from _json("json_schema", fields.json_schema or None, None)
    for name in ("ebnf", "grammar"):
        yield from _texts(name, "grammar", getattr(fields, name) or None)
    yield from _texts("regex", "regex", fields.regex or None)
    yield from _texts("structural_tag", "structural_tag", fields.structural_tag or None)
    if fields.format == "json":
        yield Constraint("json", ANY_OBJECT, "format")
    elif fields.format:
        yield from _json("format", fields.format, None)


def _json(param: str, schema: dict[str, Any] | str | bool | None, space: str | None, *,
          is_closed: bool = False) -> Iterator[Constraint]:
    """``is_closed``: objects have no properties but those that the schema names."""
    if schema is None:
        return
    if is_closed:
        try:
            schema = _closed(decode_json(schema, param) if isinstance(schema, str) else schema)
        except RecursionError:
            raise bad_request(f"{param} is nested too deep.", param, "invalid_grammar") from None
    yield Constraint("json", schema if isinstance(schema, str) else _dump(schema), param, space)


def decode_json(text: str, param: str) -> Any:
    """The value of a JSON text. Raises ApiError 400."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise bad_request(f"{param} is no JSON: {error}.", param) from None


def _closed(schema: Any) -> Any:
    """The schema with ``additionalProperties: false`` wherever it names properties. Values that are no schemas, such as
    constants and defaults, stay as they are."""
    made = json.loads(json.dumps(schema))
    for one in subschemas(made):
        if isinstance(one.get("properties"), dict) or one.get("type") == "object":
            one["additionalProperties"] = False
    return made


def _texts(param: str, kind: Kind, value: dict[str, Any] | str | None) -> Iterator[Constraint]:
    if value is None:
        return
    if not value:
        raise bad_request(f"{param} must not be empty.", param)
    yield Constraint(kind, value if isinstance(value, str) else _dump(value), param)


def _choice(param: str, choices: list[str] | None) -> Iterator[Constraint]:
    if choices is None:
        return
    if not 0 < len(choices) <= MAX_CHOICES:
        raise bad_request(f"{param} must have from 1 to {MAX_CHOICES} texts, got {len(choices)}.", param)
    yield Constraint("choice", _dump(choices), param)


def _dump(value: Any) -> str:
    return msgspec.json.encode(value).decode()
