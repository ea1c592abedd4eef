"""Migrations: running requests on their way between groups that share no worker, as KV (``core.moving.relocate``) or
as tokens (``core.moving.astokens``).

Each begins only where the destination has room for all of the request at once, and is called off when layouts are to
change or a worker dies. A group may take part in several, a request in one. The rungs (``core.ladder``) decide which
request goes where, how, and how many at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from jettison.core.advice import Going
from jettison.core.changes import WaitsFor
from jettison.core.moving.astokens import TokenRelocation
from jettison.core.moving.passage import Passage, RelocationPhase, Trip
from jettison.core.moving.relocate import Relocation
from jettison.core.pending import PendingTransfer, TransferPurpose
from jettison.core.ports import Action, CancelTransfer, Record, TransferEnded
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.memory.kvtransfers import MigrationKind
from jettison.types import RequestId, TransferId, WorkerId

MAX_ROUNDS = 8
"""Rounds with decoding after which a migration is given up: the request grows as fast as the destination catches up."""


def may_go(state: RequestState) -> bool:
    """Whether a request may migrate now: it decodes, all of its KV is where it runs, and no move touches it. In prefill
    its KV would be copied while it is written."""
    return (
        state.phase is Phase.RUNNING and state.num_output > 0 and state.num_tokens - state.num_computed <= 1
        and state.is_settled
    )


AS_KV = Going(MigrationKind.KV, None)
"""As fast as the link carries it."""


class Migrations:
    """All migrations under way: running requests on their way between groups that share no worker."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.under_way: list[Passage] = []
        self.waits_for: WaitsFor = (self.under_way,)
        self.left_late: list[TokenRelocation] = []
        """To be cancelled at the begin of the next event (``after_steps``)."""
        self._left: dict[TransferId, tuple[WorkerId, RequestId]] = {}
        """Transfers of migrations that gave way -> the destination's table that they still write to, under a name of
        its own."""
        self._num_left = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request migrates."""
        return not self.under_way

    @property
    def may_change(self) -> bool:
        """Whether the kind or pace of some migration under way may still be changed."""
        return any(isinstance(m, TokenRelocation) and m.may_change for m in self.under_way)

    def is_moving(self, state: RequestState) -> bool:
        """Whether the request is migrating."""
        return any(migration.state is state for migration in self.under_way)

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """The workers of both groups of every migration under way; a worker may be named twice."""
        return tuple(w for migration in self.under_way for w in migration.worker_ids)

    # --- progress ---------------------------------------------------------------------------------------------

    def start(
        self, state: RequestState, source: Group, destination: Group, now_ns: int,
        on_over: Callable[[Passage], None] = lambda migration: None, going: Going = AS_KV,
    ) -> list[Action]:
        """Begin to move a running request that no migration moves (``may_go`` says which can go in either kind).
        Returns the actions; nothing begins where the destination has no room for it, or where it cannot go as tokens:
        it does not decode (yet), attends to remote KV, is to be recomputed, or is on trial, that is, runs alone because
        it may be what kills workers.

        ``on_over`` is called when it has ended or failed, not when it gave way. Raises AssertionError for groups that
        share a worker.
        """
        assert not set(source.worker_ids) & set(destination.worker_ids), "groups that share a worker"
        as_tokens = going.kind is MigrationKind.TOKENS
        if as_tokens and (not state.num_output or state.on_trial or state.remote or state.recompute):
            return []
        blocks, block_size = destination.blocks, self._cluster.limits.block_size
        num_cached_tokens, needed = blocks.cached_prefix(state, state.num_computed)
        if needed + blocks.watermark > blocks.num_free:
            return []
        num_cached_blocks = blocks.admit(state, num_cached_tokens) // block_size
        trip = Trip(state, source, destination, now_ns, lambda m: self._over(m, on_over))
        migration: Passage
        if as_tokens:
            migration = TokenRelocation(
                self._cluster, trip, max_rounds=MAX_ROUNDS,
                max_step_tokens=going.max_step_tokens or self._cluster.limits.max_num_batched_tokens,
                num_cached_blocks=num_cached_blocks,
                is_paced=bool(going.may_change), on_kv=None if MigrationKind.KV not in going.may_change else (
                    lambda m, there, now: self._go_on_as_kv(m, there, on_over, now)
                ),
            )
        else:
            migration = Relocation(
                self._cluster, trip, TransferPurpose.MIGRATION, max_rounds=MAX_ROUNDS,
                num_cached_blocks=num_cached_blocks, max_final_blocks=going.max_final_blocks,
            )
        self.under_way.append(migration)
        return migration.advance(now_ns)

    def _go_on_as_kv(
        self, before: TokenRelocation, num_blocks: int, on_over: Callable[[Passage], None], now_ns: int
    ) -> list[Action]:
        """Go on with a migration as KV that went as tokens; return the actions. The destination has the leading
        ``num_blocks``, computed or found cached."""
        self.under_way.remove(before)
        trip = Trip(before.state, before.source, before.destination, now_ns, lambda m: self._over(m, on_over))
        migration = Relocation(
            self._cluster, trip, TransferPurpose.MIGRATION, max_rounds=MAX_ROUNDS, num_cached_blocks=num_blocks,
            max_final_blocks=before.num_final_blocks,
        )
        migration.started_ns, migration.num_tokens = before.started_ns, before.num_tokens
        migration.num_computed_blocks = num_blocks - before.num_cached_blocks
        migration.num_cached_blocks = before.num_cached_blocks
        self.under_way.append(migration)
        return migration.advance(now_ns)

    def _over(self, migration: Passage, on_over: Callable[[Passage], None]) -> list[Action]:
        """Take out a migration that has ended or failed, call ``on_over`` with it, and count it; return its record,
        none for a failed one."""
        self.under_way.remove(migration)
        on_over(migration)
        counters = self._cluster.counters
        if migration.phase is RelocationPhase.FAILED:
            counters.num_failed_migrations += 1
            return []
        counters.num_migrations += 1
        counters.migrated_bytes += migration.num_bytes
        counters.num_token_migrations += migration.kind is MigrationKind.TOKENS
        counters.migrated_tokens += migration.num_tokens
        counters.migration_cached_blocks += migration.num_cached_blocks
        assert migration.ended_ns is not None and migration.stopped_ns is not None
        done: dict[str, object] = {
            "request": migration.state.request_id,
            "source": migration.source.group_id,
            "destination": migration.destination.group_id,
            "blocks": migration.num_sent_blocks - migration.num_cached_blocks - migration.num_computed_blocks,
            "rounds": migration.num_rounds,
            "bytes": migration.num_bytes,
            "stop_ms": (migration.ended_ns - migration.stopped_ns) / 1e6,
            "ms": (migration.ended_ns - migration.started_ns) / 1e6,
        }
        if migration.num_cached_blocks:
            done["cached_blocks"] = migration.num_cached_blocks
        if migration.kind is MigrationKind.TOKENS or migration.num_tokens:
            as_tokens = migration.kind is MigrationKind.TOKENS
            done |= {"went_as": "tokens" if as_tokens else "tokens, then kv", "tokens": migration.num_tokens}
        return [Record("migrated", migration.ended_ns, done)]

    def advance(self, now_ns: int) -> list[Action]:
        """Advance the migrations of which the source or the destination has changed; return the actions."""
        changed = {group.group_id for group in self._cluster.changed_groups()}
        actions: list[Action] = []
        for migration in list(self.under_way):
            if migration.source.group_id in changed or migration.destination.group_id in changed:
                actions += migration.advance(now_ns)
        return actions

    def after_steps(self, now_ns: int) -> list[Action]:
        """Cancel migrations as tokens whose request a newly planned step has taken away from its source (by a
        preemption), so that nothing of it is left at the destination at the end of an event. Returns the actions.

        A migration with tokens in a step of this event is cancelled at the begin of the next one: the driver has yet
        to look the step's blocks up, by the request's id.
        """
        left = [m for m in self.under_way if isinstance(m, TokenRelocation) and m.has_left]
        self.left_late = [m for m in left if m.is_computed_since(now_ns)]
        return [action for m in left if m not in self.left_late for action in m.cancel()]

    def before_event(self) -> list[Action]:
        """Cancel what ``after_steps`` has put off; return the actions."""
        late, self.left_late = self.left_late, []
        return [action for migration in late if migration in self.under_way for action in migration.cancel()]

    # --- effects of other moves -------------------------------------------------------------------------------

    def cancel(self, state: RequestState) -> list[Action]:
        """Cancel the migration of a request that is ending; return the actions, none where it does not migrate."""
        return [action for m in list(self.under_way) if m.state is state for action in m.cancel()]

    def give_way(self, worker_ids: Collection[WorkerId]) -> list[Action]:
        """Break off the migrations to or from these workers, whose layouts are about to change: the requests stay at
        their sources. Returns the actions that cancel transfers.

        Blocks reserved at a destination stay under another name until no transfer can write to them any more. So the
        request itself is free at once, whatever becomes of its source.
        """
        actions: list[Action] = []
        for migration in [m for m in self.under_way if any(w in worker_ids for w in m.worker_ids)]:
            self.under_way.remove(migration)
            self._cluster.counters.migrations_given_way += 1
            actions += self._leave(migration)
        return actions

    def _leave(self, migration: Passage) -> list[Action]:
        """Break one migration off, with its blocks at the destination kept under another name while a transfer may
        write to them; return the actions that cancel its transfers. A request that was ending is freed."""
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
            self._cluster.reap(state)  # its end waited for these transfers alone
        return [CancelTransfer(p.transfer.src, p.transfer.transfer_id) for p in transfers]

    def on_ended(self, pending: PendingTransfer, event: TransferEnded, now_ns: int) -> list[Action]:
        """Take the end of a transfer of a migration that gave way: free the blocks that it could write to, once no
        other writes to them. Returns no actions."""
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
        """Begin nothing when a transfer has ended, as nothing waits for transfers that were left behind."""
        return []

    def abandon(self, broken: Collection[Group]) -> tuple[set[TransferId], list[Action]]:
        """End the migrations of these groups, which are about to be dissolved after a death: requests start again if
        their source is among them, else stay at it. Returns the transfers that have lost their owner, and the
        actions."""
        moves: set[TransferId] = set()
        actions: list[Action] = []
        for migration in list(self.under_way):
            if migration.source in broken:
                moves |= migration.lose_source()
            elif migration.destination in broken:
                actions += migration.cancel()
        self.under_way[:] = [m for m in self.under_way if m.source not in broken]
        return moves, actions

    def check(self) -> None:
        """Check that no request takes part in two migrations, and that each one as tokens is a guest at its
        destination, and nowhere else. Raises AssertionError."""
        ids = [migration.state.request_id for migration in self.under_way]
        assert len(set(ids)) == len(ids), "a request takes part in two migrations"
        as_tokens = [m for m in self.under_way if m.kind is MigrationKind.TOKENS]
        guests = {(m.destination.group_id, m.state.request_id) for m in as_tokens}
        found = {(g.group_id, s.request_id) for g in self._cluster.groups.values() for s in g.guests.states}
        assert guests == found, f"{found} are guests, {guests} are on their way as tokens"
