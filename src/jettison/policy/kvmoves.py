"""Which KV must travel so that a request can run in a new group: the common core of exchange, return and migration.

Pure. A request's KV lies as layer ranges at workers; a group's stages want layer ranges at workers; the difference
is what moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jettison.policy.merge import StagePlan
from jettison.types import LayerRange, WorkerId


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
