"""Drop, merge and exchange as one phase table (KunServe v3 sections 4.1 and 4.2; design 5.1).

    QUIESCE   old groups finish the step in flight               (at most one step)
    REMAP     every member drops shards outside its range, at once; their pages become KV capacity
    EXCHANGE  the merged group serves; running requests of the old groups are stalled until the KV of the layers
              that changed hands has arrived; queued requests run meanwhile
    SETTLED   every request is in place, the KV of foreign layers is freed
    REVERTING a member could not remap: the others map everything again (tried again until it works)
    REFILLING ... and fetch what was overwritten meanwhile
    FAILED    ... and the old groups serve on as if nothing had happened

Ownership: until its last move has ended, a request's blocks stay reserved at both ends. Landing space comes first:
admission leaves free what the exchange still needs, so two members cannot fill each other's room and wait forever;
should no landing be possible at all, the youngest stalled request is recomputed instead.
"""

from __future__ import annotations

from enum import StrEnum

from jettison.core.group import GroupCore
from jettison.core.landed import Landed, LandedBlocks
from jettison.core.ports import (
    Action,
    CallFailed,
    CancelMove,
    LayoutApplied,
    LayoutOffered,
    LoadShard,
    MoveEnded,
    Record,
    SendKV,
    ShardLoaded,
)
from jettison.core.relayout import Relayout, RelayoutPhase
from jettison.core.request import Phase, RequestState
from jettison.core.state import ClusterState, WorkerState
from jettison.memory.layout import LayoutSpec, RetainedKV
from jettison.policy.kvmoves import KVMovePlan, plan_kv_moves
from jettison.policy.merge import StagePlan
from jettison.types import LayerRange, MoveId, RequestId, ShardId, WorkerId

RETRY_NS = 100_000_000
"""Between attempts at what has to succeed some day: mapping back, loading, giving pages back."""


class MergePhase(StrEnum):
    """See the module's table."""

    QUIESCE = "quiesce"
    REMAP = "remap"
    EXCHANGE = "exchange"
    SETTLED = "settled"
    REVERTING = "reverting"
    REFILLING = "refilling"
    FAILED = "failed"


