"""When workers die: what happens to their groups, to requests, and to the survivors' memory (design 5.1, "Faults").

A dead worker takes with it every group it is a member of, and every move that involves it. For the requests that is
over at once: they keep their tokens, lose their KV, and are queued again in the old order (``lose``). For each
survivor that a broken group or move has touched it is a way back, of its own and independent of the others':

    FENCE   the survivor has been told (FenceWorker); steps, transfers and layout calls of the past come to an end
    MAP     the layers of its home are mapped again                            (tried again until it works)
    FILL    missing shards are fetched (core.fetching); what could not be had is asked for anew     (likewise)
    DONE    the survivor can serve at home

A worker that was started again goes the same way from FILL on: it comes back with its layers mapped and nothing in
them, since the model folder may hold other weights by now.

A worker's *home* is the group that it started in: itself alone, or a static pipeline (a baseline), which is formed
again as soon as all its members are there. A survivor that already has another group beside the broken one (a restore
after its split, the other end of a migration) serves on all the while, and is DONE after FENCE. A survivor that dies
during its recovery is only one dead worker more.

Ownership: what a request leaves behind at a survivor is a *ghost*: its table under another name, so that the request
itself can start again anywhere at once. A ghost's blocks are given back only when nothing of the past can write to
them: the fence has been answered (so every old step has finished) and the transfers into them have ended. A transfer
from the dead worker ends with the fence, one to it at once; no other end is needed to come.

Nothing here chooses groups for requests (``core.cluster``) or starts processes (``live.restart``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from jettison.core.fetching import Fetching
from jettison.core.group import GroupCore
from jettison.core.ports import (
    Action,
    CallFailed,
    CancelMove,
    FenceWorker,
    LayoutApplied,
    LayoutOffered,
    LoadShard,
    MoveEnded,
    Record,
    SendShard,
    ShardLoaded,
    WorkerFenced,
    WorkerJoined,
    transfer_ends,
)
from jettison.core.relayout import RETRY_NS, Leftovers, Relayout
from jettison.core.relief import Relief
from jettison.core.request import NOWHERE, Phase, RequestState
from jettison.core.state import ClusterState, WorkerState
from jettison.memory.layout import LayoutSpec
from jettison.policy.merge import StagePlan
from jettison.types import FinishReason, MoveId, WorkerId


@dataclass(frozen=True, slots=True)
class FaultParams:
    """How much dying is put up with."""

    max_outage_s: float = 60.0
    """How long requests wait while no worker can take them; then they end with an error."""
    max_deaths_per_request: int = 3
    """A request in whose steps this many workers have died ends with an error: it may be what kills them."""


class AbandonableMove(Protocol):
    """What a move must offer so that a death can end it."""

    @property
    def phase(self) -> StrEnum:
        """For the event log."""

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Members."""

    @property
    def broken_groups(self) -> Sequence[GroupCore]:
        """Groups that cannot serve on if the move is abandoned now, whoever is dead."""

    def abandon(self) -> Leftovers:
        """Forget the move; returns what is still under way."""


class RecoveryPhase(StrEnum):
    """See the module's table."""

    FENCE = "fence"
    MAP = "map"
    FILL = "fill"
    DONE = "done"


