"""Restore and split as one phase table (KunServe v3 section 4.4; design 5.1).

    DRAIN_1    the group finishes its steps in flight
    MAP        every member maps all shards again (KV shrinks to what is left; blocks above the line move down)
    PULL       the group serves as a pipeline while missing shards come from peers, behind its activations
    FIT        all shards are here; wait until all requests fit into undropped members
    DRAIN_2    the group finishes its steps in flight
    SPREAD     every member gives KV pages back to all layers
    RETURN     each member is a group again; new requests go there; running ones stay in the pipeline until
               the KV they lack at home has arrived: full blocks while they decode, the last ones in a short stop
    DONE       the pipeline is empty
    TURNING    a burst or a failure: transfers are called off ...
    REDROP     ... and the mapped shards dropped again (not needed once the split has begun; tried until it works)
    TURNED     the pipeline (and, after a split, the groups beside it) can be merged again; should that merge
               fail, another restore goes on from RETURN

Ownership: until its last move has ended, a request runs in the pipeline and its blocks stay at every member.
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
    SendShard,
    ShardLoaded,
)
from jettison.core.relayout import Relayout, RelayoutPhase
from jettison.core.request import RequestState
from jettison.core.state import ClusterState
from jettison.memory.layout import LayoutSpec
from jettison.policy.merge import StagePlan
from jettison.policy.restore import PlacedRequest, place_requests
from jettison.types import MoveId, RequestId, ShardId, WorkerId

MAX_FINAL_BLOCKS = 16
"""Blocks sent while a request stands still; what is more is sent while it decodes (Llumnix, MELL)."""

RETRY_NS = 100_000_000
"""Between attempts of a member to drop again what a turned restore had mapped."""

MAX_RETURNING = 4
"""Requests whose KV travels home at the same time: short stops for few rather than long ones for all."""


class RestorePhase(StrEnum):
    """See the module's table."""

    DRAIN_1 = "drain_1"
    MAP = "map"
    PULL = "pull"
    FIT = "fit"
    DRAIN_2 = "drain_2"
    SPREAD = "spread"
    RETURN = "return"
    DONE = "done"
    TURNING = "turning"
    REDROP = "redrop"
    TURNED = "turned"


