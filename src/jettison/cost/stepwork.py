"""What a step computes, as totals, and which part of a group's way through it a time is of. Pure values.

Totals are whole numbers, so that adding up rows in another order, or a step at a time, gives the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from typing import NamedTuple


class StepWork(NamedTuple):
    """One microbatch."""

    num_rows: int
    """Chunks: requests that have tokens in it."""
    num_tokens: int
    num_pairs: int
    """Query-key pairs under the causal mask."""
    num_kv_tokens: int
    """Cached tokens that the chunks attend to."""
    num_copied_bytes: int = 0
    """To or from the host, on its workers, behind the step before it: it begins when they are copied."""
    num_beside_bytes: int = 0
    """Likewise, while it runs: they cost it less, and other than those that it waits for."""

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]], num_copied_bytes: int = 0) -> StepWork:
        """Add (tokens, cached tokens before them) of chunks up."""
        rows = tokens = twice_pairs = kv_tokens = 0
        for num_tokens, num_context in chunks:
            rows += 1
            tokens += num_tokens
            twice_pairs += num_tokens * (2 * num_context + num_tokens + 1)
            kv_tokens += num_context
        return cls(rows, tokens, twice_pairs // 2, kv_tokens, num_copied_bytes)

    @classmethod
    def decodes(cls, num_rows: int, num_kv_tokens: int) -> StepWork:
        """One token for each of ``num_rows`` requests, which have ``num_kv_tokens`` cached together."""
        return cls(num_rows, num_rows, num_kv_tokens + num_rows, num_kv_tokens)

    def with_prompt(self, num_tokens: int, num_context: int = 0) -> StepWork:
        """And one chunk more; none where it has no tokens."""
        if num_tokens <= 0:
            return self
        pairs = num_tokens * (2 * num_context + num_tokens + 1) // 2
        return StepWork(
            self.num_rows + 1, self.num_tokens + num_tokens, self.num_pairs + pairs, self.num_kv_tokens + num_context,
            self.num_copied_bytes, self.num_beside_bytes,
        )


    def with_prompts(self, num_tokens: int, num_each: int | None = None, num_context: int = 0) -> StepWork:
        """And chunks of ``num_each`` tokens (None: one chunk), ``num_tokens`` of them together, each behind so many."""
        if num_each is None or num_each >= num_tokens:
            return self.with_prompt(num_tokens, num_context)
        whole, rest = divmod(num_tokens, max(1, num_each))
        each = NOTHING.with_prompt(max(1, num_each), num_context)
        first = StepWork(*(a + whole * b for a, b in zip(self, each, strict=True)))
        return first.with_prompt(rest, num_context)


NOTHING = StepWork(0, 0, 0, 0)


class Measure(StrEnum):
    """Which of a group's times."""

    STEP = "step"
    """From the issue of a step to its end, as the core sees them: all stages, hops, and waiting for those before it."""
    STAGE = "stage"
    """What one stage computes."""
    PERIOD = "period"
    """From the end of one microbatch of a pipeline to that of the next, with all places of the pipeline taken."""


class Part(NamedTuple):
    """What a time is of."""

    measure: Measure = Measure.STEP
    num_stages: int = 1
    """Of the group: each number of stages has adjustments of its own."""
    num_layers: int | None = None
    """Of a range of layers; None: the whole model's, or for ``Measure.STAGE`` an equal share."""
    is_first: bool = True
    """The embedding is in it."""
    is_last: bool = True
    """The head is in it."""


LONE_STEP = Part()


@cache
def step_of(num_stages: int) -> Part:
    """A step of a group."""
    return Part(Measure.STEP, num_stages)


@cache
def period_of(num_stages: int) -> Part:
    """A busy pipeline's time from one microbatch to the next."""
    return Part(Measure.PERIOD, num_stages)


@cache
def last_stage_of(num_stages: int, num_layers: int | None = None) -> Part:
    """The stage that samples, of ``num_layers`` (None: an equal share)."""
    return Part(Measure.STAGE, num_stages, num_layers, is_first=num_stages == 1)
