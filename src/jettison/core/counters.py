"""What a cluster has done so far, in numbers: each under one name, with one help text, in metrics and results.

A field that ends in ``_ns`` is shown in seconds. Not here: what else is shown of a core (``core.totals``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from jettison.core.serving.fresh import FreshTokens


class Told(NamedTuple):
    """How a total is shown."""

    name: str
    help_text: str
    of_groups: bool
    """Groups that there are count on their own, under the same field: their counts are added."""


def told(name: str, help_text: str, *, of_groups: bool = False) -> Any:
    """A counter that is shown under this name."""
    return field(default=0, metadata={"told": Told(name, help_text, of_groups)})


@dataclass(slots=True)
class ClusterCounters:
    """Monotone totals of the cluster."""

    num_drops: int = told("drops", "Merges of groups with their parameter drop.")
    num_restores: int = told("restores", "Restores of dropped parameters.")
    num_turned_restores: int = told("restores_turned", "Restores that a burst or a failure turned round.")
    drop_ns: int = told("drop_seconds", "Time from the decision to drop until the merged group could serve, summed.")
    remap_ns: int = told(
        "remap_seconds", "Time that workers remapped pages in drops, the slowest of each drop, summed.")
    restore_ns: int = told("restore_seconds", "Time spent in restores.")
    exchanged_bytes: int = told("exchanged_bytes", "KV bytes exchanged after drops.")
    num_live_rows: int = told("live_rows", "Rows of steps that attended to KV at its old home.")
    num_stalls: int = told("stalls", "Requests that stood still in an exchange until they could run again.")
    stall_ns: int = told("stall_seconds", "Time that requests stood still in exchanges.")
    max_stall_ns: int = 0
    returned_bytes: int = told("returned_bytes", "KV bytes that went home in restores.")
    pulled_bytes: int = told("pulled_bytes", "Parameter bytes pulled from peers, for drops, restores and recoveries.")
    num_rebalanced: int = told("rebalanced", "Waiting requests sent from one group's queue to another's.")
    num_migrations: int = told("migrations", "Running requests that changed instances.")
    num_failed_migrations: int = told("migrations_failed", "Migrations that fell back to where they had come from.")
    migrated_bytes: int = told("migrated_bytes", "KV bytes of migrations.")
    num_token_migrations: int = told(
        "migrations_as_tokens", "Migrations whose destination computed the request's tokens.")
    migrated_tokens: int = told("migrated_tokens", "Tokens computed by destinations for that.")
    migration_cached_blocks: int = told(
        "migration_cached_blocks", "Blocks of migrated requests that the destination had in its prefix cache.")
    swapped_out_blocks: int = told("swapped_out_blocks", "KV blocks copied to host memory.")
    swapped_in_blocks: int = told("swapped_in_blocks", "KV blocks copied back from host memory.")
    hosted_carried: int = told(
        "hosted_carried", "Requests in host pools that went along when their group merged or split.")
    hosted_brought_back: int = told(
        "hosted_brought_back", "Requests on their way to a host pool or back that gave way to a drop or restore.")
    hosted_given_up: int = told("hosted_given_up", "Requests in host pools that are computed again.")
    checkpointed_blocks: int = told("checkpointed_blocks", "KV blocks copied to host memory while their requests ran.")
    checkpointed_bytes: int = told("checkpointed_bytes", "Bytes of KV copied to host memory while their requests ran.")
    checkpoint_frees: int = told(
        "checkpoint_frees", "Requests that gave up their blocks at once because host memory had a copy.")
    freed_recomputed_tokens: int = told(
        "freed_recomputed_tokens", "Tokens of those whose KV was not copied and is computed again.")
    checkpoints_dropped: int = told(
        "checkpoints_dropped", "Copies that gave way to others, or that could not be brought back in time.")
    offline_discards: int = told(
        "offline_discards", "Offline requests that gave up their blocks with all that they had computed.")
    prefetched_blocks: int = told("prefetched_blocks", "KV blocks of freed requests copied back from host memory.")
    prefetch_stalls: int = told(
        "prefetch_stalls", "Times that a group had nothing to run but what was on its way back from host memory.")
    offline_pauses: int = told(
        "offline_pauses", "Times that a group stopped offline work for online requests that memory kept out.")
    migrations_given_way: int = told("migrations_given_way", "Migrations that gave way to a drop or restore.")
    packing_migrations: int = told(
        "packing_migrations", "Migrations that were begun to keep requests on fewer instances.")
    packing_recomputed: int = told(
        "packing_recomputed",
        "Requests that had outgrown their instance and were computed again on another (baselines).")
    packing_queued: int = told("packing_queued", "Waiting requests that were queued at another instance for packing.")
    packing_refused: int = told(
        "packing_refused", "Moves that packing wanted and that would have cost more than they saved.")
    num_cancelled: int = told("cancelled", "Requests cancelled by their client.")
    num_preemptions: int = told(
        "num_preemptions", "Requests that lost their KV cache and started again.", of_groups=True)
    num_recomputed_tokens: int = told("recomputed_tokens", "Tokens whose KV was computed again.", of_groups=True)
    fresh: FreshTokens = field(default_factory=FreshTokens)
    num_steps_ahead: int = told("steps_ahead", "Steps that were planned while the one before them was under way.")
    num_abandoned_steps: int = told(
        "steps_abandoned", "Steps of offline requests that were given up for an online one.")
    num_abandoned_tokens: int = told("tokens_abandoned", "Tokens of steps that were given up.")
    num_shed_steps: int = told(
        "steps_shed", "Steps whose offline rows stopped half-way for an online request, and were kept.", of_groups=True)
    num_resumptions: int = told("slices_resumed", "Times that such rows went on from where they were.", of_groups=True)
    num_discarded_slices: int = told(
        "slices_discarded", "Times that such rows were given up, as something else needed their blocks.",
        of_groups=True)
    num_discarded_tokens: int = told("tokens_discarded", "Tokens of rows that were given up so.", of_groups=True)
    prefix_queries: int = told("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", of_groups=True)
    prefix_hits: int = told("prefix_cache_hits", "Prompt tokens found in the prefix cache.", of_groups=True)
    num_worker_losses: int = told("worker_losses", "Deaths of workers, hung ones that were given up included.")
    num_worker_joins: int = told("worker_joins", "Workers that came back after a death.")
    num_recoveries: int = told(
        "recoveries", "Survivors brought back to all layers, or cleared of what a dead pipeline had left.")
    recovery_ns: int = told("recovery_seconds", "Time that those recoveries took, summed.")
    num_sleeps: int = told("sleeps", "Times that an instance has gone to sleep.")
    sleep_ns: int = told("sleep_seconds", "Time from the order to sleep until the memory was given back, summed.")
    num_wakes: int = told("wakes", "Times that an instance was woken.")
    wake_ns: int = told("wake_seconds", "Time from the order to wake until the instance could serve, summed.")

    num_starts: int = told("instance_starts", "Processes of instances that were asked for and have come.")
    start_ns: int = told(
        "instance_start_seconds", "Time from asking for an instance's process until it could be filled, summed.")
    num_releases: int = told("instances_released", "Processes of instances that were given back.")

    def note_stall(self, stall_ns: int) -> None:
        """A request runs again."""
        self.num_stalls += 1
        self.stall_ns += stall_ns
        self.max_stall_ns = max(self.max_stall_ns, stall_ns)


TOLD: dict[str, Told] = {f.name: f.metadata["told"] for f in fields(ClusterCounters) if "told" in f.metadata}
"""Field -> how it is shown."""

FRESH = {
    "online_prompt_tokens": "Prompt tokens of online requests, computed for the first time (none from the cache).",
    "online_output_tokens": "Tokens that online requests got.",
    "offline_prompt_tokens": "Harvested prompt tokens, computed for the first time (none from the cache).",
    "offline_output_tokens": "Harvested output tokens: those that offline requests got.",
}
"""Fields of ``FreshTokens`` with ``_tokens`` behind them, and their help texts."""

SCALE_OUTS = "scale_out_requests"
HELP = {each.name: each.help_text for each in TOLD.values()} | FRESH | {
    SCALE_OUTS: "Times that no drop could free enough memory, or demand went on rising after one.",
}  # fmt: skip
"""Name -> help text, of all totals of a core."""
