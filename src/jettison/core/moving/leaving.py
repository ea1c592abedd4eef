"""One worker on its way to sleep: its requests go elsewhere or end there, and none is cut off.

    LEAVING     its group takes nothing new. Queued requests are dispatched again; running online ones migrate, the
                largest first, to where they fit, as many at once as their links and destinations take; those in
                prefill get to their first token before. Offline ones are checkpointed as far as they were computed at
                the order to sleep, for ``KEEP_S`` at most and while no online request waits anywhere, and give their
                blocks up (KV in host pools goes along). Requests that no other group can take are served here.
                At level 1 the worker writes shards that the machine's host copy lacks.
    DONE        nothing is left: the group may go, and the layout with it (``core.moving.sleeping``)
    STAYS       called off, or no other complete copy of the parameters is left: the group serves on

Until DONE nothing has been given up, so the move can be called off at any moment. Which workers are put to sleep, and
when, is decided elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import Protocol

from jettison.core.advice import WantedMove
from jettison.core.moving.checkpoints import Checkpoints, is_copyable
from jettison.core.moving.migrations import Migrations, may_go
from jettison.core.moving.passage import Passage, RelocationPhase
from jettison.core.moving.relayout import RETRY_NS
from jettison.core.pending import CallAnswer, PendingCall, TransferPurpose
from jettison.core.ports import Action, CallFailed, KeepShard
from jettison.core.preemption import Preemption
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState, WorkerState
from jettison.memory.kvtransfers import MigrationKind
from jettison.types import NANOSECONDS, RequestId, ShardId, WorkerId

KEEP_S = 1.0
"""Longest time that copies of offline work to the host may hold up a worker's sleep: uncopied work would be computed
again on serving devices, while the device that is to sleep has nothing else to do."""

COPY_BLOCKS = 64
"""Blocks on their way to the host at a time, beside a step."""


class LeavingPhase(StrEnum):
    """The phases of a worker on its way to sleep; the module describes them."""

    LEAVING = "leaving"
    DONE = "done"
    STAYS = "stays"


class Surroundings(Protocol):
    """What a leaving asks of the cluster around it (``core.moving.sleeping`` answers)."""

    def open_groups(self) -> list[Group]:
        """The groups that take requests; empty: none."""
        ...

    def kept(self, worker_id: WorkerId) -> set[ShardId]:
        """Shards of the host copy of the worker's machine; the leaving adds to them."""
        ...

    def being_kept(self, worker_id: WorkerId) -> set[ShardId]:
        """Shards that workers on their way to sleep are writing to that copy now."""
        ...

    def why_stay(self, leaving: Leaving) -> str | None:
        """Why the worker can no longer sleep; None: it can."""
        ...

    def may_go(self, leaving: Leaving) -> bool:
        """Whether neither a recovery nor a request needs the worker now."""
        ...

    def left(self, leaving: Leaving, now_ns: int) -> list[Action]:
        """End the leaving; called once, at its end. Returns the actions."""
        ...


