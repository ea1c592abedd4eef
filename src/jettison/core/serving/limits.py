"""Bounds that hold for every group."""

from __future__ import annotations

from dataclasses import dataclass, field

from jettison.policy.lookahead import LookaheadParams
from jettison.policy.order import SchedulingPolicy


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds that hold for every group."""

    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    """Most running requests for each instance; no microbatch has more rows."""
    max_model_len: int
    watermark: float = 0.01
    """Share of the blocks that admission leaves free."""
    eos_token_ids: frozenset[int] = frozenset()
    enable_prefix_caching: bool = True
    lookahead: LookaheadParams = field(default_factory=LookaheadParams)
    prefill_first: bool = False
    """Prompts take a step's token budget before decodes do (in pipelines without lookahead, too)."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """Which requests go first: ``policy.order``."""
    steps_ahead: int = 0
    """Steps that a group of one stage may have under way behind the one that is computed: 0 or 1
    (``core.serving.stepsahead``)."""
    sheds_rows: bool = False
    """Workers can stop the offline rows of a step at a safepoint and go on with them later, with the same results
    (``core.serving.slices``)."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take, the last of them perhaps in part."""
        return -(-num_tokens // self.block_size)
