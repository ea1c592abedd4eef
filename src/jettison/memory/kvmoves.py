"""Which KV must travel so that a request can run in a new group: the common core of exchange, return and migration.

A request's KV lies as layer ranges at workers; a group's stages want layer ranges at workers; the difference
is what moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from jettison.memory.stages import StagePlan
from jettison.types import LayerRange, WorkerId

MAX_PARTS = 8
"""Into how many layer ranges the KV of a live request is cut: each becomes local as it arrives."""


class ExchangeMode(StrEnum):
    """What is done; ``AUTO`` only as a setting."""

    AUTO = "auto"
    TRANSFER = "transfer"
    RECOMPUTE = "recompute"
    LIVE = "live"


class KVMovePlan(NamedTuple):
    """Layers of one request's KV that go from one worker to another."""

    src: WorkerId
    dst: WorkerId
    layers: LayerRange


def plan_kv_moves(
    kv_at: Mapping[WorkerId, LayerRange], stages: Sequence[StagePlan], *, from_host: bool = False
) -> tuple[KVMovePlan, ...]:
    """Moves that give every stage its layers, as few as contiguous ranges allow.

    ``from_host``: the KV is in the workers' host pools, so what a stage's own worker has is to be moved, too. Raises
    ValueError if some layer's KV is nowhere: such a request has to be recomputed.
    """
    moves: list[KVMovePlan] = []
    for stage in stages:
        have = kv_at.get(stage.worker_id)
        for layer in stage.layers.layers():
            is_here = have is not None and have.lo <= layer < have.hi
            if is_here and not from_host:
                continue
            last = moves[-1] if moves else None
            extends = last is not None and last.dst == stage.worker_id and last.layers.hi == layer
            extends = extends and (not is_here or last is None or last.src == stage.worker_id)
            if last is not None and extends and kv_at[last.src].hi > layer:
                moves[-1] = last._replace(layers=LayerRange(last.layers.lo, layer + 1))
                continue
            # Of several that have it the one that reaches furthest: the fewest ranges.
            sources = [(-r.hi, w) for w, r in kv_at.items() if r.lo <= layer < r.hi]
            if not sources:
                raise ValueError(f"KV of layer {layer} is nowhere")
            source = stage.worker_id if is_here else min(sources)[1]
            moves.append(KVMovePlan(source, stage.worker_id, LayerRange(layer, layer + 1)))
    return tuple(moves)


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
