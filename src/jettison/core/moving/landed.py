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
    """A sealed block at its destination."""

    block: int
    owner: RequestId
    """The request for which it was sent."""
    generation: int
    """Generation of the owner's table at the destination: another one, or no table, means that the owner has let go."""


class LandedBlocks:
    """``(source, destination, block at the source) -> where it lands``."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._entries: dict[tuple[WorkerId, WorkerId, int], Landed] = {}

    def find(self, src: WorkerId, dst: WorkerId, block: int) -> Landed | None:
        """Where a block has landed or will land, while its owner holds it there."""
        landed = self._entries.get((src, dst, block))
        if landed is None:
            return None
        ledger = self._cluster.workers[dst].ledger
        holds = ledger.has(landed.owner) and ledger.table(landed.owner).generation == landed.generation
        return landed if holds else None

    def prefix(self, state: RequestState, src: WorkerId, dst: WorkerId) -> list[Landed]:
        """The leading sealed blocks of a request that need not be sent from ``src`` to ``dst`` again."""
        found: list[Landed] = []
        for block in self._cluster.workers[src].ledger.table(state.request_id).ids[: state.num_sealed]:
            landed = self.find(src, dst, block)
            if landed is None:
                break
            found.append(landed)
        return found

    def note(self, state: RequestState, src: WorkerId, dst: WorkerId) -> None:
        """The request's sealed blocks are about to be sent into its table at ``dst``."""
        there = self._cluster.workers[src].ledger.table(state.request_id).ids[: state.num_sealed]
        table = self._cluster.workers[dst].ledger.table(state.request_id)
        for block, here in zip(there, table.ids, strict=False):
            if self.find(src, dst, block) is None:
                self._entries[src, dst, block] = Landed(here, state.request_id, table.generation)

    def forget(self, state: RequestState, transfer: SendKV) -> None:
        """A transfer of the request did not or will not arrive: no request may count on its blocks."""
        for block in transfer.src_blocks:
            landed = self._entries.get((transfer.src, transfer.dst, block))
            if landed is not None and landed.owner == state.request_id:
                del self._entries[transfer.src, transfer.dst, block]
