"""KV of requests in host pools: kept there, and brought back to wherever the request's group runs.

What is where is said by the request's residences; here is what is done about it, whichever way the KV came there. There
are two, each with its own requests (``Hosted``):

    swap    the request stopped, and its blocks were copied (``core.moving.swapping``)
    store   its leading blocks were copied while it ran, and then it was freed (``core.moving.checkpoints``)

    STORED   only host pools have its KV; it holds no device blocks, and goes along with its group when that changes
    IN       has blocks in every stage of its present group; pieces travel from the host pools into them, over a link
             where the pool is another worker's
    (over)   it runs on; or, when a piece failed, it is recomputed

    IN  --give_way--> TURNING --pieces have ended--> STORED: its blocks are given back

Rule 1. A step carries at most the budget's blocks, both directions together. Pieces follow the step in the worker's
        stream: they are copied while the controller takes the step's tokens and plans the next, which begins when they
        are: its time has them in it, and the predictor is told of them with it (``Group.copies``).
Rule 2. Blocks are given back, and a request is scheduled again, only when the copy has ended.
Rule 3. No request of a group whose layouts change is on its way (``give_way``): a stored one is in no arena.

What goes and what returns is decided elsewhere (``core.ladder.swap``, ``core.ladder.harvest``); which slot holds what
is in the book of ``memory.hostpool``.
"""

from __future__ import annotations

from collections.abc import Collection

from jettison.core.moving.hostedkv import HostedKV, HostedPhase
from jettison.core.pending import PendingTransfer, TransferPurpose
from jettison.core.ports import Action, SendKV, TransferEnded
from jettison.core.preemption import Preemption
from jettison.core.requests import Phase, RequestState
from jettison.core.residence import NOWHERE, changed, hosted_only, in_arenas, pools_of
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.memory.kvtransfers import plan_kv_transfers
from jettison.types import RequestId, TransferId, WorkerId


