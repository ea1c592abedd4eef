"""How to get from one layout of physical pages to another: the page plan.

Pure. The map and the plan are values; the device's back ends (``device.pages``) carry them out, and the map
changes only when they have succeeded. All sizes are in pages of ``PageSizes.page_bytes``.

One KV arena a layer, all of one length, so a block id is good in every layer. Growth happens at the tail and keeps
every id and address. Pages that a drop frees are laid out so that the way back is short:

    arena of a layer that stays:   [ kept, untouched | pages of dropped arenas | pages of dropped shards ]
                                    0                ^ old length                                        ^ new length

Pages of dropped shards lie on top, the same number in every arena. A restore that finds them there pops them off, lays
nothing else in between, and so moves no more blocks than the smaller capacity demands anyway. These pages are also the
last to be written, and a shard whose pages were not written needs no pull.

Where pages may be mapped at several places (a card), that order gives way to another: a position keeps the page that is
mapped at it already, wherever that page is to be had (``MappedAt``). A change that was mapped ahead then needs no call.

KunServe v1 (section 4.3) instead makes a layer of a block the unit of a buddy allocator. Then nothing has to be spread
evenly or moved on a shrink; but each request needs one block table a layer, kernels lose the plain
``[num_blocks, ...]`` tensor, and a table of n blocks costs n times the layers at every step. Here the cost falls on the
remapping alone, which is rare: a handful of maps for each layer that stays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jettison.errors import OutOfPagesError, StalePlanError
from jettison.memory.extents import (
    Extent,
    Extents,
    Run,
    RunSet,
    clip,
    coalesce,
    count_pages,
    deal,
    gaps,
    level,
    minus,
    place,
)
from jettison.memory.layout import LayoutSpec
from jettison.memory.pagemap import WORKSPACE, Home, Owner, PageMap, PageSizes, kv_owner, shard_owner
from jettison.types import LayerRange, ShardId

MappedAt = Callable[[Owner, int, int], Extents]
"""``(owner, lo, hi)`` -> the pages that are mapped at these positions of its span, whether it owns them or not."""


class PageRange(NamedTuple):
    """Positions of one span to unmap."""

    owner: Owner
    position: int
    num_pages: int


class PageMapping(NamedTuple):
    """One map call: contiguous positions onto contiguous pages."""

    owner: Owner
    position: int
    page: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class PagePlan:
    """All changes from one map to another layout: first every unmap, then every map."""

    version: int
    """Version of the map that the plan was made from."""
    unmaps: tuple[PageRange, ...]
    maps: tuple[PageMapping, ...]
    evacuate_from_block: int
    """Blocks from here on lose their content; blocks below keep page, position and bytes."""
    capacity_blocks: int
    bytes_to_kv: int
    """Growth of all KV arenas, and what retained KV gave up to the others; negative when KV shrank."""
    intact_shards: frozenset[ShardId]
    """Shards newly mapped onto their own pages, which have not been written since the shards were dropped."""
    missing_shards: frozenset[ShardId]
    """Shards newly mapped, content unknown."""
    contents: Mapping[Owner, Extents]
    homes: Mapping[ShardId, Home]
    kv_layers: LayerRange

    def apply(self, page_map: PageMap) -> None:
        """Record that the plan has been carried out. Raises StalePlanError, changing nothing, if the map has moved
        on."""
        if page_map.version != self.version:
            raise StalePlanError(f"page plan of version {self.version}, the map is at {page_map.version}")
        page_map.contents = dict(self.contents)
        page_map.homes = {} if page_map.is_bare else dict(self.homes)
        page_map.kv_layers = self.kv_layers
        page_map.version += 1


def plan_layout(
    page_map: PageMap, target: LayoutSpec, sizes: PageSizes, live_blocks: int, mapped_at: MappedAt | None = None
) -> PagePlan:
    """The plan that leads to ``target``. Pure.

    ``live_blocks``: how many blocks stay alive; no arena is popped below the pages that these need, unless the target
    itself leaves less. Retained ids are present ids, before anything is copied. Arenas of layers that are in
    ``target.kv_layers`` keep what they hold, retained KV included. ``mapped_at``: what is mapped already, which decides
    nothing but which page goes where in the arenas.

    Raises OutOfPagesError if shards and retained KV alone do not fit, StalePlanError if a block to be retained is
    not there.
    """
    arenas = page_map.kv_arenas()
    retained = _retained(arenas, target, sizes)
    length = _arena_length(page_map, target, sizes, retained)
    mapped = page_map.shards()
    dropped = mapped - target.shards
    added = [s for s in sizes.shard_pages if s in target.shards and s not in mapped]

    serving = {layer: arenas.get(layer, ()) for layer in target.kv_layers.layers()}
    leaving = {layer: minus(had, retained.get(layer, ())) for layer, had in arenas.items() if layer not in serving}
    supply = _given_away(page_map, dropped, leaving)
    min_line = min(sizes.pages_for_blocks(live_blocks), length)
    # A spoilt home is worth nothing where other pages have been mapped ahead.
    own = {s: home for s, home in page_map.homes.items() if s in added and (home.is_intact or mapped_at is None)}
    wanted = [own[s].extents for s in added if s in own]
    for extents in serving.values():
        supply.add_extents(clip(extents, length, page_map.num_pages))
    # An arena is popped further than it must where an added shard then gets its own pages back, and so needs no pull.
    lines = _lines(serving, length, min_line, wanted, supply)
    kept = {layer: clip(extents, 0, lines[layer]) for layer, extents in serving.items()}
    for layer, line in lines.items():
        if line < length:
            supply.add_extents(clip(serving[layer], line, length))

    homes = _homes_after(page_map, target, dropped, sizes)
    slabs, lent = _place_shards(added, own, sizes, supply, homes, mapped_at)
    staying = {s: page_map.of(shard_owner(s)) for s in sizes.shard_pages if s in mapped and s in target.shards}
    spans = retained | _fill(kept, length, lent, supply, mapped_at)
    contents = _contents(page_map.of(WORKSPACE), staying | slabs, spans)

    # Blocks above the lowest line of a popped arena lose their pages: one block id is good in every layer.
    popped = [lines[layer] for layer, extents in serving.items() if extents != kept[layer]]
    capacity = sizes.blocks_in_pages(length) if serving else 0
    intact = {s for s in added if s in page_map.homes and page_map.homes[s] == Home(slabs[s], True)}
    unmaps, maps = _changes(page_map.contents, contents)
    return PagePlan(
        version=page_map.version,
        unmaps=unmaps,
        maps=maps,
        evacuate_from_block=min([capacity, *(sizes.blocks_in_pages(line) for line in popped)]),
        capacity_blocks=capacity,
        bytes_to_kv=_pages_to_kv(unmaps, maps, page_map.kv_layers) * sizes.page_bytes,
        intact_shards=frozenset(intact),
        missing_shards=frozenset(added) - intact,
        contents=contents,
        homes=homes,
        kv_layers=target.kv_layers,
    )


def _homes_after(
    page_map: PageMap, target: LayoutSpec, dropped: Collection[ShardId], sizes: PageSizes
) -> dict[ShardId, Home]:
    """Of shards that are not in the target: those that are dropped leave one that is intact."""
    homes = {s: home for s, home in page_map.homes.items() if s not in target.shards}
    return homes | {s: Home(page_map.of(shard_owner(s)), True) for s in sizes.shard_pages if s in dropped}


def _given_away(page_map: PageMap, dropped: Iterable[ShardId], leaving: Mapping[int, Extents]) -> RunSet:
    """Everything that may be given away at once: free pages, dropped shards, and arenas of layers that leave."""
    supply = page_map.free_pages()
    for shard in dropped:
        supply.add_extents(page_map.of(shard_owner(shard)))
    for extents in leaving.values():
        supply.add_extents(extents)
    return supply


def _retained(arenas: Mapping[int, Extents], target: LayoutSpec, sizes: PageSizes) -> dict[int, Extents]:
    """The pages with bytes of retained blocks, in arenas that are no longer whole."""
    positions: dict[int, list[tuple[int, int]]] = {}
    for kept in target.retained:
        ranges = sizes.page_ranges(kept.block_ids)
        for layer in kept.layers.layers():
            if ranges and layer not in target.kv_layers.layers():
                positions[layer] = _merged([*positions.get(layer, ()), *ranges])
    retained: dict[int, Extents] = {}
    for layer, ranges in positions.items():
        extents = arenas.get(layer, ())
        parts: list[Extent] = []
        for lo, hi in ranges:
            part = clip(extents, lo, hi)
            if count_pages(part) != hi - lo:
                raise StalePlanError(f"layer {layer}: KV to be retained at pages {lo} to {hi} is not there")
            parts += part
        retained[layer] = coalesce(parts)
    return retained


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Overlapping and adjacent ranges as one."""
    if len(ranges) == 1:
        return ranges
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return merged


