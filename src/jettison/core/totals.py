"""The cluster's monotone totals by the names under which metrics and results carry them, live and simulated."""

from __future__ import annotations

from dataclasses import replace

from jettison.core.cluster import ClusterCore


def counters(core: ClusterCore) -> dict[str, float]:
    """Monotone totals of the cluster, groups that are gone included."""
    total = core.state.counters
    live = [g.counters for g in core.groups.values()]
    fresh = replace(total.fresh)
    for group in live:
        fresh.add(group.fresh)
    return {
        "num_preemptions": total.num_preemptions + sum(c.num_preemptions for c in live),
        "recomputed_tokens": total.num_recomputed_tokens + sum(c.num_recomputed_tokens for c in live),
        "online_prompt_tokens": fresh.online_prompt,
        "online_output_tokens": fresh.online_output,
        "offline_prompt_tokens": fresh.offline_prompt,
        "offline_output_tokens": fresh.offline_output,
        "steps_abandoned": total.num_abandoned_steps,
        "tokens_abandoned": total.num_abandoned_tokens,
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
        "migrations_as_tokens": total.num_token_migrations,
        "migrated_tokens": total.migrated_tokens,
        "migration_cached_blocks": total.migration_cached_blocks,
        "swapped_out_blocks": total.swapped_out_blocks,
        "swapped_in_blocks": total.swapped_in_blocks,
        "hosted_carried": total.hosted_carried,
        "hosted_brought_back": total.hosted_brought_back,
        "hosted_given_up": total.hosted_given_up,
        "checkpointed_blocks": total.checkpointed_blocks,
        "checkpointed_bytes": total.checkpointed_bytes,
        "checkpoint_frees": total.checkpoint_frees,
        "freed_recomputed_tokens": total.freed_recomputed_tokens,
        "checkpoints_dropped": total.checkpoints_dropped,
        "offline_discards": total.offline_discards,
        "prefetched_blocks": total.prefetched_blocks,
        "prefetch_stalls": total.prefetch_stalls,
        "offline_pauses": total.offline_pauses,
        "migrations_given_way": total.migrations_given_way,
        "packing_migrations": total.packing_migrations,
        "packing_recomputed": total.packing_recomputed,
        "packing_queued": total.packing_queued,
        "packing_refused": total.packing_refused,
        "scale_out_requests": core.ladder.num_scale_outs,
        "live_rows": total.num_live_rows,
        "stalls": total.num_stalls,
        "stall_seconds": total.stall_ns / 1e9,
        "cancelled": total.num_cancelled,
        "worker_losses": total.num_worker_losses,
        "worker_joins": total.num_worker_joins,
        "recoveries": total.num_recoveries,
        "recovery_seconds": total.recovery_ns / 1e9,
        "sleeps": total.num_sleeps,
        "sleep_seconds": total.sleep_ns / 1e9,
        "wakes": total.num_wakes,
        "wake_seconds": total.wake_ns / 1e9,
    }
