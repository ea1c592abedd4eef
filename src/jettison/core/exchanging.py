"""The exchange after a merge: running requests' KV goes to where the new stages want it (KunServe v3 section 4.2).

Owns the transfers of one merge and the pages under KV that a member no longer runs. Nothing here changes queues of
other groups or drops parameters: that is ``core.merging``, which drives it.

    plan(states)    before the drop: which requests will have to move, so that their KV is kept (``spec``)
    begin(group)    the merged group exists; its requests are resumed, stalled or recomputed
    advance(now)    transfers start in service order as landing space allows; foreign pages are given back

Ownership: until its last move has ended, a request's blocks stay reserved at both ends. Landing space comes first:
admission leaves free what the exchange still needs, so two members cannot fill each other's room and wait forever;
should no landing be possible at all, the youngest stalled request is recomputed instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from jettison.core.group import GroupCore
from jettison.core.landed import Landed, LandedBlocks
from jettison.core.ports import Action, CallFailed, CancelMove, LayoutApplied, LayoutOffered, MoveEnded, SendKV
from jettison.core.relayout import Relayout, RelayoutPhase
from jettison.core.request import Phase, RequestState
from jettison.core.state import ClusterState
from jettison.memory.layout import LayoutSpec, RetainedKV
from jettison.policy.kvmoves import KVMovePlan, plan_kv_moves
from jettison.policy.merge import StagePlan
from jettison.types import NANOSECONDS, LayerRange, MoveId, RequestId, WorkerId

RETRY_NS = NANOSECONDS // 10
"""Between attempts of a member to give pages back."""


class Exchange:
    """Transfers of one merge into ``stages``."""

    def __init__(self, cluster: ClusterState, stages: tuple[StagePlan, ...]) -> None:
        self._cluster = cluster
        self._stages = {s.worker_id: s.layers for s in stages}
        self._stage_order = stages
        self.group: GroupCore | None = None
        self.num_moved_bytes = 0
        self._relayouts: list[Relayout] = []
        self._landing: list[tuple[RequestState, tuple[KVMovePlan, ...]]] = []
        """Stalled requests whose transfers have not started, in service order."""
        self._moves: dict[MoveId, SendKV] = {}
        self._landed = LandedBlocks(cluster)
        """Shared prefixes move once."""
        self._waits_for: dict[RequestId, set[MoveId]] = {}
        """Request -> moves of other requests that carry its shared prefix."""
        self._broken: set[RequestId] = set()
        """Requests of which a transfer failed: recomputed as soon as nothing of them is on its way."""
        self._num_foreign: dict[WorkerId, int] | None = None
        """Blocks of layers that left a worker and must still be sent, by worker; None = has to be counted again."""
        self._retry_ns = 0

    @property
    def num_stalled(self) -> int:
        """Requests whose transfers have not started."""
        return len(self._landing)

    @property
    def is_over(self) -> bool:
        """Every request is in place and no member keeps KV of layers that it no longer runs."""
        assert self.group is not None
        return not (self._landing or self._moves or self._relayouts or self.group.moving or self._kept())

    # --- before the drop --------------------------------------------------------------------------------------

    def plan(self, states: Iterable[RequestState]) -> None:
        """Note which requests have KV that must survive the drop until it has been sent."""
        stalled = [
            (state, plan_kv_moves(state.kv_at, self._stage_order))
            for state in states
            if state.ending is None and state.num_computed > 0
        ]
        self._landing = [entry for entry in stalled if entry[1]]

    def call_off(self) -> None:
        """The drop did not happen: nothing will be sent."""
        self._landing = []

    def _foreign_blocks(self, worker_id: WorkerId) -> dict[LayerRange, set[int]]:
        """Blocks at a worker whose KV of layers outside its new range must still be sent, by layer range."""
        foreign: dict[LayerRange, set[int]] = {}
        ledger = self._cluster.workers[worker_id].ledger
        for state, moves in self._landing:
            for move in moves:
                if move.src == worker_id:
                    ids = ledger.table(state.request_id).ids[: -(-state.num_computed // ledger.block_size)]
                    foreign.setdefault(move.layers, set()).update(ids)
        for sent in self._moves.values():
            if sent.src == worker_id:
                foreign.setdefault(sent.layers, set()).update(sent.src_blocks)
        return foreign

    def spec(self, worker_id: WorkerId) -> LayoutSpec:
        """A member's layout: its stage, and KV of other layers for as long as it must still be sent."""
        layers = self._stages[worker_id]
        retained = tuple(
            RetainedKV(where, tuple(sorted(blocks)))
            for where, blocks in sorted(self._foreign_blocks(worker_id).items())
            if blocks
        )
        return LayoutSpec(self._cluster.shape.shards_for(layers), layers, retained)

    # --- the merged group -------------------------------------------------------------------------------------

    def begin(self, group: GroupCore, states: Iterable[RequestState]) -> None:
        """Put the requests of the old groups into the merged one; those that lack KV stall."""
        self.group = group
        self._landing = []
        self._num_foreign = None
        for state in sorted(states, key=lambda s: s.order):
            if state.phase is Phase.WAITING:
                group.enqueue(state)
                continue
            state.paused = False
            moves = plan_kv_moves(state.kv_at, self._stage_order)
            if not moves and state.ending is None:
                group.resume(state)
                continue
            state.phase = Phase.MOVING
            state.group_id = group.group_id
            group.moving[state.request_id] = state
            if state.ending is not None:
                self._cluster.reap(state)
            elif state.num_computed == 0:
                self._recompute(state)
            else:
                self._landing.append((state, moves))

    def advance(self, now_ns: int) -> list[Action]:
        """Start what can be started, and tell admission what is still to land."""
        assert self.group is not None
        actions = self._start_transfers(now_ns)
        while self._landing and not self._moves and not self._relayouts:
            # Neither a transfer nor a layout change is under way that could make room: recompute the youngest.
            state, _ = self._landing.pop()
            self._recompute(state)
            actions += self._start_transfers(now_ns)
        self._reserve_landing(self.group)
        return actions

    # --- events -----------------------------------------------------------------------------------------------

    def on_layout(self, event: LayoutOffered | LayoutApplied | CallFailed, now_ns: int) -> list[Action] | None:
        """Take the answer to a layout call of the exchange; None if it is not one."""
        for relayout in self._relayouts:
            actions = relayout.on(event)
            if actions is not None:
                if relayout.is_over:
                    self._relayouts.remove(relayout)
                    if relayout.phase is RelayoutPhase.FAILED:
                        self._retry_ns = now_ns + RETRY_NS
                return actions
        return None

    def on_move(self, event: MoveEnded) -> bool:
        """Take the end of a transfer; whether it was one of this exchange."""
        move = self._moves.pop(event.move_id, None)
        if move is None:
            return False
        state = self._cluster.move_owner.pop(event.move_id)
        state.moves.discard(event.move_id)
        self.num_moved_bytes += event.num_bytes
        self._cluster.counters.exchanged_bytes += event.num_bytes
        dependents = [r for r, moves in self._waits_for.items() if event.move_id in moves]
        for request_id in dependents:
            self._waits_for[request_id].discard(event.move_id)
        self._num_foreign = None
        if not event.complete:
            self._landed.forget(state, move)
            # Whoever counted on the prefix that this transfer carried has to start again, too.
            self._broken.update(dependents)
            if state.ending is None:
                self._broken.add(state.request_id)
        if state.ending is not None:
            self._cluster.reap(state)
        for request_id in (state.request_id, *dependents):
            self._try_resume(request_id)
        return True

    def cancel(self, state: RequestState) -> list[Action]:
        """The request is ending: stop its transfers unless another request needs the prefix they carry."""
        if any(s is state for s, _ in self._landing):
            self._landing = [entry for entry in self._landing if entry[0] is not state]
            self._num_foreign = None
        self._waits_for.pop(state.request_id, None)
        self._broken.discard(state.request_id)
        if not state.moves:
            return []
        needed = set().union(*self._waits_for.values())
        cancelled = [self._moves[m] for m in sorted(state.moves) if m in self._moves and m not in needed]
        for move in cancelled:
            # Nobody may count on blocks of which perhaps nothing has arrived.
            self._landed.forget(state, move)
        return [CancelMove(move.src, move.move_id) for move in cancelled]

    def abandon(self) -> tuple[list[Relayout], set[MoveId]]:
        """A member is dead: layout changes and transfers that are still under way."""
        return self._relayouts, set(self._moves)

    # --- transfers --------------------------------------------------------------------------------------------

    def _start_transfers(self, now_ns: int) -> list[Action]:
        """Start the transfers of stalled requests, in service order, until one has no room to land."""
        assert self.group is not None
        actions: list[Action] = []
        num_started = 0
        for state, moves in self._landing:
            started = self._start_transfer(state, moves)
            if started is None:
                break
            num_started += 1
            actions += started
        if num_started:
            begun, self._landing = self._landing[:num_started], self._landing[num_started:]
            self._num_foreign = None
            for state, _ in begun:
                self._try_resume(state.request_id)
        return actions + self._give_back_foreign(bool(self._landing or self.group.waiting), now_ns)

    def _start_transfer(self, state: RequestState, moves: tuple[KVMovePlan, ...]) -> list[Action] | None:
        """Reserve landing blocks and start all transfers of a request; None if a destination lacks room."""
        workers = self._cluster.workers
        assert self.group is not None
        table_len = max(workers[m.src].ledger.num_blocks_of(state.request_id) for m in moves)
        num_sent = self.group.blocks_for(state.num_computed)
        new_here = [dst for dst in sorted({m.dst for m in moves}) if not workers[dst].ledger.has(state.request_id)]
        shared = {dst: self._shared_prefix(state, moves, dst) for dst in new_here}
        if any(not workers[dst].ledger.can_allocate(table_len - len(shared[dst])) for dst in new_here):
            return None
        for dst in new_here:
            ledger = workers[dst].ledger
            ledger.adopt_prefix(state.request_id, [landed.block for landed in shared[dst]])
            ledger.allocate(state.request_id, table_len - len(shared[dst]))
        actions: list[Action] = []
        for move in moves:
            prefix = shared.get(move.dst, [])
            self._landed.note(state, move.src, move.dst)
            if prefix:
                self._waits_for.setdefault(state.request_id, set()).update(self._carriers(prefix, move))
            there = workers[move.src].ledger.table(state.request_id).ids[len(prefix) : num_sent]
            here = workers[move.dst].ledger.table(state.request_id).ids[len(prefix) : num_sent]
            action = self._cluster.send_kv(state, move.src, move.dst, move.layers, there, here)
            self._moves[action.move_id] = action
            actions.append(action)
        return actions

    def _shared_prefix(self, state: RequestState, moves: tuple[KVMovePlan, ...], dst: WorkerId) -> list[Landed]:
        """Blocks at ``dst`` that already hold (or will hold) this request's leading blocks."""
        sources = {m.src for m in moves if m.dst == dst}
        return self._landed.prefix(state, sources.pop(), dst) if len(sources) == 1 else []

    def _carriers(self, prefix: list[Landed], move: KVMovePlan) -> set[MoveId]:
        """Unfinished moves that carry blocks of a shared prefix between the ends of ``move``."""
        theirs = (m for owner in {p.owner for p in prefix} for m in self._cluster.requests[owner].moves)
        return {m for m in theirs if (sent := self._moves[m]).src == move.src and sent.dst == move.dst}

    def _try_resume(self, request_id: RequestId) -> None:
        """Back to running once nothing of the request is on its way (or to the queue, if something got lost)."""
        group = self.group
        state = self._cluster.requests.get(request_id)
        if group is None or state is None or state.phase is not Phase.MOVING or state.ending is not None:
            return
        if state.moves:
            return
        if request_id in self._broken:
            self._recompute(state)
            return
        if self._waits_for.get(request_id):
            return
        self._waits_for.pop(request_id, None)
        group.resume(state)
        if group.seals:
            for ledger in group.ledgers:
                for index in range(state.num_sealed):
                    ledger.seal(request_id, index, state.hashes[index])

    def _recompute(self, state: RequestState) -> None:
        """Give up on moving this request's KV: it starts again from its tokens."""
        assert self.group is not None
        self._num_foreign = None
        self._broken.discard(state.request_id)
        self._waits_for.pop(state.request_id, None)
        self.group.preempt(state)

    def _reserve_landing(self, group: GroupCore) -> None:
        """Tell admission how many blocks the transfers that have not started will take."""
        blocks: dict[WorkerId, int] = {}
        for state, moves in self._landing:
            length = max(self._cluster.workers[m.src].ledger.num_blocks_of(state.request_id) for m in moves)
            for dst in {m.dst for m in moves}:
                if not self._cluster.workers[dst].ledger.has(state.request_id):
                    blocks[dst] = blocks.get(dst, 0) + length
        group.landing.blocks = blocks

    def _kept(self) -> bool:
        """Whether some member still has pages under KV of layers it no longer runs."""
        return any(self._cluster.workers[w].layout.retained for w in self._stages)

    def _give_back_foreign(self, pressed: bool, now_ns: int) -> list[Action]:
        """Free pages of foreign layers: all at once when a member has sent everything, earlier under pressure."""
        if now_ns < self._retry_ns or not self._kept():
            return []
        if self._num_foreign is None:
            self._num_foreign = {w: sum(map(len, self._foreign_blocks(w).values())) for w in self._stages}
        actions: list[Action] = []
        for worker_id, needed in self._num_foreign.items():
            worker = self._cluster.workers[worker_id]
            kept = sum(len(r.block_ids) for r in worker.layout.retained)
            if not kept or worker.num_relayouts_open:
                continue
            if needed and not (pressed and 4 * needed <= 3 * kept):
                continue
            relayout = Relayout(self._cluster, worker, self.spec(worker_id), shrinks=False)
            self._relayouts.append(relayout)
            actions += relayout.start()
        return actions
