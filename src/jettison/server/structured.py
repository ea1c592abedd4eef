"""Structured output: what an answer has to look like, as one small value, whichever field a client wrote it in.

``response_format``, ``structured_outputs`` and the older ``guided_*`` fields become a ``Constraint`` here; tools may
make one of their own. ``grammar_texts`` writes it as llguidance's grammar, ``compiling`` tries that apart from the
server, and what travels to the engine is ``types.Grammar``. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer has to look like, and from where on."""

    kind: Kind
    text: str
    """``json``: a JSON schema. ``regex``: a regular expression over the whole answer (Rust's syntax). ``choice``: a JSON
    list of strings, one of which is the answer. ``grammar``: Lark as llguidance reads it, or GBNF; in Lark ``<name>``
    is the special token of that text. ``structural_tag``: vLLM's JSON document, of either form: free text with
    ``structures`` and ``triggers``, or a ``format``."""
    param: str = "structured_outputs"
    """The request's field that the constraint came from: errors name it."""
    whitespace_pattern: str | None = None
    """``json``: a regular expression for the white space between tokens of JSON; None: what JSON allows."""
    begins_after: tuple[int, ...] | None = None
    """Token ids of a marker, such as the end of the model's thinking: the answer is free up to and with the first place
    where they stand one behind the other, and the constraint begins behind them. None: it begins at once. Stop tokens
    end the answer before that, too."""
