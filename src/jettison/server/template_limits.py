"""Limits of chat templates: sizes of values, and bounds on the results of operations. Pure.

``template_sandbox`` calls these checks for its operations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jinja2.utils import Namespace

MAX_REPEATED_CHARS = 1 << 20
MAX_SPENT_CHARS = 1 << 28
"""Most characters and items that one rendering may make in all, whether they are kept or not."""
MAX_ITEMS = 1 << 20
"""Most items in one value that is written, compared or filtered, nested items included."""
MAX_INT_BITS = 1 << 16
_WIDTH = re.compile(r"[%:][^{}%:\n]*?(\d{5,})")


class TemplateError(Exception):
    """The messages do not suit the template; the text is safe to show to a client. ``param``: the field at fault."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class RefusalError(TemplateError):
    """The template itself refuses these messages."""


class LimitError(TemplateError):
    """Rendering took too long or produced too much."""


def text_size(value: Any) -> int:
    """Characters and items of a value as written out, with repeated items counted each time. Where they exceed
    ``MAX_SPENT_CHARS``, or the items exceed ``MAX_ITEMS``, some number above ``MAX_SPENT_CHARS``."""
    if isinstance(value, str | bytes):
        return len(value)
    num_chars, num_items, stack = 0, 0, [value]
    while stack:
        item = stack.pop()
        num_items += 1
        if isinstance(item, str | bytes):
            num_chars += len(item)
        elif isinstance(item, dict):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list | tuple | set):
            stack += item
        elif type(item) is int:
            num_chars += item.bit_length() // 3
        elif isinstance(item, Namespace):
            stack += _attributes(item).values()
        if num_items + len(stack) > MAX_ITEMS or num_chars > MAX_SPENT_CHARS:
            return MAX_SPENT_CHARS + 1
    return num_chars + num_items


def _attributes(namespace: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return found


def check_product(size: int, arguments: tuple[Any, ...]) -> None:
    """Check an operation with a result of up to its size times its largest argument."""
    largest = max((_weight(argument) for argument in arguments), default=0)
    if (1 + size) * (1 + largest) > MAX_SPENT_CHARS:
        raise LimitError("the chat template repeats too much")


def check_replace(text: Any, arguments: tuple[Any, ...]) -> None:
    """Check the replacement of a part of a text by another."""
    texts = [argument for argument in arguments if isinstance(argument, str | bytes)]
    if len(texts) == 2 and text.count(texts[0]) * len(texts[1]) > MAX_SPENT_CHARS:
        raise LimitError("the chat template repeats too much")


def _weight(argument: Any) -> int:
    return abs(argument) if isinstance(argument, int) else text_size(argument)


def check_format(form: str, num_fields: int, arguments: Any, *, is_dynamic: bool) -> None:
    """Check ``%`` and ``format``: every field may show all of the arguments, at a width from the form or the
    arguments."""
    widths = [int(width[:12]) for width in _WIDTH.findall(form)]
    if is_dynamic:
        widths += _ints(arguments)
    if any(abs(width) > MAX_REPEATED_CHARS for width in widths):
        raise LimitError("the chat template repeats too much")
    check_product(num_fields, (text_size(arguments) + sum(widths),))


def _ints(value: Any) -> list[int]:
    if isinstance(value, Mapping):
        return [number for item in value.values() for number in _ints(item)]
    if isinstance(value, list | tuple):
        return [number for item in value for number in _ints(item)]
    return [value] if isinstance(value, int) else []


def check_times(left: Any, right: Any) -> None:
    """Check a product, or a repetition."""
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise LimitError("the chat template uses a number that is too large")
        return
    sized, times = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(times, int) and hasattr(sized, "__len__") and len(sized) * times > MAX_REPEATED_CHARS:
        raise LimitError("the chat template repeats too much")
