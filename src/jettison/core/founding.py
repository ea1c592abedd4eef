"""What a cluster starts with: its groups, and each worker with what it has loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jettison.core.params import ClusterParams
from jettison.core.serving.limits import SchedulerLimits
from jettison.core.state import WorkerState
from jettison.memory.blocks import BlockLedger
from jettison.memory.hostpool import HostPool
from jettison.memory.layout import LayoutSpec
from jettison.memory.stages import StagePlan
from jettison.policy.pipeline import plan_static_groups
from jettison.policy.ranges import Member, plan_stages
from jettison.types import LayerRange, ModelShape, WorkerId


def initial_groups(
    worker_ids: Sequence[WorkerId], shape: ModelShape, *, static_pipeline: bool
) -> tuple[tuple[StagePlan, ...], ...]:
    """Groups and stages that a cluster starts with: workers must load exactly these layers."""
    if static_pipeline:
        return plan_static_groups(worker_ids, shape)
    return tuple((StagePlan(w, shape.all_layers),) for w in worker_ids)


def first_drop(shape: ModelShape, kv_bytes: int) -> tuple[LayerRange, ...]:
    """What a merge of two members that hold everything leaves to the one and to the other, each with so many bytes for
    KV beside the parameters; empty where a model is never divided."""
    members = [Member(worker, shape.all_layers, kv_bytes + shape.parameter_bytes) for worker in (0, 1)]
    plan = plan_stages(members, shape)
    return () if plan is None else tuple(stage.layers for stage in plan.stages)


def initial_workers(
    groups: Sequence[Sequence[StagePlan]], shape: ModelShape, limits: SchedulerLimits, params: ClusterParams,
    capacity_blocks: Mapping[WorkerId, int],
) -> dict[WorkerId, WorkerState]:
    """The workers of these groups with the layers of their stages, ``capacity_blocks`` blocks each and no request.
    Those that are not named by ``params.provision`` have no process yet."""
    workers = {
        s.worker_id: WorkerState(
            s.worker_id, BlockLedger(capacity_blocks[s.worker_id], limits.block_size),
            capacity_blocks[s.worker_id], LayoutSpec(shape.shards_for(s.layers), s.layers),
            HostPool(params.swap.num_host_slots),
        )
        for stages in groups
        for s in stages
    }
    there = params.provision.at_start or sorted(workers)[: params.provision.num_at_start]
    for worker_id in workers.keys() - there:
        worker = workers[worker_id]
        worker.alive, worker.is_provisioned, worker.is_asleep = False, False, True
        worker.ledger.clear(0)
    return workers
