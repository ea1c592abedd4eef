"""What a worker's memory should hold, as a value: the currency of drop, restore and split.

Pure. The core asks for a ``LayoutSpec``; the worker answers with a ``LayoutOffer`` (which blocks have to be evacuated,
which capacity follows) and later applies it. Which physical page backs what is decided in ``memory.pages``.
"""

from __future__ import annotations

from dataclasses import dataclass

from jettison.types import LayerRange, ShardId


@dataclass(frozen=True, slots=True)
class RetainedKV:
    """KV of layers that the worker no longer runs, kept until it has been sent."""

    layers: LayerRange
    block_ids: tuple[int, ...]
    """Ascending ids whose bytes must stay readable; all other pages of these arenas are freed."""

    @property
    def num_parts(self) -> int:
        """Blocks, each counted once for each of its layers."""
        return len(self.layers) * len(self.block_ids)


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """The target contents of one worker's memory.

    All pages that are left after ``shards``, workspace and retained KV are spread evenly over the
    arenas of ``kv_layers``.
    """

    shards: frozenset[ShardId]
    kv_layers: LayerRange
    retained: tuple[RetainedKV, ...] = ()


@dataclass(frozen=True, slots=True)
class LayoutOffer:
    """A worker's answer to a spec: nothing has changed yet."""

    version: int
    """Version of the page map this was computed from; applying it to another is refused (StalePlanError)."""
    evacuate_from_block: int
    """Blocks with id >= this must hold nothing alive when the layout is applied."""
    capacity_blocks: int
    """Blocks per arena of ``kv_layers`` afterwards."""


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """The effects of applying a layout."""

    version: int
    capacity_blocks: int
    bytes_to_kv: int
    """Bytes that moved from parameters (or retained KV) to KV arenas; negative when KV shrank."""
    num_map_calls: int
    duration_ns: int
    intact_shards: frozenset[ShardId]
    """Newly mapped shards whose pages were never overwritten: usable without a pull."""
    missing_shards: frozenset[ShardId]
    """Newly mapped shards whose bytes must be pulled."""
