"""What serving takes of the host's processors, beside the steps: measured constants, where processes share cores.

Where workers compute on a machine's own processors, controller and client run on the same cores. Steps are profiled
with nobody else computing (``HardwareProfile.cost``); these constants say what else is computed, by whom, and how much
slower a core is while others are busy. Measured by ``live.host_costs``, used by ``sim.processors``; docs/validation.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

_LONGEST_S = 0.999
"""Anything from a second on is no measurement of what serving takes."""

Shape = tuple[tuple[int, float], ...]
"""(tokens of a step, a factor) with growing numbers of tokens."""

LEAST_BENT, MOST_BENT = 0.2, 5.0
"""Of a shape's factors: beyond, they are no measurement."""


def num_busy_cores(costs: HostCosts, num_instances: int) -> int:
    """While all of so many instances compute."""
    return min(costs.num_cores, num_instances * costs.threads_per_worker)


def shape_at(shape: Shape, num_tokens: int) -> float:
    """Straight lines over the logarithm of the number of tokens, flat beyond the ends; 1 without any point."""
    if not shape:
        return 1.0
    at = math.log(max(1, num_tokens))
    above = next((i for i, (tokens, _) in enumerate(shape) if tokens >= num_tokens), len(shape) - 1)
    (tokens, factor), (before, factor_before) = shape[above], shape[max(0, above - 1)]
    if before >= tokens or num_tokens >= tokens:
        return factor
    share = (at - math.log(before)) / (math.log(tokens) - math.log(before))
    return factor_before + max(0.0, share) * (factor - factor_before)


def _is_shape(shape: Shape) -> bool:
    sizes = [tokens for tokens, _ in shape]
    grows = sizes == sorted(set(sizes)) and all(tokens >= 1 for tokens in sizes)
    return grows and all(LEAST_BENT <= factor <= MOST_BENT for _, factor in shape)


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds of one core's time, alone on it; the defaults are nothing at all, as on a cluster of accelerators."""

    num_cores: int = 0
    """That all processes share; 0: nobody shares."""
    core_speeds: tuple[float, ...] = ()
    """Entry i: the speed of each of i + 1 busy cores, while all serve, over that of one alone."""
    threads_per_worker: int = 1
    packs_wakes: bool = False
    """Threads that wake up do so on a busy core although another is idle."""
    step_factor: float = 1.0
    """What a step takes while serving over what it takes among other steps, as profiled: caches are colder."""
    step_shape: Shape = ()
    """(tokens of a step, what such a step takes beyond ``step_factor``): where the cost model's lines do not follow the
    machine. Sorted; see ``step_factor_of``."""
    crowded_shape: Shape = ()
    """(tokens of a step, how many times as long such a step takes while all cores are busy, beyond what
    ``core_speeds`` says of all steps)."""
    worker_step_s: float = 0.0
    """A worker, for each step: reading the command, telling the end."""
    worker_row_s: float = 0.0
    """The same, for each request in the step."""
    worker_stage_s: float = 0.0
    """The same, for a stage of a pipeline: taking or handing on an activation, and telling of it."""
    controller_step_s: float = 0.0
    """The controller, for each step: committing it and issuing the next."""
    controller_row_s: float = 0.0
    """The same, for each request in the step."""
    controller_stage_s: float = 0.0
    """The same, for each stage beyond the first: its command, and hearing that it has ended."""
    controller_request_s: float = 0.0
    """The server, for each request: from its first byte until the core has it."""
    controller_prompt_token_s: float = 0.0
    """The same, for each token of the prompt."""
    controller_end_s: float = 0.0
    """The server, at the end of each request."""
    controller_token_s: float = 0.0
    """The server, for each token that it sends to a client."""
    controller_tick_s: float = 0.0
    """One look of the monitor."""
    controller_scrape_s: float = 0.0
    """One answer to whoever asks for metrics."""
    client_request_s: float = 0.0
    """The load generator, for each request that it sends."""
    client_token_s: float = 0.0
    """The same, for each token that it receives."""
    client_wake_s: float = 0.0
    """The same, for hearing something when it has slept for a while."""
    client_scrape_s: float = 0.0
    """The same, for each reading of the metrics."""
    hop_s: float = 0.0
    """From one process's sending to another's waking up."""

    def __post_init__(self) -> None:
        times = [f.name for f in fields(self) if f.name.endswith("_s")]
        bad = [name for name in times if not 0.0 <= getattr(self, name) < 1.0]
        if bad:
            raise ValueError(f"times must be from 0 to 1 s: {', '.join(bad)}")
        if self.num_cores < 0 or self.threads_per_worker < 1:
            raise ValueError("num_cores must be >= 0 and threads_per_worker >= 1")
        if not 0.5 <= self.step_factor <= 3.0:
            raise ValueError(f"a step factor of {self.step_factor:g} is no measurement")
        for name in ("step_shape", "crowded_shape"):
            if not _is_shape(getattr(self, name)):
                said = f"factors from {LEAST_BENT:g} to {MOST_BENT:g} of growing numbers of tokens"
                raise ValueError(f"{name} needs {said}")
        if len(self.core_speeds) != self.num_cores or any(not 0.0 < speed <= 1.5 for speed in self.core_speeds):
            raise ValueError("core_speeds needs a speed in (0, 1.5] for each number of busy cores")

    def step_factor_of(self, num_tokens: int) -> float:
        """``step_factor`` of a step with so many tokens."""
        return self.step_factor * shape_at(self.step_shape, num_tokens)

    def crowded_factor_of(self, num_tokens: int) -> float:
        """``crowded_shape`` of a step with so many tokens."""
        return shape_at(self.crowded_shape, num_tokens)

    def with_controller(self, factor: float) -> HostCosts:
        """With all that controller and clients do taking ``factor`` times as long, up to a second each."""
        return replace(self, **{
            f.name: min(_LONGEST_S, factor * getattr(self, f.name))
            for f in fields(self) if f.name.startswith(("controller_", "client_"))
        })  # fmt: skip

    @property
    def is_shared(self) -> bool:
        """Processes compete for cores."""
        return self.num_cores > 0
