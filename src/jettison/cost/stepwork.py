"""The work of a step, as totals, and the part of a step that a time measures. Pure values.

Totals are whole numbers, so that adding rows in another order, or a step at a time, gives the same totals.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from typing import NamedTuple


class StepWork(NamedTuple):
    """The work of one microbatch."""

    num_rows: int
    """Chunks: requests that have tokens in it."""
    num_tokens: int
    num_pairs: int
    """Query-key pairs under the causal mask."""
    num_kv_tokens: int
    """Cached tokens that the chunks attend to."""
    num_copied_bytes: int = 0
    """Bytes that its workers copy to or from the host after the step before it: it begins when they are copied."""
    num_beside_bytes: int = 0
    """Bytes that its workers copy to or from the host while it runs: they cost it less, and have a coefficient of their
    own."""

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]]) -> StepWork:
        """The totals of chunks given as (tokens, cached tokens before them)."""
        rows = tokens = twice_pairs = kv_tokens = 0
        for num_tokens, num_context in chunks:
            rows += 1
            tokens += num_tokens
            twice_pairs += num_tokens * (2 * num_context + num_tokens + 1)
            kv_tokens += num_context
        return cls(rows, tokens, twice_pairs // 2, kv_tokens)

    @classmethod
    def decodes(cls, num_rows: int, num_kv_tokens: int) -> StepWork:
        """One token for each of ``num_rows`` requests, which have ``num_kv_tokens`` cached together."""
        return cls(num_rows, num_rows, num_kv_tokens + num_rows, num_kv_tokens)

    def with_prompt(self, num_tokens: int, num_context: int = 0) -> StepWork:
        """This work with one more chunk; unchanged where that has no tokens."""
        if num_tokens <= 0:
            return self
        pairs = num_tokens * (2 * num_context + num_tokens + 1) // 2
        return StepWork(
            self.num_rows + 1, self.num_tokens + num_tokens, self.num_pairs + pairs, self.num_kv_tokens + num_context,
            self.num_copied_bytes, self.num_beside_bytes,
        )


    def with_prompts(self, num_tokens: int, num_each: int | None = None, num_context: int = 0) -> StepWork:
        """This work with ``num_tokens`` more tokens in chunks of ``num_each`` (None: one chunk), each after
        ``num_context`` cached tokens."""
        if num_each is None or num_each >= num_tokens:
            return self.with_prompt(num_tokens, num_context)
        whole, rest = divmod(num_tokens, max(1, num_each))
        each = NOTHING.with_prompt(max(1, num_each), num_context)
        first = StepWork(*(a + whole * b for a, b in zip(self, each, strict=True)))
        return first.with_prompt(rest, num_context)


NOTHING = StepWork(0, 0, 0, 0)


class Measure(StrEnum):
    """The span that a time of a group measures."""

    STEP = "step"
    """From the issue of a step to its end, as the core sees them: all stages, hops, and waiting for earlier steps."""
    STAGE = "stage"
    """The compute time of one stage."""
    PERIOD = "period"
    """From the end of one microbatch of a pipeline to the end of the next, while the pipeline is full."""


class Part(NamedTuple):
    """The part of a step that a time measures."""

    measure: Measure = Measure.STEP
    num_stages: int = 1
    """Stages of the group: each number of stages has deviations of its own."""
    num_layers: int | None = None
    """Layers in the part; None: the whole model's, or for ``Measure.STAGE`` an equal share."""
    is_first: bool = True
    """Whether the part includes the embedding."""
    is_last: bool = True
    """Whether the part includes the head."""


LONE_STEP = Part()


@cache
def step_of(num_stages: int) -> Part:
    """The part that is a whole step of a group."""
    return Part(Measure.STEP, num_stages)


@cache
def period_of(num_stages: int) -> Part:
    """The part that is a busy pipeline's time from one microbatch to the next."""
    return Part(Measure.PERIOD, num_stages)


@cache
def last_stage_of(num_stages: int, num_layers: int | None = None) -> Part:
    """The part that is the sampling stage, of ``num_layers`` (None: an equal share)."""
    return Part(Measure.STAGE, num_stages, num_layers, is_first=num_stages == 1)