def _arena_length(
    page_map: PageMap, target: LayoutSpec, sizes: PageSizes, retained: Mapping[int, Extents]
) -> int:
    """Pages of every arena of the target's layers; pages that do not divide evenly stay free."""
    left = page_map.num_pages - page_map.count("workspace")
    left -= sum(sizes.shard_pages[shard] for shard in target.shards)
    left -= sum(count_pages(extents) for extents in retained.values())
    if left < 0:
        raise OutOfPagesError(f"{-left} pages too few for the parameters and the KV to be retained")
    return left // len(target.kv_layers) if target.kv_layers else 0


def _lines(
    serving: Mapping[int, Extents], length: int, min_line: int, wanted: list[Extents], supply: RunSet
) -> dict[int, int]:
    """The position down to which each arena is popped: its new end, or further where a shard can have its own pages
    back.

    A shard is worth it only if each of its pages is in ``supply`` already, or in an arena at ``min_line`` or above.
    """
    lines = dict.fromkeys(serving, length)
    if min_line == length:
        return lines
    index = sorted(
        (e.page, e.num_pages, e.position, layer)
        for layer, extents in serving.items()
        for e in clip(extents, min_line, length)
    )
    for home in wanted:
        reach: dict[int, int] = {}
        missing = count_pages(home)
        for _, page, count in home:
            missing -= sum(run.num_pages for run in supply.overlap(page, count))
            at = max(bisect_left(index, (page, 0, 0, 0)) - 1, 0)
            while at < len(index) and index[at][0] < page + count:
                first, extent_count, position, layer = index[at]
                start, end = max(first, page), min(first + extent_count, page + count)
                if start < end:
                    reach[layer] = min(reach.get(layer, length), position + start - first)
                    missing -= end - start
                at += 1
        if not missing:
            for layer, line in reach.items():
                lines[layer] = min(lines[layer], line)
    return lines