class Recovery:
    """One survivor on its way back."""

    def __init__(self, cluster: ClusterState, worker: WorkerState, home: LayoutSpec, now_ns: int) -> None:
        self._cluster = cluster
        self.worker = worker
        self._home = home
        self.phase = RecoveryPhase.FENCE
        self.relayouts: list[Relayout] = []
        self.loads: dict[int, LoadShard] = {}
        """Of a move of the past: they must end first (FENCE)."""
        self.moves: set[MoveId] = set()
        """Transfers of the past from or to this worker: likewise."""
        self._fetching = Fetching(cluster, (worker.worker_id,))
        """The present attempt at FILL, or none yet."""
        self._retry_ns = 0
        self._started_ns = now_ns
        self.trouble: str | None = None
        """Why a shard could not be had at the last attempt; it is asked for again all the same."""
        self._told: str | None = None
        """The trouble that has been recorded: not every attempt is news."""

    # --- events -----------------------------------------------------------------------------------------------

    def on_layout(self, event: LayoutOffered | LayoutApplied | CallFailed, now_ns: int) -> list[Action] | None:
        """Take an answer; None if it is not one of this recovery's."""
        if isinstance(event, CallFailed):
            is_of_past = self.loads.pop(event.call_id, None) is not None
            trouble = None if is_of_past else self._fetching.on_failed(event.call_id, event.message)
            if is_of_past or trouble is not None:
                self._retry_ns = now_ns + RETRY_NS
                self.trouble = trouble or self.trouble
                return self._tell_trouble(now_ns)
        for relayout in self.relayouts:
            actions = relayout.on(event)
            if actions is not None:
                if relayout.is_over:
                    self.relayouts.remove(relayout)
                    self._retry_ns = now_ns + RETRY_NS if relayout.failure is not None else 0
                return actions
        return None

    def on_shard_loaded(self, event: ShardLoaded) -> list[Action] | None:
        """Take the end of a load; None if it is not one of this recovery's."""
        load = self.loads.pop(event.call_id, None)
        if load is None:
            return self._fetching.on_loaded(event.call_id)
        self.worker.unfilled.discard(load.shard)
        return []

    def on_fetched(self, event: MoveEnded) -> list[Action] | None:
        """Take the end of a transfer that fills this worker; None if it is not one."""
        return self._fetching.on_move(event)

    # --- progress ---------------------------------------------------------------------------------------------

    def advance(self, now_ns: int, is_fenced: bool) -> list[Action]:
        """Go as far as the state allows."""
        actions: list[Action] = []
        if self.phase is RecoveryPhase.FENCE:
            if not is_fenced:
                return []
            self._release_ghosts()
            if self.relayouts or self.loads or self.moves or self.worker.ghosts:
                return []
            if self._cluster.groups_of[self.worker.worker_id]:
                return [self._done(now_ns)]
            if self.worker.ledger.num_held:
                return []  # of a request that was on its way here, and stays where it is
            self.phase = RecoveryPhase.MAP
        if self.phase is RecoveryPhase.MAP:
            if self.worker.layout != self._home:
                return self._map(now_ns)
            self.phase = RecoveryPhase.FILL
        if self.phase is RecoveryPhase.FILL:
            if self.worker.unfilled:
                return self._fill(now_ns)
            # What is cached was computed for the layers of another stage.
            self.worker.ledger.forget_cached()
            actions.append(self._done(now_ns))
        return actions

    def _release_ghosts(self) -> None:
        for ghost in [ghost for ghost, moves in self.worker.ghosts.items() if not moves]:
            self.worker.ledger.release(ghost)
            del self.worker.ghosts[ghost]

    def _map(self, now_ns: int) -> list[Action]:
        if self.relayouts or now_ns < self._retry_ns:
            return []
        relayout = Relayout(self._cluster, self.worker, self._home, shrinks=True)
        self.relayouts.append(relayout)
        return relayout.start()

    def _fill(self, now_ns: int) -> list[Action]:
        """Fetch what is missing. When nothing is under way and some could not be had, everybody is asked again."""
        if not self._fetching.is_idle or now_ns < self._retry_ns:
            return []
        self._fetching = Fetching(self._cluster, (self.worker.worker_id,))
        return self._fetching.fetch_all(self.worker.worker_id)

    def _tell_trouble(self, now_ns: int) -> list[Action]:
        if self.trouble is None or self.trouble == self._told:
            return []
        self._told = self.trouble
        return [Record("recovery_stuck", now_ns, {"worker": self.worker.worker_id, "reason": self.trouble})]

    def _done(self, now_ns: int) -> Record:
        self.phase = RecoveryPhase.DONE
        self.trouble = None
        worker_id = self.worker.worker_id
        took_ns = now_ns - self._started_ns
        self._cluster.counters.num_recoveries += 1
        self._cluster.counters.recovery_ns += took_ns
        fields: dict[str, object] = {"worker": worker_id, "ms": took_ns / 1e6}
        if self._told is not None:
            fields["was_stuck"] = True
        return Record("recovered", now_ns, fields)


