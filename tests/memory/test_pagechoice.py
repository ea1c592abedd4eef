"""The page size that keeps the most KV: against all others, against the planner, and on shapes of real models."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jettison.memory.layout import LayoutSpec
from jettison.memory.pagechoice import MOST_PAGES, best_page_bytes, kept_part
from jettison.memory.pagemap import PageMap, PageSizes
from jettison.memory.pages import plan_layout
from jettison.types import EMBED_SHARD, HEAD_SHARD, LayerRange, ModelShape, layer_shard

MIB, GIB = 1 << 20, 1 << 30


def a_shape(layers: int, layer_bytes: int, ends: tuple[int, int], kv_heads: int = 8, head_dim: int = 128) -> ModelShape:
    shards = {layer_shard(i): layer_bytes for i in range(layers)} | {EMBED_SHARD: ends[0], HEAD_SHARD: ends[1]}
    return ModelShape(layers, 64, kv_heads, kv_heads, head_dim, 64, 64, 2, False, shards)


@st.composite
def cases(draw):
    shape = a_shape(
        draw(st.integers(1, 8)), draw(st.integers(1, 400)), (draw(st.integers(1, 300)), draw(st.integers(1, 300))),
        kv_heads=draw(st.integers(1, 3)), head_dim=1,
    )  # fmt: skip
    budget = sum(shape.shard_bytes.values()) + draw(st.integers(-200, 4000))
    return shape, draw(st.integers(1, 4)), max(budget, 1), draw(st.integers(0, 50)), draw(st.sampled_from([1, 4, 16]))


@settings(max_examples=60)
@given(cases(), st.integers(1, 300))
def test_no_other_page_size_within_the_bounds_keeps_more(case, most_pages):
    *model, granularity = case
    best = best_page_bytes(*model, granularity, most_pages)
    budget = model[2]
    assert best % granularity == 0 and budget // best <= most_pages
    largest = max(model[0].shard_bytes.values())
    for size in range(granularity, largest + granularity, granularity):
        if budget // size <= most_pages:
            kept, most = kept_part(*model, size), kept_part(*model, best)
            assert (kept, size) <= (most, best) or (most == 0.0 and kept == 0.0 and best <= size)


@settings(max_examples=60)
@given(cases())
def test_what_is_kept_is_what_the_planner_gives(case):
    shape, block_size, budget, workspace, page = case
    sizes = PageSizes.of(shape, block_size, page)
    num_pages, workspace_pages = budget // page, -(-workspace // page)
    full = LayoutSpec(shape.all_shards, shape.all_layers)
    part = kept_part(shape, block_size, budget, workspace, page)
    if sum(sizes.shard_pages.values()) + workspace_pages > num_pages:
        assert part == 0.0 or sum(shape.shard_bytes.values()) + workspace >= budget
        return
    page_map = PageMap.with_workspace(num_pages, workspace_pages)
    plan_layout(page_map, full, sizes, 0).apply(page_map)
    half = shape.num_layers // 2
    found = []
    for layers in [shape.all_layers] + [LayerRange(0, half), LayerRange(half, shape.num_layers)] * bool(half):
        spec = LayoutSpec(shape.shards_for(layers), layers)
        kv_bytes = plan_layout(page_map, spec, sizes, 0).capacity_blocks * len(layers) * sizes.kv_block_bytes
        ideal = budget - workspace - sum(shape.shard_bytes[s] for s in spec.shards)
        found += [kv_bytes / ideal] if ideal > 0 else []
    assert part == pytest.approx(min(found, default=0.0))


@pytest.mark.parametrize(
    ("shape", "budget"),
    [
        (a_shape(48, 525 * MIB, (1485 * MIB, 1485 * MIB)), 36 * GIB),  # 14B in half an H100
        (a_shape(48, 525 * MIB, (1485 * MIB, 1485 * MIB)), 60 * GIB),  # in half an H200
        (a_shape(28, 444 * MIB, (1040 * MIB, 1040 * MIB), kv_heads=4), 24 * GIB),  # 7B
        (a_shape(28, 30 * MIB, (297 * MIB, 297 * MIB)), 70 * GIB),  # 0.6B with a card to itself
    ],
)
def test_models_on_cards_keep_all_but_a_twentieth(shape, budget):
    page = best_page_bytes(shape, 16, budget, GIB, 2 * MIB)
    assert budget // page <= MOST_PAGES
    assert kept_part(shape, 16, budget, GIB, page) >= 0.95
