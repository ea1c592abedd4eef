"""One compiled chat template, and the facts in its source.

Compiling and rendering only: ``template_traits`` detects the form of messages; ``chat_renderer`` chooses the template
and adds a request's options. A template may come from a client, where the server allows that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes

from jettison.errors import ModelError
from jettison.server.template_limits import LimitError, RefusalError, TemplateError
from jettison.server.template_sandbox import Sandbox

__all__ = ["ChatTemplate", "LimitError", "RefusalError", "TemplateError", "one_line"]

MAX_SOURCE_CHARS = 1 << 20


class ChatTemplate:
    """``source_name`` is named in errors about the template. Raises ModelError."""

    def __init__(self, source: str, source_name: str, max_chars: int = 8 << 20) -> None:
        self.source = source
        self.source_name = source_name
        self._max_chars = max_chars
        self._environment = Sandbox()
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelError(f"{source_name}: the chat template is longer than {MAX_SOURCE_CHARS} characters")
        self._environment.start_clock()
        try:
            self._tree = self._environment.parse(source)
            self._template = self._environment.from_string(self._tree)
        except (jinja2.TemplateError, TemplateError, SyntaxError, ValueError, ArithmeticError, RecursionError,
                MemoryError) as error:  # fmt: skip
            raise ModelError(f"{source_name}: the chat template is broken: {one_line(error)}") from None

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that it reads."""
        return frozenset(meta.find_undeclared_variables(self._tree))

    @cached_property
    def words(self) -> frozenset[str]:
        """Names of attributes, and texts, in its expressions, which show the roles and fields that it knows."""
        texts = {node.value for node in self._tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return frozenset(texts | {node.attr for node in self._tree.find_all(nodes.Getattr)})

    @cached_property
    def walks_over_content(self) -> bool:
        """Whether it has a loop over the content of a message, or over a variable ``content``."""
        return any(_is_content(loop.iter) for loop in self._tree.find_all(nodes.For))

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt's text. Raises TemplateError. Safe to call from several threads."""
        pieces: list[str] = []
        num_chars = 0
        self._environment.start_clock()
        try:
            for piece in self._template.generate({**variables, "messages": list(messages)}):
                self._environment.tick()
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    raise LimitError("the chat template produces too much text")
                pieces.append(piece)
        except TemplateError:
            raise
        except Exception as error:  # a template can make any Python operation fail
            raise TemplateError(f"the chat template cannot render them ({type(error).__name__})") from error
        return "".join(pieces)


def _is_content(node: nodes.Node | None) -> bool:
    """``message.content``, ``message['content']``, a variable ``content``; filtered or sliced."""
    match node:
        case nodes.Filter(node=inner):
            return _is_content(inner)
        case nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _is_content(inner)
        case nodes.Getattr(attr="content") | nodes.Name(name="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False


def one_line(error: BaseException) -> str:
    """The message of an exception on one line, for a log."""
    return " ".join(str(error).split())[:200] or type(error).__name__
