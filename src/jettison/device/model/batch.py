"""The rows of a step as layers see them: lengths and tables, and the operations that depend on them.

Not here: layers (``decoder``, ``general_layer``), and rows where a card has them (``device.cuda.rows``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from jettison.device.kernels.base import Kernels
from jettison.device.kernels.operands import LayerConstants, LayerWeights
from jettison.device.model.workspace import StepBuffers
from jettison.device.remote import RemoteParts
from jettison.device.step import Int32s


class RowOperations(Protocol):
    """What depends on a step's rows, where the device has them."""

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """``Kernels.rotary`` at the tokens' positions."""
        ...

    def store(self, k: Tensor, v: Tensor, arena: Tensor) -> None:
        """``Kernels.write_kv``."""
        ...

    def attend(
        self, q: Tensor, arena: Tensor, out: Tensor, scale: float, lse: Tensor | None, window: int, softcap: float
    ) -> None:
        """``Kernels.attention``."""
        ...

    def positions(self) -> Tensor:
        """Of the tokens, [T], where tensors are."""
        ...


class Batch(NamedTuple):
    """The rows and positions of a step's tokens. R rows, T tokens, one row after the other."""

    query_lens: Int32s
    """[R]"""
    context_lens: Int32s
    """[R]"""
    block_tables: Int32s
    """[R, max_blocks]"""
    positions: Int32s
    """[T]"""
    remote: RemoteParts | None = None
    """Rows with KV at other workers in some layers."""
    attend: Callable[[LayerWeights, StepBuffers, LayerConstants], None] | None = None
    """``Kernels.attend_layer`` for these rows, from where the back end has put them; None: from the arrays here."""
    rows: RowOperations | None = None
    """The single operations of a layer that need rows, likewise."""

    def leading(self, num_rows: int, num_tokens: int) -> Batch:
        """Its first rows, which have so many tokens, with their arrays here and no KV elsewhere."""
        return Batch(
            self.query_lens[:num_rows], self.context_lens[:num_rows], self.block_tables[:num_rows],
            self.positions[:num_tokens],
        )


class HostRowOperations:
    """On the arrays of a batch."""

    def __init__(self, kernels: Kernels, batch: Batch) -> None:
        self._kernels = kernels
        self._batch = batch
        self._rows = batch.block_tables, batch.query_lens, batch.context_lens

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See ``RowOperations``."""
        self._kernels.rotary(q, k, cos, sin, self._batch.positions)

    def store(self, k: Tensor, v: Tensor, arena: Tensor) -> None:
        """See ``RowOperations``."""
        self._kernels.write_kv(k, v, arena, *self._rows)

    def attend(
        self, q: Tensor, arena: Tensor, out: Tensor, scale: float, lse: Tensor | None, window: int, softcap: float
    ) -> None:
        """See ``RowOperations``."""
        self._kernels.attention(q, arena, *self._rows, out, scale, lse, window=window, softcap=softcap)

    def positions(self) -> Tensor:
        """See ``RowOperations``."""
        return torch.from_numpy(np.ascontiguousarray(self._batch.positions))
