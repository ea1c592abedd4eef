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
    """Checkpoints of all requests of a cluster."""

    @property
    def returns_beside_steps(self) -> bool:
        """As it was copied there, unless prefetching is off."""
        return self._cluster.params.offline.prefetches

    def checkpoints(self) -> list[HostedKV]:
        """Entries of all requests that run with a checkpoint."""
        return [entry for entry in self.entries.values() if entry.phase is HostedPhase.CHECKPOINT]

    def owed(self, group: Group) -> list[HostedKV]:
        """Online requests alone: no newcomer waits for an offline one that was freed."""
        return [entry for entry in super().owed(group) if not entry.state.is_offline]

    def _came_back(self, entry: HostedKV) -> None:
        """What the host has is as good as before."""
        entry.phase = HostedPhase.CHECKPOINT
        del self._travelling[entry.state.request_id]
        self._cluster.counters.prefetched_blocks += entry.num_blocks

    def cancel(self, state: RequestState) -> None:
        """Of one that runs nothing is on its way from here, whatever else moves it."""
        entry = self.entries.get(state.request_id)
        if entry is not None and (entry.phase is HostedPhase.CHECKPOINT or not state.transfers):
            self.forget(entry)

    def lose_pool(self, worker_id: WorkerId) -> None:
        """Those that run go on without a checkpoint."""
        for entry in self.checkpoints():
            if worker_id in entry.pools.worker_ids and entry.state.ending is None:
                self.forget(entry)
        super().lose_pool(worker_id)

    def empty(self) -> None:
        """No request has a checkpoint any more. Those that were freed are computed again when nothing travels."""
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
        if entry.phase is not HostedPhase.CHECKPOINT:
            super()._check(entry)
            return
        assert entry.state.phase in (Phase.RUNNING, Phase.MOVING), entry.state
        assert entry.state.request_id not in self._travelling, entry.state
