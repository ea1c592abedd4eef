"""Static pipelines (the ``pipeline`` baseline; vLLM's pipeline parallelism of 2 as KunServe compares with it). Pure.

The groups are decided once, before the first request: instances are paired, each keeps half of the layers, and the
freed memory is KV cache for good. Nothing here is ever undone; the dynamic counterpart is ``policy.merge``.
"""

from __future__ import annotations

from collections.abc import Sequence

from jettison.memory.stages import StagePlan
from jettison.policy.merge import MergeCandidate, plan_ranges
from jettison.types import ModelShape, WorkerId

STATIC_STAGES = 2
"""Stages of a pipeline, as in the papers' comparison."""


def plan_static_groups(
    worker_ids: Sequence[WorkerId], shape: ModelShape, num_stages: int = STATIC_STAGES
) -> tuple[tuple[StagePlan, ...], ...]:
    """Groups of ``num_stages`` workers in order, ranges balanced by parameter bytes; a worker that is left over stays
    alone.

    So does every worker when the model has too few layers to divide.
    """
    groups: list[tuple[StagePlan, ...]] = []
    for start in range(0, len(worker_ids), num_stages):
        members = worker_ids[start : start + num_stages]
        stages = None
        if len(members) == num_stages:
            stages = plan_ranges([MergeCandidate(w, (w,), (shape.all_layers,), 0.0, 0) for w in members], shape)
        groups += [stages] if stages is not None else [(StagePlan(w, shape.all_layers),) for w in members]
    return tuple(groups)
