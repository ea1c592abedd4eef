"""How long offline answers are: of late, and those of each batch, by which what is left of it is foreseen.

A batch is known here by its tenant and its deadline: lines of one have the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jettison.core.requests import RequestState
from jettison.core.serving.virtualtokens import BatchKey, key_of

MOST_BATCHES = 256
"""That are remembered, the last ones."""

MEAN_OF_LAST = 200
"""Answers."""


@dataclass(slots=True)
class OfflineAnswers:
    """Fed with each offline request that is accepted, and as it has ended."""

    has_deadlines: bool = False
    """A request has come that has one."""
    _of_batch: dict[BatchKey, tuple[int, int]] = field(default_factory=dict)
    """(answers, their tokens)."""
    _num: int = 0
    _mean_tokens: float = 0.0
    _mean_longest: float = 0.0

    def note_accepted(self, state: RequestState) -> None:
        """An offline request has come."""
        if state.request.deadline_ns is not None:
            self.has_deadlines = True

    def note_end(self, state: RequestState) -> None:
        """It has its answer."""
        key, longest = key_of(state), state.request.params.max_tokens
        num, tokens = self._of_batch.pop(key, (0, 0))
        self._of_batch[key] = num + 1, tokens + state.num_output
        if len(self._of_batch) > MOST_BATCHES:
            del self._of_batch[next(iter(self._of_batch))]
        self._num = min(self._num + 1, MEAN_OF_LAST)
        self._mean_tokens += (state.num_output - self._mean_tokens) / self._num
        self._mean_longest += (longest - self._mean_longest) / self._num

    def of_batch(self, key: BatchKey) -> tuple[int, int]:
        """(answers, their tokens) so far."""
        return self._of_batch.get(key, (0, 0))

    def usual_tokens(self, longest: float) -> float:
        """Of an answer that may have so many: as answers were of late, in tokens or in the part of what they might have
        had, whichever is more. All that it may have, while none has been seen."""
        if not self._num:
            return longest
        part = self._mean_tokens / self._mean_longest if self._mean_longest else 1.0
        return min(longest, max(self._mean_tokens, part * longest))
