"""One request's KV in host pools: its phase, and how far it has come.

``core.moving.hosted``, which explains the phases, and ``core.moving.checkpoints`` work on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jettison.core.requests import RequestState
from jettison.core.residence import Residence
from jettison.memory.kvtransfers import KVTransferPlan


class HostedPhase(StrEnum):
    """See ``core.moving.hosted``."""

    OUT = "out"
    STORED = "stored"
    IN = "in"
    TURNING = "turning"
    LEAVING = "leaving"
    """The request runs on; its slots are free when the pieces under way have ended."""
    CHECKPOINT = "checkpoint"
    """The request runs, and has a copy of its leading blocks in host pools."""


@dataclass(slots=True, eq=False)
class HostedKV:
    """One request's KV in host pools, or on the way there or back."""

    state: RequestState
    number: int
    """Rank in the order in which entries were opened."""
    num_blocks: int
    """Blocks with content, and slots of it in each pool. CHECKPOINT: known only when the request is freed."""
    pools: Residence
    """The residence in host pools: which pool has which layers, of how many tokens."""
    phase: HostedPhase = HostedPhase.OUT
    num_sent: int = 0
    """Leading blocks for which pieces have been issued, in this direction."""
    failed: bool = False
    is_lost: bool = False
    """A worker with some of it in its pool is dead."""
    is_checkpoint: bool = False
    """It was copied while it ran; else it was swapped out."""
    parts: tuple[KVTransferPlan, ...] = ()
    """IN: the transfers from pools to stages."""
