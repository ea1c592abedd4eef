"""The sandbox of chat templates: Jinja with the additions of ``transformers``, bounded in time and memory.

This module has the globals, filters and tags, and the limits of each step. ``templates`` runs the templates and
translates their failures.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.compiler import operators as COMPARISONS  # a constant
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, generate_lorem_ipsum

from jettison.server.template_limits import (
    MAX_INT_BITS,
    MAX_SPENT_CHARS,
    LimitError,
    RefusalError,
    check_format,
    check_product,
    check_replace,
    check_times,
    text_size,
)

RENDER_LIMIT_S = 5.0
MAX_SLOW_CHARS = 1 << 16
"""Largest input of filters that may take more than linear time."""

_MULTIPLYING_FILTERS = frozenset({
    "batch", "center", "format", "indent", "join", "slice", "sum", "tojson", "wordwrap", "xmlattr",
})  # fmt: skip
_MULTIPLYING_METHODS = frozenset({
    "center", "expandtabs", "join", "ljust", "rjust", "to_bytes", "translate", "zfill",
})  # fmt: skip
"""Methods with results as long as one argument times another."""
_SLOW_FILTERS = frozenset({"pprint", "striptags", "title", "urlize", "wordwrap", "xmlattr"})
_COMPARING_TESTS = (
    "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le", "in",
)  # fmt: skip
_SHALLOW_FILTERS = frozenset({
    "attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reverse",
})  # fmt: skip
"""Filters that do not look into the items of their input."""


class _GenerationTag(Extension):
    """``{% generation %}``, which marks the assistant's part for training; in serving it stands for its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """A call block, as in ``transformers``: variables set inside are not visible outside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("body_of"), [], [], body).set_lineno(line)

    def body_of(self, caller: Callable[[], str]) -> str:
        """The text between the tags."""
        return caller()


_TICK = "tick()"


