"""Workers set aside: alive, with an empty layout, in no group, no home and no plan, until they are woken.

    serving (a group of its own, with nothing in it) --set_aside--> its layout is emptied (tried again until it is)
    aside --wake--> its home is mapped and filled, as after a death --> serving

A worker that dies while it is aside comes back aside: what its new process has mapped is given up again. Who is set
aside, and when, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from jettison.core.moving.moves import Moves
from jettison.core.moving.recovering import Recoveries
from jettison.core.moving.relayout import RETRY_NS, Relayout
from jettison.core.ports import Action, Record
from jettison.core.state import ClusterState
from jettison.memory.layout import LayoutSpec
from jettison.types import LayerRange, WorkerId

EMPTY = LayoutSpec(frozenset(), LayerRange(0, 0))


class Aside:
    """All that are set aside, or on their way there."""

    def __init__(
        self, cluster: ClusterState, moves: Moves, recoveries: Recoveries, why_needed: Callable[[WorkerId], str | None]
    ) -> None:
        """``why_needed``: why some request could not be held without a worker; None: there is no such request."""
        self._cluster = cluster
        self._moves = moves
        self._recoveries = recoveries
        self._why_needed = why_needed
        self._emptying: dict[WorkerId, Relayout] = {}
        self._retry_ns = 0

    @property
    def is_idle(self) -> bool:
        """No layout is being emptied."""
        return not self._emptying

    # --- orders -----------------------------------------------------------------------------------------------

    def why_not(self, worker_id: WorkerId) -> str | None:
        """Why a worker cannot be set aside now; None: it can. It must serve by itself, with nothing in its group or its
        memory and no change of layers under way; others must go on serving, and hold what has been accepted."""
        worker, groups = self._cluster.workers[worker_id], self._cluster.groups_of[worker_id]
        if not worker.alive or worker.is_aside:
            return f"worker {worker_id} is {'aside already' if worker.alive else 'dead'}"
        if worker_id in self._moves.moving_workers():
            return f"layers of worker {worker_id} are changing"
        if len(groups) != 1 or groups[0].worker_ids != (worker_id,):
            return f"worker {worker_id} does not serve by itself"
        group = groups[0]
        if group.queues.all_requests() or group.in_flight or group.paused or worker.num_relayouts_open or worker.ghosts:
            return f"worker {worker_id} is in use"
        if worker.ledger.num_held:
            return f"worker {worker_id} has blocks for a request that is on its way there"
        if any(worker_id in pending.ends for pending in self._cluster.book.transfers.values()):
            return f"something is on its way to or from worker {worker_id}"
        if len(self._cluster.groups) == 1:
            return f"worker {worker_id} is the last that serves"
        return self._why_needed(worker_id)

    def set_aside(self, worker_id: WorkerId, now_ns: int) -> list[Action]:
        """Begin. Raises ValueError where ``why_not`` says so."""
        if (why := self.why_not(worker_id)) is not None:
            raise ValueError(why)
        worker = self._cluster.workers[worker_id]
        self._cluster.dissolve(self._cluster.groups_of[worker_id][0])
        worker.is_aside = True
        self._cluster.num_roster_changes += 1
        return [Record("set_aside", now_ns, {"worker": worker_id}), *self._empty(worker_id)]

    def wake(self, worker_id: WorkerId, now_ns: int) -> list[Action]:
        """Map and fill its home again. Raises ValueError for a worker that is not aside, or not yet."""
        worker = self._cluster.workers[worker_id]
        if not worker.is_aside or worker_id in self._emptying:
            raise ValueError(f"worker {worker_id} is not aside" + (" yet" if worker.is_aside else ""))
        worker.is_aside = False
        self._cluster.num_roster_changes += 1
        if worker.alive:  # a dead one is formed into its home when it is back
            self._recoveries.fill(worker_id, now_ns)
        return [Record("woken", now_ns, {"worker": worker_id})]

    def rejoined(self, worker_id: WorkerId) -> list[Action]:
        """A worker that was aside when it died is back, with the shards of its home mapped and empty."""
        return self._empty(worker_id)

    def lost(self, worker_id: WorkerId) -> None:
        """A worker is dead."""
        self._emptying.pop(worker_id, None)

    # --- progress ---------------------------------------------------------------------------------------------

    def _empty(self, worker_id: WorkerId) -> list[Action]:
        worker = self._cluster.workers[worker_id]
        worker.ledger.forget_cached()
        relayout = self._emptying[worker_id] = Relayout(self._cluster, self, worker, EMPTY, shrinks=True)
        return relayout.start()

    def go_on(self, now_ns: int) -> list[Action]:
        """A layout call has been answered."""
        for worker_id, relayout in list(self._emptying.items()):
            if relayout.is_over and relayout.failure is None:
                del self._emptying[worker_id]
            elif relayout.is_over:
                self._retry_ns = now_ns + RETRY_NS
        return []

    def advance(self, now_ns: int) -> list[Action]:
        """Try again what was refused."""
        if not self._emptying or now_ns < self._retry_ns:
            return []
        refused = [worker_id for worker_id, relayout in self._emptying.items() if relayout.is_over]
        return [action for worker_id in refused for action in self._empty(worker_id)]

    def check(self) -> None:
        """No group has a worker that is aside. Raises AssertionError."""
        for worker in self._cluster.workers.values():
            if worker.is_aside:
                assert not self._cluster.groups_of[worker.worker_id], f"{worker} is aside, and in a group"
                assert worker.worker_id not in self._recoveries.by_worker
