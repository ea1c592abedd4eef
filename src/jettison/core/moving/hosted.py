"""All KV in host pools of a cluster: what was swapped out, and what was checkpointed. A request has KV in one of the
two.

What concerns both is here: a layout that changes, a request that ends, a death. What each does is in
``core.moving.swapping`` and ``core.moving.store``.
"""

from __future__ import annotations

from collections.abc import Collection

from jettison.core.moving.hostbook import HostBook
from jettison.core.moving.hostedkv import HostedKV, HostedPhase
from jettison.core.moving.store import CheckpointStore
from jettison.core.moving.swapping import Swap
from jettison.core.requests import RequestState
from jettison.core.serving.group import Group
from jettison.core.state import ClusterState
from jettison.types import TransferId, WorkerId


class Hosted:
    """The swap and the checkpoint store of one cluster, and what is done to both."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.store = CheckpointStore(cluster)
        self.swap = Swap(cluster, self.store)
        self._both: tuple[HostBook, HostBook] = self.swap, self.store

    @property
    def is_idle(self) -> bool:
        """Whether no request has KV in a host pool."""
        return not self.swap.entries and not self.store.entries

    def absent_blocks(self, group: Group) -> int:
        """Blocks of a group that requests in host pools will take again before newcomers do, and do not hold now; 0:
        none. Freed offline requests do not count, as no newcomer waits for them."""
        if self.is_idle:
            return 0
        owed = [(book, entry) for book in self._both for entry in book.owed(group)]
        return sum(book.blocks_to_return(entry) for book, entry in owed if entry.phase is not HostedPhase.OUT)

    def offline_coming(self, group: Group) -> list[tuple[HostBook, HostedKV]]:
        """The offline requests of a group that are on their way back, each with its book."""
        coming = [(book, entry) for book in self._both for entry in book.of(group, HostedPhase.IN)]
        return [(book, entry) for book, entry in coming if entry.state.is_offline]

    def cancel(self, state: RequestState) -> None:
        """Forget the KV in host pools of a request that is ending."""
        for book in self._both:
            if book.entries:
                book.cancel(state)

    def give_way(self, worker_ids: Collection[WorkerId]) -> None:
        """Break off all KV on its way between host pools and arenas of these workers, whose layouts are about to
        change."""
        for book in self._both:
            if book.entries:
                book.give_way(worker_ids)

    def abandon(self, broken: Collection[Group]) -> set[TransferId]:
        """Forget the KV of these groups' requests, as the groups are about to be dissolved after a death. Returns the
        pieces under way: later copies into their slots have to follow them."""
        return self.swap.abandon(broken) | self.store.abandon(broken)

    def lose_pool(self, worker_id: WorkerId) -> None:
        """Give up all KV in the host pool of a dead worker."""
        self._cluster.workers[worker_id].pool.forget_contents()
        for book in self._both:
            book.lose_pool(worker_id)

    def check(self) -> None:
        """The pools' books are right, and exactly the requests with KV in host pools hold slots. Raises AssertionError
        otherwise."""
        assert not self.swap.entries.keys() & self.store.entries.keys(), "swapped out and checkpointed"
        for book in self._both:
            book.check()
        entries = self.swap.entries | self.store.entries
        for worker_id, worker in self._cluster.workers.items():
            worker.pool.check()
            here = {r for r, entry in entries.items() if worker_id in entry.pools.worker_ids} | worker.copying
            assert set(worker.pool.holders()) == here, f"host slots of worker {worker_id}: {worker.pool.holders()}"
