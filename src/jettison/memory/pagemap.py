"""Which physical page backs what, now: the page map of one device.

Pure values, counted in pages of ``PageSizes.page_bytes``. How the map gets from one layout to another is planned in
``memory.pages``; mapping is done by the device's back ends. Invariant: every page backs one position or is free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from jettison.errors import BudgetError, OutOfPagesError
from jettison.memory.extents import Extent, Extents, Run, RunSet, clip, coalesce, count_pages, gaps
from jettison.memory.layout import LayoutSpec
from jettison.types import LayerRange, ModelShape, ShardId

MIN_BLOCKS = 4
"""Fewest KV blocks a layer that a device starts with: below, nothing could be served."""


class Owner(NamedTuple):
    """What pages can back: a span of addresses."""

    kind: str
    """``"kv"``, ``"shard"`` or ``"workspace"``."""
    key: str
    """The shard's id; the layer's number for ``"kv"``."""


WORKSPACE = Owner("workspace", "")


@cache
def kv_owner(layer: int) -> Owner:
    """The KV arena of a layer."""
    return Owner("kv", str(layer))


@cache
def shard_owner(shard: ShardId) -> Owner:
    """The slab of a shard."""
    return Owner("shard", shard)


@dataclass(frozen=True, slots=True)
class PageSizes:
    """How big things are, in pages."""

    page_bytes: int
    kv_block_bytes: int
    """One block in one layer's arena; need be neither a multiple nor a divisor of a page."""
    shard_pages: Mapping[ShardId, int]

    @classmethod
    def of(cls, shape: ModelShape, block_size: int, page_bytes: int) -> PageSizes:
        """Sizes of a model with ``block_size`` tokens a block."""
        shard_pages = {shard: -(-size // page_bytes) for shard, size in shape.shard_bytes.items()}
        return cls(page_bytes, shape.block_bytes_per_layer(block_size), shard_pages)

    def pages_for_blocks(self, num_blocks: int) -> int:
        """Pages from an arena's start that contain a byte of the first ``num_blocks`` blocks."""
        return -(-num_blocks * self.kv_block_bytes // self.page_bytes)

    def blocks_in_pages(self, num_pages: int) -> int:
        """Whole blocks in the first ``num_pages`` pages of an arena."""
        return num_pages * self.page_bytes // self.kv_block_bytes

    def page_range(self, block_id: int, count: int = 1) -> tuple[int, int]:
        """Positions ``lo <= p < hi`` of the pages with a byte of the blocks from ``block_id`` on."""
        lo = block_id * self.kv_block_bytes // self.page_bytes
        return lo, self.pages_for_blocks(block_id + count)

    def page_ranges(self, block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """All positions of the pages with a byte of these blocks, whose ids ascend: ranges that neither overlap nor
        touch, ascending."""
        ranges: list[tuple[int, int]] = []
        at = 0
        while at < len(block_ids):
            lo, hi = self.page_range(block_ids[at])
            if ranges and lo <= ranges[-1][1]:
                lo, _ = ranges.pop()
            ranges.append((lo, hi))
            at = bisect_left(block_ids, self.blocks_in_pages(hi), at)  # blocks that end in these pages add none
        return ranges


class Home(NamedTuple):
    """The pages that a dropped shard had."""

    extents: Extents
    is_intact: bool
    """None of them can have been written since: the shard's bytes are still there."""


@dataclass(slots=True)
class PageMap:
    """Which physical page backs which position of which span, now. Changed by ``PagePlan.apply`` only."""

    num_pages: int
    contents: dict[Owner, Extents] = field(default_factory=dict)
    homes: dict[ShardId, Home] = field(default_factory=dict)
    """Shards that were dropped, the latest last."""
    kv_layers: LayerRange = field(default_factory=lambda: LayerRange(0, 0))
    """Layers whose arenas are whole. Others with pages hold retained KV."""
    version: int = 0

    @classmethod
    def with_workspace(cls, num_pages: int, workspace_pages: int) -> PageMap:
        """A pool with nothing in it but the workspace, which stays where it is for good."""
        if workspace_pages > num_pages:
            raise OutOfPagesError(f"a workspace of {workspace_pages} pages in {num_pages}")
        return cls(num_pages, {WORKSPACE: (Extent(0, 0, workspace_pages),)} if workspace_pages else {})

    def of(self, owner: Owner) -> Extents:
        """The pages mapped for an owner."""
        return self.contents.get(owner, ())

    def shards(self) -> frozenset[ShardId]:
        """Shards that are mapped."""
        return frozenset(owner.key for owner in self.contents if owner.kind == "shard")

    def kv_arenas(self) -> dict[int, Extents]:
        """Arenas with pages, by layer: the whole ones and those with retained KV."""
        return {int(owner.key): extents for owner, extents in self.contents.items() if owner.kind == "kv"}

    def count(self, kind: str) -> int:
        """Pages mapped for owners of one kind."""
        return sum(count_pages(extents) for owner, extents in self.contents.items() if owner.kind == kind)

    @property
    def is_bare(self) -> bool:
        """Neither parameters nor KV are mapped, as on a sleeping device, whose pages keep no content."""
        return self.contents.keys() <= {WORKSPACE}

    def free_pages(self) -> RunSet:
        """Pages that back nothing. AssertionError if a page backs two things or does not exist."""
        mapped = [(page, count) for extents in self.contents.values() for _, page, count in extents]
        free = RunSet()
        position = 0
        for page, count in sorted(mapped):
            assert position <= page, f"page {page} twice"
            free.add(position, page - position)
            position = page + count
        assert position <= self.num_pages, "a page beyond the pool is mapped"
        free.add(position, self.num_pages - position)
        return free

    def mark_written(self, layer: int, lo: int, hi: int) -> None:
        """Bytes at positions ``lo <= p < hi`` of a layer's arena may have been written: homes there are lost."""
        intact = [(shard, home) for shard, home in self.homes.items() if home.is_intact]
        if not intact:
            return
        written = RunSet(Run(e.page, e.num_pages) for e in clip(self.of(kv_owner(layer)), lo, hi))
        for shard, home in intact:
            if written.meets(home.extents):
                self.homes[shard] = home._replace(is_intact=False)

    def first_intact_positions(self) -> dict[int, int]:
        """Where the first page of an intact home lies in a layer's arena, by layer with one: writing below spoils
        nothing."""
        pages = RunSet()
        for home in self.homes.values():
            if home.is_intact:
                pages.add_extents(home.extents)  # intact homes are disjoint: taking a page of one ends it
        firsts: dict[int, int] = {}
        for layer, extents in self.kv_arenas().items() if pages else ():
            for position, page, count in extents:
                found = pages.overlap(page, count)
                if found:
                    firsts[layer] = position + found[0].page - page
                    break
        return firsts

    def check(self) -> None:
        """Raise AssertionError on any broken invariant."""
        mapped = sum(count_pages(extents) for extents in self.contents.values())
        assert mapped + len(self.free_pages()) == self.num_pages, "mapped + free != total"
        for owner, extents in self.contents.items():
            assert extents and extents == coalesce(extents), f"{owner} is listed untidily: {extents}"
            assert all(a.position + a.num_pages <= b.position for a, b in pairwise(extents)), owner
        lengths = {layer: self.of(kv_owner(layer)) for layer in self.kv_layers.layers()}
        assert len({count_pages(extents) for extents in lengths.values()}) <= 1, "arenas of different length"
        for layer, extents in lengths.items():
            assert not list(gaps(extents, count_pages(extents))), f"a hole in the arena of layer {layer}"
        assert self.homes.keys().isdisjoint(self.shards())


def first_capacity_blocks(budget_bytes: int, workspace_bytes: int, spec: LayoutSpec, sizes: PageSizes) -> int:
    """KV blocks in each arena of a device that holds this layout and nothing else; 0 where it does not fit."""
    pages = budget_bytes // sizes.page_bytes - -(-workspace_bytes // sizes.page_bytes)
    pages -= sum(sizes.shard_pages[shard] for shard in spec.shards)
    return sizes.blocks_in_pages(max(0, pages) // len(spec.kv_layers)) if spec.kv_layers else 0


def check_budget(
    budget_bytes: int, workspace_bytes: int, spec: LayoutSpec, sizes: PageSizes, block_size: int
) -> None:
    """Raise BudgetError, with the bytes needed, where the layout, the workspace and a few KV blocks do not fit."""
    page_bytes = sizes.page_bytes
    parameters = sum(sizes.shard_pages[shard] for shard in spec.shards)
    workspace = -(-workspace_bytes // page_bytes)
    blocks = len(spec.kv_layers) * sizes.pages_for_blocks(MIN_BLOCKS)
    needed = (parameters + workspace + blocks) * page_bytes
    if budget_bytes // page_bytes * page_bytes < needed:
        raise BudgetError(
            f"a memory budget of {budget_bytes} bytes is too small: {needed} bytes are needed, so give at least "
            f"--memory {-(-needed // (1 << 20))}MiB (parameters {parameters * page_bytes}, "
            f"workspace {workspace * page_bytes}, {MIN_BLOCKS} KV blocks of {block_size} tokens {blocks * page_bytes})"
        )
