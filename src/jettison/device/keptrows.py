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

    def next_layer(self, step: StepInput) -> int:
        """The layer that is next for the rows that a step goes on with, its last ones. Raises RowsLostError where they
        are not here."""
        num_tokens = int(step.query_lens[step.sheds_from or 0 :].sum())
        is_here = self._step_id == step.resumes_step and num_tokens == self._num_tokens
        if not is_here or not step.layer_lo <= self._layer < step.layer_hi:
            raise RowsLostError(f"step {step.step_id}: the rows of step {step.resumes_step} are not kept here")
        return self._layer

    def keep_on(self, step_id: int) -> None:
        """Keep what is kept for another step."""
        self._step_id = step_id

    def take(self, residual: Tensor) -> None:
        """Fill the end of a residual stream [T, hidden] with the rows, which are kept no more."""
        self._step_id = None
        residual[len(residual) - self._num_tokens :].copy_(self._memory[: self._num_tokens])
