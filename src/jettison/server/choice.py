"""One choice of an answer: token events in, text out, and its parts where it is read for calls and thoughts.
Detokenizing, stop strings, parsers and counting meet here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from jettison.live.engine.api import TokenEvent
from jettison.server.answer_form import Reader
from jettison.server.parsers.parts import Part
from jettison.server.sampling import GenerationPlan
from jettison.server.stops import StopMatcher
from jettison.server.tokenizer import Tokenizer
from jettison.types import FinishReason, TokenLogprobs

Finish = Literal["stop", "length", "repetition", "tool_calls", "function_call"]


@dataclass(slots=True)
class Delta:
    """The addition of one event to a choice."""

    text: str
    finish_reason: Finish | None
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """One for each token, when the request asked for them."""
    text_offsets: list[int] = field(default_factory=list)
    """Characters of the answer (of prompt and answer, with echo) before each token, when logprobs were asked for."""
    parts: list[Part] = field(default_factory=list)
    """What the text says, by kind, where the request's answers are read (``TextRules.form``)."""


class ChoiceText:
    """The growing text of one choice. Feed it every event until ``finish_reason`` is set; later tokens are ignored."""

    __slots__ = (
        "_detokenizer", "_keeps_stop", "_matcher", "_min_tokens", "_num_chars", "_repetition", "_seen",
        "_reader", "_stop_tokens", "_with_logprobs", "finish_reason", "form", "num_reasoning_tokens", "num_tokens",
        "stop_reason",
    )  # fmt: skip

    def __init__(
        self, tokenizer: Tokenizer, plan: GenerationPlan, prompt_token_ids: Sequence[int], num_echoed_chars: int = 0
    ) -> None:
        rules = plan.text
        self.form = rules.form
        self._reader = None if rules.form is None else Reader(rules.form)
        self._detokenizer = tokenizer.detokenizer(
            rules.skip_special_tokens, prompt_token_ids, joins_special_tokens=rules.joins_special_tokens,
            shown=rules.form.marks if rules.form is not None else ())
        self._keeps_stop = rules.keeps_stop
        self._matcher = StopMatcher(rules.stops, keeps_stop=rules.keeps_stop) if rules.stops else None
        self._repetition = rules.repetition
        self._seen: list[int] = []
        """Tokens so far, where repetition is checked."""
        self._min_tokens = plan.params.min_tokens
        self._stop_tokens = plan.params.stop_token_ids
        self._with_logprobs = plan.params.logprobs is not None
        self._num_chars = num_echoed_chars
        self.num_tokens = 0
        """Tokens of the answer, a stop token included."""
        self.num_reasoning_tokens = 0
        """Those of its thoughts, with the mark behind them."""
        self.finish_reason: Finish | None = None
        self.stop_reason: int | str | None = None
        """The stop string that ended the choice, or the token, where the request named it."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice."""
        return None if self._matcher is None else self._matcher.matched

    def feed(self, event: TokenEvent) -> Delta:
        """Take one event. With a stop string found, ``finish_reason`` is set before the engine's own end."""
        delta = Delta("", None, [])
        if self.finish_reason is not None:
            return delta
        self._take_tokens(event, delta)
        if event.finish_reason is not None and self.finish_reason is None:
            self._end(event, event.finish_reason, delta)
        self._end_reading(delta)
        delta.finish_reason = self.finish_reason
        return delta

    def _take_tokens(self, event: TokenEvent, delta: Delta) -> None:
        last = len(event.tokens) - 1
        for at, token in enumerate(event.tokens):
            self.num_tokens += 1
            if self._reader is not None and self._reader.is_thinking:
                self.num_reasoning_tokens += 1
            delta.token_ids.append(token.token_id)
            if self._with_logprobs:
                delta.logprobs.append(token.logprobs)
                delta.text_offsets.append(self._num_chars)
            if at == last and event.stop_token_id is not None and not self._keeps_stop:
                return  # the token that stopped the choice is counted, but has no text
            piece = self._detokenizer.push(token.token_id)
            self._num_chars += len(piece)  # before the stop strings: text that they hold back belongs to its token
            self._emit(piece, delta)
            if self.finish_reason is None and (at < last or event.finish_reason is None):
                self._look_for_repetition(token.token_id, delta)
            if self.finish_reason is not None:
                return

    def _look_for_repetition(self, token_id: int, delta: Delta) -> None:
        if self._repetition is None:
            return
        self._seen.append(token_id)
        if self.num_tokens >= self._min_tokens and self._repetition.is_met(self._seen):
            self._flush(delta)
            self.finish_reason = self.finish_reason or "repetition"

    def _emit(self, piece: str, delta: Delta) -> None:
        # Stop strings count only from the token after the minimum; earlier text has been sent already.
        if self._matcher is not None and self.num_tokens > self._min_tokens:
            piece = self._matcher.push(piece)
            if self._matcher.matched is not None:
                self.finish_reason, self.stop_reason = "stop", self._matcher.matched
        delta.text += piece
        if self._reader is not None:
            delta.parts += self._reader.feed(piece)
            if self._reader.is_done and self.finish_reason is None:
                self.finish_reason = "stop"

    def _end_reading(self, delta: Delta) -> None:
        """Where the answer is over, read its rest; an answer that calls ends for that, unless its last call breaks
        off: then its arguments are no JSON, and the reason must not say that all is well."""
        if self._reader is None or self.form is None or self.finish_reason is None:
            return
        delta.parts += self._reader.end()
        if self._reader.num_calls and not self._reader.breaks_off and self.finish_reason == "stop":
            self.finish_reason = "function_call" if self.form.is_old else "tool_calls"

    def _end(self, event: TokenEvent, reason: FinishReason, delta: Delta) -> None:
        self._flush(delta)
        if self.finish_reason is None:
            self.finish_reason = "stop" if reason is FinishReason.STOP else "length"
            if event.stop_token_id in self._stop_tokens:
                self.stop_reason = event.stop_token_id

    def _flush(self, delta: Delta) -> None:
        """Release the held-back text at the end; it may contain a stop string."""
        self._emit(self._detokenizer.flush(), delta)
        if self._matcher is not None and self._matcher.matched is None:
            rest = self._matcher.flush()
            delta.text += rest
            if self._reader is not None:
                delta.parts += self._reader.feed(rest)
