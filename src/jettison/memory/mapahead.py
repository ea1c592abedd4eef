"""Which layouts come next, which pages they need mapped, and what is mapped where: for memory whose mappings may stay.

Pure. Mapping a page takes a card's driver tens of microseconds, a mapping that nothing owns costs nothing, and a page
may be mapped at several places (``docs/gpu.md``). So what a drop needs is mapped before it. Merges of three and
more members are not foreseen: a position keeps one mapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jettison.memory.extents import Extent, Extents, clip, coalesce, count_pages, minus
from jettison.memory.layout import LayoutSpec, RetainedKV
from jettison.memory.pagemap import Owner, PageMap, PageSizes
from jettison.memory.pages import MappedAt, PageMapping, plan_layout
from jettison.types import LayerRange, ModelShape


def layouts_ahead(now: LayoutSpec, shape: ModelShape, drops: Sequence[LayerRange]) -> list[LayoutSpec]:
    """What is likely to follow: after a layout of the whole model its drops to these layers, after a drop the return of
    all. Nothing while KV is retained: that goes soon, into what was mapped for it."""
    if now.kv_layers == shape.all_layers:
        return [LayoutSpec(shape.shards_for(layers), layers) for layers in drops]
    if drops and now.kv_layers and not now.retained:
        return [LayoutSpec(shape.all_shards, shape.all_layers)]
    return []


def maps_ahead(
    page_map: PageMap, spec: LayoutSpec, sizes: PageSizes, num_blocks: int, mapped_at: MappedAt
) -> list[PageMapping]:
    """All mappings on the way to a layout, of which some may be there. ``num_blocks``: in each arena now.

    The way goes by another layout: KV of layers that leave is retained until it has been sent, and layers that come get
    their shards before KV of theirs. Raises like ``plan_layout``.
    """
    now = page_map.kv_layers
    if set(now.layers()) <= set(spec.kv_layers.layers()):
        between = replace(spec, kv_layers=now)
    else:  # what the target serves itself is retained anyway
        between = replace(spec, retained=(RetainedKV(now, tuple(range(num_blocks))),))
    at_once = plan_layout(page_map, between, sizes, num_blocks, mapped_at)
    meanwhile = replace(page_map, contents=dict(page_map.contents), homes=dict(page_map.homes))
    at_once.apply(meanwhile)
    in_the_end = plan_layout(meanwhile, spec, sizes, num_blocks, mapped_at)
    return [*at_once.maps, *in_the_end.maps]


class MappedPages:
    """What is mapped at the positions of spans, whether they own it or not: a card's book, in runs."""

    def __init__(self) -> None:
        self._there: dict[Owner, Extents] = {}

    def at(self, owner: Owner, lo: int, hi: int) -> Extents:
        """See ``MappedAt``."""
        return clip(self._there.get(owner, ()), lo, hi)

    def put(self, mapping: PageMapping) -> int:
        """Map a run; returns the number of pages that were not there."""
        owner, position, page, count = mapping.owner, mapping.position, mapping.page, mapping.num_pages
        there, new = self._there.get(owner, ()), (Extent(position, page, count),)
        num_new = count_pages(minus(new, there))
        if num_new:
            below, above = clip(there, 0, position), [e for e in there if e.position + e.num_pages > position + count]
            rest = clip(tuple(above), position + count, above[-1].position + above[-1].num_pages) if above else ()
            self._there[owner] = coalesce([*below, *new, *rest])
        return num_new

    def clear(self) -> None:
        """Nothing is mapped: the memory of pages was given back."""
        self._there.clear()
