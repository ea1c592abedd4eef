"""A step's rows as a card reads them: laid out on the host as the host's kernels check them, and padded to a graph's
size.

Padding has no work, no place in the cache and the token 0: its rows compute on whatever lies in the buffers, and no
other row sees it.

Not here: the list of work (``worklist``), copies (``staging``), sampling. No Triton.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jettison.device.cuda.tiles import Tile
from jettison.device.cuda.worklist import HEADER_WORDS, ITEM_WORDS, WorkShape, fill_places, fill_work, num_words
from jettison.device.kernels.operands import Int32Array
from jettison.device.kernels.torch_kernels import check_rows

if TYPE_CHECKING:
    from jettison.device.cuda.card import Card
    from jettison.device.step import StepInput  # which brings msgspec: a bare GPU machine lacks it

BUCKETS = [1, 2, 4, 8, *range(16, 257, 16)]
"""Rows of the steps of which graphs are made."""

NOWHERE = -1
"""The slot of a token with no place in the cache."""

Arrays = dict[str, npt.NDArray[Any]]


class StepRows(NamedTuple):
    """The rows of a step on the device, which its layers read instead of lengths on the host."""

    tables: Tensor
    """int32 [R, max_blocks]"""
    positions: Tensor
    """int32 [T]"""
    slots: Tensor
    """int32 [T]: where keys and values go (``worklist.fill_places``); negative: nowhere."""
    work: Tensor
    """int32: ``worklist.fill_work`` for ``tile``."""
    tile: Tile
    only_context: bool = False


class HostRows(NamedTuple):
    """``StepRows`` before they are copied."""

    tables: npt.NDArray[np.integer]
    positions: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    work: npt.NDArray[np.int32]
    shape: WorkShape
    only_context: bool

    def arrays(self) -> Arrays:
        """What has to be copied, by name; the tables last, as their width goes with the longest context."""
        return {"positions": self.positions, "slots": self.slots, "work": self.work, "tables": self.tables}

    def padded(self, num_rows: int) -> HostRows:
        """Rows of one token each with padding up to ``num_rows``, so that ``positions`` and ``slots`` of all such rows
        have the same shapes, and ``work``, which says its own length, the same place behind them. Tables stay."""
        return self._replace(
            positions=padded(self.positions, num_rows, 0), slots=padded(self.slots, num_rows, NOWHERE)
        )

    def on_card(self, copied: Mapping[str, Tensor], tables: Tensor | None = None) -> StepRows:
        """The rows from what the arrays became. ``tables``: where else the tables lie."""
        positions, slots, work, copied_tables = (copied[name] for name in self.arrays())
        return StepRows(
            copied_tables if tables is None else tables, positions, slots, work, self.shape.tile, self.only_context
        )


class DecodeTables:
    """Block tables of decode steps at one place of a card, whatever their width, as graphs read them there.

    What is right of a row's blocks, or below the rows, is left of other steps: no work names it.
    """

    def __init__(self, card: Card, max_model_len: int) -> None:
        """It takes memory when it is first used."""
        self._card = card
        self._max_model_len = max_model_len
        self._there: Tensor | None = None

    def put(self, tables: Tensor, bucket: int, block_size: int) -> Tensor:
        """Launch a copy of ``tables`` [rows, width], on the card, to the start of the place; returns ``bucket`` rows of
        it, [bucket, blocks of the longest context]."""
        if self._there is None:
            shape = BUCKETS[-1], -(-self._max_model_len // block_size)
            self._there = self._card.empty(4 * shape[0] * shape[1]).view(torch.int32).view(shape).zero_()
        rows, width = tables.shape[0], min(tables.shape[1], self._there.shape[1])
        self._there[:rows, :width].copy_(tables[:, :width])
        return self._there[:bucket]


def lay_out(
    shape_of: Callable[[int], WorkShape], arena: Tensor, block_tables: Int32Array, query_lens: Int32Array,
    context_lens: Int32Array, num_tokens: int, only_context: bool = False,
    first_positions: npt.NDArray[np.integer] | None = None,
) -> HostRows:
    """Check rows, and list what layers need of them. ``shape_of``: the work's shape, by the longest chunk's tokens.
    Raises as ``Kernels.attention`` does."""
    tables, queries, contexts = check_rows(arena, block_tables, query_lens, context_lens, num_tokens, only_context)
    shape = shape_of(int(queries.max(initial=0)))
    words = np.empty(num_words(shape, num_tokens, len(queries)), dtype=np.int32)
    counts = fill_work(words, queries, contexts, shape, only_context, first_positions)
    positions, slots = np.empty(num_tokens, dtype=np.int32), np.empty(num_tokens, dtype=np.int32)
    if not only_context:
        fill_places(tables, queries, contexts, arena.shape[3], positions, slots)
    used = words[: HEADER_WORDS + ITEM_WORDS * counts.num_items]
    return HostRows(np.ascontiguousarray(tables), positions, slots, used, shape, only_context)


def bucket_of(step: StepInput, max_num_tokens: int) -> int | None:
    """The padded number of rows of a step whose layers graphs may run: one token a row. None for others."""
    num_rows = len(step.query_lens)
    if not 0 < num_rows <= BUCKETS[-1] or (step.query_lens != 1).any():
        return None
    bucket = BUCKETS[bisect_left(BUCKETS, num_rows)]
    return bucket if bucket <= max_num_tokens else None


def padded(array: npt.NDArray[Any], size: int, value: int) -> npt.NDArray[Any]:
    """The array with ``value`` after it, up to ``size``."""
    longer = np.full(size, value, dtype=array.dtype)
    longer[: len(array)] = array
    return longer
