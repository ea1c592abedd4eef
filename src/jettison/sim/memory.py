"""Modelled device memory: answers layouts as ``device.memory`` does, by counting pages instead of mapping them.

An 80 GiB device has 40,960 pages and a cluster a thousand devices, so there is no map of pages here. What is counted:

- the length of the arenas (all pages that shards, workspace and retained KV leave, divided by the layers), which is
  ``memory.pages``' own arithmetic and gives the same capacity to the block;
- of each dropped shard, in which arenas its pages lie from which position on: they are dealt out with the planner's own
  functions, on top of what is kept, and come back intact if the arenas were never written up to there.

What is not modelled: that page runs can be torn. A shard that could not have its own pages back when it was restored
is treated as if it had. So after such a restore (not before) a later drop may lie otherwise than planned here, which
can change which shards are intact and how far a shrink evacuates, never a capacity. The number of map calls is an
estimate: one for each shard, and one for each run of an arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jettison.errors import BudgetError, OutOfPagesError, StalePlanError
from jettison.memory.extents import Run, deal, level
from jettison.memory.layout import LayoutOffer, LayoutResult, LayoutSpec
from jettison.memory.pagemap import PageSizes
from jettison.types import LayerRange, ModelShape, ShardId


class Piece(NamedTuple):
    """Pages of a dropped shard that serve in an arena."""

    layer: int
    position: int
    """In pages from the arena's start."""
    page: int
    """First of its pages, by which pieces are ordered in an arena."""
    num_pages: int


@dataclass(frozen=True, slots=True)
class Lent:
    """Where the pages of a dropped shard are."""

    pieces: tuple[Piece, ...]
    idle: tuple[Run, ...]
    """Pages that back nothing."""
    is_intact: bool
    """Nobody can have written any of them since the drop."""

    def clipped(self, lines: Mapping[int, int]) -> Lent:
        """What is left in the arenas when each is popped down to its line; without a line it is gone whole."""
        pieces: list[Piece] = []
        idle = list(self.idle)
        for piece in self.pieces:
            kept = max(0, min(piece.num_pages, lines.get(piece.layer, 0) - piece.position))
            if kept:
                pieces.append(piece._replace(num_pages=kept))
            if kept < piece.num_pages:
                idle.append(Run(piece.page + kept, piece.num_pages - kept))
        return Lent(tuple(pieces), tuple(idle), self.is_intact)


@dataclass(frozen=True, slots=True)
class _Plan:
    """From the present layout to the next."""

    spec: LayoutSpec
    length: int
    retained: dict[int, int]
    """Layer -> pages of KV kept there although the layer is not served."""
    lent: dict[ShardId, Lent]
    evacuate_from_block: int
    capacity_blocks: int
    bytes_to_kv: int
    num_map_calls: int
    intact: frozenset[ShardId]
    missing: frozenset[ShardId]


