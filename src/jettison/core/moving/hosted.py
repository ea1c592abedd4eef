"""All KV in host pools of a cluster: what was swapped out, and what was checkpointed. A request is in one of the two.

Here is what concerns both: a layout that changes, an ending, a death. What each does is in ``core.moving.swapping``
and ``core.moving.store``.
"""

from __future__ import annotations

from collections.abc import Collection

from jettison.core.moving.hostedkv import HostedPhase
from jettison.core.moving.store import CheckpointStore
from jettison.core.moving.swapping import Swap
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.types import TransferId, WorkerId


class Hosted:
    """The two together."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.store = CheckpointStore(cluster)
        self.swap = Swap(cluster, self.store)
        self._both = self.swap, self.store

    @property
    def is_idle(self) -> bool:
        """No request has KV in a host pool."""
        return not self.swap.entries and not self.store.entries

    def absent_blocks(self, group: Group) -> int:
        """What requests will take again before newcomers do, and do not hold now; offline ones that were freed are in
        the way of no request."""
        if self.is_idle:
            return 0
        owed = [(book, entry) for book in self._both for entry in book.owed(group)]
        return sum(book.blocks_to_return(entry) for book, entry in owed if entry.phase is not HostedPhase.OUT)

    def cancel(self, state: RequestState) -> None:
        """The request is ending."""
        for book in self._both:
            if book.entries:
                book.cancel(state)

    def give_way(self, worker_ids: Collection[WorkerId]) -> None:
        """Layouts of these workers are about to change: what is on its way there or back is broken off."""
        for book in self._both:
            if book.entries:
                book.give_way(worker_ids)

    def abandon(self, broken: Collection[Group]) -> set[TransferId]:
        """These groups are about to be dissolved because a worker is dead: their requests start again. Returns the
        pieces under way: later ones into their slots follow those."""
        return self.swap.abandon(broken) | self.store.abandon(broken)

    def lose_pool(self, worker_id: WorkerId) -> None:
        """A worker is dead, and its pool with it."""
        self._cluster.workers[worker_id].pool.forget_contents()
        for book in self._both:
            book.lose_pool(worker_id)

    def check(self) -> None:
        """The pools' books, and that exactly the requests with KV in host pools hold slots. Raises AssertionError."""
        assert not self.swap.entries.keys() & self.store.entries.keys(), "swapped out and checkpointed"
        for book in self._both:
            book.check()
        entries = self.swap.entries | self.store.entries
        for worker_id, worker in self._cluster.workers.items():
            worker.pool.check()
            here = {r for r, entry in entries.items() if worker_id in entry.pools.worker_ids} | worker.copying
            assert set(worker.pool.holders()) == here, f"host slots of worker {worker_id}: {worker.pool.holders()}"
