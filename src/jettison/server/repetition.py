"""``repetition_detection``: whether the end of an answer repeats one pattern. Tokens in, yes or no out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jettison.server.errors import bad_request
from jettison.server.fields import RepetitionFields

MAX_PATTERN = 1024
MAX_COUNT = 1024


@dataclass(frozen=True, slots=True)
class Repetition:
    """An answer ends when its end is a pattern of ``min_size`` to ``max_size`` tokens, ``count`` times."""

    min_size: int
    max_size: int
    count: int

    def is_met(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens so far end in such a repetition."""
        num = len(token_ids)
        for size in range(self.min_size, min(self.max_size, num // self.count) + 1):
            # Repeated ``count`` times means: every token of the stretch is the one a pattern before it.
            if all(token_ids[-at] == token_ids[-at - size] for at in range(1, size * (self.count - 1) + 1)):
                return True
        return False


def plan_repetition(fields: RepetitionFields | None) -> Repetition | None:
    """The rule of a request; None where it has none. Raises ApiError 400."""
    if fields is None:
        return None
    small, large, count = fields.min_pattern_size, fields.max_pattern_size, fields.min_count
    if not 0 <= small <= large <= MAX_PATTERN:
        raise bad_request(
            f"repetition_detection: pattern sizes must be from 0 to {MAX_PATTERN}, the smallest no larger than the "
            "largest.", "repetition_detection")
    if large == 0:
        return None
    if not 2 <= count <= MAX_COUNT:
        raise bad_request(
            f"repetition_detection: min_count must be from 2 to {MAX_COUNT}.", "repetition_detection.min_count")
    return Repetition(max(1, small), large, count)