class ModelledMemory:
    """A byte budget that holds parameters, KV and workspace; nothing in it but numbers."""

    def __init__(
        self, shape: ModelShape, block_size: int, budget_bytes: int, workspace_bytes: int, page_bytes: int,
        spec: LayoutSpec,
    ) -> None:
        """Raises BudgetError where the parameters of ``spec`` and one KV block do not fit."""
        self.sizes = PageSizes.of(shape, block_size, page_bytes)
        self._num_pages = budget_bytes // page_bytes
        self._workspace_pages = -(-workspace_bytes // page_bytes)
        self._budget_bytes = budget_bytes
        self._first_page: dict[ShardId, int] = {}
        page = self._workspace_pages
        for shard, num_pages in self.sizes.shard_pages.items():
            self._first_page[shard] = page
            page += num_pages
        self.version = 0
        self._spec = spec
        self._retained: dict[int, int] = {}
        self._lent: dict[ShardId, Lent] = {}
        try:
            self._length = self._arena_length(spec, {})
        except OutOfPagesError as error:
            raise BudgetError(f"a memory budget of {budget_bytes} bytes is too small: {error}") from None
        if self.capacity_blocks < 1:
            raise BudgetError(f"a memory budget of {budget_bytes} bytes leaves no KV block beside the parameters")

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def capacity_blocks(self) -> int:
        """Blocks in each arena of the layers served."""
        return self.sizes.blocks_in_pages(self._length)

    @property
    def shards(self) -> frozenset[ShardId]:
        """What is mapped."""
        return self._spec.shards

    @property
    def kv_layers(self) -> LayerRange:
        """Layers whose arenas are whole."""
        return self._spec.kv_layers

    @property
    def has_intact_shards(self) -> bool:
        """Some dropped shard could come back by mapping alone: only then does it matter what is written."""
        return any(lent.is_intact for lent in self._lent.values())

    def report(self) -> dict[str, int]:
        """Bytes by use, as ``DeviceMemory.report`` has them."""
        page_bytes, pages = self.sizes.page_bytes, self.sizes.shard_pages
        parameters = sum(pages[shard] for shard in self._spec.shards) * page_bytes
        kv = (self._length * len(self._spec.kv_layers) + sum(self._retained.values())) * page_bytes
        workspace = self._workspace_pages * page_bytes
        return {
            "budget_bytes": self._budget_bytes,
            "parameter_bytes": parameters,
            "dropped_parameter_bytes": sum(pages.values()) * page_bytes - parameters,
            "kv_bytes": kv,
            "workspace_bytes": workspace,
            "free_bytes": self._budget_bytes - parameters - kv - workspace,
        }

    # --- layouts ----------------------------------------------------------------------------------------------

    def offer(self, spec: LayoutSpec, live_blocks: int) -> LayoutOffer:
        """What ``apply`` of this would need and give. Raises OutOfPagesError, StalePlanError."""
        plan = self._plan(spec, live_blocks)
        return LayoutOffer(self.version, plan.evacuate_from_block, plan.capacity_blocks)

    def apply(
        self, spec: LayoutSpec, live_blocks: int, version: int, copies: Sequence[tuple[int, int]]
    ) -> LayoutResult:
        """Make it so. Its duration is 0: what it takes is the profile's affair. Raises like ``offer``, StalePlanError
        also where the layout is not at ``version``."""
        if version != self.version:
            raise StalePlanError(f"layout for version {version}, the page map is at {self.version}")
        plan = self._plan(spec, live_blocks)
        self._spec, self._length = spec, plan.length
        self._retained, self._lent = plan.retained, plan.lent
        self.version += 1
        self.note_landed(spec.kv_layers, [target for _, target in copies])
        return LayoutResult(
            self.version, plan.capacity_blocks, plan.bytes_to_kv, plan.num_map_calls, 0, plan.intact, plan.missing
        )

    def note_written(self, num_blocks: int) -> None:
        """Blocks below ``num_blocks`` may have been written in every layer served."""
        self._spoil(self.sizes.pages_for_blocks(num_blocks))

    def note_landed(self, layers: LayerRange, block_ids: Iterable[int]) -> None:
        """These blocks of these layers have been written."""
        if not self.has_intact_shards:
            return
        ranges = [self.sizes.page_range(block) for block in block_ids]
        for shard, lent in self._lent.items():
            if lent.is_intact and any(
                piece.layer in layers.layers()
                and any(lo < piece.position + piece.num_pages and piece.position < hi for lo, hi in ranges)
                for piece in lent.pieces
            ):
                self._lent[shard] = Lent(lent.pieces, lent.idle, False)

    def _spoil(self, num_pages: int) -> None:
        for shard, lent in self._lent.items():
            if lent.is_intact and any(piece.position < num_pages for piece in lent.pieces):
                self._lent[shard] = Lent(lent.pieces, lent.idle, False)

    # --- planning ---------------------------------------------------------------------------------------------

    def _arena_length(self, spec: LayoutSpec, retained: Mapping[int, int]) -> int:
        left = self._num_pages - self._workspace_pages
        left -= sum(self.sizes.shard_pages[shard] for shard in spec.shards)
        left -= sum(retained.values())
        if left < 0:
            raise OutOfPagesError(f"{-left} pages too few for the parameters and the KV to be retained")
        return left // len(spec.kv_layers) if spec.kv_layers else 0

    def _plan(self, spec: LayoutSpec, live_blocks: int) -> _Plan:
        sizes, now = self.sizes, self._spec
        retained = self._pages_to_retain(spec)
        length = self._arena_length(spec, retained)
        # Arenas that stay keep what they hold; one that is served again only what was retained there.
        before = {
            layer: self._length if layer in now.kv_layers.layers() else self._retained.get(layer, 0)
            for layer in spec.kv_layers.layers()
        }
        lines = {layer: min(length, held) for layer, held in before.items()}
        added = [shard for shard in sizes.shard_pages if shard in spec.shards - now.shards]
        returning = self._returning(added, lines, min(sizes.pages_for_blocks(live_blocks), length))
        for shard in returning:
            for piece in self._lent[shard].pieces:
                if piece.layer in lines:
                    lines[piece.layer] = min(lines[piece.layer], piece.position)
        num_kept = sum(retained.values()) + sum(lines.values())
        lent = self._lend(spec, added, returning, lines, length, num_kept)
        capacity = sizes.blocks_in_pages(length) if spec.kv_layers else 0
        popped = [lines[layer] for layer, held in before.items() if held > lines[layer]]
        intact = frozenset(shard for shard in returning if self._lent[shard].is_intact)
        return _Plan(
            spec, length, retained, lent,
            min([capacity, *(sizes.blocks_in_pages(line) for line in popped)]),
            capacity,
            self._pages_to_kv(spec, length, retained, lines) * sizes.page_bytes,
            self._map_calls(spec, lent, lines, length),
            intact, frozenset(added) - intact,
        )

    def _pages_to_retain(self, spec: LayoutSpec) -> dict[int, int]:
        """Pages with a byte of retained blocks, by layer that is not served. Raises StalePlanError."""
        blocks: dict[int, frozenset[int]] = {}
        for kept in spec.retained:
            ids = frozenset(kept.block_ids)
            for layer in kept.layers.layers():
                if ids and layer not in spec.kv_layers.layers():
                    blocks[layer] = blocks[layer] | ids if layer in blocks else ids
        # Layers mostly share one set of blocks, and blocks are many: count them once.
        pages = {ids: _count_pages(ids, self.sizes) for ids in set(blocks.values())}
        for layer, ids in blocks.items():
            is_whole = layer in self._spec.kv_layers.layers()
            missing = max(ids) >= self.capacity_blocks if is_whole else pages[ids] > self._retained.get(layer, 0)
            if missing:
                raise StalePlanError(f"layer {layer}: KV to be retained is not there")
        return {layer: pages[ids] for layer, ids in sorted(blocks.items())}

    def _returning(self, added: list[ShardId], lines: Mapping[int, int], min_line: int) -> list[ShardId]:
        """New shards that can have all of their own pages back: none lies in an arena below what stays alive."""
        return [
            shard for shard in added
            if shard in self._lent
            and all(p.layer not in lines or p.position >= min_line for p in self._lent[shard].pieces)
        ]

    def _lend(
        self, spec: LayoutSpec, added: list[ShardId], returning: list[ShardId], lines: Mapping[int, int], length: int,
        num_kept: int,
    ) -> dict[ShardId, Lent]:
        """Where the pages of all dropped shards lie afterwards; ``num_kept`` KV pages stay what they are."""
        lent = {s: entry.clipped(lines) for s, entry in self._lent.items() if s not in spec.shards}
        for shard, num_pages in self.sizes.shard_pages.items():
            if shard in self._spec.shards - spec.shards:
                lent[shard] = Lent((), (Run(self._first_page[shard], num_pages),), True)
        lent = self._give_up(lent, [s for s in added if s not in returning])
        runs = [run for shard in reversed(lent) for run in lent[shard].idle]
        needs = {layer: length - line for layer, line in lines.items()}
        num_lent, needed = sum(run.num_pages for run in runs), sum(needs.values())
        even = num_lent // len(needs) * len(needs) if needs else 0
        # Pages that are free to become KV and were no shard's.
        used = self._workspace_pages + sum(self.sizes.shard_pages[s] for s in spec.shards) + num_kept
        num_plain = max(0, self._num_pages - used - num_lent)
        on_top = level(needs, min(max(even, needed - num_plain), needed))
        return _dealt(lent, deal(runs, on_top), on_top, length)

    def _give_up(self, lent: dict[ShardId, Lent], homeless: list[ShardId]) -> dict[ShardId, Lent]:
        """Shards that cannot have their own pages take others': of spoilt homes before intact ones."""
        wanted = sum(self.sizes.shard_pages[shard] for shard in homeless)
        own = sum(run.num_pages for s in homeless if s in self._lent for run in self._lent[s].idle)
        for shard in sorted(lent, key=lambda s: lent[s].is_intact):
            if wanted <= own or not lent[shard].idle:
                continue
            entry, idle = lent[shard], list(lent[shard].idle)
            while idle and wanted > own:
                run = idle.pop()
                taken = min(run.num_pages, wanted - own)
                wanted -= taken
                if taken < run.num_pages:
                    idle.append(Run(run.page, run.num_pages - taken))
            lent[shard] = Lent(entry.pieces, tuple(idle), False)
        return lent

    def _pages_to_kv(
        self, spec: LayoutSpec, length: int, retained: Mapping[int, int], lines: Mapping[int, int]
    ) -> int:
        before = self._length * len(self._spec.kv_layers) + sum(self._retained.values())
        after = length * len(spec.kv_layers) + sum(retained.values())
        given_up = sum(
            num_pages - min(num_pages, lines[layer] if layer in lines else retained.get(layer, 0))
            for layer, num_pages in self._retained.items()
        )
        return after - before + given_up

    def _map_calls(self, spec: LayoutSpec, lent: Mapping[ShardId, Lent], lines: Mapping[int, int], length: int) -> int:
        changed = len(spec.shards ^ self._spec.shards)
        dropped = sum(layer not in lines for layer in self._spec.kv_layers.layers())
        grown = sum(line < length for line in lines.values())
        on_top = sum(len(entry.pieces) for entry in lent.values()) - sum(
            len(entry.pieces) for shard, entry in self._lent.items() if shard in lent
        )
        popped = sum(line < self._length for layer, line in lines.items() if layer in self._spec.kv_layers.layers())
        return changed + dropped + grown + max(0, on_top) + popped


def _dealt(
    lent: Mapping[ShardId, Lent], dealt: Mapping[int, list[Run]], on_top: Mapping[int, int], length: int
) -> dict[ShardId, Lent]:
    """Shards with what was dealt of their idle pages laid on top of the arenas, in order of pages."""
    laid: list[Piece] = []
    for layer, runs in dealt.items():
        position = length - on_top[layer]
        for page, num_pages in sorted(runs):
            laid.append(Piece(layer, position, page, num_pages))
            position += num_pages
    after: dict[ShardId, Lent] = {}
    for shard, entry in lent.items():
        pieces, idle = list(entry.pieces), []
        for run in entry.idle:
            inside = [p for p in laid if run.page <= p.page < run.page + run.num_pages]
            pieces += inside
            page = run.page
            for piece in sorted(inside, key=lambda p: p.page):
                if piece.page > page:
                    idle.append(Run(page, piece.page - page))
                page = piece.page + piece.num_pages
            if page < run.page + run.num_pages:
                idle.append(Run(page, run.page + run.num_pages - page))
        after[shard] = Lent(tuple(pieces), tuple(idle), entry.is_intact)
    return after


def _count_pages(block_ids: frozenset[int], sizes: PageSizes) -> int:
    """Pages with a byte of any of the blocks."""
    total, end = 0, 0
    for block in sorted(block_ids):
        lo, hi = sizes.page_range(block)
        total += max(0, hi - max(lo, end))
        end = max(end, hi)
    return total


def home_memory(
    shape: ModelShape, block_size: int, budget_bytes: int, workspace_bytes: int, page_bytes: int, layers: LayerRange
) -> ModelledMemory:
    """The memory of a worker that starts with these layers. Raises BudgetError."""
    spec = LayoutSpec(shape.shards_for(layers), layers)
    return ModelledMemory(shape, block_size, budget_bytes, workspace_bytes, page_bytes, spec)
