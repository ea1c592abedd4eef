"""Migrations: running requests on their way between groups that share no worker (``core.moving.relocate``).

Each is begun where the destination has room for all of the request at once, and called off when layouts are to change
or a worker dies. Which request goes where is decided elsewhere (``core.ladder.migrate``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from jettison.core.moving.relocate import Relocation, RelocationPhase
from jettison.core.pending import PendingTransfer, Purpose
from jettison.core.ports import Action, CancelTransfer, Record, TransferEnded
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.types import RequestId, TransferId, WorkerId

MAX_ROUNDS = 8
"""Rounds with decoding before a migration is given up: the request grows as fast as it is copied."""


class Migrations:
    """An instance takes part in one migration at a time."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.under_way: list[Relocation] = []
        self._left: dict[TransferId, tuple[WorkerId, RequestId]] = {}
        """Transfers of migrations that gave way -> the destination's table that they still write to, under a name of
        its own."""
        self._num_left = 0

    @property
    def is_idle(self) -> bool:
        """No request migrates."""
        return not self.under_way

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Workers of groups that take part in a migration."""
        return tuple(w for migration in self.under_way for w in migration.worker_ids)

    # --- progress ---------------------------------------------------------------------------------------------

    def start(
        self, state: RequestState, source: Group, destination: Group, now_ns: int,
        on_over: Callable[[Relocation], None] = lambda migration: None,
    ) -> list[Action]:
        """Begin to move a running request; nothing where the destination has no room for it.

        ``on_over`` is told when it has ended or failed; not of one that gave way.
        """
        assert not set(source.worker_ids) & set(destination.worker_ids), "groups that share a worker"
        needed = source.limits.blocks_for(state.num_tokens)
        if needed + destination.blocks.watermark > destination.blocks.num_free:
            return []
        migration = Relocation(
            self._cluster, state, source, destination, Purpose.MIGRATION, now_ns,
            lambda migration: self._over(migration, on_over), max_rounds=MAX_ROUNDS,
        )
        self.under_way.append(migration)
        migration.reserve(needed)
        return migration.advance(now_ns)

    def _over(self, migration: Relocation, on_over: Callable[[Relocation], None]) -> list[Action]:
        self.under_way.remove(migration)
        on_over(migration)
        counters = self._cluster.counters
        if migration.phase is RelocationPhase.FAILED:
            counters.num_failed_migrations += 1
            return []
        counters.num_migrations += 1
        counters.migrated_bytes += migration.num_bytes
        assert migration.ended_ns is not None and migration.stopped_ns is not None
        done = {
            "request": migration.state.request_id,
            "source": migration.source.group_id,
            "destination": migration.destination.group_id,
            "blocks": migration.num_sent_blocks,
            "rounds": migration.num_rounds,
            "bytes": migration.num_bytes,
            "stop_ms": (migration.ended_ns - migration.stopped_ns) / 1e6,
            "ms": (migration.ended_ns - migration.started_ns) / 1e6,
        }
        return [Record("migrated", migration.ended_ns, done)]

    def advance(self, now_ns: int) -> list[Action]:
        """Let those whose groups were touched go on."""
        if not self.under_way:
            return []
        changed = {group.group_id for group in self._cluster.changed_groups()}
        actions: list[Action] = []
        for migration in list(self.under_way):
            if migration.source.group_id in changed or migration.destination.group_id in changed:
                actions += migration.advance(now_ns)
        return actions

    # --- what others do ---------------------------------------------------------------------------------------

    def cancel(self, state: RequestState) -> list[Action]:
        """The request is ending."""
        return [action for m in list(self.under_way) if m.state is state for action in m.cancel()]

    def give_way(self, worker_ids: Collection[WorkerId]) -> list[Action]:
        """Layouts of these workers are about to change: requests on their way to or from there stay at their sources.

        What has been reserved at a destination is left under another name until no transfer can write to it any more;
        so the request itself is free at once, wherever its source goes.
        """
        actions: list[Action] = []
        for migration in [m for m in self.under_way if any(w in worker_ids for w in m.worker_ids)]:
            self.under_way.remove(migration)
            self._cluster.counters.migrations_given_way += 1
            actions += self._leave(migration)
        return actions

    def _leave(self, migration: Relocation) -> list[Action]:
        book, state = self._cluster.book, migration.state
        transfers = book.transfers_of(migration)
        migration.let_go()
        for worker_id in migration.destination.worker_ids:
            worker = self._cluster.workers[worker_id]
            if not worker.ledger.has(state.request_id):
                continue
            writing = {p.transfer.transfer_id for p in transfers if p.ends[1] == worker_id}
            if not writing:
                worker.ledger.release(state.request_id)
                continue
            name = f"{state.request_id}\0left{self._num_left}"
            self._num_left += 1
            worker.ledger.rename(state.request_id, name)
            worker.ghosts[name] = writing
            self._left |= dict.fromkeys(writing, (worker_id, name))
        for pending in transfers:
            pending.owner = pending.waiter = self
            book.disown(pending)
        if state.ending is not None:
            self._cluster.reap(state)  # it waited for these transfers, and for nothing else
        return [CancelTransfer(p.transfer.src, p.transfer.transfer_id) for p in transfers]

    def on_ended(self, pending: PendingTransfer, event: TransferEnded, now_ns: int) -> list[Action]:
        """A transfer of a migration that gave way has ended: what it could write to is free."""
        left = self._left.pop(event.transfer_id, None)
        if left is not None:
            worker_id, name = left
            worker = self._cluster.workers[worker_id]
            writing = worker.ghosts.get(name)  # a death of the worker has freed everything
            if writing is not None:
                writing.discard(event.transfer_id)
                if not writing:
                    worker.ledger.release(name)
                    del worker.ghosts[name]
        return []

    def go_on(self, now_ns: int) -> list[Action]:
        """Nothing waits for what was left behind."""
        return []

    def abandon(self, broken: Collection[Group]) -> tuple[set[TransferId], list[Action]]:
        """These groups are about to be dissolved because a worker is dead. Requests whose source is among them start
        again; those whose destination is stay where they are. Returns the transfers that have lost their owner."""
        moves: set[TransferId] = set()
        actions: list[Action] = []
        for migration in list(self.under_way):
            if migration.source in broken:
                moves |= migration.state.transfers
            elif migration.destination in broken:
                actions += migration.cancel()
        self.under_way = [m for m in self.under_way if m.source not in broken]
        return moves, actions

    def check(self) -> None:
        """No instance takes part in two migrations. Raises AssertionError."""
        workers = self.worker_ids
        assert len(set(workers)) == len(workers), "an instance takes part in two migrations"
