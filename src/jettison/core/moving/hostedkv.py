"""One request's KV in host pools: its phase, and how far it has come.

What is done about it is ``core.moving.hostbook``'s, and where the two kinds differ ``core.moving.swapping``'s and
``core.moving.store``'s, which say what the phases are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jettison.core.preemption import Preemption
from jettison.core.requests import RequestState
from jettison.core.residence import Residence
from jettison.memory.kvtransfers import KVTransferPlan


class HostedPhase(StrEnum):
    """Where a request's KV is between arenas and host pools. ``core.moving.swapping`` and ``core.moving.store`` explain
    the phases."""

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
    lost: Preemption | None = None
    """Why its stored KV cannot be used any more, and it is computed again as soon as its pieces have ended."""
    awaits_pieces: bool = False
    """STORED: copies of some of its blocks to host pools are still under way, and it comes back only after them."""
    parts: tuple[KVTransferPlan, ...] = ()
    """IN: the transfers from pools to stages."""