class Merging:
    """One merge of ``sources`` into one group with ``stages``."""

    def __init__(
        self, cluster: ClusterState, sources: list[GroupCore], stages: tuple[StagePlan, ...], now_ns: int
    ) -> None:
        self._cluster = cluster
        self._sources = sources
        self._stages = {s.worker_id: s.layers for s in stages}
        self._stage_order = stages
        self.phase = MergePhase.QUIESCE
        self.group: GroupCore | None = None
        self.failure: str | None = None
        self._started_ns = now_ns
        self._relayouts: list[Relayout] = []
        self._before: dict[WorkerId, LayoutSpec] = {}
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
        self._num_moved_bytes = 0
        self._loads: dict[int, LoadShard] = {}
        self._unloaded: list[LoadShard] = []
        """Loads that failed, to be tried again."""
        self._retry_ns = 0
        for group in sources:
            group.paused = True

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Members of the merge."""
        return tuple(self._stages)

    @property
    def sources(self) -> tuple[GroupCore, ...]:
        """The groups that are merged."""
        return tuple(self._sources)

    @property
    def is_over(self) -> bool:
        """Nothing left to do."""
        return self.phase in (MergePhase.SETTLED, MergePhase.FAILED)

    # --- events -----------------------------------------------------------------------------------------------

    def on_layout(self, event: LayoutOffered | LayoutApplied | CallFailed, now_ns: int) -> list[Action] | None:
        """Take the answer to one of this merge's layout calls; None if it is not one."""
        if isinstance(event, CallFailed) and event.call_id in self._loads:
            self._unloaded.append(self._loads.pop(event.call_id))
            self._retry_ns = now_ns + RETRY_NS
            return []
        for relayout in self._relayouts:
            actions = relayout.on(event)
            if actions is not None:
                if relayout.is_over and self.phase is MergePhase.EXCHANGE:
                    self._relayouts.remove(relayout)
                    if relayout.phase is RelayoutPhase.FAILED:
                        self._retry_ns = now_ns + RETRY_NS
                return actions + self.advance(now_ns)
        return None

    def on_shard_loaded(self, event: ShardLoaded, now_ns: int) -> list[Action] | None:
        """Take the end of a load from the model folder; None if it is not one of this merge's."""
        load = self._loads.pop(event.call_id, None)
        if load is None:
            return None
        self._cluster.workers[load.worker_id].unfilled.discard(load.shard)
        return self.advance(now_ns)

    def on_move(self, event: MoveEnded, now_ns: int) -> list[Action] | None:
        """Take the end of one of this merge's transfers; None if it is not one."""
        move = self._moves.pop(event.move_id, None)
        if move is None:
            return None
        state = self._cluster.move_owner.pop(event.move_id)
        state.moves.discard(event.move_id)
        self._num_moved_bytes += event.num_bytes
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
        return self.advance(now_ns)

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

    def advance(self, now_ns: int) -> list[Action]:
        """Go as far as the state allows."""
        if self.phase is MergePhase.QUIESCE and not any(g.in_flight for g in self._sources):
            return self._remap(now_ns)
        if self.phase is MergePhase.REMAP and all(r.is_over for r in self._relayouts):
            if any(r.phase is RelayoutPhase.FAILED for r in self._relayouts):
                return self._revert(now_ns)
            return self._form(now_ns) + self._exchange(now_ns)
        if self.phase is MergePhase.REVERTING and all(r.is_over for r in self._relayouts):
            return self._refill(now_ns)
        if self.phase is MergePhase.REFILLING and not self._loads:
            return self._reload(now_ns)
        if self.phase is MergePhase.EXCHANGE:
            return self._exchange(now_ns)
        return []

    # --- remap ------------------------------------------------------------------------------------------------

    def _remap(self, now_ns: int) -> list[Action]:
        self.phase = MergePhase.REMAP
        actions: list[Action] = []
        stalled = [
            (state, plan_kv_moves(state.kv_at, self._stage_order))
            for group in self._sources
            for state in group.running.values()
            if state.ending is None and state.num_computed > 0
        ]
        self._landing = [entry for entry in stalled if entry[1]]
        for worker_id in self._stages:
            worker = self._cluster.workers[worker_id]
            self._before[worker_id] = worker.layout
            relayout = Relayout(self._cluster, worker, self._spec(worker_id), shrinks=False)
            self._relayouts.append(relayout)
            actions += relayout.start()
        return actions

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

    def _spec(self, worker_id: WorkerId) -> LayoutSpec:
        layers = self._stages[worker_id]
        retained = tuple(
            RetainedKV(where, tuple(sorted(blocks)))
            for where, blocks in sorted(self._foreign_blocks(worker_id).items())
            if blocks
        )
        return LayoutSpec(self._cluster.shape.shards_for(layers), layers, retained)

    def _revert(self, now_ns: int) -> list[Action]:
        """Some member refused: those that have dropped take everything back; nobody has used the new blocks."""
        self.phase = MergePhase.REVERTING
        self.failure = next(r.failure for r in self._relayouts if r.failure is not None)
        self._landing = []
        applied = [r.worker for r in self._relayouts if r.phase is RelayoutPhase.DONE]
        self._relayouts = []
        for worker in applied:
            # Free and cached blocks of the dropped layers' arenas were unmapped: their content is gone.
            worker.ledger.forget_cached()
        actions: list[Action] = []
        for worker in applied:
            actions += self._take_back(worker)
        return actions or self._reverted(now_ns)

    def _take_back(self, worker: WorkerState) -> list[Action]:
        relayout = Relayout(self._cluster, worker, self._before[worker.worker_id], shrinks=True)
        self._relayouts.append(relayout)
        return relayout.start()

    def _refill(self, now_ns: int) -> list[Action]:
        failed = [r for r in self._relayouts if r.phase is RelayoutPhase.FAILED]
        if failed:
            if now_ns < self._retry_ns:
                return []
            self._retry_ns = now_ns + RETRY_NS
            self._relayouts = [r for r in self._relayouts if r not in failed]
            return [action for r in failed for action in self._take_back(r.worker)]
        self.phase = MergePhase.REFILLING
        actions: list[Action] = []
        for relayout in self._relayouts:
            assert relayout.result is not None
            for shard in sorted(relayout.result.missing_shards):
                actions.append(self._load(relayout.worker.worker_id, shard))
        self._relayouts = []
        return actions or self._reverted(now_ns)

    def _reload(self, now_ns: int) -> list[Action]:
        if not self._unloaded:
            return self._reverted(now_ns)
        if now_ns < self._retry_ns:
            return []
        failed, self._unloaded = self._unloaded, []
        return [self._load(f.worker_id, f.shard) for f in failed]

    def _load(self, worker_id: WorkerId, shard: ShardId) -> LoadShard:
        load = LoadShard(worker_id, self._cluster.new_call(), shard)
        self._loads[load.call_id] = load
        return load

    def _reverted(self, now_ns: int) -> list[Action]:
        self.phase = MergePhase.FAILED
        for group in self._sources:
            group.paused = False
            for ledger in group.ledgers:
                ledger.forget_cached()
            for state in [*group.running.values(), *group.waiting]:
                state.num_sealed = 0
                # Those that ended while the ledgers were locked.
                self._cluster.reap(state)
        return [Record("drop_failed", now_ns, {"reason": self.failure, "workers": list(self._stages)})]

    # --- merge ------------------------------------------------------------------------------------------------

    def _form(self, now_ns: int) -> list[Action]:
        """The members become one group. Requests whose KV is in place go on; others stall; queues are joined."""
        self.phase = MergePhase.EXCHANGE
        results = [r.result for r in self._relayouts if r.result is not None]
        self._relayouts = []
        self._landing = []
        self._num_foreign = None
        group = self._cluster.form_group(self._stage_order)
        self.group = group
        states: list[RequestState] = []
        for source in self._sources:
            states += source.take_queues()
            self._cluster.dissolve(source)
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
        counters = self._cluster.counters
        counters.num_drops += 1
        counters.drop_ns += now_ns - self._started_ns
        counters.remap_ns += max((r.duration_ns for r in results), default=0)
        return [
            Record(
                "drop",
                now_ns,
                {
                    "workers": list(self._stages),
                    "stages": [tuple(layers) for layers in self._stages.values()],
                    "group": group.group_id,
                    "bytes_to_kv": sum(r.bytes_to_kv for r in results),
                    "remap_ms": max((r.duration_ns for r in results), default=0) / 1e6,
                    "map_calls": sum(r.num_map_calls for r in results),
                    "decision_to_serving_ms": (now_ns - self._started_ns) / 1e6,
                    "capacity_blocks": group.capacity_blocks,
                    "stalled": len(self._landing),
                    "waiting": len(group.waiting),
                },
            )
        ]

    # --- exchange ---------------------------------------------------------------------------------------------

    def _exchange(self, now_ns: int) -> list[Action]:
        group = self.group
        assert group is not None
        actions = self._start_transfers(now_ns)
        while self._landing and not self._moves and not self._relayouts:
            # Neither a transfer nor a layout change is under way that could make room: recompute the youngest.
            state, _ = self._landing.pop()
            self._recompute(state)
            actions += self._start_transfers(now_ns)
        self._reserve_landing(group)
        if not self._landing and not self._moves and not self._relayouts and not group.moving and not self._kept():
            self.phase = MergePhase.SETTLED
            actions.append(
                Record(
                    "exchange_done",
                    now_ns,
                    {
                        "group": group.group_id,
                        "bytes": self._num_moved_bytes,
                        "ms": (now_ns - self._started_ns) / 1e6,
                        "capacity_blocks": group.capacity_blocks,
                    },
                )
            )
        return actions

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
            relayout = Relayout(self._cluster, worker, self._spec(worker_id), shrinks=False)
            self._relayouts.append(relayout)
            actions += relayout.start()
        return actions