class HostBook:
    """KV of requests that came to host pools in one of the two ways: base class of the swap and the checkpoint
    store."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.pools = {w: worker.pool for w, worker in cluster.workers.items()}
        self.entries: dict[RequestId, HostedKV] = {}
        self._travelling: dict[RequestId, HostedKV] = {}
        """Entries of requests that are on their way."""
        self._num_opened = 0
        """Entries opened so far."""

    @property
    def returns_beside_steps(self) -> bool:
        """Whether KV that comes back within one worker is copied beside steps; here it is copied between them."""
        return False

    # --- reading ----------------------------------------------------------------------------------------------

    def of(self, group: Group, *phases: HostedPhase) -> list[HostedKV]:
        """The entries in these phases of a group's moving and stored requests; empty: none."""
        if not self.entries:
            return []
        here = (self.entries.get(request_id) for request_id in (*group.queues.stored, *group.queues.moving))
        return [e for e in here if e is not None and e.phase in phases]

    def entry(self, state: RequestState) -> HostedKV | None:
        """The entry of a request; None: it has no KV in host pools."""
        return self.entries.get(state.request_id)

    def entry_named(self, request_id: RequestId) -> HostedKV | None:
        """The entry of a request that may have ended, by its id; None: there is none."""
        return self.entries.get(request_id)

    def owed(self, group: Group) -> list[HostedKV]:
        """The entries of a group's requests that will take blocks again before newcomers do, without those that it
        could not hold."""
        entries = self.of(group, HostedPhase.OUT, HostedPhase.STORED, HostedPhase.TURNING)
        return [e for e in entries if not group.blocks.is_oversized(e.state)]

    def owed_blocks(self, group: Group) -> int:
        """Blocks that ``owed`` requests of the group will take at each stage, requests that still hold theirs (OUT)
        included; 0: none."""
        return sum(self.blocks_to_return(e) for e in self.owed(group))

    def oversized(self, group: Group) -> tuple[RequestId, ...]:
        """The stored requests that would not fit into their group as it is now, even alone: they could never return.
        Empty: none."""
        entries = self.of(group, HostedPhase.STORED)
        return tuple(e.state.request_id for e in entries if group.blocks.is_oversized(e.state))

    def blocks_to_return(self, entry: HostedKV) -> int:
        """Blocks that each stage of the request's group has to have for the request to run on."""
        return self._group(entry).limits.blocks_for(entry.state.num_tokens)

    def _group(self, entry: HostedKV) -> Group:
        """The group of an entry's request."""
        return self._cluster.groups[entry.state.group_id]

    # --- on its way -------------------------------------------------------------------------------------------

    def open(self, state: RequestState, phase: HostedPhase, num_blocks: int = 0) -> HostedKV:
        """Make the entry of a request whose KV is about to go to the pools of its group's own workers; return it."""
        pools = pools_of(self._cluster.groups[state.group_id].stages)
        entry = HostedKV(state, self._num_opened, num_blocks, pools, phase)
        self._num_opened += 1
        self.entries[state.request_id] = entry
        return entry

    def bring_back(self, state: RequestState) -> None:
        """Begin to bring a stored request back: it takes blocks in its group. The caller has made sure that they are
        free. Raises AssertionError for one that is not stored in whole."""
        entry, group = self.entries[state.request_id], self._cluster.groups[state.group_id]
        assert entry.phase is HostedPhase.STORED and not entry.awaits_pieces, entry
        entry.phase, entry.num_sent = HostedPhase.IN, 0
        entry.parts = plan_kv_transfers(entry.pools.places, group.stages)
        self._travelling[state.request_id] = entry
        group.queues.take_out(state)
        state.phase = Phase.MOVING
        group.queues.moving[state.request_id] = state
        for ledger in group.blocks.ledgers:
            ledger.allocate(state.request_id, self.blocks_to_return(entry))
        state.residences = (entry.pools, group.residence.at(0))

    def send_some(self, entry: HostedKV, most_blocks: int) -> tuple[int, list[Action]]:
        """Issue the next piece of a request on its way, of at most ``most_blocks``. Returns its number of blocks, and
        the actions; (0, []) where nothing is left to send."""
        num_blocks = min(most_blocks, entry.num_blocks - entry.num_sent)
        if num_blocks <= 0 or entry.state.ending is not None or entry.failed:
            return 0, []
        return num_blocks, self._send(entry, num_blocks)

    def _send(self, entry: HostedKV, num_blocks: int) -> list[Action]:
        """Issue a piece from host pools to arenas, of the next ``num_blocks``; return the actions."""
        state, workers = entry.state, self._cluster.workers
        piece = slice(entry.num_sent, entry.num_sent + num_blocks)
        entry.num_sent += num_blocks
        actions: list[Action] = []
        for part in entry.parts:
            slots = self.pools[part.src].slots(state.request_id)[piece]
            blocks = workers[part.dst].ledger.table(state.request_id).ids[piece]
            actions.append(self._issue(entry, SendKV(
                self._cluster.book.next_transfer_id, part.src, part.dst, part.layers, tuple(slots), tuple(blocks),
                from_host=True, beside_steps=part.src == part.dst and self.returns_beside_steps,
            )))
        return actions

    def _issue(self, entry: HostedKV, piece: SendKV) -> SendKV:
        """Book a transfer of a piece; return it."""
        self._cluster.send_kv(entry.state, piece, owner=self, waiter=self, purpose=TransferPurpose.HOST)
        return self.noted(piece, self._group(entry))

    def noted(self, piece: SendKV, group: Group) -> SendKV:
        """Note a piece in its group's steps, and return it. A copy inside one worker runs between steps or beside them;
        a piece from another worker's pool comes in the link's bulk turns, and is not noted."""
        if piece.src == piece.dst:
            num_bytes = self._cluster.book.transfers[piece.transfer_id].num_bytes
            group.note_copy(piece.transfer_id, num_bytes, beside_steps=piece.beside_steps)
        return piece

    # --- events -----------------------------------------------------------------------------------------------

    def on_ended(self, pending: PendingTransfer, event: TransferEnded, now_ns: int) -> list[Action]:
        """Take the end of a piece. With the last one the request is stored, runs on, is forgotten, or is preempted if a
        piece failed. Returns no actions."""
        state = pending.request
        assert state is not None and isinstance(pending.transfer, SendKV), pending
        self._cluster.touch(state)
        entry = self.entries[state.request_id]
        entry.failed |= not event.complete
        if (group := self._cluster.groups.get(state.group_id)) is not None:
            group.note_copied(event.transfer_id)
        if self._pieces(state):
            return []
        if not entry.failed:
            self._note_arrived(entry)
        if entry.phase is HostedPhase.LEAVING or state.ending is not None:
            self.forget(entry)
            self._cluster.reap(state)
        elif entry.phase is HostedPhase.TURNING:
            self._turned(entry)
        elif entry.failed:
            self.forget(entry)
            self._group(entry).preempt(state, entry.lost or Preemption.COPY_FAILED)
        elif entry.num_sent == entry.num_blocks:
            self._has_arrived(entry)
        return []

    def _pieces(self, state: RequestState) -> set[TransferId]:
        """The request's pieces under way. A request that runs on may be in an exchange besides, with transfers of
        that."""
        transfers = self._cluster.book.transfers
        return {i for i in state.transfers if transfers[i].purpose is TransferPurpose.HOST}

    def go_on(self, now_ns: int) -> list[Action]:
        """Begin nothing when a piece has ended: what it makes possible begins before the next step."""
        return []

    def _note_arrived(self, entry: HostedKV) -> None:
        """Note how much of a request's KV has arrived in arenas, where it is on its way back: all blocks sent have."""
        state = entry.state
        if entry.phase is HostedPhase.IN:
            before = in_arenas(state.residences)
            state.residences = changed(state.residences, before, before.at(self._sent_tokens(entry)))

    def _sent_tokens(self, entry: HostedKV) -> int:
        """Tokens of the request whose KV has been sent in this direction."""
        return min(entry.num_sent * self._cluster.limits.block_size, entry.state.num_computed)

    def _has_arrived(self, entry: HostedKV) -> None:
        """Let a request run on, as every piece of its return is there."""
        entry.state.num_sealed = 0  # its blocks are new ones, not yet findable
        self._came_back(entry)
        self._group(entry).queues.resume(entry.state)

    def _came_back(self, entry: HostedKV) -> None:
        """Drop the entry of a request that is about to run on."""
        self.forget(entry)

    def _turned(self, entry: HostedKV) -> None:
        """Store a request again when the last piece of its broken-off return has ended; it is computed again if its
        pool was lost."""
        state = entry.state
        for worker in self._cluster.workers.values():
            if worker.alive and worker.ledger.has(state.request_id):
                worker.ledger.release(state.request_id)
        # Whether these pieces arrived does not matter: the slots have all of the KV.
        entry.phase, entry.failed = HostedPhase.STORED, False
        if entry.lost is not None:
            self.give_up(entry.state, entry.lost)

    def forget(self, entry: HostedKV) -> None:
        """Drop an entry, and free its slots."""
        state, request_id = entry.state, entry.state.request_id
        del self.entries[request_id]
        self._travelling.pop(request_id, None)
        for worker_id in entry.pools.worker_ids:
            self.pools[worker_id].release(request_id)
        state.residences = changed(state.residences, entry.pools, None) or NOWHERE
        self._cluster.touch(state)

    # --- effects of other moves -------------------------------------------------------------------------------

    def cancel(self, state: RequestState) -> None:
        """Forget the entry of a request that is ending. With a piece under way it is forgotten when that has ended."""
        entry = self.entries.get(state.request_id)
        if entry is not None and not state.transfers:
            self.forget(entry)

    def give_way(self, worker_ids: Collection[WorkerId]) -> None:
        """Break off requests on their way to or from host pools in groups of these workers, whose layouts are about to
        change (rule 3)."""
        for entry in list(self._travelling.values()):
            group = self._group(entry)
            if any(w in worker_ids for w in group.worker_ids):
                self._cluster.counters.hosted_brought_back += 1
                self.break_off(entry)

    def break_off(self, entry: HostedKV) -> None:
        """Stop a request on its way back, and store it again as soon as no piece of it is under way."""
        state = entry.state
        del self._travelling[state.request_id]
        entry.phase = HostedPhase.TURNING
        state.residences = hosted_only(state.residences)
        self._group(entry).queues.keep_stored(state)
        if not state.transfers:
            self._turned(entry)

    def abandon(self, broken: Collection[Group]) -> set[TransferId]:
        """Forget the entries of these groups' requests, as the groups are about to be dissolved after a death. Returns
        the pieces under way: later copies into their slots have to follow these."""
        pieces: set[TransferId] = set()
        ids = {group.group_id for group in broken}
        for entry in [e for e in self.entries.values() if e.state.group_id in ids]:
            pieces |= self._pieces(entry.state)
            if entry.phase is HostedPhase.STORED:
                self._cluster.counters.hosted_given_up += 1
            self.forget(entry)
        return pieces

    def lose_pool(self, worker_id: WorkerId) -> None:
        """Give up the entries in the pool of a dead worker: these requests are computed again, once their transfers
        have ended."""
        for entry in [e for e in self.entries.values() if worker_id in e.pools.worker_ids]:
            if entry.phase is HostedPhase.LEAVING or entry.state.ending is not None:
                continue
            entry.failed, entry.lost = True, Preemption.HOST_LOST
            if not entry.state.transfers:  # else when its transfers have ended
                self.give_up(entry.state, Preemption.HOST_LOST)

    def give_up(self, state: RequestState, why: Preemption) -> None:
        """Have a stored request computed again, for this reason."""
        self._cluster.counters.hosted_given_up += 1
        self.forget(self.entries[state.request_id])
        self._cluster.groups[state.group_id].preempt(state, why)

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every request with an entry is where its phase says. Raises AssertionError otherwise."""
        for entry in self.entries.values():
            assert entry.pools in entry.state.residences, f"{entry.state} is not known to be in host pools"
            self._check(entry)

    def _check(self, entry: HostedKV) -> None:
        """A request's phase, blocks and travel fit its entry's phase. Raises AssertionError otherwise."""
        state, request_id = entry.state, entry.state.request_id
        is_stored = entry.phase in (HostedPhase.STORED, HostedPhase.TURNING)
        assert state.phase is (Phase.STORED if is_stored else Phase.MOVING) and state.num_pending == 0, state
        assert (request_id in self._travelling) == (not is_stored), (state, entry.phase)
        if entry.phase is HostedPhase.STORED:
            holders = [w for w in self._cluster.workers.values() if w.ledger.has(request_id)]
            assert not holders, f"{state} is stored and holds blocks"
