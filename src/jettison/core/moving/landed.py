"""Landed blocks: where the blocks of an exchange have arrived (or will), so that a prefix that several requests share
travels once.

Bookkeeping of one merge: nothing here sends, allocates or decides. An entry counts only while its owner, the request
for which the block was sent, still holds it at the destination; afterwards any request may have the block.
"""

from __future__ import annotations

from typing import NamedTuple

from jettison.core.ports import SendKV
from jettison.core.requests import RequestState
from jettison.core.state import ClusterState
from jettison.types import RequestId, WorkerId


class Landed(NamedTuple):
    """The block at a destination into which a sealed block has been sent, or will be, and the request for which."""

    block: int
    owner: RequestId
    """The request for which it was sent."""
    generation: int
    """Generation of the owner's table at the destination: another one, or no table, means that the owner has let go."""


class LandedBlocks:
    """Where the sealed blocks of one merge land: by source, destination and block at the source."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._entries: dict[tuple[WorkerId, WorkerId, int], Landed] = {}

    def find(self, src: WorkerId, dst: WorkerId, block: int) -> Landed | None:
        """Where a block of ``src`` has landed or will land at ``dst``, while its owner holds it there; None:
        nowhere."""
        landed = self._entries.get((src, dst, block))
        if landed is None:
            return None
        ledger = self._cluster.workers[dst].ledger
        holds = ledger.has(landed.owner) and ledger.table(landed.owner).generation == landed.generation
        return landed if holds else None

    def prefix(self, state: RequestState, src: WorkerId, dst: WorkerId) -> list[Landed]:
        """The leading sealed blocks of a request that need not be sent from ``src`` to ``dst`` again; empty: none."""
        found: list[Landed] = []
        for block in self._cluster.workers[src].ledger.table(state.request_id).ids[: state.num_sealed]:
            landed = self.find(src, dst, block)
            if landed is None:
                break
            found.append(landed)
        return found

    def note(self, state: RequestState, src: WorkerId, dst: WorkerId) -> None:
        """Note that a request's sealed blocks are about to be sent from ``src`` into its table at ``dst``."""
        there = self._cluster.workers[src].ledger.table(state.request_id).ids[: state.num_sealed]
        table = self._cluster.workers[dst].ledger.table(state.request_id)
        for block, here in zip(there, table.ids, strict=False):
            if self.find(src, dst, block) is None:
                self._entries[src, dst, block] = Landed(here, state.request_id, table.generation)

    def forget(self, state: RequestState, transfer: SendKV) -> None:
        """Forget the blocks of a request's transfer that did not arrive, or will not: no request may count on them."""
        for block in transfer.src_blocks:
            landed = self._entries.get((transfer.src, transfer.dst, block))
            if landed is not None and landed.owner == state.request_id:
                del self._entries[transfer.src, transfer.dst, block]
