"""How long offline answers are: of late, and of each batch, from which the rest of that batch is predicted.

A batch is known here by its tenant and its deadline: lines of one have the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jettison.core.requests import RequestState
from jettison.core.serving.virtualtokens import BatchKey, key_of

MOST_BATCHES = 256
"""Batches that are remembered, the last ones."""

MEAN_OF_LAST = 200
"""Answers that the means remember."""


@dataclass(slots=True)
class OfflineAnswers:
    """Lengths of offline answers; fed with each offline request when it is accepted and when it has ended."""

    has_deadlines: bool = False
    """A request with a deadline has come."""
    _of_batch: dict[BatchKey, tuple[int, int]] = field(default_factory=dict)
    """(answers, their tokens)."""
    _num: int = 0
    _mean_tokens: float = 0.0
    _mean_longest: float = 0.0

    def note_accepted(self, state: RequestState) -> None:
        """Note of an offline request that was accepted whether it has a deadline: ``has_deadlines`` stays True after
        one."""
        if state.request.deadline_ns is not None:
            self.has_deadlines = True

    def note_end(self, state: RequestState) -> None:
        """Count the answer of an offline request, in its batch and in the means over the last ones: its tokens, and the
        most that it may have had. Beyond ``MOST_BATCHES``, the batch that has had no answer for longest is
        forgotten."""
        key, longest = key_of(state), state.request.params.max_tokens
        num, tokens = self._of_batch.pop(key, (0, 0))
        self._of_batch[key] = num + 1, tokens + state.num_output
        if len(self._of_batch) > MOST_BATCHES:
            del self._of_batch[next(iter(self._of_batch))]
        self._num = min(self._num + 1, MEAN_OF_LAST)
        self._mean_tokens += (state.num_output - self._mean_tokens) / self._num
        self._mean_longest += (longest - self._mean_longest) / self._num

    def of_batch(self, key: BatchKey) -> tuple[int, int]:
        """(answers, their tokens) of a batch so far; (0, 0) where it has none, or was forgotten."""
        return self._of_batch.get(key, (0, 0))

    def usual_tokens(self, longest: float) -> float:
        """Expected tokens of an answer that may have ``longest``: the recent mean in tokens or the recent mean share of
        the longest lengths, whichever gives more, and never more than ``longest``. ``longest`` while no answer has been
        seen."""
        if not self._num:
            return longest
        part = self._mean_tokens / self._mean_longest if self._mean_longest else 1.0
        return min(longest, max(self._mean_tokens, part * longest))
