"""An answer that is one function's arguments as a whole: what a grammar makes of a function asked for by name."""

from __future__ import annotations

from jettison.server.parsers.parts import Part


class ArgumentsParser:
    """See the module. An answer without any text calls nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Part]:
        """See ``Parser``."""
        if self._has_begun:
            return [Part("arguments", text)] if text else []
        text = text.lstrip()
        if not text:
            return []
        self._has_begun = True
        return [Part("call", self._name), Part("arguments", text)]

    def end(self) -> list[Part]:
        """See ``Parser``."""
        return [Part("end")] if self._has_begun else []
