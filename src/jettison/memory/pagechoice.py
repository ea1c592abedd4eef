"""Which page size keeps the most KV, where mapping a page costs the same whatever its size.

Pure. Arenas are of one length, so each loses half a page on average, and each shard's last page is part empty: smaller
pages lose less, unless larger ones divide the shards well. On a card (``docs/gpu.md``) mappings are kept and
made ahead of need, so a drop costs no more with many pages; their number is bounded by the start, when each of them is
mapped.
"""

from __future__ import annotations

from jettison.memory.layout import LayoutSpec
from jettison.memory.pagemap import PageSizes, first_capacity_blocks
from jettison.types import LayerRange, ModelShape

MAP_US = 30
"""Microseconds to map a page and give access to it, measured on an H200."""
MAPPINGS_AT_START = 2
"""Mappings of each page at the start: in the pool's own view, and where it serves first."""
START_S = 1.0
"""Seconds that mapping may add to a start."""
MOST_PAGES = int(START_S * 1e6 / MAP_US / MAPPINGS_AT_START)


def best_page_bytes(
    shape: ModelShape, block_size: int, budget_bytes: int, workspace_bytes: int, granularity: int,
    most_pages: int = MOST_PAGES,
) -> int:
    """The page size, a multiple of ``granularity``, that loses the least share of the KV.

    The worst of three layouts counts: the whole model, and either half of it after a drop. Of equally good sizes the
    largest is taken, as it makes the fewest pages; where no size keeps any, the smallest. The budget is divided into at
    most ``most_pages`` pages.
    """
    least = budget_bytes // (most_pages + 1) // granularity + 1
    most = max(least, -(-max(shape.shard_bytes.values(), default=0) // granularity))
    sizes = range(least * granularity, most * granularity + 1, granularity)
    kept = {size: kept_part(shape, block_size, budget_bytes, workspace_bytes, size) for size in sizes}
    return max(sizes, key=lambda size: (kept[size], size if kept[size] else -size))


def kept_part(shape: ModelShape, block_size: int, budget_bytes: int, workspace_bytes: int, page_bytes: int) -> float:
    """Share that is kept of the KV bytes that pages of size 0 would give; the least of three: before a drop, and after
    a drop of either half.

    A layout whose parameters do not fit at any page size counts for nothing.
    """
    sizes = PageSizes.of(shape, block_size, page_bytes)
    kept = []
    for layers in _layouts(shape):
        spec = LayoutSpec(shape.shards_for(layers), layers)
        ideal = budget_bytes - workspace_bytes - sum(shape.shard_bytes[shard] for shard in spec.shards)
        if ideal > 0:
            blocks = first_capacity_blocks(budget_bytes, workspace_bytes, spec, sizes) * len(layers)
            kept.append(blocks * sizes.kv_block_bytes / ideal)
    return min(kept, default=0.0)


def _layouts(shape: ModelShape) -> list[LayerRange]:
    half = shape.num_layers // 2
    halves = [LayerRange(0, half), LayerRange(half, shape.num_layers)] if half else []
    return [shape.all_layers, *halves]
