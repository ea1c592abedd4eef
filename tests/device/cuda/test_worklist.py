"""The list of a step's work: every token sees every position once, and how a token's sums are cut is its own affair."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from jettison.device.cuda.tiles import POSITIONS, SPLIT, Tile
from jettison.device.cuda.worklist import (
    HEADER_WORDS,
    ITEM_WORDS,
    WorkShape,
    fill_places,
    fill_work,
    num_words,
)

ROWS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 4000)), min_size=1, max_size=12)
"""(tokens, context) of each row."""
SHAPES = st.builds(
    WorkShape, st.sampled_from([Tile(rows, 4, 3, 2) for rows in (16, 64, 128)]), st.integers(1, 16),
    st.integers(1, 8), st.sampled_from([1, 40, 264, 100_000]),
)  # fmt: skip


def listed(rows: list[tuple[int, int]], shape: WorkShape, only_context: bool = False) -> np.ndarray:
    queries, contexts = np.array(rows, dtype=np.int32).T.copy()
    words = np.full(num_words(shape, int(queries.sum()), len(rows)), -9, dtype=np.int32)
    counts = fill_work(words, queries, contexts, shape, only_context)
    assert words[0] == counts.num_items
    assert (words[HEADER_WORDS + ITEM_WORDS * counts.num_items :] == -9).all()
    assert words[1] <= shape.tile.rows
    return words[HEADER_WORDS:][: ITEM_WORDS * counts.num_items].reshape(-1, ITEM_WORDS)


def seen_by_token(items: np.ndarray) -> dict[int, list[tuple[int, int]]]:
    """Token -> the spans of positions that its programs look at, in the order in which they are merged."""
    seen: dict[int, list[tuple[int, int, int]]] = {}
    for _, token, size, _, end, split, slot, _ in items.tolist():
        for at in range(token, token + size):
            last = split + 1 if slot >= 0 else -(-end // SPLIT)
            spans = [(s, s * SPLIT, min((s + 1) * SPLIT, end)) for s in range(split, last)]
            seen.setdefault(at, []).extend(spans)
    return {at: [(lo, hi) for _, lo, hi in sorted(spans)] for at, spans in seen.items()}


@settings(max_examples=40)
@given(rows=ROWS, shape=SHAPES, only_context=st.booleans())
def test_every_token_sees_every_position_once(
    rows: list[tuple[int, int]], shape: WorkShape, only_context: bool
) -> None:
    if only_context:
        rows = [(queries, context + 1) for queries, context in rows]
    items = listed(rows, shape, only_context)
    seen = seen_by_token(items)
    token = 0
    for queries, context in rows:
        for i in range(queries):
            needed = context if only_context else context + i + 1
            spans = seen.pop(token)
            assert [lo for lo, _ in spans] == [SPLIT * s for s in range(len(spans))], "in order, from fixed places"
            assert all(hi == min(lo + SPLIT, spans[-1][1]) for lo, hi in spans)
            assert spans[-1][1] >= needed, "all that it may see; a tile's later tokens see more"
            token += 1
    assert not seen


@settings(max_examples=40)
@given(rows=ROWS, shape=SHAPES)
def test_items_name_their_rows_and_slots(rows: list[tuple[int, int]], shape: WorkShape) -> None:
    items = listed(rows, shape)
    starts = np.cumsum([queries for queries, _ in rows]) - [queries for queries, _ in rows]
    slots: list[int] = []
    for row, token, size, position, end, split, slot, _ in items.tolist():
        assert 0 < size <= shape.tile.tokens(shape.group)
        assert position == rows[row][1] + token - starts[row]
        assert end == position + size
        if slot >= 0:
            slots.append(slot + split)
    assert sorted(slots) == list(range(len(slots))), "each split its own"
    lengths = [end if slot < 0 else min(SPLIT, end - split * SPLIT) for *_, end, split, slot, _ in items.tolist()]
    assert lengths == sorted(lengths, reverse=True), "the longest first"


@settings(max_examples=40)
@given(rows=ROWS, extra=ROWS, shape=SHAPES)
def test_other_rows_do_not_change_the_groups_of_a_tokens_sums(
    rows: list[tuple[int, int]], extra: list[tuple[int, int]], shape: WorkShape
) -> None:
    """Of positions in groups of ``SPLIT`` and, in them, of ``POSITIONS``: cut where a multiple of these is."""
    alone, among = seen_by_token(listed(rows, shape)), seen_by_token(listed([*rows, *extra], shape))
    assert all(among[token] == spans for token, spans in alone.items())
    assert all(lo % POSITIONS == 0 for spans in alone.values() for lo, _ in spans)


def test_a_list_that_does_not_fit_is_refused() -> None:
    shape = WorkShape(Tile(16, 4, 3, 2), 7, 4, 264)
    with pytest.raises(ValueError, match="do not fit"):
        fill_work(np.zeros(20, dtype=np.int32), np.array([1, 1], np.int32), np.array([5, 5], np.int32), shape)


def test_few_long_rows_are_split_and_many_are_not() -> None:
    shape = WorkShape(Tile(16, 4, 3, 2), 7, 4, 264)
    assert len(listed([(1, 1024)], shape)) == 3
    assert len(listed([(1, 1024)] * 64, shape)) == 64
    assert len(listed([(1, 1024)] * 60 + [(1, 16000)], shape)) == 60 + 32, "the one that all would wait for is split"


def test_splits_for_which_there_is_no_room_stay_whole() -> None:
    shape = WorkShape(Tile(128, 8, 3, 1), 16, 1, 1_000_000)
    items = listed([(8 * 30, 50_000)], shape)
    is_split = items[:, 6] >= 0
    assert is_split.sum() == 99, "one tile of eight tokens: 128 splits of 128 rows are all that there is room for"
    assert (~is_split).sum() == 29


@settings(max_examples=40)
@given(rows=ROWS, block_size=st.sampled_from([16, 32, 64]))
@example(rows=[], block_size=16)
def test_places(rows: list[tuple[int, int]], block_size: int) -> None:
    queries, contexts = np.array(rows, dtype=np.int32).reshape(-1, 2).T.copy()
    width = -(-int((queries + contexts).max(initial=0)) // block_size) + 1
    tables = np.random.default_rng(0).integers(0, 1000, (len(rows), width)).astype(np.int32)
    positions, slots = np.empty((2, int(queries.sum())), dtype=np.int32)
    fill_places(tables, queries, contexts, block_size, positions, slots)
    expected = [
        (context + i, tables[row, (context + i) // block_size] * block_size + (context + i) % block_size)
        for row, (num, context) in enumerate(rows)
        for i in range(num)
    ]
    assert list(zip(positions.tolist(), slots.tolist())) == [(at, int(slot)) for at, slot in expected]
