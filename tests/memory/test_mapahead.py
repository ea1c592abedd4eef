"""The book of what is mapped, against a plain one; and which layouts are foreseen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jettison.memory.extents import count_pages
from jettison.memory.layout import LayoutSpec, RetainedKV
from jettison.memory.mapahead import MappedPages, layouts_ahead
from jettison.memory.pagemap import kv_owner
from jettison.memory.pages import PageMapping
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, layer_shard

SHAPE = ModelShape(
    4, 8, 1, 1, 1, 8, 8, 1, False, {layer_shard(i): 4 for i in range(4)} | {EMBED_SHARD: 4, HEAD_SHARD: 4})
LOW, HIGH, NONE = LayerRange(0, 2), LayerRange(2, 4), LayerRange(0, 0)
FULL = LayoutSpec(SHAPE.all_shards, SHAPE.all_layers)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 30), st.integers(1, 6)), max_size=12))
def test_the_book_has_the_last_page_of_each_position(maps):
    book, plain = MappedPages(), {}
    for layer, position, page, count in maps:
        run = {(layer, position + i): page + i for i in range(count)}
        new = sum(plain.get(at) != there for at, there in run.items())
        plain |= run
        assert book.put(PageMapping(kv_owner(layer), position, page, count)) == new
    for layer in (0, 1):
        there = book.at(kv_owner(layer), 2, 9)
        assert {(layer, e.position + i): e.page + i for e in there for i in range(e.num_pages)} == {
            at: page for at, page in plain.items() if at[0] == layer and 2 <= at[1] < 9}
        assert count_pages(there) == sum(at[0] == layer and 2 <= at[1] < 9 for at in plain)
    book.clear()
    assert book.at(kv_owner(0), 0, 99) == ()


def part(layers: LayerRange, *retained: RetainedKV) -> LayoutSpec:
    return LayoutSpec(SHAPE.shards_for(layers), layers, retained)


@pytest.mark.parametrize(("now", "drops", "ahead"), [
    (FULL, (LOW, HIGH), [part(LOW), part(HIGH)]), (FULL, (), []),
    (part(LOW), (LOW, HIGH), [FULL]), (part(LOW), (), []),
    (part(LOW, RetainedKV(HIGH, (1,))), (LOW, HIGH), []), (LayoutSpec(frozenset(), NONE), (LOW, HIGH), []),
])  # fmt: skip
def test_which_layouts_are_likely(now, drops, ahead):
    assert layouts_ahead(now, SHAPE, drops) == ahead