class Restoring:
    """One merged group on its way back to instances."""

    def __init__(
        self, cluster: ClusterState, group: GroupCore, headroom_blocks: int, now_ns: int,
        homes: dict[WorkerId, GroupCore] | None = None, *, with_queue: bool = False,
    ) -> None:
        """With ``homes`` the group has been split already, and its requests go on returning to them.

        ``with_queue``: split although requests wait (they wait for compute, and the members have more of it apart).
        """
        self._cluster = cluster
        self.group = group
        self.phase = RestorePhase.RETURN if homes else RestorePhase.DRAIN_1
        self.homes = homes or {}
        """The members' own groups, once split."""
        self.failure: str | None = None
        self._headroom_blocks = headroom_blocks
        self._with_queue = with_queue
        self._started_ns = now_ns
        self._relayouts: list[Relayout] = []
        self._moves: dict[MoveId, SendKV | SendShard] = {}
        self._loads: dict[int, tuple[WorkerId, ShardId]] = {}
        self._home_of: dict[RequestId, WorkerId] = {}
        self._sent_blocks: dict[RequestId, int] = {}
        """Leading blocks already at home, of requests on their way."""
        self._num_bytes = {"pulled": 0, "returned": 0}
        self._retry_ns: int | None = None
        """When members that could not drop again try once more."""
        group.paused = not homes

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Members."""
        return self.group.worker_ids

    @property
    def is_over(self) -> bool:
        """Nothing left to do."""
        return self.phase in (RestorePhase.DONE, RestorePhase.TURNED)

    @property
    def has_split(self) -> bool:
        """Members already serve on their own beside the pipeline."""
        return bool(self.homes)

    # --- events -----------------------------------------------------------------------------------------------

    def on_layout(self, event: LayoutOffered | LayoutApplied | CallFailed, now_ns: int) -> list[Action] | None:
        """Take the answer to one of this restore's calls; None if it is not one."""
        if isinstance(event, CallFailed) and event.call_id in self._loads:
            worker_id, shard = self._loads.pop(event.call_id)
            self.failure = f"worker {worker_id} could not load {shard}: {event.message}"
            return self.turn_round(now_ns, self.failure)
        for relayout in self._relayouts:
            actions = relayout.on(event)
            if actions is not None:
                return actions + self.advance(now_ns)
        return None

    def on_shard_loaded(self, event: ShardLoaded, now_ns: int) -> list[Action] | None:
        """Take the end of a load from disk; None if it is not one of ours."""
        loaded = self._loads.pop(event.call_id, None)
        if loaded is None:
            return None
        worker_id, shard = loaded
        self._cluster.workers[worker_id].unfilled.discard(shard)
        return self.advance(now_ns)

    def on_move(self, event: MoveEnded, now_ns: int) -> list[Action] | None:
        """Take the end of one of this restore's transfers; None if it is not one."""
        move = self._moves.pop(event.move_id, None)
        if move is None:
            return None
        actions: list[Action] = []
        if isinstance(move, SendShard):
            self._num_bytes["pulled"] += event.num_bytes
            self._cluster.counters.pulled_bytes += event.num_bytes
            if event.complete:
                self._cluster.workers[move.dst].unfilled.discard(move.shard)
            elif self.phase is RestorePhase.PULL:
                actions.append(self._load(move.dst, move.shard))
        else:
            state = self._cluster.move_owner.pop(event.move_id)
            state.moves.discard(event.move_id)
            self._num_bytes["returned"] += event.num_bytes
            self._cluster.counters.returned_bytes += event.num_bytes
            if not event.complete:
                self._sent_blocks.pop(state.request_id, None)
                state.paused = False
            if state.ending is not None:
                self._forget(state)
                self._cluster.reap(state)
            elif event.complete and not state.moves:
                self._arrived(state)
        return actions + self.advance(now_ns)

    def cancel(self, state: RequestState) -> list[Action]:
        """The request is ending: stop its transfers."""
        self._forget(state)
        return [CancelMove(self._moves[m].src, m) for m in sorted(state.moves) if m in self._moves]

    def turn_round(self, now_ns: int, reason: str) -> list[Action]:
        """Call the restore off: the pipeline is needed after all (or a member failed)."""
        if self.is_over or self.phase in (RestorePhase.TURNING, RestorePhase.REDROP):
            return []
        self.failure = reason
        self.phase = RestorePhase.TURNING
        actions: list[Action] = [Record("restore_turned", now_ns, {"reason": reason, "group": self.group.group_id})]
        for move in self._moves.values():
            owner = self._cluster.move_owner.get(move.move_id)
            # A request that already stands still for its last blocks is home sooner than back.
            if owner is None or not owner.paused:
                actions.append(CancelMove(move.src, move.move_id))
        return actions + self.advance(now_ns)

    def advance(self, now_ns: int) -> list[Action]:
        """Go as far as the state allows."""
        match self.phase:
            case RestorePhase.DRAIN_1 if not self.group.in_flight:
                return self._map(now_ns)
            case RestorePhase.MAP if all(r.is_over for r in self._relayouts):
                return self._pull(now_ns)
            case RestorePhase.PULL if not self._moves and not self._loads:
                self.phase = RestorePhase.FIT
                return self.advance(now_ns)
            case RestorePhase.FIT if self._placement() is not None:
                self.group.paused = True
                self.phase = RestorePhase.DRAIN_2
                return self.advance(now_ns)
            case RestorePhase.DRAIN_2 if not self.group.in_flight:
                return self._spread(now_ns)
            case RestorePhase.SPREAD if all(r.is_over for r in self._relayouts):
                return self._split(now_ns)
            case RestorePhase.RETURN:
                return self._return_home(now_ns)
            case RestorePhase.TURNING if not (self._moves or self._loads) and all(r.is_over for r in self._relayouts):
                return self._turned(now_ns)
            case RestorePhase.REDROP if all(r.is_over for r in self._relayouts):
                return self._redropped(now_ns)
        return []

    # --- map and pull -----------------------------------------------------------------------------------------

    def _change_layouts(self, specs: dict[WorkerId, LayoutSpec], *, shrinks: bool) -> list[Action]:
        actions: list[Action] = []
        self._relayouts = []
        for worker_id, spec in specs.items():
            relayout = Relayout(self._cluster, self._cluster.workers[worker_id], spec, shrinks=shrinks)
            self._relayouts.append(relayout)
            actions += relayout.start()
        return actions

    def _relayout_failure(self) -> str | None:
        return next((r.failure for r in self._relayouts if r.phase is RelayoutPhase.FAILED), None)

    def _map(self, now_ns: int) -> list[Action]:
        self.phase = RestorePhase.MAP
        specs = {s.worker_id: LayoutSpec(self._cluster.shape.all_shards, s.layers) for s in self.group.stages}
        return self._change_layouts(specs, shrinks=True)

    def _pull(self, now_ns: int) -> list[Action]:
        self._reap_ended()
        self.group.paused = False
        failure = self._relayout_failure()
        if failure is not None:
            return self.turn_round(now_ns, failure)
        self.phase = RestorePhase.PULL
        actions: list[Action] = []
        num_intact = 0
        for relayout in self._relayouts:
            assert relayout.result is not None
            worker_id = relayout.worker.worker_id
            num_intact += len(relayout.result.intact_shards)
            # Also what an earlier restore mapped, did not fetch, and then could not drop again.
            for shard in sorted(relayout.worker.unfilled):
                source = self._holder(shard, worker_id)
                if source is None:
                    actions.append(self._load(worker_id, shard))
                    continue
                move = SendShard(self._cluster.new_move(), source, worker_id, shard)
                self._moves[move.move_id] = move
                actions.append(move)
        actions.append(
            Record(
                "restore_begin",
                now_ns,
                {
                    "group": self.group.group_id,
                    "workers": list(self.worker_ids),
                    "intact_shards": num_intact,
                    "pulled_shards": len(self._moves),
                    "capacity_blocks": self.group.capacity_blocks,
                },
            )
        )
        return actions + self.advance(now_ns)

    def _holder(self, shard: ShardId, wanted_by: WorkerId) -> WorkerId | None:
        """A member whose stage runs this shard."""
        for stage in self.group.stages:
            if stage.worker_id != wanted_by and shard in self._cluster.shape.shards_for(stage.layers):
                return stage.worker_id
        return None

    def _load(self, worker_id: WorkerId, shard: ShardId) -> LoadShard:
        call_id = self._cluster.new_call()
        self._loads[call_id] = (worker_id, shard)
        return LoadShard(worker_id, call_id, shard)

    # --- fit and split ----------------------------------------------------------------------------------------

    def _placement(self) -> dict[RequestId, WorkerId] | None:
        """A home for each request inside undropped members; None while they do not fit."""
        if self.group.waiting and not self._with_queue:
            return None
        workers = [self._cluster.workers[w] for w in self.worker_ids]
        largest = max((self.group.blocks_for(len(s.tokens)) for s in self.group.waiting), default=0)
        if largest > min(w.full_blocks for w in workers) or self.group.moving:
            return None
        if any(w.ledger.num_held > w.full_blocks - self._headroom_blocks for w in workers):
            return None
        ledger = workers[0].ledger
        requests = [PlacedRequest(r, ledger.num_blocks_of(r)) for r in self.group.running]
        return place_requests(requests, {w.worker_id: w.full_blocks for w in workers}, self._headroom_blocks)

    def _spread(self, now_ns: int) -> list[Action]:
        self.phase = RestorePhase.SPREAD
        for worker_id in self.worker_ids:
            # The new layers' arenas start empty, so no cached block is complete any more.
            self._cluster.workers[worker_id].ledger.forget_cached()
        for state in self.group.running.values():
            state.num_sealed = 0
        self.group.seals = False
        return self._change_layouts(dict.fromkeys(self.worker_ids, self._cluster.full_layout()), shrinks=True)

    def _split(self, now_ns: int) -> list[Action]:
        self._reap_ended()
        self.group.paused = False
        failure = self._relayout_failure()
        if failure is not None:
            return self.turn_round(now_ns, failure)
        self.phase = RestorePhase.RETURN
        everything = self._cluster.shape.all_layers
        for worker_id in self.worker_ids:
            self.homes[worker_id] = self._cluster.form_group((StagePlan(worker_id, everything),))
        record = Record(
            "split",
            now_ns,
            {
                "group": self.group.group_id,
                "homes": {w: g.group_id for w, g in self.homes.items()},
                "returning": len(self.group.running),
                "ms": (now_ns - self._started_ns) / 1e6,
            },
        )
        return [record, *self._return_home(now_ns)]

    def _reap_ended(self) -> None:
        for state in [*self.group.running.values(), *self.group.moving.values(), *self.group.waiting]:
            self._cluster.reap(state)

    # --- return -----------------------------------------------------------------------------------------------

    def _home(self, state: RequestState) -> WorkerId:
        """The member where a request will live: the one with more room, counting those already on their way."""
        home = self._home_of.get(state.request_id)
        if home is None:
            assigned: dict[WorkerId, int] = dict.fromkeys(self.worker_ids, 0)
            for request_id, worker_id in self._home_of.items():
                ledger = self._cluster.workers[worker_id].ledger
                assigned[worker_id] += ledger.num_blocks_of(request_id) if ledger.has(request_id) else 0
            home = min(self.worker_ids, key=lambda w: (assigned[w] + self.homes[w].used_blocks_of_running(), w))
            self._home_of[state.request_id] = home
        return home

    def _return_home(self, now_ns: int) -> list[Action]:
        for state in list(self.group.waiting):
            # Preempted in the pipeline: it starts again at a member.
            self.group.take_out(state)
            self._forget(state)
            home = min(self.homes.values(), key=lambda g: (g.used_blocks + g.queued_blocks(), g.group_id))
            home.enqueue(state)
        actions: list[Action] = []
        for state in list(self.group.running.values()):
            if state.ending is not None or state.moves:
                continue
            if state.request_id not in self._sent_blocks and len(self._sent_blocks) >= MAX_RETURNING:
                break
            actions += self._next_round(state)
        if not self.group.running and not self.group.in_flight:
            self._cluster.dissolve(self.group)
            self.phase = RestorePhase.DONE
            counters = self._cluster.counters
            counters.num_restores += 1
            counters.restore_ns += now_ns - self._started_ns
            actions.append(
                Record(
                    "restore_done",
                    now_ns,
                    {
                        "workers": list(self.worker_ids),
                        "pulled_bytes": self._num_bytes["pulled"],
                        "returned_bytes": self._num_bytes["returned"],
                        "ms": (now_ns - self._started_ns) / 1e6,
                    },
                )
            )
        return actions

    def _next_round(self, state: RequestState) -> list[Action]:
        """Send full blocks while the request decodes; stop it only for what is then left."""
        size = self._cluster.limits.block_size
        sent = self._sent_blocks.setdefault(state.request_id, 0)
        num_full = state.num_computed // size
        if not state.paused and num_full - sent > MAX_FINAL_BLOCKS:
            return self._send_blocks(state, sent, num_full)
        state.paused = True
        if state.num_pending:
            return []
        actions = self._send_blocks(state, sent, -(-state.num_computed // size))
        if not state.moves:
            self._arrived(state)
        return actions

    def _send_blocks(self, state: RequestState, first: int, end: int) -> list[Action]:
        home = self._home(state)
        here = self._cluster.workers[home].ledger.table(state.request_id).ids
        actions: list[Action] = []
        for stage in self.group.stages:
            if stage.worker_id == home or end <= first:
                continue
            there = self._cluster.workers[stage.worker_id].ledger.table(state.request_id).ids
            move = self._cluster.send_kv(
                state, stage.worker_id, home, stage.layers, there[first:end], here[first:end]
            )
            self._moves[move.move_id] = move
            actions.append(move)
        self._sent_blocks[state.request_id] = end
        return actions

    def _arrived(self, state: RequestState) -> None:
        """All moves of a round have ended; if it was the last one, the request leaves the pipeline."""
        if not state.paused:
            return
        home = self._home(state)
        self.group.take_out(state)
        for stage in self.group.stages:
            if stage.worker_id != home:
                self._cluster.workers[stage.worker_id].ledger.release(state.request_id)
        self._forget(state)
        state.paused = False
        self.homes[home].resume(state)

    def _forget(self, state: RequestState) -> None:
        self._home_of.pop(state.request_id, None)
        self._sent_blocks.pop(state.request_id, None)

    # --- turning round ----------------------------------------------------------------------------------------

    def _turned(self, now_ns: int) -> list[Action]:
        self._reap_ended()
        for state in self.group.running.values():
            state.paused = False
        if self.homes:
            return self._over(now_ns)
        if any(w.layout.kv_layers != s.layers for s in self.group.stages for w in [self._cluster.workers[s.worker_id]]):
            # Stopped while pages were given to all layers: that layout holds no KV outside the stages yet.
            self.group.paused = True
        self.phase = RestorePhase.REDROP
        specs = {s.worker_id: self._cluster.stage_layout(s.layers) for s in self.group.stages}
        return self._change_layouts(specs, shrinks=False)

    def _redropped(self, now_ns: int) -> list[Action]:
        self.group.paused = False
        self.group.seals = self._cluster.limits.enable_prefix_caching
        failed = [r for r in self._relayouts if r.phase is RelayoutPhase.FAILED]
        if not failed:
            return self._over(now_ns)
        # The group serves on with the room that the member has; but some request may need more than that.
        if self._retry_ns is None:
            self._retry_ns = now_ns + RETRY_NS
        if now_ns < self._retry_ns:
            return []
        self._retry_ns = None
        return self._change_layouts({r.worker.worker_id: r.spec for r in failed}, shrinks=False)

    def _over(self, now_ns: int) -> list[Action]:
        self.phase = RestorePhase.TURNED
        self.group.admission_cap_blocks = None
        self._cluster.counters.num_turned_restores += 1
        return []
