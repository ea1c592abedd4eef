"""Rows that a step has shed at a safepoint: their hidden states, until a step goes on with them.

One place a device, in its workspace: rows that are kept take that of those before them, which no step goes on with any
more. What they are behind of is whole layers, as between two stages, so no bit depends on where they stopped.

Not here: which rows a step sheds, and when (``core.serving.slices``).
"""

from __future__ import annotations

from torch import Tensor

from jettison.device.step import StepInput
from jettison.errors import RowsLostError


class KeptRows:
    """Of one device."""

    def __init__(self, memory: Tensor) -> None:
        """``memory``: [tokens, hidden]."""
        self._memory = memory
        self._step_id: int | None = None
        self._num_tokens = self._layer = 0

    def keep(self, step_id: int, layer: int, residual: Tensor) -> None:
        """Keep a copy of a residual stream [T, hidden] that has everything before ``layer`` added."""
        self._step_id, self._layer, self._num_tokens = step_id, layer, len(residual)
        self._memory[: len(residual)].copy_(residual)

    def take(self, step: StepInput, out: Tensor) -> int:
        """Fill ``out`` [T, hidden] with the rows that a step goes on with; returns the layer that is next. Raises
        RowsLostError where they are not here."""
        is_here = self._step_id == step.resumes_step and len(out) == self._num_tokens
        if not is_here or not step.layer_lo <= self._layer < step.layer_hi:
            raise RowsLostError(f"step {step.step_id}: the rows of step {step.resumes_step} are not kept here")
        self._step_id = None
        out.copy_(self._memory[: len(out)])
        return self._layer
