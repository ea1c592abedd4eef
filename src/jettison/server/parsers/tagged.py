"""Calls that are JSON between marks in the text: Hermes and Qwen, Granite, Phi, Mistral, DeepSeek; and JSON without any
marks: Llama 3, and models that know no form of their own."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence

from jettison.server.parsers.machine import BrokenError, Machine, Reading, num_held
from jettison.server.parsers.parts import Tool


class MarkedMachine(Machine):
    """Content, and calls that begin with a mark."""

    MARKS: tuple[str, ...] = ()

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._pattern = re.compile("|".join(map(re.escape, sorted(self.MARKS, key=len, reverse=True))))
        super().__init__(tools)

    def _read(self) -> Reading[None]:
        while mark := (yield from self._content()):
            try:
                yield from self._calls(mark)
            except BrokenError:
                self._give_up()

    @abstractmethod
    def _calls(self, mark: str) -> Reading[None]:
        """What comes after a mark. Raises BrokenError."""

    def _content(self) -> Reading[str]:
        """Content up to a mark, which is taken and returned; empty at the end. Space before a mark is no content, nor
        is space after the last call."""
        while True:
            found = self._pattern.search(self._text, self._at)
            if found is not None:
                before = self._text[self._at : found.start()]
                told = before.rstrip()
                self._say("content", told)
                self._at = found.end()
                self._taken = [before[len(told) :] + found.group()]
                return found.group()
            rest = self._text[self._at :]
            if self._is_over:
                self._at = len(self._text)
                if not self.num_calls or rest.strip():
                    self._say("content", rest)
                return ""
            told = rest[: len(rest) - num_held(rest, self.MARKS)].rstrip()
            self._say("content", told)
            self._at += len(told)
            yield

    def _close(self, *words: str) -> Reading[None]:
        """The mark behind a call, where there is one: the call is whole without it. Space before it goes with it."""
        while True:
            rest = self._text[self._at :].lstrip()
            if any(rest.startswith(word) for word in words):
                yield from self._space()
                yield from self._skips(*words)
                break
            if self._is_over or not any(word.startswith(rest) for word in words):
                break
            yield
        self._taken = []


class HermesParser(MarkedMachine):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, SmolLM3 and others."""

    MARKS = ("<tool_call>",)

    def _calls(self, mark: str) -> Reading[None]:
        yield from self._objects()
        yield from self._close("</tool_call>")


class ListParser(MarkedMachine):
    """``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]``: Granite 3, Phi-4-mini (which writes an end mark); and
    ``<function_call> {...}`` of older Granites."""

    MARKS: tuple[str, ...] = ("<|tool_call|>", "<tool_call>", "<function_call>")

    def _calls(self, mark: str) -> Reading[None]:
        yield from self._objects()
        yield from self._close("<|/tool_call|>", "</tool_call>")


class FunctoolsParser(ListParser):
    """``functools[{...}, ...]``: Phi-4-mini, as vLLM's template asks it to."""

    MARKS = ("functools[", "<|tool_call|>")

    def _calls(self, mark: str) -> Reading[None]:
        if mark.endswith("["):  # the list's own
            yield from self._listed()
        else:
            yield from super()._calls(mark)


class MistralParser(MarkedMachine):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, and the newer ``[TOOL_CALLS]name[ARGS]{...}``, also with
    ``[CALL_ID]id`` before the arguments, or without a mark between."""

    MARKS = ("[TOOL_CALLS]",)

    def _calls(self, mark: str) -> Reading[None]:
        yield from self._space()
        if (yield from self._peek()) in ("[", "{"):
            yield from self._objects()
            return
        self._begin_call()
        yield from self._named("[CALL_ID]", "[ARGS]", "{")
        if (yield from self._skips("[CALL_ID]")):
            yield from self._until("[ARGS]")
        yield from self._skips("[ARGS]")
        yield from self._space()
        yield from self._read_arguments()
        self._end_call()


class DeepSeekParser(MarkedMachine):
    """DeepSeek V3 and R1 (``function<sep>name`` and fenced JSON) and V3.1 (``name<sep>`` and JSON)."""

    MARKS = ("<｜tool▁calls▁begin｜>",)
    BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    ALL_END = "<｜tool▁calls▁end｜>"

    def _calls(self, mark: str) -> Reading[None]:
        num_before = self.num_calls
        while True:
            yield from self._space()
            if not (yield from self._skips(self.BEGIN)):
                break
            self._begin_call()
            is_fenced = bool((yield from self._skips("function" + self.SEPARATOR)))
            if is_fenced:
                yield from self._named("\n")
                yield from self._space()
                yield from self._expect("```json")
            else:
                yield from self._named(self.SEPARATOR)
                yield from self._skips(self.SEPARATOR)
            yield from self._space()
            yield from self._read_arguments()
            self._end_call()
            if is_fenced:
                yield from self._close("```")
            yield from self._close(self.END)
        if self.num_calls == num_before:
            raise BrokenError  # none is called
        yield from self._close(self.ALL_END)


class JsonParser(Machine):
    """An answer that is a call, or a list of them, from its first character on: nothing marks it but its names."""

    def _read(self) -> Reading[None]:
        yield from self._space()
        try:
            yield from self._objects(default=None)
            while (yield from self._goes_on()):
                yield from self._objects(default=None)
        except BrokenError:
            self._give_up()
        yield from self._rest()

    def _goes_on(self) -> Reading[bool]:
        """Whether another call follows."""
        yield from self._space()
        yield from self._skips(";", ",")
        yield from self._space()
        return (yield from self._peek()) == "{"

    def _rest(self) -> Reading[None]:
        """Everything that is left is content."""
        self._text = "".join(self._taken) + self._text[self._at :]
        self._at, self._taken = 0, []
        while True:
            told = self._text[self._at :] if self._is_over else self._text[self._at :].rstrip()
            if not self._is_over or told.strip() or not self.num_calls:
                self._say("content", told)
                self._at += len(told)
            if self._is_over:
                return
            yield


class LlamaParser(JsonParser):
    """Llama 3: ``{"name": ..., "parameters": {...}}``, several with ``;`` between, after ``<|python_tag|>`` or none."""

    def _read(self) -> Reading[None]:
        yield from self._space()
        yield from self._skips("<|python_tag|>")
        yield from super()._read()
