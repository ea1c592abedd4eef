"""One request's KV in host pools: in which phase it is, and how far it has come.

What is done about it is ``core.moving.hostbook``'s, and where the two kinds differ ``core.moving.swapping``'s and
``core.moving.store``'s, which say what the phases are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jettison.core.requests import RequestState
from jettison.core.residence import Residence
from jettison.memory.kvtransfers import KVTransferPlan


class HostedPhase(StrEnum):
    """See the module."""

    OUT = "out"
    STORED = "stored"
    IN = "in"
    TURNING = "turning"
    LEAVING = "leaving"
    """It runs on; its slots are free when the pieces under way have ended."""
    CHECKPOINT = "checkpoint"
    """It runs, and so far nothing of its own is on its way to or from a host pool."""


@dataclass(slots=True, eq=False)
class HostedKV:
    """One request's KV in host pools, or on the way there or back."""

    state: RequestState
    number: int
    """In the order in which they left."""
    num_blocks: int
    """Blocks with content: so many slots in each pool. CHECKPOINT: known when it ends."""
    pools: Residence
    """Of the request: which pool has which layers, and how much of them."""
    phase: HostedPhase = HostedPhase.OUT
    num_sent: int = 0
    """Leading blocks whose piece has been issued, in this direction."""
    failed: bool = False
    is_lost: bool = False
    """A worker that has some of it in its pool is dead."""
    parts: tuple[KVTransferPlan, ...] = ()
    """IN: from which pool to which stage."""
