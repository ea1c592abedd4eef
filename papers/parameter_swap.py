"""Parameter swapping, KunServe v1's counter-example (section 2.3): part of the layers live in host memory.

They are streamed in over the host link at every step, ahead of the layers that need them, while the others compute: a
step takes its own time or the copy's, whichever is longer, and a full copy where there is nothing to hide behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jettison.sim.executor import Executor, StageShape, StepLoad
from jettison.types import NANOSECONDS, WorkerId


@dataclass(frozen=True, slots=True)
class StreamedParameters:
    """An executor whose steps wait for the layers that are streamed in."""

    inner: Executor
    copy_s: float
    """Of all streamed layers, each step, by an instance that runs every layer."""
    num_layers: int

    def stage_ns(self, worker_id: WorkerId, number: int, load: StepLoad, stage: StageShape) -> int:
        """See ``sim.executor.Executor``."""
        return max(self.inner.stage_ns(worker_id, number, load, stage), self._copy_ns(stage))

    def decode_ns(
        self, worker_id: WorkerId, number: int, load: StepLoad, stage: StageShape, count: int
    ) -> npt.NDArray[np.int64]:
        """See ``sim.executor.Executor``."""
        return np.maximum(self.inner.decode_ns(worker_id, number, load, stage, count), self._copy_ns(stage))

    def attention_ns(self, num_kv_tokens: int, num_rows: int) -> int:
        """See ``sim.executor.Executor``."""
        return self.inner.attention_ns(num_kv_tokens, num_rows)

    def _copy_ns(self, stage: StageShape) -> int:
        return round(self.copy_s * stage.num_layers / self.num_layers * NANOSECONDS)
