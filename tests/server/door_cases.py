"""Requests with bad values in them, drawn from a number, for every door: tools, grammars, thoughts, files, batches.

``test_doors_fuzz`` sends some to a server without a model, ``fuzz_doors`` ten thousand to one with a model.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from test_messages import claude_code
from test_responses import CODEX
from test_tools import TOOLS

BAD = (
    None, True, False, 0, -1, 1, 3, 1 << 70, -1e300, 0.5, "", "x", "auto", "none",
    "\0", "é" * 300, [], {}, [None], [{}], [[]], {"type": None}, {"type": "text"}, {"type": "function", "name": "x"},
    [{"type": "text", "text": "t"}], [{"type": "text", "text": None}], {"type": 3}, {"a": {"b": [1]}},
    {"type": "tool", "name": "Tool1"}, {"type": "json_schema", "schema": {"type": "x"}}, {"$ref": "#/a"},
    [{"type": "tool_result"}], [{"type": "tool_use", "id": 1}], [{"type": "reasoning"}], [{"type": "function_call"}],
    {"role": "user"}, {"role": "assistant", "content": []}, {"format": {"type": "json_schema"}}, {"effort": 3},
    [{"type": "custom_tool_call"}], [{"type": "custom", "name": "x", "format": {"type": "grammar", "definition": 3}}],
    [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}] * 2}],
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}},
    {"type": "allowed_tools", "mode": "required", "tools": [3]}, [{"role": "tool", "tool_call_id": [], "content": "x"}],
    {"x-guidance": {"lenient": True}}, {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "(((((((((a{1,99}){1,99}){1,99})))))))", "start: a\na: a a", 'root ::= ("a" | root)*',
    [f"c{at}" for at in range(99)],
    {"type": "structural_tag", "triggers": ["<"], "structures": [{"begin": "<a", "schema": {}, "end": ""}]},
    {"allOf": [{"type": "string", "pattern": "(a|b)*c"}] * 3}, {"anyOf": [{"enum": [[1], {"x": None}]}] * 9},
    {"json": "{", "regex": "["}, {"choice": [1, None]}, {"grammar": "\0"},
    {"structural_tag": {"format": {"type": "or"}}},
)  # fmt: skip
"""Values of wrong types and shapes, and constraints that are malformed, endless or expensive."""
EXTRA = (
    "metadata", "n", "stop", "seed", "top_k", "logit_bias", "priority", "store", "previous_response_id", "conversation",
    "background", "truncation", "include", "text", "reasoning", "top_logprobs", "output_format", "service_tier",
    "chat_template_kwargs", "structured_outputs", "stop_sequences", "cache_salt", "unknown", "betas", "min_tokens",
    "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "response_format", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "guided_json_object", "guided_whitespace_pattern", "format",
    "structural_tag", "regex", "ebnf", "json_schema", "include_reasoning", "reasoning_effort", "thinking", "stream",
    "continue_final_message", "documents", "chat_template", "allowed_token_ids", "bad_words", "prompt_logprobs",
    "output_config", "stream_options", "echo", "logprobs", "ignore_eos", "truncate_prompt_tokens",
)  # fmt: skip
NO_FILE = "file-x"
SCHEMA = {
    "type": "object", "required": ["a"], "additionalProperties": False,
    "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"type": "array", "items": {"type": "integer"}}}}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
_CHAT = {
    "model": "fake", "max_tokens": 12, "messages": [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"}, {"role": "user", "content": "and now?"}],
}  # fmt: skip

_BLOCK = {"type": "text", "text": "hi"}
_READ = {
    "model": "fake", "max_tokens": 12, "messages": [
        {"role": "user", "content": [
            {"type": "document", "source": {"type": "text", "data": "hi"}, "title": "a", "context": "b"},
            {"type": "document", "source": {"type": "content", "content": [_BLOCK]}}]},
        {"role": "user", "content": [{"type": "search_result", "source": "a", "title": "b", "content": [_BLOCK]}]},
        {"role": "assistant", "content": "a"}, {"role": "assistant", "content": [_BLOCK]},
        {"role": "user", "content": "c"}],
}  # fmt: skip


def _bases() -> list[tuple[str, dict[str, Any]]]:
    small = claude_code(2)
    small["system"] = small["system"][:2]
    codex = CODEX | {"instructions": "Be kind."}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    inside = {"type": "regex", "pattern": "x+"}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": inside, "end": "</a>"}}
    usage, thinks = {"include_usage": True}, {"enable_thinking": True}
    plain = {"model": "fake", "prompt": "hi", "max_tokens": 12}
    chat, text = "/v1/chat/completions", "/v1/completions"
    return [
        ("/v1/messages", small | {"max_tokens": 20}), ("/v1/messages/count_tokens", small),
        ("/v1/responses", codex | {"max_output_tokens": 20}), ("/v1/messages", _READ),
        ("/v1/responses", {"model": "fake", "max_output_tokens": 20, "input": [
            {"type": "item_reference", "id": "msg_" + "0" * 36}, {"role": "user", "content": "hi"}]}),
        (chat, _CHAT | {"tools": TOOLS, "tool_choice": "auto", "stream": True, "stream_options": usage}),
        (chat, _CHAT | {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}}),
        (chat, _CHAT | {"response_format": form, "include_reasoning": False, "reasoning_effort": "low"}),
        (chat, _CHAT | {"structured_outputs": {"choice": ["yes", "no"]}, "chat_template_kwargs": thinks}),
        (chat, _CHAT | {"response_format": tag, "n": 2}),
        (text, plain | {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}}),
        (text, plain | {"guided_regex": "[ab]{1,9}", "logprobs": 2, "stream": True}),
        (text, plain | {"guided_grammar": 'root ::= "a" [b-d]+ "e"'}), (text, plain | {"guided_json": SCHEMA}),
        ("/v1/files", {"purpose": "batch", "lines": [
            {"custom_id": "a", "method": "POST", "url": chat, "body": _CHAT | {"response_format": form}}]}),
        ("/v1/batches", {
            "input_file_id": NO_FILE, "endpoint": chat, "completion_window": "24h", "metadata": {"a": "b"}}),
        ("/tokenize", {"model": "fake", "messages": _CHAT["messages"], "tools": TOOLS}),
    ]


BASES = _bases()


@dataclass(frozen=True)
class DoorCase:
    """One request."""

    path: str
    document: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        """Of a client's ``post``. A file is a form with its lines, cut at the end now and then."""
        if self.path != "/v1/files":
            return {"json": self.document}
        lines, purpose = self.document.get("lines"), self.document.get("purpose")
        text = "".join(json.dumps(line) + "\n" for line in (lines if isinstance(lines, list) else [lines]))
        return {"files": {"file": ("in.jsonl", text.encode())}, "data": {"purpose": json.dumps(purpose).strip('"')}}


def places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Paths to everything in a document."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in pairs:
        yield from places(item, (*path, name))


def spoilt(base: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A copy with up to three bad values in it."""
    document: dict[str, Any] = json.loads(json.dumps(base))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if draw.random() < 0.25:
            document[draw.choice(EXTRA)] = json.loads(json.dumps(draw.choice(BAD)))
            continue
        *front, last = draw.choice([path for path in places(document) if path] or [("unknown",)])
        inner: Any = document
        for name in front:
            inner = inner[name]
        what = draw.random()
        if what < 0.15 and isinstance(inner, dict):
            inner.pop(last, None)
        elif what < 0.3 and isinstance(inner, list):
            inner.append(json.loads(json.dumps(draw.choice(BAD))))
        else:
            inner[last] = json.loads(json.dumps(draw.choice(BAD)))
    return document


def drawn(seed: int, at: int) -> DoorCase:
    """The case of a number, which depends on nothing else."""
    path, base = BASES[at % len(BASES)]
    return DoorCase(path, spoilt(base, random.Random(seed * 1_000_003 + at)))
