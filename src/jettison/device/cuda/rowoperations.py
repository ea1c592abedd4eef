"""The operations of a layer that need a step's rows, where the rows are on the card: ``RowOperations``.

Not here: the layer that they are operations of (``device.model.general_layer``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from jettison.device.cuda.rows import StepRows

if TYPE_CHECKING:
    from jettison.device.cuda.kernels import CudaKernels


class CardRowOperations:
    """They only launch, so graphs may hold them. Rows beyond the step's compute on whatever lies there, and are not
    stored."""

    def __init__(self, kernels: CudaKernels, rows: StepRows) -> None:
        self._kernels = kernels
        self._rows = rows

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See ``RowOperations``."""
        self._kernels.rotary(q, k, cos, sin, self._rows.positions)

    def store(self, k: Tensor, v: Tensor, arena: Tensor) -> None:
        """See ``RowOperations``."""
        self._kernels.write_rows(k, v, arena, self._rows)

    def attend(
        self, q: Tensor, arena: Tensor, out: Tensor, scale: float, lse: Tensor | None, window: int, softcap: float
    ) -> None:
        """See ``RowOperations``."""
        self._kernels.attend(q, arena, self._rows, out, scale, lse, window, softcap)

    def positions(self) -> Tensor:
        """See ``RowOperations``."""
        return self._rows.positions
