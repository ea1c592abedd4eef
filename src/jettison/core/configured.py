"""A core's limits and parameters from the configuration: the same words configure a live engine and a simulated one.

The caller knows the model (its context, its stop tokens) and the machine (its profile, its host memory).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jettison.config import EngineConfig
from jettison.config.offline import harvest_parts
from jettison.config.sections import OfflineConfig, PackingConfig
from jettison.core.ladder.lists import parse_overload, with_offline, with_packing, with_wake
from jettison.core.params import AwakeParams, ClusterParams, FaultParams, ProvisionParams
from jettison.core.serving.group import SchedulerLimits
from jettison.cost.hardware import HardwareProfile
from jettison.memory.kvtransfers import ExchangeMode, MigrationKind
from jettison.policy.batchworth import BatchPrices
from jettison.policy.dispatch import ORDERS
from jettison.policy.links import MachineId
from jettison.policy.lookahead import LookaheadParams
from jettison.policy.migration import MigrationParams
from jettison.policy.movekinds import Fit, MoveParams
from jettison.policy.offline import OfflineParams, SloParams
from jettison.policy.overload import OverloadParams, Trigger
from jettison.policy.packing.params import Gather, PackParams
from jettison.policy.packing.types import Priorities
from jettison.policy.restore import RestoreParams
from jettison.policy.swapping import SwapParams
from jettison.types import WorkerId


def scheduler_limits(
    config: EngineConfig, max_model_len: int, eos_token_ids: Iterable[int] = (), *, goes_ahead: bool = False,
    keeps_rows: bool = False,
) -> SchedulerLimits:
    """Bounds of every group's steps. ``goes_ahead``, ``keeps_rows``: where the configuration leaves it open, steps are
    planned ahead, or shed their offline rows."""
    static_pipeline = parse_overload(config.overload.policy).static_pipeline
    return SchedulerLimits(
        block_size=config.memory.block_size,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=max_model_len,
        watermark=config.scheduler.admission_watermark,
        eos_token_ids=frozenset(eos_token_ids),
        enable_prefix_caching=config.memory.enable_prefix_caching,
        prefill_first=config.scheduler.step_priority == "prefill",
        scheduling_policy=config.scheduler.scheduling_policy,
        steps_ahead={"on": 1, "off": 0, "auto": int(goes_ahead)}[config.scheduler.step_ahead],
        sheds_rows={"on": True, "off": False, "auto": keeps_rows}[config.offline.slices],
        # Static pipelines, a baseline, form microbatches as in their source: by token counts.
        lookahead=LookaheadParams(
            enabled=config.scheduler.lookahead == "on" and not static_pipeline,
            min_tokens=config.scheduler.lookahead_min_tokens,
        ),
    )


def cluster_params(
    config: EngineConfig, *, num_host_slots: int, profile: HardwareProfile | None = None,
    has_profiled_links: bool = True,
    machine_of: Mapping[WorkerId, MachineId] | None = None,
    loading_bytes_per_s: float | None = None, start_s: float | None = None,
) -> ClusterParams:
    """Policies and their numbers. ``num_host_slots``: blocks of one layer's KV that a worker's host pool holds.
    ``start_s``: seconds that a worker's process takes to start, as far as it is known before any was asked for.

    ``machine_of``: each worker's machine, where they are not all in one; ``--machines`` takes precedence.
    """
    overload, ladder = config.overload, parse_overload(config.overload.policy)
    rungs = with_offline(ladder.rungs, harvest_parts(config.offline.mode))
    packing = _pack_params(config.packing)
    told = dict(enumerate(overload.machines))
    return ClusterParams(
        rungs=with_wake(rungs if packing is None else with_packing(rungs), ladder.static_pipeline),
        static_pipeline=ladder.static_pipeline,
        overload=OverloadParams(
            trigger=Trigger(overload.trigger), min_blocked_s=overload.min_wait_ms / 1e3,
            horizon_s=overload.horizon_ms / 1e3,
        ),
        dispatch=ORDERS[overload.dispatch],
        rebalance=overload.rebalance,
        planner=overload.planner,
        restore=RestoreParams(
            usage_threshold=overload.restore_threshold, min_settled_s=overload.restore_dwell_ms / 1e3
        ),
        offline=_offline_params(config.offline),
        swap=SwapParams(num_host_slots=num_host_slots, budget_blocks=overload.swap_budget_blocks),
        migration=MigrationParams(
            threshold_blocks=overload.migrate_threshold, period_s=overload.migrate_period_ms / 1e3,
            kind=_migration_kind(overload.migration_kind), max_step_tokens=overload.migration_step_tokens,
        ),
        packing=packing,
        moves=MoveParams(fit=Fit(overload.migration_fit), stop_s=overload.migration_stop_ms / 1e3),
        drop_dwell_s=overload.drop_dwell_ms / 1e3,
        profile=profile,
        has_profiled_links=has_profiled_links,
        loading_bytes_per_s=loading_bytes_per_s,
        auto_restore=overload.restore_threshold > 0.0,
        machine_of=told or machine_of or {},
        card_of=told or machine_of or {},
        shares_copies=config.hosts.launcher == "local",
        faults=FaultParams(max_outage_s=config.faults.outage_timeout_s),
        awake=AwakeParams(
            config.sleep.min_awake, config.sleep.max_awake, config.sleep.mode == "auto", config.sleep.after_s,
            BatchPrices(
                device_second=config.sleep.device_second, batch_token=config.sleep.batch_token,
                floor_tokens_per_s=config.sleep.batch_floor,
            ),
        ),
        exchange=ExchangeMode(overload.exchange),
        provision=ProvisionParams(
            config.scale.min_instances, None if config.most_instances == config.instances else config.instances, start_s
        ),
    )


def _pack_params(packing: PackingConfig) -> PackParams | None:
    if packing.policy == "none":
        return None
    return PackParams(
        packer=packing.policy, epoch_s=packing.epoch_s, head_room=packing.head_room,
        kinds=frozenset(MigrationKind if packing.moves == "adaptive" else (MigrationKind(packing.moves),)),
        fill=packing.fill, gather=Gather(packing.gather), saves_idle=packing.saves == "idle",
        priorities=Priorities(
            load=packing.weight_load, free=packing.weight_free, distance=packing.weight_distance
        ),
    )


def _offline_params(offline: OfflineConfig) -> OfflineParams:
    parts = harvest_parts(offline.mode)
    return OfflineParams(
        serves=offline.mode != "none",
        slo_aware="scheduler" in parts,
        checkpoints="checkpoint" in parts,
        prefetches="prefetch" in parts,
        slo=SloParams(ttft_s=_seconds(offline.slo_ttft_ms), tpot_s=_seconds(offline.slo_tpot_ms)),
        fill=offline.fill,
        fills_after_eviction=offline.fill_after_eviction,
        safepoint_layers=offline.safepoint_layers,
        checkpoint_below_free=offline.checkpoint_free,
    )


def _migration_kind(text: str) -> MigrationKind | None:
    return None if text == "adaptive" else MigrationKind(text)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
