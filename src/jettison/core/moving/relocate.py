"""One running request's KV goes from one group to another while it goes on decoding (Llumnix; MELL section V).

    COPY           rounds: full blocks travel while the request decodes at its source; what it fills meanwhile is the
                   next round's
    FINAL          at most 16 blocks are left: the request stands still, finishes its step in flight, and they travel
    DONE           the destination has everything: it owns the request
    FALLING_BACK   a transfer failed, the destination has no room to grow, rounds do not converge, or the request is
                   ending: transfers are called off; its blocks at the destination are given back when they have ended
    FAILED         they are: the request has never left its source

Ownership: the source owns the request, and has all of its KV, in every phase before DONE; the destination's blocks are
reserved before the first byte travels. The groups may differ in shape, and may share workers: there the request's
blocks are one table, which the source lets grow, and only layers that a worker lacks travel.

Who goes where, when, and what follows from a failure is the caller's affair: ``core.moving.migrations`` (between groups
that share no worker), ``core.moving.returning`` (home after a split).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from jettison.core.pending import Owner, PendingTransfer, Purpose
from jettison.core.ports import Action, CancelTransfer, TransferEnded
from jettison.core.requests import Phase, RequestState
from jettison.core.residence import Residence, changed, in_arenas
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.memory.blocks import BlockLedger
from jettison.memory.kvtransfers import plan_kv_transfers
from jettison.types import TransferId, WorkerId

MAX_FINAL_BLOCKS = 16
"""Blocks sent while a request stands still; what is more is sent while it decodes (Llumnix's last stage, MELL)."""


class RelocationPhase(StrEnum):
    """See the module's table."""

    COPY = "copy"
    FINAL = "final"
    DONE = "done"
    FALLING_BACK = "falling_back"
    FAILED = "failed"


class Relocation:
    """One request on its way from ``source`` to ``destination``; each ``advance`` goes as far as the state allows."""

    def __init__(
        self, cluster: ClusterState, state: RequestState, source: Group, destination: Group, purpose: Purpose,
        now_ns: int, on_over: Callable[[Relocation], list[Action]], *, owner: Owner | None = None,
        max_rounds: int | None = None,
    ) -> None:
        """The request must be running, all of its KV in place. ``on_over`` is called once, at the end.

        ``owner``: of the transfers; none named: it stands for itself. ``max_rounds``: rounds with decoding before it is
        given up, as the request grows as fast as it is copied.
        """
        assert state.phase is Phase.RUNNING and state.group_id == source.group_id, state
        self._cluster = cluster
        self._owner = owner or self
        self._purpose = purpose
        self._on_over = on_over
        self._max_rounds = max_rounds
        self.state = state
        self.source = source
        self.destination = destination
        self.phase = RelocationPhase.COPY
        self.failure: str | None = None
        self.lost_transfer = False
        """A transfer ended before its last byte, and it had not been called off."""
        self.num_rounds = 0
        self.num_bytes = 0
        self.num_sent_blocks = 0
        """Leading blocks that have been sent."""
        self.started_ns = now_ns
        self.stopped_ns: int | None = None
        """Since when the request stands still."""
        self.ended_ns: int | None = None
        """When the destination had everything."""
        self._plan = plan_kv_transfers(in_arenas(state.residences).places, destination.stages)
        self._there: Residence | None = None
        self._resides_there(destination.residence.at(0))
        self._transfers: dict[TransferId, WorkerId] = {}
        """Under way -> where from."""
        self._final_sent = False

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Both groups' workers."""
        return (*self.source.worker_ids, *self.destination.worker_ids)

    @property
    def is_over(self) -> bool:
        """Nothing left to do."""
        return self.phase in (RelocationPhase.DONE, RelocationPhase.FAILED)

    @property
    def is_landing(self) -> bool:
        """The last blocks are on their way: the request is there sooner than back."""
        return self.phase is RelocationPhase.FINAL and self._final_sent

    def _new_ledgers(self) -> list[BlockLedger]:
        """Of the destination's workers that the source does not use."""
        pairs = zip(self.destination.worker_ids, self.destination.blocks.ledgers, strict=True)
        return [ledger for worker_id, ledger in pairs if worker_id not in self.source.worker_ids]

    @property
    def _has_left(self) -> bool:
        """The request is ending, or its source has it no more."""
        state = self.state
        return state.ending is not None or state.phase is not Phase.RUNNING or state.group_id != self.source.group_id

    # --- events -----------------------------------------------------------------------------------------------

    def on_ended(self, pending: PendingTransfer, event: TransferEnded, now_ns: int) -> list[Action]:
        """Take the end of one of its transfers."""
        del self._transfers[event.transfer_id]
        self._cluster.touch(self.state)
        self.num_bytes += event.num_bytes
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

    def go_on(self, now_ns: int) -> list[Action]:
        """A transfer has ended."""
        return self.advance(now_ns)

    def cancel(self) -> list[Action]:
        """Leave the request where it is (it is ending, or its caller thought better of it)."""
        if self.is_over or self.phase is RelocationPhase.FALLING_BACK:
            return []
        return self._fall_back("cancelled")

    def let_go(self) -> None:
        """Leave the request where it is, at once: the caller takes care of what is under way and reserved."""
        self.phase = RelocationPhase.FAILED
        self.failure = "it gave way to a change of layouts"
        self._transfers.clear()
        self._resides_there(None)
        self._let_run()

    # --- rounds -----------------------------------------------------------------------------------------------

    def reserve(self, num_blocks: int) -> None:
        """Take blocks at the destination, beyond those that it has, before they are needed."""
        for ledger in self._new_ledgers():
            ledger.allocate(self.state.request_id, num_blocks)

    def advance(self, now_ns: int) -> list[Action]:
        """Go as far as the state allows."""
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
        state = self.state
        if self.source.limits.blocks_for(state.num_computed) - self.num_sent_blocks > MAX_FINAL_BLOCKS:
            if self.num_rounds == self._max_rounds:
                return self._fall_back("the request grows as fast as it is copied")
            return self._send(state.num_computed // self._cluster.limits.block_size)
        self.phase = RelocationPhase.FINAL
        self.stopped_ns = now_ns
        state.paused = True
        self._cluster.touch(state)
        return self.advance(now_ns)

    def _send(self, end: int) -> list[Action]:
        """Send the blocks up to ``end``; the destination's table grows first."""
        state, first = self.state, self.num_sent_blocks
        ledgers = self._new_ledgers()
        missing = end - min((ledger.num_blocks_of(state.request_id) for ledger in ledgers), default=end)
        if missing > 0:
            if any(not ledger.can_allocate(missing) for ledger in ledgers):
                return self._fall_back("the destination is full")
            self.reserve(missing)
        self.num_rounds += 1
        self.num_sent_blocks = end
        actions: list[Action] = []
        for part in self._plan if end > first else ():
            there = self._cluster.workers[part.src].ledger.table(state.request_id).ids[first:end]
            here = self._cluster.workers[part.dst].ledger.table(state.request_id).ids[first:end]
            transfer = self._cluster.send_kv(
                state, part.src, part.dst, part.layers, there, here,
                owner=self._owner, waiter=self, purpose=self._purpose,
            )
            self._transfers[transfer.transfer_id] = transfer.src
            actions.append(transfer)
        return actions

    # --- ends -------------------------------------------------------------------------------------------------

    def _hand_over(self, now_ns: int) -> list[Action]:
        """The last block has arrived: from here on the request is the destination's."""
        state = self.state
        self.phase, self.ended_ns = RelocationPhase.DONE, now_ns
        self.source.queues.take_out(state)
        for worker_id, ledger in zip(self.source.worker_ids, self.source.blocks.ledgers, strict=True):
            if worker_id not in self.destination.worker_ids:
                ledger.release(state.request_id)
        state.paused = False
        state.num_sealed = 0  # its blocks are new ones, not yet findable
        self.destination.queues.resume(state)
        return self._on_over(self)

    def _fall_back(self, reason: str) -> list[Action]:
        self.phase = RelocationPhase.FALLING_BACK
        self.failure = reason
        self._resides_there(None)
        self._let_run()
        if not self._transfers:
            return self._give_back()
        return [CancelTransfer(src, transfer_id) for transfer_id, src in self._transfers.items()]

    def _resides_there(self, there: Residence | None) -> None:
        """So much of its KV is at the destination now."""
        self.state.residences = changed(self.state.residences, self._there, there)
        self._there = there

    def _let_run(self) -> None:
        if self.state.phase is Phase.RUNNING:
            self.state.paused = False
            self._cluster.touch(self.state)

    def _give_back(self) -> list[Action]:
        for ledger in self._new_ledgers():
            if ledger.has(self.state.request_id):
                ledger.release(self.state.request_id)
        self.phase = RelocationPhase.FAILED
        actions = self._on_over(self)
        self._cluster.reap(self.state)
        return actions