@dataclass(slots=True)
class _Fence:
    """A survivor that has been told of a death and has not answered."""

    survivor: WorkerId
    moves: list[MoveId] = field(default_factory=list)
    """Transfers from the dead worker to this one: with the answer they are over."""


class Recoveries:
    """All that follows from deaths and returns of workers."""

    def __init__(
        self, cluster: ClusterState, params: FaultParams, homes: Sequence[tuple[StagePlan, ...]], relief: Relief
    ) -> None:
        self._cluster = cluster
        self._params = params
        self.homes = homes
        """Groups that workers started in; those whose members are all free are formed again."""
        self._home_layers = {s.worker_id: s.layers for home in homes for s in home}
        self._relief = relief
        self.by_worker: dict[WorkerId, Recovery] = {}
        self._fences: dict[int, _Fence] = {}
        self._num_ghosts = 0
        self._homes_formed_for: int | None = None
        """``num_dissolved`` when homes were last formed: without another dissolved group, a recovery that is done or a
        worker that joins no home becomes free. None: some recovery is done."""

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """No survivor is on its way back."""
        return not self.by_worker

    def busy_workers(self) -> set[WorkerId]:
        """Workers that no other move may touch: those on their way back.

        Both ends of a transfer of KV that one of them waits for in FENCE are among them. Who sends a shard need not
        be: should it drop the shard meanwhile, the transfer ends incomplete and another is asked.
        """
        return set(self.by_worker)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why workers are still on their way back, where it is not only time that they need."""
        return tuple(r.trouble for _, r in sorted(self.by_worker.items()) if r.trouble is not None)

    def _home_layout(self, worker_id: WorkerId) -> LayoutSpec:
        return self._cluster.stage_layout(self._home_layers[worker_id])

    def _form_homes(self) -> None:
        """Form the homes whose members are all there, and in no other group."""
        taken = {w for g in self._cluster.groups.values() for w in g.worker_ids} | self.by_worker.keys()
        taken |= {w.worker_id for w in self._cluster.workers.values() if not w.alive}
        free = [home for home in self.homes if not any(s.worker_id in taken for s in home)]
        for home in free:
            self._cluster.form_group(home)
        self._homes_formed_for = self._cluster.num_dissolved

    # --- death ------------------------------------------------------------------------------------------------

    def lose(self, worker_id: WorkerId, moves: Iterable[AbandonableMove], now_ns: int) -> list[Action]:
        """A worker is dead. ``moves``: those that it is a member of; they are forgotten by the caller.

        Every request that ran with it is homeless afterwards (the caller finds it a group) or, if workers keep
        dying of it, has ended. The caller also ends the transfers to it (``ended_with``).
        """
        cluster, dead = self._cluster, self._cluster.workers[worker_id]
        broken = {g.group_id: g for g in cluster.groups.values() if worker_id in g.worker_ids}
        leftovers: list[Leftovers] = []
        touched: set[WorkerId] = set()
        phases: list[str] = []
        for move in moves:
            phases.append(str(move.phase))
            broken |= {g.group_id: g for g in move.broken_groups}
            left = move.abandon()
            leftovers.append(left)
            touched |= {r.worker.worker_id for r in left.relayouts if not r.is_over}
            touched |= {load.worker_id for load in left.loads.values()}
        abandoned = self._relief.abandon(list(broken.values()))
        leftovers.append(Leftovers([], {}, abandoned.moves))
        touched |= {end for left in leftovers for i in left.moves for end in transfer_ends(cluster.open_moves[i])}
        touched |= {w for g in broken.values() for w in g.worker_ids}
        self._bury(dead)
        requests = [s for g in broken.values() for s in self._break_up(g, worker_id)]
        touched |= {w.worker_id for w in cluster.workers.values() if w.ghosts}
        record = {"worker": worker_id, "groups": sorted(broken), "requests": len(requests), "moves": phases}
        actions: list[Action] = [Record("worker_lost", now_ns, record)]
        actions += abandoned.actions + self._fence(dead)
        for survivor in sorted(touched - {worker_id}):
            self._recovery_of(survivor, now_ns)
        for left in leftovers:
            actions += self._take_over(left)
        for state in sorted(requests, key=lambda s: s.order):
            if state.suspicion.is_guilty(self._params.max_deaths_per_request):
                message = f"{self._params.max_deaths_per_request} workers died while they computed this request"
                actions += cluster.end(state, FinishReason.ERROR, now_ns, error=message)
        return actions

    def ended_with(self, worker_id: WorkerId) -> list[MoveEnded]:
        """Transfers to a dead worker: nobody else will tell their end."""
        to_it = [i for i, m in self._cluster.open_moves.items() if transfer_ends(m)[1] == worker_id]
        return [MoveEnded(i, False, 0, 0) for i in to_it]

    def _bury(self, dead: WorkerState) -> None:
        dead.alive = False
        dead.ledger.clear(0)
        dead.ghosts.clear()
        dead.unfilled.clear()
        dead.num_relayouts_open = 0
        dead.ledger_locked = False
        self.by_worker.pop(dead.worker_id, None)
        self._fences = {call: f for call, f in self._fences.items() if f.survivor != dead.worker_id}
        self._cluster.counters.num_worker_losses += 1

    def _break_up(self, group: GroupCore, dead: WorkerId) -> list[RequestState]:
        """Dissolve a group; its requests become homeless, except those that had ended already."""
        if dead in group.worker_ids:
            rows = [row for flight in group.in_flight.values() for row in flight.step.rows]
            near = group.stranded | {row.state.request_id: row.state for row in rows}
            for state in near.values():
                state.suspicion.note_death(alone=len(near) == 1, max_deaths=self._params.max_deaths_per_request)
        group.in_flight.clear()
        states = group.take_queues()
        self._cluster.dissolve(group)
        homeless: list[RequestState] = []
        for state in states:
            self._leave_ghosts(state)
            if state.ending is not None:
                state.phase = Phase.FINISHED
                del self._cluster.requests[state.request_id]
                continue
            self._cluster.homeless[state.request_id] = state
            homeless.append(state)
        return homeless

    def _leave_ghosts(self, state: RequestState) -> None:
        """Separate a request from its blocks; it starts again from its tokens."""
        cluster = self._cluster
        for worker in cluster.workers.values():
            if worker.alive and worker.ledger.has(state.request_id):
                ghost = f"{state.request_id}\0{self._num_ghosts}"
                self._num_ghosts += 1
                worker.ledger.rename(state.request_id, ghost)
                worker.ghosts[ghost] = set(state.moves)
        for move_id in state.moves:
            del cluster.move_owner[move_id]
        state.moves.clear()
        cluster.counters.num_recomputed_tokens += state.num_computed
        state.num_preemptions += state.num_computed > 0
        state.num_computed = state.num_pending = state.num_sealed = 0
        state.kv_at = NOWHERE
        state.remote = ()
        state.paused = state.recompute = False
        state.phase = Phase.WAITING
        state.group_id = -1

    def _fence(self, dead: WorkerState) -> list[Action]:
        actions: list[Action] = []
        for survivor in self._cluster.workers.values():
            if survivor.alive:
                call_id = self._cluster.new_call()
                ends = (dead.worker_id, survivor.worker_id)
                moves = [i for i, m in self._cluster.open_moves.items() if transfer_ends(m) == ends]
                self._fences[call_id] = _Fence(survivor.worker_id, moves)
                actions.append(FenceWorker(survivor.worker_id, call_id, dead.worker_id, dead.life))
        return actions

    def _recovery_of(self, worker_id: WorkerId, now_ns: int) -> Recovery:
        if worker_id not in self.by_worker:
            worker, home = self._cluster.workers[worker_id], self._home_layout(worker_id)
            self.by_worker[worker_id] = Recovery(self._cluster, worker, home, now_ns)
        return self.by_worker[worker_id]

    def _take_over(self, left: Leftovers) -> list[Action]:
        """Survivors' halves of an abandoned move: called off where that is possible, and waited for."""
        actions: list[Action] = []
        for relayout in left.relayouts:
            recovery = self.by_worker.get(relayout.worker.worker_id)
            if recovery is not None and not relayout.is_over:
                relayout.call_off()
                recovery.relayouts.append(relayout)
        for call_id, load in left.loads.items():
            if load.worker_id in self.by_worker:
                self.by_worker[load.worker_id].loads[call_id] = load
        for move_id in sorted(left.moves):
            src, dst = transfer_ends(self._cluster.open_moves[move_id])
            for end in {src, dst} & self.by_worker.keys():
                self.by_worker[end].moves.add(move_id)
            if self._cluster.workers[src].alive:
                actions.append(CancelMove(src, move_id))
        return actions

    # --- return -----------------------------------------------------------------------------------------------

    def join(self, event: WorkerJoined, now_ns: int) -> list[Action]:
        """A lost worker is back: the layers of its home are mapped and empty, and are fetched from here on."""
        worker = self._cluster.workers[event.worker_id]
        if worker.alive:
            return []
        worker.alive, worker.is_gone, worker.life = True, False, event.life
        worker.layout = home = self._home_layout(event.worker_id)
        worker.unfilled = set(home.shards)
        worker.full_blocks = event.capacity_blocks
        worker.ledger.clear(event.capacity_blocks)
        recovery = self._recovery_of(event.worker_id, now_ns)
        recovery.phase = RecoveryPhase.FILL
        self._cluster.counters.num_worker_joins += 1
        return [Record("worker_joined", now_ns, {"worker": event.worker_id, "life": event.life})]

    # --- events -----------------------------------------------------------------------------------------------

    def on_fenced(self, event: WorkerFenced) -> list[MoveEnded]:
        """A survivor uses nothing of a dead worker any more: the ends of transfers that are over with that."""
        fence = self._fences.pop(event.call_id, None)
        moves = fence.moves if fence is not None else []
        return [MoveEnded(i, False, 0, 0) for i in moves if i in self._cluster.open_moves]

    def on_layout(self, event: LayoutOffered | LayoutApplied | CallFailed, now_ns: int) -> list[Action] | None:
        """Take the answer to a layout or load call; None if no recovery has asked."""
        recovery = self.by_worker.get(event.worker_id)
        return recovery.on_layout(event, now_ns) if recovery is not None else None

    def on_shard_loaded(self, event: ShardLoaded, now_ns: int) -> list[Action] | None:
        """Take the end of a load; None if no recovery has asked."""
        del now_ns
        recovery = self.by_worker.get(event.worker_id)
        return recovery.on_shard_loaded(event) if recovery is not None else None

    def on_move(self, event: MoveEnded, now_ns: int) -> list[Action] | None:
        """Take the end of a transfer; None if no recovery waits for it."""
        del now_ns
        move = self._cluster.open_moves.get(event.move_id) if self.by_worker else None
        if move is None:
            return None
        receiver = self.by_worker.get(transfer_ends(move)[1])
        actions = receiver.on_fetched(event) if receiver is not None else None
        if actions is None and not self._awaits(event.move_id):
            return None
        del self._cluster.open_moves[event.move_id]
        if actions is not None:
            return actions
        if event.complete and isinstance(move, SendShard):
            self._cluster.workers[move.dst].unfilled.discard(move.shard)
        for recovery in self.by_worker.values():
            recovery.moves.discard(event.move_id)
        for worker in self._cluster.workers.values():
            for moves in worker.ghosts.values():
                moves.discard(event.move_id)
        return []

    def _awaits(self, move_id: MoveId) -> bool:
        """Whether a recovery waits for a transfer, or blocks at any worker do: a recovery that waited for it dies with
        its worker, and what others have left of the same request is still to be given back."""
        if any(move_id in recovery.moves for recovery in self.by_worker.values()):
            return True
        return any(move_id in moves for w in self._cluster.workers.values() for moves in w.ghosts.values())

    def advance(self, now_ns: int) -> list[Action]:
        """Go as far as the state allows."""
        actions: list[Action] = []
        unfenced = {f.survivor for f in self._fences.values()} if self._fences else set()

        for worker_id, recovery in sorted(self.by_worker.items()):
            actions += recovery.advance(now_ns, worker_id not in unfenced)
            if recovery.phase is RecoveryPhase.DONE:
                del self.by_worker[worker_id]
                self._homes_formed_for = None
        if self._homes_formed_for != self._cluster.num_dissolved:
            self._form_homes()
        return actions
