"""One running request's KV goes from one group to another while it goes on decoding (Llumnix; MELL section V).

    COPY           rounds: full blocks travel while the request decodes at its source; blocks that it fills meanwhile
                   are the next round's
    FINAL          at most 16 blocks are left: the request stands still, finishes its step in flight, and they travel
    DONE           the destination has everything: it owns the request
    FALLING_BACK   a transfer failed, the destination has no room to grow, rounds do not converge, or the request is
                   ending: transfers are called off; its blocks at the destination are given back when they have ended
    FAILED         its blocks are given back: the request has never left its source

The groups may differ in shape, and may share workers. On a shared worker the request's blocks are one table, which
grows with the source, and only layers that a worker lacks travel. Blocks that the destination has in its prefix cache
do not travel.

Used by ``core.moving.migrations`` (between groups that share no worker) and ``core.moving.returning`` (home after a
split).
"""

from __future__ import annotations

from jettison.core.moving.passage import Passage, RelocationPhase, Trip
from jettison.core.pending import Owner, PendingTransfer, TransferPurpose
from jettison.core.ports import Action, CancelTransfer, SendKV, TransferEnded
from jettison.core.residence import in_arenas
from jettison.core.state import ClusterState
from jettison.memory.blocks import BlockLedger
from jettison.memory.kvtransfers import MigrationKind, plan_kv_transfers
from jettison.types import NANOSECONDS, TransferId, WorkerId

MAX_FINAL_BLOCKS = 16
"""Most blocks sent while a request stands still; more are sent while it decodes (Llumnix's last stage, MELL)."""


