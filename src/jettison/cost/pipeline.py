"""What a pipeline reaches of the throughput of its members on their own: assumed first, then measured.

Pure. Bubbles, hops and smaller steps all come together here; which of them it is, the bubble meter knows. The measure
compares microbatches with themselves: what each took a busy pipeline, against what the step-time fit of single
instances says of the same tokens.
"""

from __future__ import annotations

PRIOR_S = 2.0
"""The prior weighs as much as so many seconds of a busy pipeline."""

MEMORY_S = 30.0
"""So many busy seconds are remembered: merged times are short, and what is measured is to matter in the next one."""

BOUNDS = (0.3, 1.0)
"""Outside of them the step-time fit is wrong, not the pipeline."""


class PipelineEfficiency:
    """Of pipelines with a certain number of stages."""

    def __init__(self, prior: float) -> None:
        """``prior``: what holds until a pipeline has been seen."""
        self.is_measured = False
        self._separate_s = prior * PRIOR_S
        self._pipeline_s = PRIOR_S

    @property
    def value(self) -> float:
        """Throughput of N merged instances over that of N separate ones with the same batches."""
        return min(max(self._separate_s / self._pipeline_s, BOUNDS[0]), BOUNDS[1])

    def observe(self, separate_s: float, pipeline_s: float) -> None:
        """Add one microbatch that took a busy pipeline ``pipeline_s`` (from the end of the one before it to its own).

        ``separate_s``: the share of that time of N separate instances, which run N such batches at once.
        """
        self.is_measured = True
        self._separate_s += separate_s
        self._pipeline_s += pipeline_s
        if self._pipeline_s > MEMORY_S:
            self._separate_s *= MEMORY_S / self._pipeline_s
            self._pipeline_s = MEMORY_S
