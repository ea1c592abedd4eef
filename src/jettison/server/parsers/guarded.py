"""A parser of the operator's own, whose mistakes cost an answer its calls, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jettison.server.parsers.parts import Part, Tool
from jettison.server.quiet_log import Seldom

logger = logging.getLogger(__name__)
_seldom = Seldom(logger)

_KINDS = ("content", "reasoning", "call", "arguments", "end")


class Guarded:
    """Passes on what the parser says, in the order that calls have. Where it fails, the rest of the text is content."""

    def __init__(self, make: Callable[[Sequence[Tool]], Any], tools: Sequence[Tool]) -> None:
        self._parser: Any = None
        self._is_in_call = False
        self.breaks_off = False
        """See ``CallParser``."""
        try:
            self._parser = make(tools)
        except Exception as error:  # noqa: BLE001  # it is the operator's, and may raise anything
            self._fail(error)

    def feed(self, text: str) -> list[Part]:
        """See ``Parser``."""
        return self._ask(lambda: self._parser.feed(text), text)

    def end(self) -> list[Part]:
        """See ``Parser``."""
        parts = self._ask(lambda: self._parser.end(), "")
        return [*parts, *self._closed()]

    def _ask(self, said: Callable[[], Iterable[Any]], text: str) -> list[Part]:
        if self._parser is not None:
            try:
                return self._checked([Part(*part) for part in said()])
            except Exception as error:  # noqa: BLE001  # as above
                self._fail(error)
        return [*self._closed(), *([Part("content", text)] if text else [])]

    def _checked(self, parts: Sequence[Part]) -> list[Part]:
        """Raises ValueError for a part that makes no sense where it stands."""
        is_in_call = self._is_in_call
        for part in parts:
            if part.kind not in _KINDS or not isinstance(part.text, str):
                raise ValueError(f"no part: {part!r:.100}")
            part.text.encode()  # lone surrogates would fail where the answer is written
            if (part.kind in ("arguments", "end")) != is_in_call:
                raise ValueError(f"{part.kind} {'inside' if is_in_call else 'outside'} a call")
            if part.kind in ("call", "end"):
                is_in_call = part.kind == "call"
                self.breaks_off = False
        self._is_in_call = is_in_call
        return list(parts)

    def _closed(self) -> list[Part]:
        """The end of a call that is left open."""
        was_in_call, self._is_in_call = self._is_in_call, False
        self.breaks_off = self.breaks_off or was_in_call
        return [Part("end")] if was_in_call else []

    def _fail(self, error: Exception) -> None:
        self._parser = None
        _seldom.warning("the parser of --tool-call-parser failed: %s: %s", type(error).__name__, error)