class Relocation(Passage):
    """One running request whose KV goes to another group in rounds, while it decodes at its source."""

    kind = MigrationKind.KV

    def __init__(
        self, cluster: ClusterState, trip: Trip, purpose: TransferPurpose, *, owner: Owner | None = None,
        max_rounds: int | None = None, num_cached_blocks: int = 0, max_final_blocks: int = MAX_FINAL_BLOCKS,
    ) -> None:
        """``owner``: the move that owns the transfers; None: this one. ``max_final_blocks``: most blocks sent while the
        request stands still; >= 1."""
        super().__init__(cluster, trip, max_rounds=max_rounds, num_cached_blocks=num_cached_blocks)
        self._owner = owner or self
        self._purpose = purpose
        self._plan = plan_kv_transfers(in_arenas(trip.state.residences).places, trip.destination.stages)
        self._transfers: dict[TransferId, WorkerId] = {}
        """Transfers under way, with their sources."""
        self._max_final_blocks = max_final_blocks
        self._final_sent = False

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def is_landing(self) -> bool:
        """Whether its last blocks are on their way, so that the request arrives sooner than it could be called back."""
        return self.phase is RelocationPhase.FINAL and self._final_sent

    def _new_ledgers(self) -> list[BlockLedger]:
        """The ledgers of the destination's workers that the source does not use."""
        pairs = zip(self.destination.worker_ids, self.destination.blocks.ledgers, strict=True)
        return [ledger for worker_id, ledger in pairs if worker_id not in self.source.worker_ids]

    # --- events -----------------------------------------------------------------------------------------------

    def on_ended(self, pending: PendingTransfer, event: TransferEnded, now_ns: int) -> list[Action]:
        """Take the end of one of its transfers, and have the link's rate learn from it: go on after the last of the
        final round, fall back after an incomplete one. Returns the actions."""
        del self._transfers[event.transfer_id]
        self._cluster.touch(self.state)
        self.num_bytes += event.num_bytes
        self._cluster.link_rate(pending.ends).observe(event.num_bytes, event.duration_ns / NANOSECONDS)
        if self.phase is RelocationPhase.FALLING_BACK:
            return [] if self._transfers else self._give_back()
        if not event.complete:
            self.lost_transfer = True
            return self._fall_back("a transfer did not complete")
        if self._transfers:
            return []
        num_tokens = self.num_sent_blocks * self._cluster.limits.block_size
        self._resides_there(self.destination.residence.at(min(num_tokens, self.state.num_computed)))
        return self.advance(now_ns) if self._final_sent else []

    def let_go(self) -> None:
        """Leave the request at its source, at once. The caller takes care of transfers under way and reserved
        blocks."""
        self._transfers.clear()
        super().let_go()

    # --- rounds -----------------------------------------------------------------------------------------------

    def reserve(self, num_blocks: int) -> None:
        """Take ``num_blocks`` further blocks at the destination's new workers, before they are needed."""
        for ledger in self._new_ledgers():
            ledger.allocate(self.state.request_id, num_blocks)

    def advance(self, now_ns: int) -> list[Action]:
        """Go as far as the state allows, unless transfers are under way: the next round, the last one, or the handing
        over. Returns the actions."""
        if self._transfers or self.is_over:
            return []
        if self.phase is RelocationPhase.FALLING_BACK:
            return self._give_back()
        if self._has_left:
            return self._fall_back("the request has left its source by itself")
        if self.phase is RelocationPhase.COPY:
            return self._next_round(now_ns)
        if not self._final_sent:
            if self.state.num_pending:
                return []
            self._final_sent = True
            actions = self._send(self.source.limits.blocks_for(self.state.num_computed))
            if self._transfers or self.phase is not RelocationPhase.FINAL:
                return actions
        return self._hand_over(now_ns)

    def _next_round(self, now_ns: int) -> list[Action]:
        """Send the full blocks that have been filled meanwhile; with few left, stand still for the last round; after
        too many rounds, fall back. Returns the actions."""
        state = self.state
        if self.source.limits.blocks_for(state.num_computed) - self.num_sent_blocks > self._max_final_blocks:
            if self.num_rounds == self._max_rounds:
                return self._fall_back("the request grows as fast as it is copied")
            return self._send(state.num_computed // self._cluster.limits.block_size)
        self._stand_still(now_ns)
        return self.advance(now_ns)

    def _send(self, end: int) -> list[Action]:
        """Send the blocks up to ``end``; the destination's table grows first, and the move falls back if it cannot.
        Returns the actions.

        On a link that other requests migrate over, too, only first rounds wait their turn. A request that stands still
        must not wait for rounds of others, and a second round that waits for a first one would let its request grow by
        more than it has left.
        """
        state, first = self.state, self.num_sent_blocks
        ledgers = self._new_ledgers()
        missing = end - min((ledger.num_blocks_of(state.request_id) for ledger in ledgers), default=end)
        if missing > 0:
            if any(not ledger.can_allocate(missing) for ledger in ledgers):
                return self._fall_back("the destination is full")
            self.reserve(missing)
        self.num_rounds += 1
        self.num_sent_blocks = end
        crowded = self._crowded_links() if self.num_rounds > 1 or self.phase is RelocationPhase.FINAL else ()
        actions: list[Action] = []
        for part in self._plan if end > first else ():
            there = self._cluster.workers[part.src].ledger.table(state.request_id).ids[first:end]
            here = self._cluster.workers[part.dst].ledger.table(state.request_id).ids[first:end]
            transfer = SendKV(
                self._cluster.book.next_transfer_id, part.src, part.dst, part.layers, tuple(there), tuple(here),
                urgent=(part.src, part.dst) in crowded,
            )
            self._cluster.send_kv(state, transfer, owner=self._owner, waiter=self, purpose=self._purpose)
            self._transfers[transfer.transfer_id] = transfer.src
            actions.append(transfer)
        return actions

    def _crowded_links(self) -> set[tuple[WorkerId, WorkerId]]:
        """The links of this move with ports that other requests migrate through, too."""
        links = {(part.src, part.dst) for part in self._plan}
        return {link for link in links if self._cluster.book.is_shared(*link, TransferPurpose.MIGRATION)}

    # --- ends -------------------------------------------------------------------------------------------------

    def _fall_back(self, reason: str) -> list[Action]:
        """Leave the request at its source for this reason, and return the actions that cancel its transfers. Where none
        is under way, the failed move ends at once."""
        self.phase = RelocationPhase.FALLING_BACK
        self.failure = reason
        self._resides_there(None)
        self._let_run()
        if not self._transfers:
            return self._give_back()
        return [CancelTransfer(src, transfer_id) for transfer_id, src in self._transfers.items()]

    def _give_back(self) -> list[Action]:
        """End a failed move: give its blocks at the destination back, and free the request if it was ending. Returns
        what follows from the failure."""
        for ledger in self._new_ledgers():
            if ledger.has(self.state.request_id):
                ledger.release(self.state.request_id)
        self.phase = RelocationPhase.FAILED
        actions = self._on_over(self)
        self._cluster.reap(self.state)
        return actions
