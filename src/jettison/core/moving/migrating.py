"""One running request moves from one group to another while it goes on decoding (Llumnix; MELL section V).

    COPY           rounds: full blocks travel while the request decodes at its source; what it fills meanwhile is the
                   next round's
    FINAL          at most 16 blocks are left: the request stands still, finishes its step in flight, and they travel
    DONE           the destination has everything: it owns the request
    FALLING_BACK   a transfer failed, the destination has no room to grow, rounds do not converge, or the request is
                   ending: transfers are called off; its blocks at the destination are given back when they have ended
    FAILED         they are: the request has never left its source

Ownership: the source owns the request, and has all of its KV, in every phase before DONE; the destination's blocks are
reserved before the first byte travels. The groups may differ in shape but share no worker. Who moves where, and when,
is a policy's decision (``core.ladder.migrate`` for the Llumnix baseline).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from jettison.core.pending import PendingTransfer, Purpose
from jettison.core.ports import Action, CancelTransfer, Record, SendKV, TransferEnded
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.policy.kvmoves import KVMovePlan, plan_kv_moves
from jettison.types import TransferId, WorkerId

MAX_FINAL_BLOCKS = 16
"""Blocks sent while a request stands still; what is more is sent while it decodes (Llumnix's last stage, MELL)."""

MAX_ROUNDS = 8
"""Rounds with decoding before a migration is given up: the request grows as fast as it is copied."""


class MigrationPhase(StrEnum):
    """See the module's table."""

    COPY = "copy"
    FINAL = "final"
    DONE = "done"
    FALLING_BACK = "falling_back"
    FAILED = "failed"


class Migration:
    """One request on its way from ``source`` to ``destination``; ``start`` reserves and sends."""

    def __init__(
        self, cluster: ClusterState, state: RequestState, source: Group, destination: Group,
        on_over: Callable[[Migration], None] = lambda migration: None,
    ) -> None:
        """``on_over`` is called once, at its end."""
        self._cluster = cluster
        self._on_over = on_over
        self.state = state
        self.source = source
        self.destination = destination
        self.phase = MigrationPhase.COPY
        self.failure: str | None = None
        self.lost_transfer = False
        """A transfer ended before its last byte, and nobody had called it off."""
        self.num_rounds = 0
        self.num_bytes = 0
        self._plan: tuple[KVMovePlan, ...] = ()
        self._moves: dict[TransferId, SendKV] = {}
        self._num_sent = 0
        """Leading blocks that have been sent."""
        self._final_sent = False
        self._started_ns = 0
        self._stopped_ns: int | None = None

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """Both groups' workers."""
        return (*self.source.worker_ids, *self.destination.worker_ids)

    @property
    def is_over(self) -> bool:
        """Nothing left to do."""
        return self.phase in (MigrationPhase.DONE, MigrationPhase.FAILED)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that the destination holds for the request."""
        if self.is_over:
            return 0
        return max(ledger.num_blocks_of(self.state.request_id) for ledger in self.destination.blocks.ledgers)

    # --- events -----------------------------------------------------------------------------------------------

    def start(self, now_ns: int) -> list[Action]:
        """Reserve at the destination and send the first round. The request must be running, all of its KV in place."""
        assert self.state.phase is Phase.RUNNING and self.state.group_id == self.source.group_id, self.state
        assert not set(self.source.worker_ids) & set(self.destination.worker_ids), "groups that share a worker"
        self._started_ns = now_ns
        self._plan = plan_kv_moves(self.state.kv_at, self.destination.stages)
        needed = self.source.limits.blocks_for(self.state.num_tokens)
        if needed + self.destination.blocks.watermark > self.destination.blocks.num_free:
            self._fail("no room at the destination")
            return []
        self._reserve(needed)
        return self.advance(now_ns)

    def on_ended(self, pending: PendingTransfer, event: TransferEnded, now_ns: int) -> list[Action]:
        """Take the end of one of this migration's transfers."""
        del self._moves[event.transfer_id]
        self._cluster.touch(self.state)
        self.num_bytes += event.num_bytes
        if not event.complete and self.phase is not MigrationPhase.FALLING_BACK:
            self.lost_transfer = True
            return self._fall_back("a transfer did not complete")
        return []

    def go_on(self, now_ns: int) -> list[Action]:
        """A transfer has ended."""
        return self.advance(now_ns)

    def cancel(self) -> list[Action]:
        """Leave the request where it is (it is ending, or somebody thought better of it)."""
        if self.is_over or self.phase is MigrationPhase.FALLING_BACK:
            return []
        return self._fall_back("cancelled")

    def let_go(self) -> None:
        """Leave the request where it is, at once: the caller takes care of what is under way and reserved."""
        self.phase = MigrationPhase.FAILED
        self.failure = "it gave way to a change of layouts"
        self._moves.clear()
        if self.state.phase is Phase.RUNNING:
            self.state.paused = False
            self._cluster.touch(self.state)

    def advance(self, now_ns: int) -> list[Action]:
        """Go as far as the state allows."""
        if self._moves or self.is_over:
            return []
        state = self.state
        if self.phase is not MigrationPhase.FALLING_BACK and (
            state.ending is not None or state.phase is not Phase.RUNNING or state.group_id != self.source.group_id
        ):
            return self._fall_back("the request has left its source by itself")
        match self.phase:
            case MigrationPhase.COPY:
                return self._next_round(now_ns)
            case MigrationPhase.FINAL if self._final_sent:
                return self._hand_over(now_ns)
            case MigrationPhase.FINAL if not state.num_pending:
                self._final_sent = True
                actions = self._send(self.source.limits.blocks_for(state.num_computed))
                return actions if self._moves or self.phase is not MigrationPhase.FINAL else self._hand_over(now_ns)
            case MigrationPhase.FALLING_BACK:
                self._give_back()
        return []

    # --- rounds -----------------------------------------------------------------------------------------------

    def _next_round(self, now_ns: int) -> list[Action]:
        state = self.state
        if self.source.limits.blocks_for(state.num_computed) - self._num_sent > MAX_FINAL_BLOCKS:
            if self.num_rounds == MAX_ROUNDS:
                return self._fall_back("the request grows as fast as it is copied")
            return self._send(state.num_computed // self._cluster.limits.block_size)
        self.phase = MigrationPhase.FINAL
        self._stopped_ns = now_ns
        state.paused = True
        self._cluster.touch(state)
        return self.advance(now_ns)

    def _send(self, end: int) -> list[Action]:
        """Send the blocks up to ``end``; the destination's table grows first."""
        state, first = self.state, self._num_sent
        missing = end - min(ledger.num_blocks_of(state.request_id) for ledger in self.destination.blocks.ledgers)
        if missing > 0:
            if any(not ledger.can_allocate(missing) for ledger in self.destination.blocks.ledgers):
                return self._fall_back("the destination is full")
            self._reserve(missing)
        self.num_rounds += 1
        self._num_sent = end
        actions: list[Action] = []
        for part in self._plan if end > first else ():
            there = self._cluster.workers[part.src].ledger.table(state.request_id).ids[first:end]
            here = self._cluster.workers[part.dst].ledger.table(state.request_id).ids[first:end]
            move = self._cluster.send_kv(
                state, part.src, part.dst, part.layers, there, here,
                owner=self, waiter=self, purpose=Purpose.MIGRATION,
            )
            self._moves[move.transfer_id] = move
            actions.append(move)
        return actions

    def _reserve(self, num_blocks: int) -> None:
        for ledger in self.destination.blocks.ledgers:
            ledger.allocate(self.state.request_id, num_blocks)

    # --- ends -------------------------------------------------------------------------------------------------

    def _hand_over(self, now_ns: int) -> list[Action]:
        """The last block has arrived: from here on the request is the destination's."""
        state = self.state
        self.phase = MigrationPhase.DONE
        self._on_over(self)
        self.source.queues.take_out(state)
        for ledger in self.source.blocks.ledgers:
            ledger.release(state.request_id)
        state.paused = False
        state.num_sealed = 0  # its blocks are new ones, not yet findable
        self.destination.queues.resume(state)
        counters = self._cluster.counters
        counters.num_migrations += 1
        counters.migrated_bytes += self.num_bytes
        assert self._stopped_ns is not None
        done = {
            "request": state.request_id,
            "source": self.source.group_id,
            "destination": self.destination.group_id,
            "blocks": self._num_sent,
            "rounds": self.num_rounds,
            "bytes": self.num_bytes,
            "stop_ms": (now_ns - self._stopped_ns) / 1e6,
            "ms": (now_ns - self._started_ns) / 1e6,
        }
        return [Record("migrated", now_ns, done)]

    def _fall_back(self, reason: str) -> list[Action]:
        self.phase = MigrationPhase.FALLING_BACK
        self.failure = reason
        if self.state.phase is Phase.RUNNING:
            self.state.paused = False
            self._cluster.touch(self.state)
        if not self._moves:
            self._give_back()
        return [CancelTransfer(move.src, transfer_id) for transfer_id, move in self._moves.items()]

    def _give_back(self) -> None:
        for ledger in self.destination.blocks.ledgers:
            if ledger.has(self.state.request_id):
                ledger.release(self.state.request_id)
        self._cluster.counters.num_failed_migrations += 1
        self._fail(self.failure or "called off")
        self._cluster.reap(self.state)

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.phase = MigrationPhase.FAILED
        self._on_over(self)
