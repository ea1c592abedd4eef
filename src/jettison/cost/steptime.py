"""Step time learned while serving: t = a + b * tokens + c * KV tokens read.

Pure. A recursive least-squares fit with forgetting over the steps of one group; enough to tell a queue that waits for
compute from one that waits for memory. It learns what serving adds to a step (other workers, the core, queues in a
pipeline), which no profile knows; until it has seen enough, the profiled model (``cost.model``) answers where there
is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jettison.cost.model import CostModel

TOKENS, KV_TOKENS = 1e2, 1e4
"""Units that make the terms of usual steps of one order of magnitude."""

NOTHING = 1e-17
"""A weight below the last bit of a sum in which the newest step weighs 1."""


@dataclass(frozen=True, slots=True)
class StepTimePrior:
    """What a profile says of steps that nobody has seen yet."""

    cost: CostModel
    num_stages: int

    def predict_s(self, num_tokens: int, num_kv_tokens: int) -> float:
        """Seconds from the first stage's start to the last one's end."""
        return self.cost.aggregate_cost_s(num_tokens, num_kv_tokens, self.num_stages)


class StepTimeModel:
    """Online fit of seconds per step. Until the fit is determined, predictions are the prior's, or None.

    ``observe`` only notes the step: sums are formed when a prediction is asked for, which is seldom beside the steps.
    """

    def __init__(self, forgetting: float = 0.995, prior: StepTimePrior | None = None) -> None:
        self._prior = prior
        self._forgetting = forgetting
        self._most_pending = math.ceil(math.log(NOTHING) / math.log(forgetting)) if forgetting < 1.0 else None
        """Older steps than so many weigh nothing beside the newest (None: every step counts for ever)."""
        self._pending: list[tuple[int, int, float]] = []
        """(tokens, KV tokens, seconds) of steps that are not in the sums yet, oldest first."""
        # Upper half of sum(x x^T), and sum(x seconds), for x = (1, tokens, KV tokens) in usual units.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._moments = (0.0, 0.0, 0.0)
        self._coefficients: tuple[float, float, float] | None = None
        self._num_observations = 0

    def observe(self, num_tokens: int, num_kv_tokens: int, seconds: float) -> None:
        """Add one finished step of ``num_tokens`` tokens that attended to ``num_kv_tokens`` cached tokens."""
        self._pending.append((num_tokens, num_kv_tokens, seconds))
        self._num_observations += 1
        self._coefficients = None
        if self._most_pending is not None and len(self._pending) >= 2 * self._most_pending:
            self._sums, self._moments = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0)
            del self._pending[: -self._most_pending]

    def _add_pending(self) -> None:
        keep = self._forgetting
        s00, s01, s02, s11, s12, s22 = self._sums
        m0, m1, m2 = self._moments
        for num_tokens, num_kv_tokens, seconds in self._pending:
            tokens, kv_tokens = num_tokens / TOKENS, num_kv_tokens / KV_TOKENS
            s00, s01, s02 = keep * s00 + 1.0, keep * s01 + tokens, keep * s02 + kv_tokens
            s11, s12, s22 = keep * s11 + tokens * tokens, keep * s12 + tokens * kv_tokens, keep * s22 + kv_tokens**2
            m0, m1, m2 = keep * m0 + seconds, keep * m1 + tokens * seconds, keep * m2 + kv_tokens * seconds
        self._sums = (s00, s01, s02, s11, s12, s22)
        self._moments = (m0, m1, m2)
        self._pending.clear()

    def _fit(self) -> tuple[float, float, float]:
        """Least squares with a little ridge, which steps that are all alike need; no part takes negative time."""
        self._add_pending()
        s00, s01, s02, s11, s12, s22 = self._sums
        ridge = 1e-9 * (s00 + s11 + s22)
        matrix = [[s00 + ridge, s01, s02], [s01, s11 + ridge, s12], [s02, s12, s22 + ridge]]
        a, b, c = solve(matrix, list(self._moments))
        return max(a, 0.0), max(b, 0.0), max(c, 0.0)

    def predict_s(self, num_tokens: int, num_kv_tokens: int) -> float | None:
        """Seconds of such a step; while fewer than 8 steps were seen, what the prior says, or None without one."""
        if self._num_observations < 8:
            return None if self._prior is None else self._prior.predict_s(num_tokens, num_kv_tokens)
        if self._coefficients is None:
            self._coefficients = self._fit()
        a, b, c = self._coefficients
        return a + num_tokens / TOKENS * b + num_kv_tokens / KV_TOKENS * c

    def prefill_tokens_per_s(self, max_num_tokens: int, num_decodes: int, num_kv_tokens: int) -> float | None:
        """Prefill rate when every step is filled up to the token budget beside ``num_decodes`` decodes."""
        seconds = self.predict_s(max_num_tokens, num_kv_tokens)
        if seconds is None or seconds <= 0.0:
            return None
        return max(1, max_num_tokens - num_decodes) / seconds


def solve(matrix: list[list[float]], values: list[float]) -> list[float]:
    """``x`` with ``matrix @ x = values``, by elimination with partial pivoting; for a handful of unknowns.

    Raises ZeroDivisionError for a singular matrix. Both arguments are used up.
    """
    size = len(values)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        values[column], values[pivot] = values[pivot], values[column]
        for row in range(column + 1, size):
            factor = matrix[row][column] / matrix[column][column]
            if factor:
                for k in range(column + 1, size):
                    matrix[row][k] -= factor * matrix[column][k]
                values[row] -= factor * values[column]
    for row in reversed(range(size)):
        known = sum(matrix[row][k] * values[k] for k in range(row + 1, size))
        values[row] = (values[row] - known) / matrix[row][row]
    return values
