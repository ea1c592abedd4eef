"""The list of work of a step's attention, as an array that a graph reads: built by numpy, without a loop.

An item is a tile of tokens of one row with all positions that they attend to or, where there is too little work to keep
the card busy, with one split of these positions. Either way a token's sums are made in the same groups in the same
order, so the division of work changes no bit and may depend on the batch.

Not here: devices, and the addresses of anything.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jettison.device.cuda.tiles import PART_ROWS, SPLIT, Tile

Int32s = npt.NDArray[np.int32]
Ints = npt.NDArray[np.integer]

ITEM_WORDS = 8
"""row, first token of the batch, tokens, position of the first, end of the positions, split, first slot or -1, 0"""

HEADER_WORDS = 8
"""The number of items, the rows of unmerged sums of a split, and unused words."""

_BALANCE = 1.25
"""A tile up to this many times a program's fair share of the work is not split."""


class WorkShape(NamedTuple):
    """Parameters of the list besides the rows."""

    tile: Tile
    group: int
    """Query heads of a KV head."""
    kv_heads: int
    programs: int
    """Programs that run side by side."""


class WorkCounts(NamedTuple):
    """The used lengths of the arrays."""

    num_items: int
    num_slots: int


def num_words(shape: WorkShape, max_tokens: int, max_rows: int) -> int:
    """Length of an array that holds the list of any step of up to so many tokens of so many rows."""
    tiles = max_rows + max_tokens // shape.tile.tokens(shape.group)
    return HEADER_WORDS + ITEM_WORDS * (tiles + PART_ROWS // shape.group)


def fill_work(
    words: Int32s, query_lens: Ints, context_lens: Ints, shape: WorkShape, only_context: bool = False,
    first_positions: Ints | None = None,
) -> WorkCounts:
    """Write the list of a step to the start of ``words``, the longest items first.

    ``query_lens``, ``context_lens``, ``first_positions``: [R], as in ``Kernels.attention``. Raises ValueError where
    ``words`` is too short.
    """
    first: Ints | int
    split: Ints | int
    slot: Ints | int
    per_tile = shape.tile.tokens(shape.group)
    most_tokens = min(per_tile, int(query_lens.max(initial=0)))
    if int(query_lens.max(initial=0)) <= per_tile:  # decode: at most one tile a row
        row = np.flatnonzero(query_lens)
        first, size = 0, query_lens[row]
    else:
        tiles = -(-query_lens // per_tile)
        row = np.repeat(np.arange(len(tiles)), tiles)
        first = (np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * per_tile
        size = np.minimum(query_lens[row] - first, per_tile)
    position = (context_lens if first_positions is None else first_positions)[row] + first
    end = context_lens[row] if only_context else position + size
    token = (np.cumsum(query_lens) - query_lens)[row] + first
    part_rows = max(1, most_tokens) * shape.group
    num_splits = _splits(end, shape, PART_ROWS // part_rows)
    counts = np.maximum(num_splits, 1)
    num_items, num_slots = int(counts.sum()), int(num_splits.sum())
    if len(words) < HEADER_WORDS + ITEM_WORDS * num_items:
        raise ValueError(f"{num_items} items of work do not fit in {len(words)} words")
    words[0], words[1] = num_items, part_rows
    items = words[HEADER_WORDS : HEADER_WORDS + ITEM_WORDS * num_items].reshape(num_items, ITEM_WORDS)
    if num_slots == 0:
        tile, split, slot = _longest_first(end), 0, -1
    else:
        tile = np.repeat(np.arange(len(row)), counts)
        splits = np.arange(num_items) - np.repeat(np.cumsum(counts) - counts, counts)
        is_split = num_splits[tile] > 0
        length = np.where(is_split, np.minimum(end[tile] - splits * SPLIT, SPLIT), end[tile])
        slots = np.where(is_split, (np.cumsum(num_splits) - num_splits)[tile], -1)
        order = _longest_first(length)
        tile, split, slot = tile[order], splits[order], slots[order]
    for column, values in enumerate((row, token, size, position, end)):
        items[:, column] = values[tile]
    items[:, 5] = split
    items[:, 6] = slot
    return WorkCounts(num_items, num_slots)


def fill_places(
    block_tables: Ints, query_lens: Ints, context_lens: Ints, block_size: int, positions: Int32s, slots: Int32s
) -> None:
    """Write each token's position, and the slot of its keys and values: block * block_size + place in the block.

    ``positions``, ``slots``: [T].
    """
    if len(positions) == len(query_lens) and int(query_lens.max(initial=1)) == 1:
        rows: Ints = np.arange(len(query_lens))
        positions[:] = context_lens
    else:
        rows = np.repeat(np.arange(len(query_lens)), query_lens)
        before = np.cumsum(query_lens) - query_lens - context_lens
        positions[:] = np.arange(len(positions)) - np.repeat(before, query_lens)
    slots[:] = block_tables[rows, positions // block_size] * block_size + positions % block_size


def _splits(end: Ints, shape: WorkShape, max_slots: int) -> npt.NDArray[np.int64]:
    """[tiles]: the number of splits of each tile that have programs of their own; 0: one program does the tile."""
    most = max(SPLIT, int(_BALANCE * int(end.sum()) * shape.kv_heads / shape.programs))
    num_splits = np.where(end > most, -(-end // SPLIT), 0).astype(np.int64)
    if int(num_splits.sum()) > max_slots:  # split the longest tiles, as many as there is room for
        order = np.argsort(-num_splits, kind="stable")
        num_splits[order[np.cumsum(num_splits[order]) > max_slots]] = 0
    return num_splits


def _longest_first(lengths: Ints) -> npt.NDArray[np.int64]:
    """Indices sorted by length, the longest first, by a radix sort of sixteen bits: 10 µs for 1,000."""
    coarse = np.minimum(lengths >> max(0, int(lengths.max()).bit_length() - 16), 0xFFFF) if len(lengths) else lengths
    return np.argsort(0xFFFF - coarse.astype(np.uint16), kind="stable")
