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
from jettison.types import LayerRange, MoveId, ShardId, WorkerId


RETRY_NS = 100_000_000
"""Between attempts to map back what a failed merge had dropped."""


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
        self._landed: dict[tuple[WorkerId, WorkerId, int], int] = {}
        """(source, destination, block there) -> block here, for sealed blocks: shared prefixes move once."""
        self._waits_for: dict[str, set[MoveId]] = {}
        """Request -> moves of other requests that carry its shared prefix."""
        self._num_moved_bytes = 0
        self._loads: dict[int, LoadShard] = {}
        self._retry_ns = 0
        for group in sources:
            group.paused = True

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Members of the merge."""
        return tuple(self._stages)

    @property
    def is_over(self) -> bool:
        """Nothing left to do."""
        return self.phase in (MergePhase.SETTLED, MergePhase.FAILED)

    # --- events -----------------------------------------------------------------------------------------------

    def on_layout(self, event: LayoutOffered | LayoutApplied | CallFailed, now_ns: int) -> list[Action] | None:
        """Take the answer to one of this merge's layout calls; None if it is not one."""
        if isinstance(event, CallFailed) and event.call_id in self._loads:
            failed = self._loads.pop(event.call_id)
            return [self._load(failed.worker_id, failed.shard)]
        for relayout in self._relayouts:
            actions = relayout.on(event)
            if actions is not None:
                if relayout.is_over and self.phase in (MergePhase.EXCHANGE, MergePhase.SETTLED):
                    self._relayouts.remove(relayout)
                return actions + self.advance(now_ns)
        return None

    def on_shard_loaded(self, event: ShardLoaded, now_ns: int) -> list[Action] | None:
        """Take the end of a load from the model folder; None if it is not one of this merge's."""
        if event.call_id not in self._loads:
            return None
        del self._loads[event.call_id]
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
        if state.ending is not None:
            self._cluster.reap(state)
        elif not event.complete:
            self._recompute(state)
        if not event.complete:
            # Whoever counted on the prefix that this transfer carried has to start again, too.
            for request_id in dependents:
                self._recompute(self._cluster.requests[request_id])
        for request_id in (state.request_id, *dependents):
            self._try_resume(request_id)
        return self.advance(now_ns)

    def cancel(self, state: RequestState) -> list[Action]:
        """The request is ending: stop its transfers unless another request needs the prefix they carry."""
        self._landing = [entry for entry in self._landing if entry[0] is not state]
        self._waits_for.pop(state.request_id, None)
        needed = set().union(*self._waits_for.values())
        cancelled = [self._moves[m] for m in sorted(state.moves) if m in self._moves and m not in needed]
        for move in cancelled:
            # Nobody may count on blocks of which perhaps nothing has arrived.
            for block in move.src_blocks:
                self._landed.pop((move.src, move.dst, block), None)
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
            return self._reverted(now_ns)
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
            num_blocks = -(-state.num_computed // ledger.block_size)
            for move in moves:
                if move.src == worker_id:
                    ids = ledger.table(state.request_id).ids[:num_blocks]
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
            for state in group.running.values():
                state.num_sealed = 0
        return [Record("drop_failed", now_ns, {"reason": self.failure, "workers": list(self._stages)})]

    # --- merge ------------------------------------------------------------------------------------------------

    def _form(self, now_ns: int) -> list[Action]:
        """The members become one group. Requests whose KV is in place go on; others stall; queues are joined."""
        self.phase = MergePhase.EXCHANGE
        results = [r.result for r in self._relayouts if r.result is not None]
        self._relayouts = []
        self._landing = []
        group = self._cluster.form_group(self._stage_order)
        self.group = group
        states: list[RequestState] = []
        for source in self._sources:
            states += source.take_queues()
            group.counters.num_freed_blocks += source.counters.num_freed_blocks
            self._cluster.dissolve(source)
        for state in sorted(states, key=lambda s: s.order):
            if state.phase is Phase.WAITING:
                group.enqueue(state)
                continue
            state.paused = False
            moves = plan_kv_moves(state.kv_at, self._stage_order)
            if not moves:
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
        actions: list[Action] = []
        blocked = False
        for entry in list(self._landing):
            started = self._start_transfer(*entry)
            if started is None:
                blocked = True
                break
            self._landing.remove(entry)
            actions += started
            self._try_resume(entry[0].request_id)
        self._reserve_landing(group)
        actions += self._give_back_foreign(blocked or bool(group.waiting))
        if self._landing and not self._moves and not self._relayouts and blocked:
            # Neither a transfer nor a layout change is under way that could make room: recompute the youngest.
            state, _ = self._landing.pop()
            self._recompute(state)
            return actions + self._exchange(now_ns)
        if not self._landing and not self._moves and not self._relayouts and not group.moving:
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

    def _start_transfer(self, state: RequestState, moves: tuple[KVMovePlan, ...]) -> list[Action] | None:
        """Reserve landing blocks and start all transfers of a request; None if a destination lacks room."""
        workers = self._cluster.workers
        group = self.group
        assert group is not None
        table_len = max(workers[m.src].ledger.num_blocks_of(state.request_id) for m in moves)
        num_sent = group.blocks_for(state.num_computed)
        shared = {dst: self._shared_prefix(state, moves, dst) for dst in sorted({m.dst for m in moves})}
        new_here = [dst for dst in shared if not workers[dst].ledger.has(state.request_id)]
        if any(not workers[dst].ledger.can_allocate(table_len - len(shared[dst])) for dst in new_here):
            return None
        for dst in new_here:
            ledger = workers[dst].ledger
            ledger.adopt_prefix(state.request_id, shared[dst])
            ledger.allocate(state.request_id, table_len - len(shared[dst]))
        actions: list[Action] = []
        for move in moves:
            skip = len(shared[move.dst]) if move.dst in new_here else 0
            src = workers[move.src].ledger.table(state.request_id).ids
            dst_ids = workers[move.dst].ledger.table(state.request_id).ids
            for there, here in zip(src[: state.num_sealed], dst_ids, strict=False):
                self._landed.setdefault((move.src, move.dst, there), here)
            action = self._cluster.send_kv(
                state, move.src, move.dst, move.layers, src[skip:num_sent], dst_ids[skip:num_sent]
            )
            self._moves[action.move_id] = action
            if skip:
                carriers = {
                    m for m, sent in self._moves.items()
                    if sent.src == move.src and sent.dst == move.dst and set(sent.src_blocks) & set(src[:skip])
                }
                self._waits_for.setdefault(state.request_id, set()).update(carriers)
            actions.append(action)
        return actions

    def _shared_prefix(self, state: RequestState, moves: tuple[KVMovePlan, ...], dst: WorkerId) -> list[int]:
        """Blocks at ``dst`` that already hold (or will hold) this request's leading blocks."""
        sources = {m.src for m in moves if m.dst == dst}
        if len(sources) != 1:
            return []
        (src,) = sources
        found: list[int] = []
        for block in self._cluster.workers[src].ledger.table(state.request_id).ids[: state.num_sealed]:
            here = self._landed.get((src, dst, block))
            if here is None or not self._cluster.workers[dst].ledger.is_held(here):
                break
            found.append(here)
        return found

    def _try_resume(self, request_id: str) -> None:
        """Back to running once nothing of the request is on its way."""
        group = self.group
        state = self._cluster.requests.get(request_id)
        if group is None or state is None or state.phase is not Phase.MOVING or state.ending is not None:
            return
        if state.moves or self._waits_for.get(request_id) or any(s is state for s, _ in self._landing):
            return
        self._waits_for.pop(request_id, None)
        group.resume(state)
        if group.seals:
            for ledger in group.ledgers:
                for index in range(state.num_sealed):
                    ledger.seal(request_id, index, state.hashes[index])

    def _recompute(self, state: RequestState) -> None:
        """Give up on moving this request's KV: it starts again from its tokens."""
        if state.moves:
            return
        group = self.group
        assert group is not None
        self._landing = [entry for entry in self._landing if entry[0] is not state]
        group.preempt(state)

    def _reserve_landing(self, group: GroupCore) -> None:
        """Tell admission how many blocks the transfers that have not started will take."""
        blocks: dict[WorkerId, int] = {}
        for state, moves in self._landing:
            length = max(self._cluster.workers[m.src].ledger.num_blocks_of(state.request_id) for m in moves)
            for dst in {m.dst for m in moves}:
                blocks[dst] = blocks.get(dst, 0) + length
        group.landing.blocks = blocks

    def _give_back_foreign(self, pressed: bool) -> list[Action]:
        """Free pages of foreign layers: all at once when a member has sent everything, earlier under pressure."""
        actions: list[Action] = []
        for worker_id in self._stages:
            worker = self._cluster.workers[worker_id]
            kept = sum(len(r.block_ids) for r in worker.layout.retained)
            if not kept or worker.num_relayouts_open:
                continue
            needed = sum(map(len, self._foreign_blocks(worker_id).values()))
            if needed and not (pressed and 4 * needed <= 3 * kept):
                continue
            relayout = Relayout(self._cluster, worker, self._spec(worker_id), shrinks=False)
            self._relayouts.append(relayout)
            actions += relayout.start()
        return actions
