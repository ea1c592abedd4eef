"""Modelled device memory: answers layouts as ``device.memory`` does, with the same planner over the same map of pages.

Nothing is mapped and there are no bytes: ``memory.pages`` plans which page would back which address, writes are noted
by blocks, and the profile has the time of a remap. The map is made of runs of pages: a device of 80 GiB costs no more
than a small one, about a millisecond a layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from jettison.errors import BudgetError, OutOfPagesError, StalePlanError
from jettison.memory.layout import LayoutOffer, LayoutResult, LayoutSpec
from jettison.memory.mapahead import MappedPages, layouts_ahead, maps_ahead
from jettison.memory.pagemap import PageMap, PageSizes
from jettison.memory.pages import PagePlan, plan_layout
from jettison.types import LayerRange, ModelShape, ShardId


class ModelledMemory:
    """A byte budget that holds parameters, KV and workspace, as numbers only."""

    def __init__(
        self, shape: ModelShape, block_size: int, budget_bytes: int, workspace_bytes: int, page_bytes: int,
        spec: LayoutSpec, drops: Sequence[LayerRange] | None = None,
    ) -> None:
        """``drops``: what is mapped ahead on a card, whose mappings stay; None: elsewhere. Raises BudgetError where the
        parameters of ``spec`` and one KV block do not fit."""
        self._shape, self._drops = shape, drops
        self._mapped = MappedPages()
        self.sizes = PageSizes.of(shape, block_size, page_bytes)
        self._budget_bytes = budget_bytes
        num_pages, workspace_pages = budget_bytes // page_bytes, -(-workspace_bytes // page_bytes)
        try:
            plan = _first_plan(shape, block_size, page_bytes, num_pages, workspace_pages, spec)
        except OutOfPagesError as error:
            raise BudgetError(f"a memory budget of {budget_bytes} bytes is too small: {error}") from None
        if plan.capacity_blocks < 1:
            raise BudgetError(f"a memory budget of {budget_bytes} bytes leaves no KV block beside the parameters")
        self._map = PageMap(num_pages, version=plan.version)
        plan.apply(self._map)
        self._map.version = 0
        self._planned: tuple[LayoutSpec, int, PagePlan] | None = None
        """The last offer: its inputs, and the plan."""
        self._capacity_blocks = plan.capacity_blocks
        self._shards = spec.shards
        self._floor: int | None = None
        """Position in the arenas below which writing spoils no dropped shard; None: no dropped shard is intact."""
        self._carry_out(plan, spec)

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Layouts applied so far."""
        return self._map.version

    @property
    def capacity_blocks(self) -> int:
        """Blocks in each arena of the layers served."""
        return self._capacity_blocks

    @property
    def shards(self) -> frozenset[ShardId]:
        """Shards that are mapped."""
        return self._shards

    @property
    def kv_layers(self) -> LayerRange:
        """Layers whose arenas are whole."""
        return self._map.kv_layers

    @property
    def has_intact_shards(self) -> bool:
        """Some dropped shard could come back by mapping alone: only then do writes matter."""
        return self._floor is not None

    def report(self) -> dict[str, int]:
        """Bytes by use, as ``DeviceMemory.report`` has them."""
        page_bytes = self.sizes.page_bytes
        parameters, kv, workspace = (self._map.count(kind) * page_bytes for kind in ("shard", "kv", "workspace"))
        return {
            "budget_bytes": self._budget_bytes,
            "parameter_bytes": parameters,
            "dropped_parameter_bytes": sum(self.sizes.shard_pages.values()) * page_bytes - parameters,
            "kv_bytes": kv,
            "workspace_bytes": workspace,
            "free_bytes": self._budget_bytes - parameters - kv - workspace,
        }

    # --- layouts ----------------------------------------------------------------------------------------------

    def offer(self, spec: LayoutSpec, live_blocks: int) -> LayoutOffer:
        """The needs and the capacity of ``apply`` of this layout. Raises OutOfPagesError, StalePlanError."""
        plan = self._plan(spec, live_blocks)
        return LayoutOffer(self.version, plan.evacuate_from_block, plan.capacity_blocks)

    def apply(
        self, spec: LayoutSpec, live_blocks: int, version: int, copies: Sequence[tuple[int, int]]
    ) -> LayoutResult:
        """Apply a layout. The result's duration is 0: the profile has the time. Raises like ``offer``, and
        StalePlanError also where the layout is not at ``version``."""
        if version != self.version:
            raise StalePlanError(f"layout for version {version}, the page map is at {self.version}")
        plan = self._plan(spec, live_blocks)
        plan.apply(self._map)
        self._planned = None
        self._capacity_blocks, self._shards = plan.capacity_blocks, spec.shards
        self._note_floor()
        self.note_landed(spec.kv_layers, [target for _, target in copies])
        num_calls = self._carry_out(plan, spec)
        return LayoutResult(
            self.version, plan.capacity_blocks, plan.bytes_to_kv, num_calls, 0, plan.intact_shards,
            plan.missing_shards,
        )

    def _carry_out(self, plan: PagePlan, spec: LayoutSpec) -> int:
        """The calls of a plan: on a card one for each page that is not mapped there. What comes next is mapped ahead at
        once, for there is time: a tenth of a second beside steps."""
        if self._drops is None:
            return len(plan.unmaps) + len(plan.maps)
        num_pages = sum(self._mapped.put(mapping) for mapping in plan.maps)
        if self._map.is_bare:
            self._mapped.clear()
        for following in layouts_ahead(spec, self._shape, self._drops):
            for mapping in maps_ahead(self._map, following, self.sizes, self._capacity_blocks, self._mapped.at):
                self._mapped.put(mapping)
        return num_pages

    def _plan(self, spec: LayoutSpec, live_blocks: int) -> PagePlan:
        """The plan of the last offer, if it was for this layout and nothing has changed since; else a new plan."""
        if self._planned is None or self._planned[:2] != (spec, live_blocks):
            mapped_at = None if self._drops is None else self._mapped.at
            self._planned = (spec, live_blocks, plan_layout(self._map, spec, self.sizes, live_blocks, mapped_at))
        return self._planned[2]

    # --- writing ----------------------------------------------------------------------------------------------

    def note_written(self, num_blocks: int) -> None:
        """Blocks below ``num_blocks`` may have been written in every layer served."""
        self._mark(self._map.kv_layers, [(0, self.sizes.pages_for_blocks(num_blocks))])

    def note_landed(self, layers: LayerRange, block_ids: Iterable[int]) -> None:
        """These blocks of these layers have been written."""
        if self._floor is not None:
            self._mark(layers, [self.sizes.page_range(block) for block in block_ids])

    def _mark(self, layers: LayerRange, ranges: Sequence[tuple[int, int]]) -> None:
        floor = self._floor
        above = [] if floor is None else [(lo, hi) for lo, hi in ranges if hi > floor]
        if above:
            for layer in layers.layers():
                for lo, hi in above:
                    self._map.mark_written(layer, lo, hi)
            self._planned = None
            self._note_floor()

    def _note_floor(self) -> None:
        self._floor = min(self._map.first_intact_positions().values(), default=None)
        if self._floor is None and any(home.is_intact for home in self._map.homes.values()):
            self._floor = 0  # its pages back nothing now, and may back an arena after the next layout


@lru_cache(maxsize=16)
def _first_plan(
    shape: ModelShape, block_size: int, page_bytes: int, num_pages: int, workspace_pages: int, spec: LayoutSpec
) -> PagePlan:
    """The plan of an empty device; cached, as the devices of a cluster are alike. Raises OutOfPagesError."""
    return plan_layout(
        PageMap.with_workspace(num_pages, workspace_pages), spec, PageSizes.of(shape, block_size, page_bytes), 0
    )


def home_memory(
    shape: ModelShape, block_size: int, budget_bytes: int, workspace_bytes: int, page_bytes: int, layers: LayerRange,
    drops: Sequence[LayerRange] | None = None,
) -> ModelledMemory:
    """The memory of a worker that starts with these layers. Raises BudgetError."""
    spec = LayoutSpec(shape.shards_for(layers), layers)
    return ModelledMemory(shape, block_size, budget_bytes, workspace_bytes, page_bytes, spec, drops)
