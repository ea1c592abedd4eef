"""Chat templates in a sandbox, bounded in time and size.

The template comes from the model folder, never from a client. It may loop, but every name it looks up and every
call it makes passes a deadline, and its output has a limit.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jettison.errors import ModelError

RENDER_LIMIT_S = 5.0
_ORDINARY_CONVERSATIONS = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user",))
"""Roles of the messages with which a template is tried: all of them, or as many as it takes."""
MAX_REPEATED_CHARS = 1 << 20


class TemplateError(Exception):
    """The messages do not suit the template; the text is safe to show to a client."""


class _Refusal(TemplateError):
    """The template itself says that these messages are not for it."""


class _LimitError(TemplateError):
    """Rendering took too long or produced too much."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's part for training; when serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The tag's body in place of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """No mutation, no attributes of Python's machinery, no large repetition, and a deadline on every step."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters["tojson"] = _tojson
        self._render = threading.local()  # threads render with one compiled template, each to its own deadline

    def start_clock(self) -> None:
        """The time limit of this thread's rendering begins."""
        self._render.deadline_s = time.monotonic() + RENDER_LIMIT_S

    def tick(self) -> None:
        """Raises when this thread's time is up."""
        if time.monotonic() > self._render.deadline_s:
            raise _LimitError("the chat template takes too long")

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the base class, before the deadline."""
        self.tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: str | Any) -> Any:
        """As the base class, before the deadline."""
        self.tick()
        return super().getitem(obj, argument)

    # Underscores, because a template's keywords may be named self, context or obj.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As the base class, before the deadline."""
        __self.tick()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """``*`` only while the result is small; ``**`` not at all."""
        if operator == "**":
            raise _LimitError("the chat template uses **")
        if isinstance(left, Sequence | str) or isinstance(right, Sequence | str):
            sized, times = (left, right) if isinstance(left, Sequence | str) else (right, left)
            if not isinstance(times, int) or len(sized) * times > MAX_REPEATED_CHARS:
                raise _LimitError("the chat template repeats too much")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise _Refusal(str(message)[:500])


def _strftime_now(form: str) -> str:
    return datetime.datetime.now(datetime.UTC).astimezone().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # jinja2's own filter escapes for HTML, which models have not seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


class ChatTemplate:
    """One compiled template. ``source_name`` is named in errors about the model folder."""

    def __init__(self, source: str, source_name: str, max_chars: int = 8 << 20) -> None:
        self.source = source
        self._source_name = source_name
        self._max_chars = max_chars
        self._environment = _Sandbox()
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
            raise ModelError(f"{source_name}: the chat template is broken: {_one_line(error)}") from None

    def check(self, variables: Mapping[str, Any]) -> None:
        """Raise ModelError where no ordinary conversation can be rendered: better told at the start than to clients.

        Roles that the template refuses by itself (``raise_exception``) are its own affair.
        """
        for roles in _ORDINARY_CONVERSATIONS:
            messages = [{"role": role, "content": "Hello."} for role in roles]
            try:
                self.render(messages, variables)
            except _Refusal:
                continue
            except TemplateError as error:
                told = _one_line(error.__cause__ or error)
                raise ModelError(
                    f"{self._source_name}: the chat template cannot render a conversation"
                    f" ({', '.join(roles)}): {told}"
                ) from None
            return

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt's text. Raises TemplateError. Safe to call from several threads."""
        pieces: list[str] = []
        num_chars = 0
        self._environment.start_clock()
        try:
            for piece in self._template.generate(messages=list(messages), **variables):
                self._environment.tick()
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    raise _LimitError("the chat template produces too much text")
                pieces.append(piece)
        except TemplateError:
            raise
        except Exception as error:  # a template can make any operation of Python's fail
            raise TemplateError(f"the chat template cannot render them ({type(error).__name__})") from error
        return "".join(pieces)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