class Leaving:
    """One worker on its way to sleep, with the group that it serves by itself. It is a move of
    ``core.moving.moves``."""

    def __init__(
        self, cluster: ClusterState, migrations: Migrations, checkpoints: Checkpoints, worker: WorkerState,
        group: Group, level: int, now_ns: int, around: Surroundings,
    ) -> None:
        self._cluster = cluster
        self._migrations = migrations
        self._checkpoints = checkpoints
        self._around = around
        self._kept = around.kept(worker.worker_id)
        self.on_over = around.left
        self.worker = worker
        self.group = group
        self.level = level
        self.started_ns = now_ns
        self.phase = LeavingPhase.LEAVING
        self.why: str | None = None
        """Why the worker stays."""
        self._num_waited: Counter[RequestId] = Counter()
        """Epochs in which each request that might migrate had to wait."""
        size = cluster.limits.block_size
        self._to_copy = {s.request_id: s.num_computed // size for s in group.queues.running_offline()}
        """Blocks of offline requests that are to be copied to host pools before the requests go."""
        self.keeps: ShardId | None = None
        """The shard that is being written to the host copy; None: none is."""
        self._retry_ns = 0

    # --- common to all moves ----------------------------------------------------------------------------------

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The one worker that leaves."""
        return (self.worker.worker_id,)

    @property
    def broken_groups(self) -> tuple[Group, ...]:
        """Always empty: the worker's group has all layers until the end, so it can serve on."""
        return ()

    @property
    def is_over(self) -> bool:
        """Whether the leaving has ended: the worker may sleep, or stays."""
        return self.phase is not LeavingPhase.LEAVING

    @property
    def waits_for_time(self) -> bool:
        """True until it is over: other groups, whose events it does not see, may get room."""
        return not self.is_over

    def cancel(self, state: RequestState) -> list[Action]:
        """Do nothing for a request that is ending: the owner of its migration stops that."""
        return []

    def abandon(self) -> None:
        """Do nothing when the worker is dead: nothing has been given up."""

    def go_on(self, now_ns: int) -> list[Action]:
        """Do nothing when a call has been answered, as it is advanced at every event."""
        return []

    def call_off(self, why: str) -> None:
        """Have the worker serve on, for this reason; nothing if the leaving is over."""
        if not self.is_over:
            self.phase, self.why = LeavingPhase.STAYS, why

    # --- progress ---------------------------------------------------------------------------------------------

    def advance(self, now_ns: int) -> list[Action]:
        """Go as far as the state allows: write the host copy, send requests away, and end when none is left, or when
        the worker has to stay. Returns the actions."""
        if self.is_over:
            return []
        if (why := self._around.why_stay(self)) is not None:
            self.call_off(why)
            return []
        actions = self._keep()
        if self._is_served(now_ns) and (homes := self._around.open_groups()):
            actions += self._checkpoint(now_ns)
            self._send_away(homes)
            actions += self._migrate(homes, now_ns)
        if self._is_empty() and self._around.may_go(self):
            self.phase = LeavingPhase.DONE
        return actions

    def _is_served(self, now_ns: int) -> bool:
        """Whether some request might go now: other groups are looked at only then."""
        queues = self.group.queues
        if queues.has_waiting or queues.num_running_offline or queues.stored:
            return True
        return now_ns >= self._retry_ns and bool(queues.running)

    def _checkpoint(self, now_ns: int) -> list[Action]:
        """Copy blocks that offline requests had sealed; return the actions. A request with nothing left to copy, or no
        time for it, may go."""
        cluster, checkpoints = self._cluster, self._checkpoints
        is_late = now_ns - self.started_ns >= KEEP_S * NANOSECONDS
        if is_late or not cluster.params.offline.checkpoints or cluster.changes.queued_online:
            self._to_copy.clear()
        if not self._to_copy:
            return []
        running, wanted = self.group.queues.running, list[tuple[RequestId, int]]()
        for request_id, num_blocks in list(self._to_copy.items()):
            state = running.get(request_id)
            if state is None or not is_copyable(state) or checkpoints.num_written_blocks(state) >= num_blocks:
                del self._to_copy[request_id]
            elif (missing := num_blocks - checkpoints.num_copied_blocks(state, self.group)) > 0:
                wanted.append((request_id, missing))
        actions = checkpoints.send(self.group, wanted, lambda group: COPY_BLOCKS)
        if not self.worker.copying:  # none of the remaining blocks can be copied: the pool has no room
            self._to_copy.clear()
        return actions

    def _send_away(self, homes: list[Group]) -> None:
        """Send away requests that hold no blocks, or need not hold them: offline ones are preempted, waiting ones
        dispatched again, stored ones given to other groups. A waiting one that no group can hold goes, too: nothing
        merges with a worker that leaves, and others may merge."""
        queues = self.group.queues
        for state in queues.running_offline():
            if state.num_pending == 0 and state.is_settled and state.request_id not in self._to_copy:
                self.group.preempt(state, Preemption.SLEEP)
        for state in [*queues.waiting, *queues.waiting_offline]:
            fits_elsewhere = any(not home.blocks.is_oversized(state) for home in homes)
            if state.ending is None and (fits_elsewhere or self.group.blocks.is_oversized(state)):
                queues.take_out(state)
                state.group_id = -1
                self._cluster.unplaced[state.request_id] = state
        for state in list(queues.stored.values()):
            fitting = [home for home in homes if not home.blocks.is_oversized(state)]
            if fitting and state.ending is None and not state.transfers:
                queues.take_out(state)
                min(fitting, key=_load).queues.keep_stored(state)
                self._cluster.counters.hosted_carried += 1

    def _migrate(self, homes: list[Group], now_ns: int) -> list[Action]:
        """Begin as many migrations of online requests as links and destinations take, the largest first; return the
        actions. The others are tried again when one has arrived, and in the next epoch."""
        if now_ns < self._retry_ns:
            return []
        running, kind = self.group.queues.running.values(), self._cluster.params.migration.kind
        kinds = tuple(MigrationKind) if kind is None else (kind,)
        ready = [s for s in running if may_go(s) and not s.is_offline and not self._migrations.is_moving(s)]
        wanted = [
            WantedMove(state, home, self._num_waited[state.request_id], kinds)
            for state, home in self._placed(ready, homes)
        ]
        chosen = self._cluster.advice.choose_kinds(wanted)
        actions: list[Action] = []
        for w in wanted:
            if (going := chosen.get(w.state.request_id)) is None:
                self._num_waited[w.state.request_id] += 1
                continue
            actions += self._migrations.start(
                w.state, self.group, w.destination, now_ns, lambda m: self._migrated(m, now_ns), going
            )
        self._retry_ns = now_ns + (round(self._cluster.params.moves.epoch_s * NANOSECONDS) if wanted else RETRY_NS)
        return actions

    def _placed(self, states: list[RequestState], homes: list[Group]) -> Iterator[tuple[RequestState, Group]]:
        """Iterate over these requests and a home for each, the largest first: the group with most room once those
        before it are there. A request without one is left out. A request on its way has its blocks there already, and
        counts as running."""
        coming = Counter(migration.destination.group_id for migration in self._migrations.under_way)
        seats = {h: h.max_running - len(h.queues.running) - coming[h.group_id] for h in homes}
        room = {h: h.blocks.num_free - h.blocks.watermark for h in homes if seats[h] > 0}
        for state in sorted(states, key=lambda s: (-s.num_tokens, s.order)):
            needed = self._cluster.limits.blocks_for(state.num_tokens)
            fitting = [h for h in room if needed <= room[h] and seats[h]]
            if fitting:
                home = max(fitting, key=lambda h: (room[h] - h.queues.queued_blocks(), -h.group_id))
                room[home] -= needed
                seats[home] -= 1
                yield state, home

    def _migrated(self, migration: Passage, began_ns: int) -> None:
        """Have further migrations tried at once after one that arrived, later after one that failed."""
        failed = migration.phase is RelocationPhase.FAILED
        self._retry_ns = began_ns + RETRY_NS if failed else 0

    # --- the host copy ----------------------------------------------------------------------------------------

    @property
    def is_kept(self) -> bool:
        """Whether the host copy has all shards that the level of sleep asks for."""
        return self.level != 1 or self._kept >= self._cluster.shape.all_shards

    def _keep(self) -> list[Action]:
        """Have the worker write the next shard that the host copy lacks and no other worker writes; return the call,
        none where this one writes already or there is no such shard."""
        if self.keeps is not None or self.is_kept:
            return []
        worker_id, book = self.worker.worker_id, self._cluster.book
        missing = self._cluster.shape.all_shards - self._kept - self._around.being_kept(worker_id)
        self.keeps = min(missing, default=None)
        if self.keeps is None:
            return []
        return [book.open_call(KeepShard(worker_id, book.next_call_id, self.keeps), self, self)]

    def on_answer(self, pending: PendingCall, event: CallAnswer, now_ns: int) -> list[Action]:
        """Note that a shard has been written; where it could not be, the worker stays. Returns no actions."""
        assert isinstance(pending.call, KeepShard), pending
        self.keeps = None
        if isinstance(event, CallFailed):
            self.call_off(f"no host copy of {pending.call.shard}: {event.message}")
        else:
            self._kept.add(pending.call.shard)
        return []

    # --- the end ----------------------------------------------------------------------------------------------

    def _is_empty(self) -> bool:
        """Whether nothing needs the worker's layers or arenas any more. Its host pool stays as it is."""
        worker, group, book = self.worker, self.group, self._cluster.book
        if group.queues.all_requests() or group.in_flight or group.paused or not self.is_kept or self.keeps is not None:
            return False
        if worker.num_relayouts_open or worker.ghosts or worker.ledger.num_held:
            return False
        here = (p for p in book.transfers.values() if worker.worker_id in p.ends)
        return all(p.purpose is TransferPurpose.HOST and p.ends[0] == worker.worker_id for p in here)


def _load(group: Group) -> tuple[int, int]:
    """A sort key that is lower for groups with more room."""
    return group.blocks.num_used + group.queues.queued_blocks() - group.blocks.capacity, group.group_id