def _place_shards(
    added: list[ShardId], own_homes: Mapping[ShardId, Home], sizes: PageSizes, supply: RunSet,
    homes: dict[ShardId, Home], mapped_at: MappedAt | None,
) -> tuple[dict[ShardId, Extents], list[Run]]:
    """Pages for new shards, taken from ``supply``; and the pages that are left of dropped shards, one shard after the
    other.

    Own pages first (``own_homes``), except that homes may overlap where a spoilt one is involved: intact ones have the
    better claim. Then what is mapped there already. The rest comes from pages that no dropped shard wants back, then
    from spoilt homes; an intact home that must give a page is not intact any more (``homes`` is updated).
    """
    claims = [(own_homes[s], s) for s in added if s in own_homes]
    claims += [(homes[s], s) for s in reversed(homes)]
    claims.sort(key=lambda claim: not claim[0].is_intact)
    own = {shard: supply.take_extents(home.extents) for home, shard in claims}
    slabs = {s: own.get(s, ()) for s in added}
    if mapped_at is not None:
        slabs = {s: _as_mapped(shard_owner(s), extents, sizes.shard_pages[s], (supply,), mapped_at)
                 for s, extents in slabs.items()}  # fmt: skip
    lent = {s: RunSet() for s in reversed(homes)}
    for shard, pages in lent.items():
        pages.add_extents(own[shard])
    spoilt_first = sorted(lent, key=lambda s: homes[s].is_intact)
    pools = [supply, *(lent[s] for s in spoilt_first)]
    taken = RunSet()
    for shard in added:
        missing = sizes.shard_pages[shard] - count_pages(slabs[shard])
        if missing:
            runs: list[Run] = []
            for pool in pools:
                part = pool.take_fewest(missing)
                missing -= sum(run.num_pages for run in part)
                runs += part
            assert not missing, "the arenas' length leaves room for every shard"
            slabs[shard] = coalesce([*slabs[shard], *place(runs, gaps(slabs[shard], sizes.shard_pages[shard]))])
        taken.add_extents(slabs[shard])
    for shard, home in homes.items():
        if home.is_intact and taken.meets(home.extents):
            homes[shard] = home._replace(is_intact=False)
    return slabs, [run for pages in lent.values() for run in pages.runs()]


