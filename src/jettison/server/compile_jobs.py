"""What the server and the process that compiles grammars tell each other, one JSON a line. No compiler."""

from __future__ import annotations

import msgspec


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The process's first line."""

    special_tokens: dict[str, int]
    """Text -> id."""
    memory_bytes: int
    """Beyond what the process has at its start."""
    cpu_s: float
    """Of the processor, for one job."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One constraint; see ``structured.Constraint``."""

    kind: str
    text: str
    white_space: str | None = None


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """Its grammar, or why there is none."""

    grammar: str = ""
    error: str | None = None
