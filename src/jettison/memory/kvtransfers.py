"""Which KV must travel so that a request can run in a new group: the common core of exchange, return and migration.

A request's KV lies as layer ranges at places; a group's stages want layer ranges in workers' arenas; the difference
travels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from jettison.memory.stages import StagePlan
from jettison.types import LayerRange, WorkerId

MAX_PIECE_BYTES = 1 << 20
"""Bulk is cut into pieces of at most so many bytes on the CPU, where no flag says otherwise: activations go between."""
MAX_PIECE_NS = 10_000_000
"""Most nanoseconds that a piece takes on its link, where no flag says otherwise."""
MAX_PARTS = 8
"""Into how many layer ranges the KV of a live request is cut: each becomes local as it arrives."""


class ExchangeMode(StrEnum):
    """How a stalled request gets to run again (``policy.exchange``); ``AUTO`` only as a setting."""

    AUTO = "auto"
    TRANSFER = "transfer"
    RECOMPUTE = "recompute"
    LIVE = "live"


class MigrationKind(StrEnum):
    """How a running request gets its KV in another group: it is copied, or computed there from the tokens."""

    KV = "kv"
    TOKENS = "tokens"


class Place(NamedTuple):
    """Where KV can be: a worker's arenas, or its host pool."""

    worker_id: WorkerId
    is_host: bool = False


class KVTransferPlan(NamedTuple):
    """Layers of one request's KV that go from one place into the arenas of a worker."""

    src: WorkerId
    dst: WorkerId
    layers: LayerRange
    from_host: bool = False

    @property
    def source(self) -> Place:
        """The place that the layers come from."""
        return Place(self.src, self.from_host)


def plan_kv_transfers(places: Mapping[Place, LayerRange], stages: Sequence[StagePlan]) -> tuple[KVTransferPlan, ...]:
    """Moves that give every stage its layers, as few as contiguous ranges allow.

    Layers in a worker's own arenas stay; layers in its own host pool come from there. Raises ValueError if some layer's
    KV is nowhere: such a request has to be recomputed.
    """
    transfers: list[KVTransferPlan] = []
    for stage in stages:
        if (all_at := _only_place(places, stage)) is not None:
            if all_at != Place(stage.worker_id):
                transfers.append(KVTransferPlan(all_at.worker_id, stage.worker_id, stage.layers, all_at.is_host))
            continue
        pool = Place(stage.worker_id, is_host=True)
        for layer in stage.layers.layers():
            if _has(places, Place(stage.worker_id), layer):
                continue
            is_pooled = _has(places, pool, layer)
            last = transfers[-1] if transfers else None
            extends = last is not None and last.dst == stage.worker_id and last.layers.hi == layer
            extends = extends and (not is_pooled or last is None or last.source == pool)
            if last is not None and extends and places[last.source].hi > layer:
                transfers[-1] = last._replace(layers=LayerRange(last.layers.lo, layer + 1))
                continue
            # Of several places with this layer the one that reaches furthest: so ranges are fewest.
            sources = [(-r.hi, place) for place, r in places.items() if r.lo <= layer < r.hi]
            if not sources:
                raise ValueError(f"KV of layer {layer} is nowhere")
            source = pool if is_pooled else min(sources)[1]
            layers = LayerRange(layer, layer + 1)
            transfers.append(KVTransferPlan(source.worker_id, stage.worker_id, layers, source.is_host))
    return tuple(transfers)


def _only_place(places: Mapping[Place, LayerRange], stage: StagePlan) -> Place | None:
    """The only place with KV of the request, if it has all layers of the stage: the usual case."""
    if len(places) != 1 or not len(stage.layers):
        return None
    ((place, layers),) = places.items()
    return place if layers.lo <= stage.layers.lo and stage.layers.hi <= layers.hi else None


def _has(places: Mapping[Place, LayerRange], place: Place, layer: int) -> bool:
    layers = places.get(place)
    return layers is not None and layers.lo <= layer < layers.hi


def split_layers(layers: LayerRange, max_parts: int = MAX_PARTS) -> tuple[LayerRange, ...]:
    """At most ``max_parts`` contiguous ranges of almost equal length that make up ``layers``, in order."""
    num_parts = min(max_parts, len(layers))
    bounds = [layers.lo + len(layers) * i // num_parts for i in range(num_parts + 1)] if num_parts else []
    return tuple(LayerRange(lo, hi) for lo, hi in itertools.pairwise(bounds))


def by_layers(sets: Iterable[tuple[LayerRange, Iterable[int]]]) -> tuple[tuple[LayerRange, tuple[int, ...]], ...]:
    """Blocks of overlapping layer ranges as disjoint ranges, ascending, with all blocks that any of them names.

    Ranges are few and requests are many: each set is read once, not once a layer.
    """
    by_range: dict[LayerRange, set[int]] = {}
    for layers, ids in sets:
        by_range.setdefault(layers, set()).update(ids)
    bounds = sorted({bound for layers in by_range for bound in layers})
    merged: list[tuple[LayerRange, set[int]]] = []
    for lo, hi in itertools.pairwise(bounds):
        blocks = set().union(*(ids for layers, ids in by_range.items() if layers.lo <= lo and hi <= layers.hi))
        if not blocks:
            continue
        last = merged[-1] if merged else None
        if last is not None and last[0].hi == lo and last[1] == blocks:
            merged[-1] = (LayerRange(last[0].lo, hi), blocks)
        else:
            merged.append((LayerRange(lo, hi), blocks))
    return tuple((layers, tuple(sorted(blocks))) for layers, blocks in merged)
