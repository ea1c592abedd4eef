"""What one group has done so far, in numbers (``core.counters`` has the cluster's)."""

from __future__ import annotations

from dataclasses import dataclass, field

from jettison.core.serving.fresh import FreshTokens


@dataclass(slots=True)
class GroupCounters:
    """Monotone totals of one group."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_shed_steps: int = 0
    """Steps that have shed their offline rows."""
    num_resumptions: int = 0
    """Times that rows which were shed went on."""
    num_discarded_slices: int = 0
    num_discarded_tokens: int = 0
    """Tokens of slices that were given up."""
    fresh: FreshTokens = field(default_factory=FreshTokens)
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    num_freed_blocks: int = 0
    """Blocks given back by ended requests, each counted once (one stage)."""
    num_grown_blocks: int = 0
    """Blocks that running requests took beyond their admission."""
    num_queue_blocks: int = 0
    """Blocks of online requests that were admitted, cached ones included, less those of preempted ones."""
