"""Hosted KV: KV of requests in host pools, copied out of the arenas, kept, and brought back to the request's group.

The request's residences say where its KV is; this module moves it.

    OUT      not scheduled; its blocks, which stay its own, are copied to the host pools of its stages, piece by piece
    STORED   only host pools have its KV; it holds no device blocks, and goes along with its group when that changes
    IN       has blocks in every stage of its present group; pieces travel from the host pools into them, over a link
             where the pool is another worker's
    (over)   it runs on; or, when a piece failed, it is recomputed

    OUT --give_way--> runs on; the pieces under way end, and then its slots are free
    IN  --give_way--> TURNING --pieces have ended--> STORED: its blocks are given back

    CHECKPOINT   it runs, and its leading blocks are in host pools as well (``core.moving.checkpoints``), so it can
                 become STORED at once; when it has come back it is in CHECKPOINT again

Rule 1. A step carries at most the budget's blocks, both directions together, leavers before returners. The allowance is
        renewed with every step issued, and where no step is in flight. Pieces follow the step in the worker's stream.
        They are copied while the controller takes the step's tokens and plans the next step, which begins when they
        are copied: that step's time includes them, and the predictor is fed with both (``Group.copies``).
Rule 2. Blocks are given back, and a request is scheduled again, only when the copy has ended. A leaving request has no
        step in flight, so nothing writes the blocks being read; other requests may read sealed blocks that it shares
        meanwhile.
Rule 3. No request of a group with changing layouts is in OUT or IN (``give_way``): a stored one is in no arena.

The rungs ``core.ladder.swap`` and ``core.ladder.harvest`` decide which requests go and return; ``memory.hostpool`` is
the book of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from jettison.core.moving.allowances import Allowances
from jettison.core.moving.hostedkv import HostedKV, HostedPhase
from jettison.core.pending import PendingTransfer, Purpose
from jettison.core.ports import Action, SendKV, TransferEnded
from jettison.core.requests import Phase, RequestState
from jettison.core.residence import NOWHERE, changed, hosted_only, in_arenas, pools_of
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.memory.kvtransfers import plan_kv_transfers
from jettison.types import GroupId, RequestId, TransferId, WorkerId


class Hosted:
    """All KV in host pools of a cluster."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.pools = {w: worker.pool for w, worker in cluster.workers.items()}
        self._entries: dict[RequestId, HostedKV] = {}
        self._travelling: dict[RequestId, HostedKV] = {}
        """Entries in OUT and IN."""
        self._num_stored = 0
        """Entries opened so far."""
        self._allowances = Allowances(cluster)
        """Allowances of swapped requests."""

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """No request has KV in a host pool."""
        return not self._entries

    def of(self, group: Group, *phases: HostedPhase, is_checkpoint: bool = False) -> list[HostedKV]:
        """Requests of a group that were swapped out (or: freed by their checkpoints), in these phases."""
        if not self._entries:
            return []
        here = (self._entries.get(request_id) for request_id in (*group.queues.stored, *group.queues.moving))
        return [e for e in here if e is not None and e.phase in phases and e.is_checkpoint is is_checkpoint]

    def entry(self, state: RequestState) -> HostedKV | None:
        """A request's entry, if it has KV in host pools."""
        return self._entries.get(state.request_id)

    def entry_named(self, request_id: RequestId) -> HostedKV | None:
        """The entry of a request that may have ended."""
        return self._entries.get(request_id)

    def checkpoints(self) -> list[HostedKV]:
        """Entries of all requests that run with a checkpoint."""
        return [entry for entry in self._entries.values() if entry.phase is HostedPhase.CHECKPOINT]

    def owed(self, group: Group, *, is_checkpoint: bool = False) -> list[HostedKV]:
        """Owed blocks: entries of a group's requests that will take blocks again before newcomers do. These are
        swapped-out requests, or (with ``is_checkpoint``) online ones that were freed; without requests that the group
        could not hold."""
        phases = HostedPhase.OUT, HostedPhase.STORED, HostedPhase.TURNING
        entries = self.of(group, *phases, is_checkpoint=is_checkpoint)
        return [
            e for e in entries if not (is_checkpoint and e.state.is_offline) and not group.blocks.is_oversized(e.state)
        ]

    def owed_blocks(self, group: Group, *, is_checkpoint: bool = False) -> int:
        """Blocks that ``owed`` requests will take at each stage, requests that still hold theirs (OUT) included."""
        return sum(self.blocks_to_return(e) for e in self.owed(group, is_checkpoint=is_checkpoint))

    def oversized(self, group: Group, *, is_checkpoint: bool = False) -> tuple[RequestId, ...]:
        """Stored requests that would not fit into their group as it is now, even alone: they could never return."""
        entries = self.of(group, HostedPhase.STORED, is_checkpoint=is_checkpoint)
        return tuple(e.state.request_id for e in entries if group.blocks.is_oversized(e.state))

    def groups(self) -> list[Group]:
        """Groups of the swapped-out requests, in order of formation."""
        swapped = (e for e in self._entries.values() if not e.is_checkpoint)
        ids = {e.state.group_id for e in swapped if e.phase is not HostedPhase.LEAVING}
        return [self._cluster.groups[g] for g in sorted(ids)]

    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Workers of the groups of swapped-out requests."""
        return tuple(sorted({w for group in self.groups() for w in group.worker_ids}))

    def num_free_slots(self, worker_ids: Iterable[WorkerId]) -> int:
        """Free slots of the fullest of these pools."""
        return min(self.pools[w].num_free for w in worker_ids)

    def blocks_to_return(self, entry: HostedKV) -> int:
        """Blocks that each stage of its group has to have for the request to run on."""
        return self._group(entry).limits.blocks_for(entry.state.num_tokens)

    def absent_blocks(self, group: Group) -> int:
        """What ``owed`` requests of both kinds will take again and do not hold now; offline ones that were freed are in
        the way of no request."""
        if not self._entries:
            return 0
        owed = (*self.owed(group), *self.owed(group, is_checkpoint=True))
        return sum(self.blocks_to_return(e) for e in owed if e.phase is not HostedPhase.OUT)

    def _group(self, entry: HostedKV) -> Group:
        return self._cluster.groups[entry.state.group_id]

    # --- out and in -------------------------------------------------------------------------------------------

    def open(self, state: RequestState, phase: HostedPhase, num_blocks: int = 0) -> HostedKV:
        """KV of a request is about to go to the pools of its group's own workers."""
        pools, is_checkpoint = pools_of(self._cluster.groups[state.group_id].stages), phase is HostedPhase.CHECKPOINT
        entry = HostedKV(state, self._num_stored, num_blocks, pools, phase, is_checkpoint=is_checkpoint)
        self._num_stored += 1
        self._entries[state.request_id] = entry
        return entry

    def store(self, state: RequestState) -> None:
        """A running request leaves its group's arenas. The caller has made sure of free slots for all of its blocks."""
        group = self._cluster.groups[state.group_id]
        if (checkpoint := self.entry(state)) is not None:
            self.forget(checkpoint)
        entry = self.open(state, HostedPhase.OUT, group.limits.blocks_for(state.num_computed))
        self._travelling[state.request_id] = entry
        for worker_id in entry.pools.worker_ids:
            self.pools[worker_id].hold(state.request_id, entry.num_blocks)
        group.queues.take_out(state)
        state.phase = Phase.MOVING
        state.residences = (group.residence.at(state.num_computed), entry.pools)
        group.queues.moving[state.request_id] = state
        group.counters.num_preemptions += 1
        state.num_preemptions += 1

    def bring_back(self, state: RequestState) -> None:
        """A stored request takes blocks in its group. The caller has made sure that they are free."""
        entry, group = self._entries[state.request_id], self._cluster.groups[state.group_id]
        assert entry.phase is HostedPhase.STORED, entry
        entry.phase, entry.num_sent = HostedPhase.IN, 0
        entry.parts = plan_kv_transfers(entry.pools.places, group.stages)
        self._travelling[state.request_id] = entry
        group.queues.take_out(state)
        state.phase = Phase.MOVING
        group.queues.moving[state.request_id] = state
        for ledger in group.blocks.ledgers:
            ledger.allocate(state.request_id, self.blocks_to_return(entry))
        state.residences = (entry.pools, group.residence.at(0))

    def send(self, budget_blocks: Callable[[Group], int]) -> list[Action]:
        """Issue pieces of swapped requests behind the steps just issued, within each group's allowance (rule 1)."""
        by_group: dict[GroupId, list[HostedKV]] = {}
        for entry in self._travelling.values():
            if not entry.is_checkpoint:
                by_group.setdefault(entry.state.group_id, []).append(entry)
        actions: list[Action] = []
        for group_id, travelling in sorted(by_group.items()):
            is_copying = any(e.state.transfers for e in travelling)
            allowance = self._allowances.of(self._cluster.groups[group_id], budget_blocks, is_copying=is_copying)
            for entry in sorted(travelling, key=lambda e: (e.phase is HostedPhase.IN, e.number)):
                num_blocks, pieces = self.send_some(entry, allowance.left)
                allowance.left -= num_blocks
                actions += pieces
        return actions

    def send_some(self, entry: HostedKV, most_blocks: int) -> tuple[int, list[Action]]:
        """The next piece of a request on its way, of at most ``most_blocks``: its number of blocks, and the actions."""
        num_blocks = min(most_blocks, entry.num_blocks - entry.num_sent)
        if num_blocks <= 0 or entry.state.ending is not None or entry.failed:
            return 0, []
        return num_blocks, self._send(entry, num_blocks)

    def _send(self, entry: HostedKV, num_blocks: int) -> list[Action]:
        state, workers = entry.state, self._cluster.workers
        piece = slice(entry.num_sent, entry.num_sent + num_blocks)
        entry.num_sent += num_blocks
        actions: list[Action] = []
        if entry.phase is HostedPhase.OUT:
            for (worker_id, _), layers in entry.pools.places.items():
                blocks = workers[worker_id].ledger.table(state.request_id).ids[piece]
                slots = self.pools[worker_id].slots(state.request_id)[piece]
                actions.append(self.noted(self._cluster.send_kv(
                    state, worker_id, worker_id, layers, blocks, slots, owner=self, waiter=self,
                    purpose=Purpose.HOST, to_host=True,
                ), self._group(entry)))
            return actions
        for part in entry.parts:
            slots = self.pools[part.src].slots(state.request_id)[piece]
            blocks = workers[part.dst].ledger.table(state.request_id).ids[piece]
            actions.append(self.noted(self._cluster.send_kv(
                state, part.src, part.dst, part.layers, slots, blocks, owner=self, waiter=self,
                purpose=Purpose.HOST, from_host=True, beside_steps=entry.is_checkpoint and part.src == part.dst
                and self._cluster.params.offline.prefetches,
            ), self._group(entry)))
        return actions

    def noted(self, piece: SendKV, group: Group) -> SendKV:
        """Note a piece in its group's steps. A copy inside one worker runs between steps or beside them; a piece from
        another worker's pool comes in the link's bulk turns, and is not noted."""
        if piece.src == piece.dst:
            num_bytes = self._cluster.book.transfers[piece.transfer_id].num_bytes
            group.note_copy(piece.transfer_id, num_bytes, beside_steps=piece.beside_steps)
        return piece

    # --- events -----------------------------------------------------------------------------------------------

    def on_ended(self, pending: PendingTransfer, event: TransferEnded, now_ns: int) -> list[Action]:
        """Take the end of a piece."""
        state = pending.request
        assert state is not None and isinstance(pending.transfer, SendKV), pending
        self._cluster.touch(state)
        entry = self._entries[state.request_id]
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
            self._group(entry).preempt(state)
        elif entry.num_sent == entry.num_blocks:
            self._copied(entry)
        return []

    def _pieces(self, state: RequestState) -> set[TransferId]:
        """Its pieces under way. A request that runs on may be in an exchange besides, with transfers of that."""
        transfers = self._cluster.book.transfers
        return {i for i in state.transfers if transfers[i].purpose is Purpose.HOST}

    def go_on(self, now_ns: int) -> list[Action]:
        """The end of a piece begins nothing: what it makes possible begins before the next step."""
        return []

    def _note_arrived(self, entry: HostedKV) -> None:
        """All sent blocks have arrived, in the direction that the request goes."""
        state = entry.state
        arrived = min(entry.num_sent * self._cluster.limits.block_size, state.num_computed)
        if entry.phase is HostedPhase.OUT:
            before, entry.pools = entry.pools, entry.pools.at(arrived)
            state.residences = changed(state.residences, before, entry.pools)
        elif entry.phase is HostedPhase.IN:
            before = in_arenas(state.residences)
            state.residences = changed(state.residences, before, before.at(arrived))

    def _copied(self, entry: HostedKV) -> None:
        """Every piece of one direction has arrived."""
        state, group = entry.state, self._group(entry)
        if entry.phase is HostedPhase.IN:
            state.num_sealed = 0  # its blocks are new ones, not yet findable
            if entry.is_checkpoint:  # the copy in the host pools is still good
                entry.phase = HostedPhase.CHECKPOINT
                del self._travelling[state.request_id]
                self._cluster.counters.prefetched_blocks += entry.num_blocks
            else:
                self.forget(entry)
                self._cluster.counters.swapped_in_blocks += entry.num_blocks
            group.queues.resume(state)
            return
        for ledger in group.blocks.ledgers:
            ledger.release(state.request_id)
        self._keep(entry)
        self._cluster.counters.swapped_out_blocks += entry.num_blocks

    def _keep(self, entry: HostedKV) -> None:
        """From now on only the host pools have the request's KV."""
        state, group = entry.state, self._group(entry)
        self._travelling.pop(state.request_id, None)
        entry.phase, entry.num_sent = HostedPhase.STORED, 0
        state.residences = hosted_only(state.residences)
        group.queues.keep_stored(state)

    def _turned(self, entry: HostedKV) -> None:
        """The last piece of a return that was broken off has ended."""
        state = entry.state
        for worker in self._cluster.workers.values():
            if worker.alive and worker.ledger.has(state.request_id):
                worker.ledger.release(state.request_id)
        # Whether these pieces arrived does not matter: the slots have all of the KV.
        entry.phase, entry.failed = HostedPhase.STORED, False
        if entry.is_lost:
            self.give_up(entry.state)

    def forget(self, entry: HostedKV) -> None:
        """Drop an entry, and free its slots."""
        state, request_id = entry.state, entry.state.request_id
        del self._entries[request_id]
        self._travelling.pop(request_id, None)
        for worker_id in entry.pools.worker_ids:
            self.pools[worker_id].release(request_id)
        state.residences = changed(state.residences, entry.pools, None) or NOWHERE
        self._cluster.touch(state)

    # --- effects of other moves -------------------------------------------------------------------------------

    def cancel(self, state: RequestState) -> list[Action]:
        """The request is ending: forget it. With a piece under way it is forgotten when that has ended."""
        entry = self._entries.get(state.request_id)
        if entry is not None and (entry.phase is HostedPhase.CHECKPOINT or not state.transfers):
            self.forget(entry)
        return []

    def give_way(self, worker_ids: Collection[WorkerId]) -> None:
        """Layouts of these workers are about to change: break off requests on their way to host pools or back (rule
        3)."""
        for entry in list(self._travelling.values()):
            group = self._group(entry)
            if any(w in worker_ids for w in group.worker_ids):
                self._cluster.counters.hosted_brought_back += 1
                self.break_off(entry)

    def break_off(self, entry: HostedKV) -> None:
        """A request on its way to a host pool or back goes no further."""
        state, group = entry.state, self._group(entry)
        del self._travelling[state.request_id]
        if entry.phase is HostedPhase.OUT:
            # All of its blocks are still its own, and nothing has written to them since.
            entry.phase = HostedPhase.LEAVING
            group.queues.resume(state)
            if not state.transfers:
                self.forget(entry)
            return
        entry.phase = HostedPhase.TURNING
        state.residences = hosted_only(state.residences)
        group.queues.keep_stored(state)
        if not state.transfers:
            self._turned(entry)

    def abandon(self, broken: Collection[Group]) -> set[TransferId]:
        """These groups are about to be dissolved because a worker is dead: their requests start again. Returns the
        pieces under way: later copies into their slots have to follow these."""
        pieces: set[TransferId] = set()
        ids = {group.group_id for group in broken}
        for entry in [e for e in self._entries.values() if e.state.group_id in ids]:
            if entry.phase is not HostedPhase.CHECKPOINT:
                pieces |= self._pieces(entry.state)
            if entry.phase is HostedPhase.STORED:
                self._cluster.counters.hosted_given_up += 1
            self.forget(entry)
        return pieces

    def lose_pool(self, worker_id: WorkerId) -> None:
        """A worker is dead, and its pool with it: requests of other groups with KV there are computed again."""
        self.pools[worker_id].forget_contents()
        for entry in [e for e in self._entries.values() if worker_id in e.pools.worker_ids]:
            if entry.phase is HostedPhase.LEAVING or entry.state.ending is not None:
                continue
            if entry.phase is HostedPhase.CHECKPOINT:  # it runs on, elsewhere
                self.forget(entry)
                continue
            entry.failed = entry.is_lost = True
            if not entry.state.transfers:  # else when its transfers have ended
                self.give_up(entry.state)

    def give_up(self, state: RequestState) -> None:
        """A stored request is computed again."""
        self._cluster.counters.hosted_given_up += 1
        self.forget(self._entries[state.request_id])
        self._cluster.groups[state.group_id].preempt(state)

    def drop_checkpoints(self) -> None:
        """Drop all checkpoints: freed requests are computed again, as soon as nothing of them travels."""
        for entry in [e for e in self._entries.values() if e.is_checkpoint]:
            if entry.phase is HostedPhase.CHECKPOINT:
                self.forget(entry)
                continue
            entry.is_lost = True
            if entry.phase is HostedPhase.IN:
                self.break_off(entry)
            elif entry.phase is HostedPhase.STORED and entry.state.ending is None:
                self.give_up(entry.state)

    # --- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the pools' books, and that exactly the requests with KV in host pools hold slots. Raises
        AssertionError."""
        for worker_id, pool in self.pools.items():
            pool.check()
            here = {r for r, e in self._entries.items() if worker_id in e.pools.worker_ids}
            here |= self._cluster.workers[worker_id].copying
            assert set(pool.holders()) == here, f"host slots of worker {worker_id}: {pool.holders()}, entries {here}"
        for request_id, entry in self._entries.items():
            state = entry.state
            assert entry.pools in state.residences, f"{state} is not known to be in host pools"
            if entry.phase is HostedPhase.LEAVING:
                assert self._pieces(state), f"{state} leaves no slots behind"
                continue
            if entry.phase is HostedPhase.CHECKPOINT:
                assert state.phase in (Phase.RUNNING, Phase.MOVING) and request_id not in self._travelling, state
                continue
            is_stored = entry.phase in (HostedPhase.STORED, HostedPhase.TURNING)
            assert state.phase is (Phase.STORED if is_stored else Phase.MOVING) and state.num_pending == 0, state
            assert (request_id in self._travelling) == (not is_stored), (state, entry.phase)
            if entry.phase is HostedPhase.STORED:
                holders = [w for w in self._cluster.workers.values() if w.ledger.has(request_id)]
                assert not holders, f"{state} is stored and holds blocks"
