"""One worker's way back to serving at home: after a death, a start or a sleep.

    FENCE   the survivor has its order (FenceWorker); steps, transfers and layout calls of the past come to an end
    MAP     the layers of its home are mapped again                            (tried again until it works)
    FILL    missing shards are fetched (core.moving.gather); those not fetched are asked for anew        (likewise)
    DONE    the survivor can serve at home

A worker that was started again goes the same way from FILL on: it comes back with its layers mapped and nothing in
them, since the model folder may hold other weights by now.

Not here: what a death does to groups and requests, and when a recovery begins (``recovering``).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from jettison.core.moving.gather import Gather
from jettison.core.moving.relayout import RETRY_NS, Relayout
from jettison.core.pending import CallAnswer, PendingCall
from jettison.core.ports import Action, CallFailed, LoadShard, Record
from jettison.core.state import ClusterState, WorkerState
from jettison.memory.layout import LayoutSpec
from jettison.types import WorkerId


class RecoveryPhase(StrEnum):
    """The phases of one recovery, in the order of the module's table."""

    FENCE = "fence"
    MAP = "map"
    FILL = "fill"
    DONE = "done"


class Recovery:
    """One worker's way back to serving at home: a survivor, one started again, or a sleeper that is woken."""

    def __init__(self, cluster: ClusterState, worker: WorkerState, home: LayoutSpec, now_ns: int) -> None:
        self._cluster = cluster
        self.worker = worker
        self._home = home
        self.phase = RecoveryPhase.FENCE
        self.relayouts: list[Relayout] = []
        """Layout changes under way: of past moves, or its own attempt at MAP."""
        self._fetching = Gather(cluster, self, (worker.worker_id,))
        """The present attempt at FILL, or none yet."""
        self._retry_ns = 0
        self._started_ns = now_ns
        self.trouble: str | None = None
        """Why a shard could not be fetched at the last attempt; it is asked for again all the same."""
        self._told: str | None = None
        """The trouble that has been recorded: not every attempt is recorded."""
        self.end = "recovered"
        """The record's kind when it is done. The end of a restore, and a sleeper's wake, do not count as recoveries."""
        self.is_loaded = False
        """At the first attempt the machine's copy or the folder is asked for shards, not peers."""
        self.on_end: Callable[[WorkerId, int], dict[str, object]] | None = None
        """Called when it is done; returns fields to add to the record."""
        self._mapped_ns = now_ns

    # --- events -----------------------------------------------------------------------------------------------

    def inherit(self, pending: PendingCall) -> None:
        """Take over a call that an abandoned move had under way at this worker: it must end first (FENCE)."""
        pending.owner = self
        if isinstance(pending.waiter, Relayout):
            pending.waiter.call_off()
            self.relayouts.append(pending.waiter)
        else:
            pending.waiter = self

    def on_answer(self, pending: PendingCall, event: CallAnswer, now_ns: int) -> list[Action]:
        """Take the end of an inherited load; a failed one is tried again later. Returns the record of a new trouble."""
        assert isinstance(pending.call, LoadShard), pending
        if isinstance(event, CallFailed):
            self._retry_ns = now_ns + RETRY_NS
            return self._tell_trouble(now_ns)
        self.worker.unfilled.discard(pending.call.shard)
        return []

    def go_on(self, now_ns: int) -> list[Action]:
        """Note calls and transfers that were answered; failed ones are tried again later. Returns the record of a new
        trouble. All recoveries are advanced at each event."""
        for relayout in [r for r in self.relayouts if r.is_over]:
            self.relayouts.remove(relayout)
            self._retry_ns = now_ns + RETRY_NS if relayout.failure is not None else 0
        trouble = self._fetching.take_failure()
        if trouble is None:
            return []
        self._retry_ns = now_ns + RETRY_NS
        self.trouble = trouble
        return self._tell_trouble(now_ns)

    def abandon(self) -> None:
        """Give the recovery up, as the worker has died again."""
        self._fetching.call_off()

    # --- progress ---------------------------------------------------------------------------------------------

    def advance(self, now_ns: int, *, is_fenced: bool, is_waiting: bool) -> list[Action]:
        """Go as far as the state allows; return the actions. ``is_fenced``: it has answered all fences. ``is_waiting``:
        a transfer of a past move, to or from here, has not ended."""
        actions: list[Action] = []
        if self.phase is RecoveryPhase.FENCE:
            if not is_fenced:
                return []
            self._release_ghosts()
            if is_waiting or self.worker.ghosts or self._cluster.book.calls_of(self):
                return []
            if self._cluster.groups_of[self.worker.worker_id]:
                return [self._done(now_ns)]
            if self.worker.ledger.num_held:
                return []  # blocks of a request that was on its way here, and stays at its source
            self.phase = RecoveryPhase.MAP
        if self.phase is RecoveryPhase.MAP:
            if self.worker.layout != self._home:
                return self._map(now_ns)
            self.phase, self._mapped_ns = RecoveryPhase.FILL, now_ns
        if self.phase is RecoveryPhase.FILL:
            if self.worker.unfilled:
                return self._fill(now_ns)
            # Cached blocks were computed for the layers of another stage.
            self.worker.ledger.forget_cached()
            actions.append(self._done(now_ns))
        return actions

    def _release_ghosts(self) -> None:
        for ghost in [ghost for ghost, transfers in self.worker.ghosts.items() if not transfers]:
            self.worker.ledger.release(ghost)
            del self.worker.ghosts[ghost]

    def _map(self, now_ns: int) -> list[Action]:
        if self.relayouts or now_ns < self._retry_ns:
            return []
        relayout = Relayout(self._cluster, self, self.worker, self._home, shrinks=True)
        self.relayouts.append(relayout)
        return relayout.start()

    def _fill(self, now_ns: int) -> list[Action]:
        """Fetch missing shards, with every holder asked anew once no fetch is under way; return the actions."""
        if not self._fetching.is_idle or now_ns < self._retry_ns:
            return []
        self._fetching = Gather(self._cluster, self, (self.worker.worker_id,), loads_first=self.is_loaded)
        self.is_loaded = False
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
        counters = self._cluster.counters
        if self.end == "recovered":
            counters.num_recoveries += 1
            counters.recovery_ns += took_ns
        elif self.end == "woken":
            counters.num_wakes += 1
            counters.wake_ns += took_ns
        fields: dict[str, object] = {"worker": worker_id, "ms": took_ns / 1e6}
        if self.on_end is not None:
            fields |= {"map_ms": (self._mapped_ns - self._started_ns) / 1e6, "pulled_bytes": self._fetching.num_bytes}
            fields |= self.on_end(worker_id, now_ns)
        if self._told is not None:
            fields["was_stuck"] = True
        return Record(self.end, now_ns, fields)
