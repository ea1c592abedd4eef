"""When workers die: what happens to their groups, to requests, and to the survivors' memory (design 5.1, "Faults").

A dead worker takes with it every group it is a member of, and every move that involves it. The requests are done with
at once: they keep their tokens, lose their KV, and are queued again in the old order (``lose``). Each survivor that a
broken group or move has touched has a way back of its own (``recovery``), independent of the others'.

A worker's *home* is the group that it started in: itself alone, or a static pipeline (a baseline), which is formed
again as soon as all its members are there. A survivor that already has another group beside the broken one (after the
split of a restore, or as the other end of a migration) serves on all the while, and is DONE after FENCE. A survivor
that dies during its recovery is just one more dead worker.

Ownership: a request leaves a *ghost* at a survivor: its block table under another name, so that the request itself can
start again anywhere at once. A ghost's blocks are given back only when no step or transfer of the past can write to
them: the fence has been answered (so every old step has finished) and the transfers into them have ended. A transfer
from the dead worker ends with the fence, one to it at once; neither waits for any other report.

Nothing here chooses groups for requests (``core.cluster``) or starts processes (``live.engine.restart``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from jettison.core.changes import WaitsFor
from jettison.core.discards import Discard
from jettison.core.moving.hosted import Hosted
from jettison.core.moving.migrations import Migrations
from jettison.core.moving.recovery import Recovery, RecoveryPhase
from jettison.core.pending import CallAnswer, Owner, PendingCall, PendingTransfer
from jettison.core.ports import (
    Action,
    CancelTransfer,
    FenceWorker,
    LinkLost,
    Record,
    SendShard,
    TransferEnded,
    WorkerJoined,
)
from jettison.core.preemption import Preempted, Preemption
from jettison.core.requests import Phase, RequestState
from jettison.core.residence import NOWHERE
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState, WorkerState
from jettison.memory.layout import LayoutSpec
from jettison.memory.stages import StagePlan
from jettison.types import FinishReason, TransferId, WorkerId


class AbandonableMove(Owner, Protocol):
    """The interface of a move that a death can end."""

    @property
    def phase(self) -> StrEnum:
        """Its phase, for the event log."""

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """The workers that are its members."""

    @property
    def broken_groups(self) -> Sequence[Group]:
        """The groups that cannot serve on if the move is abandoned now, whichever worker is dead."""

    def abandon(self) -> None:
        """Give the move up; its calls and transfers under way are handed over to recoveries."""


@dataclass(slots=True)
class _Fence:
    """A fence that a survivor was sent after a death and has not answered."""

    survivor: WorkerId
    transfers: list[TransferId] = field(default_factory=list)
    """Transfers from the dead worker to this one: they are over with the answer."""


class Recoveries:
    """All recoveries of a cluster: what follows from deaths and returns of workers."""

    def __init__(
        self, cluster: ClusterState, homes: Sequence[tuple[StagePlan, ...]], hosted: Hosted, migrations: Migrations
    ) -> None:
        self._cluster = cluster
        self.homes = homes
        """Groups that workers started in; a home is formed again when all of its members are free."""
        self._home_layers = {s.worker_id: s.layers for home in homes for s in home}
        self._hosted = hosted
        self._migrations = migrations
        self.by_worker: dict[WorkerId, Recovery] = {}
        self.waits_for: WaitsFor = (self.by_worker,)
        self._fences: dict[int, _Fence] = {}
        self._parted: set[tuple[WorkerId, WorkerId]] = set()
        """Workers that have lost the link to a peer, with the peer, which has not told of it."""
        self._past: dict[TransferId, tuple[WorkerId, WorkerId]] = {}
        """Ends of transfers that dead or abandoned owners have left under way."""
        self._num_ghosts = 0
        self._homes_formed_for: int | None = None
        """``num_dissolved`` when homes were last formed: a home becomes free only after another group has dissolved, or
        a recovery is done. None: some recovery is done."""

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no worker is on its way back."""
        return not self.by_worker

    def busy_workers(self) -> set[WorkerId]:
        """The workers in recovery, which no other move may touch.

        Both ends of a transfer of KV that one of them waits for in FENCE are among them. The sender of a shard need not
        be: should it drop the shard meanwhile, the transfer ends incomplete and another holder is asked.
        """
        return set(self.by_worker)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why recoveries are stuck, by worker in order; empty: none is."""
        return tuple(r.trouble for _, r in sorted(self.by_worker.items()) if r.trouble is not None)

    def _home_layout(self, worker_id: WorkerId) -> LayoutSpec:
        return self._cluster.stage_layout(self._home_layers[worker_id])

    def _form_homes(self) -> None:
        """Form the homes with all members awake and alive, in no other group and no recovery."""
        taken = {w for g in self._cluster.groups.values() for w in g.worker_ids} | self.by_worker.keys()
        taken |= {w.worker_id for w in self._cluster.workers.values() if not w.alive or w.is_asleep}
        free = [home for home in self.homes if not any(s.worker_id in taken for s in home)]
        for home in free:
            self._cluster.form_group(home)
        self._homes_formed_for = self._cluster.num_dissolved

    # --- death ------------------------------------------------------------------------------------------------

    def lose(self, worker_id: WorkerId, moves: Iterable[AbandonableMove], now_ns: int) -> list[Action]:
        """Take a dead worker out, with its groups and ``moves``, those that it is a member of; return the actions.

        Every request that ran with it is unplaced afterwards (the caller finds it a group) or, if workers keep dying of
        it, has ended. The caller forgets the moves, and ends the transfers to the worker (``end_transfers_to``).
        """
        cluster, dead = self._cluster, self._cluster.workers[worker_id]
        broken = {g.group_id: g for g in cluster.groups.values() if worker_id in g.worker_ids}
        book = cluster.book
        calls: list[PendingCall] = []
        transfers: list[PendingTransfer] = []
        phases: list[str] = []
        for move in moves:
            phases.append(str(move.phase))
            broken |= {g.group_id: g for g in move.broken_groups}
            move.abandon()
            calls += book.calls_of(move)
            transfers += book.transfers_of(move)
        abandoned, called_off = self._migrations.abandon(list(broken.values()))
        abandoned |= self._hosted.abandon(list(broken.values()))
        transfers += [book.transfers[i] for i in sorted(abandoned)]
        touched = {pending.call.worker_id for pending in calls}
        touched |= {end for pending in transfers for end in pending.ends}
        touched |= {w for g in broken.values() for w in g.worker_ids}
        self._bury(dead)
        cluster.counters.num_worker_losses += 1
        requests = [s for g in broken.values() for s in self._break_up(g, worker_id)]
        self._hosted.lose_pool(worker_id)
        touched |= {w.worker_id for w in cluster.workers.values() if w.ghosts}
        record = {"worker": worker_id, "groups": sorted(broken), "requests": len(requests), "moves": phases}
        actions: list[Action] = [Record("worker_lost", now_ns, record)]
        actions += called_off + self._fence(dead)
        for survivor in sorted(touched - {worker_id}):
            # A sleeper has nothing to get back: what it sent ends by itself, and nothing lands there.
            if not cluster.workers[survivor].is_asleep:
                self._recovery_of(survivor, now_ns)
        for pending in calls:
            if (recovery := self.by_worker.get(pending.call.worker_id)) is not None:
                recovery.inherit(pending)
        actions += [action for pending in transfers for action in self._inherit(pending)]
        most = cluster.params.faults.max_deaths_per_request
        for state in sorted(requests, key=lambda s: s.order):
            if state.suspicion.is_guilty(most):
                message = f"{most} workers died while they computed this request"
                actions += cluster.end(state, FinishReason.ERROR, now_ns, error=message)
        return actions

    def end_transfers_to(self, worker_id: WorkerId, now_ns: int) -> list[Action]:
        """End the transfers to a dead worker, of which no report will come; return the actions."""
        book = self._cluster.book
        return book.end_lost([i for i, p in book.transfers.items() if p.ends[1] == worker_id], now_ns)

    def part(self, event: LinkLost, now_ns: int) -> list[Action]:
        """Take that one of two workers has lost the link between them; return what follows. With the second one's word
        all transfers between them end that have not: neither knows of them, or has yet to refuse them."""
        book, us, them = self._cluster.book, event.worker_id, event.peer
        peer = self._cluster.workers[them]
        if not peer.alive or event.peer_life < peer.life:
            return []  # its death ends them
        if (them, us) not in self._parted:
            self._parted.add((us, them))
            return []
        self._parted.remove((them, us))
        return book.end_lost([i for i, p in book.transfers.items() if {*p.ends} == {us, them}], now_ns)

    def _bury(self, dead: WorkerState) -> None:
        dead.alive = False
        dead.ledger.clear(0)
        self._cluster.changes.reshaped += 1
        dead.ghosts.clear()
        dead.unfilled.clear()
        dead.num_relayouts_open = 0
        dead.unlock()
        self._cluster.book.forget_calls(dead.worker_id)
        self._parted = {pair for pair in self._parted if dead.worker_id not in pair}
        if (recovery := self.by_worker.pop(dead.worker_id, None)) is not None:
            recovery.abandon()
        self._fences = {call: f for call, f in self._fences.items() if f.survivor != dead.worker_id}
        self._cluster.num_roster_changes += 1

    def retire(self, worker_id: WorkerId) -> list[Action]:
        """Take out a worker that sleeps and holds nothing, whose process is about to end; return what fences it off
        from its peers. It is no loss."""
        worker = self._cluster.workers[worker_id]
        self._bury(worker)
        return self._fence(worker)

    def _break_up(self, group: Group, dead: WorkerId) -> list[RequestState]:
        """Dissolve a group; return its requests, which become unplaced, except those that had ended already. A member's
        death counts against the requests under way with it."""
        if dead in group.worker_ids:
            rows = [row for flight in group.in_flight.values() for row in flight.step.rows]
            near = group.stranded | {row.state.request_id: row.state for row in rows}
            most = self._cluster.params.faults.max_deaths_per_request
            for state in near.values():
                state.suspicion.note_death(alone=len(near) == 1, max_deaths=most)
                elsewhere = self._cluster.groups.get(state.group_id)
                if elsewhere is not group and elsewhere is not None and state.ending is None:  # a guest
                    elsewhere.queues.note_suspect(state)
        for flight in group.in_flight.values():
            group.slices.lose(flight, Discard.LOST)
        group.in_flight.clear()
        group.slices.discard(Discard.LOST)
        states = group.queues.take_all()
        self._cluster.dissolve(group)
        unplaced: list[RequestState] = []
        for state in states:
            self._leave_ghosts(state)
            self._cluster.unplaced[state.request_id] = state
            if not self._cluster.reap(state):
                unplaced.append(state)
        return unplaced

    def _leave_ghosts(self, state: RequestState) -> None:
        """Leave a request's blocks to ghosts, and count its tokens as lost; it starts again from its tokens."""
        cluster = self._cluster
        for worker in cluster.workers.values():
            if worker.alive and worker.ledger.has(state.request_id):
                ghost = f"{state.request_id}\0{self._num_ghosts}"
                self._num_ghosts += 1
                worker.ledger.rename(state.request_id, ghost)
                worker.ghosts[ghost] = set(state.transfers)
        for transfer_id in list(state.transfers):
            cluster.book.disown(cluster.book.transfers[transfer_id])
        cluster.counters.num_recomputed_tokens += state.num_computed
        if state.num_computed:
            state.num_preemptions += 1
            cluster.changes.preempted.append(
                Preempted(state.group_id, Preemption.WORKER_LOST, state.request_id, state.num_computed)
            )
        state.num_computed = state.num_pending = state.num_sealed = 0
        state.residences = NOWHERE
        state.start_again()
        state.phase = Phase.WAITING
        state.group_id = -1

    def _fence(self, dead: WorkerState) -> list[Action]:
        actions: list[Action] = []
        for survivor in self._cluster.workers.values():
            if survivor.alive:
                book = self._cluster.book
                ends = (dead.worker_id, survivor.worker_id)
                fence = _Fence(survivor.worker_id, [i for i, p in book.transfers.items() if p.ends == ends])
                call = FenceWorker(survivor.worker_id, book.next_call_id, dead.worker_id, dead.life)
                self._fences[call.call_id] = fence
                actions.append(book.open_call(call, self, self))
        return actions

    def _recovery_of(self, worker_id: WorkerId, now_ns: int) -> Recovery:
        if worker_id not in self.by_worker:
            worker, home = self._cluster.workers[worker_id], self._home_layout(worker_id)
            self.by_worker[worker_id] = Recovery(self._cluster, worker, home, now_ns)
        return self.by_worker[worker_id]

    def _inherit(self, pending: PendingTransfer) -> list[Action]:
        """Take over a transfer of an abandoned move, to wait for its end; return the action that cancels it."""
        pending.owner = pending.waiter = self
        transfer = pending.transfer
        self._past[transfer.transfer_id] = pending.ends
        return [CancelTransfer(transfer.src, transfer.transfer_id)] if self._cluster.workers[transfer.src].alive else []

    def give_up(self, worker_id: WorkerId, now_ns: int) -> list[Action]:
        """Note that a dead worker will not be started again; return the record."""
        self._cluster.workers[worker_id].is_gone = True
        self._cluster.num_roster_changes += 1
        return [Record("worker_gone", now_ns, {"worker": worker_id})]

    # --- return -----------------------------------------------------------------------------------------------

    def join(self, event: WorkerJoined, now_ns: int) -> list[Action]:
        """Take back a lost worker: the layers of its home are mapped and empty (but for ``event.kept``), and are
        fetched from here on. Returns the record; nothing for one that is alive."""
        worker = self._cluster.workers[event.worker_id]
        if worker.alive:
            return []
        worker.alive, worker.is_gone, worker.life = True, False, event.life
        worker.layout = home = self._home_layout(event.worker_id)
        worker.layout_version = None
        worker.unfilled = set(home.shards - event.kept)
        worker.full_blocks = event.capacity_blocks
        worker.ledger.clear(event.capacity_blocks)
        self._cluster.changes.reshaped += 1
        if not worker.is_asleep:
            self._recovery_of(event.worker_id, now_ns).phase = RecoveryPhase.FILL
        self._cluster.counters.num_worker_joins += worker.is_provisioned
        self._cluster.num_roster_changes += 1
        return [Record("worker_joined", now_ns, {"worker": event.worker_id, "life": event.life})]

    def start_empty(self, worker_ids: Iterable[WorkerId], now_ns: int) -> list[Action]:
        """Begin to fill workers that have loaded nothing at their start; each home is formed when it has all. Returns
        no actions yet."""
        for worker_id in worker_ids:
            for group in list(self._cluster.groups_of[worker_id]):
                self._cluster.dissolve(group)
            worker = self._cluster.workers[worker_id]
            worker.unfilled = set(worker.layout.shards)
            self._recovery_of(worker_id, now_ns)
        self._cluster.num_roster_changes += 1
        return []

    def wake(
        self, worker_id: WorkerId, now_ns: int, *, is_loaded: bool,
        on_end: Callable[[WorkerId, int], dict[str, object]],
    ) -> None:
        """Begin to give a sleeper the layers of its home back. ``is_loaded``: first from its machine or the folder."""
        recovery = self._recovery_of(worker_id, now_ns)
        recovery.phase, recovery.end = RecoveryPhase.MAP, "woken"
        recovery.is_loaded, recovery.on_end = is_loaded, on_end

    def fill_woken(
        self, worker_id: WorkerId, *, is_loaded: bool, on_end: Callable[[WorkerId, int], dict[str, object]]
    ) -> None:
        """Have a worker whose process was asked for, and has just joined, be filled as a sleeper that is woken."""
        recovery = self.by_worker[worker_id]
        recovery.end, recovery.is_loaded, recovery.on_end = "woken", is_loaded, on_end

    def come_home(self, worker_id: WorkerId, now_ns: int) -> None:
        """Begin to bring home a worker that a restore has left over, alive and in no group."""
        self._recovery_of(worker_id, now_ns).end = "came_home"

    # --- events -----------------------------------------------------------------------------------------------

    def on_answer(self, pending: PendingCall, event: CallAnswer, now_ns: int) -> list[Action]:
        """Take a survivor's answer to a fence, with which transfers from the dead worker end; return what follows."""
        fence = self._fences.pop(event.call_id, None)
        return [] if fence is None else self._cluster.book.end_lost(fence.transfers, now_ns)

    def on_ended(self, pending: PendingTransfer, event: TransferEnded, now_ns: int) -> list[Action]:
        """Note that a transfer of the past has ended, for which ghosts and recoveries may have waited. Returns no
        actions."""
        del self._past[event.transfer_id]
        transfer = pending.transfer
        if event.complete and isinstance(transfer, SendShard):
            self._cluster.workers[transfer.dst].unfilled.discard(transfer.shard)
        for worker in self._cluster.workers.values():
            for transfers in worker.ghosts.values():
                transfers.discard(event.transfer_id)
        return []

    def go_on(self, now_ns: int) -> list[Action]:
        """Do nothing, as all recoveries are advanced at each event."""
        return []

    def advance(self, now_ns: int) -> list[Action]:
        """Advance each recovery as far as the state allows, and form homes that have become free; return the
        actions."""
        actions: list[Action] = []
        unfenced = {f.survivor for f in self._fences.values()} if self._fences else set()
        waiting = {end for ends in self._past.values() for end in ends}
        for worker_id, recovery in sorted(self.by_worker.items()):
            actions += recovery.advance(
                now_ns, is_fenced=worker_id not in unfenced, is_waiting=worker_id in waiting
            )
            if recovery.phase is RecoveryPhase.DONE:
                del self.by_worker[worker_id]
                self._homes_formed_for = None
        if self._homes_formed_for != self._cluster.num_dissolved:
            self._form_homes()
        return actions
