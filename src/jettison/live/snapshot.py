"""The engine's state as plain data, for /health, /metrics and reports."""

from __future__ import annotations

from collections.abc import Mapping

from jettison.config import EngineConfig
from jettison.core.cluster import ClusterCore
from jettison.live.api import EngineSnapshot, EngineState, GroupSnapshot, WorkerSnapshot
from jettison.live.bubbles import StageTimes
from jettison.live.driver import CoreDriver
from jettison.types import NANOSECONDS, WorkerId


def take_snapshot(
    driver: CoreDriver, state: EngineState, config: EngineConfig, pids: Mapping[WorkerId, int]
) -> EngineSnapshot:
    """Read everything at one moment; cheap."""
    core = driver.core
    groups = [
        GroupSnapshot(
            group_id=g.group_id,
            worker_ids=g.worker_ids,
            layer_ranges=tuple((s.layers.lo, s.layers.hi) for s in g.stages),
            num_running=len(g.running),
            num_waiting=len(g.waiting),
            num_moving=len(g.moving),
            kv_blocks_total=g.capacity_blocks,
            kv_blocks_used=g.used_blocks,
            kv_blocks_cached=max(ledger.num_cached for ledger in g.ledgers),
        )
        for g in core.groups.values()
    ]
    workers = []
    for worker_id in core.state.workers:
        memory = driver.memory.get(worker_id, {})
        times = driver.bubbles.totals.get(worker_id, StageTimes())
        workers.append(
            WorkerSnapshot(
                worker_id=worker_id,
                pid=pids.get(worker_id, 0),
                alive=core.state.workers[worker_id].alive and worker_id in pids,
                budget_bytes=memory.get("budget_bytes", config.memory.memory_bytes),
                parameter_bytes=memory.get("parameter_bytes", 0),
                dropped_parameter_bytes=memory.get("dropped_parameter_bytes", 0),
                kv_bytes=memory.get("kv_bytes", 0),
                workspace_bytes=memory.get("workspace_bytes", 0),
                free_bytes=memory.get("free_bytes", 0),
                stage_busy_seconds=times.busy_ns / NANOSECONDS,
                stage_bubble_seconds=times.bubble_ns / NANOSECONDS,
            )
        )
    totals = counters(core) | driver.delays.totals()
    return EngineSnapshot(
        state, config.memory.block_size, groups, workers, totals, num_homeless=len(core.state.homeless)
    )


def counters(core: ClusterCore) -> dict[str, float]:
    """Monotone totals of the cluster, groups that are gone included."""
    total = core.state.counters
    live = [g.counters for g in core.groups.values()]
    return {
        "num_preemptions": total.num_preemptions + sum(c.num_preemptions for c in live),
        "recomputed_tokens": total.num_recomputed_tokens + sum(c.num_recomputed_tokens for c in live),
        "prefix_cache_queries": total.prefix_queries + sum(c.prefix_queries for c in live),
        "prefix_cache_hits": total.prefix_hits + sum(c.prefix_hits for c in live),
        "drops": total.num_drops,
        "restores": total.num_restores,
        "restores_turned": total.num_turned_restores,
        "drop_seconds": total.drop_ns / 1e9,
        "remap_seconds": total.remap_ns / 1e9,
        "restore_seconds": total.restore_ns / 1e9,
        "exchanged_bytes": total.exchanged_bytes,
        "returned_bytes": total.returned_bytes,
        "pulled_bytes": total.pulled_bytes,
        "rebalanced": total.num_rebalanced,
        "migrations": total.num_migrations,
        "migrations_failed": total.num_failed_migrations,
        "migrated_bytes": total.migrated_bytes,
        "swapped_out_blocks": total.swapped_out_blocks,
        "swapped_in_blocks": total.swapped_in_blocks,
        "scale_out_requests": core.scale_out.num_requests,
        "live_rows": total.num_live_rows,
        "stalls": total.num_stalls,
        "stall_seconds": total.stall_ns / 1e9,
        "cancelled": total.num_cancelled,
        "worker_losses": total.num_worker_losses,
        "worker_joins": total.num_worker_joins,
        "recoveries": total.num_recoveries,
        "recovery_seconds": total.recovery_ns / 1e9,
    }
