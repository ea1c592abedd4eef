"""A server's speed in three numbers that can be measured of any server from outside.

Pure. ``live.experiments.overload`` measures the speed; ``simulate.calibrate`` serves at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jettison.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """Measured speed of one instance: a step takes base + per-request * decodes + prefill tokens / rate."""

    prefill_tokens_per_s: float
    decode_base_s: float
    decode_per_request_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.prefill_tokens_per_s > 0 and self.decode_base_s > 0 and self.decode_per_request_s >= 0):
            raise ConfigError("machine speed needs a prefill rate and a decode step above 0")

    @classmethod
    def from_points(cls, prefill_tokens_per_s: float, decode_steps: Sequence[tuple[int, float]]) -> MachineSpeed:
        """From decode steps measured at some batch sizes: (requests, seconds), a least-squares line through them."""
        if not decode_steps:
            raise ConfigError("at least one measured decode step is needed")
        batches = np.array([batch for batch, _ in decode_steps], dtype=np.float64)
        seconds = np.array([step_s for _, step_s in decode_steps], dtype=np.float64)
        if len(set(batches.tolist())) == 1:
            return cls(prefill_tokens_per_s, float(seconds.mean()), 0.0)
        slope, base = (float(value) for value in np.polyfit(batches, seconds, 1))
        if slope < 0 or base <= 0:  # noise, or a line through the origin: a flat or a proportional step
            slope = max(slope, 0.0)
            base = float(max((seconds - slope * batches).mean(), seconds.min() * 0.1))
        return cls(prefill_tokens_per_s, base, slope)

    def step_s(self, num_decodes: float, num_prefill_tokens: float) -> float:
        """Seconds of one step of one instance."""
        return (
            self.decode_base_s
            + self.decode_per_request_s * num_decodes
            + num_prefill_tokens / self.prefill_tokens_per_s
        )

    def slowed(self, factor: float) -> MachineSpeed:
        """A machine that takes ``factor`` times as long for everything."""
        return MachineSpeed(
            self.prefill_tokens_per_s / factor, self.decode_base_s * factor, self.decode_per_request_s * factor
        )
