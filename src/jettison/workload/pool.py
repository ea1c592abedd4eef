"""A batch beside a load: offline requests, drawn as they are sent, with a fixed number unfinished at any time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jettison.errors import ConfigError
from jettison.workload.lengths import LengthModel
from jettison.workload.rows import MAX_TOKENS

_AT_ONCE = 256
TENANT = "batch"


@dataclass(frozen=True, slots=True)
class OfflinePool:
    """Offline requests of one distribution. Without ``num_requests`` it has no end, and is sent for as long as the load
    lasts."""

    lengths: LengthModel
    unfinished: int | None = None
    """Requests in the system at any time: as one ends, the next is sent. None: all are sent at once."""
    num_requests: int | None = None
    max_input_tokens: int | None = None
    """Longer prompts are cut to this length; None: no limit."""
    max_output_tokens: int | None = None
    """Longer answers are cut to this length; None: no limit."""
    start_s: float = 0.0
    seed: int = 0
    completion_window_s: float | None = None
    """All requests are due so long after the start; None: no deadline."""
    tenant: str = TENANT

    def __post_init__(self) -> None:
        if self.unfinished is None and self.num_requests is None:
            raise ConfigError("an endless batch needs a number of unfinished requests")
        if self.completion_window_s is not None and self.num_requests is None:
            raise ConfigError("an endless batch has no completion window: give it a number of requests")
        for name in ("unfinished", "num_requests", "max_input_tokens", "max_output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"a batch's {name} must be at least 1, got {value}")

    def lengths_drawn(self) -> Iterator[tuple[int, int]]:
        """(input tokens, output tokens) of one request after another."""
        most_input, most_output = self.max_input_tokens or MAX_TOKENS, self.max_output_tokens or MAX_TOKENS
        rngs = [np.random.default_rng(child) for child in np.random.SeedSequence(self.seed).spawn(2)]
        left = self.num_requests
        while left is None or left > 0:
            # Always as many draws at once, so that a shorter batch is the beginning of a longer one.
            inputs, outputs = self.lengths.draw(rngs[0], rngs[1], _AT_ONCE)
            cut = np.minimum(inputs, most_input), np.minimum(outputs, most_output)
            drawn = list(zip(cut[0].tolist(), cut[1].tolist(), strict=True))
            yield from drawn[:left]
            left = None if left is None else left - len(drawn)

    def describe(self) -> str:
        """One line for the notes of a run."""
        limits = {"prompts": self.max_input_tokens, "answers": self.max_output_tokens}
        cut = "".join(f", {what} cut to {most:,} tokens" for what, most in limits.items() if most is not None)
        how_many = "an endless batch" if self.num_requests is None else f"a batch of {self.num_requests:,} requests"
        at_once = "all at once" if self.unfinished is None else f"{self.unfinished} unfinished at any time"
        due = "" if self.completion_window_s is None else f", due within {self.completion_window_s:g} s"
        return f"beside it {how_many}, {at_once}, from {self.start_s:g} s{due}: {self.lengths.describe()}{cut}"
