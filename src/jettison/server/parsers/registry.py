"""The parsers by name, and which of them a chat template's text asks for.

To add one: an entry in ``_CALLS`` or ``_THINKING``, and what shows it in a template in ``_CALL_SIGNS`` or
``_THINKING_SIGNS``. Names are vLLM's where it has the same form.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jettison.errors import ConfigError
from jettison.server.parsers import harmony
from jettison.server.parsers.guarded import Guarded
from jettison.server.parsers.harmony import HarmonyParser
from jettison.server.parsers.parts import Parser, Tool
from jettison.server.parsers.tagged import (
    DeepSeekParser,
    FunctoolsParser,
    HermesParser,
    JsonParser,
    ListParser,
    LlamaParser,
    MistralParser,
)
from jettison.server.parsers.written import GlmParser, QwenCoderParser

AUTO, NONE, HARMONY = "auto", "none", "gpt_oss"

MakeParser = Callable[[Sequence[Tool]], Parser]


@dataclass(frozen=True, slots=True)
class CallKind:
    """A form of tool calls."""

    name: str
    make: MakeParser
    marks: tuple[str, ...] = ()
    """Texts of special tokens that the parser has to see."""
    has_short_ids: bool = False
    """Whether the template wants ids of nine letters and digits."""


@dataclass(frozen=True, slots=True)
class ThinkingKind:
    """A pair of marks around thoughts."""

    name: str
    begin: str
    end: str
    is_open: bool = False
    """Whether an answer begins with thoughts unless the prompt has ended them, with or without ``begin``."""

    @property
    def marks(self) -> tuple[str, ...]:
        """See ``CallKind``."""
        return harmony.MARKERS if self.name == HARMONY else (self.begin, self.end)


_CALLS = {kind.name: kind for kind in (
    CallKind("hermes", HermesParser, ("<tool_call>", "</tool_call>")),
    CallKind("qwen3_coder", QwenCoderParser, (*QwenCoderParser.OUTER, *QwenCoderParser.OUTER_ENDS)),
    CallKind("glm45", GlmParser, (
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    CallKind("llama3_json", LlamaParser, ("<|python_tag|>",)),
    CallKind("mistral", MistralParser, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), has_short_ids=True),
    CallKind("granite", ListParser, ("<|tool_call|>", "<|/tool_call|>", "<tool_call>", "</tool_call>")),
    CallKind("phi4_mini_json", FunctoolsParser, ("<|tool_call|>", "<|/tool_call|>")),
    CallKind("deepseek_v3", DeepSeekParser, (
        *DeepSeekParser.MARKS, DeepSeekParser.BEGIN, DeepSeekParser.SEPARATOR, DeepSeekParser.END,
        DeepSeekParser.ALL_END)),
    CallKind(HARMONY, HarmonyParser, harmony.MARKERS),
    CallKind("json", JsonParser),
)}  # fmt: skip

_THINKING = {kind.name: kind for kind in (
    ThinkingKind("qwen3", "<think>", "</think>"),
    ThinkingKind("deepseek_r1", "<think>", "</think>", is_open=True),
    ThinkingKind("mistral", "[THINK]", "[/THINK]"),
    ThinkingKind("granite", "Here is my thought process:", "Here is my response:"),
    ThinkingKind("seed_oss", "<seed:think>", "</seed:think>"),
    ThinkingKind(HARMONY, "<|channel|>analysis<|message|>", "<|end|>"),
)}  # fmt: skip

_ALIASES = {
    "qwen25": "hermes", "qwen": "hermes", "qwen3_xml": "qwen3_coder", "glm47": "glm45", "llama4_json": "llama3_json",
    "llama3": "llama3_json", "granite-20b-fc": "granite", "deepseek_v31": "deepseek_v3",
    "deepseek": "deepseek_v3", "openai": HARMONY, "gpt-oss": HARMONY, "openai_gptoss": HARMONY,
}  # fmt: skip
_THINKING_ALIASES = {
    "glm45": "qwen3", "deepseek_v3": "qwen3", "hunyuan_a13b": "qwen3", "olmo3": "qwen3", "openai_gptoss": HARMONY,
    "gpt-oss": HARMONY,
}  # fmt: skip

_CALL_SIGNS: tuple[tuple[str, str], ...] = (
    (r"<\|channel\|>", HARMONY),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<｜tool▁calls▁begin｜>", "deepseek_v3"),
    (r"functools\[", "phi4_mini_json"),
    (r"<\|tool_call\|>|<function_call>", "granite"),
    (r"<\|/tool\|>", "phi4_mini_json"),
    (r"<arg_key>", "glm45"),
    (r"<function=", "qwen3_coder"),
    (r"<tool_call>", "hermes"),
    (r"<\|python_tag\|>|<\|start_header_id\|>[\s\S]*\"parameters\"", "llama3_json"),
)
"""Patterns in a template, the surest first, and the form that each shows."""
_THINKING_SIGNS: tuple[tuple[str, str], ...] = (
    (r"<\|channel\|>", HARMONY),
    (r"\[THINK\]", "mistral"),
    (r"<seed:think>", "seed_oss"),
    (r"</?think>", "qwen3"),
    (r"Here is my thought process:", "granite"),
)


def call_names() -> list[str]:
    """The names that ``--tool-call-parser`` takes, without files."""
    return sorted({*_CALLS, *_ALIASES})


def thinking_names() -> list[str]:
    """The names that ``--reasoning-parser`` takes."""
    return sorted({*_THINKING, *_THINKING_ALIASES})


def call_kind(told: str, template: str | None) -> CallKind | None:
    """The form of ``--tool-call-parser``; by itself that of the template, plain JSON where it shows none. None: calls
    are not looked for. Raises ConfigError."""
    if told == NONE:
        return None
    if told == AUTO:
        return _CALLS[_sign(_CALL_SIGNS, template) or "json"]
    name = _ALIASES.get(told, told)
    if name in _CALLS:
        return _CALLS[name]
    if told.endswith(".py"):
        return _from_file(Path(told))
    names = ", ".join(call_names())
    raise ConfigError(f"--tool-call-parser: {told!r} is no file that ends in .py, and none of {names}")


def thinking_kind(told: str, template: str | None) -> ThinkingKind | None:
    """The marks of ``--reasoning-parser``; by itself those of the template. None: thoughts are not told from the rest.
    Raises ConfigError."""
    if told == NONE:
        return None
    if told == AUTO:
        sign = _sign(_THINKING_SIGNS, template)
        return None if sign is None else _THINKING[sign]
    name = _THINKING_ALIASES.get(told, told)
    if name not in _THINKING:
        raise ConfigError(f"--reasoning-parser: {told!r} is none of {', '.join(thinking_names())}")
    return _THINKING[name]


def _sign(signs: Sequence[tuple[str, str]], template: str | None) -> str | None:
    return next((name for pattern, name in signs if re.search(pattern, template or "")), None)


def _from_file(path: Path) -> CallKind:
    """The parser in a file of the operator's (``parts`` has the protocol). Raises ConfigError."""
    spec = importlib.util.spec_from_file_location("jettison_tool_parser", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--tool-call-parser: {path} cannot be read")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"--tool-call-parser: {path} fails: {type(error).__name__}: {error}") from error
    make = getattr(module, "parser", None)
    if not callable(make):
        raise ConfigError(f"--tool-call-parser: {path} has no function parser(tools)")
    marks = getattr(module, "MARKERS", ())
    return CallKind(path.name, lambda tools: Guarded(make, tools), tuple(map(str, marks)))