class _Generator(CodeGenerator):
    """Generates code that calls the environment before it joins texts or compares values."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # jinja2 looks for the name
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.join_texts((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(environment.small(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            self.write(f" {COMPARISONS[operand.op]} environment.small(")
            self.visit(operand.expr, frame)
            self.write(")")
        self.write(")")


class Sandbox(ImmutableSandboxedEnvironment):
    """No mutation, no attributes of Python's internals, and every step counted against a deadline and a total size of
    results.

    Several threads may render one compiled template, each with limits of its own.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    code_generator_class = _Generator

    def __init__(self) -> None:
        self._account = threading.local()
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=self.written)
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_TemplateDict(),
            namespace=_TemplateNamespace, lipsum=_lipsum)
        self.filters["tojson"] = _tojson
        self.filters = {name: self._counted(name, function) for name, function in self.filters.items()}
        for name in _COMPARING_TESTS:
            test: Any = self.tests[name]
            self.tests[name] = self._small_first(test)

    def start_clock(self) -> None:
        """Start this thread's limits for a rendering, or for a compilation (which folds constants)."""
        self._account.deadline_s = time.monotonic() + RENDER_LIMIT_S
        self._account.num_spent = 0

    def tick(self) -> None:
        """Raises when this thread's time is up."""
        if time.monotonic() > self._account.deadline_s:
            raise LimitError("the chat template takes too long")

    def spend(self, num_chars: int) -> None:
        """Count results; raises when this thread's rendering has made too many."""
        self._account.num_spent += num_chars
        if self._account.num_spent > MAX_SPENT_CHARS:
            raise LimitError("the chat template makes too much text")

    def small(self, value: Any) -> Any:
        """The value; raises where it is too large to be compared or written."""
        if isinstance(value, list | tuple | dict):
            self.tick()
            if text_size(value) > MAX_SPENT_CHARS:
                raise LimitError("the chat template makes too large a value")
        return value

    def written(self, value: Any) -> Any:
        """Jinja's ``finalize``: the value of an expression in the text."""
        self.spend(len(value) if isinstance(value, str) else text_size(value))
        return value

    def join_texts(self, items: tuple[Any, ...]) -> str:
        """``~``."""
        self.tick()
        self.spend(text_size(items))
        return str_join(items)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Generate code in which every iteration of a loop checks the deadline."""
        for loop in source.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute(_TICK), lineno=loop.lineno))
        return super()._generate(source, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the base class, after a check of the deadline."""
        self.tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: str | Any) -> Any:
        """As the base class, after a check of the deadline."""
        self.tick()
        return super().getitem(obj, argument)

    # Underscores, because a template's keywords may be named self, context or obj.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As the base class, after a check of the deadline and of the possible size of the result."""
        __self.tick()
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        receiver, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(receiver, str | bytes | int) and not isinstance(receiver, bool):
            if name == "join" and args:
                args = (list(args[0]), *args[1:]) if not isinstance(args[0], str) else args
            if name in _MULTIPLYING_METHODS:
                check_product(text_size(receiver), (*args, *kwargs.values()))
            elif name == "replace":
                check_replace(receiver, args)
            elif name in ("format", "format_map") and isinstance(receiver, str):
                is_dynamic = re.search(r"{[^{}]*{", receiver) is not None
                check_format(receiver, receiver.count("{"), (args, kwargs), is_dynamic=is_dynamic)
            elif name == "striptags" and len(str(receiver)) > MAX_SLOW_CHARS:
                raise LimitError("the chat template takes too long")
        return __self._kept(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operation if its result is small."""
        self.tick()
        if operator == "*":
            check_times(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if right > 0 and left.bit_length() * right > MAX_INT_BITS:
                raise LimitError("the chat template uses a number that is too large")
        elif operator == "%" and isinstance(left, str | bytes):
            text = left if isinstance(left, str) else left.decode("latin-1")
            check_format(text, text.count("%"), right, is_dynamic="*" in text)
        return self._kept(super().call_binop(context, operator, left, right))

    def _kept(self, value: Any) -> Any:
        """A result, counted against the limit."""
        if isinstance(value, str | bytes | list | tuple | dict):
            self.spend(len(value))
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise LimitError("the chat template uses a number that is too large")
        return value

    def _small_first(self, test: Callable[..., Any]) -> Callable[..., Any]:
        """A test that compares, with a check of the sizes before."""
        return lambda *args: test(*map(self.small, args))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter with checks of the deadline, its input and its result."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # after the environment or context

        @wraps(function)  # also copies the attribute that asks for them
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            given = args[first] if len(args) > first else None
            if name not in _SHALLOW_FILTERS:
                size = text_size(given)
                if size > (MAX_SLOW_CHARS if name in _SLOW_FILTERS else MAX_SPENT_CHARS):
                    raise LimitError("the chat template makes too large a value")
                if name in _MULTIPLYING_FILTERS:
                    check_product(size, (*args[first + 1 :], *kwargs.values()))
                elif name == "replace":
                    check_replace(str(given), (*args[first + 1 :], *kwargs.values()))
                if name == "format":
                    check_format(str(given), str(given).count("%"), (args, kwargs), is_dynamic="*" in str(given))
                if name == "int" and isinstance(given, str) and len(given) > MAX_INT_BITS // 16:
                    raise LimitError("the chat template uses a number that is too large")
            return self._kept(function(*args, **kwargs))

        return counted


def _raise_exception(message: str) -> None:
    raise RefusalError(str(message)[:500])


def _strftime_now(form: str) -> str:
    if len(form) > 1000 or re.search(r"%\d{4,}", form):
        raise LimitError("the chat template repeats too much")
    return datetime.datetime.now().strftime(form)  # the local time, without a zone, as templates know it


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    # jinja2's own filter escapes for HTML, which models have not seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:  # jinja2's names
    if n * max > MAX_SLOW_CHARS:
        raise LimitError("the chat template repeats too much")
    return generate_lorem_ipsum(n, html, min, max)


class _TemplateDict:
    """``dict`` for templates: only a call and ``fromkeys``, not the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """As of a dict."""
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """``namespace`` for templates, which refuses names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # ``namespace(self=...)`` works
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace keeps no name that begins with an underscore: {name!r}")
