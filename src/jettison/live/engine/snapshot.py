"""The engine's state as plain data, for /health, /metrics and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jettison.config import EngineConfig
from jettison.core.load.bubbles import StageTimes
from jettison.core.observing import devices_wanted, offline_gauges
from jettison.core.state import WorkerState
from jettison.core.totals import counters
from jettison.live.engine.api import EngineSnapshot, EngineState, GroupSnapshot, WorkerSnapshot
from jettison.live.engine.driver import CoreDriver
from jettison.live.machine.memory import rss_bytes
from jettison.types import NANOSECONDS, WorkerId


def take_snapshot(
    driver: CoreDriver, state: EngineState, config: EngineConfig, pids: Mapping[WorkerId, int],
    why_down: Mapping[WorkerId, str], troubles: Sequence[str],
) -> EngineSnapshot:
    """Read everything at one moment; cheap. ``why_down``: of dead workers, where it is known. ``troubles``: of starting
    workers, beside the core's own."""
    core = driver.core
    groups = [
        GroupSnapshot(
            group_id=g.group_id,
            worker_ids=g.worker_ids,
            layer_ranges=tuple((s.layers.lo, s.layers.hi) for s in g.stages),
            num_running=len(g.queues.running),
            num_waiting=len(g.queues.waiting),
            num_moving=len(g.queues.moving),
            kv_blocks_total=g.blocks.capacity,
            kv_blocks_used=g.blocks.num_used,
            kv_blocks_cached=max(ledger.num_cached for ledger in g.blocks.ledgers),
            offline=offline_gauges(g),
        )
        for g in core.groups.values()
    ]
    workers = []
    part_bytes = core.state.shape.block_bytes_per_layer(config.memory.block_size)
    slot_bytes = part_bytes * core.state.shape.num_layers
    for worker_id, worker in core.state.workers.items():
        memory, is_there = driver.memory.get(worker_id, {}), worker.is_provisioned
        pool, retained = worker.pool, worker.layout.retained
        times = driver.bubbles.totals.get(worker_id, StageTimes())
        workers.append(
            WorkerSnapshot(
                worker_id=worker_id,
                pid=pids.get(worker_id, 0),
                alive=worker.alive and worker_id in pids,
                budget_bytes=memory.get("budget_bytes", config.memory.memory_bytes if is_there else 0),
                parameter_bytes=memory.get("parameter_bytes", 0),
                dropped_parameter_bytes=memory.get("dropped_parameter_bytes", 0),
                kv_bytes=memory.get("kv_bytes", 0),
                workspace_bytes=memory.get("workspace_bytes", 0),
                free_bytes=memory.get("free_bytes", 0),
                held_bytes=memory.get("held_bytes", 0),
                stage_busy_seconds=times.busy_ns / NANOSECONDS,
                stage_bubble_seconds=times.bubble_ns / NANOSECONDS,
                rss_bytes=rss_bytes(pids[worker_id]) if worker_id in pids else 0,
                foreign_bytes=part_bytes * sum(kept.num_parts for kept in retained),
                host_bytes=slot_bytes * pool.num_slots * is_there,
                host_used_bytes=slot_bytes * (pool.num_slots - pool.num_free),
                sleep=str(core.sleepers.state_of(worker_id)),
            )
        )
    down = (_told_down(core.state.workers[w.worker_id], why_down) for w in workers if w.is_provisioned and not w.alive)
    num_unplaced = len(core.state.unplaced_online())
    return EngineSnapshot(
        state, config.memory.block_size, groups, workers, counters(core) | driver.delays.totals(),
        core.ladder.gauges(), num_unplaced=num_unplaced,
        num_unplaced_offline=len(core.state.unplaced) - num_unplaced,
        troubles=(*down, *core.recoveries.troubles, *troubles),
        checkpoint_lag_blocks=core.ladder.lag_blocks, num_devices_wanted=devices_wanted(core), slo=core.objectives,
        wakes_s=core.ladder.wakes_s, waits=dict(core.sleepers.provisioning.waits),
    )


def _told_down(worker: WorkerState, why_down: Mapping[WorkerId, str]) -> str:
    state = "was started too often and stays down" if worker.is_gone else "is down and is being started again"
    return f"worker {worker.worker_id} {state}: {why_down.get(worker.worker_id, 'its process has ended')}"
