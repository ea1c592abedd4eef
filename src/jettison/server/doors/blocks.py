"""An answer as a row of blocks (thoughts, text, calls), as both doors tell it; each writes them in words of its own.

``Blocks`` reads one choice: parts in, steps out. No I/O.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jettison.server.answer_form import Form
from jettison.server.choice import Delta
from jettison.server.conversation import SHORT_ID_CHARS
from jettison.server.parsers.parts import Part

BlockKind = Literal["thought", "text", "call"]

_LETTERS = string.ascii_letters + string.digits
_KINDS: dict[str, BlockKind] = {"reasoning": "thought", "content": "text"}


@dataclass(slots=True)
class Block:
    """One piece of the answer."""

    kind: BlockKind
    index: int
    id: str = ""
    """Of a call: what its result names."""
    name: str = ""
    """Of a call: the function."""
    texts: list[str] = field(default_factory=list)
    is_closed: bool = False

    @property
    def text(self) -> str:
        """All of its text; of a call, its arguments."""
        return "".join(self.texts)


class Step(NamedTuple):
    """A change of the row."""

    kind: Literal["open", "more", "close"]
    block: Block
    text: str = ""
    """What ``more`` adds."""


class Blocks:
    """The blocks of one choice, in order: no two are open at one time."""

    def __init__(self, form: Form | None, call_prefix: str) -> None:
        """``form``: how the choice is read; None: it is text. ``call_prefix``: of the ids of calls, unless the model's
        template takes short ids only."""
        self._form = form
        self._call_prefix = call_prefix
        self.blocks: list[Block] = []
        self._space: list[str] = []
        """White space between blocks, which is part of a text only where more of it follows."""

    def feed(self, delta: Delta) -> list[Step]:
        """The steps of a delta."""
        parts: Sequence[Part] = delta.parts
        if self._form is None:
            parts = [Part("content", delta.text)] if delta.text else []
        steps: list[Step] = []
        for kind, text in parts:
            if kind == "call":
                self._close(steps)
                self._open(steps, Block("call", len(self.blocks), self._new_id(), text))
            elif kind == "end":
                self._close(steps)
            elif kind == "arguments":
                self._add(steps, text)
            else:
                self._say(steps, _KINDS[kind], text)
        return steps

    def end(self) -> list[Step]:
        """The steps at the end of the answer, which has one block at least."""
        steps: list[Step] = []
        self._close(steps)
        if not self.blocks:
            space, self._space = self._space, []
            self._open(steps, Block("text", 0))
            self._add(steps, "".join(space))
            self._close(steps)
        return steps

    def _say(self, steps: list[Step], kind: BlockKind, text: str) -> None:
        last = self.blocks[-1] if self.blocks else None
        if last is None or last.kind != kind or last.is_closed:
            self._space.append(text)
            if not text.strip():
                return
            text, self._space = "".join(self._space), []
            self._close(steps)
            self._open(steps, Block(kind, len(self.blocks)))
        self._add(steps, text)

    def _open(self, steps: list[Step], block: Block) -> None:
        self._space = []
        self.blocks.append(block)
        steps.append(Step("open", block))

    def _add(self, steps: list[Step], text: str) -> None:
        if not text:
            return
        block = self.blocks[-1]
        block.texts.append(text)
        if steps and steps[-1].kind == "more" and steps[-1].block is block:
            steps[-1] = Step("more", block, steps[-1].text + text)
        else:
            steps.append(Step("more", block, text))

    def _close(self, steps: list[Step]) -> None:
        if self.blocks and not self.blocks[-1].is_closed:
            self.blocks[-1].is_closed = True
            steps.append(Step("close", self.blocks[-1]))

    def _new_id(self) -> str:
        if self._form is not None and self._form.has_short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(SHORT_ID_CHARS))
        return self._call_prefix + secrets.token_hex(12)
