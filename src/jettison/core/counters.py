"""Totals of a cluster's work so far (``core.totals`` has the names under which they are shown)."""

from __future__ import annotations

from dataclasses import dataclass, field

from jettison.core.serving.fresh import FreshTokens


@dataclass(slots=True)
class ClusterCounters:
    """Monotone totals of the cluster."""

    num_drops: int = 0
    num_restores: int = 0
    num_turned_restores: int = 0
    drop_ns: int = 0
    """From the decision until a first step of the merged group was possible, summed."""
    remap_ns: int = 0
    restore_ns: int = 0
    exchanged_bytes: int = 0
    num_live_rows: int = 0
    """Rows of steps that attended to KV at its old home."""
    num_stalls: int = 0
    """Requests that stood still in an exchange until they could run again."""
    stall_ns: int = 0
    max_stall_ns: int = 0
    returned_bytes: int = 0
    pulled_bytes: int = 0
    num_rebalanced: int = 0
    """Waiting requests sent from one group's queue to another's."""
    num_migrations: int = 0
    num_failed_migrations: int = 0
    migrated_bytes: int = 0
    num_token_migrations: int = 0
    """Of all migrations, those as tokens: the destination has computed the request's tokens."""
    migrated_tokens: int = 0
    """Tokens computed for migrations as tokens."""
    migration_cached_blocks: int = 0
    """Blocks of migrated requests that the destination had in its prefix cache (one stage)."""
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    hosted_carried: int = 0
    """Requests in host pools that went along when their group merged or split."""
    hosted_brought_back: int = 0
    """Requests on their way to a host pool or back that gave way to a change of layouts: they run on, or stay in the
    pool."""
    hosted_given_up: int = 0
    """Requests in host pools that are computed again."""
    checkpointed_blocks: int = 0
    """Blocks copied to host pools while their requests ran, each counted once (one stage)."""
    checkpointed_bytes: int = 0
    checkpoint_frees: int = 0
    """Requests that have given their blocks up and kept their checkpoint."""
    freed_recomputed_tokens: int = 0
    """Tokens of these requests beyond their checkpoints."""
    checkpoints_dropped: int = 0
    """Checkpoints that gave their slots to others, or were too slow for the link to bring back in time."""
    offline_discards: int = 0
    """Offline requests that have given up their blocks with all computed KV."""
    prefetched_blocks: int = 0
    prefetch_stalls: int = 0
    """Times that a group had nothing to run but requests on their way back from the host."""
    offline_pauses: int = 0
    """Times that a group has stopped its offline work for online requests that memory kept out."""
    migrations_given_way: int = 0
    """Migrations that gave way to a change of layouts: their requests have stayed at their sources."""
    packing_migrations: int = 0
    """Migrations that were begun for packing."""
    packing_recomputed: int = 0
    """Requests that were computed again elsewhere because they had outgrown their group."""
    packing_queued: int = 0
    """Waiting requests that were queued elsewhere for packing."""
    packing_refused: int = 0
    """Moves that packing wanted and that cost more than they saved."""
    num_cancelled: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    fresh: FreshTokens = field(default_factory=FreshTokens)
    num_abandoned_steps: int = 0
    num_abandoned_tokens: int = 0
    """Tokens of abandoned steps."""
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_worker_losses: int = 0
    num_worker_joins: int = 0
    num_recoveries: int = 0
    """Survivors brought back to a full layout (or cleared of a dead pipeline's blocks)."""
    recovery_ns: int = 0
    num_sleeps: int = 0
    sleep_ns: int = 0
    """From the order until the layout was gone, summed."""
    num_wakes: int = 0
    wake_ns: int = 0
    """From the order until the worker could serve, summed."""

    def note_stall(self, stall_ns: int) -> None:
        """A request runs again."""
        self.num_stalls += 1
        self.stall_ns += stall_ns
        self.max_stall_ns = max(self.max_stall_ns, stall_ns)
