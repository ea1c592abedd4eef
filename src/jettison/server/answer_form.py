"""How the text of an answer is read: with a parser of calls, of thoughts, of both; and what of it is told.

``AnswerForms`` is made once from the operator's settings and the model's templates; it gives each request its ``Form``.
``Reader`` reads one choice with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jettison.server.chat_renderer import ChatRenderer
from jettison.server.forced_calls import Speech, Thinks, reads_its_own
from jettison.server.parsers.harmony import MARKERS as HARMONY_MARKS
from jettison.server.parsers.harmony import HarmonyParser
from jettison.server.parsers.machine import Machine
from jettison.server.parsers.parts import Parser, Part
from jettison.server.parsers.registry import HARMONY, call_kind, thinking_kind
from jettison.server.parsers.tagged import JsonParser
from jettison.server.parsers.thinking import Chain, MarkedThinking
from jettison.server.parsers.whole import ArgumentsParser
from jettison.server.tools import ToolPlan


@dataclass(frozen=True, slots=True)
class Form:
    """How the choices of one request are read."""

    make: Callable[[], Parser]
    marks: tuple[str, ...] = ()
    """Texts of special tokens that the parser has to see, though special tokens are no text otherwise."""
    takes_one_call: bool = False
    """Whether an answer ends behind its first call."""
    has_thoughts: bool = False
    """Whether thoughts are told from content, and counted."""
    tells_thoughts: bool = True
    """Whether the client gets them."""
    has_short_ids: bool = False
    """Whether calls have ids of nine letters and digits, as the template wants them in a history."""
    is_old: bool = False
    """Whether a call is told as ``function_call``."""


class AnswerForms:
    """The parsers of one server. Raises ConfigError for a name or file that is no parser."""

    def __init__(self, chat: ChatRenderer) -> None:
        settings = chat.settings
        self.calls = call_kind(settings.tool_call_parser, chat.source_with_tools)
        self.thinking = thinking_kind(settings.reasoning_parser, chat.source)

    @property
    def told(self) -> str:
        """One line for the log."""
        calls, thinking = ("nothing" if kind is None else kind.name for kind in (self.calls, self.thinking))
        return f"tool calls are read as {calls}, thoughts as {thinking} (--tool-call-parser, --reasoning-parser)"

    def speech(self, prompt: str, opened: str) -> Speech:
        """How the model calls and thinks behind this prompt. ``opened``: the text of a last message that it ends in."""
        return Speech(self.calls, self.thinking, self._thinks(prompt, opened))

    def _thinks(self, prompt: str, opened: str) -> Thinks:
        kind = self.thinking
        if kind is None:
            return "no"
        if kind.name == HARMONY:
            return "maybe"
        end = prompt.rstrip()
        if opened:
            return "already" if opened.rfind(kind.begin) > opened.rfind(kind.end) else "no"
        if end.endswith(kind.begin):
            return "already"
        if end.endswith(kind.end):
            return "no"
        return "already" if kind.is_open else "maybe"

    def form(
        self, plan: ToolPlan, speech: Speech, *, has_written_calls: bool = False, tells_thoughts: bool = True,
        is_streamed: bool = True,
    ) -> Form | None:
        """How the answers of a request are read; None: they are content as they are. ``has_written_calls``: calls have
        the form that ``forced_calls`` writes."""
        calls = self.calls if plan.mode != "none" else None
        has_thoughts = self.thinking is not None
        is_harmony = speech.is_harmony and (has_thoughts or plan.mode != "none")
        is_forced = plan.mode in ("required", "named")  # a grammar has written the call, so it is one whatever is told
        tools = plan.callable_tools if self.calls is not None or is_forced else ()
        make_calls: Callable[[], Parser] | None = (
            (lambda: HarmonyParser(tools)) if is_harmony else self._calls(plan, has_written_calls=has_written_calls))
        if make_calls is not None and not is_streamed:
            make_calls = _not_flowing(make_calls)
        if not (has_thoughts or make_calls):
            return None
        return Form(
            make=make_calls if make_calls is not None and is_harmony else self._both(make_calls, speech.thinks),
            marks=self._marks(plan, is_harmony),
            takes_one_call=plan.mode != "none" and not plan.is_parallel,
            has_thoughts=has_thoughts,
            tells_thoughts=tells_thoughts,
            has_short_ids=calls is not None and calls.has_short_ids,
            is_old=plan.is_old,
        )

    def _marks(self, plan: ToolPlan, is_harmony: bool) -> tuple[str, ...]:
        """Of the parsers at work."""
        if is_harmony:
            return HARMONY_MARKS
        calls = self.calls.marks if self.calls is not None and plan.mode != "none" else ()
        return (*calls, *(self.thinking.marks if self.thinking is not None else ()))

    def _calls(self, plan: ToolPlan, *, has_written_calls: bool) -> Callable[[], Parser] | None:
        """The parser of what is behind the thoughts; None: it is content."""
        tools, name, kind = plan.callable_tools, plan.name, self.calls
        if plan.mode == "named" and name is not None:
            return lambda: ArgumentsParser(name)
        if has_written_calls and not reads_its_own(kind):
            return lambda: JsonParser(tools)
        if plan.mode == "none" or kind is None:
            return None
        return lambda: kind.make(tools)

    def _both(self, calls: Callable[[], Parser] | None, thinks: Thinks) -> Callable[[], Parser]:
        kind = self.thinking
        if kind is None:
            assert calls is not None
            return calls
        begin, end, is_open = kind.begin, kind.end, thinks == "already"
        if calls is None:
            return lambda: MarkedThinking(begin, end, is_open=is_open)
        return lambda: Chain(MarkedThinking(begin, end, is_open=is_open), calls())


def _not_flowing(make: Callable[[], Parser]) -> Callable[[], Parser]:
    """The parser of an answer in one piece: a call that is no JSON is content, however long it is."""
    def made() -> Parser:
        parser = make()
        if isinstance(parser, Machine):
            parser.flows = False
        return parser

    return made


class Reader:
    """One choice, read as it grows."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._parser = form.make()
        self.num_calls = 0
        self.is_done = False
        """Whether the answer is over, since it has the one call that it may have."""

    @property
    def is_thinking(self) -> bool:
        """Whether the text that comes next is a thought."""
        return self._form.has_thoughts and bool(getattr(self._parser, "is_thinking", False))

    @property
    def breaks_off(self) -> bool:
        """Whether the last call that was told ended inside its arguments."""
        return bool(getattr(self._parser, "breaks_off", False))

    def feed(self, text: str) -> list[Part]:
        """The parts of the next text that the client gets."""
        return self._told(self._parser.feed(text)) if text and not self.is_done else []

    def end(self) -> list[Part]:
        """The rest, at the end of the answer."""
        return [] if self.is_done else self._told(self._parser.end())

    def _told(self, parts: Sequence[Part]) -> list[Part]:
        if len(parts) == 1 and parts[0].kind == "content":
            return list(parts)
        told: list[Part] = []
        for part in parts:
            if part.kind == "reasoning" and not self._form.has_thoughts:
                part = Part("content", part.text)
            if part.kind == "reasoning" and not self._form.tells_thoughts:
                continue
            told.append(part)
            self.num_calls += part.kind == "call"
            if part.kind == "end" and self._form.takes_one_call:
                self.is_done = True
                break
        return told
