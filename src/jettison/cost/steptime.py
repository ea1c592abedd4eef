"""Step time learned while serving: t = a + b * tokens + c * KV tokens read.

Pure. A recursive least-squares fit with forgetting over the steps of one group; enough to tell a queue that waits for
compute from one that waits for memory. It learns what serving adds to a step (other workers, the core, queues in a
pipeline), which no profile knows; until it has seen enough, the profiled model (``cost.model``) answers where there
is one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from jettison.cost.model import CostModel
from jettison.types import NANOSECONDS, GroupId

MEMORY_STEPS = 8192
"""Older observations weigh less than a rounding error (0.995 to this power), so they need not be folded in."""

MAX_NOTED = 8 * MEMORY_STEPS
"""Observations that are kept before the oldest are let go."""


@dataclass(frozen=True, slots=True)
class StepTimePrior:
    """What a profile says of steps that no group has run yet."""

    cost: CostModel
    num_stages: int

    def predict_s(self, num_tokens: int, num_kv_tokens: int) -> float:
        """Seconds from the first stage's start to the last one's end."""
        return self.cost.aggregate_cost_s(num_tokens, num_kv_tokens, self.num_stages)


class Run(NamedTuple):
    """Steps of one group with the same rows, one after the other; usually one."""

    times_ns: Sequence[int]
    """When the first was issued, and when each ended; the next was issued then."""
    group_id: GroupId
    num_tokens: int
    """Of each step."""
    num_kv_tokens: int
    """Cached tokens that the first attended to; each attends to ``num_tokens`` more than the one before."""


class StepTimeModel:
    """Online fit of seconds per step. Until the fit is determined, predictions are the prior's, or None.

    Steps are only noted; a question has them folded in, in order of time and group. So groups that share a fit may
    tell of their steps late, as long as they do before the next question.
    """

    def __init__(self, forgetting: float = 0.995, prior: StepTimePrior | None = None) -> None:
        self._prior = prior
        self._forgetting = forgetting
        self._sums = (0.0,) * 9
        """Of 1, u, v, u u, u v, v v, y, u y, v y, where u and v are scaled tokens and KV tokens, y seconds."""
        self._coefficients: tuple[float, float, float] | None = None
        self._num_observations = 0
        self._runs: list[Run] = []
        self._num_noted = 0
        self._ended_ns = 0

    def observe(self, num_tokens: int, num_kv_tokens: int, seconds: float) -> None:
        """Add one finished step of ``num_tokens`` tokens that attended to ``num_kv_tokens`` cached tokens.

        For those who have no times: as if steps had followed each other.
        """
        begun_ns, self._ended_ns = self._ended_ns, self._ended_ns + round(seconds * NANOSECONDS)
        self.observe_run(num_tokens, num_kv_tokens, (begun_ns, self._ended_ns), 0)

    def observe_run(self, num_tokens: int, num_kv_tokens: int, times_ns: Sequence[int], group_id: GroupId) -> None:
        """Add steps of a group that followed each other (``Run``)."""
        self._runs.append(Run(times_ns, group_id, num_tokens, num_kv_tokens))
        self._num_observations += len(times_ns) - 1
        self._num_noted += len(times_ns) - 1
        if self._num_noted > MAX_NOTED:
            self._forget()

    def _forget(self) -> None:
        """Let runs go that are older than enough others."""
        self._runs.sort(key=lambda run: -run.times_ns[0])
        starts = [-run.times_ns[0] for run in self._runs]
        later = [0, *accumulate(len(run.times_ns) - 1 for run in self._runs)]
        self._runs = [run for run in self._runs if later[bisect_left(starts, -run.times_ns[-1])] < MEMORY_STEPS]
        self._num_noted = sum(len(run.times_ns) - 1 for run in self._runs)

    def predict_s(self, num_tokens: int, num_kv_tokens: int) -> float | None:
        """Seconds of such a step; while fewer than 8 steps were seen, what the prior says, or None without one."""
        if self._num_observations < 8:
            return None if self._prior is None else self._prior.predict_s(num_tokens, num_kv_tokens)
        if self._runs or self._coefficients is None:
            self._fold()
            self._coefficients = self._solve()
        fixed, token, kv = self._coefficients
        return fixed + token * (num_tokens / 1e2) + kv * (num_kv_tokens / 1e4)

    def _fold(self) -> None:
        keep = self._forgetting
        one, u1, v1, uu, uv, vv, y1, uy, vy = self._sums
        for _, _, num_tokens, num_kv_tokens, y in self._steps()[-MEMORY_STEPS:]:
            u, v = num_tokens / 1e2, num_kv_tokens / 1e4
            one, u1, v1 = keep * one + 1.0, keep * u1 + u, keep * v1 + v
            uu, uv, vv = keep * uu + u * u, keep * uv + u * v, keep * vv + v * v
            y1, uy, vy = keep * y1 + y, keep * uy + u * y, keep * vy + v * y
        self._sums = one, u1, v1, uu, uv, vv, y1, uy, vy
        self._runs.clear()
        self._num_noted = 0

    def _steps(self) -> list[tuple[int, GroupId, int, int, float]]:
        """(end, group, tokens, KV tokens, seconds) of what was noted, in order; as noted where all that is equal."""
        steps: list[tuple[int, GroupId, int, int, float]] = []
        for times_ns, group_id, num_tokens, num_kv_tokens in self._runs:
            for number, (begin_ns, end_ns) in enumerate(pairwise(times_ns)):
                kv_tokens = num_kv_tokens + number * num_tokens
                steps.append((end_ns, group_id, num_tokens, kv_tokens, (end_ns - begin_ns) / NANOSECONDS))
        steps.sort(key=lambda step: step[:2])
        return steps

    def _solve(self) -> tuple[float, float, float]:
        one, u1, v1, uu, uv, vv, y1, uy, vy = self._sums
        ridge = 1e-9 * (one + uu + vv)
        normal = np.array([[one + ridge, u1, v1], [u1, uu + ridge, uv], [v1, uv, vv + ridge]])
        found = np.maximum(np.linalg.solve(normal, np.array([y1, uy, vy])), 0.0)
        fixed, token, kv = found.tolist()
        return fixed, token, kv

    def prefill_tokens_per_s(
        self, max_num_tokens: int, num_decodes: int, num_kv_tokens: int, num_stages: int = 1
    ) -> float | None:
        """Prefill rate when every step is filled up to the token budget beside the group's decodes.

        A step's time is its way through all stages, and as many steps as stages are under way at once, each with its
        share of the decodes and of the KV that is read (Little's law).
        """
        seconds = self.predict_s(max_num_tokens, num_kv_tokens // num_stages)
        if seconds is None or seconds <= 0.0:
            return None
        return num_stages * max(1, max_num_tokens - num_decodes // num_stages) / seconds

