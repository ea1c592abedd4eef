"""The store: KV of requests that was copied while they ran, kept when they are freed, and brought back.

    CHECKPOINT   it runs, and its leading blocks are in host pools as well (``core.moving.checkpoints`` copies them)

    CHECKPOINT --freed--> STORED --> IN --> CHECKPOINT       (the phases of ``core.moving.hostbook``)
"""

from __future__ import annotations

from jettison.core.moving.hostbook import HostBook
from jettison.core.moving.hostedkv import HostedKV, HostedPhase
from jettison.core.preemption import Preemption
from jettison.core.requests import Phase, RequestState
from jettison.core.serving.group import Group
from jettison.types import WorkerId


class CheckpointStore(HostBook):
    """The checkpoints of a cluster: KV in host pools of requests that run on, or have been freed."""

    @property
    def returns_beside_steps(self) -> bool:
        """Whether KV that comes back within one worker is copied beside steps; only with prefetching."""
        return self._cluster.params.offline.prefetches

    def checkpoints(self) -> list[HostedKV]:
        """The entries of all requests that run with a checkpoint."""
        return [entry for entry in self.entries.values() if entry.phase is HostedPhase.CHECKPOINT]

    def awaiting(self) -> list[HostedKV]:
        """The entries of all freed requests whose last blocks are still on their way to host pools."""
        return [e for e in self.entries.values() if e.awaits_pieces and e.state.ending is None]

    def blocks_on_their_way(self, group: Group) -> int:
        """Blocks that the group's requests on their way back from host pools still have to be sent."""
        return sum(entry.num_blocks - entry.num_sent for entry in self.of(group, HostedPhase.IN))

    def owed(self, group: Group) -> list[HostedKV]:
        """The entries of a group's freed online requests, which take blocks again before newcomers do; no newcomer
        waits for offline ones."""
        return [entry for entry in super().owed(group) if not entry.state.is_offline]

    def _came_back(self, entry: HostedKV) -> None:
        """Keep a request's entry as its checkpoint when all of its KV is back: the host has what it had before."""
        entry.phase = HostedPhase.CHECKPOINT
        del self._travelling[entry.state.request_id]
        self._cluster.counters.prefetched_blocks += entry.num_blocks

    def cancel(self, state: RequestState) -> None:
        """Forget the entry of a request that is ending. Where pieces of a freed one are under way, it is forgotten when
        they have ended."""
        entry = self.entries.get(state.request_id)
        if entry is not None and (entry.phase is HostedPhase.CHECKPOINT or not state.transfers):
            self.forget(entry)

    def lose_pool(self, worker_id: WorkerId) -> None:
        """Give up all entries in the pool of a dead worker: running requests go on without a checkpoint, freed ones are
        computed again."""
        for entry in self.checkpoints():
            if worker_id in entry.pools.worker_ids and entry.state.ending is None:
                self.forget(entry)
        super().lose_pool(worker_id)

    def empty(self) -> None:
        """Give up all checkpoints. Freed requests are computed again, those on their way back once nothing travels."""
        for entry in list(self.entries.values()):
            if entry.phase is HostedPhase.CHECKPOINT:
                self.forget(entry)
                continue
            entry.lost = Preemption.UNHOSTED
            if entry.phase is HostedPhase.IN:
                self.break_off(entry)
            elif entry.phase is HostedPhase.STORED and entry.state.ending is None:
                self.give_up(entry.state, Preemption.UNHOSTED)

    def _check(self, entry: HostedKV) -> None:
        """A running request's entry fits its phase, or ``HostBook`` checks it. Raises AssertionError otherwise."""
        if entry.phase is not HostedPhase.CHECKPOINT:
            super()._check(entry)
            return
        assert entry.state.phase in (Phase.RUNNING, Phase.MOVING), entry.state
        assert entry.state.request_id not in self._travelling, entry.state
