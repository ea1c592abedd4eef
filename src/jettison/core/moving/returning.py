"""After a split: running requests leave the pipeline one by one for the groups that its members have become.

The pipeline and the new groups serve on the same workers meanwhile. A request keeps decoding in the pipeline while its
full blocks travel; it stands still only for the last few (Llumnix, MELL). Until its last transfer has ended, it
runs in the pipeline and its blocks stay at every member; then it belongs to its new group, and the others let go.
"""

from __future__ import annotations

from jettison.core.moving.migrating import MAX_FINAL_BLOCKS
from jettison.core.pending import Owner, PendingTransfer, Purpose
from jettison.core.ports import Action, CancelTransfer, SendKV, TransferEnded
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.policy.kvmoves import plan_kv_moves
from jettison.types import GroupId, RequestId, TransferId

MAX_RETURNING = 4
"""Requests whose KV travels at the same time: short stops for few rather than long ones for all."""


class Returning:
    """Requests of ``pipeline`` on their way to ``homes``."""

    def __init__(self, cluster: ClusterState, owner: Owner, pipeline: Group, homes: list[Group]) -> None:
        self._cluster = cluster
        self._owner = owner
        self._pipeline = pipeline
        self.homes = homes
        self.num_returned_bytes = 0
        self._moves: dict[TransferId, SendKV] = {}
        self._home_of: dict[RequestId, Group] = {}
        self._sent_blocks: dict[RequestId, int] = {}
        """Leading blocks already at home, of requests on their way."""
        self._is_called_off = False

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way."""
        return not self._moves

    @property
    def is_over(self) -> bool:
        """The pipeline is empty."""
        return not (self._pipeline.in_flight or self._pipeline.queues.all_requests())

    # --- events -----------------------------------------------------------------------------------------------

    def on_ended(self, pending: PendingTransfer, event: TransferEnded, now_ns: int) -> list[Action]:
        """Take the end of a transfer."""
        del self._moves[event.transfer_id]
        state = pending.request
        assert state is not None, pending
        self._cluster.touch(state)
        self.num_returned_bytes += event.num_bytes
        self._cluster.counters.returned_bytes += event.num_bytes
        if not event.complete:
            self._sent_blocks.pop(state.request_id, None)
            state.paused = False
            if not self._is_called_off and state.ending is None:
                # The way home is lost, perhaps for good: it is computed again there, as another try may fare no better.
                self._cluster.distrust(state)
                self._forget(state)  # it will be queued at a home, which then counts its blocks by itself
        if state.ending is not None:
            self._forget(state)
            self._cluster.reap(state)
        elif event.complete and not state.moves:
            self._arrived(state)
        return []

    def cancel(self, state: RequestState) -> list[Action]:
        """The request is ending: stop its transfers."""
        self._forget(state)
        return [CancelTransfer(self._moves[m].src, m) for m in sorted(state.moves) if m in self._moves]

    def call_off(self) -> list[Action]:
        """Stop what can be stopped."""
        self._is_called_off = True
        actions: list[Action] = []
        for move in self._moves.values():
            # A request that already stands still for its last blocks is home sooner than back.
            state = self._cluster.book.transfers[move.transfer_id].request
            if state is not None and not state.paused:
                actions.append(CancelTransfer(move.src, move.transfer_id))
        return actions

    # --- on the way -------------------------------------------------------------------------------------------

    def advance(self) -> list[Action]:
        """Start the next rounds of the requests whose turn it is."""
        for state in [*self._pipeline.queues.waiting, *self._pipeline.queues.waiting_offline]:
            # Preempted in the pipeline, or never begun there: it starts (again) in a new group.
            self._pipeline.queues.take_out(state)
            self._forget(state)
            home = min(self.homes, key=lambda g: (g.blocks.num_used + g.queues.queued_blocks(), g.group_id))
            home.queues.enqueue(state)
        for state in list(self._pipeline.queues.stored.values()):
            # Its KV is in host pools: it goes along as it is.
            self._pipeline.queues.take_out(state)
            self._home_of_stored(state).queues.keep_stored(state)
            self._cluster.counters.hosted_carried += 1
        actions: list[Action] = []
        for state in list(self._pipeline.queues.running.values()):
            if state.ending is not None or state.moves or state.recompute:
                continue
            if state.request_id not in self._sent_blocks and len(self._sent_blocks) >= MAX_RETURNING:
                break
            actions += self._next_round(state)
        return actions

    def _home(self, state: RequestState) -> Group:
        """Where a request will live: the group with more room, counting those already on their way."""
        home = self._home_of.get(state.request_id)
        if home is None:
            assigned = {g.group_id: g.blocks.num_used_by(g.queues.running) for g in self.homes}
            for request_id, other in self._home_of.items():
                ledger = other.blocks.ledgers[0]
                assigned[other.group_id] += ledger.num_blocks_of(request_id) if ledger.has(request_id) else 0
            home = min(self.homes, key=lambda g: (assigned[g.group_id], g.group_id))
            self._home_of[state.request_id] = home
        return home

    def _home_of_stored(self, state: RequestState) -> Group:
        """Where a stored request will be brought back: a group that can hold it, of those the emptiest."""

        def rank(home: Group) -> tuple[bool, int, GroupId]:
            owed = sum(home.limits.blocks_for(other.num_tokens) for other in home.queues.stored.values())
            load = home.blocks.num_used + home.queues.queued_blocks() + owed
            return home.blocks.is_oversized(state), load, home.group_id

        return min(self.homes, key=rank)

    def _next_round(self, state: RequestState) -> list[Action]:
        """Send full blocks while the request decodes; stop it only for what is then left."""
        size = self._cluster.limits.block_size
        sent = self._sent_blocks.setdefault(state.request_id, 0)
        num_full = state.num_computed // size
        if not state.paused and num_full - sent > MAX_FINAL_BLOCKS:
            return self._send_blocks(state, sent, num_full)
        state.paused = True
        self._cluster.touch(state)
        if state.num_pending:
            return []
        actions = self._send_blocks(state, sent, -(-state.num_computed // size))
        if not state.moves:
            self._arrived(state)
        return actions

    def _send_blocks(self, state: RequestState, first: int, end: int) -> list[Action]:
        self._sent_blocks[state.request_id] = end
        if end <= first:
            return []
        actions: list[Action] = []
        for plan in plan_kv_moves(state.kv_at, self._home(state).stages):
            there = self._cluster.workers[plan.src].ledger.table(state.request_id).ids
            here = self._cluster.workers[plan.dst].ledger.table(state.request_id).ids
            move = self._cluster.send_kv(
                state, plan.src, plan.dst, plan.layers, there[first:end], here[first:end],
                owner=self._owner, waiter=self, purpose=Purpose.RETURN,
            )
            self._moves[move.transfer_id] = move
            actions.append(move)
        return actions

    def _arrived(self, state: RequestState) -> None:
        """All moves of a round have ended; if it was the last one, the request leaves the pipeline."""
        if not state.paused:
            return
        home = self._home(state)
        self._pipeline.queues.take_out(state)
        for worker_id in self._pipeline.worker_ids:
            if worker_id not in home.worker_ids:
                self._cluster.workers[worker_id].ledger.release(state.request_id)
        self._forget(state)
        state.paused = False
        home.queues.resume(state)

    def _forget(self, state: RequestState) -> None:
        self._home_of.pop(state.request_id, None)
        self._sent_blocks.pop(state.request_id, None)
