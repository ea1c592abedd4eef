"""Step time learned while serving: t = a + b * tokens + c * KV tokens read.

Pure. A recursive least-squares fit with forgetting over the steps of one group; enough to tell a queue that waits for
compute from one that waits for memory. It learns what serving adds to a step (other workers, the core, queues in a
pipeline), which no profile knows; until it has seen enough, the profiled model (``cost.model``) answers where there
is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jettison.cost.model import CostModel


@dataclass(frozen=True, slots=True)
class StepTimePrior:
    """What a profile says of steps that nobody has seen yet."""

    cost: CostModel
    num_stages: int

    def predict_s(self, num_tokens: int, num_kv_tokens: int) -> float:
        """Seconds from the first stage's start to the last one's end."""
        return self.cost.aggregate_cost_s(num_tokens, num_kv_tokens, self.num_stages)


class StepTimeModel:
    """Online fit of seconds per step. Until the fit is determined, predictions are the prior's, or None."""

    def __init__(self, forgetting: float = 0.995, prior: StepTimePrior | None = None) -> None:
        self._prior = prior
        self._forgetting = forgetting
        self._normal: npt.NDArray[np.float64] = np.zeros((3, 3))
        self._moment: npt.NDArray[np.float64] = np.zeros(3)
        self._coefficients: npt.NDArray[np.float64] | None = None
        self._num_observations = 0

    def observe(self, num_tokens: int, num_kv_tokens: int, seconds: float) -> None:
        """Add one finished step of ``num_tokens`` tokens that attended to ``num_kv_tokens`` cached tokens."""
        x = np.array([1.0, num_tokens / 1e2, num_kv_tokens / 1e4])
        self._normal = self._forgetting * self._normal + np.outer(x, x)
        self._moment = self._forgetting * self._moment + x * seconds
        self._num_observations += 1
        self._coefficients = None

    def predict_s(self, num_tokens: int, num_kv_tokens: int) -> float | None:
        """Seconds of such a step; while fewer than 8 steps were seen, what the prior says, or None without one."""
        if self._num_observations < 8:
            return None if self._prior is None else self._prior.predict_s(num_tokens, num_kv_tokens)
        if self._coefficients is None:
            ridge = 1e-9 * float(np.trace(self._normal)) * np.eye(3)
            self._coefficients = np.maximum(np.linalg.solve(self._normal + ridge, self._moment), 0.0)
        x = np.array([1.0, num_tokens / 1e2, num_kv_tokens / 1e4])
        return float(x @ self._coefficients)

    def prefill_tokens_per_s(self, max_num_tokens: int, num_decodes: int, num_kv_tokens: int) -> float | None:
        """Prefill rate when every step is filled up to the token budget beside ``num_decodes`` decodes."""
        seconds = self.predict_s(max_num_tokens, num_kv_tokens)
        if seconds is None or seconds <= 0.0:
            return None
        return max(1, max_num_tokens - num_decodes) / seconds