def _fill(
    kept: Mapping[int, Extents], length: int, lent: list[Run], supply: RunSet, mapped_at: MappedAt | None
) -> dict[int, Extents]:
    """Every arena at its full length: what is mapped there already, then below its end the pages of ``supply``, on top
    the same number of shards' pages (``lent``) each."""
    if mapped_at is not None:
        shards_pages = RunSet(lent)
        kept = {layer: _as_mapped(kv_owner(layer), extents, length, (shards_pages, supply), mapped_at)
                for layer, extents in kept.items()}  # fmt: skip
        lent = shards_pages.runs()
    plain = supply.runs()
    needs = {layer: length - count_pages(extents) for layer, extents in kept.items()}
    needed = sum(needs.values())
    if not needed:
        return dict(kept)
    num_lent, num_plain = sum(run.num_pages for run in lent), sum(run.num_pages for run in plain)
    # An even share where possible: each odd page would cost a map call of its own.
    even = num_lent // len(needs) * len(needs) if needs else 0
    on_top = level(needs, min(max(even, needed - num_plain), needed))
    below = {layer: needs[layer] - on_top[layer] for layer in needs}
    tops, bottoms = deal(lent, on_top), deal(plain, below)
    return {
        layer: coalesce([*extents, *place([*sorted(bottoms[layer]), *sorted(tops[layer])], gaps(extents, length))])
        for layer, extents in kept.items()
    }


def _as_mapped(
    owner: Owner, extents: Extents, length: int, pools: Iterable[RunSet], mapped_at: MappedAt
) -> Extents:
    """A span with the pages of ``pools`` that are mapped in its gaps already; they are taken out."""
    if count_pages(extents) == length:
        return extents
    filled = list(extents)
    for position, count in gaps(extents, length):
        there = mapped_at(owner, position, position + count)
        for pool in pools:
            filled += pool.take_extents(there)
    return coalesce(filled)


def _contents(
    workspace: Extents, slabs: Mapping[ShardId, Extents], arenas: Mapping[int, Extents]
) -> dict[Owner, Extents]:
    """The pages of each owner that has some."""
    contents: dict[Owner, Extents] = {WORKSPACE: workspace}
    contents |= {shard_owner(shard): extents for shard, extents in slabs.items()}
    contents |= {kv_owner(layer): extents for layer, extents in arenas.items()}
    return {owner: extents for owner, extents in contents.items() if extents}


def _changes(
    old: Mapping[Owner, Extents], new: Mapping[Owner, Extents]
) -> tuple[tuple[PageRange, ...], tuple[PageMapping, ...]]:
    unmaps: list[PageRange] = []
    maps: list[PageMapping] = []
    for owner in [*old, *(owner for owner in new if owner not in old)]:
        before, after = old.get(owner, ()), new.get(owner, ())
        if before == after:  # as most owners do
            continue
        for lo, hi in _merged([(position, position + count) for position, _, count in minus(before, after)]):
            unmaps.append(PageRange(owner, lo, hi - lo))
        for extent in minus(after, before):
            maps.append(PageMapping(owner, *extent))
    return tuple(unmaps), tuple(maps)


def _pages_to_kv(unmaps: Iterable[PageRange], maps: Iterable[PageMapping], whole: LayerRange) -> int:
    """What arenas gain, less what those of ``whole``, the layers served until now, give up."""
    gained = sum([new.num_pages for new in maps if new.owner.kind == "kv"])
    arenas = {kv_owner(layer) for layer in whole.layers()}
    return gained - sum([gone.num_pages for gone in unmaps if gone.owner in arenas])
