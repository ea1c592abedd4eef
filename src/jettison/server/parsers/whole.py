"""An answer that is one function's arguments as a whole: what a grammar makes of a function asked for by name."""

from __future__ import annotations

import json

from jettison.server.parsers.parts import Part


class ArgumentsParser:
    """See the module. An answer without any text calls nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False
        self._arguments: list[str] = []
        self.breaks_off = False
        """See ``CallParser``."""

    def feed(self, text: str) -> list[Part]:
        """See ``Parser``."""
        if self._has_begun:
            self._arguments.append(text)
            return [Part("arguments", text)] if text else []
        text = text.lstrip()
        if not text:
            return []
        self._has_begun = True
        self._arguments.append(text)
        return [Part("call", self._name), Part("arguments", text)]

    def end(self) -> list[Part]:
        """See ``Parser``."""
        if not self._has_begun:
            return []
        try:
            self.breaks_off = not isinstance(json.loads("".join(self._arguments)), dict)
        except ValueError:
            self.breaks_off = True
        except RecursionError:  # too deep to be judged here
            pass
        return [Part("end")]
