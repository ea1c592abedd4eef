"""A step's rows as a card reads them: laid out on the host as the host's kernels check them, and padded to a graph's
size.

Padding has no work, no place in the cache and the token 0: its rows compute on whatever lies in the buffers, and no
other row sees it.

Not here: the list of work (``worklist``), copies (``staging``), sampling. No Triton.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jettison.device.cuda.tiles import PART_ROWS, Tile
from jettison.device.cuda.worklist import HEADER_WORDS, ITEM_WORDS, WorkShape, fill_places, fill_work, num_words
from jettison.device.kernels.operands import Int32Array
from jettison.device.kernels.torch_kernels import check_rows

if TYPE_CHECKING:
    from jettison.device.cuda.card import Card
    from jettison.device.step import StepInput  # which brings msgspec: a bare GPU machine lacks it

BUCKETS = [
    1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1280, 2049, 256),
    *range(2560, 4097, 512), *range(5120, 8193, 1024),
]  # fmt: skip
"""Tokens of the steps of which graphs are made. Where a layer's time goes with its tokens, from 256 on, padding adds at
most an eighth, and a quarter just above 1,024."""

BATCHES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 80, 96, 100, 112, 128, 129, 144, 160,
           176, 192, 193, 208, 224, 240, 256, 257, 288, 320, 352, 384, 416, 448, 480, 512, 576, 640, 704, 768, 832, 896,
           960, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)  # fmt: skip
"""Rows of products at which ``products`` looks anyhow: the sizes of graphs, and between them."""

MOST_ROWS = 256
"""Of a step by graphs: as many have a place for their tables."""

LAUNCHED_WORK = 2.5e11
"""Parameters of a layer times tokens up to which a card may wait for launches from the host: a layer of 7B with 1,070
tokens, where an H200 computes for as long (0.77 ms) as the host launched at the time. With more, the host is ahead."""

NOWHERE = -1
"""The slot of a token with no place in the cache."""

_STAGED_SLACK = 4096
"""Between staged arrays."""

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

    def leading(self, num_tokens: int) -> StepRows:
        """Without padding."""
        return self._replace(positions=self.positions[:num_tokens], slots=self.slots[:num_tokens])


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

    def padded(self, num_tokens: int) -> HostRows:
        """With padding up to ``num_tokens``, so that ``positions`` and ``slots`` of all such steps have the same
        shapes, and ``work``, which says its own length, the same place behind them. Tables stay."""
        return self._replace(
            positions=padded(self.positions, num_tokens, 0), slots=padded(self.slots, num_tokens, NOWHERE)
        )

    def on_card(self, copied: Mapping[str, Tensor], tables: Tensor | None = None) -> StepRows:
        """The rows from what the arrays became. ``tables``: where else the tables lie."""
        positions, slots, work, copied_tables = (copied[name] for name in self.arrays())
        return StepRows(
            copied_tables if tables is None else tables, positions, slots, work, self.shape.tile, self.only_context
        )


class GraphTables:
    """Block tables of steps by graphs at one place of a card, whatever their width, as graphs read them there.

    What is right of a row's blocks, or below the rows, is left of other steps: no work names it.
    """

    def __init__(self, card: Card, max_model_len: int) -> None:
        """It takes memory when it is first used."""
        self._card = card
        self._max_model_len = max_model_len
        self._there: Tensor | None = None

    def put(self, tables: Tensor, block_size: int) -> Tensor:
        """Launch a copy of ``tables`` [rows, width], on the card, to the start of the place; returns the place,
        [``MOST_ROWS``, blocks of the longest context]."""
        if self._there is None:
            shape = MOST_ROWS, -(-self._max_model_len // block_size)
            self._there = self._card.empty(4 * shape[0] * shape[1]).view(torch.int32).view(shape).zero_()
        rows, width = tables.shape[0], min(tables.shape[1], self._there.shape[1])
        self._there[:rows, :width].copy_(tables[:, :width])
        return self._there


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


def buckets_for(layer_parameters: float, max_num_tokens: int) -> list[int]:
    """Ascending sizes of the steps of which graphs are made, at least those that few rows of decodes have.

    ``layer_parameters``: that a token is multiplied with. ``max_num_tokens``: of a step, and then a size too, as full
    steps are frequent.
    """
    most = min(max_num_tokens, max(MOST_ROWS, int(LAUNCHED_WORK / layer_parameters), 1))
    sizes = [bucket for bucket in BUCKETS if bucket <= most]
    is_full = most == max_num_tokens and most < BUCKETS[-1] and sizes[-1] < most
    return [*sizes, most] if is_full else sizes


def batches_for(buckets: Sequence[int], max_num_tokens: int, max_num_seqs: int) -> list[int]:
    """Ascending numbers of rows at which products are to be looked at: all that padding and sampling make, and some of
    the others, as a step without a graph may have any."""
    between = [size for size in BATCHES if size < max_num_tokens]
    return sorted({*buckets, *range(1, max_num_seqs + 1), *between, max_num_tokens})


def most_staged_bytes(max_num_tokens: int, max_num_seqs: int, max_blocks: int) -> int:
    """Bytes of the arrays that the largest step has staged: ``HostRows``, tokens and sampled places (and those of
    tokens that are on the card). ``max_blocks``: of the longest request."""
    num_rows = min(max_num_tokens, max(MOST_ROWS, max_num_seqs))
    work_words = HEADER_WORDS + ITEM_WORDS * (num_rows + max_num_tokens + PART_ROWS)  # with tiles of one token
    words = 2 * max_num_tokens + work_words + num_rows * max_blocks
    long_words = 2 * max_num_tokens + 2 * num_rows
    return 4 * words + 8 * long_words + _STAGED_SLACK


def bucket_of(step: StepInput, buckets: Sequence[int]) -> int | None:
    """The padded number of tokens of a step whose layers graphs may run. None for others. ``buckets``: ascending."""
    at = bisect_left(buckets, step.num_tokens)
    return buckets[at] if 0 < len(step.query_lens) <= MOST_ROWS and at < len(buckets) else None


def padded(array: npt.NDArray[Any], size: int, value: int) -> npt.NDArray[Any]:
    """The array with ``value`` after it, up to ``size``."""
    longer = np.full(size, value, dtype=array.dtype)
    longer[: len(array)] = array
    return longer
