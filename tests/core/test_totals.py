"""Totals have the names that dashboards and stored results read, one each, with a help text."""

from __future__ import annotations

from dataclasses import fields

from jettison.core.counters import HELP, TOLD, ClusterCounters
from jettison.server.metrics import DESCRIBED_COUNTERS

NAMES = sorted("""
    activation_delay_seconds activations cancelled checkpoint_frees checkpointed_blocks checkpointed_bytes
    checkpoints_dropped drop_seconds drops exchanged_bytes expert_tokens
    expert_tokens_at_busiest freed_recomputed_tokens hosted_brought_back
    hosted_carried hosted_given_up instance_start_seconds instance_starts instances_released live_rows
    migrated_bytes migrated_tokens migration_cached_blocks migrations
    migrations_as_tokens migrations_failed migrations_given_way num_preemptions offline_discards
    offline_output_tokens offline_pauses offline_prompt_tokens online_output_tokens online_prompt_tokens
    packing_migrations packing_queued packing_recomputed packing_refused prefetch_stalls prefetched_blocks
    prefix_cache_hits prefix_cache_queries pulled_bytes rebalanced recomputed_tokens recoveries recovery_seconds
    remap_seconds remote_attention_seconds restore_seconds restores restores_turned returned_bytes
    scale_out_requests sleep_seconds sleeps stall_seconds slices_discarded slices_resumed stalls steps_abandoned
    steps_ahead steps_shed
    swapped_in_blocks
    swapped_out_blocks tokens_abandoned tokens_discarded wake_seconds wakes worker_joins worker_losses
""".split())  # noqa: SIM905


def test_no_name_on_metrics_is_new_or_gone() -> None:
    assert sorted(DESCRIBED_COUNTERS) == NAMES


def test_each_counter_has_one_name_and_a_sentence_or_is_not_shown() -> None:
    assert {f.name for f in fields(ClusterCounters)} - TOLD.keys() == {"max_stall_ns", "fresh"}
    assert len({each.name for each in TOLD.values()}) == len(TOLD)
    assert all(text[0].isupper() and text.endswith(".") for text in HELP.values())
