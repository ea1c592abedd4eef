"""One device's memory: parameters, KV arenas and workspace as tensors whose addresses never change.

It carries out page plans (``memory.pages``) over a pool of pages (``device.pages``), moves blocks out of the way of a
shrink, and knows which dropped shards still have their bytes. Other modules decide which worker runs which layer, and
fill the shards. One thread, one call at a time.

Order of a change of layout, so that any failure leaves maps, tables and bytes as they were:

    check and plan -> unmaps, then maps (any failure: undone in reverse) -> blocks are copied -> the map is updated

Blocks are copied last although they belong to the earlier layout: an unmapped page keeps its bytes, so they are read
from the page itself, and a failure cannot have overwritten a block.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jettison.device.addresses import reserve_spans
from jettison.device.bytesview import as_tensor_uint8
from jettison.device.devicebytes import DeviceBytes
from jettison.device.pages import Arena, PagePool
from jettison.device.remap import BlockCopier, BlockCopy, remap
from jettison.errors import (
    JettisonError,
    MappingError,
    NotReadyError,
    StalePlanError,
    WorkerLostError,
)
from jettison.memory.extents import Extent, Extents, minus
from jettison.memory.layout import LayoutOffer, LayoutResult, LayoutSpec
from jettison.memory.mapahead import maps_ahead
from jettison.memory.pagemap import WORKSPACE, Owner, PageMap, PageSizes, check_budget, kv_owner, shard_owner
from jettison.memory.pages import PagePlan, plan_layout
from jettison.types import LayerRange, ModelShape, ShardId

logger = logging.getLogger(__name__)


class DeviceMemory:
    """A byte budget that holds parameters, KV and workspace.

    ``budget_bytes`` is a hard limit on all three, and what ``pool`` was made with. ``device_bytes``: of tensors over
    the pool. ``shape.shard_bytes`` must name every shard; ``dtype`` and ``block_size`` (tokens) give the arenas'
    shape. Tensors handed out are views of reserved address ranges: their addresses hold from ``start`` to ``close``,
    their bytes only while mapped; an access to unmapped memory ends the
    process. After WorkerLostError only ``close`` may be called.
    """

    def __init__(
        self,
        pool: PagePool,
        device_bytes: DeviceBytes,
        *,
        budget_bytes: int,
        shape: ModelShape,
        dtype: torch.dtype,
        block_size: int,
        workspace_bytes: int,
    ) -> None:
        self.capacity_blocks = 0
        """Blocks per arena of the resident layers; 0 before ``start``."""
        self._budget_bytes = budget_bytes
        self._shape = shape
        self._dtype = dtype
        self._block_size = block_size
        self._workspace_bytes = workspace_bytes
        self._sizes = PageSizes.of(shape, block_size, pool.page_bytes)
        self._pool = pool
        self._bytes = device_bytes
        self._map = PageMap(self._pool.num_pages)
        self._arenas: dict[Owner, Arena] = {}
        self._kv: dict[int, torch.Tensor] = {}
        self._kv_bytes: dict[int, torch.Tensor] = {}
        self._slabs: dict[ShardId, torch.Tensor] = {}
        self._mapped: frozenset[ShardId] = frozenset()
        self._readable: dict[int, npt.NDArray[np.bool_]] = {}
        self._written_blocks = 0
        self._planned: tuple[object, PagePlan] | None = None
        """The last plan, and all that it was made from: calls of the driver tell of what has been mapped since."""
        self._intact_floor: dict[int, int] = {}
        self._is_broken = False

    # --- life -------------------------------------------------------------------------------------------------

    def start(self, spec: LayoutSpec | None = None) -> None:
        """Reserve all address ranges and map the first layout (None = every shard and layer). Idempotent.

        Raises BudgetError with the bytes needed, or for too few addresses, MappingError, or ConfigError where the
        pool's device is missing; nothing stays acquired then. The caller fills the shards' bytes.
        """
        if self._arenas:
            return
        spec = LayoutSpec(self._shape.all_shards, self._shape.all_layers) if spec is None else spec
        check_budget(self._budget_bytes, self._workspace_bytes, spec, self._sizes, self._block_size)
        self._map = PageMap.with_workspace(self._pool.num_pages, self._pages(self._workspace_bytes))
        plan = plan_layout(self._map, spec, self._sizes, live_blocks=0)
        try:
            self._pool.start()
            self._reserve()
            for extent in self._map.of(WORKSPACE):
                self._arenas[WORKSPACE].map(*extent)
            for mapping in plan.maps:
                self._arenas[mapping.owner].map(mapping.position, mapping.page, mapping.num_pages)
        except JettisonError:
            self.close()
            raise
        self._adopt(plan)

    def close(self) -> None:
        """Release everything. Idempotent. No tensor handed out before may be touched afterwards."""
        self._arenas.clear()
        self._kv.clear()
        self._kv_bytes.clear()
        self._slabs.clear()
        self._pool.close()
        self._map = PageMap(self._pool.num_pages)
        self._mapped = frozenset()
        self._readable = {}
        self._intact_floor = {}
        self._written_blocks = 0
        self._planned = None
        self.capacity_blocks = 0
        self._is_broken = False

    @property
    def version(self) -> int:
        """Version of the page map: every successful ``apply`` adds one."""
        return self._map.version

    # --- tensors ----------------------------------------------------------------------------------------------

    def shard_bytes(self, shard: ShardId) -> torch.Tensor:
        """uint8 ``[shape.shard_bytes[shard]]``, writable. Raises NotReadyError when the shard is not mapped."""
        if shard not in self._mapped:
            raise NotReadyError(f"{shard} is not mapped")
        return self._slabs[shard]

    def is_mapped(self, shard: ShardId) -> bool:
        """Whether the shard has pages now."""
        return shard in self._mapped

    def kv_arena(self, layer: int) -> torch.Tensor:
        """``[reserved_blocks, 2, kv_heads, block_size, head_dim]`` over the layer's whole address range.

        Only blocks below ``capacity_blocks`` of a resident layer may be touched.
        """
        self._check_open()
        return self._kv[layer]

    def workspace(self) -> torch.Tensor:
        """uint8 ``[workspace_bytes]``, mapped for good."""
        self._check_open()
        return self._arenas[WORKSPACE].tensor()[: self._workspace_bytes]

    # --- layout -----------------------------------------------------------------------------------------------

    @property
    def prepares(self) -> bool:
        """Whether ``prepare`` makes a later ``apply`` cheaper."""
        return self._pool.prepares

    def offer(self, spec: LayoutSpec, live_blocks: int) -> LayoutOffer:
        """The needs and gains of an ``apply`` of ``spec``. Mappings stay as they are.

        ``live_blocks``: the number of blocks to stay alive. Raises OutOfPagesError if parameters and retained KV alone
        do not fit, StalePlanError if a block to be retained is missing.
        """
        plan = self._plan(spec, live_blocks)
        return LayoutOffer(plan.version, plan.evacuate_from_block, plan.capacity_blocks)

    def prepare(self, spec: LayoutSpec, max_pages: int = sys.maxsize) -> int:
        """The first turn of ``preparing``; returns the number of pages mapped, 0 where all are."""
        return next(self.preparing(spec, max_pages), 0)

    def preparing(self, spec: LayoutSpec, pages_a_turn: int) -> Iterator[int]:
        """Map pages ahead of an ``apply`` of ``spec``, which then need not map them. Kernels may be running.

        ``spec`` retains nothing; layouts on the way there are prepared with it (``memory.mapahead``).

        Only positions that own nothing now are prepared; layout, bytes and version stay as they are. Yields after each
        ``pages_a_turn`` pages (30 µs each on a card) and at the end the number mapped: nothing where all are mapped, or
        for a back end without a gain. Ends with the next change of layout. Raises like ``offer``, and MappingError,
        after which the layout is still as it was.
        """
        version, left = self._map.version, pages_a_turn
        if not self._pool.prepares:
            return
        self._check_open()
        self._note_written_pages()
        for arena, (position, page, num_pages) in self._not_mapped(spec):
            first = 0
            while first < num_pages:
                piece = min(num_pages - first, left)
                left -= arena.prepare(position + first, page + first, piece)
                first += piece
                if not left:
                    yield pages_a_turn
                    left = pages_a_turn
                    if self._map.version != version:
                        return
        if left < pages_a_turn:
            yield pages_a_turn - left

    def apply(
        self, spec: LayoutSpec, live_blocks: int, version: int, copies: Sequence[BlockCopy]
    ) -> LayoutResult:
        """Copy blocks ``(from, to)`` in every arena that stays, then remap. No kernel may be running.

        A layout begins when no step is being computed (``core.controlstream``, rule 3) and copies beside steps are
        halted (``live.worker.loop``); this call waits for the work of a separate device.

        Block ids in ``copies`` and in ``spec.retained`` are valid before the copies. Raises like ``offer``,
        StalePlanError if the map is not at ``version``, ValueError for copies that do not get out of the way of the
        change, and MappingError with everything rolled back.
        """
        start_ns = time.perf_counter_ns()
        if version != self._map.version:
            raise StalePlanError(f"layout for version {version}, the page map is at {self._map.version}")
        # Writes since the offer can only have overwritten homes of dropped shards: fewer shards then come back, and the
        # number of blocks does not shrink.
        plan = self._plan(spec, live_blocks)
        self._check_copies(copies, plan)
        self._come_to_rest()
        calls_before = self._pool.num_calls
        try:
            self._or_broken(partial(remap, self._arenas, self._map, plan))
        except MappingError:
            if self._map.is_bare:
                self._give_back()  # a wake that failed holds no page that it got until then
            raise
        num_calls = self._pool.num_calls - calls_before
        before = replace(self._map)
        self._adopt(plan)
        if copies:
            self._copy_blocks(before, copies)
        return LayoutResult(
            version=self._map.version,
            capacity_blocks=plan.capacity_blocks,
            bytes_to_kv=plan.bytes_to_kv,
            num_map_calls=num_calls,
            duration_ns=time.perf_counter_ns() - start_ns,
            intact_shards=plan.intact_shards,
            missing_shards=plan.missing_shards,
        )

    def note_written(self, num_blocks: int) -> None:
        """Blocks below ``num_blocks`` may have been written, in every resident layer, since the last layout."""
        self._written_blocks = max(self._written_blocks, num_blocks)

    def report(self) -> dict[str, int]:
        """Bytes by use: parameters (mapped), KV (retained included), workspace and free add up to the budget; and what
        is held of the device, whatever it is used for.

        And since the pool was made: calls that mapped or unmapped, and pages that needed none, for kept mappings.
        """
        page_bytes = self._sizes.page_bytes
        parameters, kv, workspace = (self._map.count(kind) * page_bytes for kind in ("shard", "kv", "workspace"))
        dropped = sum(self._sizes.shard_pages.values()) * page_bytes - parameters
        return {
            "budget_bytes": self._budget_bytes,
            "parameter_bytes": parameters,
            "dropped_parameter_bytes": dropped if self._arenas else 0,
            "kv_bytes": kv,
            "workspace_bytes": workspace,
            "free_bytes": self._budget_bytes - parameters - kv - workspace,
            "held_bytes": self._pool.held_bytes,
            "map_calls": self._pool.num_calls,
            "map_calls_saved": self._pool.num_calls_saved,
        }

    def check(self) -> None:
        """Raise AssertionError on any broken invariant of the page map, or of what the pool has mapped for it."""
        self._map.check()
        self._pool.check()

    # --- exchange ---------------------------------------------------------------------------------------------

    def kv_gather(self, layers: LayerRange, block_ids: Sequence[int], out: Any) -> int:
        """Copy blocks out, layer by layer, block by block, to the start of ``out``: uint8 on the host, tensor
        or array.

        Reads retained KV too. Returns the bytes written. Raises IndexError for a block that is not mapped in one of
        the layers, ValueError if ``out`` is too small.
        """
        ids = self._block_ids(layers, block_ids)
        flat = as_tensor_uint8(out)
        num_bytes = len(layers) * len(ids) * self._sizes.kv_block_bytes
        if flat.numel() < num_bytes:
            raise ValueError(f"{num_bytes} bytes of KV do not fit in {flat.numel()}")
        if num_bytes:
            self._bytes.gather([self._kv_bytes[layer] for layer in layers.layers()], ids, flat[:num_bytes])
        return num_bytes

    def check_readable(self, layer: int, block_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Raise IndexError unless all the blocks are mapped in a layer, KV of the stage or retained."""
        self._block_ids(LayerRange(layer, layer + 1), block_ids)

    def kv_scatter(self, layers: LayerRange, block_ids: Sequence[int], data: Any) -> None:
        """Copy blocks in: the inverse of ``kv_gather``. ``data`` may be read-only. Raises like it."""
        ids = self._block_ids(layers, block_ids)
        flat = as_tensor_uint8(data)
        num_bytes = len(layers) * len(ids) * self._sizes.kv_block_bytes
        if flat.numel() != num_bytes:
            raise ValueError(f"{num_bytes} bytes of KV expected, got {flat.numel()}")
        if num_bytes:
            self._mark_written(layers, ids.tolist())
            self._bytes.scatter([self._kv_bytes[layer] for layer in layers.layers()], ids, flat)

    def block_addresses(
        self, layers: LayerRange, block_ids: Sequence[int], *, are_written: bool
    ) -> npt.NDArray[np.int64]:
        """Addresses of blocks, layer by layer, valid for as long as the layout. ``are_written``: the caller will write
        the blocks. Raises IndexError for a block that is not mapped in one of the layers."""
        ids = self._block_ids(layers, block_ids)
        if are_written:
            self._mark_written(layers, ids.tolist())
        first = np.array([self._arenas[kv_owner(layer)].address for layer in layers.layers()], dtype=np.int64)
        addresses: npt.NDArray[np.int64] = (first[:, None] + ids * self._sizes.kv_block_bytes).reshape(-1)
        return addresses

    # --- private: start ---------------------------------------------------------------------------------------

    def _pages(self, num_bytes: int) -> int:
        return -(-num_bytes // self._sizes.page_bytes)

    def _reserve(self) -> None:
        shape, sizes = self._shape, self._sizes
        self._arenas |= reserve_spans(self._pool, self._workspace_bytes, shape, sizes)
        for shard, num_bytes in shape.shard_bytes.items():
            self._slabs[shard] = self._arenas[shard_owner(shard)].tensor()[:num_bytes]
        reserved_blocks = sizes.blocks_in_pages(self._pool.num_pages)
        block_shape = (2, shape.num_kv_heads, self._block_size, shape.head_dim)
        for layer in shape.all_layers.layers():
            blocks = self._arenas[kv_owner(layer)].tensor()[: reserved_blocks * sizes.kv_block_bytes]
            self._kv[layer] = blocks.view(self._dtype).view(reserved_blocks, *block_shape)
            self._kv_bytes[layer] = blocks.view(reserved_blocks, sizes.kv_block_bytes)

    # --- private: layout --------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_broken:
            raise WorkerLostError("the device's memory is in an unknown state; restart the worker")
        if not self._arenas:
            raise NotReadyError("the device's memory is not open")

    def _plan(self, spec: LayoutSpec, live_blocks: int) -> PagePlan:
        """The plan of the last call, mostly the offer of what is applied now, where its inputs are as they were."""
        self._check_open()
        self._note_written_pages()
        inputs = (spec, live_blocks, self._map.version, dict(self._map.homes), self._pool.num_calls)
        if self._planned is None or self._planned[0] != inputs:
            mapped_at = self._mapped_at if self._pool.prepares else None
            self._planned = inputs, plan_layout(self._map, spec, self._sizes, live_blocks, mapped_at)
        return self._planned[1]

    def _note_written_pages(self) -> None:
        written = self._sizes.pages_for_blocks(self._written_blocks)
        for layer in self._map.kv_layers.layers():
            self._mark_pages(layer, 0, written)

    def _not_mapped(self, spec: LayoutSpec) -> Iterator[tuple[Arena, Extent]]:
        """What a layout, or one on the way to it, needs in an arena and has not there yet."""
        for owner, *run in maps_ahead(self._map, spec, self._sizes, self.capacity_blocks, self._mapped_at):
            wanted = Extent(*run)
            there = self._mapped_at(owner, wanted.position, wanted.position + wanted.num_pages)
            for missing in minus((wanted,), there):
                yield self._arenas[owner], missing

    def _mapped_at(self, owner: Owner, lo: int, hi: int) -> Extents:
        return tuple([Extent(*run) for run in self._arenas[owner].mapped(lo, hi - lo)])

    def _adopt(self, plan: PagePlan) -> None:
        """Make a plan that has been carried out the present state."""
        plan.apply(self._map)
        self._mapped = self._map.shards()
        self.capacity_blocks = plan.capacity_blocks
        self._written_blocks = 0
        self._readable = self._readable_blocks()
        self._intact_floor = self._map.first_intact_positions()
        if self._map.is_bare:
            self._give_back()

    def _give_back(self) -> None:
        """Return the memory of all free pages to the system, as the device sleeps."""
        try:
            for page, num_pages in self._map.free_pages().runs():
                self._pool.discard(page, num_pages)
        except MappingError as error:  # the layout is valid all the same
            logger.warning("a sleeping device keeps memory: %s", error)

    @property
    def held_bytes(self) -> int:
        """Physical memory behind the budget's pages, now."""
        return self._pool.held_bytes

    def _readable_blocks(self) -> dict[int, npt.NDArray[np.bool_]]:
        """By layer with retained KV: mask of the blocks that are mapped from end to end."""
        positions = {
            layer: tuple([(position, count) for position, _, count in extents])
            for layer, extents in self._map.kv_arenas().items()
            if layer not in self._map.kv_layers.layers()
        }
        masks = {mapped: self._whole_blocks(mapped) for mapped in set(positions.values())}  # mostly one for all
        return {layer: masks[mapped] for layer, mapped in positions.items()}

    def _whole_blocks(self, positions: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
        """Mask of the blocks that lie in these stretches ``(position, count)`` of an arena from end to end."""
        sizes = self._sizes
        num_pages = sum(positions[-1])
        mapped = np.zeros(num_pages + 1, dtype=np.int64)
        for position, count in positions:
            mapped[position + 1 : position + count + 1] = 1
        before = np.cumsum(mapped)
        first = np.arange(sizes.blocks_in_pages(num_pages), dtype=np.int64) * sizes.kv_block_bytes
        lo, hi = first // sizes.page_bytes, -(-(first + sizes.kv_block_bytes) // sizes.page_bytes)
        whole: npt.NDArray[np.bool_] = before[hi] - before[lo] == hi - lo
        return whole

    def _check_copies(self, copies: Sequence[BlockCopy], plan: PagePlan) -> None:
        sources, targets = {src for src, _ in copies}, {dst for _, dst in copies}
        if len(targets) != len(copies) or sources & targets:
            raise ValueError("a block is copied to twice, or copied from and to")
        line = min(plan.evacuate_from_block, self.capacity_blocks)
        if any(not 0 <= dst < line for dst in targets):
            raise ValueError(f"a block is copied to where it would be lost: {line} and up")
        if any(not 0 <= src < self.capacity_blocks for src in sources):
            raise ValueError(f"a block is copied from beyond the {self.capacity_blocks} that there are")

    def _come_to_rest(self) -> None:
        """Raises WorkerLostError: a device that fails here has failed for good."""
        try:
            self._pool.wait_idle()
        except MappingError as error:
            raise WorkerLostError(f"the device does not come to rest: {error}") from error

    def _or_broken(self, step: Callable[[], None]) -> None:
        """Run a step; after its WorkerLostError the memory is in an unknown state."""
        try:
            step()
        except WorkerLostError:
            self._is_broken = True
            raise

    # --- private: blocks --------------------------------------------------------------------------------------

    def _copy_blocks(self, before: PageMap, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in every arena of the new layout that had the block before."""
        copier = BlockCopier(self._pool, self._sizes.kv_block_bytes, copies)
        self._mark_written(self._map.kv_layers, [dst for _, dst in copies])
        # Whole arenas first: writing them overwrites no other layer's old bytes, writing the others might.
        for layer in sorted(self._map.kv_layers.layers(), key=lambda layer: layer not in before.kv_layers.layers()):
            owner = kv_owner(layer)
            was_whole = layer in before.kv_layers.layers()
            self._or_broken(partial(copier.copy, before.of(owner), self._arenas[owner], was_whole=was_whole))
        self._or_broken(copier.finish)

    def _block_ids(
        self, layers: LayerRange, block_ids: Sequence[int] | npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int64]:
        """The ids as int64, checked to be mapped in all the layers, as a wrong id must not end the process."""
        self._check_open()
        ids = np.asarray(block_ids, dtype=np.int64).reshape(-1)
        if ids.size:
            lo, hi = int(ids.min()), int(ids.max())
            for layer in layers.layers():
                if layer in self._map.kv_layers.layers():
                    known = hi < self.capacity_blocks
                else:
                    whole = self._readable.get(layer)
                    known = whole is not None and hi < len(whole) and bool(whole[ids].all())
                if lo < 0 or not known:
                    raise IndexError(f"layer {layer}: a block between {lo} and {hi} is not mapped")
        return ids

    def _mark_written(self, layers: LayerRange, block_ids: Sequence[int]) -> None:
        if self._intact_floor:
            ranges = self._sizes.page_ranges(sorted(block_ids))
            for layer in layers.layers():
                for lo, hi in ranges:
                    self._mark_pages(layer, lo, hi)

    def _mark_pages(self, layer: int, lo: int, hi: int) -> None:
        floor = self._intact_floor.get(layer)
        if floor is not None and hi > floor:
            self._map.mark_written(layer, lo, hi)
